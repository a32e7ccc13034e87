/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Variables with which the agent controls all programs. What else it writes is next to the code that reads it: vxlan_devices,
 * routers and remotes in vxlan.h, link_macs and watched_pods in pod.h, bloom_chosen in bloom.h, hash_seed and the states of entries in index.h.
 */
#pragma once

#include <linux/types.h>

/* When the lease expires (CLOCK_MONOTONIC, ns). The programs forward nothing afterwards: the agent may have died. */
volatile __u64 lease_expires = 0;
/* The current generation. Flows of other generations are invalid: the agent increments it when the network changes. */
volatile __u32 generation = 0;
/* The current epoch. Sequence numbers of other epochs may be old: the agent increments it when packets have passed unseen. */
volatile __u32 epoch = 0;
/* The smallest MTU of all paths, and the range of UDP source ports. */
volatile __u32 mtu = 0;
volatile __u32 port_from = 0, port_to = 0;

/* For tests: packets of BPF_PROG_TEST_RUN have no verified checksum. */
const volatile __u8 skip_csum_checks = 0;
