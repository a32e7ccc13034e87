/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Probes: packets that take the slow path, and that the programs recognise at later hooks (see learn.h). */
#pragma once

#include "metadata.h"
#include "vxlan.h"

/* A probe: a packet that takes the slow path, and that this CPU sees again at later hooks. An outgoing probe ends
 * when the CPU sees another packet at such a hook. */
struct probe {
	struct headers headers;
	struct key key;
	__u64 wire_peer;
	__u64 at;
	struct metadata metadata;
	/* Out only. */
	__u64 delivery_time;
	__u32 priority, queue;
	__u32 generation;
	__u32 device;
	__u32 overlay;
	/* The conntrack entry that the slow path attached to it. */
	unsigned long ct;
	/* Destination and source MAC of what a pod of the node sends. */
	__u8 mac[2 * ETH_ALEN];
	/* decap_id if decap_nic saw the packet, or 0. */
	__u32 decapped;
	__u16 check; /* the inner checksum field */
	__u8 gso, socket_ended;
	/* TCP only: no sequence numbers are known, or the packet is outside the window. */
	__u8 seq_unknown;
	/* In only: it comes from a pod of the node. */
	__u8 from_pod;
};

/* A packet that decap_nic left to the kernel, so that redirect_vxlan recognises it. */
struct decap_probe {
	__u64 at;
	struct metadata metadata;
	__u32 generation;
	struct headers headers;
	struct encap_template outer;
};

/* start_probe records a packet that takes the slow path, so that later hooks can recognise it. */
static __always_inline void start_probe(struct probe *p, const struct headers *h, const struct key *k,
					struct __sk_buff *skb, __u64 now, __u32 g, int is_ipv6)
{
	copy_headers(&p->headers, h, is_ipv6);
	p->key = *k;
	p->wire_peer = peer_of(k);
	p->at = now;
	p->generation = g;
	p->device = skb->ifindex;
	p->gso = skb->gso_size != 0;
	read_metadata(skb, &p->metadata);
}
