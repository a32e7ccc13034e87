//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A fast path for unmodified VXLAN overlays: packets of established connections go from the
 * pod's veth to the NIC, and from the NIC or the VXLAN device into the pod, past bridge, routing
 * and netfilter of the node.
 *
 *   encap           tcx ingress of a pod's veth       encapsulates, redirects to the NIC
 *   observe_vxlan   tcx egress of the VXLAN device  ┐ see what the slow path makes
 *   observe_nic     tcx egress of the NIC           ┘ of a probe on its way out
 *   nic_decap       tcx ingress of the NIC            decapsulates, redirects into the pod
 *   vxlan_ingress   tcx ingress of the VXLAN device   redirects into the pod
 *   observe_pod     tcx egress of a pod's veth        sees what the slow path delivers
 *   drop_forged     netfilter, before conntrack       drops forged FINs and RSTs
 *
 * The fast path derives nothing from routing or neighbour tables. It writes what the kernel itself
 * wrote for the same connection within the last second: observe_nic and observe_pod compare that,
 * byte by byte, with what encap and vxlan_ingress would have written. A flow takes the fast path
 * while the slow path has forwarded its packets both ways within that second, in this generation,
 * and conntrack has it as established. Where the kernel translates the peer of a pod, from the
 * address of a Service to that of a backend, the fast path does too.
 *
 * The outer headers are IPv4. The inner ones are IPv4 or IPv6: each program tells them apart once,
 * and from there on is_ipv6 is a constant. IPv6 is not translated.
 *
 * A packet that takes the slow path goes on unchanged.
 *
 * encap and observe_pod are attached only to the links of pods with an eligible connection.
 * observe_vxlan and vxlan_ingress find those by sampling, and ask the agent to attach.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* TCX_NEXT (TC_ACT_UNSPEC): run the next program. */
#define NEXT -1
#define DROP 2 /* TC_ACT_SHOT */

#define barrier() asm volatile("" ::: "memory")
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#define DECAP_L3_IPV6 (1ULL << 8) /* BPF_F_ADJ_ROOM_DECAP_L3_IPV6, which older headers lack */
#define PACKET_HOST 0 /* include/uapi/linux/if_packet.h */
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_HLEN 14
#define TCP 6
#define UDP 17
#define IP_HLEN 20
#define IP6_HLEN 40
#define HLEN(is_ipv6) ((is_ipv6) ? IP6_HLEN : IP_HLEN)
/* IPv6's next headers that stand between it and TCP or UDP (RFC 8200, section 4). */
#define HOP_BY_HOP 0
#define ROUTING 43
#define FRAGMENT_HEADER 44
#define DESTINATION 60
#define AUTHENTICATION 51
/* The longest chain of IPv6 extension headers that drop_forged parses; real traffic has fewer. */
#define EXTENSION_HEADERS_MAX 16
/* What VXLAN adds: Ethernet, VXLAN, UDP and IPv4 (RFC 7348, section 5). */
#define ENCAP_OVERHEAD 50

/* TCP's flags, and conntrack's TCP state and flags
 * (include/uapi/linux/netfilter/nf_conntrack_tcp.h). */
#define TCP_NOT_DATA 0x27 /* URG, RST, SYN, FIN */
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define CT_TCP_ESTABLISHED 3
#define CT_WINDOW_SCALE 0x01
#define CT_BE_LIBERAL 0x08
#define CT_UNACKNOWLEDGED 0x10
/* include/uapi/linux/netfilter/nf_conntrack_common.h */
#define CT_SEEN_REPLY (1 << 1)
#define CT_CONFIRMED (1 << 3)
#define CT_DYING (1 << 9)
#define CT_SHIFTED (1 << 6) /* NAT changes sequence numbers */
#define CT_HELPER (1 << 13)
#define NF_DROP 0 /* include/uapi/linux/netfilter.h */
#define NF_ACCEPT 1
#define NF_PRE_ROUTING 0
#define NF_LOCAL_IN 1
#define CHECKSUM_UNNECESSARY 1 /* include/linux/skbuff.h */
#define CHECKSUM_PARTIAL 3

#define MS 1000000ULL
/* How long a flow stays valid after the slow path forwarded one of its packets: less than a second
 * by any clock, as the coarse clock may be a tick behind. */
#define FLOW_TTL (1000 * MS - PROBE_TTL)
/* How often one packet takes the slow path to revalidate its flow; the shorter interval holds while
 * conntrack believes that data is unacknowledged (see check_conntrack). */
#define REVALIDATE (500 * MS)
#define REVALIDATE_SOON (20 * MS)
/* The least age of an eligible connection: one of a few packets gains nothing. */
#define MIN_AGE (50 * MS)
/* Connections that are sampled less often count as idle. */
#define MAX_GAP (2000 * MS)
/* One in about this many packets without a flow is sampled. */
#define SAMPLE_RATE 32
/* Table sizes: encapsulation templates (one per remote node and NIC), and pods' links. */
#define ENCAP_TEMPLATES 2048
#define POD_LINKS 4096
/* How long a flow is not probed again after the slow path proved it ineligible. */
#define BACKOFF (100 * MS)
/* How long single packets of a flow are not decapsulated at the NIC after the kernel had to
 * decapsulate one: they would overtake it. */
#define REORDER_WINDOW (50 * MS)
/* The largest window scale (RFC 7323, section 2.3). */
#define SCALE_MAX 14
/* After this many bytes the agent resynchronises conntrack, which has not seen them. Sequence
 * numbers are compared modulo 2^32, so conntrack must never be 2^31 behind. */
#define RESYNC_BYTES (1U << 30)
/* How long a probe may take to reach the program that waits for it: more than a tick of the coarse
 * clock. */
#define PROBE_TTL (10 * MS)

/* The kernel's types, as far as programs read them. CO-RE relocates the fields by the kernel's BTF. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sk_buff {
	struct net_device *dev;
	unsigned long _nfct;
	unsigned char *head, *data;
	__u16 csum_start;
	__u8 ip_summed : 2;
	__u8 csum_level : 2;
};

struct bpf_nf_ctx {
	struct sk_buff *skb;
};

struct ip_ct_tcp_state {
	__u32 td_end;
	__u8 td_scale;
	__u8 flags;
};

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state, retrans;
	__u16 last_win;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

union nf_inet_addr {
	__be32 ip;
	__be32 ip6[4];
};

union nf_conntrack_man_proto {
	__be16 all;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
	union nf_conntrack_proto proto;
};

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[5], *hooks_ipv6[5];
};

struct net {
	struct netns_nf nf;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct bpf_xdp_entity {
	struct bpf_prog *prog;
	struct bpf_xdp_link *link;
};

struct net_device {
	void *rx_handler;
	possible_net_t nd_net;
	struct bpf_mprog_entry *tcx_ingress;
	struct nf_hook_entries *nf_hooks_ingress;
	struct bpf_xdp_entity xdp_state[3];
};

struct sock_common {
	possible_net_t skc_net;
};

struct sock {
	struct sock_common __sk_common;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	const struct tcp_ulp_ops *icsk_ulp_ops;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
};
#pragma clang attribute pop

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32, struct bpf_ct_opts *, __u32) __ksym;
void bpf_ct_release(struct nf_conn *) __ksym;
void *bpf_cast_to_kern_ctx(void *) __ksym;
int bpf_dynptr_from_skb(struct __sk_buff *, __u64, struct bpf_dynptr *) __ksym;
void *bpf_dynptr_slice(const struct bpf_dynptr *, __u32, void *, __u32) __ksym;
__u32 bpf_dynptr_size(const struct bpf_dynptr *) __ksym;

/* What became of packets: the first two took the fast path, all others the slow path, for the
 * reason named. reasons in fastpath.go has the same order. */
enum reason {
	FAST_OUT,
	FAST_IN,
	NO_FLOW,         /* no flow is known */
	TCP_FLAGS,       /* SYN, FIN, RST or URG */
	LEASE_EXPIRED,   /* the agent no longer renews its lease */
	NOT_TCP_UDP,     /* neither TCP nor UDP over IP */
	IP_OPTIONS,      /* IPv4 options, or IPv6 extension headers */
	FRAGMENT,        /* an IP fragment */
	TTL_EXPIRED,     /* TTL or hop limit is 1 */
	MALFORMED,       /* inconsistent lengths, or a wrong IPv4 header checksum */
	CSUM_UNVERIFIED, /* neither the sender's stack nor the NIC vouches for the checksum */
	SKB_MARK,        /* skb->mark is set */
	FLOW_EXPIRED,    /* the slow path forwarded none of its packets within FLOW_TTL */
	INVALIDATED,     /* a netlink notification invalidated the flow */
	REVALIDATING,    /* takes the slow path to revalidate its flow */
	MISMATCH,        /* TOS, TTL, device or Ethernet header differ from the validated ones */
	EXCEEDS_MTU,     /* larger than the MTU */
	ENCAP_FAILED,    /* bpf_skb_adjust_room failed */
	UNTRACKED,       /* conntrack has no entry, or one in another zone */
	UNREPLIED,       /* the conntrack entry is not established */
	NAT,             /* NAT other than of the peer of the pod that opened the connection; any NAT of IPv6 */
	CT_HELPED,       /* a conntrack helper follows the connection */
	TCP_WINDOW,      /* conntrack still checks the TCP window, or the packet is outside it */
	REWRITTEN,       /* the slow path writes other headers than the fast path would */
	TABLE_FULL,      /* a map is full */
	FORGED,          /* dropped: a FIN or RST that conntrack would call invalid */
	REASONS,
};

/* Keys and addresses as two words, which are built, compared and hashed in registers. */
typedef __u64 __attribute__((may_alias)) word;

/* A connection, seen from its pod: as the pod addresses its peer, or as the wire does. The two
 * differ where NAT translates the peer. Of IPv6 addresses the key has a hash; struct flow has the
 * addresses, and of two connections with the same key only one is known. */
struct key {
	__be32 pod, peer;
	__be16 pod_port, peer_port;
	__u8 protocol;
	__u8 is_ipv6;
	__u8 zero[2];
} __attribute__((aligned(8)));

/* The header fields that must arrive as they left. Each has one value for all segments of a GSO
 * packet. */
struct headers {
	__u32 l4[4]; /* TCP: up to flags and window; UDP: ports and length */
	__u32 ip[10]; /* IPv4 uses 5 */
} __attribute__((aligned(8)));

/* The outer headers of packets to another node. Per-packet fields are 0; the UDP checksum is not,
 * if it is used. */
struct encap_template {
	__u32 nic;
	struct {
		__u8 to[6], from[6];
		__be16 protocol;
		__u8 ihl_version, tos;
		__be16 length, id, fragment;
		__u8 ttl, ip_protocol;
		__u16 ip_check;
		__be16 source[2], destination[2];
		__be16 port, vxlan_port, udp_length, udp_check;
		__be16 vxlan[4];
		__be16 inner[7];
	} head;
};

/* A pod's link: the node's veth, and the Ethernet header of what it delivers. */
struct pod_link {
	__u32 veth;
	__u8 mac[6], from[6];
};

struct direction {
	/* When the slow path last forwarded a packet (the time at which it set out), in which
	 * generation; when a packet was last sent to revalidate the flow, and until when none is. */
	__u64 validated, revalidated, backoff_until;
	/* Revalidation interval, ns. */
	__u32 revalidate_after;
	__u32 generation;
	/* Where packets enter: the pod's veth, or the VXLAN device. */
	__u32 device;
	/* Index into encap_templates (out) or pod_links (in); 0 is none. */
	__u32 template;
	__u8 tos, ttl;
	/* Out only: the longest inner packet that the route to the other node takes. */
	__u16 mtu;
	/* TCP only. The end of what was sent this way (SND.NXT), the highest acknowledgement sent
	 * this way (RCV.NXT), the right edge of the window that the other side announced for this
	 * way, and the scale of the windows that this way announces (RFC 7323). */
	__u32 snd_nxt, rcv_nxt, window_end, scale;
	/* The epoch in which a packet was last seen this way. */
	__u32 epoch;
};

/* Where a flow's sequence numbers come from: a packet of the peer, which anybody can forge; a
 * packet of the pod; or the pod's, and a packet of the peer since, which confirmed how large the
 * peer's window is. */
enum { SEQ_FROM_PEER = 1, SEQ_FROM_POD, SEQ_CONFIRMED };

