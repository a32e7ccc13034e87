// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Makes a veth discard the sender's flow hash, as a wire does.
 *
 * A veth passes on the sender's skb with its flow hash. RPS on the receiver
 * reuses that hash, so the distribution of flows would depend on the random
 * hashes of the sender's sockets. A real wire does not carry the hash, and the
 * receiving NIC computes one from the headers.
 *
 * It is attached at the egress of the sending end, because RPS reads the hash before
 * the receiver's ingress hook (netif_receive_skb_internal in net/core/dev.c).
 */
#include "lib/net.h"

SEC("tc")
int rehash(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	/* GRO selects the bucket by the hash; without one all flows share a bucket. */
	bpf_get_hash_recalc(skb);
	return NEXT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
