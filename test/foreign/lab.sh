#!/bin/bash
# A lab of two nodes with a pod each, made only with iproute2 and nft. The nodes are configured as
# flannel, Calico or kube-proxy (nftables mode, beside flannel) would leave them. The lab does not
# use slipstream, so the fast path is tested independently of how slipstream's own lab is made.
#
#   lab.sh up flannel|calico|kube-proxy NAME [none]    namespaces NAME-n0, NAME-n1, NAME-n0p0, NAME-n1p0
#   lab.sh down NAME                                   removes them, and ends the processes in them
#
# The NICs have every offload. With none they do not segment, and merge received packets with GRO.
# Nodes are 10.9.0.1 and 10.9.0.2, pods 10.42.0.2 and 10.42.1.2. With kube-proxy the Service
# 10.96.0.10 sends every port to its only backend, the pod of n1.
set -euo pipefail

fail() { echo "lab.sh: $*" >&2; exit 2; }

in_ns() { local ns=$1; shift; ip netns exec "$ns" "$@"; }

set_sysctl() { in_ns "$1" sysctl -qw "$2"; }

node() { # NAME-nI
	ip netns add "$1"
	ip -n "$1" link set lo up
	set_sysctl "$1" net.ipv4.ip_forward=1
}

# The NICs are the two ends of one veth.
nics() { # NAME [none]
	ip link add eth0 netns "$1-n0" type veth peer name eth0 netns "$1-n1"
	for i in 0 1; do
		ip -n "$1-n$i" addr add "10.9.0.$((i + 1))/24" dev eth0
		if [ "${2-}" = none ]; then without_offloads "$1-n$i"; fi
		ip -n "$1-n$i" link set eth0 up
	done
}

# The kernel segments before the NIC (GSO). With GRO a veth receives in NAPI mode. With a qdisc, a full ring of the veth stops the
# sender instead of dropping packets (Linux 6.16).
without_offloads() { # NAME-nI
	local features
	features=$(in_ns "$1" ethtool -k eth0 | sed -nE '/tx-generic-segmentation/d; s/^\s+(tx-.*-segmentation): on$/\1 off/p')
	# shellcheck disable=SC2086 # each feature is two arguments
	in_ns "$1" ethtool -K eth0 $features gro on
	in_ns "$1" tc qdisc replace dev eth0 root pfifo limit 1000
}

# Like flannel and Calico, overlay adds a static neighbour, forwarding entry and route for the other node.
overlay() { # NAME I DEVICE VNI PORT PREFIX-LENGTH
	local ns=$1-n$2 i=$2 j=$((1 - $2)) device=$3
	ip -n "$ns" link add "$device" mtu 1450 address "02:42:00:00:00:0$i" type vxlan id "$4" local "10.9.0.$((i + 1))" dev eth0 dstport "$5" nolearning
	ip -n "$ns" addr add "10.42.$i.0/32" dev "$device"
	ip -n "$ns" link set "$device" up
	ip -n "$ns" neigh add "10.42.$j.0" lladdr "02:42:00:00:00:0$j" dev "$device" nud permanent
	in_ns "$ns" bridge fdb append "02:42:00:00:00:0$j" dev "$device" dst "10.9.0.$((j + 1))"
	ip -n "$ns" route add "10.42.$j.0/$6" via "10.42.$j.0" dev "$device" onlink
}

pod() { # NAME I HOST-VETH: an unconfigured pod
	ip netns add "$1-n$2p0"
	ip -n "$1-n$2p0" link set lo up
	ip link add eth0 mtu 1450 netns "$1-n$2p0" type veth peer name "$3" mtu 1450 netns "$1-n$2"
	ip -n "$1-n$2p0" link set eth0 up
	ip -n "$1-n$2" link set "$3" up
}

bridged() { # NAME I
	local ns=$1-n$2 pod=$1-n$2p0
	ip -n "$ns" link add cni0 mtu 1450 type bridge
	ip -n "$ns" addr add "10.42.$2.1/24" dev cni0
	ip -n "$ns" link set cni0 up
	pod "$1" "$2" veth0
	ip -n "$ns" link set veth0 master cni0
	in_ns "$ns" bridge link set dev veth0 hairpin on
	ip -n "$pod" addr add "10.42.$2.2/24" dev eth0
	ip -n "$pod" route add default via "10.42.$2.1"
	overlay "$1" "$2" flannel.1 1 8472 24
	in_ns "$ns" nft -f - <<-'RULES'
		table ip flannel {
			chain postrouting {
				type nat hook postrouting priority srcnat
				ip saddr 10.42.0.0/16 ip daddr 10.42.0.0/16 return
				ip saddr 10.42.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random
			}
			chain forward {
				type filter hook forward priority filter
				ip saddr 10.42.0.0/16 accept
				ip daddr 10.42.0.0/16 accept
			}
		}
	RULES
}

