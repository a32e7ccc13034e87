/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Flows: the state of a connection, and how long it stays valid. */
#pragma once

#include "control.h"
#include "key.h"
#include "run.h"

#define MS 1000000ULL
/* How long a flow stays valid after the slow path forwarded one of its packets: less than a second
 * by any clock, because the coarse clock may be a tick behind. */
#define FLOW_TTL (1000 * MS - PROBE_TTL)
/* How long a probe may take to reach the program that waits for it: more than a tick of the coarse
 * clock. */
#define PROBE_TTL (10 * MS)
/* How often one packet takes the slow path to revalidate its flow; the shorter interval holds while
 * conntrack believes that data is unacknowledged (see check_conntrack). */
#define REVALIDATE_INTERVAL (500 * MS)
#define REVALIDATE_SOON (20 * MS)

/* In the template of an outgoing direction: the peer is a pod of the same node. */
#define TO_POD (1U << 31)

struct direction {
	/* validated: when the last packet that the slow path forwarded came in. revalidated: when a packet last
	 * took the slow path to revalidate the flow. backoff_until: the direction is not probed before then. */
	__u64 validated, revalidated, backoff_until;
	/* revalidate_after: the revalidation interval, ns. generation: the generation at the time in validated. */
	__u32 revalidate_after;
	__u32 generation;
	/* Where packets enter: a pod's veth, the VXLAN device or the NIC. */
	__u32 device;
	/* Index into encap_templates (out) or pod_links (in, or out with TO_POD); 0 is none. */
	__u32 template;
	__u8 tos, ttl;
	/* Out only: the longest inner packet that the route to the other node takes. */
	__u16 mtu;
	/* For packets to a pod only: the last run that a detour began (see run.h), and the time of the detour. */
	__u16 run;
	__u8 detoured;
	/* TCP only: the scale of the windows that this direction announces (RFC 7323). */
	__u8 scale;
};

/* The known sequence numbers of one side of a TCP connection. */
struct side {
	/* The end of what it has sent (SND.NXT), its highest acknowledgement (RCV.NXT), the right edge of the
	 * window that the other side announced. */
	__u32 snd_nxt, rcv_nxt, window_end;
	/* The epoch in which its last packet was seen. */
	__u32 epoch;
};

/* A TCP connection between two pods of a node has one flow: that of the pod that addresses the other through a Service, or
 * else that of the pod with the smaller address. Packets from the other pod are incoming.
 *
 * Usually one CPU handles the data of a stream, and another its acknowledgements. The fields that most
 * packets write are in the last 64 bytes, so that only this cache line bounces between the two CPUs. (A map
 * value begins at a multiple of 64 if the kernel's struct htab_elem has 48 bytes before the key.) */
struct flow {
	struct direction out, in;
	/* Destination and source MAC of what the pod sends. */
	__u8 mac[2 * ETH_ALEN];
	/* Its bit in the Bloom filter. */
	__u32 bloom_bit;
	/* The key, as the pod has it. Programs compare it, because the kernel may reuse a deleted element
	 * that they still read. */
	struct key key;
	/* The peer as the wire has it (PEER), in one word so that it is read atomically. */
	__u64 wire_peer;
	/* The last packet of this flow that decap_nic had seen and the kernel then decapsulated: the time (0 if there was
	 * none), the generation, and the index of the packet's outer headers in decap_templates. */
	__u64 decapped;
	__u32 decapped_generation;
	__u32 decapped_template;
	/* When the flow was last seen to end at a socket of the pod (see ends_at_socket). */
	__u64 socket_ended;
	/* IPv6 only: the addresses. */
	word pod6[2], peer6[2];
	/* When a GSO packet last reached the NIC; when the kernel last had to decapsulate one that later ones could overtake, or 0
	 * once a later one has taken a detour. */
	__u64 gso, left;
	/* TCP only. */
	struct side pod, peer;
	/* TCP only: the sequence numbers of the pod, and of the peer, when they became known, or when the agent was
	 * last asked to resynchronise conntrack. While the agent recovers the flow, the first is the acknowledgement
	 * number of its keepalive. */
	__u32 resynced[2];
	/* TCP only. seq_state: where the sequence numbers come from (SEQ_...). maybe_closed: the connection may
	 * have been closed before its flow became known (see is_open). recovering: the agent asks the pod for
	 * the sequence numbers (RECOVERING...). retransmitted: how often the pod has retransmitted data since
	 * it last sent new data, up to RETRANSMISSIONS. */
	__u8 seq_state, maybe_closed, recovering, retransmitted;
	/* When the last packet was seen, ms. */
	__u32 last_ms;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct key);
	__type(value, struct flow);
} flows SEC(".maps");

