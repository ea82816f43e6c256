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
. benches/namespaces.sh
add_bridge switch
for ((i = 0; i < hosts; i++)); do add_host $i switch; done
ip netns exec "$name-0" "$program" shaped --prefix "$name-" --rate "$rate" "$@"
