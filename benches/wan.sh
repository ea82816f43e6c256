#!/usr/bin/env bash
# Measures transfers from memory to memory over a long path: client - gateway - gateway - server, each a network
# namespace, joined by three cables (benches/cable.c, which needs cc). Needs root, iproute2, ethtool and a kernel with
# network namespaces. Traffic stays inside the namespaces. A packet has 1500 bytes at most.
#
#   benches/wan.sh [ROUNDS=3] [MIB=64] CASE...
#
# A CASE is `session` or `tcp` with arguments of benches/wan.rs after commas, those of the server after a slash:
# `session,--streams,8`, `tcp,--streams,8/--congestion,bbr`. `gateway` is `tcp` through `rdmc gateway` at both gateways,
# with arguments of the entrance after a slash. `files` is `rdmc get` of a file from `rdmc serve`. `send` is `rdmc send`
# to `rdmc recv` at the server: the columns of packets then count only acknowledgements. Or it is another program, which
# must be installed: `http` (curl from a server in Python), `rsync` (its daemon), `gridftp` (globus-url-copy from
# globus-gridftp-server, without security) or `scp` (its own sshd). Cases are measured in turn.
#
# The path, from the environment:
#   MBIT=200               the rate of the cable in the middle, in each direction
#   EDGE_MBIT=1000         the rate of the cables at the edges
#   DELAY_US=60000         one way in the middle
#   EDGE_DELAY_US=0        one way at each edge
#   LOSS=0                 probability that a packet is lost, at each edge in each direction
#   JITTER_US=0/0          mean and deviation of the jitter at each edge
#   POLICE=                MBIT/BYTES of a policer in the middle, server to client; headers of Ethernet count
#   QUEUE=                 bytes that wait before each cable at most; by default the product of MBIT and the round
#                          trip, at least 256 KiB
#
# Prints comma-separated values, medians over the rounds: the case; seconds until the first byte; seconds in all; the
# share of the whole, and after two seconds: the rate of payload over the rate that headers leave of MBIT, or of the
# policer; the Jain index of connections (benches/wan.rs); packets that the edges lost, and that the policer or a full
# cable dropped, server to client; the MiB of memory that the larger gateway had at most; the processor time of the
# server, of the gateways and of the client, in seconds for each GiB, with what the kernel does in their name; the
# seconds of each round. Programs other than `wan` are measured as a whole, with their start; their other values are
# printed as 0 or `-`.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3} mib=${2:-64}
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- session tcp tcp,--streams,8
mbit=${MBIT:-200} edge_mbit=${EDGE_MBIT:-1000}
delay_us=${DELAY_US:-60000} edge_delay_us=${EDGE_DELAY_US:-0}
loss=${LOSS:-0} jitter_us=${JITTER_US:-0/0} police=${POLICE:-}
product=$((mbit * (delay_us + 2 * edge_delay_us) * 2 / 8))
queue=${QUEUE:-$((product < 262144 ? 262144 : product))}
name=rdmcwan$$ # Unique, so that several runs do not meet.
server=10.78.3.2
built=${CARGO_TARGET_DIR:-target}/release
[ -n "${PROGRAM:-}" ] || cargo build --release --quiet -p rdmc-benches --example wan
[ -n "${RDMC:-}" ] || ! [[ " $*" =~ " "(gateway|files|send) ]] || cargo build --release --quiet -p rdmc-cli
program=${PROGRAM:-$built/examples/wan} rdmc=${RDMC:-$built/rdmc}
work=$(mktemp -d -p /dev/shm)
chmod 755 "$work" # Servers give up their rights.
cable_pids=() server_pid= gateway_pids=()
finish() {
    stop
    [ ${#cable_pids[@]} -eq 0 ] || kill "${cable_pids[@]}" 2>/dev/null || true
    [ ${#cable_pids[@]} -eq 0 ] || wait "${cable_pids[@]}" 2>/dev/null || true
    for host in client near far server wire; do
        ip netns del "$name-$host" 2>/dev/null || true
        rm -rf "/etc/netns/$name-$host"
    done
    rm -rf "$work"
}
# Ends the server and the gateways of the present case.
stop() {
    local pid
    for pid in $server_pid ${gateway_pids[@]+"${gateway_pids[@]}"}; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    server_pid='' gateway_pids=()
}
trap finish EXIT

# Runs a command at a host: at HOST COMMAND...
at() { ip netns exec "$name-$1" "${@:2}"; }

# Joins two hosts by a cable: join NUMBER HOST HOST WAY. They get the addresses 10.78.NUMBER.1 and .2; WAY is
# that of benches/cable.c.
join() {
    local end=1 host
    for host in "$2" "$3"; do
        ip link add "eth$1" netns "$name-$host" type veth peer name "link$1-$end" netns "$name-wire"
        ip -n "$name-wire" link set "link$1-$end" up
        # The kernel cuts segments into packets before they enter the cable, as a port does.
        at "$host" ethtool -K "eth$1" tso off >/dev/null
        ip -n "$name-$host" addr add "10.78.$1.$end/24" brd + dev "eth$1"
        ip -n "$name-$host" link set "eth$1" up
        end=$((end + 1))
    done
    # Builds beside it must not delay it.
    ip netns exec "$name-wire" chrt -f 1 "$work/cable" "$4" "link$1-1" "link$1-2" >>"$work/seen" &
    cable_pids+=($!)
}

cc -O2 -o "$work/cable" benches/cable.c -lm
for host in client near far server wire; do
    ip netns add "$name-$host"
    ip -n "$name-$host" link set lo up
    # Nobody waits for a name server.
    mkdir -p "/etc/netns/$name-$host"
    echo 'hosts: files' >"/etc/netns/$name-$host/nsswitch.conf"
    # No connection learns from an earlier one.
    at $host sh -c 'echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save'
    at $host sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
done
edge=$edge_delay_us,rate=$edge_mbit/$queue,loss=$loss,jitter=$jitter_us
middle=$delay_us,rate=$mbit/$queue
join 1 client near "$edge,seed=1"
join 2 near far "$middle:$middle${police:+,police=$police}"
join 3 far server "$edge,seed=2"
ip -n "$name-client" route add default via 10.78.1.2
ip -n "$name-near" route add 10.78.3.0/24 via 10.78.2.2
ip -n "$name-far" route add 10.78.1.0/24 via 10.78.2.1
ip -n "$name-server" route add default via 10.78.3.1
# Until the cables are there. Until then a signal would end them.
for pid in "${cable_pids[@]}"; do
    until [ $((0x$(sed -n 's/^SigCgt:\s*//p' "/proc/$pid/status") & 0x200)) != 0 ]; do sleep 0.05; done
done
: >"$work/seen"
head -c "${mib}M" /dev/urandom >"$work/file"
mkdir "$work/served" "$work/into"
ln "$work/file" "$work/served/file"

# Prints the packets that were lost, exceeded the policer or found a cable full on the way to the client since the last
# call. Appends all counters to the file COUNTERS, if that is set.
dropped() {
    : >"$work/seen"
    kill -USR1 "${cable_pids[@]}"
    until [ "$(wc -l <"$work/seen")" = 6 ]; do sleep 0.05; done
    awk '$1 ~ /-2$/ { lost += $4; policed += $5; full += $6 } END { print lost + 0, policed + 0, full + 0 }' \
        "$work/seen"
    [ -z "${COUNTERS:-}" ] || sed "s/^/$1 /" "$work/seen" >>"$COUNTERS"
}

# Starts the server of a case: start KIND ARGUMENT...
start() {
    local kind=$1 at_server=(ip netns exec "$name-server")
    shift
    # A command in the background without a function has the process id that `stop` ends.
    case $kind in
    session) "${at_server[@]}" "$program" serve $server:7471 "$@" & ;;
    tcp) "${at_server[@]}" "$program" tcp-serve $server:7471 "$@" & ;;
    gateway)
        "${at_server[@]}" "$program" tcp-serve $server:7471 &
        server_pid=$!
        ip netns exec "$name-far" "$rdmc" gateway --serve 10.78.2.2 --allow 10.78.3.0/24 2>"$work/far" &
        gateway_pids=($!)
        ip netns exec "$name-near" "$rdmc" gateway --listen 10.78.1.2 --peer 10.78.2.2 --to $server:7471 "$@" \
            2>"$work/near" &
        gateway_pids+=($!)
        return
        ;;
    files) "${at_server[@]}" "$rdmc" serve "$work/served" --listen $server:7471 --quiet "$@" 2>"$work/errors" & ;;
    send) "${at_server[@]}" "$rdmc" recv --listen $server:7471 --dir "$work/into" --quiet "$@" 2>"$work/errors" & ;;
    gridftp)
        # It takes only names of users, and files that these may read.
        "${at_server[@]}" globus-gridftp-server -aa -anonymous-user nobody -anonymous-group nogroup \
            -control-interface $server -data-interface $server -p 7471 "$@" >/dev/null 2>&1 &
        ;;
    scp)
        [ -f "$work/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$work/key"
        mkdir -p /run/sshd
        "${at_server[@]}" "$(command -v sshd)" -D -p 7471 -o ListenAddress=$server -h "$work/key" -o UsePAM=no \
            -o "AuthorizedKeysFile=$work/key.pub" -o StrictModes=no -o PidFile=none -o PermitRootLogin=yes \
            -o 'Subsystem=sftp internal-sftp' -f /dev/null "$@" &
        ;;
    http) "${at_server[@]}" python3 -m http.server --bind $server --directory "$work" 7471 >/dev/null 2>&1 & ;;
    rsync)
        printf 'use chroot = no\nlog file = /dev/null\n[bench]\npath = %s\n' "$work" >"$work/rsyncd.conf"
        "${at_server[@]}" rsync --daemon --no-detach --config="$work/rsyncd.conf" --address=$server --port=7471 "$@" &
        ;;
    *)
        echo "unknown case: $kind" >&2
        return 1
        ;;
    esac
    server_pid=$!
}

