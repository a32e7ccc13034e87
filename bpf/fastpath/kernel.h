/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Kernel types, with the fields that programs read, and kernel functions that they call (kfuncs).
 * CO-RE relocates the fields by the kernel's BTF, so neither their order nor their offsets matter
 * here.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/netfilter/nf_conntrack_tcp.h>
#include <linux/netfilter/nf_conntrack_tuple_common.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* include/linux/skbuff.h */
#define CHECKSUM_UNNECESSARY 1
#define CHECKSUM_PARTIAL 3

/* BPF_F_ADJ_ROOM_DECAP_L3_IPV6, which older headers lack */
#define DECAP_L3_IPV6 (1ULL << 8)

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sk_buff {
	struct net_device *dev;
	unsigned long _nfct;
	unsigned char *head, *data;
	unsigned int end;
	__u32 len, data_len;
	__u16 csum_start;
	__u8 ip_summed : 2;
	__u8 csum_level : 2;
	__u32 mark;
	__u32 secmark;
};

struct skb_shared_info {
	unsigned int gso_type;
};

struct bpf_nf_ctx {
	struct sk_buff *skb;
};

struct ip_ct_tcp_state {
	__u32 td_end;
	__u8 td_scale;
	__u8 flags;
};

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state, retrans;
	__u16 last_win;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[IP_CT_DIR_MAX];
	unsigned long status;
	union nf_conntrack_proto proto;
};

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[5], *hooks_ipv6[5];
};

struct net {
	struct netns_nf nf;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct bpf_xdp_entity {
	struct bpf_prog *prog;
	struct bpf_xdp_link *link;
};

struct net_device {
	void *rx_handler;
	possible_net_t nd_net;
	struct bpf_mprog_entry *tcx_ingress;
	struct nf_hook_entries *nf_hooks_ingress;
	struct bpf_xdp_entity xdp_state[3];
};

struct sock_common {
	possible_net_t skc_net;
};

struct sock {
	struct sock_common __sk_common;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	const struct tcp_ulp_ops *icsk_ulp_ops;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
};
#pragma clang attribute pop

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32, struct bpf_ct_opts *, __u32) __ksym;
void bpf_ct_release(struct nf_conn *) __ksym;
void *bpf_cast_to_kern_ctx(void *) __ksym;
int bpf_dynptr_from_skb(struct __sk_buff *, __u64, struct bpf_dynptr *) __ksym;
