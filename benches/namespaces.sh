# Makes hosts for benches/shaped.sh, racks.sh and program.sh, which source it with `name`, `hosts` and `rate` set. Every
# host is a network namespace; tbf limits its port in both directions. Needs root, iproute2 and a kernel with network
# namespaces. Traffic stays inside the namespaces, which are deleted at the end.
#
# With DELAY_US in the environment, packets take so many microseconds from host to host: a cable of half that delay
# joins each host to its switch (benches/cable.c, which needs cc). With UPLINK_DELAY_US, those from rack to rack take
# so many more: a cable of half that delay is part of each uplink.
delay_us=${DELAY_US:-0} uplink_delay_us=${UPLINK_DELAY_US:-0}
cables=() uplinks=() cable_pids=()
burst=140000 # Bytes: two full segments of the largest size the stack passes on.
queue=${QUEUE:-524288} # Bytes at a switch port.
down() {
    [ ${#cable_pids[@]} -eq 0 ] || kill "${cable_pids[@]}" 2>/dev/null || true
    [ -z "${cable_dir:-}" ] || rm -rf "$cable_dir"
    for ((i = 0; i < hosts; i++)); do ip netns del "$name-$i" 2>/dev/null || true; done
    ip netns del "$name-sw" 2>/dev/null || true
}
trap down EXIT
# A script that measures another program has set it.
[ -n "${program:-}" ] || program=$(
    cargo bench -p rdmc-benches --bench cluster --no-run --message-format=json 2>/dev/null |
    grep -o '"executable":"[^"]*/cluster-[^"]*"' | tail -n 1 | cut -d'"' -f4)
[ -n "$program" ] ||
    { echo "the bench did not build: cargo bench -p rdmc-benches --bench cluster --no-run" >&2; exit 1; }
ip netns add "$name-sw"

# Limits a link at the switch: limit_link LINK RATE_MBIT
limit_link() {
    tc -n "$name-sw" qdisc add dev "$1" root tbf rate "${2}mbit" burst $burst limit $queue
}

# Makes a bridge: add_bridge BRIDGE
add_bridge() {
    ip -n "$name-sw" link add "$1" type bridge stp_state 0 forward_delay 0
    ip -n "$name-sw" link set "$1" up
}

# Makes racks: bridges rack0, rack1, …, each with an uplink to the bridge `core`, which is limited in both directions:
# add_racks COUNT UPLINK_MBIT
add_racks() {
    local rack end
    add_bridge core
    for ((rack = 0; rack < $1; rack++)); do
        add_bridge "rack$rack"
        end=up$rack
        if [ "$uplink_delay_us" -gt 0 ]; then
            end=cable$rack
            ip -n "$name-sw" link add "up$rack" type veth peer name "above$rack"
            ip -n "$name-sw" link set "above$rack" up
            uplinks+=("above$rack" "$end")
        fi
        ip -n "$name-sw" link add "down$rack" type veth peer name "$end"
        ip -n "$name-sw" link set "$end" up
        ip -n "$name-sw" link set "up$rack" master "rack$rack" up
        ip -n "$name-sw" link set "down$rack" master core up
        limit_link "up$rack" "$2"
        limit_link "down$rack" "$2"
    done
}

# Makes a host on a bridge: add_host NUMBER BRIDGE
add_host() {
    local host=$name-$1 port=port$1 last=port$1
    ip netns add "$host"
    if [ "$delay_us" -gt 0 ]; then
        last=near$1
        ip -n "$name-sw" link add "far$1" type veth peer name "$port"
        ip -n "$name-sw" link set "far$1" up
        cables+=("$last" "far$1")
    fi
    ip link add eth0 netns "$host" type veth peer name "$last" netns "$name-sw"
    ip -n "$name-sw" link set "$last" up
    # No connection learns from an earlier one.
    ip netns exec "$host" sh -c 'echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save'
    ip -n "$host" addr add "10.77.0.$(($1 + 1))/24" brd + dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip -n "$name-sw" link set "$port" master "$2" up
    tc -n "$host" qdisc add dev eth0 root tbf rate "${rate}mbit" burst $burst limit 4194304
    limit_link "$last" "$rate"
}

# Lays all cables, when hosts and racks are there.
lay_cables() {
    [ $((${#cables[@]} + ${#uplinks[@]})) -gt 0 ] || return 0
    cable_dir=$(mktemp -d)
    cc -O2 -o "$cable_dir/cable" benches/cable.c -lm
    lay_cable $((delay_us / 2)) "${cables[@]}"
    lay_cable $((uplink_delay_us / 2)) "${uplinks[@]}"
}
# Joins pairs of ends by cables: lay_cable DELAY_US ENDS...
lay_cable() {
    [ $# -gt 1 ] || return 0
    ip netns exec "$name-sw" "$cable_dir/cable" "$@" &
    cable_pids+=($!)
}