# Gets the file as a whole, and prints the seconds: whole COMMAND...
whole() {
    local begun ended
    rm -f "$work/into/file"
    begun=$(date +%s%N)
    timed "$@" >/dev/null 2>"$work/errors" || { cat "$work/errors" >&2; return 1; }
    ended=$(date +%s%N)
    cmp "$work/file" "$work/into/file" >&2 || return 1
    rm "$work/into/file"
    awk "BEGIN { t = ($ended - $begun) / 1e9; printf \"0 - %.3f %.1f - -\n\", t, $mib * 8.388608 / t }"
}

# Prints the processor time that the server and the gateways have used so far, in seconds.
used() {
    local server gateways
    server=$(family "$server_pid")
    gateways=${gateway_pids[*]+"${gateway_pids[*]}"}
    # shellcheck disable=SC2086 # process ids
    echo "$(used_by $server) $(used_by $gateways)"
}

# Prints a process and all below it: family PID
family() {
    local child
    echo "$1"
    for child in $(cat "/proc/$1/task/"*/children 2>/dev/null || true); do family "$child"; done
}

# Prints the processor time of processes, and of the children that they have waited for: used_by PID...
used_by() {
    local pid
    # A name may have spaces. A process may have ended.
    for pid in "$@"; do sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null || true; done |
        awk -v hertz="$(getconf CLK_TCK)" '{ ticks += $12 + $13 + $14 + $15 } END { print ticks / hertz }'
}

