/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Variables that the agent writes and the programs read. */
#pragma once

#include <linux/types.h>

/* When the agent's lease expires (CLOCK_MONOTONIC, ns), the generation of valid flows, the smallest
 * MTU of the path, and the range of UDP source ports. */
volatile __u64 lease_expires = 0;
volatile __u32 generation = 0;
/* The agent increments it after it has detached programs that track sequence numbers. */
volatile __u32 epoch = 0;
volatile __u32 mtu = 0;
volatile __u32 port_from = 0, port_to = 0;

/* For tests: packets of BPF_PROG_TEST_RUN have no verified checksum. */
const volatile __u8 skip_csum_checks = 0;
