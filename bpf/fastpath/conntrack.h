/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Look-ups in the kernel's connection tracking. */
#pragma once

#include "cpu.h"
#include "kernel.h"
#include "seq.h"

/* is_open tells whether a TCP connection is still open although its conntrack entry is not ESTABLISHED. A forged FIN can cause
 * that, because the entry is liberal; a genuine one deletes a known flow (handle_ending). If a killed agent left the entry
 * liberal, a genuine FIN may have come before the flow became known. Then the connection is open if both sides have sent data
 * since: no data follows a FIN. */
static __always_inline int is_open(struct flow *f)
{
	if (!f->seq_state)
		f->maybe_closed = 1;
	else if (f->pod.snd_nxt != f->resynced[0] && f->peer.snd_nxt != f->resynced[1])
		f->maybe_closed = 0;
	return !f->maybe_closed;
}

/* look_up_conntrack returns the entry of a connection. It looks for the tuple of packets from the pod, and opts->dir tells
 * whether these are replies. The caller releases the entry. */
static __always_inline struct nf_conn *look_up_conntrack(struct __sk_buff *skb, const struct key *k, const word *pod6, const word *peer6,
							 struct bpf_ct_opts *opts, int is_ipv6)
{
	struct bpf_sock_tuple tuple = {};

	opts->netns_id = BPF_F_CURRENT_NETNS;
	opts->l4proto = k->protocol;
	if (is_ipv6) {
		copy(tuple.ipv6.saddr, pod6, sizeof(tuple.ipv6.saddr));
		copy(tuple.ipv6.daddr, peer6, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = k->pod_port;
		tuple.ipv6.dport = k->peer_port;
	} else {
		tuple.ipv4.saddr = k->pod;
		tuple.ipv4.daddr = k->peer;
		tuple.ipv4.sport = k->pod_port;
		tuple.ipv4.dport = k->peer_port;
	}
	return bpf_skb_ct_lookup(skb, &tuple, is_ipv6 ? sizeof(tuple.ipv6) : sizeof(tuple.ipv4), opts, sizeof(*opts));
}

/* tracked_peer returns the peer's address and port on the wire, which are the source of its packets before NAT. */
static __always_inline __u64 tracked_peer(const struct nf_conn *ct, const struct bpf_ct_opts *opts)
{
	if (opts->dir)
		return PEER(ct->tuplehash[0].tuple.src.u3.ip, ct->tuplehash[0].tuple.src.u.all);
	return PEER(ct->tuplehash[1].tuple.src.u3.ip, ct->tuplehash[1].tuple.src.u.all);
}

/* translated_peer returns the peer of an IPv4 packet from a pod after NAT, if conntrack has the connection. */
static __always_inline __u64 translated_peer(struct __sk_buff *skb, const struct key *k)
{
	struct bpf_ct_opts opts = {};
	struct nf_conn *ct = look_up_conntrack(skb, k, 0, 0, &opts, 0);
	__u64 peer = peer_of(k);

	if (!ct)
		return peer;
	peer = tracked_peer(ct, &opts);
	bpf_ct_release(ct);
	return peer;
}

/* check_conntrack returns 0 if the connection of a packet is established in conntrack, with the addresses that
 * the packet had at each hook. Otherwise it returns the reason why the packet takes the slow path.
 *
 * Conntrack tracks TCP sequence numbers, and marks packets outside the window as invalid. Once it has missed
 * packets, most of those that it still sees are outside. So the agent makes the entry liberal by netlink, as
 * the kernel does for a flowtable (nft_flow_offload_eval). From then on, packets outside the window change
 * nothing but the timeout. If conntrack misses an acknowledgement, the flag DATA_UNACKNOWLEDGED stays set, and
 * the timeout is five minutes instead of days; the agent clears the flag. Conntrack checks RSTs against
 * the sequence numbers that it knows. The agent resynchronises these before they
 * are half the sequence space behind, and when the connection is idle or leaves the fast
 * path (package conntrack). */
static __always_inline int check_conntrack(struct __sk_buff *skb, const struct probe *p, struct flow *f, int out, __u32 *interval, int is_ipv6)
{
	const word *pod6 = address_of(&p->headers, out), *peer6 = address_of(&p->headers, !out);
	const struct key *k = &p->key;
	struct bpf_ct_opts opts = {};
	__be32 destination;
	__u64 source;
	__be16 to;
	unsigned long status;
	struct nf_conn *ct;
	int reason = 0, straight = 1, i;

	*interval = REVALIDATE_INTERVAL;
	ct = look_up_conntrack(skb, k, pod6, peer6, &opts, is_ipv6);
	if (!ct)
		return REASON_UNTRACKED;
	status = ct->status;
	/* The tuple of replies, before NAT. */
	if (is_ipv6) {
		const struct nf_conntrack_tuple *back = opts.dir ? &ct->tuplehash[0].tuple : &ct->tuplehash[1].tuple;

		for (i = 0; i < 4; i++)
			straight &= back->src.u3.ip6[i] == ((const __u32 *)peer6)[i] && back->dst.u3.ip6[i] == ((const __u32 *)pod6)[i];
		source = PEER(k->peer, back->src.u.all);
		destination = k->pod;
		to = back->dst.u.all;
	} else {
		source = tracked_peer(ct, &opts);
		destination = opts.dir ? ct->tuplehash[0].tuple.dst.u3.ip : ct->tuplehash[1].tuple.dst.u3.ip;
		to = opts.dir ? ct->tuplehash[0].tuple.dst.u.all : ct->tuplehash[1].tuple.dst.u.all;
	}
	if (status & (IPS_OFFLOAD | IPS_HW_OFFLOAD)) {
		reason = REASON_FLOWTABLE; /* its packets have no entry attached, and only the flowtable may change the entry */
	} else if (!straight || (status & IPS_SEQ_ADJUST) || source != p->wire_peer || destination != k->pod || to != k->pod_port) {
		reason = REASON_NAT;
	} else if ((unsigned long)ct != p->ct) {
		reason = REASON_UNTRACKED; /* such as one in another zone */
	} else if (status & IPS_HELPER) {
		reason = REASON_CT_HELPER;
	} else if ((status & (IPS_SEEN_REPLY | IPS_CONFIRMED | IPS_DYING)) != (IPS_SEEN_REPLY | IPS_CONFIRMED)) {
		reason = REASON_UNREPLIED;
	} else if (k->protocol == IPPROTO_TCP) {
		/* The pod is the originator of the connection, or the responder. */
		const struct ip_ct_tcp_state *pod = opts.dir ? &ct->proto.tcp.seen[1] : &ct->proto.tcp.seen[0];
		const struct ip_ct_tcp_state *peer = opts.dir ? &ct->proto.tcp.seen[0] : &ct->proto.tcp.seen[1];
		__u8 both = pod->flags & peer->flags, either = pod->flags | peer->flags;

		if (ct->proto.tcp.state != TCP_CONNTRACK_ESTABLISHED)
			reason = both & IP_CT_TCP_FLAG_BE_LIBERAL ? REASON_TCP_WINDOW : REASON_UNREPLIED;
		else if (!(both & IP_CT_TCP_FLAG_BE_LIBERAL))
			reason = REASON_TCP_WINDOW;
		if (f && ct->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED)
			f->maybe_closed = 0;
		else if (f && reason == REASON_TCP_WINDOW && is_open(f))
			emit(k, f, EVENT_REOPEN);
		if (either & IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED)
			*interval = REVALIDATE_SOON;
		if (f) {
			/* Packets took a path that the programs do not see. */
			if (seq_after(pod->td_end, f->pod.snd_nxt) || seq_after(peer->td_end, f->peer.snd_nxt))
				f->seq_state = SEQ_UNKNOWN;
			/* Conntrack does not know the window scale of a connection that it
			 * picked up mid-stream. */
			f->out.scale = both & IP_CT_TCP_FLAG_WINDOW_SCALE ? pod->td_scale : TCP_MAX_WSCALE;
			f->in.scale = both & IP_CT_TCP_FLAG_WINDOW_SCALE ? peer->td_scale : TCP_MAX_WSCALE;
			/* Until redirect_pod has seen a packet from the pod, it may not be attached to the pod's
			 * link. Then the programs do not know what the pod has acknowledged, and the
			 * agent could not resynchronise the entry. */
			if (!(both & IP_CT_TCP_FLAG_BE_LIBERAL)) {
				if (out || f->seq_state >= SEQ_FROM_POD)
					emit(k, f, EVENT_LIBERAL);
			} else if (!reason && (either & IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED) && f->seq_state &&
				 (pod->td_end != f->pod.snd_nxt || peer->td_end != f->peer.snd_nxt))
				emit(k, f, EVENT_ACKED);
			/* Conntrack is behind, or has the connection as retransmitting or with a zero window.
			 * A forged packet can cause that, and packets outside the window do not clear it. */
			if (!reason && f->seq_state &&
			    (f->pod.snd_nxt - pod->td_end >= RESYNC_BYTES || f->peer.snd_nxt - peer->td_end >= RESYNC_BYTES ||
			     ((!ct->proto.tcp.last_win || ct->proto.tcp.retrans) && (pod->td_end != f->pod.snd_nxt || peer->td_end != f->peer.snd_nxt))))
				emit(k, f, EVENT_RESYNC);
		}
	}
	bpf_ct_release(ct);
	return reason;
}