# Prints processor seconds for each GiB, from what `used` has printed before and after: each_gib BEFORE AFTER CLIENT
each_gib() {
    awk -v mib="$mib" -v gateways=${#gateway_pids[@]} '{
        printf "%.2f ", ($3 - $1) * 1024 / mib
        printf gateways ? "%.2f " : "- ", ($4 - $2) * 1024 / mib
        printf "%.2f\n", ($5 + $6) * 1024 / mib
    }' <<<"$*"
}

# Runs a command at the client, and notes its processor time: timed COMMAND...
timed() {
    local TIMEFORMAT='%U %S'
    { time at client "$@" 2>&3; } 3>&2 2>"$work/time"
}

# Gets all bytes, and prints what `wan` prints: fetch KIND ARGUMENT...
fetch() {
    local kind=$1
    shift
    case $kind in
    session) timed "$program" get $server:7471 --mib "$mib" "$@" ;;
    tcp) timed "$program" tcp-get $server:7471 --mib "$mib" "$@" ;;
    gateway) timed "$program" tcp-get 10.78.1.2:7471 --mib "$mib" "$@" ;;
    files) whole "$rdmc" get --quiet "$@" "$server:7471/file" "$work/into" ;;
    send) whole "$rdmc" send --quiet "$@" --to $server:7471 "$work/file" ;;
    gridftp) whole globus-url-copy "$@" "ftp://$server:7471$work/file" "file://$work/into/file" ;;
    scp)
        whole scp -q -i "$work/key" -P 7471 -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no "$@" \
            "root@$server:$work/file" "$work/into/file"
        ;;
    http) whole curl -s -o "$work/into/file" "$@" "http://$server:7471/file" ;;
    rsync) whole rsync -W "$@" "rsync://$server:7471/bench/file" "$work/into/file" ;;
    esac
}

