/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A Bloom filter of the known flows: a packet whose bit is clear needs no map lookup. */
#pragma once

#include <linux/types.h>

/* There are two filters. Programs set the bit of a new flow in both, and test the one that the agent
 * has chosen. To clear the bits of deleted flows, the agent rebuilds the other filter, and then chooses it.
 * So the bit of a known flow is always set, and the programs see all of its packets. */
#define BLOOM_BITS 16384
__u64 bloom_a[BLOOM_BITS / 64], bloom_b[BLOOM_BITS / 64];
volatile __u32 bloom_chosen = 0;

static __always_inline int bloom_test(__u64 hash)
{
	const __u64 *chosen = bloom_chosen ? bloom_b : bloom_a;

	return chosen[hash % BLOOM_BITS / 64] >> hash % 64 & 1;
}

/* bloom_set sets the bit of a flow. The flow must already be in its map: an agent that rebuilds a
 * filter sets the bits of the flows that it finds there. */
static __always_inline void bloom_set(__u64 hash)
{
	__u64 word = hash % BLOOM_BITS / 64, bit = 1ULL << hash % 64;

	if (!(bloom_a[word] & bit))
		__sync_fetch_and_or(&bloom_a[word], bit);
	if (!(bloom_b[word] & bit))
		__sync_fetch_and_or(&bloom_b[word], bit);
}
