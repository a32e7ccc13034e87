/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Pods: their programs, their MAC addresses, and delivery into them. */
#pragma once

#include "event.h"
#include "index.h"
#include "sampling.h"

/* MAC addresses that a bridge has learned at a pod's link, or that a neighbour entry has there.
 * Written by the agent. A bridge floods frames with an unknown destination to all ports; only the
 * port that owns the MAC address delivers. */
struct link_mac {
	__u32 link;
	__u8 mac[ETH_ALEN], zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POD_LINKS);
	__type(key, struct link_mac);
	__type(value, __u8);
} link_macs SEC(".maps");

/* Pods whose links have all programs. A pod has one entry by the ifindex of its link, and one by each
 * known address; the other field is 0. Written by the agent. A packet that no observe_pod would see
 * is not probed. */
struct watch {
	__u32 device;
	__be32 pod;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POD_LINKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct watch);
	__type(value, __u8);
} watched_pods SEC(".maps");

/* is_watched tells whether programs see a packet at every hook. The caller gives the device that it
 * comes from, or the pod's address that it goes to; the other is 0. */
static __always_inline int is_watched(__u32 device, __be32 pod)
{
	struct watch w = {.device = device, .pod = pod};

	return bpf_map_lookup_elem(&watched_pods, &w) != 0;
}

/* request_attach asks the agent to attach programs to a pod's link, at most once per ms and CPU. */
static __always_inline void request_attach(struct cpu_state *c, const struct key *k, __u64 now)
{
	if (now - c->attach_requested < MS)
		return;
	c->attach_requested = now;
	emit(k, 0, EVENT_ATTACH);
}

/* is_forwarded tells whether the node forwards packets for an address of a packet, its source or destination, from the NIC that
 * the packet is at: then the address may be that of a pod. Most packets at a NIC are the node's own. */
static __always_inline int is_forwarded(struct __sk_buff *skb, const struct headers *h, int source, int is_ipv6)
{
	struct bpf_fib_lookup fib = {.family = is_ipv6 ? AF_INET6 : AF_INET, .ifindex = skb->ifindex};
	long result;

	if (is_ipv6) {
		copy(fib.ipv6_src, address_of(h, !source), sizeof(fib.ipv6_src));
		copy(fib.ipv6_dst, address_of(h, source), sizeof(fib.ipv6_dst));
	} else {
		fib.ipv4_src = h->ip[source ? 4 : 3];
		fib.ipv4_dst = h->ip[source ? 3 : 4];
	}
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	return (result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH) && fib.ifindex != skb->ifindex;
}

/* redirect_to_pod redirects a packet from the network into its pod. */
static __always_inline int redirect_to_pod(struct __sk_buff *skb, struct cpu_state *c, const struct pod_link *pod, const struct headers *h,
					   const struct key *wire, const struct key *own, int is_ipv6)
{
	__u32 veth = pod->veth;

	if (forward_headers(skb, pod->macs, h, 0, peer_of(wire), peer_of(own), is_ipv6))
		return DROP;
	set_metadata_at_pod(skb);
	count(c, REASON_FAST_IN);
	return bpf_redirect_peer(veth, 0);
}

/* sample_unwatched finds eligible connections of pods whose links have no programs, by packets that leave the node. */
static __always_inline int sample_unwatched(struct __sk_buff *skb, struct cpu_state *c, int at_nic, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + IP_HLEN + 8);
	struct headers h;
	struct key k;
	__u64 hash, now;

	if (!data || peek_flow(skb, data, ETH_HLEN, &k, 1, is_ipv6))
		return NEXT;
	hash = hash_key(&k);
	if (is_syn(skb, ETH_HLEN, &k, is_ipv6)) {
		admission_reset(hash);
	} else if (sample(c) && !is_watched(0, k.pod)) { /* else encap_pod samples them */
		now = bpf_ktime_get_coarse_ns();
		if (admit(hash, now) && (!at_nic || (!load_headers(skb, ETH_HLEN, k.protocol, &h, is_ipv6) && is_forwarded(skb, &h, 1, is_ipv6))))
			request_attach(c, &k, now);
	}
	return NEXT;
}
