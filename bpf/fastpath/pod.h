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

/* redirect_to_pod redirects a decapsulated packet into its pod. */
static __always_inline int redirect_to_pod(struct __sk_buff *skb, struct cpu_state *c, const struct pod_link *pod, const struct headers *h,
					   const struct key *wire, const struct key *own, int is_ipv6)
{
	struct {
		__u8 to[ETH_ALEN], from[ETH_ALEN];
		__be16 protocol;
		__u8 ip[IP_HLEN];
	} head;
	int translated = !is_ipv6 && !same_key(own, wire);
	struct headers forwarded;
	__u32 veth = pod->veth;
	__u16 check;

	__builtin_memcpy(head.to, pod->mac, ETH_ALEN);
	__builtin_memcpy(head.from, pod->from, ETH_ALEN);
	head.protocol = bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
	copy_headers(&forwarded, h, is_ipv6);
	if (translated)
		nat_headers(&forwarded, 0, peer_of(own));
	forwarded.ip[HOP_WORD(is_ipv6)] = decrement_hop_limit(forwarded.ip[HOP_WORD(is_ipv6)], is_ipv6);
	__builtin_memcpy(head.ip, forwarded.ip, CHANGES(is_ipv6));
	if (bpf_skb_store_bytes(skb, 0, &head, ETH_HLEN + CHANGES(is_ipv6), 0) ||
	    (translated && nat_packet(skb, sizeof(head), 0, h, peer_of(own), &check)))
		return DROP;
	set_metadata_at_pod(skb);
	count(c, REASON_FAST_IN);
	return bpf_redirect_peer(veth, 0);
}

/* sample_unwatched finds eligible connections of pods whose links have no programs. */
static __always_inline int sample_unwatched(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + IP_HLEN + 8);
	struct key k;
	__u64 hash, now;

	if (!data || peek_flow(skb, data, ETH_HLEN, &k, 1, is_ipv6))
		return NEXT;
	hash = hash_key(&k);
	if (is_syn(skb, ETH_HLEN, &k, is_ipv6)) {
		admission_reset(hash);
	} else if (sample(c) && !is_watched(0, k.pod)) { /* else encap_pod samples them */
		now = bpf_ktime_get_coarse_ns();
		if (admit(hash, now))
			request_attach(c, &k, now);
	}
	return NEXT;
}
