/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Internet checksums (RFC 1071). */
#pragma once

#include "lib/net.h"

/* fold adds the carries of a sum of 16-bit words. */
static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return sum + (sum >> 16);
}

/* add adds two 16-bit words to a checksum. */
static __always_inline __u32 add(__u32 sum, __u32 two)
{
	return sum + (two & 0xffff) + (two >> 16);
}

/* ip_csum_ok tells whether the IPv4 header checksum is right. */
static __always_inline int ip_csum_ok(const __u32 *ip)
{
	__u32 sum = 0;
	int i;

	for (i = 0; i < IP_HLEN / 4; i++)
		sum = add(sum, ip[i]);
	return fold(sum) == 0xffff;
}

/* csum_replace replaces an address in an uncomplemented checksum. */
static __always_inline __u16 csum_replace(__u16 sum, __be32 from, __be32 to)
{
	return fold(add(add(sum, ~from), to));
}
