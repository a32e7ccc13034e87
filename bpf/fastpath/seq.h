/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sequence numbers and windows of TCP. Conntrack does not see the packets that take the fast path,
 * so these functions follow the connection as conntrack would (tcp_in_window in
 * net/netfilter/nf_conntrack_proto_tcp.c).
 */
#pragma once

#include "event.h"

/* After this many bytes the agent resynchronises conntrack, which has not seen them. Conntrack compares sequence
 * numbers modulo 2^32, so it must never be 2^31 behind. */
#define RESYNC_BYTES (1U << 30)

/* After this many retransmissions without new data the pod's last data counts as unacknowledged. (The timer retransmits it three
 * times within two seconds. A tail loss probe, RFC 8985, retransmits it once, even if the acknowledgement is on its way.) */
#define RETRANSMISSIONS 3

/* The source of a flow's sequence numbers: none yet; a packet of the peer, which any host can forge; a
 * packet of the pod; or the pod, and a later packet of the peer has confirmed the size of the
 * peer's window. */
enum { SEQ_UNKNOWN, SEQ_FROM_PEER, SEQ_FROM_POD, SEQ_CONFIRMED };

/* RECOVERING: the agent asks the pod for the sequence numbers. RECOVERING_IN_USE: meanwhile, the peer has sent a packet. */
enum { RECOVERING = 1, RECOVERING_IN_USE };

