/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads TCP segments, also those with IP options, extension headers or padding, or longer than 64 KiB (BIG TCP).
 * Conntrack reads them too, so their sequence numbers count (nf_conntrack_in and
 * tcp_in_window in net/netfilter). */
#pragma once

#include "kernel.h"
#include "packet.h"

/* The longest chain of IPv6 extension headers that read_segment parses; real traffic has fewer. */
#define EXTENSION_HEADERS_MAX 16

/* The beginning of a TCP header that read_segment reads. */
#define TCP_START ((int)sizeof(((struct headers *)0)->l4))
/* The part of the TCP header that is in every first fragment (RFC 791): the ports and the sequence number. */
#define FRAGMENT_START 8

struct segment {
	/* The IP header without options, and the beginning of the TCP header: of a fragment, FRAGMENT_START bytes. */
	struct headers headers;
	/* The sequence number after the last byte, unknown for a fragment. */
	__u32 end;
	/* The first fragment of several. The others do not tell which connection they belong to. */
	__u32 is_fragment;
};

/* Results of read_segment. */
enum { SEGMENT, NOT_SEGMENT, TOO_MANY_HEADERS };

/* is_extension_header tells whether an IPv6 header is one that may precede TCP. */
static __always_inline int is_extension_header(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS || protocol == IPPROTO_FRAGMENT ||
	       protocol == IPPROTO_AH;
}

/* read_skb copies bytes of a packet at a netfilter hook, and fails if it is shorter. Nearly all packets have their
 * headers in the linear part, and a dynptr takes three times as long to read. */
static __always_inline long read_skb(struct sk_buff *skb, __u32 at, void *to, __u32 size)
{
	struct bpf_dynptr packet;

	if (likely(at + size <= skb->len - skb->data_len))
		return bpf_probe_read_kernel(to, size, skb->data + at);
	if (bpf_dynptr_from_skb((void *)skb, 0, &packet))
		return -1;
	return bpf_dynptr_read(to, size, &packet, at, 0);
}

/* read_ip copies bytes of a packet at an offset from its IP header. At a tc hook, skb is a struct __sk_buff, else a
 * struct sk_buff. */
static __always_inline long read_ip(void *skb, int at_tc, __u32 at, void *to, __u32 size)
{
	return at_tc ? bpf_skb_load_bytes(skb, ETH_HLEN + at, to, size) : read_skb(skb, at, to, size);
}

/* skip_extension_headers returns the offset of the TCP header of an IPv6 packet, or a negative result of read_segment. */
static __always_inline int skip_extension_headers(void *skb, int at_tc, __u8 protocol, __u32 *is_fragment)
{
	__u32 at = IP6_HLEN;
	__u8 extension[8];
	int i;

	for (i = 0; i < EXTENSION_HEADERS_MAX && protocol != IPPROTO_TCP; i++) {
		if (!is_extension_header(protocol) || read_ip(skb, at_tc, at, extension, sizeof(extension)))
			return -NOT_SEGMENT;
		if (protocol == IPPROTO_FRAGMENT) {
			if (extension[2] || extension[3] & (IP6_OFFSET & 0xff))
				return -NOT_SEGMENT;
			*is_fragment |= extension[3] & IP6_MF;
		}
		at += protocol == IPPROTO_AH ? (extension[1] + 2) * 4 : protocol == IPPROTO_FRAGMENT ? 8 : (extension[1] + 1) * 8;
		protocol = extension[0];
	}
	if (protocol != IPPROTO_TCP)
		return is_extension_header(protocol) ? -TOO_MANY_HEADERS : -NOT_SEGMENT;
	return at;
}

/* read_segment reads a TCP segment that conntrack would accept as one. Conntrack parses any number of extension headers;
 * a chain longer than EXTENSION_HEADERS_MAX can only be there to hide the TCP header. */
static __always_inline int read_segment(void *skb, int at_tc, struct segment *s, int is_ipv6)
{
	__u32 has = at_tc ? ((struct __sk_buff *)skb)->len - ETH_HLEN : ((struct sk_buff *)skb)->len;
	struct headers *h = &s->headers;
	__u32 length;
	int at;

	s->is_fragment = 0;
	if (read_ip(skb, at_tc, 0, h->ip, HLEN(is_ipv6)))
		return NOT_SEGMENT;
	if (is_ipv6) {
		at = skip_extension_headers(skb, at_tc, PROTOCOL(h, 1), &s->is_fragment);
		if (at < 0)
			return -at;
	} else {
		at = (BYTE(h->ip[0], 0) & 0xf) * 4;
		if (PROTOCOL(h, 0) != IPPROTO_TCP || at < IP_HLEN || HALF(h->ip[1], 1) & bpf_htons(IP_OFFSET))
			return NOT_SEGMENT;
		s->is_fragment = HALF(h->ip[1], 1) & bpf_htons(IP_MF);
	}
	/* Padding does not count. BIG TCP packets have no length: only that of the skb (skb_ip_totlen). */
	length = LENGTH(h, is_ipv6);
	if (length == (is_ipv6 ? IP6_HLEN : 0))
		length = has;
	if (length > has)
		return NOT_SEGMENT;
	h->l4[2] = h->l4[3] = 0;
	if (s->is_fragment)
		return read_ip(skb, at_tc, at, h->l4, FRAGMENT_START) ? NOT_SEGMENT : SEGMENT;
	if (read_ip(skb, at_tc, at, h->l4, TCP_START) || DATA_OFFSET(h) < (int)sizeof(struct tcphdr) || at + DATA_OFFSET(h) > (int)length)
		return NOT_SEGMENT;
	s->end = SEQ(h) + length - at - DATA_OFFSET(h);
	return SEGMENT;
}