struct flow {
	struct direction out, in;
	/* Destination and source MAC of what the pod sends. */
	__u8 mac[12];
	/* Its bit in the Bloom filter. */
	__u32 bloom_bit;
	/* The key, as the pod has it. A deleted element may be reused while a program still reads
	 * it. */
	struct key key;
	/* The peer as the wire has it (PEER), in one word so that it is read atomically. */
	__u64 wire_peer;
	/* When the kernel last decapsulated a packet of this flow that nic_decap had seen, in which
	 * generation, and the index of its outer headers in encap_templates. */
	__u64 decapped;
	__u32 decapped_generation;
	__u32 decapped_template;
	/* When a GSO packet last came to the NIC; when a packet was last left to the kernel because
	 * it is one, or because GRO may merge it into one. */
	__u64 gso, gso_possible;
	/* When the flow was last seen to end at a socket of the pod (see ends_at_socket). */
	__u64 socket_ended;
	/* IPv6 only: the addresses. */
	word pod6[2], peer6[2];
	/* TCP only: where the sequence numbers come from (SEQ_...), or 0; and whether the
	 * connection may have been closed before its flow became known (see check_conntrack). */
	__u8 seq_state, maybe_closed, zero[2];
	/* TCP only: up to which sequence number of the pod, and of the peer, the agent was last
	 * asked to resynchronise conntrack. */
	__u32 resynced[2];
	/* When the last packet was seen, ms. */
	__u32 last_ms;
};

/* Reverse NAT: from the peer's address on the wire to the flow. */
struct nat_entry {
	struct key key;
	/* Its bit in the Bloom filter. */
	__u32 bloom_bit;
	__u32 zero;
};

/* A probe: a packet that this CPU is about to see again, further down the slow path. On the way out
 * any other packet seen there first ends the probe. */
struct probe {
	struct headers headers;
	struct key key;
	__u64 wire_peer;
	__u64 at;
	__u32 generation;
	__u32 device;
	__u32 overlay;
	/* The conntrack entry that the slow path attached to it. */
	unsigned long ct;
	__u8 mac[12];
	/* decap_id if nic_decap saw it, or 0. */
	__u32 decapped;
	__u16 check; /* the inner checksum field */
	__u8 gso, socket_ended;
	/* TCP only: whether it does not continue the known sequence numbers. */
	__u8 seq_unknown;
};

/* A packet that nic_decap left to the kernel, to be recognised by vxlan_ingress. */
struct decap_probe {
	__u64 at;
	__u32 generation;
	struct headers headers;
	struct encap_template outer;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct key);
	__type(value, struct flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct key);
	__type(value, struct nat_entry);
} reverse_nat SEC(".maps");

/* Templates and links are stored once each and never change: an index is not reused. */
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

/* MAC addresses that a bridge has learned at a pod's link, or that a neighbour entry has there.
 * Written by the agent. A bridge that does not know a MAC floods all its ports; only the port that
 * owns it delivers. */
struct link_mac {
	__u32 link;
	__u8 mac[6], zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POD_LINKS);
	__type(key, struct link_mac);
	__type(value, __u8);
} link_macs SEC(".maps");

/* The supported VXLAN devices by ifindex, and what their packets have. */
struct vxlan_device {
	__u32 nic;
	__be16 source[2]; /* the outer source address */
	__be16 port;
	__be16 mac[3];
	__be16 vni[2]; /* and a zero byte */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, __u32);
	__type(value, struct vxlan_device);
} vxlan_devices SEC(".maps");

/* Per-CPU state. What every packet reads comes first: ineligible traffic pays for each cache line. */
struct cpu_state {
	/* Stage of the outgoing and incoming probe: 0 none, 1 started, 2 seen at the VXLAN device.
	 * decap_stage: 1 nic_decap has seen it, 2 vxlan_ingress has started its probe. */
	__u8 out_stage, in_stage, decap_stage;
	/* Packets without a flow until the next sample. */
	__u32 until_sample;
	__u64 reasons[REASONS];
	struct probe out, in;
	struct decap_probe decap_probe;
	/* When the agent was last asked to attach programs to a pod's link. */
	__u64 attach_requested;
	/* A new flow: too large for the stack. */
	struct flow fresh;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu_state);
} cpu_states SEC(".maps");

/* Pods whose links have all programs: by the ifindex that their packets come from, and by the
 * addresses known there; the other field is 0. Written by the agent. A packet that no observe_pod
 * would see is not probed. */
struct watch {
	__u32 device;
	__be32 pod;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POD_LINKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct watch);
	__type(value, __u8);
} watched_pods SEC(".maps");

/* What the agent is asked to do. fastpath.go decodes it. */
enum event_kind {
	EVENT_ATTACH,  /* attach programs to the link of its pod: the connection is eligible */
	EVENT_LIBERAL, /* make its conntrack entry liberal */
	EVENT_ACKED,   /* clear conntrack's flag of unacknowledged data */
	EVENT_RESYNC,   /* resynchronise conntrack */
	EVENT_RESET,   /* move conntrack to CLOSE */
	EVENT_REOPEN,  /* move conntrack back to ESTABLISHED: it has not ended */
};

struct event {
	struct key key;
	/* IPv6 only: the addresses of a known flow. */
	word pod6[2], peer6[2];
	__u32 kind, zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} events SEC(".maps");

/* Written by the agent: when its lease expires (CLOCK_MONOTONIC, ns), the generation of what is
 * valid, the least MTU on the way, and the range of source ports. */
volatile __u64 lease_expires = 0;
volatile __u32 generation = 0;
/* Incremented when programs that count sequence numbers were detached. */
volatile __u32 epoch = 0;
volatile __u32 mtu = 0;
volatile __u32 port_from = 0, port_to = 0;

/* Whether the upper bound of the port range is included (see is_source_port). */
volatile __u32 ports_inclusive = 0;

/* For tests: packets of BPF_PROG_TEST_RUN have no verified checksum. */
const volatile __u8 skip_csum_checks = 0;

/* Entries in use. Index 0 stays empty. */
__u32 templates_used = 0, pod_links_used = 0;

/* A Bloom filter of the known flows: a packet whose bit is clear needs no map lookup. Programs set
 * bits, the agent clears them. A flow whose bit was cleared by mistake is learned again. */
#define BLOOM_BITS 16384
__u64 bloom[BLOOM_BITS / 64];

/* Connections that were sampled once: part of the hash, and when (ms). One is admitted if it is
 * sampled again when it is old enough, so short connections leave no state. */
#define ADMISSION_SLOTS 1024
__u64 admission[ADMISSION_SLOTS];

static __always_inline struct cpu_state *this_cpu(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&cpu_states, &first);
}

static __always_inline void count(struct cpu_state *c, __u32 reason)
{
	if (reason < REASONS)
		c->reasons[reason]++;
}

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

/* field reads a pointer of the context. The compiler would move it as the 32 bits that it is
 * declared as, and the verifier would take it for a scalar from then on. */
#define field(skb, name) ({ \
	void *__pointer; \
	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(__pointer) : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, name))); \
	__pointer; \
})

/* copy copies packet bytes by words. The compiler, which knows of no alignment, would copy them one
 * by one. */
#define copy(to, from, size) do { \
	__u32 *__to = (void *)(to); \
	const __u32 *__from = (const void *)(from); \
	_Pragma("unroll") \
	for (__u32 __i = 0; __i < (size) / 4; __i++) \
		__to[__i] = __from[__i]; \
} while (0)

/* pull_data returns the first size bytes of the packet, or 0 if it is shorter. */
static __always_inline __u8 *pull_data(struct __sk_buff *skb, __u32 size)
{
	__u8 *data = field(skb, data);

	if (unlikely((void *)data + size > field(skb, data_end))) {
		if (bpf_skb_pull_data(skb, size))
			return 0;
		data = field(skb, data);
		if ((void *)data + size > field(skb, data_end))
			return 0;
	}
	return data;
}

/* Fields of the first and third word of the IPv4 header, and of the first two of the IPv6 header,
 * as they lie in memory. */
#define BYTE(word, n) ((__u8)((word) >> (8 * (n))))
#define HALF(word, n) ((__be16)((word) >> (16 * (n))))
#define TOS(h, is_ipv6) ((is_ipv6) ? (__u8)(bpf_ntohl((h)->ip[0]) >> 20) : BYTE((h)->ip[0], 1))
#define LENGTH(h, is_ipv6) ((is_ipv6) ? bpf_ntohs(HALF((h)->ip[1], 0)) + IP6_HLEN : bpf_ntohs(HALF((h)->ip[0], 1)))
#define TTL(h, is_ipv6) ((is_ipv6) ? BYTE((h)->ip[1], 3) : BYTE((h)->ip[2], 0))
#define PROTOCOL(h, is_ipv6) ((is_ipv6) ? BYTE((h)->ip[1], 2) : BYTE((h)->ip[2], 1))
/* The word that has the TTL or hop limit. */
#define HOP(is_ipv6) ((is_ipv6) ? 1 : 2)
/* How many bytes of the header the fast path rewrites: no IPv6 address. */
#define CHANGES(is_ipv6) ((is_ipv6) ? 8 : IP_HLEN)

/* decrement_hop_limit returns the word of the TTL or hop limit with one less, and the IPv4 header
 * checksum updated. */
static __always_inline __u32 decrement_hop_limit(__u32 word, int is_ipv6)
{
	__u32 check = word >> 16;

	if (is_ipv6)
		return word - (1 << 24);
	check += bpf_htons(0x0100);
	check += check >= 0xffff;
	return (check << 16) | ((word & 0xffff) - 1);
}

/* make_key makes the key of a packet that leaves its pod (out), or comes for it. */
static __always_inline void make_key(struct key *k, __be32 source, __be32 destination, __u32 ports, __u8 protocol, int out, int is_ipv6)
{
	word *words = (void *)k;

	words[0] = out ? source | (__u64)destination << 32 : destination | (__u64)source << 32;
	words[1] = (out ? ports : ports >> 16 | ports << 16) | (__u64)protocol << 32 | (__u64)!!is_ipv6 << 40;
}

/* hash_address stands for an IPv6 address in keys; hashAddr in fastpath.go computes the same. */
static __always_inline __u32 hash_address(const word *address)
{
	__u64 h = address[0] * 0x9e3779b97f4a7c15 + address[1];

	h ^= h >> 32;
	return h * 0xd6e8feb86659fd93 >> 32;
}

/* peek_flow reads the flow key of the packet at an offset. The caller has made sure that an IPv4
 * header and the ports are there. It returns 0, or the reason why the packet has none. */
static __always_inline int peek_flow(struct __sk_buff *skb, const __u8 *data, __u32 at, struct key *k, int out, int is_ipv6)
{
	const __u32 *ends;

	if (unlikely(skb->vlan_present))
		return NOT_TCP_UDP;
	if (!is_ipv6) {
		if (data[at] != 0x45)
			return IP_OPTIONS;
		if (data[at + 9] != TCP && data[at + 9] != UDP)
			return NOT_TCP_UDP;
		ends = (const void *)(data + at + 12);
		make_key(k, ends[0], ends[1], ends[2], data[at + 9], out, 0);
		return 0;
	}
	data = pull_data(skb, at + IP6_HLEN + 8);
	if (!data || data[at] >> 4 != 6)
		return NOT_TCP_UDP;
	switch (data[at + 6]) {
	case TCP:
	case UDP:
		break;
	case HOP_BY_HOP:
	case ROUTING:
	case DESTINATION:
		return IP_OPTIONS;
	case FRAGMENT_HEADER:
		return FRAGMENT;
	default:
		return NOT_TCP_UDP;
	}
	ends = (const void *)(data + at + 8);
	make_key(k, hash_address((const void *)ends), hash_address((const void *)(ends + 4)), ends[8], data[at + 6], out, 1);
	return 0;
}

/* parse_headers copies the headers of a packet that peek_flow accepted, and its checksum field. It
 * returns 0, or the reason why the packet takes the slow path. */
