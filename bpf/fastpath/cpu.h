/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Per-CPU state: counters, and the probes that are under way. */
#pragma once

#include "event.h"
#include "probe.h"
#include "reason.h"
#include "segment.h"

/* The fields that every packet reads come first: ineligible traffic pays for each cache line. */
struct cpu_state {
	/* Stage of the outgoing and incoming probe: 0 none, 1 started, 2 seen at the VXLAN device.
	 * decap_stage: 1 decap_nic has seen it, 2 redirect_vxlan has started its probe. */
	__u8 out_stage, in_stage, decap_stage;
	/* Packets without a flow until the next sample. */
	__u32 until_sample;
	__u64 reasons[REASONS];
	struct probe out, in;
	struct decap_probe decap_probe;
	/* When the agent was last asked to attach programs to a pod's link. */
	__u64 attach_requested;
	/* Too large for the stack: a new flow, a packet that follow_refused reads, and a request to the agent. */
	struct flow fresh;
	struct segment refused;
	struct event request;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu_state);
} cpu_states SEC(".maps");

static __always_inline struct cpu_state *this_cpu(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&cpu_states, &first);
}

static __always_inline void count(struct cpu_state *c, __u32 reason)
{
	if (reason < REASONS)
		c->reasons[reason]++;
}

/* decap_id identifies the packet that decap_nic saw last; it is never 0. */
static __always_inline __u32 decap_id(const struct cpu_state *c)
{
	return c->decap_probe.at | 1;
}