/* seq_after compares TCP sequence numbers (RFC 9293, section 3.4). */
static __always_inline int seq_after(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

/* seq_end is the sequence number after the packet's last byte. */
static __always_inline __u32 seq_end(const struct headers *h, int is_ipv6)
{
	return SEQ(h) + LENGTH(h, is_ipv6) - HLEN(is_ipv6) - DATA_OFFSET(h);
}

/* data_in_window tells whether data begins before the right edge of the other side's window, and ends
 * at most one maximum window before what that side has acknowledged. ack_in_window tells whether the
 * other side may have sent what is acknowledged, and the acknowledgement is not too old. */
static __always_inline int data_in_window(const struct flow *f, int out, __u32 seq, __u32 end)
{
	const struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u32 scale = out ? f->in.scale : f->out.scale;

	return !seq_after(seq, from->window_end) && !seq_after(to->rcv_nxt - (0xffff << (scale & 15)), end);
}

static __always_inline int ack_in_window(const struct flow *f, int out, __u32 ack)
{
	const struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u32 scale = out ? f->out.scale : f->in.scale;

	return !seq_after(ack, to->window_end) && !seq_after(from->rcv_nxt - (0xffff << (scale & 15)), ack);
}

/* in_window tells whether conntrack would call a TCP packet valid if it had seen all packets before
 * it. */
static __always_inline int in_window(const struct flow *f, int out, const struct headers *h, __u32 end)
{
	return data_in_window(f, out, SEQ(h), end) && ack_in_window(f, out, ACK(h));
}

/* ends_connection tells whether conntrack would accept a FIN or RST if it had seen all packets: a FIN
 * in the window, or a RST in it whose sequence number is at least the highest acknowledgement minus 1. Some
 * hosts use that number to reset a connection that they have closed (tcp_reset_check in
 * net/ipv4/tcp_input.c). */
static __always_inline int ends_connection(const struct flow *f, int out, const struct headers *h, __u32 end)
{
	if (!data_in_window(f, out, SEQ(h), end))
		return 0;
	if (FLAGS(h) & TCPHDR_RST)
		return !seq_after(out ? f->peer.rcv_nxt : f->pod.rcv_nxt, SEQ(h) + 1);
	return ack_in_window(f, out, ACK(h));
}

/* advance moves a sequence number forward. Several CPUs may handle packets of a connection at once, and
 * the highest number must win: if it is the last, no later packet corrects it. */
static __always_inline void advance(__u32 *to, __u32 number)
{
	__u32 was = *(volatile __u32 *)to, is;
	int i;

	for (i = 0; i < 4 && seq_after(number, was); i++) {
		is = __sync_val_compare_and_swap(to, was, number);
		if (is == was)
			return;
		was = is;
	}
}

/* update_seq records the sequence numbers of a packet in the window; end is the one after its last byte. */
static __always_inline void update_seq(struct flow *f, int out, const struct headers *h, __u32 end, __u64 now)
{
	struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u32 is = epoch, ms = now / MS, scale = out ? f->out.scale : f->in.scale;
	__u32 ack = ACK(h), edge;

	/* The peer cannot acknowledge data that redirect_pod has not seen the pod send. */
	if (!out && f->seq_state >= SEQ_FROM_POD && unlikely(seq_after(ack, to->snd_nxt)))
		ack = to->snd_nxt;
	edge = ack + (WINDOW(h) << (scale & 15));
	if (!out && unlikely(f->seq_state == SEQ_FROM_POD)) {
		/* init_seq had to assume the largest window. */
		to->window_end = seq_after(edge, to->snd_nxt) ? edge : to->snd_nxt;
		f->seq_state = SEQ_CONFIRMED;
	}
	if (seq_after(end, from->snd_nxt)) {
		advance(&from->snd_nxt, end);
		advance(&from->window_end, end);
		if (unlikely(end - f->resynced[!out] >= RESYNC_BYTES)) {
			f->resynced[!out] = end;
			emit(&f->key, f, EVENT_RESYNC);
		}
		if (unlikely(f->retransmitted) && out)
			f->retransmitted = 0;
	} else if (out && end != SEQ(h) && f->retransmitted < RETRANSMISSIONS) {
		f->retransmitted++;
	}
	advance(&from->rcv_nxt, ack);
	advance(&to->snd_nxt, ack); /* sent before the flow was known */
	advance(&to->window_end, edge);
	if (from->epoch != is)
		from->epoch = is;
	if (f->last_ms != ms)
		f->last_ms = ms;
}

/* follow records the sequence numbers of a packet if they are in the window, and tells whether they are. Nobody else can
 * send from the pod's own device: if a packet from there is outside the window, the known numbers are wrong. */
static __always_inline int follow(struct flow *f, int out, int ours, const struct headers *h, __u32 end, __u64 now)
{
	if (!out && ours && unlikely(f->recovering))
		f->recovering = RECOVERING_IN_USE;
	if (f->seq_state < (out ? SEQ_FROM_POD : SEQ_FROM_PEER))
		return 0;
	if (unlikely(!in_window(f, out, h, end))) {
		if (out && ours)
			f->seq_state = SEQ_UNKNOWN;
		return 0;
	}
	if (ours)
		update_seq(f, out, h, end, now);
	return 1;
}

/* init_seq sets the sequence numbers from the first packet. The window of the other side is unknown until its next
 * packet; until then, assume the largest. */
static __always_inline void init_seq(struct flow *f, int out, const struct headers *h, __u32 end)
{
	struct side *from = out ? &f->pod : &f->peer, *to = out ? &f->peer : &f->pod;
	__u32 scale = out ? f->out.scale : f->in.scale;

	from->snd_nxt = end;
	from->rcv_nxt = to->snd_nxt = ACK(h);
	to->rcv_nxt = SEQ(h);
	to->window_end = ACK(h) + (WINDOW(h) << (scale & 15));
	from->window_end = from->snd_nxt + (0xffff << ((out ? f->in.scale : f->out.scale) & 15));
	f->resynced[0] = f->pod.snd_nxt;
	f->resynced[1] = f->peer.snd_nxt;
	from->epoch = to->epoch = epoch;
	f->seq_state = out ? SEQ_FROM_POD : SEQ_FROM_PEER;
}

/* recover_seq takes the sequence numbers from the pod's answer to the agent's keepalive, and tells
 * whether the packet was for the agent only. A packet with data is not the answer. If the peer has sent
 * something meanwhile, the answer may acknowledge that too. */
static __always_inline int recover_seq(struct flow *f, const struct headers *h, __u32 end)
{
	int state = f->seq_state, alone = f->recovering == RECOVERING;

	f->recovering = 0;
	if (state >= SEQ_FROM_POD || end != SEQ(h))
		return 0;
	init_seq(f, 1, h, end);
	return alone && !state;
}

/* refuses_keepalive tells whether a RST of the pod answers the agent's keepalive. Such a RST has the acknowledgement number of the
 * keepalive as its sequence number, and acknowledges nothing (RFC 9293, section 3.5.2). A RST that ends the connection differs,
 * and so may one that answers a packet of the peer. */
static __always_inline int refuses_keepalive(const struct flow *f, const struct headers *h)
{
	return !f->seq_state && (FLAGS(h) & (TCPHDR_RST | TCPHDR_ACK)) == TCPHDR_RST && SEQ(h) == f->resynced[0];
}

/* seq_complete tells whether sequence numbers are known and the programs have seen every packet
 * since. */
static __always_inline int seq_complete(const struct flow *f)
{
	return f->seq_state && f->pod.epoch == epoch && f->peer.epoch == epoch;
}
