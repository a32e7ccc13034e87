/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* SYN, FIN and RST: what opens and ends connections. */
#pragma once

#include "nat.h"
#include "seq.h"

/* The longest chain of IPv6 extension headers that drop_forged parses; real traffic has fewer. */
#define EXTENSION_HEADERS_MAX 16

/* handle_flags deletes the flow that a SYN, FIN or RST opens anew or closes, if the packet comes
 * from its device: others may be forged. A SYN from the wire always may be, and a FIN of
 * acknowledged data is an old one. The agent hears of a reset that conntrack would act on. */
static __always_inline void handle_flags(const struct key *k, struct flow *f, int out, int own, const struct headers *h, __u64 now, int is_ipv6)
{
	const struct direction *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u8 flags = FLAGS(h);
	int next = SEQ(h) == back->rcv_nxt || SEQ(h) == w->snd_nxt;

	if (!own)
		return;
	if (flags & TCPHDR_SYN) {
		if (out)
			forget_flow(k, f);
	} else if (!f->seq_state) {
		return;
	} else if (!(flags & (TCPHDR_FIN | TCPHDR_RST))) {
		if (out)
			f->seq_state = 0;
		else if ((flags & TCPHDR_ACK) && in_window(w, back, h, is_ipv6))
			update_seq(f, 0, h, now, is_ipv6);
	} else if (ends_connection(f, out, h, seq_end(h, is_ipv6)) && !seq_after(back->rcv_nxt, seq_end(h, is_ipv6) + 1)) {
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

/* What drop_forged finds of a packet. */
enum { NOT_ENDING, ENDING, TOO_MANY_HEADERS };

/* find_ending tells whether a packet is a FIN or RST, wherever its TCP header is, and reads its
 * headers and the sequence number after its last byte. Conntrack parses extension headers without
 * limit; a longer chain than EXTENSION_HEADERS_MAX only hides what follows. */
static __always_inline int find_ending(const struct bpf_dynptr *packet, struct headers *h, __u32 *end, int is_ipv6)
{
	__u32 ip_buffer[10], buffer[5], at = HLEN(is_ipv6);
	const __u8 *ip = bpf_dynptr_slice(packet, 0, ip_buffer, HLEN(is_ipv6)), *data;
	const __u32 *l4;
	__u8 protocol, flags;
	int i;

	if (!ip)
		return NOT_ENDING;
	if (!is_ipv6) {
		if (ip[9] != IPPROTO_TCP || (HALF(((const __u32 *)ip)[1], 1) & bpf_htons(0x1fff)))
			return NOT_ENDING;
		at = (ip[0] & 0xf) * 4;
	} else {
		protocol = ip[6];
		for (i = 0; i < EXTENSION_HEADERS_MAX && protocol != IPPROTO_TCP; i++) {
			if (!is_extension_header(protocol))
				return NOT_ENDING;
			data = bpf_dynptr_slice(packet, at, buffer, 8);
			if (!data || (protocol == IPPROTO_FRAGMENT && ((const __u16 *)data)[1] & bpf_htons(0xfff8)))
				return NOT_ENDING;
			at += protocol == IPPROTO_AH ? (data[1] + 2) * 4 : protocol == IPPROTO_FRAGMENT ? 8 : (data[1] + 1) * 8;
			protocol = data[0];
		}
		if (protocol != IPPROTO_TCP)
			return is_extension_header(protocol) ? TOO_MANY_HEADERS : NOT_ENDING;
	}
	l4 = bpf_dynptr_slice(packet, at, buffer, sizeof(h->l4));
	if (!l4)
		return NOT_ENDING;
	flags = ((const __u8 *)l4)[13];
	if (likely(!(flags & (TCPHDR_FIN | TCPHDR_RST)) || (flags & TCPHDR_SYN)))
		return NOT_ENDING;
	copy(h->ip, ip, HLEN(is_ipv6));
	copy(h->l4, l4, sizeof(h->l4));
	*end = SEQ(h) + bpf_dynptr_size(packet) - at - DATA_OFFSET(h);
	return ENDING;
}