static __always_inline int parse_headers(struct __sk_buff *skb, __u32 at, __u8 protocol, struct headers *h, __u16 *check, int is_ipv6)
{
	const __u32 l4 = at + HLEN(is_ipv6);
	__u8 *data;

	if (protocol == TCP) {
		data = pull_data(skb, l4 + 20);
		if (!data)
			return MALFORMED;
		copy(h->ip, data + at, HLEN(is_ipv6));
		copy(h->l4, data + l4, sizeof(h->l4));
		*check = *(__u16 *)(data + l4 + 16);
	} else {
		data = pull_data(skb, l4 + 8);
		if (!data)
			return MALFORMED;
		copy(h->ip, data + at, HLEN(is_ipv6));
		copy(h->l4, data + l4, 8);
		h->l4[1] &= 0xffff;
		h->l4[2] = h->l4[3] = 0;
		*check = *(__u16 *)(data + l4 + 6);
		/* IPv6 forbids it (RFC 8200, section 8.1). */
		if (is_ipv6 && !*check)
			return MALFORMED;
	}
	if (!is_ipv6 && HALF(h->ip[1], 1) & ~bpf_htons(0x4000))
		return FRAGMENT;
	if (TTL(h, is_ipv6) <= 1)
		return TTL_EXPIRED;
	if (LENGTH(h, is_ipv6) + at != skb->len)
		return MALFORMED;
	if (PROTOCOL(h, is_ipv6) == TCP) {
		__u8 words = BYTE(h->l4[3], 0), flags = BYTE(h->l4[3], 1);

		if ((words >> 4) < 5 || HLEN(is_ipv6) + (words >> 4) * 4 > LENGTH(h, is_ipv6))
			return MALFORMED;
		if ((flags & TCP_NOT_DATA) || !(flags & TCP_ACK) || (words & 0xf))
			return TCP_FLAGS;
	} else if (bpf_ntohs(HALF(h->l4[1], 0)) != LENGTH(h, is_ipv6) - HLEN(is_ipv6)) {
		return MALFORMED;
	}
	return 0;
}

/* ip_csum_ok tells whether the IPv4 header checksum is right. */
static __always_inline int ip_csum_ok(const __u32 *ip)
{
	__u32 sum = 0;
	int i;

	for (i = 0; i < 5; i++)
		sum = add(sum, ip[i]);
	return fold(sum) == 0xffff;
}

/* PEER is an address and a port in one word. */
#define PEER(address, port) ((__u32)(address) | (__u64)(port) << 32)

static __always_inline __u64 peer_of(const struct key *k)
{
	return PEER(k->peer, k->peer_port);
}

/* with_peer is a key with another peer. */
static __always_inline struct key with_peer(const struct key *k, __u64 peer)
{
	struct key other = *k;

	other.peer = peer;
	other.peer_port = peer >> 32;
	return other;
}

static __always_inline int same_key(const struct key *a, const struct key *b)
{
	const word *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1];
}

/* hash_key hashes a key; the Bloom filter and admission use different bits of it. */
static __always_inline __u64 hash_key(const struct key *k)
{
	const word *x = (const void *)k;
	__u64 h = x[0] + x[1] * 0x9e3779b97f4a7c15;

	h ^= h >> 32;
	h *= 0xd6e8feb86659fd93;
	return h ^ h >> 32;
}

static __always_inline int bloom_test(__u64 hash)
{
	return bloom[hash % BLOOM_BITS / 64] >> hash % 64 & 1;
}

static __always_inline void bloom_set(__u64 hash)
{
	if (!bloom_test(hash))
		__sync_fetch_and_or(&bloom[hash % BLOOM_BITS / 64], 1ULL << hash % 64);
}

/* sample picks few of the packets without a flow, at random rather than every n-th, which might
 * always be the same connection's. */
static __always_inline int sample(struct cpu_state *c)
{
	if (c->until_sample--)
		return 0;
	c->until_sample = bpf_get_prandom_u32() % (2 * SAMPLE_RATE);
	return 1;
}

/* admission_reset forgets the sample of an older connection with the same ports, when one opens or
 * ends. */
static __always_inline void admission_reset(__u64 hash)
{
	__u64 *slot = &admission[hash / BLOOM_BITS % ADMISSION_SLOTS];

	if (*slot >> 32 == hash >> 32)
		*slot = 0;
}

/* admit tells whether a sampled connection was sampled before, at least MIN_AGE and at most MAX_GAP
 * ago. */
static __always_inline int admit(__u64 hash, __u64 now)
{
	__u64 *slot = &admission[hash / BLOOM_BITS % ADMISSION_SLOTS], old = *slot;
	__u32 part = hash >> 32, ms = now / MS, age = ms - (__u32)old;
	int same = part == old >> 32 && age < MAX_GAP / MS;

	if (same && age < MIN_AGE / MS)
		return 0;
	/* The connection in the slot gets the time to become old enough. */
	if (same || age > 4 * MIN_AGE / MS)
		*slot = (__u64)part << 32 | ms;
	return same;
}

/* is_syn tells whether a packet that peek_flow accepted has SYN set. */
static __always_inline int is_syn(struct __sk_buff *skb, __u32 at, const struct key *k, int is_ipv6)
{
	const __u8 *data = field(skb, data);

	return k->protocol == TCP && (void *)data + at + HLEN(is_ipv6) + 14 <= field(skb, data_end) && (data[at + HLEN(is_ipv6) + 13] & TCP_SYN);
}

/* admit_sampled tells whether a packet that peek_flow accepted, without a flow, is sampled and its
 * connection eligible. */
static __always_inline int admit_sampled(struct __sk_buff *skb, struct cpu_state *c, __u32 at, const struct key *k, __u64 hash, int is_ipv6)
{
	if (is_syn(skb, at, k, is_ipv6)) {
		admission_reset(hash);
		return 0;
	}
	return sample(c) && admit(hash, bpf_ktime_get_coarse_ns());
}

static __always_inline void emit(const struct key *k, const struct flow *f, __u32 kind)
{
	struct event event = {.key = *k, .kind = kind};

	if (f && k->is_ipv6) {
		__builtin_memcpy(event.pod6, f->pod6, sizeof(event.pod6));
		__builtin_memcpy(event.peer6, f->peer6, sizeof(event.peer6));
	}
	bpf_ringbuf_output(&events, &event, sizeof(event), 0);
}

/* is_watched tells whether programs would see a packet all its way: from a pod's device, or to a
 * pod's address; the other is 0. */
static __always_inline int is_watched(__u32 device, __be32 pod)
{
	struct watch w = {.device = device, .pod = pod};

	return bpf_map_lookup_elem(&watched_pods, &w) != 0;
}

/* request_attach asks the agent to attach programs to a pod's link, at most once per ms and CPU. */
static __always_inline void request_attach(struct cpu_state *c, const struct key *k, __u64 now)
{
	if (now - c->attach_requested < MS)
		return;
	c->attach_requested = now;
	emit(k, 0, EVENT_ATTACH);
}

/* TCP fields of struct headers. */
#define SEQ(h) bpf_ntohl((h)->l4[1])
#define ACK(h) bpf_ntohl((h)->l4[2])
#define FLAGS(h) BYTE((h)->l4[3], 1)
#define WINDOW_FIELD(h) bpf_ntohs(HALF((h)->l4[3], 1))

