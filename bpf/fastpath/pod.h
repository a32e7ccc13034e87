/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Pods: their programs, their MAC addresses, and delivery into them. */
#pragma once

#include "conntrack.h"
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

/* Devices over which the node reaches its pods: their links, and the bridges that have these. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POD_LINKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u8);
} pod_devices SEC(".maps");

/* is_known_device tells whether packets for pods may come from a device: from a pod, or from the network. The agent clears the tables
 * if it cannot read the devices. */
static __always_inline int is_known_device(__u32 device, int is_pod)
{
	if (is_pod)
		return bpf_map_lookup_elem(&pod_devices, &device) != 0;
	return bpf_map_lookup_elem(&vxlan_devices, &device) || bpf_map_lookup_elem(&routers, &device);
}

/* owns_mac tells whether a MAC address is that of the pod at a link. */
static __always_inline int owns_mac(__u32 link, const __u8 *mac)
{
	struct link_mac owner = {.link = link};

	__builtin_memcpy(owner.mac, mac, sizeof(owner.mac));
	return bpf_map_lookup_elem(&link_macs, &owner) != 0;
}

/* may_request_attach limits requests to one per ms and CPU. */
static __always_inline int may_request_attach(struct cpu_state *c, __u64 now)
{
	if (now - c->attach_requested < MS)
		return 0;
	c->attach_requested = now;
	return 1;
}

/* request_attach asks the agent to attach programs to the link of a pod that has an eligible connection over the network. */
static __always_inline void request_attach(struct cpu_state *c, const struct key *k, __u64 now)
{
	if (may_request_attach(c, now))
		emit(k, 0, EVENT_ATTACH);
}

/* forwarded_to returns the device to which the node routes packets with these addresses that come from the device where the packet
 * is. It returns 0 if the node does not forward them. */
static __always_inline __u32 forwarded_to(struct __sk_buff *skb, const void *source, const void *destination, int is_ipv6)
{
	struct bpf_fib_lookup fib = {.family = is_ipv6 ? AF_INET6 : AF_INET, .ifindex = skb->ifindex};
	long result;

	if (is_ipv6) {
		copy(fib.ipv6_src, source, sizeof(fib.ipv6_src));
		copy(fib.ipv6_dst, destination, sizeof(fib.ipv6_dst));
	} else {
		fib.ipv4_src = *(const __be32 *)source;
		fib.ipv4_dst = *(const __be32 *)destination;
	}
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	return result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH ? fib.ifindex : 0;
}

/* is_forwarded tells whether the node routes packets for the source or destination of a packet to a device other than the NIC
 * where the packet is. Then the address may be that of a pod. Most packets at a NIC are the node's own. */
static __always_inline int is_forwarded(struct __sk_buff *skb, const struct headers *h, int source, int is_ipv6)
{
	const void *own = is_ipv6 ? (const void *)address_of(h, source) : &h->ip[source ? 3 : 4];
	const void *other = is_ipv6 ? (const void *)address_of(h, !source) : &h->ip[source ? 4 : 3];
	__u32 device = forwarded_to(skb, other, own, is_ipv6);

	return device && device != skb->ifindex;
}

/* request_attach_between asks the agent to attach programs to the links of two pods of the node, if a packet goes from one to the
 * other and one of them has no programs. The packet may be for a Service. */
static __always_inline void request_attach_between(struct __sk_buff *skb, struct cpu_state *c, const struct key *k, const struct headers *h, __u64 now, int is_ipv6)
{
	__u64 peer = is_ipv6 ? peer_of(k) : translated_peer(skb, k);
	__be32 address = (__u32)peer;
	struct event *request = &c->request;
	__u32 device;

	if (is_ipv6)
		device = forwarded_to(skb, address_of(h, 1), address_of(h, 0), 1);
	else
		device = forwarded_to(skb, &h->ip[3], &address, 0);
	if (!device || !bpf_map_lookup_elem(&pod_devices, &device) || (is_watched(skb->ifindex, 0) && is_watched(0, address)) || !may_request_attach(c, now))
		return;
	request->key = with_peer(k, peer);
	request->kind = EVENT_ATTACH;
	request->link = skb->ifindex;
	if (is_ipv6) {
		copy(request->pod6, address_of(h, 1), sizeof(request->pod6));
		copy(request->peer6, address_of(h, 0), sizeof(request->peer6));
	}
	bpf_ringbuf_output(&events, request, sizeof(*request), 0);
}

/* peer_pod returns the link of the peer's pod, given the template of the outgoing direction, or 0 if the peer is not on this node. */
static __always_inline const struct pod_link *peer_pod(__u32 template)
{
	__u32 index = template & ~TO_POD;

	return template & TO_POD ? bpf_map_lookup_elem(&pod_links, &index) : 0;
}

/* find_flow_between returns the flow of a packet from a pod to another pod of the node, if the flow is that of the other pod. It
 * replaces the key by the one that the other pod has. */
static __always_inline struct flow *find_flow_between(struct __sk_buff *skb, struct key *k, int is_ipv6)
{
	const struct pod_link *from;
	struct flow *f;

	if (likely(!bloom_test(hash_key(k))))
		return 0;
	f = find_flow(k, k, is_ipv6);
	from = f ? peer_pod(template_of(&f->out)) : 0;
	return from && from->veth == skb->ifindex ? f : 0;
}

/* redirect_to_pod redirects a packet into a pod, and counts it under reason. REASON_FAST_OUT_LOCAL means that the pod is the
 * flow's peer, REASON_FAST_IN_... that the packet comes from the peer. */
static __always_inline int redirect_to_pod(struct __sk_buff *skb, struct cpu_state *c, const struct pod_link *pod, const struct headers *h,
					   int reason, __u64 was, __u64 is, int is_ipv6)
{
	__u32 veth = pod->veth;

	if (forward_headers(skb, pod->macs, pod->hops, h, reason == REASON_FAST_OUT_LOCAL, was, is, is_ipv6))
		return DROP;
	set_metadata_at_pod(skb);
	count(c, reason);
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
	} else if (sample(c) && !is_watched(0, k.pod)) { /* else redirect_pod samples them */
		now = bpf_ktime_get_coarse_ns();
		if (admit(hash, now) && (!at_nic || (!load_headers(skb, ETH_HLEN, k.protocol, &h, is_ipv6) && is_forwarded(skb, &h, 1, is_ipv6))))
			request_attach(c, &k, now);
	}
	return NEXT;
}
