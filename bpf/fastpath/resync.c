// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Drops the packets by which the agent resynchronises conntrack (internal/fastpath/conntrack),
 * once conntrack has seen them.
 *
 *   drop_resync    netfilter LOCAL_OUT, right after conntrack
 */
#include "kernel.h"

/* The mark of these packets. */
volatile const __u32 resync_mark = 0;

SEC("netfilter")
int drop_resync(struct bpf_nf_ctx *ctx)
{
	return ctx->skb->mark == resync_mark ? NF_DROP : NF_ACCEPT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
