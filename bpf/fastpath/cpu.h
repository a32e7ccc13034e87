/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Per-CPU state: counters, and the probes that are under way. */
#pragma once

#include "metadata.h"
#include "reason.h"
#include "segment.h"
#include "vxlan.h"

/* A probe: a packet that takes the slow path, and that this CPU will see again at later hooks. The
 * next packet at such a hook on the way out ends the probe if it is another one. */
struct probe {
	struct headers headers;
	struct key key;
	__u64 wire_peer;
	__u64 at;
	struct metadata metadata;
	/* Out only. */
	__u64 delivery_time;
	__u32 priority;
	__u32 generation;
	__u32 device;
	__u32 overlay;
	/* The conntrack entry that the slow path attached to it. */
	unsigned long ct;
	__u8 mac[2 * ETH_ALEN];
	/* decap_id if nic_decap saw it, or 0. */
	__u32 decapped;
	__u16 check; /* the inner checksum field */
	__u8 gso, socket_ended;
	/* TCP only: no sequence numbers are known, or the packet is outside the window. */
	__u8 seq_unknown;
};

/* A packet that nic_decap left to the kernel, and that vxlan_ingress is to recognise. */
struct decap_probe {
	__u64 at;
	struct metadata metadata;
	__u32 generation;
	struct headers headers;
	struct encap_template outer;
};

/* The fields that every packet reads come first: ineligible traffic pays for each cache line. */
struct cpu_state {
	/* Stage of the outgoing and incoming probe: 0 none, 1 started, 2 seen at the VXLAN device.
	 * decap_stage: 1 nic_decap has seen it, 2 vxlan_ingress has started its probe. */
	__u8 out_stage, in_stage, decap_stage;
	/* Packets without a flow until the next sample. */
	__u32 until_sample;
	__u64 reasons[REASONS];
	struct probe out, in;
	struct decap_probe decap_probe;
	/* When the agent was last asked to attach programs to a pod's link. */
	__u64 attach_requested;
	/* Too large for the stack: a new flow, and a packet that follow_refused reads. */
	struct flow fresh;
	struct segment refused;
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

/* decap_id identifies the packet that nic_decap saw last; it is never 0. */
static __always_inline __u32 decap_id(const struct cpu_state *c)
{
	return c->decap_probe.at | 1;
}
