/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Runs. The programs see a whole batch of packets before the kernel empties the queues in which those on the slow path wait, and a
 * redirect into a pod bypasses these queues. A run lasts from a packet on the slow path until these queues should be empty. */
#pragma once

#include "kernel.h"

#define CLOCK_MONOTONIC 1
#define TIMER_CPU_PIN (1 << 1) /* BPF_F_TIMER_CPU_PIN of Linux 6.7 */
/* A receive softirq whose time or budget is used up leaves queues to the next one, so a run ends with the second expiry. */
#define EXPIRIES 2

struct runs {
	struct bpf_timer timer;
	/* expired: how often the timer has expired. last: its value with which the last run ends. */
	__u32 expired, last, is_armed;
} __attribute__((aligned(64)));

/* By CPU; the agent sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct runs);
} runs SEC(".maps");

/* A run is identified by its CPU (10 bits) and by how often the timer had expired when it began (5 bits); 0 is none. */
static __always_inline __u16 id_of_run(__u32 cpu, __u32 expired)
{
	return expired << 11 | cpu << 1 | 1;
}

/* is_under_way tells whether a run has not ended yet. */
static __always_inline int is_under_way(__u16 id)
{
	__u32 cpu = (id & 0x7ff) >> 1;
	const volatile struct runs *r = id ? bpf_map_lookup_elem(&runs, &cpu) : 0;

	return r && r->is_armed && ((r->expired - (id >> 11)) & 0x1f) < EXPIRIES;
}

/* start_timer starts a timer that expires at once. Its callback runs in a softirq that comes after the one that receives packets. */
static __always_inline long start_timer(struct runs *r)
{
	/* Linux 6.6 cannot pin a timer to its CPU. */
	return bpf_timer_start(&r->timer, 0, TIMER_CPU_PIN) ? bpf_timer_start(&r->timer, 0, 0) : 0;
}

static __always_inline int is_run_pending(const volatile struct runs *r)
{
	return (__s32)(r->last - r->expired) > 0;
}

static int expire(__attribute__((unused)) void *map, __attribute__((unused)) __u32 *cpu, struct runs *r)
{
	r->expired++;
	if (is_run_pending(r) && !start_timer(r))
		return 0;
	__sync_lock_test_and_set(&r->is_armed, 0);
	/* On Linux 6.6, this may be another CPU than that of begin_run. */
	if (is_run_pending(r) && !__sync_lock_test_and_set(&r->is_armed, 1) && start_timer(r))
		r->is_armed = 0;
	return 0;
}

/* begin_run begins a run, which the timer of this CPU ends. It returns 0 if it cannot. */
static __noinline __u16 begin_run(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct runs *r = bpf_map_lookup_elem(&runs, &cpu);
	__u32 expired;

	if (!r || cpu > 0x3ff)
		return 0;
	expired = r->expired;
	r->last = expired + EXPIRIES;
	if (!__sync_lock_test_and_set(&r->is_armed, 1)) {
		bpf_timer_init(&r->timer, &runs, CLOCK_MONOTONIC); /* fails if it exists */
		bpf_timer_set_callback(&r->timer, expire);
		if (start_timer(r)) {
			r->is_armed = 0;
			return 0;
		}
	}
	return id_of_run(cpu, expired);
}
