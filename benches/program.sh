#!/usr/bin/env bash
# Measures the program: `rdmc send` of one file from a host to 1, 2, … other hosts. Every host is a network namespace;
# tbf limits its port in both directions. Needs root, iproute2 and a kernel with network namespaces. Traffic stays
# inside the namespaces. Prints comma-separated values: receivers, the value of `--algorithm`, the median of the seconds
# of the whole command, the same over the time that the bytes take at the rate of a port, and the seconds of each round.
# More arguments of the program may follow an algorithm, after commas: `auto,--racks,none`; they are printed with `+`.
#
# With UPLINK_MBIT the hosts stand in two racks, each in another one than the host before it. A link of that rate in
# either direction joins the racks.
#
#   [DELAY_US=0] [UPLINK_MBIT=] [UPLINK_DELAY_US=0] benches/program.sh [HOSTS=8] [RATE_MBIT=200] [MIB=64]
#                                   [ROUNDS=3] [ALGORITHMS="auto sequential"]
#                                   [RECEIVERS="1 2 3 4 5 6 7"]
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${1:-8} rate=${2:-200} mib=${3:-64} rounds=${4:-3} algorithms=${5:-auto sequential}
receivers=${6:-$(seq -s ' ' $((hosts - 1)))}
name=rdmcbench$$ # Unique, so that several runs do not meet.
cargo build --release --quiet -p rdmc-cli
program=${CARGO_TARGET_DIR:-target}/release/rdmc
. benches/namespaces.sh
work=$(mktemp -d)
pids=()
finish() {
    kill "${pids[@]}" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$work"
    down
}
trap finish EXIT
if [ -n "${UPLINK_MBIT:-}" ]; then
    for rack in 0 1; do add_bridge "rack$rack"; done
    add_uplink "$UPLINK_MBIT"
    for ((i = 0; i < hosts; i++)); do add_host $i "rack$((i % 2))"; done
else
    add_bridge switch
    for ((i = 0; i < hosts; i++)); do add_host $i switch; done
fi
lay_cables
head -c "${mib}M" /dev/urandom >"$work/file"
for ((i = 1; i < hosts; i++)); do
    mkdir "$work/$i"
    ip netns exec "$name-$i" "$program" recv --quiet --listen "10.77.0.$((i + 1)):7471" --dir "$work/$i" &
    pids+=($!)
done

# Sends to the first N receivers; prints the seconds it took: send_to N ALGORITHM[,ARGUMENT...]
send_to() {
    local to='' begun ended i arguments
    IFS=, read -ra arguments <<<"$2"
    for ((i = 1; i <= $1; i++)); do to+=${to:+,}10.77.0.$((i + 1)):7471; done
    begun=$(date +%s%N)
    ip netns exec "$name-0" "$program" send --quiet --algorithm "${arguments[@]}" --to "$to" "$work/file" || exit 1
    ended=$(date +%s%N)
    for ((i = 1; i <= $1; i++)); do
        cmp "$work/file" "$work/$i/file" || exit 1
        rm "$work/$i/file"
    done
    awk "BEGIN { printf \"%.3f\", ($ended - $begun) / 1e9 }"
}

echo "receivers,algorithm,seconds,over_wire,rounds"
for n in $receivers; do
    declare -A taken=()
    for ((round = 0; round <= rounds; round++)); do
        for algorithm in $algorithms; do
            seconds=$(send_to $n "$algorithm")
            # The first round warms up.
            [ "$round" = 0 ] || taken[$algorithm]+=" $seconds"
        done
    done
    for algorithm in $algorithms; do
        median=$(tr ' ' '\n' <<<"${taken[$algorithm]# }" | sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }')
        over=$(awk "BEGIN { printf \"%.3f\", $median / ($mib * 1048576 * 8 / ($rate * 1e6)) }")
        echo "$n,${algorithm//,/+},$median,$over,${taken[$algorithm]# }"
    done
    unset taken
done