/* seq_after compares TCP sequence numbers (RFC 9293, section 3.4). */
static __always_inline int seq_after(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

/* seq_end is the sequence number after the packet's last byte. */
static __always_inline __u32 seq_end(const struct headers *h, int is_ipv6)
{
	return SEQ(h) + LENGTH(h, is_ipv6) - HLEN(is_ipv6) - (BYTE(h->l4[3], 0) >> 4) * 4;
}

/* data_in_window tells whether data lies between one window before what the other side has
 * acknowledged and the right edge of its window; ack_in_window, whether the other side has sent,
 * not too long ago, what is acknowledged. */
static __always_inline int data_in_window(const struct direction *w, const struct direction *back, __u32 seq, __u32 end)
{
	return !seq_after(seq, w->window_end) && !seq_after(back->rcv_nxt - (0xffff << (back->scale & 15)), end);
}

static __always_inline int ack_in_window(const struct direction *w, const struct direction *back, __u32 ack)
{
	return !seq_after(ack, back->window_end) && !seq_after(w->rcv_nxt - (0xffff << (w->scale & 15)), ack);
}

/* in_window tells whether conntrack would call a TCP packet valid if it had seen all packets before
 * it (tcp_in_window in net/netfilter/nf_conntrack_proto_tcp.c). */
static __always_inline int in_window(const struct direction *w, const struct direction *back, const struct headers *h, int is_ipv6)
{
	return data_in_window(w, back, SEQ(h), seq_end(h, is_ipv6)) && ack_in_window(w, back, ACK(h));
}

/* update_seq records the sequence numbers of a packet in the window. */
static __always_inline void update_seq(struct flow *f, int out, const struct headers *h, __u64 now, int is_ipv6)
{
	struct direction *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u32 is = epoch, ms = now / MS;
	__u32 end = seq_end(h, is_ipv6), ack = ACK(h), edge;

	/* encap sees all that the pod sends before the peer can acknowledge it. */
	if (!out && f->seq_state >= SEQ_FROM_POD && unlikely(seq_after(ack, back->snd_nxt)))
		ack = back->snd_nxt;
	edge = ack + (WINDOW_FIELD(h) << (w->scale & 15));
	if (!out && unlikely(f->seq_state == SEQ_FROM_POD))
		f->seq_state = SEQ_CONFIRMED;
	if (seq_after(end, w->snd_nxt)) {
		w->snd_nxt = end;
		if (unlikely(seq_after(end, w->window_end)))
			w->window_end = end;
		if (unlikely(end - f->resynced[!out] >= RESYNC_BYTES)) {
			f->resynced[!out] = end;
			emit(&f->key, f, EVENT_RESYNC);
		}
	}
	if (seq_after(ack, w->rcv_nxt))
		w->rcv_nxt = ack;
	if (seq_after(ack, back->snd_nxt)) /* sent before the flow was known */
		back->snd_nxt = ack;
	if (seq_after(edge, back->window_end))
		back->window_end = edge;
	if (w->epoch != is)
		w->epoch = is;
	if (f->last_ms != ms)
		f->last_ms = ms;
}

/* init_seq takes the sequence numbers of the first packet. The other side's window is not known
 * until its next packet; until then it is 64 KiB. */
static __always_inline void init_seq(struct flow *f, int out, const struct headers *h, int is_ipv6)
{
	struct direction *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;

	w->snd_nxt = seq_end(h, is_ipv6);
	w->rcv_nxt = back->snd_nxt = ACK(h);
	back->rcv_nxt = SEQ(h);
	back->window_end = ACK(h) + (WINDOW_FIELD(h) << (w->scale & 15));
	w->window_end = w->snd_nxt + 0xffff;
	f->resynced[0] = f->out.snd_nxt;
	f->resynced[1] = f->in.snd_nxt;
	w->epoch = back->epoch = epoch;
	f->seq_state = out ? SEQ_FROM_POD : SEQ_FROM_PEER;
}

/* seq_complete tells whether sequence numbers are known and the programs have seen every packet
 * since. */
static __always_inline int seq_complete(const struct flow *f)
{
	return f->seq_state && f->out.epoch == epoch && f->in.epoch == epoch;
}

/* record_seq records the sequence numbers of a probe that the slow path forwarded. Anybody can
 * forge a packet for the pod, and a liberal conntrack accepts it, so such a packet never replaces
 * known numbers; a packet from the pod's own device does. */
static __always_inline void record_seq(struct flow *f, int out, const struct probe *p, int is_ipv6)
{
	if (p->seq_unknown && !out && seq_complete(f))
		return;
	if (p->seq_unknown)
		init_seq(f, out, &p->headers, is_ipv6);
	update_seq(f, out, &p->headers, p->at, is_ipv6);
}

/* segment_length is the length of the longest packet that GSO will make of a TCP packet. */
static __always_inline __u32 segment_length(const struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	if (!skb->gso_size)
		return LENGTH(h, is_ipv6);
	return skb->gso_size + HLEN(is_ipv6) + (BYTE(h->l4[3], 0) >> 4) * 4;
}

/* flow_valid returns 0 if the slow path is known to forward the flow, or the reason why not. TCP
 * needs both directions. UDP may flow one way for ever, so only that direction counts, once
 * conntrack has seen a reply (check_conntrack). */
static __always_inline int flow_valid(const struct direction *w, const struct direction *back, const struct key *k, __u64 now)
{
	__u32 g = generation;

	if (k->protocol != TCP)
		back = w;
	if (!w->validated || !back->validated || now - w->validated >= FLOW_TTL || now - back->validated >= FLOW_TTL)
		return FLOW_EXPIRED;
	if (w->generation != g || back->generation != g)
		return INVALIDATED;
	return 0;
}

/* template_of reads the template index after the time of validation: the address depends on that
 * time, so a CPU that reorders loads (arm64) cannot read an older index. */
static __always_inline __u32 template_of(const struct direction *w)
{
	__u64 nothing = *(const volatile __u64 *)&w->validated;

	asm volatile("%0 &= 0" : "+r"(nothing));
	return *(const volatile __u32 *)((const void *)&w->template + nothing);
}

/* revalidate_due tells whether this packet is the one to take the slow path, to revalidate its
 * flow. */
static __always_inline int revalidate_due(struct direction *w, __u64 now)
{
	if (now - w->validated < w->revalidate_after || now - w->revalidated < REVALIDATE_SOON)
		return 0;
	w->revalidated = now;
	return 1;
}

/* copy_headers copies the headers of a packet. */
static __always_inline void copy_headers(struct headers *to, const struct headers *h, int is_ipv6)
{
	copy(to, h, __builtin_offsetof(struct headers, ip) + HLEN(is_ipv6));
}

/* start_probe remembers a packet that takes the slow path, to recognise it further down. */
static __always_inline void start_probe(struct probe *p, const struct headers *h, const struct key *k,
				   const struct __sk_buff *skb, __u64 now, __u32 g, int is_ipv6)
{
	copy_headers(&p->headers, h, is_ipv6);
	p->key = *k;
	p->wire_peer = peer_of(k);
	p->at = now;
	p->generation = g;
	p->device = skb->ifindex;
	p->gso = skb->gso_size != 0;
}

/* csum_replace replaces an address in an uncomplemented checksum. */
static __always_inline __u16 csum_replace(__u16 sum, __be32 from, __be32 to)
{
	return fold(add(add(sum, ~from), to));
}

/* nat_headers rewrites the peer of a packet, as the kernel does (nf_nat_ipv4_manip_pkt in
 * net/netfilter/nf_nat_proto.c): its destination, or its source. */
static __always_inline void nat_headers(struct headers *h, int out, __u64 peer)
{
	__u32 *address = &h->ip[out ? 4 : 3];

	h->ip[2] = (h->ip[2] & 0xffff) | (__u32)(__u16)~csum_replace(~(h->ip[2] >> 16), *address, peer) << 16;
	*address = peer;
	h->l4[0] = out ? (h->l4[0] & 0xffff) | (__u32)(peer >> 32) << 16 : (h->l4[0] & 0xffff0000) | (__u32)(peer >> 32);
}

/* nat_packet rewrites the peer in the TCP or UDP header at an offset, and updates the checksum
 * there. */
static __always_inline int nat_packet(struct __sk_buff *skb, __u32 l4, int out, const struct headers *was, __u64 peer, __u16 *check)
{
	__u32 at = l4 + (PROTOCOL(was, 0) == TCP ? 16 : 6);
	__u64 flags = PROTOCOL(was, 0) == TCP ? 0 : BPF_F_MARK_MANGLED_0;
	__be16 port = peer >> 32;

	if (bpf_l4_csum_replace(skb, at, was->ip[out ? 4 : 3], (__u32)peer, flags | BPF_F_PSEUDO_HDR | sizeof(__u32)) ||
	    bpf_l4_csum_replace(skb, at, HALF(was->l4[0], out), port, flags | sizeof(port)) ||
	    bpf_skb_load_bytes(skb, at, check, sizeof(*check)))
		return -1;
	return bpf_skb_store_bytes(skb, l4 + (out ? 2 : 0), &port, sizeof(port), 0);
}

/* headers_match tells whether headers are those of the probe, one hop later. */
static __always_inline int headers_match(const struct headers *was, const struct headers *is, int is_ipv6)
{
	int i;

	for (i = 0; i < 4; i++)
		if (was->l4[i] != is->l4[i])
			return 0;
	for (i = 0; i < HLEN(is_ipv6) / 4; i++)
		if ((i == HOP(is_ipv6) ? decrement_hop_limit(was->ip[i], is_ipv6) : was->ip[i]) != is->ip[i])
			return 0;
	return 1;
}

/* headers_equal tells whether headers are those of a packet that was not forwarded yet. */
static __always_inline int headers_equal(const struct headers *a, const struct headers *b, int is_ipv6)
{
	int i;

	for (i = 0; i < 4; i++)
		if (a->l4[i] != b->l4[i])
			return 0;
	for (i = 0; i < HLEN(is_ipv6) / 4; i++)
		if (a->ip[i] != b->ip[i])
			return 0;
	return 1;
}

/* same_packet tells whether headers are of the same packet, even if addresses or ports were
 * rewritten. */
static __always_inline int same_packet(const struct headers *was, const struct headers *is, int is_ipv6)
{
	if (was->l4[1] != is->l4[1])
		return 0;
	if (is_ipv6)
		return was->ip[0] == is->ip[0] && HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
	return HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
}

/* address_of is the source or destination address of an IPv6 packet. */
static __always_inline const word *address_of(const struct headers *h, int source)
{
	return (const void *)&h->ip[source ? 2 : 6];
}

static __always_inline int equal_addresses(const word *a, const word *b)
{
	return a[0] == b[0] && a[1] == b[1];
}

/* nat_reason tells why the headers of an IPv6 packet changed. */
static __always_inline int nat_reason(const struct headers *was, const struct headers *is)
{
	return was->l4[0] != is->l4[0] || !equal_addresses(address_of(was, 1), address_of(is, 1)) ||
	       !equal_addresses(address_of(was, 0), address_of(is, 0)) ? NAT : REWRITTEN;
}

/* addresses_match tells whether an IPv6 packet has the addresses of a flow with its key. */
static __always_inline int addresses_match(const struct flow *f, const struct headers *h, int out)
{
	return equal_addresses(f->pod6, address_of(h, out)) && equal_addresses(f->peer6, address_of(h, !out));
}

/* is_open tells whether a TCP connection that conntrack takes for closed is still open. A liberal
 * conntrack believes any FIN; a true one would have deleted the flow, if it was known
 * (handle_flags). A connection that a killed agent left liberal, and whose flow became known since,
 * is open if both sides have sent more: nothing follows a FIN. */
static __always_inline int is_open(struct flow *f)
{
	if (!f->seq_state)
		f->maybe_closed = 1;
	else if (f->out.snd_nxt != f->resynced[0] && f->in.snd_nxt != f->resynced[1])
		f->maybe_closed = 0;
	return !f->maybe_closed;
}

/* check_conntrack returns 0 if conntrack has the connection of a packet as established and as the
 * packet was seen, or the reason why not.
 *
 * Conntrack follows the sequence numbers of TCP, and calls packets outside the window that it knows
 * invalid: most of them, once it does not see them all. So the agent makes the entry liberal, by
 * netlink, as the kernel's own flow tables do (nft_flow_offload_eval). From then on packets outside
 * the window change nothing but the time-out. The entry must not go on to believe that data is
 * unacknowledged because it has not seen the acknowledgement: its time-out would be five minutes,
 * not days. Resets are judged by the sequence numbers that conntrack knows. The agent
 * resynchronises them before they are half the number space behind, and when the connection is idle
 * or leaves the fast path (see conntrack.go). */
static __always_inline int check_conntrack(struct __sk_buff *skb, const struct probe *p, struct flow *f, int out, __u32 *interval, int is_ipv6)
{
	const struct key *k = &p->key;
	struct bpf_ct_opts opts = {.netns_id = -1, .l4proto = k->protocol};
	struct bpf_sock_tuple tuple = {};
	__be32 source, destination;
	__be16 from, to;
	unsigned long status;
	struct nf_conn *ct;
	int reason = 0, straight = 1, i;

	/* The tuple of what the pod sends, whatever the packet's direction. */
	if (is_ipv6) {
		copy(tuple.ipv6.saddr, address_of(&p->headers, out), sizeof(tuple.ipv6.saddr));
		copy(tuple.ipv6.daddr, address_of(&p->headers, !out), sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = k->pod_port;
		tuple.ipv6.dport = k->peer_port;
	} else {
		tuple.ipv4.saddr = k->pod;
		tuple.ipv4.daddr = k->peer;
		tuple.ipv4.sport = k->pod_port;
		tuple.ipv4.dport = k->peer_port;
	}
	*interval = REVALIDATE;
	ct = bpf_skb_ct_lookup(skb, &tuple, is_ipv6 ? sizeof(tuple.ipv6) : sizeof(tuple.ipv4), &opts, sizeof(opts));
	if (!ct)
		return UNTRACKED;
	status = ct->status;
	/* The tuple of replies, before NAT. */
	if (is_ipv6) {
		const struct nf_conntrack_tuple *back = opts.dir ? &ct->tuplehash[0].tuple : &ct->tuplehash[1].tuple;

		for (i = 0; i < 4; i++)
			straight &= back->src.u3.ip6[i] == tuple.ipv6.daddr[i] && back->dst.u3.ip6[i] == tuple.ipv6.saddr[i];
		from = back->src.u.all;
		to = back->dst.u.all;
		source = k->peer;
		destination = k->pod;
	} else if (opts.dir) {
		source = ct->tuplehash[0].tuple.src.u3.ip;
		from = ct->tuplehash[0].tuple.src.u.all;
		destination = ct->tuplehash[0].tuple.dst.u3.ip;
		to = ct->tuplehash[0].tuple.dst.u.all;
	} else {
		source = ct->tuplehash[1].tuple.src.u3.ip;
		from = ct->tuplehash[1].tuple.src.u.all;
		destination = ct->tuplehash[1].tuple.dst.u3.ip;
		to = ct->tuplehash[1].tuple.dst.u.all;
	}
	if (!straight || (status & CT_SHIFTED) || PEER(source, from) != p->wire_peer || destination != k->pod || to != k->pod_port) {
		reason = NAT;
	} else if ((unsigned long)ct != p->ct) {
		reason = UNTRACKED; /* such as one in another zone */
	} else if (status & CT_HELPER) {
		reason = CT_HELPED;
	} else if ((status & (CT_SEEN_REPLY | CT_CONFIRMED | CT_DYING)) != (CT_SEEN_REPLY | CT_CONFIRMED)) {
		reason = UNREPLIED;
	} else if (k->protocol == TCP) {
		/* The pod sends the original direction, or the reply. */
		const struct ip_ct_tcp_state *pod = opts.dir ? &ct->proto.tcp.seen[1] : &ct->proto.tcp.seen[0];
		const struct ip_ct_tcp_state *peer = opts.dir ? &ct->proto.tcp.seen[0] : &ct->proto.tcp.seen[1];
		__u8 both = pod->flags & peer->flags, either = pod->flags | peer->flags;

		if (ct->proto.tcp.state != CT_TCP_ESTABLISHED)
			reason = both & CT_BE_LIBERAL ? TCP_WINDOW : UNREPLIED;
		else if (!(both & CT_BE_LIBERAL))
			reason = TCP_WINDOW;
		if (f && ct->proto.tcp.state == CT_TCP_ESTABLISHED)
			f->maybe_closed = 0;
		else if (f && reason == TCP_WINDOW && is_open(f))
			emit(k, f, EVENT_REOPEN);
		if (either & CT_UNACKNOWLEDGED)
			*interval = REVALIDATE_SOON;
		if (f) {
			/* Conntrack does not know the scale of a connection that it picked up in
			 * the middle. */
			f->out.scale = both & CT_WINDOW_SCALE ? pod->td_scale : SCALE_MAX;
			f->in.scale = both & CT_WINDOW_SCALE ? peer->td_scale : SCALE_MAX;
			if (!(both & CT_BE_LIBERAL))
				emit(k, f, EVENT_LIBERAL);
			else if (!reason && (either & CT_UNACKNOWLEDGED) && f->seq_state &&
				 (pod->td_end != f->out.snd_nxt || peer->td_end != f->in.snd_nxt))
				emit(k, f, EVENT_ACKED);
			/* Conntrack is behind, or believes for good that the connection retransmits
			 * or has a zero window, which a forged packet may have told it. */
			if (!reason && f->seq_state &&
			    (f->out.snd_nxt - pod->td_end >= RESYNC_BYTES || f->in.snd_nxt - peer->td_end >= RESYNC_BYTES ||
			     ((!ct->proto.tcp.last_win || ct->proto.tcp.retrans) && (pod->td_end != f->out.snd_nxt || peer->td_end != f->in.snd_nxt))))
				emit(k, f, EVENT_RESYNC);
		}
	}
	bpf_ct_release(ct);
	return reason;
}

/* learn_flow returns the flow of a probe that the slow path forwarded, and creates it if there is
 * none. */
static __always_inline struct flow *learn_flow(struct __sk_buff *skb, struct cpu_state *c, const struct probe *p, int out, int is_ipv6)
{
	__u64 hash = hash_key(&p->key);
	struct flow *f = bpf_map_lookup_elem(&flows, &p->key);
	struct flow *fresh = &c->fresh;
	__u32 interval;
	int reason;

	if (!f) {
		reason = check_conntrack(skb, p, 0, out, &interval, is_ipv6);
		if (reason && reason != TCP_WINDOW) {
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
			count(c, TABLE_FULL);
			return 0;
		}
		f = bpf_map_lookup_elem(&flows, &p->key);
	}
	if (is_ipv6 && f && !addresses_match(f, &p->headers, out)) {
		count(c, MISMATCH);
		return 0;
	}
	/* What was validated for another translated peer is void. */
	if (f && f->wire_peer != p->wire_peer) {
		f->out.validated = f->in.validated = 0;
		f->wire_peer = p->wire_peer;
	}
	bloom_set(hash);
	return f;
}

/* validate records that the slow path forwarded a probe, and with which headers. Headers that
 * differ from those of the last time replace them. */
static __always_inline void validate(struct direction *w, const struct probe *p, __u32 index, __u32 interval, int is_ipv6)
{
	__u8 tos = TOS(&p->headers, is_ipv6), ttl = TTL(&p->headers, is_ipv6);

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

static __always_inline __u32 pod_link_of(struct cpu_state *c, const struct pod_link *p)
{
	__u32 *known = bpf_map_lookup_elem(&pod_link_index, p), index;

	if (known)
		return *known;
	/* Bound the counter, or it would wrap around to used indexes. */
	if (pod_links_used >= POD_LINKS) {
		count(c, TABLE_FULL);
		return 0;
	}
	index = __sync_fetch_and_add(&pod_links_used, 1) + 1;
	if (bpf_map_update_elem(&pod_links, &index, p, BPF_ANY) || bpf_map_update_elem(&pod_link_index, p, &index, BPF_ANY)) {
		count(c, TABLE_FULL);
		return 0;
	}
	return index;
}

static __always_inline __u32 template_for(struct cpu_state *c, const struct encap_template *o)
{
	__u32 *known = bpf_map_lookup_elem(&encap_index, o), index;

	if (known)
		return *known;
	/* Bound the counter, or it would wrap around to used indexes. */
	if (templates_used >= ENCAP_TEMPLATES) {
		count(c, TABLE_FULL);
		return 0;
	}
	index = __sync_fetch_and_add(&templates_used, 1) + 1;
	if (bpf_map_update_elem(&encap_templates, &index, o, BPF_ANY) || bpf_map_update_elem(&encap_index, o, &index, BPF_ANY)) {
		count(c, TABLE_FULL);
		return 0;
	}
	return index;
}

/* fits_mtu tells whether all segments of the packet fit the MTU. Datagrams that travel together
 * (UDP_SEGMENT) take the slow path. */
static __always_inline int fits_mtu(const struct __sk_buff *skb, const struct headers *h, int is_ipv6)
{
	if (skb->gso_size && PROTOCOL(h, is_ipv6) != TCP)
		return 0;
	return segment_length(skb, h, is_ipv6) <= mtu;
}

static __always_inline __u8 csum_state(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(s, ip_summed);
}

/* csum_offloaded tells whether the device is to fill in the checksum of the TCP or UDP header at an
 * offset. */
static __always_inline int csum_offloaded(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return csum_state(skb) == CHECKSUM_PARTIAL && (unsigned long)s->head + s->csum_start == (unsigned long)s->data + at;
}

/* inner_csum_verified tells whether the inner checksum is verified, and not only the outer one. */
static __always_inline int inner_csum_verified(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return csum_offloaded(skb, at) || (csum_state(skb) == CHECKSUM_UNNECESSARY && BPF_CORE_READ_BITFIELD(s, csum_level));
}

/* pod_device returns the pod's end of the veth that a packet is at: each end points to the other in
 * its private data. */
static __always_inline struct net_device *pod_device(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);
	const __u32 size = bpf_core_type_size(struct net_device);
	void *end = s->dev, *other = 0, *back = 0;

	if (bpf_probe_read_kernel(&other, sizeof(other), end + size) || !other ||
	    bpf_probe_read_kernel(&back, sizeof(back), other + size) || back != end)
		return 0;
	return other;
}

/* ct_entry is the conntrack entry attached to a packet (nf_ct_get), or 0. */
static __always_inline unsigned long ct_entry(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return s->_nfct & ~7UL;
}

/* has_xdp tells whether a device has XDP programs, of any mode. */
static __always_inline int has_xdp(struct net_device *dev)
{
	struct bpf_xdp_entity all[3];
	int i;

	if (BPF_CORE_READ_INTO(&all, dev, xdp_state))
		return 1;
	for (i = 0; i < 3; i++)
		if (all[i].prog || all[i].link)
			return 1;
	return 0;
}

/* ends_at_socket tells whether an established socket of the pod sent a packet, and nothing in the
 * pod would do anything with packets for that socket but deliver them. Then nothing reads the
 * tunnel state that their skbs still have. */
static __always_inline int ends_at_socket(struct __sk_buff *skb, const struct headers *h, const struct key *k, int is_ipv6)
{
	struct bpf_sock *sk = skb->sk;
	struct nf_hook_entries *hooks[2];
	struct net_device *dev;
	struct tcp_sock *tcp;
	struct net *net;
	int i;

	if (k->protocol != TCP || !sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != BPF_TCP_ESTABLISHED || sk->src_port != bpf_ntohs(k->pod_port) || sk->dst_port != k->peer_port)
		return 0;
	if (!is_ipv6 && (sk->src_ip4 != k->pod || sk->dst_ip4 != k->peer))
		return 0;
	for (i = 0; is_ipv6 && i < 4; i++)
		if (sk->src_ip6[i] != h->ip[2 + i] || sk->dst_ip6[i] != h->ip[6 + i])
			return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	dev = pod_device(skb);
	if (!tcp || !dev || tcp->inet_conn.icsk_ulp_ops)
		return 0;
	net = tcp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net;
	hooks[0] = is_ipv6 ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_PRE_ROUTING]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_PRE_ROUTING]);
	hooks[1] = is_ipv6 ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_LOCAL_IN]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_LOCAL_IN]);
	return net == BPF_CORE_READ(dev, nd_net.net) && !hooks[0] && !hooks[1] && !BPF_CORE_READ(dev, rx_handler) &&
	       !BPF_CORE_READ(dev, tcx_ingress) && !BPF_CORE_READ(dev, nf_hooks_ingress);
}

