/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Events: requests of the programs to the agent. */
#pragma once

#include "flow.h"

enum event_kind {
	EVENT_ATTACH,  /* attach programs to the pod's link: the connection is eligible */
	EVENT_LIBERAL, /* make the conntrack entry liberal */
	EVENT_ACKED,   /* clear conntrack's flag of unacknowledged data */
	EVENT_RESYNC,  /* resynchronise conntrack */
	EVENT_RESET,   /* move conntrack to CLOSE */
	EVENT_REOPEN,  /* move conntrack back to ESTABLISHED: the connection has not ended */
};

struct event {
	struct key key;
	/* IPv6 only: the addresses of the known flow or, if link is set, those of the packet. */
	word pod6[2], peer6[2];
	enum event_kind kind;
	/* EVENT_ATTACH only: the link of the pod, if the peer is a pod of the same node; else 0. */
	__u32 link;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} events SEC(".maps");

/* Keeps the type in BTF, which has only the types of maps, variables and programs. */
const struct event *event_type __attribute__((unused));

static __always_inline void emit(const struct key *k, const struct flow *f, enum event_kind kind)
{
	struct event event = {.key = *k, .kind = kind};

	if (f && k->is_ipv6) {
		__builtin_memcpy(event.pod6, f->pod6, sizeof(event.pod6));
		__builtin_memcpy(event.peer6, f->peer6, sizeof(event.peer6));
	}
	bpf_ringbuf_output(&events, &event, sizeof(event), 0);
}
