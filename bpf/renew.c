//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Drops packets behind conntrack that are there for conntrack alone: those by which the fast
 * path has it know the numbers of a connection again (internal/accel/fastpath/conntrack.go).
 *
 *   drop_renewals    netfilter's hook for what the node sends, right behind conntrack
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define DROP 0 /* NF_DROP */
#define ACCEPT 1 /* NF_ACCEPT */

/* The mark of such packets. */
volatile const __u32 renewal = 0;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sk_buff {
	__u32 mark;
};

struct bpf_nf_ctx {
	struct sk_buff *skb;
};
#pragma clang attribute pop

SEC("netfilter")
int drop_renewals(struct bpf_nf_ctx *ctx)
{
	return ctx->skb->mark == renewal ? DROP : ACCEPT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
