#!/usr/bin/env bash
# Measures a cluster of rate-limited hosts on one machine. Every host is a network namespace; tbf limits its port in
# both directions. Needs root, iproute2 and a kernel with network namespaces. Traffic stays inside the namespaces.
#
#   [DELAY_US=0] benches/shaped.sh [HOSTS=8] [RATE_MBIT=200] [ARGUMENTS]
#
# ARGUMENTS are those of `--bench cluster -- shaped`, such as --mib 64 --nodes 2,8.
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${1:-8} rate=${2:-200}
shift $(($# < 2 ? $# : 2))
name=rdmcbench$$ # Unique, so that several runs do not meet.
. benches/namespaces.sh
add_bridge switch
for ((i = 0; i < hosts; i++)); do add_host $i switch; done
lay_cables
ip netns exec "$name-0" "$program" shaped --prefix "$name-" --rate "$rate" "$@"
