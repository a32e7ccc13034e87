/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keys: how maps identify a connection. */
#pragma once

#include "packet.h"

/* A connection, seen from its pod. The peer is as the pod addresses it, or as it is on the wire; the
 * two differ if NAT translates the peer. IPv6 addresses are hashed, and struct flow has them in full.
 * Of two connections with the same key only one has a flow. */
struct key {
	__be32 pod, peer;
	__be16 pod_port, peer_port;
	__u8 protocol;
	__u8 is_ipv6;
	__u8 zero[2];
} __attribute__((aligned(8)));

/* PEER is an address and a port in one word. */
#define PEER(address, port) ((__u32)(address) | (__u64)(port) << 32)

static __always_inline __u64 peer_of(const struct key *k)
{
	return PEER(k->peer, k->peer_port);
}

/* with_peer is a key with another peer. */
static __always_inline struct key with_peer(const struct key *k, __u64 peer)
{
	struct key other = *k;

	other.peer = peer;
	other.peer_port = peer >> 32;
	return other;
}

/* reverse is the key of a packet as its other end has it. */
static __always_inline struct key reverse(const struct key *k)
{
	struct key other = *k;

	other.pod = k->peer;
	other.peer = k->pod;
	other.pod_port = k->peer_port;
	other.peer_port = k->pod_port;
	return other;
}

static __always_inline int same_key(const struct key *a, const struct key *b)
{
	const word *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1];
}

/* hash_key hashes a key; the Bloom filter and admission use different bits of it. */
static __always_inline __u64 hash_key(const struct key *k)
{
	const word *x = (const void *)k;
	__u64 h = x[0] + x[1] * 0x9e3779b97f4a7c15;

	h ^= h >> 32;
	h *= 0xd6e8feb86659fd93;
	return h ^ h >> 32;
}

/* make_key makes the key of a packet from its pod (out), or to it. */
static __always_inline void make_key(struct key *k, __be32 source, __be32 destination, __u32 ports, __u8 protocol, int out, int is_ipv6)
{
	word *words = (void *)k;

	words[0] = out ? source | (__u64)destination << 32 : destination | (__u64)source << 32;
	words[1] = (out ? ports : ports >> 16 | ports << 16) | (__u64)protocol << 32 | (__u64)!!is_ipv6 << 40;
}

/* hash_address hashes an IPv6 address for keys; hashAddr in Go computes the same. */
static __always_inline __u32 hash_address(const word *address)
{
	__u64 h = address[0] * 0x9e3779b97f4a7c15 + address[1];

	h ^= h >> 32;
	return h * 0xd6e8feb86659fd93 >> 32;
}

/* segment_key makes the key of a TCP segment from its pod (out), or to it. */
static __always_inline void segment_key(struct key *k, const struct headers *h, int out, int is_ipv6)
{
	__be32 source = is_ipv6 ? hash_address(address_of(h, 1)) : h->ip[3];
	__be32 destination = is_ipv6 ? hash_address(address_of(h, 0)) : h->ip[4];

	make_key(k, source, destination, h->l4[0], IPPROTO_TCP, out, is_ipv6);
}

/* peek_flow reads the flow key of the packet at an offset. The caller has made sure that an IPv4
 * header and the ports are there. It returns 0, or the reason why the packet has none. */
static __always_inline int peek_flow(struct __sk_buff *skb, const __u8 *data, __u32 at, struct key *k, int out, int is_ipv6)
{
	const struct ipv6hdr *ip6;
	const struct iphdr *ip;

	if (unlikely(skb->vlan_present))
		return REASON_NOT_TCP_UDP;
	if (!is_ipv6) {
		ip = (const void *)(data + at);
		if (data[at] != IHL_VERSION)
			return REASON_IP_OPTIONS;
		if (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP)
			return REASON_NOT_TCP_UDP;
		make_key(k, ip->saddr, ip->daddr, *(const __u32 *)(ip + 1), ip->protocol, out, 0);
		return 0;
	}
	data = pull_data(skb, at + IP6_HLEN + sizeof(struct udphdr));
	if (!data || data[at] >> 4 != 6)
		return REASON_NOT_TCP_UDP;
	ip6 = (const void *)(data + at);
	switch (ip6->nexthdr) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
		break;
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
		return REASON_IP_OPTIONS;
	case IPPROTO_FRAGMENT:
		return REASON_FRAGMENT;
	default:
		return REASON_NOT_TCP_UDP;
	}
	make_key(k, hash_address((const void *)&ip6->saddr), hash_address((const void *)&ip6->daddr),
		 *(const __u32 *)(ip6 + 1), ip6->nexthdr, out, 1);
	return 0;
}
