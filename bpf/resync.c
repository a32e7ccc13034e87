//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Drops the packets by which the agent resynchronises conntrack (internal/accel/fastpath/conntrack.go),
 * once conntrack has seen them.
 *
 *   drop_resync    netfilter LOCAL_OUT, right behind conntrack
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define DROP 0 /* NF_DROP */
#define ACCEPT 1 /* NF_ACCEPT */

/* The mark of these packets. */
volatile const __u32 resync_mark = 0;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sk_buff {
	__u32 mark;
};

struct bpf_nf_ctx {
	struct sk_buff *skb;
};
#pragma clang attribute pop

SEC("netfilter")
int drop_resync(struct bpf_nf_ctx *ctx)
{
	return ctx->skb->mark == resync_mark ? DROP : ACCEPT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