/* source_port is the UDP source port that the kernel chooses for the flow (udp_flow_src_port in
 * include/net/udp.h), or 0 where it does not use the hash. */
static __always_inline __be16 source_port(struct __sk_buff *skb, __u32 more)
{
	__u32 hash = bpf_get_hash_recalc(skb), from = port_from, to = port_to;

	if (!hash || from >= to)
		return 0;
	hash ^= hash << 16;
	return bpf_htons((((__u64)hash * (to - from + more)) >> 32) + from);
}

/* is_source_port tells whether the kernel would choose a source port. Linux 7.2 and newer include
 * the end of the range, older ones do not; where the two differ shows which kernel this is. */
static __always_inline int is_source_port(struct __sk_buff *skb, __be16 port)
{
	__u32 more = ports_inclusive;

	if (port == source_port(skb, more))
		return 1;
	if (port != source_port(skb, !more))
		return 0;
	ports_inclusive = !more;
	return 1;
}

/* outer_tos is the outer TOS of a device whose own is 0 (RFC 6040; INET_ECN_encapsulate in
 * include/net/inet_ecn.h). */
static __always_inline __u8 outer_tos(__u8 inner)
{
	inner &= 3;
	return inner == 3 ? 2 : inner;
}

/* udp_sum is the outer UDP checksum of a packet whose inner checksum the device fills in, by local
 * checksum offload (lco_csum in include/linux/skbuff.h): the inner checksum field stands for all
 * that it covers, and the IPv4 header adds up to nothing. */
static __always_inline __u16 udp_sum(const struct encap_template *o, __be16 port, __be16 length, __u16 inner, const struct headers *h, int is_ipv6)
{
	__u32 sum = 0;
	__u16 result;
	int i;

	sum += o->head.source[0] + o->head.source[1] + o->head.destination[0] + o->head.destination[1];
	sum += bpf_htons(UDP) + length + length + port + o->head.vxlan_port;
	for (i = 0; i < 4; i++)
		sum += o->head.vxlan[i];
	for (i = 0; i < 7; i++)
		sum += o->head.inner[i];
	for (i = 0; is_ipv6 && i < IP6_HLEN / 4; i++)
		sum = add(sum, h->ip[i]);
	sum += (__u16)~inner;
	result = ~fold(sum);
	return result ? result : 0xffff;
}

/* back_off stops probing a direction for a while. */
static __always_inline void back_off(struct cpu_state *c, struct direction *w, int reason, __u64 now)
{
	count(c, reason);
	w->validated = 0;
	w->backoff_until = now + (reason == TCP_WINDOW ? REVALIDATE_SOON : BACKOFF);
}

/* encapsulate writes the outer headers, and translates the peer. It returns 0, the reason why it
 * left the packet unchanged, or less than 0. */
static __always_inline int encapsulate(struct __sk_buff *skb, const struct headers *h, const struct encap_template *known, __u16 check, __u64 wire_peer, int is_ipv6)
{
	int translated = !is_ipv6 && wire_peer != PEER(h->ip[4], HALF(h->l4[0], 1));
	struct headers led;
	struct {
		struct encap_template outer;
		struct {
			__u32 ip[5];
		} inner;
	} w;
	__u32 sum = 0, gso = skb->gso_size;
	__be16 port = 0;
	__u32 *words;
	int i;

	/* The kernel would hash a translated packet later, with other headers; hashing it now would
	 * change its source port. */
	if (!translated || skb->hash || skip_csum_checks)
		port = source_port(skb, ports_inclusive);
	if (!port)
		return MISMATCH;
	if (LENGTH(h, is_ipv6) > 0xffff - ENCAP_OVERHEAD) /* merged by GRO, and forwarded by the pod */
		return EXCEEDS_MTU;
	copy_headers(&led, h, is_ipv6);
	if (translated)
		nat_headers(&led, 1, wire_peer);
	w.outer = *known;
	w.outer.head.tos = outer_tos(TOS(h, is_ipv6));
	w.outer.head.length = bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD);
	w.outer.head.id = bpf_get_prandom_u32();
	w.outer.head.port = port;
	w.outer.head.udp_length = bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD - IP_HLEN);
	sum = 0x0045 | w.outer.head.tos << 8;
	sum += w.outer.head.length + w.outer.head.id + w.outer.head.fragment;
	sum += w.outer.head.ttl | UDP << 8;
	sum += w.outer.head.source[0] + w.outer.head.source[1] + w.outer.head.destination[0] + w.outer.head.destination[1];
	w.outer.head.ip_check = ~fold(sum);
	led.ip[HOP(is_ipv6)] = decrement_hop_limit(led.ip[HOP(is_ipv6)], is_ipv6);
	words = w.inner.ip;
	for (i = 0; i < CHANGES(is_ipv6) / 4; i++)
		words[i] = led.ip[i];

	if (bpf_skb_adjust_room(skb, ENCAP_OVERHEAD, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET |
				BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
				BPF_F_ADJ_ROOM_ENCAP_L2_ETH | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN)))
		return ENCAP_FAILED;
	/* From here on the packet is changed. */
	if (translated && nat_packet(skb, sizeof(w.outer.head) + IP_HLEN, 1, h, wire_peer, &check))
		return -1;
	/* GSO segments have no outer checksum: an eBPF program cannot request one */
	if (w.outer.head.udp_check)
		w.outer.head.udp_check = gso ? 0 : udp_sum(&w.outer, port, w.outer.head.udp_length, check, &led, is_ipv6);
	if (bpf_skb_store_bytes(skb, 0, &w.outer.head, sizeof(w.outer.head) + CHANGES(is_ipv6), 0))
		return -1;
	return 0;
}

