//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How the packets of a node's pods travel where eBPF carries them past the
 * node's routing and netfilter, after Cilium's datapath (bpf/bpf_lxc.c,
 * bpf_host.c and bpf_overlay.c there).
 *
 *   route_out    ingress of a pod's veth on the node: to the neighbour that
 *                the routes name (bpf_redirect_neigh), or to a pod of this node
 *   route_in     ingress of the NIC: into the pod (bpf_redirect_peer)
 *   tunnel_out   ingress of a pod's veth: gives the packet the tunnel key of its
 *                flow, and puts it on the one VXLAN device
 *   tunnel_in    ingress of that device: checks the key, then into the pod
 *   tunnel_host  egress of the device that the node's own packets to pods of
 *                other nodes are routed to
 *
 * What a program has no reason to carry is the kernel's: packets to anything
 * but a pod (or, in route_out, another node), packets that somebody has to be told
 * of (the hop limit is reached, the packet is too big), those with IP options or
 * an extension for every hop, and those that no router forwards. Nothing above IP is
 * looked at, so fragments and ICMP errors travel as what they belong to does.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* TCX_NEXT, and TC_ACT_UNSPEC before it: on to what comes next. */
#define NEXT -1
#define DROP 2 /* TC_ACT_SHOT */

#define PACKET_HOST 0 /* include/uapi/linux/if_packet.h */
#define AF_INET 2
#define AF_INET6 10
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_HLEN 14

struct ipv4 {
	__u8 version_words, tos;
	__be16 length, id, fragment;
	__u8 ttl, protocol;
	__u16 check;
	__be32 from, to;
};

struct ipv6 {
	__be32 flow;
	__be16 length;
	__u8 next, hops;
	__be32 from[4], to[4];
};

/* An address of IPv6, or one of IPv4 mapped into it (RFC 4291, section 2.5.5.2). */
struct address {
	__be32 word[4];
};

struct prefix {
	__u32 bits;
	struct address address;
};

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
 * Whose addresses are which node's: its IPv4 address in host order, as tunnel keys
 * have it; 0 for this node.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 256);
	__type(key, struct prefix);
	__type(value, __u32);
} nodes SEC(".maps");

/* The VXLAN device, and the network identifier that the nodes agree on. */
volatile const __u32 tunnel;
volatile const __u32 vni;

struct packet {
	struct address from, to;
	__u32 flow; /* type of service, or traffic class and flow label */
	__u8 version, hops;
	__u8 kernels; /* to be left to the kernel */
};

/* header returns the packet's first bytes behind those of Ethernet, or 0. */
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

/* parse tells whether it is a packet of IP, and what there is to know of it. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct ipv4 *ip = header(skb, sizeof(*ip));
		__u8 net;

		if (!ip || ip->version_words >> 4 != 4)
			return 0;
		p->version = 4;
		p->hops = ip->ttl;
		p->flow = ip->tos;
		p->from = (struct address){{0, 0, bpf_htonl(0xffff), ip->from}};
		p->to = (struct address){{0, 0, bpf_htonl(0xffff), ip->to}};
		/* Options, more length than there is, a source that is no host's. */
		net = bpf_ntohl(ip->from) >> 24;
		p->kernels = ip->version_words != 0x45 || bpf_ntohs(ip->length) > skb->len - ETH_HLEN ||
			     net == 0 || net == 127 || net >= 224;
		return 1;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6 *ip = header(skb, sizeof(*ip));
		__u32 net;

		if (!ip || (bpf_ntohl(ip->flow) >> 28) != 6)
			return 0;
		p->version = 6;
		p->hops = ip->hops;
		p->flow = ip->flow & bpf_htonl(0x0fffffff);
		__builtin_memcpy(&p->from, ip->from, sizeof(p->from));
		__builtin_memcpy(&p->to, ip->to, sizeof(p->to));
		/* Hop-by-hop options, length, and a source that is no router's to
		 * forward: of the link, of a group, of nobody. */
		net = bpf_ntohl(ip->from[0]);
		p->kernels = ip->next == 0 || bpf_ntohs(ip->length) > skb->len - ETH_HLEN - sizeof(*ip) ||
			     (net & 0xffc00000) == 0xfe800000 || net >> 24 == 0xff || net == 0;
		return 1;
	}
	return 0;
}

/* hop counts the packet's hop. The packet is then changed: there is no way back. */
static __always_inline int hop(struct __sk_buff *skb, const struct packet *p)
{
	__u8 hops = p->hops - 1;

	if (p->version == 6)
		return bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct ipv6, hops), &hops, 1, BPF_F_RECOMPUTE_CSUM);
	/* The header's sum stays what it was, so that the packet's does, too. */
	if (bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct ipv4, check), p->hops, hops, 2))
		return -1;
	return bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct ipv4, ttl), &hops, 1, 0);
}

/* deliver puts the packet into a pod of this node, past the node's end of its link. */
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

/* encapsulate has the VXLAN device send the packet to a node. */
static __always_inline int encapsulate(struct __sk_buff *skb, __u32 node)
{
	struct bpf_tunnel_key key = {.tunnel_id = vni, .remote_ipv4 = node, .tunnel_ttl = 64};

	if (bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX))
		return DROP;
	return bpf_redirect(tunnel, 0);
}

/* fits tells whether the packet, or each that it will be cut into, does. */
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
	/* Without a neighbour's address yet, redirect_neigh asks for it. */
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

	/* The kernel routed it here, and has done what is a router's. There is
	 * nothing behind this device: what is not for a node ends. */
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
	/* A pod's address comes from that pod's node. */
	node = node_of(&p.from);
	if (node && *node != key.remote_ipv4)
		return DROP;
	/* It has the Ethernet address of the gateway on the sender's node. */
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
