/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#pragma once

/* What happened to a packet. REASON_FAST_...: it took the fast path, between nodes (in VXLAN, or routed without outer headers)
 * or between pods of this node. REASON_FORGED: it was dropped. Others: it took the slow path, for the named reason. The agent
 * takes the names from BTF: REASON_NO_FLOW is "no-flow". */
enum reason {
	REASON_FAST_OUT_VXLAN,
	REASON_FAST_OUT_ROUTED,
	REASON_FAST_OUT_LOCAL,
	REASON_FAST_IN_VXLAN,
	REASON_FAST_IN_ROUTED,
	REASON_FAST_IN_LOCAL,
	REASON_NO_FLOW,         /* no flow is known */
	REASON_TCP_FLAGS,       /* SYN, FIN, RST or URG */
	REASON_LEASE_EXPIRED,   /* the agent no longer renews its lease */
	REASON_NOT_TCP_UDP,     /* neither TCP nor UDP over IP */
	REASON_IP_OPTIONS,      /* IPv4 options, or IPv6 extension headers */
	REASON_FRAGMENT,        /* an IP fragment */
	REASON_TTL,             /* TTL or hop limit is 1 */
	REASON_MALFORMED,       /* inconsistent lengths, or a wrong IPv4 header checksum */
	REASON_CSUM_UNVERIFIED, /* no device has verified the checksum, and none will compute it */
	REASON_SKB_MARK,        /* skb->mark is set */
	REASON_FLOW_EXPIRED,    /* the slow path forwarded none of its packets within FLOW_TTL */
	REASON_INVALIDATED,     /* a netlink notification invalidated the flow */
	REASON_REVALIDATE,      /* takes the slow path to revalidate its flow */
	REASON_MISMATCH,        /* TOS, TTL, device or Ethernet header differ from the validated ones */
	REASON_EXCEEDS_MTU,     /* larger than the MTU */
	REASON_ENCAP_FAILED,    /* bpf_skb_adjust_room failed */
	REASON_UNTRACKED,       /* conntrack has no entry, or one in another zone */
	REASON_UNREPLIED,       /* the conntrack entry is not established */
	REASON_NAT,             /* NAT other than from a Service to its backend; any NAT of IPv6 */
	REASON_FLOWTABLE,       /* a flowtable of the kernel forwards the connection */
	REASON_CT_HELPER,       /* a conntrack helper handles the connection */
	REASON_TCP_WINDOW,      /* conntrack still checks the TCP window, or the packet is outside it */
	REASON_REWRITTEN,       /* the slow path writes other headers than the fast path would */
	REASON_TABLE_FULL,      /* a map is full */
	REASON_FORGED,          /* dropped: a FIN or RST that conntrack would call invalid */
	REASONS,
};

/* is_refused tells whether a packet takes the slow path because of its headers, and may be of a known TCP connection. */
static inline int is_refused(int reason)
{
	return reason == REASON_TCP_FLAGS || reason == REASON_IP_OPTIONS || reason == REASON_FRAGMENT || reason == REASON_TTL ||
	       reason == REASON_MALFORMED;
}

/* Keeps the type in BTF, which has only the types of maps, variables and programs. */
const enum reason *reason_type __attribute__((unused));
