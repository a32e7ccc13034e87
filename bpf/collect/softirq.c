// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures exactly how much time each CPU spends in each softirq vector, and
 * how often it runs. The raw tracepoints enclose every softirq action, in
 * interrupts and in ksoftirqd (kernel/softirq.c, handle_softirqs). They fire
 * hundreds of thousands of times a second, so the programs only read the clock
 * and add.
 *
 * Softirqs do not nest on a CPU, so one time stamp per CPU suffices and nothing
 * needs to be atomic. An interrupt during a softirq counts as part of it. A
 * softirq counts when it ends; net_rx ends after netdev_budget_usecs at the
 * latest, which bounds the error at the edges of a measurement.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* NR_SOFTIRQS of include/linux/interrupt.h, in the order of /proc/softirqs. */
#define VECTORS 10

struct softirq_cpu {
	__u64 entered; /* ns of CLOCK_MONOTONIC; 0 outside a softirq */
	__u64 ns[VECTORS];
	__u64 count[VECTORS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct softirq_cpu);
} cpus SEC(".maps");

static __always_inline struct softirq_cpu *this_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&cpus, &zero);
}

SEC("raw_tp/softirq_entry")
int softirq_entry(void *ctx)
{
	struct softirq_cpu *cpu = this_cpu();

	if (cpu)
		cpu->entered = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/softirq_exit")
int softirq_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct softirq_cpu *cpu = this_cpu();
	__u64 vector = ctx->args[0];

	/* The program was attached in the middle of this softirq. */
	if (!cpu || !cpu->entered || vector >= VECTORS)
		return 0;
	cpu->ns[vector] += bpf_ktime_get_ns() - cpu->entered;
	cpu->count[vector]++;
	cpu->entered = 0;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
