/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* VXLAN (RFC 7348): the outer headers, and how the kernel fills them in. */
#pragma once

#include "kernel.h"
#include "nat.h"

/* What VXLAN adds: Ethernet, VXLAN, UDP and IPv4 (RFC 7348, section 5). */
#define ENCAP_OVERHEAD 50

/* The outer headers of packets to or from another node. Per-packet fields are 0, but the UDP checksum is
 * 0xffff if it is used. A packet that the node routes without encapsulation has only an Ethernet header:
 * then everything after it is 0. The headers are aligned to 16 bits only, so the compiler would read the
 * kernel's structures, which have 32-bit fields, byte by byte. */
struct encap_template {
	__u32 nic;
	struct {
		__u8 to[ETH_ALEN], from[ETH_ALEN];
		__be16 protocol;
		__u8 ihl_version, tos;
		__be16 length, id, fragment;
		__u8 ttl, ip_protocol;
		__u16 ip_check;
		__be16 source[2], destination[2];
		__be16 port, vxlan_port, udp_length, udp_check;
		__be16 vxlan[4];
		__be16 inner[7];
	} head;
};

#define OUTER_HLEN ((__u32)sizeof(((struct encap_template *)0)->head))

_Static_assert(OUTER_HLEN == ETH_HLEN + ENCAP_OVERHEAD, "the outer headers have no padding");
_Static_assert(sizeof(struct encap_template) % 4 == 0, "the inner header follows without padding");

/* is_encap tells whether a template is that of an encapsulated packet. */
static __always_inline int is_encap(const struct encap_template *o)
{
	return o->head.ip_protocol == IPPROTO_UDP;
}

/* The supported VXLAN devices, by ifindex, and the fields of their outer headers. Written by the agent. */
struct vxlan_device {
	__u32 nic;
	__be16 source[2]; /* the outer source address */
	__be16 port;
	__be16 mac[3];
	__be16 vni[2]; /* and a zero byte */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, __u32);
	__type(value, struct vxlan_device);
} vxlan_devices SEC(".maps");

/* The NICs over which the node routes packets of pods without encapsulation, by ifindex. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, __u32);
	__type(value, __u8);
} routers SEC(".maps");

/* Remote nodes, by VXLAN device: the FDB entries of the device. Outer headers are learned only from packets
 * with the addresses of one. Written by the agent. */
struct remote {
	__u32 device;
	__be16 address[2]; /* the outer address */
	__be16 mac[3]; /* the MAC address of its VXLAN device, the source of the inner frame */
	__u16 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct remote);
	__type(value, __u8);
} remotes SEC(".maps");

/* sender returns the remote node that sent a packet with these outer headers to a VXLAN device. */
static __always_inline struct remote sender(const struct encap_template *o, __u32 device)
{
	const __be16 *mac = &o->head.inner[3];

	return (struct remote){.device = device, .address = {o->head.source[0], o->head.source[1]}, .mac = {mac[0], mac[1], mac[2]}};
}

static __always_inline int is_remote(const struct remote *from)
{
	return bpf_map_lookup_elem(&remotes, from) != 0;
}

/* Whether the upper bound of the port range is included (see is_source_port). */
volatile __u32 ports_inclusive = 0;

/* source_port is the UDP source port that the kernel chooses for the flow (udp_flow_src_port in
 * include/net/udp.h), or 0 where it does not use the hash. */
static __always_inline __be16 source_port(struct __sk_buff *skb, __u32 more)
{
	__u32 hash = bpf_get_hash_recalc(skb), from = port_from, to = port_to;

	if (!hash || from >= to)
		return 0;
	hash ^= hash << 16;
	return bpf_htons((((__u64)hash * (to - from + more)) >> 32) + from);
}

/* is_source_port tells whether the kernel would choose this source port. Linux 7.2 and later include
 * the end of the range. The first port that differs shows which rule this kernel follows. */
static __always_inline int is_source_port(struct __sk_buff *skb, __be16 port)
{
	__u32 more = ports_inclusive;

	if (port == source_port(skb, more))
		return 1;
	if (port != source_port(skb, !more))
		return 0;
	ports_inclusive = !more;
	return 1;
}

/* outer_tos is the outer TOS that a device with TOS 0 writes (RFC 6040; INET_ECN_encapsulate in
 * include/net/inet_ecn.h). */
