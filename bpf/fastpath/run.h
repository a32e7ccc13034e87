/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Runs of the receive softirq. The kernel passes a whole batch of packets to the programs before it handles the queues into which
 * the slow path has put some of them. A redirect into a pod bypasses these queues. */
#pragma once

#include "kernel.h"

#define CLOCK_MONOTONIC 1
#define TIMER_CPU_PIN (1 << 1) /* BPF_F_TIMER_CPU_PIN of Linux 6.7 */

struct run {
	struct bpf_timer timer;
	/* How many runs are known to have ended, and whether the timer will say so of this one. */
	__u32 ended, armed;
};

/* By CPU; the agent sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct run);
} runs SEC(".maps");

static int end_run(__attribute__((unused)) void *map, __attribute__((unused)) __u32 *cpu, struct run *r)
{
	r->armed = 0;
	r->ended++;
	return 0;
}

static __always_inline __u16 id_of_run(const struct run *r, __u32 cpu)
{
	return (r->ended << 6 ^ cpu) << 1 | 1;
}

/* this_run identifies the current run of this CPU. It is never 0, and stays the same until a watched run has ended. */
static __always_inline __u16 this_run(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct run *r = bpf_map_lookup_elem(&runs, &cpu);

	return r ? id_of_run(r, cpu) : 0;
}

/* watch_run is this_run, and has a timer end it. The timer has expired at once, but its softirq has to wait for this one. */
static __noinline __u16 watch_run(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct run *r = bpf_map_lookup_elem(&runs, &cpu);

	if (!r)
		return 0;
	if (!r->armed) {
		r->armed = 1;
		bpf_timer_init(&r->timer, &runs, CLOCK_MONOTONIC); /* fails if it exists */
		bpf_timer_set_callback(&r->timer, end_run);
		if (bpf_timer_start(&r->timer, 0, TIMER_CPU_PIN) && bpf_timer_start(&r->timer, 0, 0))
			r->armed = 0;
	}
	return id_of_run(r, cpu);
}
