/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of encapsulation templates and of pods' links. An entry never changes, and its index is never
 * reused. So a flow stores only the index, and a program never reads a half-written entry. */
#pragma once

#include "cpu.h"

/* Table sizes: encapsulation templates (one per remote node and NIC), and pods' links. */
#define ENCAP_TEMPLATES 2048
#define POD_LINKS 4096

/* A pod's link: the node's veth, and the MAC addresses of the frames that it delivers. */
struct pod_link {
	__u32 veth;
	__u8 mac[ETH_ALEN], from[ETH_ALEN];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ENCAP_TEMPLATES);
	__type(key, struct encap_template);
	__type(value, __u32);
} encap_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ENCAP_TEMPLATES);
	__type(key, __u32);
	__type(value, struct encap_template);
} encap_templates SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, POD_LINKS);
	__type(key, struct pod_link);
	__type(value, __u32);
} pod_link_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, POD_LINKS);
	__type(key, __u32);
	__type(value, struct pod_link);
} pod_links SEC(".maps");

/* Entries in use. Index 0 stays empty. */
__u32 templates_used = 0, pod_links_used = 0;

/* index_of returns the index of a value, which it stores if it is new, or 0 if the table is full. */
static __always_inline __u32 index_of(struct cpu_state *c, void *by_value, void *by_index, __u32 *used, __u32 max, const void *value)
{
	__u32 *known = bpf_map_lookup_elem(by_value, value), index;

	if (known)
		return *known;
	/* Bound the counter, or it would wrap around to used indexes. */
	if (*used >= max) {
		count(c, REASON_TABLE_FULL);
		return 0;
	}
	index = __sync_fetch_and_add(used, 1) + 1;
	if (bpf_map_update_elem(by_index, &index, value, BPF_ANY) || bpf_map_update_elem(by_value, value, &index, BPF_ANY)) {
		count(c, REASON_TABLE_FULL);
		return 0;
	}
	return index;
}

static __always_inline __u32 template_for(struct cpu_state *c, const struct encap_template *o)
{
	return index_of(c, &encap_index, &encap_templates, &templates_used, ENCAP_TEMPLATES, o);
}

static __always_inline __u32 pod_link_of(struct cpu_state *c, const struct pod_link *p)
{
	return index_of(c, &pod_link_index, &pod_links, &pod_links_used, POD_LINKS, p);
}
