/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* SYN, FIN and RST: packets that open and end connections. */
#pragma once

#include "nat.h"
#include "seq.h"

/* The longest chain of IPv6 extension headers that drop_forged parses; real traffic has fewer. */
#define EXTENSION_HEADERS_MAX 16

/* handle_flags deletes the flow that a SYN, FIN or RST reopens or closes. It ignores packets from
 * another device than the flow's and any SYN from the wire, because they may be forged, and a FIN
 * that is already acknowledged. It reports a RST that conntrack would act on to the agent. */
static __always_inline void handle_flags(const struct key *k, struct flow *f, int out, int own, const struct headers *h, __u64 now, int is_ipv6)
{
	const struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u8 flags = FLAGS(h);
	int next = SEQ(h) == to->rcv_nxt || SEQ(h) == from->snd_nxt;

	if (!own)
		return;
	if (flags & TCPHDR_SYN) {
		if (out)
			forget_flow(k, f);
	} else if (!f->seq_state) {
		/* While the agent recovers a flow, it must learn that the pod closes the connection. */
		if (out && f->recovering && (flags & (TCPHDR_FIN | TCPHDR_RST)))
			forget_flow(k, f);
	} else if (!(flags & (TCPHDR_FIN | TCPHDR_RST))) {
		if (out)
			f->seq_state = 0;
		else if ((flags & TCPHDR_ACK) && in_window(f, 0, h, is_ipv6))
			update_seq(f, 0, h, now, is_ipv6);
	} else if (ends_connection(f, out, h, seq_end(h, is_ipv6)) && !seq_after(to->rcv_nxt, seq_end(h, is_ipv6) + 1)) {
		if ((flags & TCPHDR_RST) && !out && !next)
			return; /* the pod answers with a challenge ACK (RFC 5961, section 3.2) */
		if ((flags & TCPHDR_RST) && next)
			emit(k, f, EVENT_RESET);
		forget_flow(k, f);
	}
}

/* is_extension_header tells whether an IPv6 header is one that may precede TCP. */
static __always_inline int is_extension_header(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS || protocol == IPPROTO_FRAGMENT ||
	       protocol == IPPROTO_AH;
}

/* How much of a TCP header find_ending reads. */
#define TCP_START ((int)sizeof(((struct headers *)0)->l4))

/* Results of find_ending. */
enum { NOT_ENDING, ENDING, TOO_MANY_HEADERS };

/* read_packet copies bytes of a packet, and fails if it is shorter. Nearly all packets have their headers in
 * the linear part, and a dynptr takes three times as long to read. */
static __always_inline long read_packet(struct sk_buff *skb, __u32 at, void *to, __u32 size)
{
	struct bpf_dynptr packet;

	if (likely(at + size <= skb->len - skb->data_len))
		return bpf_probe_read_kernel(to, size, skb->data + at);
	if (bpf_dynptr_from_skb((void *)skb, 0, &packet))
		return -1;
	return bpf_dynptr_read(to, size, &packet, at, 0);
}

/* find_ending tells whether a packet is a FIN or RST, wherever its TCP header is, and reads its
 * headers and the sequence number after its last byte. start is the IP header and the TCP_START bytes
 * after it. Conntrack parses any number of extension headers. A chain longer than
 * EXTENSION_HEADERS_MAX can only be there to hide the TCP header. */
static __always_inline int find_ending(struct sk_buff *skb, __u32 *start, struct headers *h, __u32 *end, int is_ipv6)
{
	__u32 at = HLEN(is_ipv6), *l4 = start + HLEN(is_ipv6) / 4;
	const __u8 *ip = (const void *)start;
	__u8 protocol, flags, extension[8];
	int i;

	if (!is_ipv6) {
		if (ip[9] != IPPROTO_TCP || (HALF(start[1], 1) & bpf_htons(0x1fff)))
			return NOT_ENDING;
		at = (ip[0] & 0xf) * 4;
	} else {
		protocol = ip[6];
		for (i = 0; i < EXTENSION_HEADERS_MAX && protocol != IPPROTO_TCP; i++) {
			if (!is_extension_header(protocol))
				return NOT_ENDING;
			if (read_packet(skb, at, extension, sizeof(extension)) ||
			    (protocol == IPPROTO_FRAGMENT && (extension[2] || extension[3] & 0xf8)))
				return NOT_ENDING;
			at += protocol == IPPROTO_AH ? (extension[1] + 2) * 4 : protocol == IPPROTO_FRAGMENT ? 8 : (extension[1] + 1) * 8;
			protocol = extension[0];
		}
		if (protocol != IPPROTO_TCP)
			return is_extension_header(protocol) ? TOO_MANY_HEADERS : NOT_ENDING;
	}
	if (unlikely(at != HLEN(is_ipv6)) && read_packet(skb, at, l4, TCP_START))
		return NOT_ENDING;
	flags = BYTE(l4[3], 1);
	if (likely(!(flags & (TCPHDR_FIN | TCPHDR_RST)) || (flags & TCPHDR_SYN)))
		return NOT_ENDING;
	copy(h->ip, start, HLEN(is_ipv6));
	copy(h->l4, l4, TCP_START);
	*end = SEQ(h) + skb->len - at - DATA_OFFSET(h);
	return ENDING;
}
