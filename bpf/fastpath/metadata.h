/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Metadata: the fields of an skb that queues, filters and sockets read besides the packet. Netfilter and tc on the
 * slow path can set them. docs/explanation/fastpath.md has a table of all fields. */
#pragma once

#include "kernel.h"
#include "packet.h"

/* The fields that neither a device nor the fast path changes. */
struct metadata {
	__u32 secmark, tc_index;
};

static __always_inline __u32 secmark(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return bpf_core_field_exists(s->secmark) ? s->secmark : 0;
}

static __always_inline void read_metadata(struct __sk_buff *skb, struct metadata *m)
{
	m->secmark = secmark(skb);
	m->tc_index = skb->tc_index;
}

static __always_inline int same_metadata(struct __sk_buff *skb, const struct metadata *m)
{
	return m->secmark == secmark(skb) && m->tc_index == skb->tc_index;
}

/* priority_of is the skb->priority with which the slow path forwards a packet from a pod: ip_forward derives it from
 * TOS (rt_tos2prio in include/net/route.h), ip6_forward keeps it. */
static __always_inline __u32 priority_of(const struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	/* Best effort, bulk, interactive, interactive bulk: four bits each, from the lowest. */
	return is_ipv6 ? skb->priority : 0x4620 >> 4 * (TOS(h, 0) >> 3 & 3) & 7;
}

/* set_metadata_at_nic gives a packet from a pod the metadata with which the slow path sends it. A VXLAN device has one queue, and
 * packets that it encapsulates are the node's own; a routed packet keeps its queue. */
static __always_inline void set_metadata_at_nic(struct __sk_buff *skb, const struct headers *h, int encapsulated, int is_ipv6)
{
	skb->priority = priority_of(skb, h, is_ipv6);
	if (encapsulated)
		skb->queue_mapping = 0;
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
}

/* delivery_time returns the time at which the NIC's queue has to send a packet from a pod (EDT), or 0. Forwarding keeps it, and
 * clears other time stamps (skb_clear_tstamp); so does bpf_redirect. */
static __always_inline __u64 delivery_time(const struct __sk_buff *skb)
{
	return skb->tstamp_type == BPF_SKB_TSTAMP_UNSPEC ? 0 : skb->tstamp;
}

/* is_metadata_at_nic tells whether a packet that the slow path forwarded has the metadata that the fast path
 * gives it. No program can give it a route's realm. */
static __always_inline int is_metadata_at_nic(struct __sk_buff *skb, __u32 priority, __u64 time, __u32 queue)
{
	return skb->priority == priority && delivery_time(skb) == time && skb->queue_mapping == queue && skb->pkt_type == PACKET_HOST && !bpf_get_route_realm(skb);
}

/* set_metadata_at_pod gives a packet for a pod the metadata that a veth gives it (____dev_forward_skb). On a virtual wire
 * the sender's delivery time is still there; the slow path clears it where it delivers the outer packet. */
static __always_inline void set_metadata_at_pod(struct __sk_buff *skb)
{
	skb->priority = 0;
	skb->queue_mapping = 0;
	if (skb->pkt_type != PACKET_HOST) /* bridged: the frame is for the other pod's device */
		bpf_skb_change_type(skb, PACKET_HOST);
	if (skb->tstamp_type != BPF_SKB_TSTAMP_UNSPEC)
		bpf_skb_set_tstamp(skb, 0, BPF_SKB_TSTAMP_UNSPEC);
}
