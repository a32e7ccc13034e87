/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of outer headers and of pods' links. A flow stores only the index of an entry. Programs take free
 * entries, and only the agent frees them: when no flow refers to an entry any more, and every program that may still
 * store it has ended (see tables.go). So an entry does not change while a program may read it for a flow. */
#pragma once

#include "cpu.h"

/* Table sizes. The tables are set-associative, like a CPU's cache: the hash of a value selects a set of entries.
 * The index 0 means that there is no entry. */
#define ENCAP_TEMPLATES 8192 /* one per remote node and NIC */
#define POD_LINKS 4096
#define WAYS 16
/* Outer headers of received packets. The remote node selects the set, so that a host that spoofs its address
 * fills no other set. A node's packets have different outer headers if several routers forward them. */
#define DECAP_TEMPLATES 8192
#define DECAP_WAYS 4

/* A pod's link: the node's veth, and the MAC addresses of the frames that it delivers, destination and source. */
struct pod_link {
	__u32 veth;
	__u8 macs[2 * ETH_ALEN];
	/* Whether the node routes the packets (1), or bridges them from another pod (0). */
	__u32 hops;
	/* Incoming packets of another pod of the node only: the MAC addresses with which that pod sends them. */
	__u8 sent[2 * ETH_ALEN];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ENCAP_TEMPLATES);
	__type(key, __u32);
	__type(value, struct encap_template);
} encap_templates SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DECAP_TEMPLATES);
	__type(key, __u32);
	__type(value, struct encap_template);
} decap_templates SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, POD_LINKS);
	__type(key, __u32);
	__type(value, struct pod_link);
} pod_links SEC(".maps");

/* States of the entries. Programs change a state up to ENTRY_IN_USE, the agent from there on. Programs do not
 * find a retired entry any more. */
enum entry_state { ENTRY_FREE, ENTRY_TAKEN, ENTRY_IN_USE, ENTRY_RETIRED };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ENCAP_TEMPLATES);
	__type(key, __u32);
	__type(value, __u64);
} encap_states SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DECAP_TEMPLATES);
	__type(key, __u32);
	__type(value, __u64);
} decap_states SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, POD_LINKS);
	__type(key, __u32);
	__type(value, __u64);
} pod_link_states SEC(".maps");

/* Keeps the type in BTF, which has only the types of maps, variables and programs. */
const enum entry_state *entry_state_type __attribute__((unused));

/* Random, so that a pod that chooses its MAC addresses cannot choose their set, and fill that of another pod. */
const volatile __u64 hash_seed = 0;

/* Values are structures of smaller fields, and are hashed, compared and copied in words of 32 bits (-fno-strict-aliasing). */

static __always_inline __u64 hash_words(const void *value, __u32 size)
{
	const __u32 *words = value;
	__u64 h = hash_seed;
	__u32 i;

	for (i = 0; i < size / 4; i++) {
		h = (h ^ words[i]) * 0x9e3779b97f4a7c15;
		h ^= h >> 32;
	}
	return h;
}

static __always_inline int equal_words(const void *a, const void *b, __u32 size)
{
	const __u32 *x = a, *y = b;
	__u32 differ = 0, i;

	for (i = 0; i < size / 4; i++)
		differ |= x[i] ^ y[i];
	return !differ;
}

static __always_inline void copy_words(void *to, const void *from, __u32 size)
{
	const __u32 *y = from;
	__u32 *x = to;
	__u32 i;

	for (i = 0; i < size / 4; i++)
		x[i] = y[i];
}

/* index_of returns the index of a value, which it stores if it is new, or 0 if the set of the value is full. */
static __always_inline __u32 index_of(struct cpu_state *c, void *entries, void *states, __u32 first, __u32 ways, const void *value, __u32 size)
{
	__u32 index, i;
	__u64 *state;
	void *entry;

	for (i = 0; i < ways; i++) {
		index = first + i;
		state = bpf_map_lookup_elem(states, &index);
		entry = bpf_map_lookup_elem(entries, &index);
		/* An atomic operation: read the entry only after its state. */
		if (index && state && entry && __sync_fetch_and_or(state, 0) == ENTRY_IN_USE && equal_words(entry, value, size))
			return index;
	}
	for (i = 0; i < ways; i++) {
		index = first + i;
		state = bpf_map_lookup_elem(states, &index);
		entry = bpf_map_lookup_elem(entries, &index);
		if (!index || !state || !entry || __sync_val_compare_and_swap(state, ENTRY_FREE, ENTRY_TAKEN) != ENTRY_FREE)
			continue;
		copy_words(entry, value, size);
		__sync_lock_test_and_set(state, ENTRY_IN_USE);
		return index;
	}
	count(c, REASON_TABLE_FULL);
	return 0;
}

static __always_inline __u32 template_for(struct cpu_state *c, const struct encap_template *o)
{
	__u32 first = hash_words(o, sizeof(*o)) % (ENCAP_TEMPLATES / WAYS) * WAYS;

	return index_of(c, &encap_templates, &encap_states, first, WAYS, o, sizeof(*o));
}

static __always_inline __u32 decap_template_for(struct cpu_state *c, const struct encap_template *o, const struct remote *from)
{
	__u32 first = hash_words(from, sizeof(*from)) % (DECAP_TEMPLATES / DECAP_WAYS) * DECAP_WAYS;

	return index_of(c, &decap_templates, &decap_states, first, DECAP_WAYS, o, sizeof(*o));
}

static __always_inline __u32 pod_link_of(struct cpu_state *c, const struct pod_link *p)
{
	__u32 first = hash_words(p, sizeof(*p)) % (POD_LINKS / WAYS) * WAYS;

	return index_of(c, &pod_links, &pod_link_states, first, WAYS, p, sizeof(*p));
}
