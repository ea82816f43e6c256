#!/usr/bin/env bash
# Measures how groups of different weights share the ports of rate-limited hosts on one machine (benches/shares.rs).
# Every host is a network namespace; tbf limits its port in both directions. Needs root, iproute2 and a kernel with
# network namespaces. Traffic stays inside the namespaces.
#
#   [DELAY_US=0] benches/shares.sh [HOSTS=4] [RATE_MBIT=200] [ARGUMENTS]
#
# ARGUMENTS are those of benches/shares.rs, such as --weights 4,2,1 --block 65536.
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${1:-4} rate=${2:-200}
shift $(($# < 2 ? $# : 2))
name=rdmcshares$$ # Unique, so that several runs do not meet.
program=${PROGRAM:-target/release/examples/shares}
[ -x "$program" ] || { echo "build it first: cargo build --release -p rdmc-benches --example shares" >&2; exit 1; }
. benches/namespaces.sh
add_bridge switch
addresses=
for ((i = 0; i < hosts; i++)); do
    add_host $i switch
    addresses+=${addresses:+,}10.77.0.$((i + 1)):7471
done
lay_cables
pids=()
for ((i = 0; i < hosts; i++)); do
    ip netns exec "$name-$i" "$program" --me $i --hosts "$addresses" --rate "$rate" "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