static __always_inline __u8 outer_tos(__u8 inner)
{
	inner &= 3;
	return inner == 3 ? 2 : inner;
}

/* udp_sum is the outer UDP checksum of a packet whose inner checksum the device fills in, by local
 * checksum offload (lco_csum in include/linux/skbuff.h): the inner checksum field replaces the sum
 * of all that it covers, and a valid IPv4 header sums to zero. */
static __always_inline __u16 udp_sum(const struct encap_template *o, __be16 port, __be16 length, __u16 inner, const struct headers *h, int is_ipv6)
{
	__u32 sum = 0;
	__u16 result;
	int i;

	sum += o->head.source[0] + o->head.source[1] + o->head.destination[0] + o->head.destination[1];
	sum += bpf_htons(IPPROTO_UDP) + length + length + port + o->head.vxlan_port;
	for (i = 0; i < 4; i++)
		sum += o->head.vxlan[i];
	for (i = 0; i < 7; i++)
		sum += o->head.inner[i];
	for (i = 0; is_ipv6 && i < IP6_HLEN / 4; i++)
		sum = add(sum, h->ip[i]);
	sum += (__u16)~inner;
	result = ~fold(sum);
	return result ? result : 0xffff;
}

/* is_expected_outer tells whether an outer header is one that a supported VXLAN device writes. */
static __always_inline int is_expected_outer(const struct encap_template *o, const struct vxlan_device *v, int is_ipv6)
{
	return o->nic == v->nic && o->head.protocol == bpf_htons(ETH_P_IP) &&
	       o->head.source[0] == v->source[0] && o->head.source[1] == v->source[1] && o->head.vxlan_port == v->port &&
	       o->head.vxlan[0] == bpf_htons(0x0800) && !o->head.vxlan[1] &&
	       o->head.vxlan[2] == v->vni[0] && o->head.vxlan[3] == v->vni[1] &&
	       o->head.inner[3] == v->mac[0] && o->head.inner[4] == v->mac[1] && o->head.inner[5] == v->mac[2] &&
	       o->head.inner[6] == bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
}

/* clear_per_packet clears the per-packet fields of an outer header. */
static __always_inline void clear_per_packet(struct encap_template *o)
{
	o->head.tos = 0;
	o->head.length = o->head.id = o->head.ip_check = o->head.port = o->head.udp_length = 0;
	o->head.udp_check = o->head.udp_check ? 0xffff : 0;
}

/* fib_mtu is the longest packet that a route takes without fragmentation, configured or learned (path MTU discovery), or 0 if
 * there is no route. */
static __always_inline __u16 fib_mtu(struct __sk_buff *skb, struct bpf_fib_lookup *fib, __u32 device, __u32 flags)
{
	if (skip_csum_checks)
		return 0xffff;
	fib->tot_len = 0xffff; /* the maximum, so that the kernel reports the MTU */
	fib->ifindex = device;
	return bpf_fib_lookup(skb, fib, sizeof(*fib), flags) == BPF_FIB_LKUP_RET_FRAG_NEEDED ? fib->mtu_result : 0;
}

/* encap_mtu is the longest inner packet that the route to the other node takes without fragmentation, or 0. */
static __always_inline __u16 encap_mtu(struct __sk_buff *skb, const struct encap_template *o, __u32 overlay)
{
	struct bpf_fib_lookup fib = {
		.family = AF_INET, .l4_protocol = IPPROTO_UDP,
		.ipv4_src = o->head.source[0] | (__u32)o->head.source[1] << 16,
		.ipv4_dst = o->head.destination[0] | (__u32)o->head.destination[1] << 16,
	};
	__u16 longest = fib_mtu(skb, &fib, skb->ifindex, BPF_FIB_LOOKUP_OUTPUT);

	/* The lookup requires forwarding on the device. The NIC may have it disabled, but not the VXLAN device. */
	if (!longest)
		longest = fib_mtu(skb, &fib, overlay, 0);
	return longest > ENCAP_OVERHEAD ? longest - ENCAP_OVERHEAD : 0;
}

/* route_mtu is the longest packet that the route to the other pod takes without fragmentation, or 0. It looks up the route as the kernel
 * did: rules may select a table by the device by which the packet entered, such as the bridge of the pods. */
