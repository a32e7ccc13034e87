/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The byte order of the eBPF machine, as linux/ip.h and linux/tcp.h want it. Like linux/types.h
 * here, it stands in for a header of the build machine's architecture.
 */
#ifndef _ASM_BYTEORDER_H
#define _ASM_BYTEORDER_H

#define __LITTLE_ENDIAN_BITFIELD
#define __constant_cpu_to_be32(x) __builtin_bswap32(x)

#endif