routed() { # NAME I
	local ns=$1-n$2 pod=$1-n$2p0
	pod "$1" "$2" cali0
	ip -n "$ns" link set cali0 address ee:ee:ee:ee:ee:ee
	set_sysctl "$ns" net.ipv4.conf.cali0.proxy_arp=1
	ip -n "$ns" route add "10.42.$2.2/32" dev cali0
	ip -n "$pod" addr add "10.42.$2.2/32" dev eth0
	ip -n "$pod" route add 169.254.1.1 dev eth0
	ip -n "$pod" route add default via 169.254.1.1
	ip -n "$pod" neigh add 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0
	overlay "$1" "$2" vxlan.calico 4096 4789 26
	# Established connections are accepted first. The pod's policy marks the other packets that it accepts.
	in_ns "$ns" nft -f - <<-'RULES'
		table ip calico {
			chain forward {
				type filter hook forward priority filter; policy drop
				meta mark set meta mark & 0xfff1ffff
				iifname "cali*" jump from-workload
				oifname "cali*" jump to-workload
				meta mark & 0x00010000 == 0x00010000 accept
			}
			chain from-workload {
				ct state established,related accept
				ct state invalid drop
				meta mark set meta mark | 0x00010000
			}
			chain to-workload {
				ct state established,related accept
				ct state invalid drop
				tcp dport 1-65535 meta mark set meta mark | 0x00010000
			}
		}
	RULES
}

# Every connection over these routes uses CUBIC from its first packet. If BBR is the machine's default, it switches on pacing, with
# a timer per packet. A program that selects CUBIC only later, as iperf3 -C does, keeps that pacing.
cubic() { # NAMESPACE
	local route
	# shellcheck disable=SC2086 # a route is many arguments
	ip -n "$1" route show | while read -r route; do ip -n "$1" route change $route congctl cubic; done
}

# service adds the rules that kube-proxy in nftables mode writes for a ClusterIP with one endpoint.
service() { # NAME I
	in_ns "$1-n$2" nft -f - <<-'RULES'
		table ip kube-proxy {
			map service-ips {
				type ipv4_addr : verdict
				elements = { 10.96.0.10 : goto service }
			}
			chain nat-prerouting {
				type nat hook prerouting priority dstnat
				ip daddr vmap @service-ips
			}
			chain service {
				ip daddr 10.96.0.10 ip saddr != 10.42.0.0/16 jump mark-for-masquerade
				meta l4proto tcp dnat to 10.42.1.2
			}
			chain mark-for-masquerade { meta mark set meta mark | 0x4000; }
			chain nat-postrouting {
				type nat hook postrouting priority srcnat
				meta mark & 0x4000 == 0 return
				meta mark set meta mark ^ 0x4000
				masquerade fully-random
			}
			chain filter-forward {
				type filter hook forward priority filter - 1
				ct state invalid drop
			}
		}
	RULES
}

up() { # SHAPE NAME [none]
	local bridge_or_route=bridged
	case $1 in
	flannel | kube-proxy) ;;
	calico) bridge_or_route=routed ;;
	*) fail "no shape $1: flannel, calico and kube-proxy are there" ;;
	esac
	trap 'down "$2"' ERR
	for i in 0 1; do node "$2-n$i"; done
	nics "$2" "${3-}"
	for i in 0 1; do "$bridge_or_route" "$2" "$i"; done
	if [ "$1" = kube-proxy ]; then
		for i in 0 1; do service "$2" "$i"; done
	fi
	for i in 0 1; do
		cubic "$2-n$i"
		cubic "$2-n${i}p0"
	done
}

down() { # NAME
	local ns
	for ns in "$1-n0p0" "$1-n1p0" "$1-n0" "$1-n1"; do
		[ -e "/run/netns/$ns" ] || continue
		ip netns pids "$ns" | xargs -r kill -9
		ip netns del "$ns"
	done
}

case ${1-} in
up) [[ $# = 3 || "$#-${4-}" = 4-none ]] || fail "up SHAPE NAME [none]"; up "${@:2}" ;;
down) [ $# = 2 ] || fail "down NAME"; down "$2" ;;
*) fail "up SHAPE NAME, or down NAME" ;;
esac
