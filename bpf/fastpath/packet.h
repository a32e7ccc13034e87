/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Headers of packets: read, checked, compared. */
#pragma once

#include "csum.h"
#include "lib/net.h"
#include "reason.h"

#define barrier() asm volatile("" ::: "memory")
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Keys and addresses as two words, which are built, compared and hashed in registers. */
typedef __u64 word;

/* The header fields by which programs recognise a probe. All segments of a GSO packet have the same
 * values. They are words, not the kernel's structures, so that the compiler copies and compares whole words. */
struct headers {
	__u32 l4[4]; /* TCP: up to flags and window; UDP: ports and length */
	__u32 ip[10]; /* IPv4 uses 5 */
} __attribute__((aligned(8)));

/* Fields of the first and third word of the IPv4 header, and of the first two of the IPv6 header,
 * as they lie in memory. */
#define BYTE(word, n) ((__u8)((word) >> (8 * (n))))
#define HALF(word, n) ((__be16)((word) >> (16 * (n))))
#define TOS(h, is_ipv6) ((is_ipv6) ? (__u8)(bpf_ntohl((h)->ip[0]) >> 20) : BYTE((h)->ip[0], 1))
#define LENGTH(h, is_ipv6) \
	((is_ipv6) ? bpf_ntohs(HALF((h)->ip[1], 0)) + IP6_HLEN : bpf_ntohs(HALF((h)->ip[0], 1)))
#define HOP_LIMIT(h, is_ipv6) ((is_ipv6) ? BYTE((h)->ip[1], 3) : BYTE((h)->ip[2], 0))
#define PROTOCOL(h, is_ipv6) ((is_ipv6) ? BYTE((h)->ip[1], 2) : BYTE((h)->ip[2], 1))
/* The word that has the TTL or hop limit. */
#define HOP_WORD(is_ipv6) ((is_ipv6) ? 1 : 2)
/* How many bytes of the IP header the fast path rewrites. It never rewrites IPv6 addresses. */
#define CHANGES(is_ipv6) ((is_ipv6) ? 8 : IP_HLEN)

/* Fields of TCP. */
#define SEQ(h) bpf_ntohl((h)->l4[1])
#define ACK(h) bpf_ntohl((h)->l4[2])
#define DATA_OFFSET(h) ((BYTE((h)->l4[3], 0) >> 4) * 4)
#define FLAGS(h) BYTE((h)->l4[3], 1)
#define WINDOW(h) bpf_ntohs(HALF((h)->l4[3], 1))

/* field reads a pointer from the context, which is declared as 32 bits. The compiler would copy it
 * with 32-bit moves, and the verifier would then take it for a scalar. */
#define field(skb, name) ({ \
	void *__pointer; \
	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(__pointer) : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, name))); \
	__pointer; \
})

/* copy copies packet data word by word. The compiler cannot rely on any alignment, and would copy
 * single bytes. */
#define copy(to, from, size) do { \
	__u32 *__to = (void *)(to); \
	const __u32 *__from = (const void *)(from); \
	_Pragma("unroll") \
	for (__u32 __i = 0; __i < (size) / 4; __i++) \
		__to[__i] = __from[__i]; \
} while (0)

/* pull_data returns the first size bytes of the packet, or 0 if it is shorter. */
static __always_inline __u8 *pull_data(struct __sk_buff *skb, __u32 size)
{
	__u8 *data = field(skb, data);

	if (unlikely((void *)data + size > field(skb, data_end))) {
		if (bpf_skb_pull_data(skb, size))
			return 0;
		data = field(skb, data);
		if ((void *)data + size > field(skb, data_end))
			return 0;
	}
	return data;
}

/* check_headers returns 0, or the reason why a packet with these headers, which begin at an offset,
 * takes the slow path. */
