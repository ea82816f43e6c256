#!/usr/bin/env bash
# Measures a cluster of rate-limited hosts in two racks on one machine: every host is a network namespace whose port is
# limited in both directions by tbf; each rack has a bridge, and the two are joined by a link that is limited in both
# directions. Needs root, iproute2 and a kernel with network namespaces. Traffic stays inside the namespaces.
#
#   benches/racks.sh [HOSTS_IN_A_RACK=4] [RATE_MBIT=200] [UPLINK_MBIT=400] [arguments of `--bench cluster -- racks`]
set -euo pipefail
cd "$(dirname "$0")/.."
size=${1:-4} rate=${2:-200} uplink=${3:-400}
shift $(($# < 3 ? $# : 3))
hosts=$((2 * size))
name=rdmcracks$$ # Ours alone: several runs do not meet.
burst=140000     # Bytes: two full segments of the largest size the stack passes on.
queue=524288     # Bytes at a switch port.
down() {
    for ((i = 0; i < hosts; i++)); do ip netns del "$name-$i" 2>/dev/null || true; done
    ip netns del "$name-sw" 2>/dev/null || true
}
trap down EXIT
program=$(cargo bench -p rdmc-benches --bench cluster --no-run --message-format=json 2>/dev/null |
    grep -o '"executable":"[^"]*/cluster-[^"]*"' | tail -n 1 | cut -d'"' -f4)
[ -n "$program" ] || { echo "the bench did not build: cargo bench -p rdmc-benches --bench cluster --no-run" >&2; exit 1; }
ip netns add "$name-sw"
ip -n "$name-sw" link add uplink0 type veth peer name uplink1
for ((rack = 0; rack < 2; rack++)); do
    ip -n "$name-sw" link add "rack$rack" type bridge stp_state 0 forward_delay 0
    ip -n "$name-sw" link set "rack$rack" up
    ip -n "$name-sw" link set "uplink$rack" master "rack$rack" up
    tc -n "$name-sw" qdisc add dev "uplink$rack" root tbf rate "${uplink}mbit" burst $burst limit $queue
done
for ((i = 0; i < hosts; i++)); do
    host=$name-$i
    ip netns add "$host"
    ip link add eth0 netns "$host" type veth peer name "port$i" netns "$name-sw"
    ip -n "$host" addr add "10.77.0.$((i + 1))/24" brd + dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip -n "$name-sw" link set "port$i" master "rack$((i / size))" up
    tc -n "$host" qdisc add dev eth0 root tbf rate "${rate}mbit" burst $burst limit 4194304
    tc -n "$name-sw" qdisc add dev "port$i" root tbf rate "${rate}mbit" burst $burst limit $queue
done
ip netns exec "$name-0" "$program" racks --prefix "$name-" --rate "$rate" --uplink "$uplink" --racks "$size,$size" "$@"
