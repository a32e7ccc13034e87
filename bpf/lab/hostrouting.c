// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Datapaths on which packets of a node's pods bypass the node's routing and
 * netfilter, modelled on Cilium's (bpf/bpf_lxc.c, bpf_host.c and bpf_overlay.c
 * there).
 *
 *   route_out    ingress of a pod's veth on the node: redirects to the next hop
 *                (bpf_redirect_neigh), or into a pod of this node
 *   route_in     ingress of the NIC: redirects into the pod (bpf_redirect_peer)
 *   tunnel_out   ingress of a pod's veth: sets the tunnel key, and redirects to the
 *                VXLAN device, or into a pod of this node
 *   tunnel_in    ingress of that device: checks the key, redirects into the pod
 *   tunnel_host  egress of the device to which the node routes the packets that it
 *                sends itself to pods of other nodes
 *
 * The kernel handles all other packets: those whose destination is not a pod (or,
 * in route_out, another node), those that need an ICMP error (the hop limit is
 * reached, the packet is too big), those with IP options or a hop-by-hop header,
 * and those that a router must not forward. No program reads headers above IP, so
 * fragments and ICMP errors take the same path as the flow that they belong to.
 */
#include "address.h"

/* A pod of this node. */
struct pod {
	__u32 veth;       /* the node's end of its link */
	__u8 mac[6];      /* of the pod's end */
	__u8 veth_mac[6]; /* of the node's */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, struct pod);
} pods SEC(".maps");

/*
 * The node of each range of pod addresses: its IPv4 address in host order, as in tunnel
 * keys; 0 for this node.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 256);
	__type(key, struct prefix);
	__type(value, __u32);
} nodes SEC(".maps");

/* The index of the VXLAN device, and the VNI of all nodes. */
volatile const __u32 tunnel;
volatile const __u32 vni;

struct packet {
	struct address from, to;
	__u32 flow; /* type of service, or traffic class and flow label */
	__u8 version, hops;
	__u8 kernels; /* the kernel has to handle it */
};

/* header returns the IP header, or 0 if the packet has less than size bytes from there on. */
static __always_inline void *header(struct __sk_buff *skb, __u32 size)
{
	void *data = (void *)(long)skb->data;

	if (data + ETH_HLEN + size > (void *)(long)skb->data_end) {
		if (bpf_skb_pull_data(skb, ETH_HLEN + size))
			return 0;
		data = (void *)(long)skb->data;
		if (data + ETH_HLEN + size > (void *)(long)skb->data_end)
			return 0;
	}
	return data + ETH_HLEN;
}

/* parse reads the IP header. It returns 0 if the packet is not IP. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = header(skb, sizeof(*ip));
		__u8 net;

		if (!ip || ip->version != 4)
			return 0;
		p->version = 4;
		p->hops = ip->ttl;
		p->flow = ip->tos;
		p->from = (struct address){{0, 0, bpf_htonl(0xffff), ip->saddr}};
		p->to = (struct address){{0, 0, bpf_htonl(0xffff), ip->daddr}};
		/* IP options, a length beyond the packet, a source that is no host address. */
		net = bpf_ntohl(ip->saddr) >> 24;
		p->kernels = *(__u8 *)ip != IHL_VERSION || bpf_ntohs(ip->tot_len) > skb->len - ETH_HLEN ||
			     net == 0 || net == 127 || net >= 224;
		return 1;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = header(skb, sizeof(*ip));
		__be32 *flow = (void *)ip; /* version, traffic class and flow label */
		__u32 net;

		if (!ip || bpf_ntohl(*flow) >> 28 != 6)
			return 0;
		p->version = 6;
		p->hops = ip->hop_limit;
		p->flow = *flow & bpf_htonl(0x0fffffff);
		__builtin_memcpy(&p->from, &ip->saddr, sizeof(p->from));
		__builtin_memcpy(&p->to, &ip->daddr, sizeof(p->to));
		/* Hop-by-hop options, a wrong length, and sources that a router must not
		 * forward: link-local, multicast and unspecified addresses. */
		net = bpf_ntohl(ip->saddr.s6_addr32[0]);
		p->kernels = ip->nexthdr == IPPROTO_HOPOPTS || bpf_ntohs(ip->payload_len) > skb->len - ETH_HLEN - sizeof(*ip) ||
			     (net & 0xffc00000) == 0xfe800000 || net >> 24 == 0xff || net == 0;
		return 1;
	}
	return 0;
}

/* hop decrements the hop limit. After that the packet cannot go back to the kernel. */
static __always_inline int hop(struct __sk_buff *skb, const struct packet *p)
{
	__u8 hops = p->hops - 1;

	if (p->version == 6)
		return bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct ipv6hdr, hop_limit), &hops, 1, BPF_F_RECOMPUTE_CSUM);
	/* The sum over the header does not change, so skb->csum stays valid. */
	if (bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, check), p->hops, hops, 2))
		return -1;
	return bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, ttl), &hops, 1, 0);
}

