/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fields of the kernel's sk_buff, sockets and devices that programs cannot read otherwise. */
#pragma once

#include "kernel.h"
#include "key.h"

#define SKB_GSO_DODGY (1 << 1)
#define SKB_GSO_UDP_L4 (1 << 17)

/* is_udp_batch tells whether a GSO packet is a batch of datagrams (UDP_SEGMENT), and not also a tunnel packet or a list of packets,
 * whose other headers the programs would not rewrite. */
static __always_inline int is_udp_batch(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);
	struct skb_shared_info *shared = (void *)s->head + s->end;

	return (BPF_CORE_READ(shared, gso_type) & ~SKB_GSO_DODGY) == SKB_GSO_UDP_L4;
}

/* fits_mtu tells whether all segments of the packet fit the MTU. It returns 0 for GSO packets that are neither TCP nor such a batch. */
static __always_inline int fits_mtu(struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	if (skb->gso_size && PROTOCOL(h, is_ipv6) != IPPROTO_TCP && !is_udp_batch(skb))
		return 0;
	return segment_length(skb, h, is_ipv6) <= mtu;
}

static __always_inline __u8 csum_state(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(s, ip_summed);
}

/* csum_offloaded tells whether the device is to fill in the checksum of the TCP or UDP header at an
 * offset. */
static __always_inline int csum_offloaded(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return csum_state(skb) == CHECKSUM_PARTIAL && (unsigned long)s->head + s->csum_start == (unsigned long)s->data + at;
}

/* inner_csum_verified tells whether the inner checksum is verified, and not only the outer one. */
static __always_inline int inner_csum_verified(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return csum_offloaded(skb, at) || (csum_state(skb) == CHECKSUM_UNNECESSARY && BPF_CORE_READ_BITFIELD(s, csum_level));
}

/* pod_device returns the pod's end of the veth that a packet is at: each end points to the other in
 * its private data. */
static __always_inline struct net_device *pod_device(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);
	const __u32 size = bpf_core_type_size(struct net_device);
	void *end = s->dev, *other = 0, *back = 0;

	if (bpf_probe_read_kernel(&other, sizeof(other), end + size) || !other ||
	    bpf_probe_read_kernel(&back, sizeof(back), other + size) || back != end)
		return 0;
	return other;
}

/* ct_entry is the conntrack entry attached to a packet (nf_ct_get), or 0. */
static __always_inline unsigned long ct_entry(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return s->_nfct & ~7UL;
}

/* has_xdp tells whether a device has XDP programs, of any mode. */
static __always_inline int has_xdp(struct net_device *dev)
{
	struct bpf_xdp_entity all[3];
	int i;

	if (BPF_CORE_READ_INTO(&all, dev, xdp_state))
		return 1;
	for (i = 0; i < 3; i++)
		if (all[i].prog || all[i].link)
			return 1;
	return 0;
}

/* reaches_pod tells whether a packet at a pod's veth goes straight to the pod. Redirected packets bypass XDP programs of the pod's
 * device; an unknown device may have some. */
static __always_inline int reaches_pod(struct __sk_buff *skb)
{
	struct net_device *dev = pod_device(skb);

	return dev && !has_xdp(dev);
}

/* ends_at_socket tells whether an established socket of the pod sent a packet, and packets for that
 * socket pass no hook, program or upper-layer protocol in the pod. Then nothing reads the tunnel state
 * that is still in their skbs. */
static __always_inline int ends_at_socket(struct __sk_buff *skb, const struct headers *h, const struct key *k, int is_ipv6)
{
	struct bpf_sock *sk = skb->sk;
	struct nf_hook_entries *hooks[2];
	struct net_device *dev;
	struct tcp_sock *tcp;
	struct net *net;
	int i;

	if (k->protocol != IPPROTO_TCP || !sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != BPF_TCP_ESTABLISHED || sk->src_port != bpf_ntohs(k->pod_port) || sk->dst_port != k->peer_port)
		return 0;
	if (!is_ipv6 && (sk->src_ip4 != k->pod || sk->dst_ip4 != k->peer))
		return 0;
	for (i = 0; is_ipv6 && i < 4; i++)
		if (sk->src_ip6[i] != h->ip[2 + i] || sk->dst_ip6[i] != h->ip[6 + i])
			return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	dev = pod_device(skb);
	if (!tcp || !dev || tcp->inet_conn.icsk_ulp_ops)
		return 0;
	net = tcp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net;
	hooks[0] = is_ipv6 ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_INET_PRE_ROUTING]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_INET_PRE_ROUTING]);
	hooks[1] = is_ipv6 ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_INET_LOCAL_IN]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_INET_LOCAL_IN]);
	return net == BPF_CORE_READ(dev, nd_net.net) && !hooks[0] && !hooks[1] && !BPF_CORE_READ(dev, rx_handler) &&
	       !BPF_CORE_READ(dev, tcx_ingress) && !BPF_CORE_READ(dev, nf_hooks_ingress);
}
