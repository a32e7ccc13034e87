/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses and prefixes in the maps of a lab. */
#pragma once

#include "lib/net.h"

/* An IPv6 address, or an IPv4-mapped one (RFC 4291, section 2.5.5.2). */
struct address {
	__be32 word[4];
};

/* The key of an LPM trie. */
struct prefix {
	__u32 bits;
	struct address address;
};