static __always_inline int check_headers(const struct __sk_buff *skb, __u32 at, const struct headers *h, int is_ipv6)
{
	if (!is_ipv6 && HALF(h->ip[1], 1) & ~bpf_htons(IP_DF))
		return REASON_FRAGMENT;
	if (HOP_LIMIT(h, is_ipv6) <= 1)
		return REASON_TTL;
	if (LENGTH(h, is_ipv6) + at != skb->len)
		return REASON_MALFORMED;
	if (PROTOCOL(h, is_ipv6) == IPPROTO_TCP) {
		__u8 words = BYTE(h->l4[3], 0), flags = FLAGS(h);

		if ((words >> 4) < 5 || HLEN(is_ipv6) + (words >> 4) * 4 > LENGTH(h, is_ipv6))
			return REASON_MALFORMED;
		if ((flags & (TCPHDR_URG | TCPHDR_RST | TCPHDR_SYN | TCPHDR_FIN)) || !(flags & TCPHDR_ACK) || (words & 0xf))
			return REASON_TCP_FLAGS;
	} else if (bpf_ntohs(HALF(h->l4[1], 0)) != LENGTH(h, is_ipv6) - HLEN(is_ipv6)) {
		return REASON_MALFORMED;
	}
	return 0;
}

/* parse_headers copies the headers of a packet that peek_flow accepted, and its checksum field. It
 * returns 0, or the reason why the packet takes the slow path. */
static __always_inline int parse_headers(struct __sk_buff *skb, __u32 at, __u8 protocol, struct headers *h, __u16 *check, int is_ipv6)
{
	const __u32 l4 = at + HLEN(is_ipv6);
	__u8 *data;

	if (protocol == IPPROTO_TCP) {
		data = pull_data(skb, l4 + sizeof(struct tcphdr));
		if (!data)
			return REASON_MALFORMED;
		copy(h->ip, data + at, HLEN(is_ipv6));
		copy(h->l4, data + l4, sizeof(h->l4));
		*check = ((struct tcphdr *)(data + l4))->check;
	} else {
		data = pull_data(skb, l4 + sizeof(struct udphdr));
		if (!data)
			return REASON_MALFORMED;
		copy(h->ip, data + at, HLEN(is_ipv6));
		copy(h->l4, data + l4, 8);
		h->l4[1] &= 0xffff;
		h->l4[2] = h->l4[3] = 0;
		*check = ((struct udphdr *)(data + l4))->check;
		/* IPv6 forbids a checksum of zero (RFC 8200, section 8.1). */
		if (is_ipv6 && !*check)
			return REASON_MALFORMED;
	}
	return check_headers(skb, at, h, is_ipv6);
}

/* cut_padding cuts off what follows the IP packet in a short frame: a frame has 60 bytes at least (ETH_ZLEN). The kernel does the same
 * (ip_rcv_core in net/ipv4/ip_input.c). */
static __always_inline void cut_padding(struct __sk_buff *skb, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + HLEN(is_ipv6));
	__u32 length;

	if (!data)
		return;
	if (is_ipv6)
		length = IP6_HLEN + bpf_ntohs(((const struct ipv6hdr *)(data + ETH_HLEN))->payload_len);
	else
		length = bpf_ntohs(((const struct iphdr *)(data + ETH_HLEN))->tot_len);
	if (ETH_HLEN + length < skb->len)
		bpf_skb_change_tail(skb, ETH_HLEN + length, 0);
}

/* load_headers reads the headers at an offset, as those of a protocol, and fails if the packet is shorter. */
static __always_inline int load_headers(struct __sk_buff *skb, __u32 offset, __u8 protocol, struct headers *h, int is_ipv6)
{
	h->l4[1] = h->l4[2] = h->l4[3] = 0;
	if (bpf_skb_load_bytes(skb, offset, h->ip, HLEN(is_ipv6)))
		return -1;
	return bpf_skb_load_bytes(skb, offset + HLEN(is_ipv6), h->l4, protocol == IPPROTO_TCP ? sizeof(h->l4) : 6);
}

static __always_inline void copy_headers(struct headers *to, const struct headers *h, int is_ipv6)
{
	copy(to, h, __builtin_offsetof(struct headers, ip) + HLEN(is_ipv6));
}

/* decrement_hop_limit decrements the TTL or hop limit in its header word, and updates the IPv4
 * header checksum there. */
static __always_inline __u32 decrement_hop_limit(__u32 word, int is_ipv6)
{
	__u32 check = word >> 16;

	if (is_ipv6)
		return word - (1 << 24);
	check += bpf_htons(0x0100);
	check += check >= 0xffff;
	return (check << 16) | ((word & 0xffff) - 1);
}