/* check_flow returns 0 if the slow path is known to forward the flow, or the reason why not. TCP
 * needs both directions. UDP may stay one-way for any length of time, so only that direction
 * counts, once conntrack has seen a reply (check_conntrack). */
static __always_inline int check_flow(const struct direction *w, const struct direction *back, const struct key *k, __u64 now)
{
	__u32 g = generation;

	if (k->protocol != IPPROTO_TCP)
		back = w;
	if (!w->validated || !back->validated || now - w->validated >= FLOW_TTL || now - back->validated >= FLOW_TTL)
		return REASON_FLOW_EXPIRED;
	if (w->generation != g || back->generation != g)
		return REASON_INVALIDATED;
	return 0;
}

/* revalidate_due tells whether this packet must take the slow path to revalidate its flow, and if
 * so, records the time. */
static __always_inline int revalidate_due(struct direction *w, __u64 now)
{
	if (now - w->validated < w->revalidate_after || now - w->revalidated < REVALIDATE_SOON)
		return 0;
	w->revalidated = now;
	return 1;
}

/* A packet takes a detour if it takes the slow path to a pod although later ones may be redirected there. */

/* detour_time is the time as struct direction has it, in units of 17 ms. */
static __always_inline __u8 detour_time(__u64 now)
{
	return now >> 24;
}

/* start_detour records that a packet takes a detour. */
static __always_inline void start_detour(struct direction *w)
{
	w->detoured = detour_time(bpf_ktime_get_coarse_ns());
	w->run = begin_run();
}

/* behind_detour tells whether a packet for a pod must take the slow path because earlier packets may still wait in a queue. */
static __always_inline int behind_detour(const struct direction *w, __u64 now)
{
	/* Signed, because another CPU may have written a later time. */
	return unlikely((__s8)(detour_time(now) - w->detoured) < 4) && is_under_way(w->run);
}

/* template_of reads the index of the template after validated. The address of the second load depends on the value of the
 * first, so that a CPU that reorders loads (arm64) does not read an older index. */
static __always_inline __u32 template_of(const struct direction *w)
{
	__u64 nothing = *(const volatile __u64 *)&w->validated;

	asm volatile("%0 &= 0" : "+r"(nothing));
	return *(const volatile __u32 *)((const void *)&w->template + nothing);
}

/* header_changed tells whether TOS or TTL differ from the validated ones. ECN marks may differ. */
static __always_inline int header_changed(const struct direction *w, const struct headers *h, int is_ipv6)
{
	return ((w->tos ^ TOS(h, is_ipv6)) & 0xfc) || w->ttl != HOP_LIMIT(h, is_ipv6);
}

/* addresses_match tells whether an IPv6 packet has the addresses of a flow with its key. */
static __always_inline int addresses_match(const struct flow *f, const struct headers *h, int out)
{
	return equal_addresses(f->pod6, address_of(h, out)) && equal_addresses(f->peer6, address_of(h, !out));
}

/* peer_matches tells whether a flow has the peer of a packet from the wire. */
static __always_inline int peer_matches(const struct flow *f, const struct key *wire)
{
	struct key is = with_peer(&f->key, *(const volatile __u64 *)&f->wire_peer);

	return same_key(&is, wire);
}

/* from_pod tells whether an outgoing packet belongs to the flow with its key. It must come from the
 * flow's device: a pod can forge everything else. */
static __always_inline int from_pod(const struct __sk_buff *skb, const struct flow *f, const struct key *k, const struct headers *h, int is_ipv6)
{
	return (f->out.device == skb->ifindex || !f->out.device) && same_key(&f->key, k) && (!is_ipv6 || addresses_match(f, h, 1));
}

/* to_pod tells whether an incoming packet belongs to the flow that find_flow found. */
static __always_inline int to_pod(const struct flow *f, const struct key *wire, const struct key *own, const struct headers *h, int is_ipv6)
{
	return same_key(&f->key, own) && (is_ipv6 ? addresses_match(f, h, 0) : peer_matches(f, wire));
}
