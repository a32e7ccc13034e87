/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* NAT of the peer: from the address of a Service to that of a backend, and back. IPv4 only. */
#pragma once

#include "bloom.h"
#include "flow.h"

/* Reverse NAT: from the peer's address on the wire to the flow. */
struct nat_entry {
	struct key key;
	/* Its bit in the Bloom filter. */
	__u32 bloom_bit;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct key);
	__type(value, struct nat_entry);
} reverse_nat SEC(".maps");

/* nat_headers rewrites the peer of a packet, as the kernel does (nf_nat_ipv4_manip_pkt in
 * net/netfilter/nf_nat_proto.c): the destination of an outgoing packet, else the source. */
static __always_inline void nat_headers(struct headers *h, int out, __u64 peer)
{
	__u32 *address = &h->ip[out ? 4 : 3];

	h->ip[2] = (h->ip[2] & 0xffff) | (__u32)(__u16)~csum_replace(~(h->ip[2] >> 16), *address, peer) << 16;
	*address = peer;
	h->l4[0] = out ? (h->l4[0] & 0xffff) | (__u32)(peer >> 32) << 16 : (h->l4[0] & 0xffff0000) | (__u32)(peer >> 32);
}

/* nat_packet rewrites the peer in the TCP or UDP header at an offset, and updates the checksum
 * there. */
static __always_inline int nat_packet(struct __sk_buff *skb, __u32 l4, int out, const struct headers *was, __u64 peer, __u16 *check)
{
	int is_tcp = PROTOCOL(was, 0) == IPPROTO_TCP;
	__u32 at = l4 + (is_tcp ? __builtin_offsetof(struct tcphdr, check) : __builtin_offsetof(struct udphdr, check));
	__u64 flags = is_tcp ? 0 : BPF_F_MARK_MANGLED_0;
	__be16 port = peer >> 32;

	if (bpf_l4_csum_replace(skb, at, was->ip[out ? 4 : 3], (__u32)peer, flags | BPF_F_PSEUDO_HDR | sizeof(__u32)) ||
	    bpf_l4_csum_replace(skb, at, HALF(was->l4[0], out), port, flags | sizeof(port)) ||
	    bpf_skb_load_bytes(skb, at, check, sizeof(*check)))
		return -1;
	return bpf_skb_store_bytes(skb, l4 + (out ? 2 : 0), &port, sizeof(port), 0);
}

/* forward_headers writes what forwarding changes: the Ethernet addresses (to, then from), the hop limit (unless hops is 0, for
 * a bridge), and the peer if it is translated. It returns -1 if it failed halfway. */
static __always_inline int forward_headers(struct __sk_buff *skb, const __u8 *macs, __u32 hops, const struct headers *h, int out, __u64 was, __u64 is, int is_ipv6)
{
	struct {
		__u8 macs[2 * ETH_ALEN];
		__be16 protocol;
		__u8 ip[IP_HLEN];
	} head;
	int translated = !is_ipv6 && was != is;
	struct headers forwarded;
	__u16 check;

	__builtin_memcpy(head.macs, macs, sizeof(head.macs));
	head.protocol = bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
	copy_headers(&forwarded, h, is_ipv6);
	if (translated)
		nat_headers(&forwarded, out, is);
	if (hops)
		forwarded.ip[HOP_WORD(is_ipv6)] = decrement_hop_limit(forwarded.ip[HOP_WORD(is_ipv6)], is_ipv6);
	__builtin_memcpy(head.ip, forwarded.ip, CHANGES(is_ipv6));
	if (bpf_skb_store_bytes(skb, 0, &head, ETH_HLEN + CHANGES(is_ipv6), 0))
		return -1;
	return translated ? nat_packet(skb, sizeof(head), out, h, is, &check) : 0;
}

/* add_reverse_nat lets find_flow find the flow of packets from a translated peer. It returns -1 if the map is full. */
static __always_inline int add_reverse_nat(const struct key *k, __u64 wire_peer)
{
	struct key wire = with_peer(k, wire_peer);
	__u64 hash = hash_key(&wire);
	struct nat_entry nat = {.key = *k, .bloom_bit = hash % BLOOM_BITS};

	if (bpf_map_update_elem(&reverse_nat, &wire, &nat, BPF_ANY))
		return -1;
	bloom_set(hash);
	return 0;
}

/* find_flow returns the flow of a packet from the wire, and sets k to the key of that flow. k and wire may be the same. */
static __always_inline struct flow *find_flow(const struct key *wire, struct key *k, int is_ipv6)
{
	struct flow *f = bpf_map_lookup_elem(&flows, wire);
	const struct nat_entry *nat;

	*k = *wire;
	if (!is_ipv6 && !f) {
		nat = bpf_map_lookup_elem(&reverse_nat, wire);
		if (nat) {
			*k = nat->key;
			f = bpf_map_lookup_elem(&flows, k);
		}
	}
	return f;
}

/* forget_flow deletes the flow of a connection that opens or closes. Callers look it up first: looking up takes no lock. */
static __always_inline void forget_flow(const struct key *k, const struct flow *f)
{
	struct key wire;

	if (f->wire_peer != peer_of(k)) {
		wire = with_peer(k, f->wire_peer);
		bpf_map_delete_elem(&reverse_nat, &wire);
	}
	bpf_map_delete_elem(&flows, k);
}