_Static_assert(sizeof(((struct encap_template *)0)->head) == ETH_HLEN + ENCAP_OVERHEAD, "the outer header has its length");
_Static_assert(sizeof(struct encap_template) % 4 == 0, "the inner header follows at once");

/* find_flow returns the flow of a packet from the wire, and its key as the pod has it. */
static __always_inline struct flow *find_flow(const struct key *wire, struct key *k, int is_ipv6)
{
	struct flow *f = bpf_map_lookup_elem(&flows, wire);
	const struct nat_entry *nat;

	*k = *wire;
	if (!is_ipv6 && !f) {
		nat = bpf_map_lookup_elem(&reverse_nat, wire);
		if (nat) {
			*k = nat->key;
			f = bpf_map_lookup_elem(&flows, k);
		}
	}
	return f;
}

/* forget_flow deletes the flow of a connection that opens or closes. Looking it up takes no lock. */
static __always_inline void forget_flow(const struct key *k, const struct flow *f)
{
	struct key wire;

	if (f->wire_peer != peer_of(k)) {
		wire = with_peer(k, f->wire_peer);
		bpf_map_delete_elem(&reverse_nat, &wire);
	}
	bpf_map_delete_elem(&flows, k);
}

/* ends_connection tells whether conntrack would take a FIN or RST for one of its connection if it
 * had seen all packets: a FIN in the window, and a RST that is not before what was acknowledged, or
 * one number before it, as some hosts reset what they have closed (tcp_reset_check in
 * net/ipv4/tcp_input.c). */
static __always_inline int ends_connection(const struct flow *f, int out, const struct headers *h, __u32 end)
{
	const struct direction *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u8 flags = FLAGS(h);

	if (!data_in_window(w, back, SEQ(h), end))
		return 0;
	return flags & TCP_RST ? !seq_after(back->rcv_nxt, SEQ(h) + 1) : ack_in_window(w, back, ACK(h));
}

/* handle_flags deletes the flow that a SYN, FIN or RST opens anew or closes, if the packet comes
 * from its device: others may be forged. A SYN from the wire always may be, and a FIN of
 * acknowledged data is an old one. The agent hears of a reset that conntrack would act on. */
static __always_inline void handle_flags(const struct key *k, struct flow *f, int out, int own, const struct headers *h, __u64 now, int is_ipv6)
{
	const struct direction *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u8 flags = FLAGS(h);
	int next = SEQ(h) == back->rcv_nxt || SEQ(h) == w->snd_nxt;

	if (!own)
		return;
	if (flags & TCP_SYN) {
		if (out)
			forget_flow(k, f);
	} else if (!f->seq_state) {
		return;
	} else if (!(flags & (TCP_FIN | TCP_RST))) {
		if (out)
			f->seq_state = 0;
		else if ((flags & TCP_ACK) && in_window(w, back, h, is_ipv6))
			update_seq(f, 0, h, now, is_ipv6);
	} else if (ends_connection(f, out, h, seq_end(h, is_ipv6)) && !seq_after(back->rcv_nxt, seq_end(h, is_ipv6) + 1)) {
		if ((flags & TCP_RST) && !out && !next)
			return; /* the pod answers with a challenge ACK (RFC 5961, section 3.2) */
		if ((flags & TCP_RST) && next)
			emit(k, f, EVENT_RESET);
		forget_flow(k, f);
	}
}

/* header_changed tells whether TOS or TTL differ from the validated ones. ECN marks may differ. */
static __always_inline int header_changed(const struct direction *w, const struct headers *h, int is_ipv6)
{
	return ((w->tos ^ TOS(h, is_ipv6)) & 0xfc) || w->ttl != TTL(h, is_ipv6);
}

/* peer_matches tells whether a flow has the peer of a packet from the wire. */
static __always_inline int peer_matches(const struct flow *f, const struct key *wire)
{
	struct key is = with_peer(&f->key, *(const volatile __u64 *)&f->wire_peer);

	return same_key(&is, wire);
}

static __always_inline int equal_macs(const __u8 *a, const __u8 *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

/* from_pod tells whether an outgoing packet belongs to the flow with its key: it must come from the
 * device that the flow's packets come from, as all else can be forged. */
static __always_inline int from_pod(const struct __sk_buff *skb, const struct flow *f, const struct key *k, const struct headers *h, int is_ipv6)
{
	return (f->out.device == skb->ifindex || !f->out.device) && same_key(&f->key, k) && (!is_ipv6 || addresses_match(f, h, 1));
}

/* to_pod tells whether an incoming packet belongs to the flow that find_flow found. */
static __always_inline int to_pod(const struct flow *f, const struct key *wire, const struct key *own, const struct headers *h, int is_ipv6)
{
	return same_key(&f->key, own) && (is_ipv6 ? addresses_match(f, h, 0) : peer_matches(f, wire));
}

/* classify reads key and headers of a packet that has a flow, or is sampled. It returns 0, or the
 * reason why the packet takes the slow path. */
static __always_inline int classify(struct __sk_buff *skb, struct cpu_state *c, struct key *k, __u64 *hash, struct headers *h, __u16 *check, int out, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + IP_HLEN + 8);
	int reason;

	if (unlikely(!data))
		return NOT_TCP_UDP;
	reason = peek_flow(skb, data, ETH_HLEN, k, out, is_ipv6);
	if (unlikely(reason))
		return reason;
	*hash = hash_key(k);
	if (likely(!bloom_test(*hash)) && !admit_sampled(skb, c, ETH_HLEN, k, *hash, is_ipv6))
		return NO_FLOW;
	return parse_headers(skb, ETH_HLEN, k->protocol, h, check, is_ipv6);
}

/* priority is the skb->priority that ip_forward derives from TOS (rt_tos2prio in
 * include/net/route.h); ip6_forward does not. */
static __always_inline __u32 priority(__u8 tos)
{
	/* Best effort, bulk, interactive, interactive bulk: four bits each, from the lowest. */
	return 0x4620 >> 4 * (tos >> 3 & 3) & 7;
}

static __always_inline int encap_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const struct encap_template *outer;
	struct headers h;
	struct flow *f;
	__u32 g, index;
	struct key k;
	__u16 check = 0;
	__u64 hash, now, wire_peer = 0;
	int reason, ours = 0, in_sequence = 0;
	__u8 *data;

	reason = classify(skb, c, &k, &hash, &h, &check, 1, is_ipv6);
	if (reason) {
		if (reason == TCP_FLAGS) {
			admission_reset(hash);
			f = bpf_map_lookup_elem(&flows, &k);
			if (f)
				handle_flags(&k, f, 1, from_pod(skb, f, &k, &h, is_ipv6), &h, 0, is_ipv6);
		}
		goto slow;
	}
	now = bpf_ktime_get_coarse_ns();
	f = bpf_map_lookup_elem(&flows, &k);
	if (f) {
		bloom_set(hash);
		wire_peer = *(const volatile __u64 *)&f->wire_peer;
		barrier(); /* read the peer before from_pod checks whose it is */
		ours = from_pod(skb, f, &k, &h, is_ipv6);
		in_sequence = k.protocol != TCP || (f->seq_state >= SEQ_FROM_POD && in_window(&f->out, &f->in, &h, is_ipv6));
		if (ours && in_sequence && k.protocol == TCP)
			update_seq(f, 1, &h, now, is_ipv6);
	}
	g = generation;
	reason = LEASE_EXPIRED;
	if (now >= lease_expires)
		goto slow;
	reason = SKB_MARK;
	if (skb->mark)
		goto slow;
	if (!f) {
		reason = NO_FLOW;
		if ((!bloom_test(hash) || admit(hash, now)) && is_watched(skb->ifindex, 0))
			goto look;
		goto slow;
	}
	/* Another pod cannot take over a flow. */
	reason = MISMATCH;
	if (f->out.device && !ours)
		goto slow;
	reason = flow_valid(&f->out, &f->in, &k, now);
	if (reason) {
		if (now < f->out.backoff_until)
			goto slow;
		goto look;
	}
	reason = TCP_WINDOW;
	if (!in_sequence)
		goto slow;
	reason = REVALIDATING;
	if (revalidate_due(&f->out, now))
		goto look;
	reason = MISMATCH;
	index = template_of(&f->out);
	outer = bpf_map_lookup_elem(&encap_templates, &index);
	data = pull_data(skb, ETH_HLEN);
	if (!outer || !outer->nic || !data || !equal_macs(data, f->mac) || header_changed(&f->out, &h, is_ipv6))
		goto look;
	reason = MALFORMED;
	if (!is_ipv6 && !ip_csum_ok(h.ip))
		goto slow;
	reason = EXCEEDS_MTU;
	if (!fits_mtu(skb, &h, is_ipv6) || segment_length(skb, &h, is_ipv6) > f->out.mtu)
		goto slow;
	reason = CSUM_UNVERIFIED;
	if (!csum_offloaded(skb, ETH_HLEN + HLEN(is_ipv6)) && !skip_csum_checks)
		goto slow;
	reason = encapsulate(skb, &h, outer, check, wire_peer, is_ipv6);
	if (reason < 0)
		return DROP;
	if (reason)
		goto slow;
	if (!is_ipv6)
		skb->priority = priority(TOS(&h, 0));
	count(c, FAST_OUT);
	return bpf_redirect(outer->nic, 0);
look:
	start_probe(&c->out, &h, &k, skb, now, g, is_ipv6);
	c->out.check = check;
	c->out.seq_unknown = !in_sequence;
	c->out.socket_ended = ends_at_socket(skb, &h, &k, is_ipv6);
	c->out_stage = !bpf_skb_load_bytes(skb, 0, c->out.mac, sizeof(c->out.mac));
slow:
	count(c, reason);
	return NEXT;
}

SEC("tc")
int encap(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	c->out_stage = 0;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return encap_ip(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return encap_ip(skb, c, 1);
	count(c, NOT_TCP_UDP);
	return NEXT;
}

/* load_headers reads the headers of a packet at an offset, if it has the protocol. */
static __always_inline int load_headers(struct __sk_buff *skb, __u32 offset, __u8 protocol, struct headers *h, int is_ipv6)
{
	h->l4[1] = h->l4[2] = h->l4[3] = 0;
	if (bpf_skb_load_bytes(skb, offset, h->ip, HLEN(is_ipv6)))
		return -1;
	return bpf_skb_load_bytes(skb, offset + HLEN(is_ipv6), h->l4, protocol == TCP ? sizeof(h->l4) : 6);
}

static __always_inline int observe_vxlan_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct probe *p = &c->out;
	struct headers h;
	__u64 wire_peer;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || load_headers(skb, ETH_HLEN, p->key.protocol, &h, is_ipv6))
		return NEXT;
	wire_peer = is_ipv6 ? p->wire_peer : PEER(h.ip[4], HALF(h.l4[0], 1));
	if (wire_peer != p->wire_peer) {
		p->check = csum_replace(p->check, p->headers.ip[4], wire_peer);
		nat_headers(&p->headers, 1, wire_peer);
		p->wire_peer = wire_peer;
	}
	if (headers_match(&p->headers, &h, is_ipv6)) {
		p->overlay = skb->ifindex;
		p->ct = ct_entry(skb);
		c->out_stage = 2;
	} else if (same_packet(&p->headers, &h, is_ipv6)) {
		count(c, is_ipv6 ? nat_reason(&p->headers, &h) : REWRITTEN);
	}
	return NEXT;
}

/* sample_unwatched finds eligible connections of pods whose links have no programs. */
static __always_inline int sample_unwatched(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const __u8 *data = pull_data(skb, ETH_HLEN + IP_HLEN + 8);
	struct key k;
	__u64 hash, now;

	if (!data || peek_flow(skb, data, ETH_HLEN, &k, 1, is_ipv6))
		return NEXT;
	hash = hash_key(&k);
	if (is_syn(skb, ETH_HLEN, &k, is_ipv6)) {
		admission_reset(hash);
	} else if (sample(c) && !is_watched(0, k.pod)) { /* else encap samples them */
		now = bpf_ktime_get_coarse_ns();
		if (admit(hash, now))
			request_attach(c, &k, now);
	}
	return NEXT;
}