/* deliver redirects the packet into a pod of this node. */
static __always_inline int deliver(struct __sk_buff *skb, const struct packet *p, const struct pod *pod)
{
	if (hop(skb, p) || bpf_skb_store_bytes(skb, 0, pod->mac, 12, 0))
		return DROP;
	return bpf_redirect_peer(pod->veth, 0);
}

static __always_inline __u32 *node_of(const struct address *a)
{
	struct prefix whole = {.bits = 128, .address = *a};

	return bpf_map_lookup_elem(&nodes, &whole);
}

/* encapsulate redirects the packet to the VXLAN device, with the tunnel key of a node. */
static __always_inline int encapsulate(struct __sk_buff *skb, __u32 node)
{
	struct bpf_tunnel_key key = {.tunnel_id = vni, .remote_ipv4 = node, .tunnel_ttl = 64};

	if (bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX))
		return DROP;
	return bpf_redirect(tunnel, 0);
}

/* fits tells whether the packet, or each of its GSO segments, fits the device's MTU. */
static __always_inline int fits(struct __sk_buff *skb, __u32 device)
{
	__u32 mtu = 0;

	return bpf_check_mtu(skb, device, &mtu, 0, BPF_MTU_CHK_SEGS) == 0;
}

SEC("tc")
int route_out(struct __sk_buff *skb)
{
	struct bpf_fib_lookup fib = {};
	struct bpf_redir_neigh next = {};
	struct packet p;
	struct pod *pod;
	long found;

	if (!parse(skb, &p) || p.kernels || p.hops <= 1)
		return NEXT;
	pod = bpf_map_lookup_elem(&pods, &p.to);
	if (pod)
		return deliver(skb, &p, pod);
	if (!node_of(&p.to))
		return NEXT;

	fib.ifindex = skb->ifindex;
	if (p.version == 4) {
		fib.family = AF_INET;
		fib.tos = p.flow;
		fib.ipv4_src = p.from.word[3];
		fib.ipv4_dst = p.to.word[3];
	} else {
		fib.family = AF_INET6;
		fib.flowinfo = p.flow;
		__builtin_memcpy(fib.ipv6_src, &p.from, sizeof(p.from));
		__builtin_memcpy(fib.ipv6_dst, &p.to, sizeof(p.to));
	}
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	/* bpf_redirect_neigh resolves a neighbour that is not resolved yet. */
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return NEXT;
	if (!fits(skb, fib.ifindex))
		return NEXT;
	if (hop(skb, &p))
		return DROP;
	next.nh_family = fib.family;
	__builtin_memcpy(next.ipv6_nh, fib.ipv6_dst, sizeof(next.ipv6_nh)); /* ipv4_nh is in the same place */
	return bpf_redirect_neigh(fib.ifindex, &next, sizeof(next), 0);
}

SEC("tc")
int route_in(struct __sk_buff *skb)
{
	struct packet p;
	struct pod *pod;

	if (skb->pkt_type != PACKET_HOST || !parse(skb, &p) || p.kernels || p.hops <= 1)
		return NEXT;
	pod = bpf_map_lookup_elem(&pods, &p.to);
	if (!pod)
		return NEXT;
	return deliver(skb, &p, pod);
}

SEC("tc")
int tunnel_out(struct __sk_buff *skb)
{
	struct packet p;
	struct pod *pod;
	__u32 *node;

	if (!parse(skb, &p) || p.kernels || p.hops <= 1)
		return NEXT;
	pod = bpf_map_lookup_elem(&pods, &p.to);
	if (pod)
		return deliver(skb, &p, pod);
	node = node_of(&p.to);
	if (!node || !*node || !fits(skb, tunnel))
		return NEXT;
	if (hop(skb, &p))
		return DROP;
	return encapsulate(skb, *node);
}

SEC("tc")
int tunnel_host(struct __sk_buff *skb)
{
	struct packet p;
	__u32 *node;

	/* The kernel has routed the packet, and checked the hop limit and MTU. Nothing
	 * else takes packets from this device, so those without a node are dropped. */
	if (!parse(skb, &p))
		return DROP;
	node = node_of(&p.to);
	if (!node || !*node)
		return DROP;
	return encapsulate(skb, *node);
}

SEC("tc")
int tunnel_in(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key;
	struct packet p;
	struct pod *pod;
	__u32 *node;

	if (bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) || key.tunnel_id != vni || !parse(skb, &p))
		return DROP;
	/* Prevent spoofing: the packet must come from the node that owns the source address. */
	node = node_of(&p.from);
	if (node && *node != key.remote_ipv4)
		return DROP;
	/* It is PACKET_OTHERHOST: its destination MAC is the gateway's on the sender's node. */
	if (bpf_skb_change_type(skb, PACKET_HOST))
		return DROP;
	if (p.kernels || p.hops <= 1)
		return NEXT;
	pod = bpf_map_lookup_elem(&pods, &p.to);
	if (!pod)
		return NEXT;
	return deliver(skb, &p, pod);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