static __always_inline __u16 route_mtu(struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	struct bpf_fib_lookup fib = {.family = is_ipv6 ? AF_INET6 : AF_INET, .l4_protocol = PROTOCOL(h, is_ipv6)};

	if (is_ipv6) {
		copy(fib.ipv6_src, address_of(h, 1), sizeof(fib.ipv6_src));
		copy(fib.ipv6_dst, address_of(h, 0), sizeof(fib.ipv6_dst));
	} else {
		fib.ipv4_src = h->ip[3];
		fib.ipv4_dst = h->ip[4];
	}
	return fib_mtu(skb, &fib, skb->ingress_ifindex, 0);
}

/* encapsulate writes the outer headers, and translates the peer. It returns 0, the reason why it
 * left the packet unchanged, or a negative value if it failed halfway. */
static __always_inline int encapsulate(struct __sk_buff *skb, const struct headers *h, const struct encap_template *known, __u16 check, __u64 wire_peer, int is_ipv6)
{
	int translated = !is_ipv6 && wire_peer != PEER(h->ip[4], HALF(h->l4[0], 1));
	struct headers forwarded;
	struct {
		struct encap_template outer;
		struct {
			__u32 ip[5];
		} inner;
	} w;
	__u32 sum = 0, gso = skb->gso_size;
	__be16 port = 0;
	__u32 *words;
	int i;

	/* The kernel hashes a translated packet later, with the translated headers; hashing it now
	 * would change its source port. */
	if (!translated || skb->hash || skip_csum_checks)
		port = source_port(skb, ports_inclusive);
	if (!port)
		return REASON_MISMATCH;
	if (LENGTH(h, is_ipv6) > 0xffff - ENCAP_OVERHEAD) /* merged by GRO, and forwarded by the pod */
		return REASON_EXCEEDS_MTU;
	copy_headers(&forwarded, h, is_ipv6);
	if (translated)
		nat_headers(&forwarded, 1, wire_peer);
	w.outer = *known;
	w.outer.head.tos = outer_tos(TOS(h, is_ipv6));
	w.outer.head.length = bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD);
	w.outer.head.id = bpf_get_prandom_u32();
	w.outer.head.port = port;
	w.outer.head.udp_length = bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD - IP_HLEN);
	sum = 0x0045 | w.outer.head.tos << 8;
	sum += w.outer.head.length + w.outer.head.id + w.outer.head.fragment;
	sum += w.outer.head.ttl | IPPROTO_UDP << 8;
	sum += w.outer.head.source[0] + w.outer.head.source[1] + w.outer.head.destination[0] + w.outer.head.destination[1];
	w.outer.head.ip_check = ~fold(sum);
	forwarded.ip[HOP_WORD(is_ipv6)] = decrement_hop_limit(forwarded.ip[HOP_WORD(is_ipv6)], is_ipv6);
	words = w.inner.ip;
	for (i = 0; i < CHANGES(is_ipv6) / 4; i++)
		words[i] = forwarded.ip[i];

	if (bpf_skb_adjust_room(skb, ENCAP_OVERHEAD, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET |
				BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
				BPF_F_ADJ_ROOM_ENCAP_L2_ETH | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN)))
		return REASON_ENCAP_FAILED;
	/* From here on the packet is changed. */
	if (translated && nat_packet(skb, OUTER_HLEN + IP_HLEN, 1, h, wire_peer, &check))
		return -1;
	/* GSO segments have no outer checksum: an eBPF program cannot request one */
	if (w.outer.head.udp_check)
		w.outer.head.udp_check = gso ? 0 : udp_sum(&w.outer, port, w.outer.head.udp_length, check, &forwarded, is_ipv6);
	if (bpf_skb_store_bytes(skb, 0, &w.outer.head, OUTER_HLEN + CHANGES(is_ipv6), 0))
		return -1;
	return 0;
}

/* decapsulate removes the outer headers, except for the space of an Ethernet header. It returns 0, or
 * -1 if it left the packet unchanged. */
static __always_inline int decapsulate(struct __sk_buff *skb, int is_ipv6)
{
	if (bpf_skb_adjust_room(skb, -ENCAP_OVERHEAD, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET | (is_ipv6 ? DECAP_L3_IPV6 : 0)))
		return -1;
	/* As skb_checksum_init does at the outer UDP: one verified checksum fewer */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	return 0;
}