/* hops_between returns 1 if one router has turned the first headers into the second (it decremented the hop limit), 0 if they
 * are equal, as after a bridge, and -1 otherwise. */
static __always_inline int hops_between(const struct headers *was, const struct headers *is, int is_ipv6)
{
	__u32 hop = was->ip[HOP_WORD(is_ipv6)];
	int i;

	for (i = 0; i < 4; i++)
		if (was->l4[i] != is->l4[i])
			return -1;
	for (i = 0; i < HLEN(is_ipv6) / 4; i++)
		if (i != HOP_WORD(is_ipv6) && was->ip[i] != is->ip[i])
			return -1;
	if (is->ip[HOP_WORD(is_ipv6)] == hop)
		return 0;
	return is->ip[HOP_WORD(is_ipv6)] == decrement_hop_limit(hop, is_ipv6) ? 1 : -1;
}

/* equal_headers tells whether all headers are equal. */
static __always_inline int equal_headers(const struct headers *a, const struct headers *b, int is_ipv6)
{
	int i;

	for (i = 0; i < 4; i++)
		if (a->l4[i] != b->l4[i])
			return 0;
	for (i = 0; i < HLEN(is_ipv6) / 4; i++)
		if (a->ip[i] != b->ip[i])
			return 0;
	return 1;
}

/* begins_with tells whether a packet is the first one, or begins with it because GRO has merged others into it: then its length
 * and checksums differ, and its TCP flags may. */
static __always_inline int begins_with(const struct headers *h, const struct headers *first, int is_ipv6)
{
	struct headers like = *first;

	if (PROTOCOL(h, is_ipv6) != IPPROTO_TCP || LENGTH(h, is_ipv6) <= LENGTH(first, is_ipv6))
		return equal_headers(h, first, is_ipv6);
	like.l4[3] = h->l4[3];
	if (is_ipv6) {
		like.ip[1] = (first->ip[1] & ~0xffffU) | HALF(h->ip[1], 0);
	} else {
		like.ip[0] = (first->ip[0] & 0xffff) | (h->ip[0] & ~0xffffU);
		like.ip[2] = (first->ip[2] & 0xffff) | (h->ip[2] & ~0xffffU);
	}
	return equal_headers(h, &like, is_ipv6);
}

/* equal_except_nat compares those fields that identify a packet and that NAT does not rewrite: TCP sequence number or UDP
 * length, and the identification of IPv4, or version, class, flow label and length of IPv6. */
static __always_inline int equal_except_nat(const struct headers *was, const struct headers *is, int is_ipv6)
{
	if (was->l4[1] != is->l4[1])
		return 0;
	if (is_ipv6)
		return was->ip[0] == is->ip[0] && HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
	return HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
}

/* address_of is the source or destination address of an IPv6 packet. */
static __always_inline const word *address_of(const struct headers *h, int source)
{
	return (const void *)&h->ip[source ? 2 : 6];
}

static __always_inline int equal_addresses(const word *a, const word *b)
{
	return a[0] == b[0] && a[1] == b[1];
}

/* equal_macs compares two pairs of MAC addresses. */
static __always_inline int equal_macs(const __u8 *a, const __u8 *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

/* nat_reason returns why the slow path wrote other headers of an IPv6 packet: by NAT, or otherwise. */
static __always_inline int nat_reason(const struct headers *was, const struct headers *is)
{
	return was->l4[0] != is->l4[0] || !equal_addresses(address_of(was, 1), address_of(is, 1)) ||
	       !equal_addresses(address_of(was, 0), address_of(is, 0)) ? REASON_NAT : REASON_REWRITTEN;
}

/* segment_length is the length of the longest segment that GSO will make of a packet. */
static __always_inline __u32 segment_length(const struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	if (!skb->gso_size)
		return LENGTH(h, is_ipv6);
	return skb->gso_size + HLEN(is_ipv6) + (PROTOCOL(h, is_ipv6) == IPPROTO_TCP ? DATA_OFFSET(h) : (int)sizeof(struct udphdr));
}
