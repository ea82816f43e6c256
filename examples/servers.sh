# Sourced by registry.sh and storage_server.sh: three processes of an example, and their clients.
#
#   source servers.sh EXAMPLE PATH [PROGRAM]     PATH: that of the objects in URLs; PROGRAM: the built example
set -euo pipefail

example=$1 path=$2
if [ $# -gt 2 ]; then
    program=$3
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    cargo build --quiet -p rdmc-examples --example "$example"
    program=${CARGO_TARGET_DIR:-target}/debug/examples/$example
fi
command -v curl >/dev/null || { echo "this needs curl" >&2; exit 1; }

dir=$(mktemp -d)
pids=()
finish() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir"
}
trap finish EXIT

base=$((10000 + RANDOM % 20000))
cluster=127.0.0.1:$base,127.0.0.1:$((base + 1)),127.0.0.1:$((base + 2))
url() { # SERVER NAME
    echo "http://127.0.0.1:$((base + 10 + $1))/$path/$2"
}
start() { # SERVER
    "$program" --id "$1" --cluster "$cluster" --http "127.0.0.1:$((base + 10 + $1))" &
    pids+=($!)
}
# A server answers its clients as soon as it is connected to the other servers.
wait_for_all() {
    local id
    for id in 0 1 2; do
        curl -s -o /dev/null --retry 30 --retry-delay 1 --retry-connrefused "$(url $id none)" ||
            { echo "server $id did not start" >&2; exit 1; }
    done
}
put() { # STATUS SERVER NAME FILE
    local got
    got=$(curl -s -o /dev/null -w '%{http_code} %{time_total}' -T "$4" "$(url "$2" "$3")")
    [ "${got% *}" = "$1" ] || { echo "server $2 answers ${got% *} to PUT $3, not $1" >&2; exit 1; }
    echo "server $2 answers ${got% *} to PUT $3 after ${got#* } s"
}
compare() { # SERVER NAME FILE
    local want got
    want=$(sha256sum <"$3")
    got=$(curl -sf "$(url "$1" "$2")" | sha256sum)
    [ "$got" = "$want" ] || { echo "server $1 has another $2" >&2; exit 1; }
    echo "server $1 has $2, ${got%% *}"
}

: >"$dir/empty"
head -c 1000 /dev/urandom >"$dir/small"
head -c 20000001 /dev/urandom >"$dir/large"