SEC("tc")
int observe_vxlan(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (c->out_stage == 1)
		return c->out.key.is_ipv6 ? observe_vxlan_ip(skb, c, 1) : observe_vxlan_ip(skb, c, 0);
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return sample_unwatched(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return sample_unwatched(skb, c, 1);
	return NEXT;
}

/* is_expected_outer tells whether an outer header is one that a supported VXLAN device writes. */
static __always_inline int is_expected_outer(const struct encap_template *o, const struct vxlan_device *v, int is_ipv6)
{
	return o->nic == v->nic && o->head.protocol == bpf_htons(ETH_P_IP) &&
	       o->head.source[0] == v->source[0] && o->head.source[1] == v->source[1] && o->head.vxlan_port == v->port &&
	       o->head.vxlan[0] == bpf_htons(0x0800) && !o->head.vxlan[1] &&
	       o->head.vxlan[2] == v->vni[0] && o->head.vxlan[3] == v->vni[1] &&
	       o->head.inner[3] == v->mac[0] && o->head.inner[4] == v->mac[1] && o->head.inner[5] == v->mac[2] &&
	       o->head.inner[6] == bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
}

/* clear_per_packet clears the per-packet fields of an outer header. */
static __always_inline void clear_per_packet(struct encap_template *o)
{
	o->head.tos = 0;
	o->head.length = o->head.id = o->head.ip_check = o->head.port = o->head.udp_length = 0;
	o->head.udp_check = o->head.udp_check ? 0xffff : 0;
}

/* route_mtu is the longest inner packet that the route to the other node takes without
 * fragmentation, configured or learned (path MTU discovery), or 0 if there is no route. */
static __always_inline __u16 route_mtu(struct __sk_buff *skb, const struct encap_template *o, __u32 overlay)
{
	struct bpf_fib_lookup fib = {
		.family = 2 /* AF_INET */, .l4_protocol = UDP, .ifindex = skb->ifindex,
		/* the longest, so that the kernel tells the MTU */
		.tot_len = 0xffff,
		.ipv4_src = o->head.source[0] | (__u32)o->head.source[1] << 16,
		.ipv4_dst = o->head.destination[0] | (__u32)o->head.destination[1] << 16,
	};

	long result;

	if (skip_csum_checks)
		return 0xffff;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_OUTPUT);
	if (result == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		/* the lookup requires forwarding on the input device, which the NIC may lack */
		fib.ifindex = overlay;
		result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	}
	if (result != BPF_FIB_LKUP_RET_FRAG_NEEDED || fib.mtu_result <= ENCAP_OVERHEAD)
		return 0;
	return fib.mtu_result - ENCAP_OVERHEAD;
}

static __always_inline int observe_nic_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const struct vxlan_device *v;
	const struct pod_link *pod;
	struct probe *p = &c->out;
	struct encap_template o = {};
	struct headers h;
	struct flow *f;
	__u32 interval, index;
	__u16 sum, longest;
	int reason;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(ETH_P_IP) || skb->vlan_present || bpf_skb_load_bytes(skb, 0, &o.head, sizeof(o.head)) ||
	    load_headers(skb, sizeof(o.head), p->key.protocol, &h, is_ipv6) ||
	    o.head.ihl_version != 0x45 || o.head.ip_protocol != UDP || !headers_match(&p->headers, &h, is_ipv6))
		return NEXT;
	f = learn_flow(skb, c, p, 1, is_ipv6);
	if (!f || p->at < f->out.backoff_until)
		return NEXT;
	/* The pod is at the link where its packets are delivered. */
	index = f->in.template;
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if (pod && pod->veth && pod->veth != p->device) {
		count(c, MISMATCH);
		return NEXT;
	}

	/* Would encap have written the same? */
	reason = REWRITTEN;
	index = p->overlay;
	v = bpf_map_lookup_elem(&vxlan_devices, &index);
	o.nic = skb->ifindex;
	sum = o.head.udp_check;
	if (sum && !p->gso)
		sum = udp_sum(&o, o.head.port, o.head.udp_length, p->check, &h, is_ipv6);
	if (!v || !is_expected_outer(&o, v, is_ipv6) || skb->mark || o.head.length != bpf_htons(LENGTH(&h, is_ipv6) + ENCAP_OVERHEAD) ||
	    o.head.udp_length != bpf_htons(LENGTH(&h, is_ipv6) + ENCAP_OVERHEAD - IP_HLEN) || o.head.tos != outer_tos(TOS(&h, is_ipv6)) ||
	    !is_source_port(skb, o.head.port) || sum != o.head.udp_check)
		goto no;
	reason = check_conntrack(skb, p, f, 1, &interval, is_ipv6);
	if (reason && reason != TCP_WINDOW)
		goto no;
	if (p->key.protocol == TCP)
		record_seq(f, 1, p, is_ipv6);
	if (reason)
		goto no;
	reason = EXCEEDS_MTU;
	longest = route_mtu(skb, &o, p->overlay);
	if (!longest)
		goto no;
	clear_per_packet(&o);
	index = template_for(c, &o);
	if (!index)
		return NEXT;
	if (!equal_macs(f->mac, p->mac)) {
		f->out.validated = 0;
		__builtin_memcpy(f->mac, p->mac, sizeof(f->mac));
	}
	f->out.mtu = longest;
	validate(&f->out, p, index, interval, is_ipv6);
	f->socket_ended = p->socket_ended ? p->at : 0;
	return NEXT;
no:
	back_off(c, &f->out, reason, p->at);
	return NEXT;
}

SEC("tc")
int observe_nic(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c || c->out_stage != 2)
		return NEXT;
	return c->out.key.is_ipv6 ? observe_nic_ip(skb, c, 1) : observe_nic_ip(skb, c, 0);
}

/* redirect_to_pod redirects a decapsulated packet into its pod. */
static __always_inline int redirect_to_pod(struct __sk_buff *skb, struct cpu_state *c, const struct pod_link *pod, const struct headers *h,
				const struct key *wire, const struct key *own, int is_ipv6)
{
	struct {
		__u8 to[6], from[6];
		__be16 protocol;
		__u8 ip[IP_HLEN];
	} head;
	int translated = !is_ipv6 && !same_key(own, wire);
	struct headers led;
	__u32 veth = pod->veth;
	__u16 check;

	__builtin_memcpy(head.to, pod->mac, 6);
	__builtin_memcpy(head.from, pod->from, 6);
	head.protocol = bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
	copy_headers(&led, h, is_ipv6);
	if (translated)
		nat_headers(&led, 0, peer_of(own));
	led.ip[HOP(is_ipv6)] = decrement_hop_limit(led.ip[HOP(is_ipv6)], is_ipv6);
	__builtin_memcpy(head.ip, led.ip, CHANGES(is_ipv6));
	if (bpf_skb_store_bytes(skb, 0, &head, __builtin_offsetof(typeof(head), ip) + CHANGES(is_ipv6), 0) ||
	    (translated && nat_packet(skb, sizeof(head), 0, h, peer_of(own), &check)))
		return DROP;
	count(c, FAST_IN);
	return bpf_redirect_peer(veth, 0);
}

static __always_inline int equal_outers(const struct encap_template *a, const struct encap_template *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;
	int i;

	for (i = 0; i < (int)sizeof(*a) / 4; i++)
		if (x[i] != y[i])
			return 0;
	return 1;
}

/* nic_decap decapsulates packets of flows that vxlan_ingress would redirect, if their outer headers
 * are those of a packet that was seen to reach the VXLAN device. GSO packets keep tunnel state that
 * only the kernel can clear, so the kernel decapsulates them unless they go straight to a socket,
 * where that state ends. vxlan_ingress counts all packets that the kernel decapsulates. */
static __always_inline int nic_decap_ip(struct __sk_buff *skb, struct cpu_state *c, __u8 *data, int is_ipv6)
{
	const __u32 at = sizeof(((struct encap_template *)0)->head);
	const struct encap_template *known;
	const struct pod_link *pod;
	struct encap_template o = {};
	struct headers h;
	struct flow *f;
	struct key k, own;
	__u16 check = 0;
	__u32 g, index;
	__u64 now;

	if (peek_flow(skb, data, at, &k, 0, is_ipv6) || !bloom_test(hash_key(&k)))
		return NEXT;
	f = find_flow(&k, &own, is_ipv6);
	if (!f)
		return NEXT;
	g = generation;
	now = bpf_ktime_get_coarse_ns();
	if (skb->gso_size)
		f->gso = now;
	/* GRO merges a stream's full segments, which is worth more than decapsulating each here,
	 * unless the NIC has merged them. */
	if (skb->gso_size ? now - f->socket_ended >= FLOW_TTL : k.protocol == TCP && skb->len >= mtu && now - f->gso >= REORDER_WINDOW) {
		f->gso_possible = now;
		return NEXT;
	}
	if (now >= lease_expires || skb->mark || skb->pkt_type != PACKET_HOST || flow_valid(&f->in, &f->out, &k, now) ||
	    now - f->gso_possible < REORDER_WINDOW || parse_headers(skb, at, k.protocol, &h, &check, is_ipv6))
		return NEXT;
	data = pull_data(skb, at);
	if (!data)
		return NEXT;
	copy(&o.head, data, sizeof(o.head));
	o.nic = skb->ifindex;
	/* What the kernel would reject, or change (RFC 6040). */
	if (o.head.inner[6] != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || !ip_csum_ok((const void *)&o.head.ihl_version) || o.head.ip_protocol != UDP ||
	    bpf_ntohs(o.head.length) != skb->len - ETH_HLEN || bpf_ntohs(o.head.udp_length) != skb->len - ETH_HLEN - IP_HLEN ||
	    (o.head.tos & 3) != outer_tos(TOS(&h, is_ipv6)))
		return NEXT;
	clear_per_packet(&o);
	/* The outer checksum is verified, or there is none. */
	o.head.udp_check = 0;
	index = f->decapped_template;
	known = bpf_map_lookup_elem(&encap_templates, &index);
	if (k.protocol == TCP && (!f->seq_state || !in_window(&f->in, &f->out, &h, is_ipv6)))
		return NEXT;
	if (!f->decapped || now - f->decapped >= FLOW_TTL || f->decapped_generation != g || !known || !equal_outers(known, &o) || revalidate_due(&f->in, now))
		goto look;
	index = template_of(&f->in);
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if (!pod || !pod->veth || header_changed(&f->in, &h, is_ipv6) || !fits_mtu(skb, &h, is_ipv6) || !to_pod(f, &k, &own, &h, is_ipv6) || (!is_ipv6 && !ip_csum_ok(h.ip)))
		return NEXT;
	if (!inner_csum_verified(skb, at + HLEN(is_ipv6)) && !skip_csum_checks)
		return NEXT;
	if (bpf_skb_adjust_room(skb, -ENCAP_OVERHEAD, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET | (is_ipv6 ? DECAP_L3_IPV6 : 0)))
		return NEXT;
	/* As skb_checksum_init does at the outer UDP: one of the checksums that the device verified */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	if (k.protocol == TCP)
		update_seq(f, 0, &h, now, is_ipv6);
	return redirect_to_pod(skb, c, pod, &h, &k, &own, is_ipv6);
look:
	if (c->decap_stage && now - c->decap_probe.at < PROBE_TTL)
		return NEXT;
	c->decap_probe.at = now;
	c->decap_probe.generation = g;
	copy_headers(&c->decap_probe.headers, &h, is_ipv6);
	c->decap_probe.outer = o;
	c->decap_stage = 1;
	return NEXT;
}

SEC("tc")
int nic_decap(struct __sk_buff *skb)
{
	const __u32 at = sizeof(((struct encap_template *)0)->head);
	struct cpu_state *c = this_cpu();
	__u8 *data = field(skb, data);

	if (!c || (void *)data + ETH_HLEN + IP_HLEN > field(skb, data_end) || data[ETH_HLEN + 9] != UDP || skb->protocol != bpf_htons(ETH_P_IP))
		return NEXT;
	data = pull_data(skb, at + IP_HLEN + 8);
	if (!data)
		return NEXT;
	return data[at] >> 4 == 6 ? nic_decap_ip(skb, c, data, 1) : nic_decap_ip(skb, c, data, 0);
}

/* decap_id identifies the packet that nic_decap saw last; it is never 0. */
static __always_inline __u32 decap_id(const struct cpu_state *c)
{
	return c->decap_probe.at | 1;
}

