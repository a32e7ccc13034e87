/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Learning from probes: the headers with which the slow path forwards a probe create a flow, or revalidate it. */
#pragma once

#include "conntrack.h"
#include "index.h"
#include "sampling.h"

/* A flow that proved ineligible is not probed again for this long. */
#define BACKOFF (100 * MS)

/* record_seq records the sequence numbers of a probe that the slow path forwarded. Anybody can
 * forge a packet for the pod, and conntrack accepts it if the entry is liberal. So only a packet from the
 * pod's own device replaces known numbers. */
static __always_inline void record_seq(struct flow *f, int out, const struct probe *p, int is_ipv6)
{
	__u32 end = seq_end(&p->headers, is_ipv6);

	if (p->seq_unknown) {
		if (!out && seq_complete(f))
			return;
		/* A later packet may have made the numbers known while this probe was on its way. */
		if (!out || f->seq_state < SEQ_FROM_POD || !in_window(f, 1, &p->headers, end))
			init_seq(f, out, &p->headers, end);
	}
	update_seq(f, out, &p->headers, end, p->at);
}

/* find_or_create_flow returns the flow of a probe that the slow path forwarded, and creates it if there is
 * none. */
static __always_inline struct flow *find_or_create_flow(struct __sk_buff *skb, struct cpu_state *c, const struct probe *p, int out, int is_ipv6)
{
	__u64 hash = hash_key(&p->key);
	struct flow *f = bpf_map_lookup_elem(&flows, &p->key);
	struct flow *fresh = &c->fresh;
	__u32 interval;
	int reason;

	if (!f) {
		reason = check_conntrack(skb, p, 0, out, &interval, is_ipv6);
		if (reason && reason != REASON_TCP_WINDOW) {
			count(c, reason);
			return 0;
		}
		__builtin_memset(fresh, 0, sizeof(*fresh));
		fresh->key = p->key;
		fresh->bloom_bit = hash % BLOOM_BITS;
		fresh->wire_peer = p->wire_peer;
		if (is_ipv6) {
			copy(fresh->pod6, address_of(&p->headers, out), sizeof(fresh->pod6));
			copy(fresh->peer6, address_of(&p->headers, !out), sizeof(fresh->peer6));
		}
		if (bpf_map_update_elem(&flows, &p->key, fresh, BPF_NOEXIST)) {
			count(c, REASON_TABLE_FULL);
			return 0;
		}
		f = bpf_map_lookup_elem(&flows, &p->key);
	}
	if (is_ipv6 && f && !addresses_match(f, &p->headers, out)) {
		count(c, REASON_MISMATCH);
		return 0;
	}
	/* A validation for another translated peer no longer holds. */
	if (f && f->wire_peer != p->wire_peer) {
		f->out.validated = f->in.validated = 0;
		f->wire_peer = p->wire_peer;
	}
	if (!is_ipv6 && p->wire_peer != peer_of(&p->key) && add_reverse_nat(&p->key, p->wire_peer)) {
		count(c, REASON_TABLE_FULL);
		return 0;
	}
	bloom_set(hash);
	return f;
}

/* record_probe records that the slow path forwarded a probe, and with which headers. Headers that
 * differ from the recorded ones replace them. */
static __always_inline void record_probe(struct direction *w, const struct probe *p, __u32 index, __u32 interval, int is_ipv6)
{
	__u8 tos = TOS(&p->headers, is_ipv6), ttl = HOP_LIMIT(&p->headers, is_ipv6);

	if (w->template != index || w->device != p->device || w->tos != tos || w->ttl != ttl) {
		w->validated = 0;
		w->template = index;
		w->device = p->device;
		w->tos = tos;
		w->ttl = ttl;
		/* Publish the fields before the time. */
		__sync_fetch_and_or(&w->validated, 0);
	}
	w->revalidate_after = interval;
	w->generation = p->generation;
	w->validated = p->at;
}

/* back_off stops probing a direction for a while. */
static __always_inline void back_off(struct cpu_state *c, struct direction *w, int reason, __u64 now)
{
	count(c, reason);
	w->validated = 0;
	w->backoff_until = now + (reason == REASON_TCP_WINDOW ? REVALIDATE_SOON : BACKOFF);
}

/* learn_decapped records the outer headers of a probe that decap_nic saw, and the kernel decapsulated. */
static __always_inline void learn_decapped(struct cpu_state *c, struct flow *f, const struct probe *p)
{
	struct remote from = sender(&c->decap_probe.outer, p->device);
	__u32 index = 0;

	c->decap_stage = 0;
	if (is_remote(&from))
		index = decap_template_for(c, &c->decap_probe.outer, &from);
	if (!index) {
		f->left = p->at;
		return;
	}
	f->decapped_template = index;
	f->decapped_generation = p->generation;
	f->decapped = p->at;
}
