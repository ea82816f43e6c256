#!/usr/bin/env bash
# Measures the program: `rdmc send` of one file from a host to 1, 2, … other hosts. Every host is a network namespace;
# tbf limits its port in both directions. Needs root, iproute2 and a kernel with network namespaces. Traffic stays
# inside the namespaces. Prints comma-separated values: receivers, the value of `--algorithm`, the median of the seconds
# of the whole command, the same over the time that the bytes take at the rate of a port, and the seconds of each round.
# More arguments of the program may follow an algorithm, after plus signs: `hybrid+--racks+0,2/1,3`. The second column
# has `;` in place of commas.
# `get` and `http` are no algorithms: the first receiver runs `rdmc get`, or curl, which gets the file from a server in
# Python over one plain TCP connection. They are measured only with one receiver. `gridftp` is globus-url-copy to a
# globus-gridftp-server at each receiver, without security; with several, the first one multicasts to the others
# (libglobus-xio-gridftp-multicast).
#
# With UPLINK_MBIT the hosts stand in RACKS racks (or sites), each in the rack after that of the host before it. Each
# rack has an uplink of that rate in either direction. QUEUE bytes wait at each port of a switch at most.
#
#   [DELAY_US=0] [RACKS=2] [UPLINK_MBIT=] [UPLINK_DELAY_US=0] [QUEUE=524288] [RDMC=PROGRAM] \
#                 benches/program.sh [HOSTS=8] [RATE_MBIT=200] [MIB=64]
#                                   [ROUNDS=3] [ALGORITHMS="auto sequential"]
#                                   [RECEIVERS="1 2 3 4 5 6 7"]
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${1:-8} rate=${2:-200} mib=${3:-64} rounds=${4:-3} algorithms=${5:-auto sequential}
receivers=${6:-$(seq -s ' ' $((hosts - 1)))}
name=rdmcbench$$ # Unique, so that several runs do not meet.
[ -n "${RDMC:-}" ] || cargo build --release --quiet -p rdmc-cli
program=${RDMC:-${CARGO_TARGET_DIR:-target}/release/rdmc}
. benches/namespaces.sh
work=$(mktemp -d)
pids=()
finish() {
    kill "${pids[@]}" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$work" "/etc/netns/$name-"*
    down
}
trap finish EXIT
if [ -n "${UPLINK_MBIT:-}" ]; then
    racks=${RACKS:-2}
    add_racks "$racks" "$UPLINK_MBIT"
    for ((i = 0; i < hosts; i++)); do add_host $i "rack$((i % racks))"; done
else
    add_bridge switch
    for ((i = 0; i < hosts; i++)); do add_host $i switch; done
fi
lay_cables
mkdir "$work/0"
head -c "${mib}M" /dev/urandom >"$work/0/file"
served=() # The ports at which the sender listens.
if [[ " $algorithms " == *" get"* ]]; then
    served+=(7472)
    ip netns exec "$name-0" "$program" serve --quiet --listen 10.77.0.1:7472 "$work/0" &
    pids+=($!)
fi
if [[ " $algorithms " == *" http "* ]]; then
    ip netns exec "$name-0" python3 -m http.server --bind 10.77.0.1 --directory "$work/0" 7473 >/dev/null 2>&1 &
    pids+=($!)
    served+=(7473)
fi
for ((i = 1; i < hosts; i++)); do
    mkdir "$work/$i"
    if [[ " $algorithms " == *" gridftp"* ]]; then
        # It asks for the name of its address: nobody waits for a name server.
        mkdir -p "/etc/netns/$name-$i"
        echo 'hosts: files' >"/etc/netns/$name-$i/nsswitch.conf"
        # It takes only names of users, who must be able to write there.
        chmod 755 "$work" && chmod 777 "$work/$i"
        ip netns exec "$name-$i" globus-gridftp-server -aa -anonymous-user nobody -anonymous-group nogroup \
            -control-interface "10.77.0.$((i + 1))" -data-interface "10.77.0.$((i + 1))" -p 7474 \
            -dc-whitelist tcp -fs-whitelist file,gridftp_multicast >/dev/null 2>&1 &
        pids+=($!)
    fi
    ip netns exec "$name-$i" "$program" recv --quiet --listen "10.77.0.$((i + 1)):7471" --dir "$work/$i" &
    pids+=($!)
done

# Until all listen.
until_listening() { # HOST PORT
    until [ -n "$(ip netns exec "$name-$1" ss -Hltn "( sport = $2 )")" ]; do sleep 0.1; done
}
for port in "${served[@]}"; do until_listening 0 "$port"; done
for ((i = 1; i < hosts; i++)); do
    until_listening $i 7471
    [[ " $algorithms " != *" gridftp"* ]] || until_listening $i 7474
done

# Brings the file to the first N receivers; prints the seconds it took: bring_to N ALGORITHM[+ARGUMENT...]
bring_to() {
    local to='' begun ended i arguments command urls=()
    IFS=+ read -ra arguments <<<"$2"
    for ((i = 1; i <= $1; i++)); do
        to+=${to:+,}10.77.0.$((i + 1)):7471
        urls+=("ftp://10.77.0.$((i + 1)):7474$work/$i/file")
    done
    command=("$name-0" "$program" send --quiet --algorithm "${arguments[@]}" --to "$to" "$work/0/file")
    [ "${arguments[0]}" != get ] ||
        command=("$name-1" "$program" get --quiet "${arguments[@]:1}" 10.77.0.1:7472/file "$work/1")
    [ "${arguments[0]}" != http ] || command=("$name-1" curl -sf -o "$work/1/file" http://10.77.0.1:7473/file)
    if [ "${arguments[0]}" = gridftp ]; then
        printf '%s\n' "${urls[@]:1}" >"$work/urls"
        command=("$name-0" globus-url-copy "${arguments[@]:1}")
        [ "$1" = 1 ] || command+=(-multicast "$work/urls")
        command+=("file://$work/0/file" "${urls[0]}")
    fi
    begun=$(date +%s%N)
    ip netns exec "${command[@]}" || exit 1
    ended=$(date +%s%N)
    for ((i = 1; i <= $1; i++)); do
        cmp "$work/0/file" "$work/$i/file" || exit 1
        rm "$work/$i/file"
    done
    awk "BEGIN { printf \"%.3f\", ($ended - $begun) / 1e9 }"
}

cases=()
for n in $receivers; do
    for algorithm in $algorithms; do
        [[ $algorithm =~ ^(get|http) && $n != 1 ]] || cases+=("$n,$algorithm")
    done
done
declare -A taken=()
for ((round = 0; round <= rounds; round++)); do
    for case in "${cases[@]}"; do
        seconds=$(bring_to "${case%%,*}" "${case#*,}")
        # The first round warms up.
        [ "$round" = 0 ] || taken[$case]+=" $seconds"
    done
done
echo "receivers,algorithm,seconds,over_wire,rounds"
for case in "${cases[@]}"; do
    all=${taken[$case]# } algorithm=${case#*,}
    median=$(tr ' ' '\n' <<<"$all" | sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }')
    over=$(awk "BEGIN { printf \"%.3f\", $median / ($mib * 1048576 * 8 / ($rate * 1e6)) }")
    echo "${case%%,*},${algorithm//,/;},$median,$over,$all"
done
