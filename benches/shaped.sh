#!/usr/bin/env bash
# Measures a cluster of rate-limited hosts on one machine: every host is a network namespace whose port is limited in
# both directions by tbf. Needs root, iproute2 and a kernel with network namespaces. Traffic stays inside the namespaces.
#
#   benches/shaped.sh [HOSTS=8] [RATE_MBIT=200] [arguments of `--bench cluster -- shaped`, such as --mib 64 --nodes 2,8]
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${1:-8} rate=${2:-200}
shift $(($# < 2 ? $# : 2))
name=rdmcbench$$ # Ours alone: several runs do not meet.
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
ip -n "$name-sw" link add switch type bridge stp_state 0 forward_delay 0
ip -n "$name-sw" link set switch up
for ((i = 0; i < hosts; i++)); do
    host=$name-$i
    ip netns add "$host"
    ip link add eth0 netns "$host" type veth peer name "port$i" netns "$name-sw"
    ip -n "$host" addr add "10.77.0.$((i + 1))/24" brd + dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip -n "$name-sw" link set "port$i" master switch up
    tc -n "$host" qdisc add dev eth0 root tbf rate "${rate}mbit" burst $burst limit 4194304
    tc -n "$name-sw" qdisc add dev "port$i" root tbf rate "${rate}mbit" burst $burst limit $queue
done
ip netns exec "$name-0" "$program" shaped --prefix "$name-" --rate "$rate" "$@"
