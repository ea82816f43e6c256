#!/usr/bin/env bash
# Measures a cluster of rate-limited hosts in two racks on one machine. Every host is a network namespace; tbf limits
# its port in both directions. Each rack has a bridge and an uplink, which is limited in both directions.
# Needs root, iproute2 and a kernel with network namespaces. Traffic stays inside the namespaces.
#
#   [DELAY_US=0] [UPLINK_DELAY_US=0] benches/racks.sh [HOSTS_IN_A_RACK=4] [RATE_MBIT=200] [UPLINK_MBIT=400] [ARGUMENTS]
#
# ARGUMENTS are those of `--bench cluster -- racks`.
set -euo pipefail
cd "$(dirname "$0")/.."
size=${1:-4} rate=${2:-200} uplink=${3:-400}
shift $(($# < 3 ? $# : 3))
hosts=$((2 * size))
name=rdmcracks$$ # Unique, so that several runs do not meet.
. benches/namespaces.sh
add_racks 2 "$uplink"
for ((i = 0; i < hosts; i++)); do add_host $i "rack$((i / size))"; done
lay_cables
ip netns exec "$name-0" "$program" racks --prefix "$name-" --rate "$rate" --uplink "$uplink" --racks "$size,$size" "$@"