# Prints the greatest memory of a gateway in MiB, or `-`.
memory() {
    [ ${#gateway_pids[@]} -gt 0 ] || { echo -; return; }
    # shellcheck disable=SC2046 # paths without spaces
    awk '/^VmHWM:/ && $2 > most { most = $2 } END { printf "%.0f\n", most / 1024 }' \
        $(printf '/proc/%s/status ' "${gateway_pids[@]}")
}

declare -A taken=()
for ((round = 0; round < rounds; round++)); do
    for case in "$@"; do
        IFS=, read -ra of_server <<<"$([[ $case != */* ]] || echo "${case#*/}")"
        IFS=, read -ra of_client <<<"${case%%/*}"
        start "${of_client[0]}" ${of_server[@]+"${of_server[@]}"}
        # Programs other than `wan` do not wait for their server.
        for host in server ${gateway_pids[@]+far near}; do
            for ((tried = 0; tried < 100; tried++)); do
                [ -z "$(at $host ss -Hltn 'sport = 7471')" ] || break
                sleep 0.1
            done
        done
        dropped "$case" >/dev/null
        before=$(used)
        result=$(fetch "${of_client[@]}")
        cost=$(each_gib "$before" "$(used)" "$(cat "$work/time")")
        taken[$case]+="$result $(dropped "$case") $(memory) $cost"$'\n'
        stop
    done
done

# Prints the median of a column of lines: median COLUMN LINES
median() {
    printf '%s' "$2" | awk -v column="$1" '{ print $column }' | sort -n |
        awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'
}

# The rate that the headers of Ethernet, IP and TCP leave of the narrowest part.
path=$(awk "BEGIN {
    mbit = $mbit; policed = ${police:+${police%/*} + }0
    if (policed > 0 && policed < mbit) mbit = policed
    print mbit * 1448 / 1514
}")
echo "case,first_s,total_s,share,share_after_2_s,fairness,lost,policed,full,memory_mib,server_cpu,gateways_cpu,\
client_cpu,rounds"
for case in "$@"; do
    lines=${taken[$case]}
    # shellcheck disable=SC2046 # numbers
    printf '%s,%s,%s,%.3f,%.3f,%s,%s,%s,%s,%s,%s,%s,%s,%s\n' "${case//,/ }" $(median 2 "$lines") $(median 3 "$lines") \
        $(awk "BEGIN { a = \"$(median 5 "$lines")\"; print $(median 4 "$lines") / $path, (a + 0) / $path }") \
        $(median 6 "$lines") $(median 7 "$lines") $(median 8 "$lines") $(median 9 "$lines") $(median 10 "$lines") \
        $(median 11 "$lines") $(median 12 "$lines") $(median 13 "$lines") \
        "$(printf '%s' "$lines" | awk '{ printf "%s%s", sep, $3; sep = " " }')"
done
