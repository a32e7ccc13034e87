//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What a wire does to a packet and a veth does not.
 *
 * A veth hands over the sender's skb, its flow hash included. RPS on the far
 * side reuses that hash, so how flows spread there would depend on what the
 * sender's sockets drew. Over a real wire the hash is lost, and the receiving
 * NIC computes one from the headers.
 *
 * It belongs on the egress of the sending end: RPS reads the hash ahead of the
 * receiver's ingress hook (netif_receive_skb_internal in net/core/dev.c).
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* TCX_NEXT, and TC_ACT_UNSPEC before it: on to what comes next. */
#define NEXT -1

SEC("tc")
int rehash(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	/* GRO sorts flows by the hash; without one they share a bucket. */
	bpf_get_hash_recalc(skb);
	return NEXT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
