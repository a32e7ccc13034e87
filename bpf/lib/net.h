/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network protocols: the kernel's headers, and the constants that they lack. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/netfilter.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Return values of tcx programs: run the next program, or drop the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

/* include/linux/socket.h */
#define AF_INET 2
#define AF_BRIDGE 7
#define AF_INET6 10

/* As int, so that lengths are computed in 32 bits. */
#define IP_HLEN ((int)sizeof(struct iphdr))
#define IP6_HLEN ((int)sizeof(struct ipv6hdr))
#define HLEN(is_ipv6) ((is_ipv6) ? IP6_HLEN : IP_HLEN)

/* The first byte of an IPv4 header without options. */
#define IHL_VERSION 0x45

/* Bits of the field with the fragment offset (include/net/ip.h, include/net/ipv6.h). */
#define IP_DF 0x4000
#define IP_MF 0x2000
#define IP_OFFSET 0x1fff
#define IP6_OFFSET 0xfff8
#define IP6_MF 0x0001

/* TCP's flags, in byte 13 of the header (include/net/tcp.h). */
#define TCPHDR_FIN 0x01
#define TCPHDR_SYN 0x02
#define TCPHDR_RST 0x04
#define TCPHDR_ACK 0x10
#define TCPHDR_URG 0x20

/* The largest window scale of TCP (RFC 7323, section 2.3). */
#define TCP_MAX_WSCALE 14
