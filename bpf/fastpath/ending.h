/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets that take the slow path because of their headers: SYN, FIN and RST, IP options, padding, fragments. Conntrack
 * sees them, so the flow follows them. */
#pragma once

#include "pod.h"
#include "seq.h"

/* handle_ending deletes the flow of a connection that a SYN opens again, or that a FIN or RST closes. It ignores SYNs from
 * the wire, which may be forged, and FINs that are already acknowledged. It reports to the agent a RST with which conntrack
 * would close the entry if it had seen all packets. */
static __always_inline void handle_ending(const struct key *k, struct flow *f, int out, const struct headers *h, __u32 end)
{
	const struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u8 flags = FLAGS(h);
	int next = SEQ(h) == to->rcv_nxt || SEQ(h) == from->snd_nxt;

	if (flags & TCPHDR_SYN) {
		if (out)
			forget_flow(k, f);
	} else if (!f->seq_state) {
		/* While the agent recovers a flow, it must learn that the pod closes the connection. */
		if (out && f->recovering)
			forget_flow(k, f);
	} else if (!ends_connection(f, out, h, end)) {
		if (out && !(flags & TCPHDR_RST))
			f->seq_state = SEQ_UNKNOWN; /* see follow */
	} else if (!seq_after(to->rcv_nxt, end + 1)) {
		if ((flags & TCPHDR_RST) && !out && !next)
			return; /* the pod answers with a challenge ACK (RFC 5961, section 3.2) */
		if ((flags & TCPHDR_RST) && next)
			emit(k, f, EVENT_RESET);
		forget_flow(k, f);
	}
}

/* follow_fragment marks the sequence numbers of a flow as unknown. The last fragment tells where the segment ends, but has no
 * ports, so the programs cannot find its flow. */
static __always_inline void follow_fragment(struct flow *f, int out, const struct headers *h)
{
	if (out || data_in_window(f, 0, SEQ(h), SEQ(h)))
		f->seq_state = SEQ_UNKNOWN;
}

/* follow_ip updates the flow of a packet from a pod (out), or from the network. It returns DROP if the packet was for the agent only,
 * else NEXT. */
static __always_inline int follow_ip(struct __sk_buff *skb, struct cpu_state *c, int out, int is_ipv6)
{
	struct segment *s = &c->refused;
	const struct headers *h = &s->headers;
	struct key wire, own;
	struct flow *f;
	__u64 hash;

	if (read_segment(skb, 1, s, is_ipv6) != SEGMENT)
		return NEXT;
	segment_key(&wire, h, out, is_ipv6);
	hash = hash_key(&wire);
	if (FLAGS(h) & (TCPHDR_SYN | TCPHDR_FIN | TCPHDR_RST))
		admission_reset(hash);
	own = wire;
	if (!bloom_test(hash))
		f = 0;
	else
		f = out ? bpf_map_lookup_elem(&flows, &own) : find_flow(&wire, &own, is_ipv6);
	if (out && !f) {
		out = 0;
		wire = own = reverse(&wire);
		f = find_flow_between(skb, &own, is_ipv6);
	}
	if (!f || !(out ? from_pod(skb, f, &own, h, is_ipv6) : to_pod(f, &wire, &own, h, is_ipv6)))
		return NEXT;
	if (out && f->out.template & TO_POD)
		start_detour(&f->out);
	else if (!out && f->seq_state && data_in_window(f, 0, SEQ(h), SEQ(h)))
		start_detour(&f->in);
	if (s->is_fragment) {
		follow_fragment(f, out, h);
		return NEXT;
	}
	if (FLAGS(h) & (TCPHDR_SYN | TCPHDR_FIN | TCPHDR_RST)) {
		if (out && f->recovering && refuses_keepalive(f, h)) {
			forget_flow(&own, f); /* the pod has no such connection */
			return DROP;
		}
		handle_ending(&own, f, out, h, s->end);
	} else if (FLAGS(h) & TCPHDR_ACK) {
		if (out && f->recovering && recover_seq(f, h, s->end))
			return DROP;
		follow(f, out, 1, h, s->end, bpf_ktime_get_coarse_ns());
	}
	return NEXT;
}

/* follow_refused follows a packet that classify has refused. It is global so that the verifier checks it once. */
__noinline int follow_refused(struct __sk_buff *skb, int out)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? follow_ip(skb, c, out, 1) : follow_ip(skb, c, out, 0);
}

/* find_ending tells whether a packet at a netfilter hook is a FIN or RST, and reads it: see read_segment. start is its IP
 * header and the TCP_START bytes after it. */
static __always_inline int find_ending(struct sk_buff *skb, const __u32 *start, struct segment *s, int is_ipv6)
{
	const __u8 *ip = (const void *)start, *tcp = ip + HLEN(is_ipv6);
	int plain = is_ipv6 ? ip[6] == IPPROTO_TCP : ip[0] == IHL_VERSION && ip[9] == IPPROTO_TCP;
	int result;

	if (likely(plain && (!(tcp[13] & (TCPHDR_FIN | TCPHDR_RST)) || tcp[13] & TCPHDR_SYN)))
		return NOT_SEGMENT;
	result = read_segment(skb, 0, s, is_ipv6);
	if (result == SEGMENT && (s->is_fragment || !(FLAGS(&s->headers) & (TCPHDR_FIN | TCPHDR_RST)) || FLAGS(&s->headers) & TCPHDR_SYN))
		return NOT_SEGMENT;
	return result;
}
