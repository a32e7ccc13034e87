/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A run is one pass of the receive softirq on a CPU. The programs see a whole batch of packets before the kernel empties the queues
 * in which those on the slow path wait. A redirect into a pod bypasses these queues. */
#pragma once

#include "kernel.h"

#define CLOCK_MONOTONIC 1
#define TIMER_CPU_PIN (1 << 1) /* BPF_F_TIMER_CPU_PIN of Linux 6.7 */

struct run {
	struct bpf_timer timer;
	/* ended: how many watched runs have ended. passes: how often the timer still has to expire before the current one ends. */
	__u32 ended, passes;
} __attribute__((aligned(64)));

/* By CPU; the agent sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct run);
} runs SEC(".maps");

/* A run is identified by its CPU (10 bits) and by how many watched runs of that CPU have ended before it (5 bits); 0 is none. */
static __always_inline __u16 id_of_run(const struct run *r, __u32 cpu)
{
	return *(const volatile __u32 *)&r->ended << 11 | cpu << 1 | 1;
}

/* is_under_way tells whether a watched run, of any CPU, has not ended yet. */
static __always_inline int is_under_way(__u16 run)
{
	__u32 cpu = (run & 0x7ff) >> 1;
	struct run *r = run ? bpf_map_lookup_elem(&runs, &cpu) : 0;

	return r && id_of_run(r, cpu) == run;
}

/* start_timer starts a timer that expires at once. Its callback runs in a softirq that comes after the one that receives packets. */
static __always_inline long start_timer(struct run *r)
{
	/* Linux 6.6 cannot pin a timer to its CPU. */
	return bpf_timer_start(&r->timer, 0, TIMER_CPU_PIN) ? bpf_timer_start(&r->timer, 0, 0) : 0;
}

static int end_pass(__attribute__((unused)) void *map, __attribute__((unused)) __u32 *cpu, struct run *r)
{
	if (r->passes > 1) {
		r->passes--;
		if (!start_timer(r))
			return 0;
	}
	r->ended++;
	r->passes = 0;
	return 0;
}

/* watch_run identifies the current run, and has a timer end it. It returns 0 if it cannot. A receive softirq whose time or budget is
 * used up leaves queues to the next pass, so the timer expires twice after the last call. */
static __noinline __u16 watch_run(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct run *r = bpf_map_lookup_elem(&runs, &cpu);

	if (!r || cpu > 0x3ff)
		return 0;
	if (!r->passes) {
		bpf_timer_init(&r->timer, &runs, CLOCK_MONOTONIC); /* fails if it exists */
		bpf_timer_set_callback(&r->timer, end_pass);
		if (start_timer(r))
			return 0;
	}
	r->passes = 2;
	return id_of_run(r, cpu);
}