static __always_inline int vxlan_ingress_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const struct pod_link *pod;
	struct headers h;
	struct flow *f;
	__u32 g, index, decapped = 0;
	struct key k, own;
	__u16 check = 0;
	__u64 hash, now;
	int reason, ours = 0, in_sequence = 0;
	__u8 sum;

	reason = classify(skb, c, &k, &hash, &h, &check, 0, is_ipv6);
	if (reason) {
		if (reason == TCP_FLAGS) {
			admission_reset(hash);
			f = find_flow(&k, &own, is_ipv6);
			if (f)
				handle_flags(&own, f, 0, to_pod(f, &k, &own, &h, is_ipv6), &h, bpf_ktime_get_coarse_ns(), is_ipv6);
		}
		goto slow;
	}
	now = bpf_ktime_get_coarse_ns();
	f = find_flow(&k, &own, is_ipv6);
	if (f) {
		bloom_set(hash);
		ours = (f->in.device == skb->ifindex || !f->in.device) && to_pod(f, &k, &own, &h, is_ipv6);
		in_sequence = k.protocol != TCP || (f->seq_state && in_window(&f->in, &f->out, &h, is_ipv6));
		if (ours && in_sequence && k.protocol == TCP)
			update_seq(f, 0, &h, now, is_ipv6);
	}
	g = generation;
	reason = LEASE_EXPIRED;
	if (now >= lease_expires)
		goto slow;
	reason = SKB_MARK;
	if (skb->mark)
		goto slow;
	reason = MISMATCH;
	if (skb->pkt_type != PACKET_HOST)
		goto slow;
	if (!f) {
		reason = NO_FLOW;
		if (bloom_test(hash) && !admit(hash, now))
			goto slow;
		if (is_watched(0, k.pod))
			goto look;
		request_attach(c, &k, now);
		goto slow;
	}
	if (skb->gso_size && now - f->gso >= REORDER_WINDOW)
		f->gso_possible = now;
	reason = REVALIDATING;
	if (c->decap_stage == 1 && headers_equal(&c->decap_probe.headers, &h, is_ipv6)) {
		c->decap_stage = 0;
		if (c->decap_probe.generation == g)
			decapped = decap_id(c);
		if (now >= f->in.backoff_until)
			goto look;
	}
	reason = flow_valid(&f->in, &f->out, &k, now);
	if (reason) {
		if (now < f->in.backoff_until)
			goto slow;
		goto look;
	}
	reason = TCP_WINDOW;
	if (!in_sequence)
		goto slow;
	reason = REVALIDATING;
	if (revalidate_due(&f->in, now))
		goto look;
	reason = MISMATCH;
	index = template_of(&f->in);
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if (!pod || !pod->veth || !ours || header_changed(&f->in, &h, is_ipv6))
		goto look;
	reason = MALFORMED;
	if (!is_ipv6 && !ip_csum_ok(h.ip))
		goto slow;
	reason = EXCEEDS_MTU;
	if (!fits_mtu(skb, &h, is_ipv6))
		goto slow;
	reason = CSUM_UNVERIFIED;
	sum = csum_state(skb);
	if (sum != CHECKSUM_PARTIAL && sum != CHECKSUM_UNNECESSARY && !skip_csum_checks)
		goto slow;
	return redirect_to_pod(skb, c, pod, &h, &k, &own, is_ipv6);
look:
	/* The kernel may run this program for a whole list of packets before the first goes on. */
	if (!c->in_stage || now - c->in.at >= PROBE_TTL) {
		start_probe(&c->in, &h, &k, skb, now, g, is_ipv6);
		c->in.decapped = decapped;
		if (decapped)
			c->decap_stage = 2;
		c->in.seq_unknown = !in_sequence;
		c->in_stage = 1;
	}
slow:
	count(c, reason);
	return NEXT;
}

SEC("tc")
int vxlan_ingress(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return vxlan_ingress_ip(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return vxlan_ingress_ip(skb, c, 1);
	count(c, NOT_TCP_UDP);
	return NEXT;
}

static __always_inline int observe_pod_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct probe *p = &c->in;
	struct net_device *dev;
	struct link_mac owner = {};
	struct nat_entry nat = {};
	struct pod_link pod = {};
	struct headers h, was;
	struct key key, wire;
	struct flow *f;
	__u32 interval, index;
	__u8 mac[12];
	__u64 hash;
	int reason, translated = 0;

	if (skb->protocol != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || skb->vlan_present || load_headers(skb, ETH_HLEN, p->key.protocol, &h, is_ipv6) ||
	    bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)))
		return NEXT;
	copy_headers(&was, &p->headers, is_ipv6);
	wire = key = p->key;
	if (!is_ipv6) {
		key = with_peer(&wire, PEER(h.ip[3], HALF(h.l4[0], 0)));
		translated = !same_key(&key, &wire);
	}
	if (translated)
		nat_headers(&was, 0, peer_of(&key));
	if (!headers_match(&was, &h, is_ipv6)) {
		if (same_packet(&was, &h, is_ipv6))
			count(c, is_ipv6 ? nat_reason(&was, &h) : REWRITTEN);
		return NEXT;
	}
	pod.veth = skb->ifindex;
	owner.link = skb->ifindex;
	__builtin_memcpy(owner.mac, mac, sizeof(owner.mac));
	if (!bpf_map_lookup_elem(&link_macs, &owner)) {
		count(c, MISMATCH);
		return NEXT; /* the right port may deliver it yet */
	}
	c->in_stage = 0;
	p->ct = ct_entry(skb);
	p->key = key;
	f = learn_flow(skb, c, p, 0, is_ipv6);
	if (!f || p->at < f->in.backoff_until)
		return NEXT;
	/* Redirected packets bypass XDP of the pod's device; an unknown device may have some. */
	dev = pod_device(skb);
	reason = !dev || has_xdp(dev) ? REWRITTEN : check_conntrack(skb, p, f, 0, &interval, is_ipv6);
	if (translated && (!reason || reason == TCP_WINDOW)) {
		hash = hash_key(&wire);
		nat.key = p->key;
		nat.bloom_bit = hash % BLOOM_BITS;
		if (bpf_map_update_elem(&reverse_nat, &wire, &nat, BPF_ANY)) {
			count(c, TABLE_FULL);
			return NEXT;
		}
		bloom_set(hash);
	}
	if (p->key.protocol == TCP && (!reason || reason == TCP_WINDOW))
		record_seq(f, 0, p, is_ipv6);
	if (reason) {
		back_off(c, &f->in, reason, p->at);
		return NEXT;
	}
	__builtin_memcpy(pod.mac, mac, 6);
	__builtin_memcpy(pod.from, mac + 6, 6);
	index = pod_link_of(c, &pod);
	if (!index)
		return NEXT;
	if (f->out.device && f->out.device != pod.veth) {
		f->out.validated = 0;
		f->out.device = 0;
	}
	validate(&f->in, p, index, interval, is_ipv6);
	/* Only packets that the slow path delivers use up a template. */
	if (c->decap_stage != 2 || p->decapped != decap_id(c))
		return NEXT;
	c->decap_stage = 0;
	index = template_for(c, &c->decap_probe.outer);
	if (index) {
		f->decapped_template = index;
		f->decapped_generation = p->generation;
		f->decapped = p->at;
	}
	return NEXT;
}

SEC("tc")
int observe_pod(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c || !c->in_stage)
		return NEXT;
	return c->in.key.is_ipv6 ? observe_pod_ip(skb, c, 1) : observe_pod_ip(skb, c, 0);
}

/* is_extension_header tells whether an IPv6 header is one that may precede TCP. */
static __always_inline int is_extension_header(__u8 protocol)
{
	return protocol == HOP_BY_HOP || protocol == ROUTING || protocol == DESTINATION || protocol == FRAGMENT_HEADER ||
	       protocol == AUTHENTICATION;
}

/* What drop_forged finds of a packet. */
enum { NOT_ENDING, ENDING, TOO_MANY_HEADERS };

/* find_ending tells whether a packet is a FIN or RST, wherever its TCP header is, and reads its
 * headers and the sequence number after its last byte. Conntrack parses extension headers without
 * limit; a longer chain than EXTENSION_HEADERS_MAX only hides what follows. */
static __always_inline int find_ending(const struct bpf_dynptr *packet, struct headers *h, __u32 *end, int is_ipv6)
{
	__u32 ip_buffer[10], buffer[5], at = HLEN(is_ipv6);
	const __u8 *ip = bpf_dynptr_slice(packet, 0, ip_buffer, HLEN(is_ipv6)), *data;
	const __u32 *l4;
	__u8 protocol, flags;
	int i;

	if (!ip)
		return NOT_ENDING;
	if (!is_ipv6) {
		if (ip[9] != TCP || (HALF(((const __u32 *)ip)[1], 1) & bpf_htons(0x1fff)))
			return NOT_ENDING;
		at = (ip[0] & 0xf) * 4;
	} else {
		protocol = ip[6];
		for (i = 0; i < EXTENSION_HEADERS_MAX && protocol != TCP; i++) {
			if (!is_extension_header(protocol))
				return NOT_ENDING;
			data = bpf_dynptr_slice(packet, at, buffer, 8);
			if (!data || (protocol == FRAGMENT_HEADER && ((const __u16 *)data)[1] & bpf_htons(0xfff8)))
				return NOT_ENDING;
			at += protocol == AUTHENTICATION ? (data[1] + 2) * 4 : protocol == FRAGMENT_HEADER ? 8 : (data[1] + 1) * 8;
			protocol = data[0];
		}
		if (protocol != TCP)
			return is_extension_header(protocol) ? TOO_MANY_HEADERS : NOT_ENDING;
	}
	l4 = bpf_dynptr_slice(packet, at, buffer, sizeof(h->l4));
	if (!l4)
		return NOT_ENDING;
	flags = ((const __u8 *)l4)[13];
	if (likely(!(flags & (TCP_FIN | TCP_RST)) || (flags & TCP_SYN)))
		return NOT_ENDING;
	copy(h->ip, ip, HLEN(is_ipv6));
	copy(h->l4, l4, sizeof(h->l4));
	*end = SEQ(h) + bpf_dynptr_size(packet) - at - (BYTE(h->l4[3], 0) >> 4) * 4;
	return ENDING;
}

static __always_inline int drop_forged_ip(const struct bpf_dynptr *packet, int is_ipv6)
{
	__be32 source, destination;
	struct key wire, own;
	struct headers h;
	struct flow *f = 0;
	int out = 1, what;
	struct cpu_state *c;
	__u32 end;

	what = find_ending(packet, &h, &end, is_ipv6);
	if (likely(what == NOT_ENDING))
		return NF_ACCEPT;
	if (what == TOO_MANY_HEADERS)
		goto drop;
	source = is_ipv6 ? hash_address(address_of(&h, 1)) : h.ip[3];
	destination = is_ipv6 ? hash_address(address_of(&h, 0)) : h.ip[4];
	make_key(&own, source, destination, h.l4[0], TCP, 1, is_ipv6);
	/* encap and vxlan_ingress do not update flows whose Bloom filter bit is clear. */
	if (bloom_test(hash_key(&own)))
		f = bpf_map_lookup_elem(&flows, &own);
	if (!f) {
		out = 0;
		make_key(&wire, source, destination, h.l4[0], TCP, 0, is_ipv6);
		if (bloom_test(hash_key(&wire)))
			f = find_flow(&wire, &own, is_ipv6);
	}
	if (!f || f->seq_state != SEQ_CONFIRMED || !seq_complete(f) || !same_key(&f->key, &own) || (is_ipv6 && !addresses_match(f, &h, out)) ||
	    ends_connection(f, out, &h, end))
		return NF_ACCEPT;
drop:
	c = this_cpu();
	if (c)
		count(c, FORGED);
	return NF_DROP;
}

/* drop_forged drops FINs and RSTs of known flows that conntrack would call invalid if it had seen
 * all packets. A liberal conntrack would accept them, and delete its entry soon, or at the next
 * forged packet. */
SEC("netfilter")
int drop_forged(struct bpf_nf_ctx *ctx)
{
	struct __sk_buff *skb = (void *)ctx->skb;
	struct bpf_dynptr packet;
	__u8 buffer[4], *data;

	if (bpf_dynptr_from_skb(skb, 0, &packet))
		return NF_ACCEPT;
	data = bpf_dynptr_slice(&packet, 0, buffer, sizeof(buffer));
	if (!data)
		return NF_ACCEPT;
	return data[0] >> 4 == 6 ? drop_forged_ip(&packet, 1) : drop_forged_ip(&packet, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
