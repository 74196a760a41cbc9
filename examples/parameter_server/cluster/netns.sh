#!/usr/bin/env bash
# Runs a whole training in network namespaces of this machine: the server and each worker have a host of their own, as far as
# the network goes. Needs root and iproute2; changes nothing outside of its namespaces, and leaves none behind.
#
#   cargo build --release --example parameter_server
#   sudo examples/parameter_server/cluster/netns.sh [WORKERS] [OPTIONS OF THE SERVER...]
#
# PROGRAM names another executable.
set -euo pipefail

workers=${1:-4}
shift $(($# > 0 ? 1 : 0))
if ! [[ $workers =~ ^[0-9]+$ ]] || ((workers < 1 || workers > 200)); then
    echo "netns.sh: WORKERS is $workers, the limits are 1 and 200" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/../../.." && pwd)
program=${PROGRAM:-${CARGO_TARGET_DIR:-$root/target}/release/examples/parameter_server}
if [[ ! -x $program ]]; then
    echo "netns.sh: no program $program; build it first, or name one with PROGRAM" >&2
    exit 2
fi
if [[ $(id -u) != 0 ]]; then
    echo "netns.sh: namespaces need root; run it with sudo" >&2
    exit 2
fi

prefix=ps$$
namespaces=()
processes=()

clean_up() {
    local status=$?
    trap - EXIT
    for process in "${processes[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    wait || true
    for namespace in "${namespaces[@]}"; do
        # Its interfaces go with it.
        ip netns delete "$namespace" || true
    done
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

add_namespace() {
    ip netns add "$1"
    namespaces+=("$1")
    ip -n "$1" link set lo up
}

# add_host NAME ADDRESS: a namespace with an interface at the switch.
add_host() {
    add_namespace "$1"
    ip -n "$1" link add eth0 type veth peer name "$1" netns "$prefix-hub"
    ip -n "$prefix-hub" link set "$1" master bridge up
    ip -n "$1" address add "$2/24" dev eth0
    ip -n "$1" link set eth0 up
}

add_namespace "$prefix-hub"
ip -n "$prefix-hub" link add bridge type bridge
ip -n "$prefix-hub" link set bridge up
add_host "$prefix-s" 10.77.0.1

ip netns exec "$prefix-s" "$program" --role server --address 10.77.0.1:7471 --workers "$workers" "$@" &
server=$!
processes+=("$server")
for ((worker = 0; worker < workers; worker++)); do
    add_host "$prefix-w$worker" "10.77.0.$((worker + 2))"
    ip netns exec "$prefix-w$worker" "$program" --role worker --address 10.77.0.1:7471 &
    processes+=("$!")
done
wait "$server"
for process in "${processes[@]:1}"; do
    wait "$process"
done
