/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Selects the packets that programs look at: those of known flows, by a Bloom filter, and a sample of
 * all others. A connection that is sampled again when it is old enough is admitted; short ones leave no state.
 */
#pragma once

#include "bloom.h"
#include "cpu.h"

/* The minimum age of an eligible connection: a connection of a few packets gains nothing. */
#define MIN_AGE (50 * MS)
/* Connections that are sampled less often count as idle. */
#define MAX_GAP (2000 * MS)
/* One in about this many packets without a flow is sampled. */
#define SAMPLE_RATE 32

/* Connections that were sampled once: part of the hash, and when (ms). */
#define ADMISSION_SLOTS 1024
__u64 admission[ADMISSION_SLOTS];

/* sample picks a few of the packets without a flow. It does so at random, because every n-th packet
 * might belong to the same connection. */
static __always_inline int sample(struct cpu_state *c)
{
	if (c->until_sample--)
		return 0;
	c->until_sample = bpf_get_prandom_u32() % (2 * SAMPLE_RATE);
	return 1;
}

/* admission_reset forgets the sample of an older connection with the same ports, when one opens or
 * ends. */
static __always_inline void admission_reset(__u64 hash)
{
	__u64 *slot = &admission[hash / BLOOM_BITS % ADMISSION_SLOTS];

	if (*slot >> 32 == hash >> 32)
		*slot = 0;
}

/* admit tells whether a sampled connection was sampled before, at least MIN_AGE and at most MAX_GAP
 * ago. */
static __always_inline int admit(__u64 hash, __u64 now)
{
	__u64 *slot = &admission[hash / BLOOM_BITS % ADMISSION_SLOTS], old = *slot;
	__u32 part = hash >> 32, ms = now / MS, age = ms - (__u32)old;
	int same = part == old >> 32 && age < MAX_GAP / MS;

	if (same && age < MIN_AGE / MS)
		return 0;
	/* Give the connection in the slot time to become old enough. */
	if (same || age > 4 * MIN_AGE / MS)
		*slot = (__u64)part << 32 | ms;
	return same;
}

/* is_syn tells whether a packet that peek_flow accepted has SYN set. */
static __always_inline int is_syn(struct __sk_buff *skb, __u32 at, const struct key *k, int is_ipv6)
{
	const __u8 *data = field(skb, data);

	return k->protocol == IPPROTO_TCP && (void *)data + at + HLEN(is_ipv6) + 14 <= field(skb, data_end) &&
	       (data[at + HLEN(is_ipv6) + 13] & TCPHDR_SYN);
}

/* admit_sampled samples packets without a flow that peek_flow accepted, and tells whether the packet
 * was sampled and its connection is eligible. */
static __always_inline int admit_sampled(struct __sk_buff *skb, struct cpu_state *c, __u32 at, const struct key *k, __u64 hash, int is_ipv6)
{
	if (is_syn(skb, at, k, is_ipv6)) {
		admission_reset(hash);
		return 0;
	}
	return sample(c) && admit(hash, bpf_ktime_get_coarse_ns());
}

/* read_key reads the key of a packet from its pod (out), or to it. It returns 0, or the reason why the packet takes the slow path. */
static __always_inline int read_key(struct __sk_buff *skb, struct key *k, int out, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + IP_HLEN + sizeof(struct udphdr));

	return likely(data) ? peek_flow(skb, data, ETH_HLEN, k, out, is_ipv6) : REASON_NOT_TCP_UDP;
}
