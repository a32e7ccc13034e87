#!/bin/bash
# Measures a lab of lab.sh with iperf3: the host network, VXLAN, and VXLAN with the fast path, in
# random order within each block. slipstream import then gives ratios and intervals.
#
#   measure.sh SHAPE BLOCKS PAIRS FOLDER [none]    as root; slipstream is looked for on the PATH; none: NICs without offloads
#   slipstream import --pattern '{variant}/{pairs}-{block}-{pair}.json' --baseline native FOLDER
#
# A pair is an iperf3 process of its own on each side.
set -euo pipefail
[[ $# = 4 || "$#-${5-}" = 5-none ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
shape=$1 blocks=$2 pairs=$3 folder=$4
here=$(dirname "$(readlink -f "$0")")
name=measure
work=$(mktemp -d)
agents=()

stop_agents() {
	[ ${#agents[@]} = 0 ] || { kill "${agents[@]}"; wait "${agents[@]}" || true; }
	agents=()
}
cleanup() { stop_agents; "$here/lab.sh" down $name; rm -r "$work"; }
trap cleanup EXIT

cat >"$work/policy.yaml" <<-'POLICY'
	apiVersion: slipstream.dev/v1alpha1
	kind: AccelerationPolicy
	metadata: {name: fast}
	spec: {accelerate: [{fastpath: {}}]}
POLICY

start_agents() {
	local n
	for n in 0 1; do
		ip netns exec $name-n$n slipstream agent --policy "$work/policy.yaml" --journal "$work/$n" --health "" 2>>"$work/agent$n.log" &
		agents+=($!)
	done
	for n in 0 1; do
		timeout 20 ip netns exec $name-n$n bash -c 'until { exec 3<>/dev/tcp/127.0.0.1/9469; } 2>/dev/null &&
			printf "GET /metrics HTTP/1.0\r\n\r\n" >&3 && grep -q "^slipstream_fastpath_up 1" <&3; do sleep 0.1; done' ||
			{ echo "measure.sh: the fast path of n$n does not start:" >&2; cat "$work/agent$n.log" >&2; exit 1; }
	done
}

measure() { # VARIANT BLOCK CLIENT-NAMESPACE SERVER-ADDRESS
	local i clients=()
	mkdir -p "$folder/$1"
	for ((i = 1; i <= pairs; i++)); do
		ip netns exec "$3" iperf3 -c "$4" -p $((5200 + i)) -O 1 -t 2 --connect-timeout 3000 -J >"$folder/$1/$pairs-$2-$i.json" &
		clients+=($!)
	done
	wait "${clients[@]}"
}

"$here/lab.sh" down $name
"$here/lab.sh" up "$shape" $name ${5-}
address=10.42.1.2
[ "$shape" = kube-proxy ] && address=10.96.0.10
for ((i = 1; i <= pairs; i++)); do
	for ns in $name-n1 $name-n1p0; do ip netns exec $ns iperf3 -s -p $((5200 + i)) -D; done
done
for ((block = 1; block <= blocks; block++)); do
	for variant in $(shuf -e native vxlan fastpath); do
		case $variant in
		native) measure native "$block" $name-n0 10.9.0.2 ;;
		vxlan) measure vxlan "$block" $name-n0p0 $address ;;
		fastpath)
			start_agents
			measure fastpath "$block" $name-n0p0 $address
			stop_agents
			;;
		esac
	done
done
