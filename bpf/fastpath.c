//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The fast path of an unmodified VXLAN overlay: packets of pods' established
 * connections go from a pod's veth to the NIC, and from the VXLAN device into the
 * pod, past the bridge, routing and netfilter of the node.
 *
 *   leave     ingress of a pod's veth    encapsulates, or lets go the slow way
 *   tunnel    egress of the VXLAN device ┐ see what the kernel makes of a packet
 *   wire      egress of the NIC          ┘ that was let go
 *   land      ingress of the NIC         into the pod, or the slow way
 *   arrive    ingress of the VXLAN device into the pod, or the slow way
 *   deliver   egress of a pod's veth     sees what the kernel makes of that
 *
 * Nothing here is worked out from tables. What is written is what the kernel
 * itself wrote for the same connection, seen on its way out (wire, deliver) within
 * the last second and compared byte by byte with what leave and arrive would have
 * written. A connection takes the fast path only while the slow path has been seen
 * to let it through both ways within that second, in this generation, and while
 * connection tracking holds it as established. Where the kernel translates the peer of
 * a pod, a service's address to that of a backend, so do leave and arrive.
 *
 * The tunnel is IPv4's. What it carries is of either version, told apart once in each
 * program: from there on "six" is a constant, and the code of one version has nothing of
 * the other's in it. Of IPv6 nothing is translated.
 *
 * What a program has no reason to carry goes on to the kernel as it came.
 *
 * leave and deliver are at the links of such pods alone as have a connection that is worth
 * it: tunnel and arrive find those, and tell the agent.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* TCX_NEXT, and TC_ACT_UNSPEC before it: on to what comes next. */
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
#define HLEN(six) ((six) ? IP6_HLEN : IP_HLEN)
/* IPv6's next headers that stand between it and TCP or UDP (RFC 8200, section 4). */
#define HOP_BY_HOP 0
#define ROUTING 43
#define FRAGMENT_HEADER 44
#define DESTINATION 60
#define AUTHENTICATION 51
/* So many of them are looked behind, which is more than anybody sends. */
#define HEADERS_MOST 16
/* What VXLAN adds: Ethernet, VXLAN, UDP and IP (RFC 7348, section 5). */
#define ROOM 50

/* TCP's flags, and where conntrack has its state of them
 * (include/uapi/linux/netfilter/nf_conntrack_tcp.h). */
#define TCP_ODD 0x27 /* URG, RST, SYN, FIN */
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
#define CT_SHIFTED (1 << 6) /* sequence numbers are translated */
#define CT_HELPER (1 << 13)
#define NF_DROP 0 /* include/uapi/linux/netfilter.h */
#define NF_ACCEPT 1
#define NF_PRE_ROUTING 0 /* include/uapi/linux/netfilter.h */
#define NF_LOCAL_IN 1
#define CHECKSUM_NONE 0 /* include/linux/skbuff.h */
#define CHECKSUM_UNNECESSARY 1
#define CHECKSUM_COMPLETE 2
#define CHECKSUM_PARTIAL 3

#define MS 1000000ULL
/* How long what was seen of the slow path is believed: less than a second by any clock, as
 * the coarse one may be a tick behind. */
#define EVIDENCE (1000 * MS - SOON)
/* After how long one packet goes the slow way to see it anew; the shorter one while
 * conntrack believes that data is unacknowledged (see tracked). */
#define AGAIN (500 * MS)
#define AGAIN_SOON (20 * MS)
/* How old a connection has to be: one of a few packets is not worth the trouble. */
#define WORTH (50 * MS)
/* Connections that are picked more seldom are as good as idle. */
#define RARE (2000 * MS)
/* Of so many packets of unknown connections one is looked at, more or less. */
#define PICK 32
/* Places for ways to other nodes, and for pods. */
#define OUTERS 2048
#define PODS 4096
/* For how long it is not asked again after a no. */
#define NO (100 * MS)
/* For how long no single packet of a connection is taken out of the tunnel after one that
 * the kernel has to take out: it would overtake. */
#define BEHIND (50 * MS)
/* By how many bits windows are shifted at most (RFC 7323, section 2.3). */
#define SHIFT_MOST 14
/* After how many bytes that conntrack has not seen the agent is to renew its numbers. They are
 * compared modulo 2^32, so they are of no use when they are 2^31 behind. */
#define RENEW (1U << 30)
/* A tick of the coarse clock and more: how long a packet may be on its way to arrive. */
#define SOON (10 * MS)

/* The kernel's types, as far as they are looked at: found by its BTF. */
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

/*
 * What became of packets: the first two took the fast path, all others did not,
 * and this is why. The order is that of Reasons in fastpath.go.
 */
enum why {
	FAST_OUT,
	FAST_IN,
	UNKNOWN,     /* no connection that was seen */
	ODD_FLAGS,   /* TCP that opens, closes, resets or urges */
	DEAD,        /* nobody's heart beats */
	OTHER,       /* neither TCP nor UDP over IP */
	OPTIONS,     /* IP options, or headers between IPv6's and TCP's or UDP's */
	FRAGMENT,    /* of a packet */
	LAST_HOP,    /* the hop limit is reached */
	MALFORMED,   /* lengths or sum do not fit */
	UNSUMMED,    /* nobody vouches for the checksum */
	MARKED,      /* somebody marked it */
	STALE,       /* not seen within the last second */
	CHANGED,     /* something was announced since it was seen */
	ASKED,       /* goes to see whether the slow path still lets it through */
	UNLIKE,      /* type of service, hops or Ethernet differ from what was seen */
	LARGE,       /* larger than the MTU */
	NO_ROOM,     /* the kernel does not let it be encapsulated */
	UNTRACKED,   /* not tracked */
	UNANSWERED,  /* tracked, but not established */
	TRANSLATED,  /* by NAT, and not only the peer of a pod that opened it; or of IPv6 */
	HELPED,      /* by one of conntrack's helpers */
	WINDOW,      /* conntrack checks its window, until told otherwise */
	REWRITTEN,   /* the slow path makes something else of it */
	FULL,        /* a table is */
	FORGED,      /* dropped: it would end a connection, and is not of it */
	WHYS,
};

/* Keys and addresses as two words: they are made, compared and hashed in registers. */
typedef __u64 __attribute__((may_alias)) word;

/* A connection, from its pod's end: as the pod has it, or as the wire has it. They differ
 * where the kernel translates the peer. Of IPv6 it has a digest of each address; the whole
 * ones are in struct flow, and two connections with one key are not both known. */
struct key {
	__be32 pod, peer;
	__be16 pod_port, peer_port;
	__u8 protocol;
	__u8 six;
	__u8 zero[2];
} __attribute__((aligned(8)));

/*
 * Everything of a packet's headers that must arrive as it left. A field has one
 * value for all packets of a datagram that is still whole (GSO).
 */
struct headers {
	__u32 l4[4]; /* TCP's to flags and window; UDP's ports and length */
	__u32 ip[10]; /* of IPv4 5 */
} __attribute__((aligned(8)));

/* What stands in front of a packet to another node. Fields of single packets are 0;
 * the UDP checksum is not, if there is one. */
struct outer {
	__u32 nic;
	struct {
		__u8 to[6], from[6];
		__be16 protocol;
		__u8 version_words, tos;
		__be16 length, id, fragment;
		__u8 ttl, ip_protocol;
		__u16 ip_check;
		__be16 source[2], destination[2];
		__be16 port, vxlan_port, udp_length, udp_check;
		__be16 vxlan[4];
		__be16 inner[7];
	} head;
};

/* A pod's link: the node's end, and the Ethernet header of what is delivered there. */
struct pod {
	__u32 veth;
	__u8 mac[6], from[6];
};

struct way {
	/* When the slow path let through a packet that set out then, and in which
	 * generation; when one was last sent to see, and not to before when. */
	__u64 seen, asked, not_before;
	/* How soon to look again, ns. */
	__u32 again;
	__u32 generation;
	/* The device that it set out from: the pod's veth, the VXLAN device. */
	__u32 device;
	/* What is written: a place in outers, or in pods; 0 is none. */
	__u32 place;
	__u8 tos, ttl;
	/* The longest inner packet that the route to the other node takes, on the way out. */
	__u16 mtu;
	/* Of TCP, what conntrack does not see of a connection that is carried: the end of what was
	 * sent this way (SND.NXT), the highest acknowledgement that was (RCV.NXT), and how far the
	 * other side lets it send, the right edge of its window. By how many bits the windows that
	 * this way announces are shifted (RFC 7323). */
	__u32 end, acked, edge, shift;
	/* In which epoch a packet was seen that went this way. */
	__u32 epoch;
};

/* By whose packets the numbers of a connection are known: by its peer's, which may be forged; by its
 * pod's; and by one of its peer's since, which tells how much the peer has room for. */
enum { BY_PEER = 1, BY_POD, BY_BOTH };

struct flow {
	struct way out, in;
	/* The Ethernet header of what the pod sends: to whom, from whom. */
	__u8 mac[12];
	/* Its bit in hints. */
	__u32 hint;
	/* Which it is, as the pod has it. The entry of one that was deleted may be another's by
	 * the time that a reader is through with it. */
	struct key key;
	/* The peer as the wire has it (see FAR): in one word, so that it is read at once. */
	__u64 far;
	/* When the kernel took a packet out of the tunnel, in which generation, and the outer
	 * header that it had: a place in outers. */
	__u64 landed;
	__u32 landed_generation;
	__u32 landed_place;
	/* When one came to the NIC that stands for many (GSO); when one was left to the kernel
	 * that does, or may be made to. */
	__u64 gso, large;
	/* When the pod was seen to end the connection at a socket (see ends). */
	__u64 ends;
	/* Of IPv6, the addresses. */
	word pod6[2], peer6[2];
	/* Of TCP, by whose packets the numbers of both ways are known, or 0, and whether the connection
	 * may have ended before it became known (see tracked). */
	__u8 numbered, doubted, zero[2];
	/* Up to which end of what the pod sends, and of what its peer does, the agent was last asked
	 * to renew what conntrack knows of them. */
	__u32 renewed[2];
	/* When the last packet was seen, ms. */
	__u32 last;
};

/* A connection whose peer is translated, found by what the wire has. */
struct front {
	struct key key;
	/* Its bit in hints. */
	__u32 hint;
	__u32 zero;
};

/* A packet that its CPU is about to see again, further down the slow path. On the way out,
 * what is found there first that is not this packet is not looked at. */
struct passing {
	struct headers headers;
	struct key key;
	__u64 far;
	__u64 at;
	__u32 generation;
	__u32 device;
	__u32 overlay;
	/* What conntrack knows it by, on the slow path. */
	unsigned long entry;
	__u8 mac[12];
	/* When it met land (see met), or 0. */
	__u32 landed;
	__u16 check; /* the inner checksum field */
	__u8 gso, ends;
	/* Of TCP, whether its numbers do not go on from those that are known. */
	__u8 anew;
};

/* A packet that has met land, and is to be known again by arrive. */
struct landing {
	__u64 at;
	__u32 generation;
	struct headers headers;
	struct outer outer;
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
	__type(value, struct front);
} fronts SEC(".maps");

/* Outer headers and pods, each once, and never changed: a place is not used twice. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, OUTERS);
	__type(key, struct outer);
	__type(value, __u32);
} outer_places SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, OUTERS);
	__type(key, __u32);
	__type(value, struct outer);
} outers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, PODS);
	__type(key, struct pod);
	__type(value, __u32);
} pod_places SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PODS);
	__type(key, __u32);
	__type(value, struct pod);
} pods SEC(".maps");

/* An Ethernet address that is known to be at a pod's link: a bridge has learned it there, or
 * it is a neighbour's. Told by the agent. A bridge that does not know where an address is
 * sends to all its links; only the one that it is at delivers. */
struct owner {
	__u32 link;
	__u8 mac[6], zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * PODS);
	__type(key, struct owner);
	__type(value, __u8);
} owners SEC(".maps");

/* The VXLAN devices that are understood, by index: what their packets have. */
struct overlay {
	__u32 nic;
	__be16 source[2]; /* the outer address */
	__be16 port;
	__be16 mac[3];
	__be16 vni[2]; /* and a byte of 0 */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, __u32);
	__type(value, struct overlay);
} overlays SEC(".maps");

/* All that a CPU keeps for itself, what every packet looks at in front: to one that is not
 * carried each line of memory counts. */
struct cpu {
	/* Of out and in: 0 nothing, 1 let go, 2 seen on the VXLAN device. Of what lands: 1 it has
	 * met land, 2 it is let go by arrive. */
	__u8 out_stage, in_stage, lands;
	/* So many packets of unknown connections until one is picked. */
	__u32 left;
	__u64 whys[WHYS];
	struct passing out, in;
	struct landing landing;
	/* When the agent was last asked to watch a pod. */
	__u64 wished;
	/* One that becomes known, which has no room on the stack. */
	struct flow fresh;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu);
} cpus SEC(".maps");

/* Pods whose links have all programs: by the device that their packets come from, and by the
 * addresses that are known to be there. The other is 0. Told by the agent: what no deliver
 * would see is not looked at. */
struct watch {
	__u32 device;
	__be32 pod;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * PODS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct watch);
	__type(value, __u8);
} watched SEC(".maps");

/* What the agent is asked to do for a connection. fastpath.go decodes it. */
enum ask {
	ASK_WATCH,   /* watch its pod, which is not watched: it is worth it */
	ASK_LIBERAL, /* have conntrack stop checking its window */
	ASK_ACKED,   /* have conntrack know that all was acknowledged */
	ASK_RENEW,   /* have conntrack know its numbers */
	ASK_CLOSE,   /* have conntrack know that it was reset */
	ASK_REOPEN,  /* have conntrack know that it goes on, whatever it took for its end */
};

struct told {
	struct key key;
	/* Of IPv6, the addresses, where the connection is known. */
	word pod6[2], peer6[2];
	__u32 ask, zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} news SEC(".maps");

/* Written by the agent: until when it is alive (CLOCK_MONOTONIC, ns), how often
 * something has changed, the least MTU on the way, and the range of source ports. */
volatile __u64 alive_until = 0;
volatile __u32 generation = 0;
/* How often programs were taken off that see all packets of connections. */
volatile __u32 epoch = 0;
volatile __u32 mtu = 0;
volatile __u32 port_from = 0, port_to = 0;

/* Whether the kernel takes source ports from one more (is_source_port). */
volatile __u32 ports_more = 0;

/* For tests: BPF_PROG_TEST_RUN has no packet whose checksum somebody vouches for. */
const volatile __u8 any_sum = 0;

/* Places in use. Place 0 stays empty. */
__u32 outers_used = 0, pods_used = 0;

/*
 * Which connections may be known, a bit for each value of a part of the hash: a packet of
 * one that is not needs no look into flows. A program sets, the agent takes back. What is
 * taken back though it is known is found again as one that is not.
 */
#define HINTS 16384
__u64 hints[HINTS / 64];

/* Connections that were picked once: a part of the hash, and when (ms). One is looked at
 * if it is picked again when it is old enough. So short ones leave nothing behind. */
#define YOUNG 1024
__u64 young[YOUNG];

static __always_inline struct cpu *this_cpu(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&cpus, &first);
}

static __always_inline void count(struct cpu *c, __u32 why)
{
	if (why < WHYS)
		c->whys[why]++;
}

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return sum + (sum >> 16);
}

/* add adds two 16-bit words to a sum. */
static __always_inline __u32 add(__u32 sum, __u32 two)
{
	return sum + (two & 0xffff) + (two >> 16);
}

/* field reads a pointer of the context. Left to itself the compiler moves it in 32 bits,
 * which is how it is declared, and the verifier takes it for a number from then on. */
#define field(skb, name) ({ \
	void *__pointer; \
	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(__pointer) : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, name))); \
	__pointer; \
})

/* copy takes bytes of a packet by words. Left to itself the compiler takes them one by one,
 * as it knows of no alignment. */
#define copy(to, from, size) do { \
	__u32 *__to = (void *)(to); \
	const __u32 *__from = (const void *)(from); \
	_Pragma("unroll") \
	for (__u32 __i = 0; __i < (size) / 4; __i++) \
		__to[__i] = __from[__i]; \
} while (0)

/* start returns the packet's first bytes, if there are so many, or 0. */
static __always_inline __u8 *start(struct __sk_buff *skb, __u32 size)
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

/* The fields of the first and third words of the IP header, of the first two of IPv6's, as
 * they lie in memory. */
#define BYTE(word, n) ((__u8)((word) >> (8 * (n))))
#define HALF(word, n) ((__be16)((word) >> (16 * (n))))
#define TOS(h, six) ((six) ? (__u8)(bpf_ntohl((h)->ip[0]) >> 20) : BYTE((h)->ip[0], 1))
#define LENGTH(h, six) ((six) ? bpf_ntohs(HALF((h)->ip[1], 0)) + IP6_HLEN : bpf_ntohs(HALF((h)->ip[0], 1)))
#define TTL(h, six) ((six) ? BYTE((h)->ip[1], 3) : BYTE((h)->ip[2], 0))
#define PROTOCOL(h, six) ((six) ? BYTE((h)->ip[1], 2) : BYTE((h)->ip[2], 1))
/* Which word has the hop limit. */
#define HOP(six) ((six) ? 1 : 2)
/* How much of the header may be written: of IPv6's no address. */
#define CHANGES(six) ((six) ? 8 : IP_HLEN)

/* hop is the word of the hop limit, with one less and IPv4's header's sum to match
 * (RFC 1624, as ip_decrease_ttl in include/net/ip.h). */
static __always_inline __u32 hop(__u32 word, int six)
{
	__u32 check = word >> 16;

	if (six)
		return word - (1 << 24);
	check += bpf_htons(0x0100);
	check += check >= 0xffff;
	return (check << 16) | ((word & 0xffff) - 1);
}

/* key_of is the key of a packet that goes out of its pod, or into it. */
static __always_inline void key_of(struct key *k, __be32 source, __be32 destination, __u32 ports, __u8 protocol, int out, int six)
{
	word *words = (void *)k;

	words[0] = out ? source | (__u64)destination << 32 : destination | (__u64)source << 32;
	words[1] = (out ? ports : ports >> 16 | ports << 16) | (__u64)protocol << 32 | (__u64)!!six << 40;
}

/* digest stands for an address of IPv6 in keys: that of fastpath.go is the same. */
static __always_inline __u32 digest(const word *address)
{
	__u64 h = address[0] * 0x9e3779b97f4a7c15 + address[1];

	h ^= h >> 32;
	return h * 0xd6e8feb86659fd93 >> 32;
}

/* peek reads which connection a packet, at an offset, seems to be of: as many bytes are there
 * as IPv4 has, with the ports. It returns 0, or why it is of none. */
static __always_inline int peek(struct __sk_buff *skb, const __u8 *data, __u32 at, struct key *k, int out, int six)
{
	const __u32 *ends;

	if (unlikely(skb->vlan_present))
		return OTHER;
	if (!six) {
		if (data[at] != 0x45)
			return OPTIONS;
		if (data[at + 9] != TCP && data[at + 9] != UDP)
			return OTHER;
		ends = (const void *)(data + at + 12);
		key_of(k, ends[0], ends[1], ends[2], data[at + 9], out, 0);
		return 0;
	}
	data = start(skb, at + IP6_HLEN + 8);
	if (!data || data[at] >> 4 != 6)
		return OTHER;
	switch (data[at + 6]) {
	case TCP:
	case UDP:
		break;
	case HOP_BY_HOP:
	case ROUTING:
	case DESTINATION:
		return OPTIONS;
	case FRAGMENT_HEADER:
		return FRAGMENT;
	default:
		return OTHER;
	}
	ends = (const void *)(data + at + 8);
	key_of(k, digest((const void *)ends), digest((const void *)(ends + 4)), ends[8], data[at + 6], out, 1);
	return 0;
}

/* parse takes the headers of a packet that was peeked at, and its checksum field where there
 * is one. It returns 0, or why the packet is not for the fast path. */
static __always_inline int parse(struct __sk_buff *skb, __u32 at, __u8 protocol, struct headers *h, __u16 *check, int six)
{
	const __u32 l4 = at + HLEN(six);
	__u8 *data;

	if (protocol == TCP) {
		data = start(skb, l4 + 20);
		if (!data)
			return MALFORMED;
		copy(h->ip, data + at, HLEN(six));
		copy(h->l4, data + l4, sizeof(h->l4));
		*check = *(__u16 *)(data + l4 + 16);
	} else {
		data = start(skb, l4 + 8);
		if (!data)
			return MALFORMED;
		copy(h->ip, data + at, HLEN(six));
		copy(h->l4, data + l4, 8);
		h->l4[1] &= 0xffff;
		h->l4[2] = h->l4[3] = 0;
		*check = *(__u16 *)(data + l4 + 6);
		/* Which IPv6 does not have (RFC 8200, section 8.1). */
		if (six && !*check)
			return MALFORMED;
	}
	if (!six && HALF(h->ip[1], 1) & ~bpf_htons(0x4000))
		return FRAGMENT;
	if (TTL(h, six) <= 1)
		return LAST_HOP;
	if (LENGTH(h, six) + at != skb->len)
		return MALFORMED;
	if (PROTOCOL(h, six) == TCP) {
		__u8 words = BYTE(h->l4[3], 0), flags = BYTE(h->l4[3], 1);

		if ((words >> 4) < 5 || HLEN(six) + (words >> 4) * 4 > LENGTH(h, six))
			return MALFORMED;
		if ((flags & TCP_ODD) || !(flags & TCP_ACK) || (words & 0xf))
			return ODD_FLAGS;
	} else if (bpf_ntohs(HALF(h->l4[1], 0)) != LENGTH(h, six) - HLEN(six)) {
		return MALFORMED;
	}
	return 0;
}

/* whole tells whether the sum of an IP header is right. */
static __always_inline int whole(const __u32 *ip)
{
	__u32 sum = 0;
	int i;

	for (i = 0; i < 5; i++)
		sum = add(sum, ip[i]);
	return fold(sum) == 0xffff;
}

/* FAR is an address and a port in one word. */
#define FAR(address, port) ((__u32)(address) | (__u64)(port) << 32)

static __always_inline __u64 far_of(const struct key *k)
{
	return FAR(k->peer, k->peer_port);
}

/* with_far is a connection's key with another peer. */
static __always_inline struct key with_far(const struct key *k, __u64 far)
{
	struct key other = *k;

	other.peer = far;
	other.peer_port = far >> 32;
	return other;
}

static __always_inline int same_key(const struct key *a, const struct key *b)
{
	const word *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1];
}

/* mix is the hash of a connection: what follows takes bits of it. */
static __always_inline __u64 mix(const struct key *k)
{
	const word *x = (const void *)k;
	__u64 h = x[0] + x[1] * 0x9e3779b97f4a7c15;

	h ^= h >> 32;
	h *= 0xd6e8feb86659fd93;
	return h ^ h >> 32;
}

static __always_inline int hinted(__u64 hash)
{
	return hints[hash % HINTS / 64] >> hash % 64 & 1;
}

static __always_inline void hint(__u64 hash)
{
	if (!hinted(hash))
		__sync_fetch_and_or(&hints[hash % HINTS / 64], 1ULL << hash % 64);
}

/* pick tells whether a packet of an unknown connection is looked at: few of them, and not
 * every so many-th, which may be the same connection's again and again. */
static __always_inline int pick(struct cpu *c)
{
	if (c->left--)
		return 0;
	c->left = bpf_get_prandom_u32() % (2 * PICK);
	return 1;
}

/* unpick has a connection that opens or ends not be taken for an older one that had its
 * ports. */
static __always_inline void unpick(__u64 hash)
{
	__u64 *slot = &young[hash / HINTS % YOUNG];

	if (*slot >> 32 == hash >> 32)
		*slot = 0;
}

/* worth tells whether a connection that is picked has been picked before, long enough
 * ago, but not so long that it would be idle again by the next. */
static __always_inline int worth(__u64 hash, __u64 now)
{
	__u64 *slot = &young[hash / HINTS % YOUNG], old = *slot;
	__u32 part = hash >> 32, ms = now / MS, age = ms - (__u32)old;
	int same = part == old >> 32 && age < RARE / MS;

	if (same && age < WORTH / MS)
		return 0;
	/* Another is given the time to be old enough. */
	if (same || age > 4 * WORTH / MS)
		*slot = (__u64)part << 32 | ms;
	return same;
}

/* opens tells whether a packet that was peeked at opens a connection. */
static __always_inline int opens(struct __sk_buff *skb, __u32 at, const struct key *k, int six)
{
	const __u8 *data = field(skb, data);

	return k->protocol == TCP && (void *)data + at + HLEN(six) + 14 <= field(skb, data_end) && (data[at + HLEN(six) + 13] & TCP_SYN);
}

/* noticed tells whether a packet that was peeked at, of a connection that is not known, is to
 * be looked at. */
static __always_inline int noticed(struct __sk_buff *skb, struct cpu *c, __u32 at, const struct key *k, __u64 hash, int six)
{
	if (opens(skb, at, k, six)) {
		unpick(hash);
		return 0;
	}
	return pick(c) && worth(hash, bpf_ktime_get_coarse_ns());
}

static __always_inline void report(const struct key *k, const struct flow *f, __u32 ask)
{
	struct told told = {.key = *k, .ask = ask};

	if (f && k->six) {
		__builtin_memcpy(told.pod6, f->pod6, sizeof(told.pod6));
		__builtin_memcpy(told.peer6, f->peer6, sizeof(told.peer6));
	}
	bpf_ringbuf_output(&news, &told, sizeof(told), 0);
}

/* is_watched tells whether a packet would be seen all its way: from a pod's device, or to a
 * pod's address, the other being 0. */
static __always_inline int is_watched(__u32 device, __be32 pod)
{
	struct watch w = {.device = device, .pod = pod};

	return bpf_map_lookup_elem(&watched, &w) != 0;
}

/* wish asks the agent to watch a pod, which not every packet of a flood may ask for. */
static __always_inline void wish(struct cpu *c, const struct key *k, __u64 now)
{
	if (now - c->wished < MS)
		return;
	c->wished = now;
	report(k, 0, ASK_WATCH);
}

/* TCP's fields, of a packet's headers. */
#define SEQ(h) bpf_ntohl((h)->l4[1])
#define ACK(h) bpf_ntohl((h)->l4[2])
#define FLAGS(h) BYTE((h)->l4[3], 1)
#define WINDOW_FIELD(h) bpf_ntohs(HALF((h)->l4[3], 1))

/* later tells whether one of TCP's numbers is after another (RFC 9293, section 3.4). */
static __always_inline int later(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

/* end_of_data is the number after the last byte of a packet of TCP. */
static __always_inline __u32 end_of_data(const struct headers *h, int six)
{
	return SEQ(h) + LENGTH(h, six) - HLEN(six) - (BYTE(h->l4[3], 0) >> 4) * 4;
}

/* begins tells whether data is between what the other side has long had and what it has room
 * for; acknowledges, whether an acknowledgement is of what the other side sent of late. */
static __always_inline int begins(const struct way *w, const struct way *back, __u32 seq, __u32 end)
{
	return !later(seq, w->edge) && !later(back->acked - (0xffff << (back->shift & 15)), end);
}

static __always_inline int acknowledges(const struct way *w, const struct way *back, __u32 ack)
{
	return !later(ack, back->edge) && !later(w->acked - (0xffff << (w->shift & 15)), ack);
}

/* fits tells whether a packet of TCP is one that conntrack would not call invalid, had it
 * seen all (tcp_in_window in net/netfilter/nf_conntrack_proto_tcp.c). */
static __always_inline int fits(const struct way *w, const struct way *back, const struct headers *h, int six)
{
	return begins(w, back, SEQ(h), end_of_data(h, six)) && acknowledges(w, back, ACK(h));
}

/* advance takes the numbers of a packet that fits. */
static __always_inline void advance(struct flow *f, int out, const struct headers *h, __u64 now, int six)
{
	struct way *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u32 is = epoch, ms = now / MS;
	__u32 end = end_of_data(h, six), ack = ACK(h), edge;

	/* All that the pod sends was seen before it is acknowledged. */
	if (!out && f->numbered >= BY_POD && unlikely(later(ack, back->end)))
		ack = back->end;
	edge = ack + (WINDOW_FIELD(h) << (w->shift & 15));
	if (!out && unlikely(f->numbered == BY_POD))
		f->numbered = BY_BOTH;
	if (later(end, w->end)) {
		w->end = end;
		if (unlikely(later(end, w->edge)))
			w->edge = end;
		if (unlikely(end - f->renewed[!out] >= RENEW)) {
			f->renewed[!out] = end;
			report(&f->key, f, ASK_RENEW);
		}
	}
	if (later(ack, w->acked))
		w->acked = ack;
	if (later(ack, back->end)) /* which went by before it was known */
		back->end = ack;
	if (later(edge, back->edge))
		back->edge = edge;
	if (w->epoch != is)
		w->epoch = is;
	if (f->last != ms)
		f->last = ms;
}

/* number takes the numbers of a packet when none are known. How far it may go on is known by
 * the next one that comes back; until then it is what fits without being scaled. */
static __always_inline void number(struct flow *f, int out, const struct headers *h, int six)
{
	struct way *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;

	w->end = end_of_data(h, six);
	w->acked = back->end = ACK(h);
	back->acked = SEQ(h);
	back->edge = ACK(h) + (WINDOW_FIELD(h) << (w->shift & 15));
	w->edge = w->end + 0xffff;
	f->renewed[0] = f->out.end;
	f->renewed[1] = f->in.end;
	w->epoch = back->epoch = epoch;
	f->numbered = out ? BY_POD : BY_PEER;
}

/* counted tells whether the numbers of a connection are known, and programs saw all of it since. */
static __always_inline int counted(const struct flow *f)
{
	return f->numbered && f->out.epoch == epoch && f->in.epoch == epoch;
}

/* count_on takes the numbers of a packet that came through. Anybody may forge one that comes for
 * the pod, and a liberal conntrack lets it pass; what comes from the pod's own device is the pod's. */
static __always_inline void count_on(struct flow *f, int out, const struct passing *p, int six)
{
	if (p->anew && !out && counted(f))
		return;
	if (p->anew)
		number(f, out, &p->headers, six);
	advance(f, out, &p->headers, p->at, six);
}

/* segment is how long the longest packet is that this one, of TCP, will be cut into. */
static __always_inline __u32 segment(const struct __sk_buff *skb, const struct headers *h, int six)
{
	if (!skb->gso_size)
		return LENGTH(h, six);
	return skb->gso_size + HLEN(six) + (BYTE(h->l4[3], 0) >> 4) * 4;
}

/* believed tells whether the slow path lets a connection through, as far as is known, and
 * if not why. A stream needs both its ways. Datagrams may go one way for ever: that one
 * alone counts, once conntrack has seen an answer (tracked). */
static __always_inline int believed(const struct way *w, const struct way *back, const struct key *k, __u64 now)
{
	__u32 g = generation;

	if (k->protocol != TCP)
		back = w;
	if (!w->seen || !back->seen || now - w->seen >= EVIDENCE || now - back->seen >= EVIDENCE)
		return STALE;
	if (w->generation != g || back->generation != g)
		return CHANGED;
	return 0;
}

/* place_of is what is written, as it was when this way was last seen: a processor that may
 * read ahead (arm64) does not, as the address depends on that time. */
static __always_inline __u32 place_of(const struct way *w)
{
	__u64 nothing = *(const volatile __u64 *)&w->seen;

	asm volatile("%0 &= 0" : "+r"(nothing));
	return *(const volatile __u32 *)((const void *)&w->place + nothing);
}

/* ask tells whether this packet is to go and see, when all others need not. */
static __always_inline int ask(struct way *w, __u64 now)
{
	if (now - w->seen < w->again || now - w->asked < AGAIN_SOON)
		return 0;
	w->asked = now;
	return 1;
}

/* keep copies the headers of a packet. */
static __always_inline void keep(struct headers *to, const struct headers *h, int six)
{
	copy(to, h, __builtin_offsetof(struct headers, ip) + HLEN(six));
}

/* let_go remembers a packet that goes the slow way, to know it again. */
static __always_inline void let_go(struct passing *p, const struct headers *h, const struct key *k,
				   const struct __sk_buff *skb, __u64 now, __u32 g, int six)
{
	keep(&p->headers, h, six);
	p->key = *k;
	p->far = far_of(k);
	p->at = now;
	p->generation = g;
	p->device = skb->ifindex;
	p->gso = skb->gso_size != 0;
}

/* replaced is a sum, not complemented, in which one address stands in place of another. */
static __always_inline __u16 replaced(__u16 sum, __be32 from, __be32 to)
{
	return fold(add(add(sum, ~from), to));
}

/* translate makes the peer of a packet another, as the kernel does (nf_nat_ipv4_manip_pkt
 * in net/netfilter/nf_nat_proto.c): what it goes to, or what it comes from. */
static __always_inline void translate(struct headers *h, int out, __u64 far)
{
	__u32 *address = &h->ip[out ? 4 : 3];

	h->ip[2] = (h->ip[2] & 0xffff) | (__u32)(__u16)~replaced(~(h->ip[2] >> 16), *address, far) << 16;
	*address = far;
	h->l4[0] = out ? (h->l4[0] & 0xffff) | (__u32)(far >> 32) << 16 : (h->l4[0] & 0xffff0000) | (__u32)(far >> 32);
}

/* renumber writes another peer into the TCP or UDP header at an offset, and has its sum
 * match, which it takes. */
static __always_inline int renumber(struct __sk_buff *skb, __u32 l4, int out, const struct headers *was, __u64 far, __u16 *check)
{
	__u32 at = l4 + (PROTOCOL(was, 0) == TCP ? 16 : 6);
	__u64 flags = PROTOCOL(was, 0) == TCP ? 0 : BPF_F_MARK_MANGLED_0;
	__be16 port = far >> 32;

	if (bpf_l4_csum_replace(skb, at, was->ip[out ? 4 : 3], (__u32)far, flags | BPF_F_PSEUDO_HDR | sizeof(__u32)) ||
	    bpf_l4_csum_replace(skb, at, HALF(was->l4[0], out), port, flags | sizeof(port)) ||
	    bpf_skb_load_bytes(skb, at, check, sizeof(*check)))
		return -1;
	return bpf_skb_store_bytes(skb, l4 + (out ? 2 : 0), &port, sizeof(port), 0);
}

/* same tells whether headers are those of the packet that was let go, one hop on. */
static __always_inline int same(const struct headers *was, const struct headers *is, int six)
{
	int i;

	for (i = 0; i < 4; i++)
		if (was->l4[i] != is->l4[i])
			return 0;
	for (i = 0; i < HLEN(six) / 4; i++)
		if ((i == HOP(six) ? hop(was->ip[i], six) : was->ip[i]) != is->ip[i])
			return 0;
	return 1;
}

/* equal tells whether they are those of the packet, as yet where it was. */
static __always_inline int equal(const struct headers *a, const struct headers *b, int six)
{
	int i;

	for (i = 0; i < 4; i++)
		if (a->l4[i] != b->l4[i])
			return 0;
	for (i = 0; i < HLEN(six) / 4; i++)
		if (a->ip[i] != b->ip[i])
			return 0;
	return 1;
}

/* resemble tells whether they are at least of the same packet, whatever has been
 * done to it: by what IPv4 numbers packets by, and by the flow and length that IPv6 has. */
static __always_inline int resemble(const struct headers *was, const struct headers *is, int six)
{
	if (was->l4[1] != is->l4[1])
		return 0;
	if (six)
		return was->ip[0] == is->ip[0] && HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
	return HALF(was->ip[1], 0) == HALF(is->ip[1], 0);
}

/* end_of is an address in a packet of IPv6: what it is from, or what it is to. */
static __always_inline const word *end_of(const struct headers *h, int source)
{
	return (const void *)&h->ip[source ? 2 : 6];
}

static __always_inline int equal_addresses(const word *a, const word *b)
{
	return a[0] == b[0] && a[1] == b[1];
}

/* moved tells why a packet of IPv6 is not the same any more. */
static __always_inline int moved(const struct headers *was, const struct headers *is)
{
	return was->l4[0] != is->l4[0] || !equal_addresses(end_of(was, 1), end_of(is, 1)) ||
	       !equal_addresses(end_of(was, 0), end_of(is, 0)) ? TRANSLATED : REWRITTEN;
}

/* meets tells whether a packet is between the ends of a connection that has its key. */
static __always_inline int meets(const struct flow *f, const struct headers *h, int out)
{
	return equal_addresses(f->pod6, end_of(h, out)) && equal_addresses(f->peer6, end_of(h, !out));
}

/* goes_on tells whether a connection of TCP goes on that conntrack took to have ended. A liberal
 * conntrack takes anything for an end; a true one would have had the connection be forgotten here
 * (odd), if it was known. One that an agent left liberal as it died, and that became known since,
 * has not ended if both its sides sent more: nothing follows what ends a side. */
static __always_inline int goes_on(struct flow *f)
{
	if (!f->numbered)
		f->doubted = 1;
	else if (f->out.end != f->renewed[0] && f->in.end != f->renewed[1])
		f->doubted = 0;
	return !f->doubted;
}

/*
 * tracked returns 0 if conntrack holds the connection of a packet as established
 * and as it was seen, or why not.
 *
 * Conntrack follows the numbers of a TCP connection, and calls invalid what is out of
 * the window that it knows of: most packets, once it does not see them all. As the
 * kernel's own flow tables do (nft_flow_offload_eval), it is told to be liberal with
 * this connection; by the agent, as only netlink can. What it sees from then on is out of
 * its window and changes nothing that it knows but the time-out. So it must not go on
 * believing that data is unacknowledged, because it has not seen the acknowledgement: its
 * time-out would be five minutes in place of days. Resets it judges by the numbers that it
 * knows. These the agent renews before they are half of all numbers behind, and when the
 * connection is idle or leaves the fast path (see conntrack.go).
 */
static __always_inline int tracked(struct __sk_buff *skb, const struct passing *p, struct flow *f, int out, __u32 *again, int six)
{
	const struct key *k = &p->key;
	struct bpf_ct_opts opts = {.netns_id = -1, .l4proto = k->protocol};
	struct bpf_sock_tuple tuple = {};
	__be32 source, destination;
	__be16 from, to;
	unsigned long status;
	struct nf_conn *ct;
	int why = 0, straight = 1, i;

	/* By what the pod sends, whichever way the packet goes. */
	if (six) {
		copy(tuple.ipv6.saddr, end_of(&p->headers, out), sizeof(tuple.ipv6.saddr));
		copy(tuple.ipv6.daddr, end_of(&p->headers, !out), sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = k->pod_port;
		tuple.ipv6.dport = k->peer_port;
	} else {
		tuple.ipv4.saddr = k->pod;
		tuple.ipv4.daddr = k->peer;
		tuple.ipv4.sport = k->pod_port;
		tuple.ipv4.dport = k->peer_port;
	}
	*again = AGAIN;
	ct = bpf_skb_ct_lookup(skb, &tuple, six ? sizeof(tuple.ipv6) : sizeof(tuple.ipv4), &opts, sizeof(opts));
	if (!ct)
		return UNTRACKED;
	status = ct->status;
	/* What comes back, as it is before it is translated. */
	if (six) {
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
	if (!straight || (status & CT_SHIFTED) || FAR(source, from) != p->far || destination != k->pod || to != k->pod_port) {
		why = TRANSLATED;
	} else if ((unsigned long)ct != p->entry) {
		why = UNTRACKED; /* as in another zone */
	} else if (status & CT_HELPER) {
		why = HELPED;
	} else if ((status & (CT_SEEN_REPLY | CT_CONFIRMED | CT_DYING)) != (CT_SEEN_REPLY | CT_CONFIRMED)) {
		why = UNANSWERED;
	} else if (k->protocol == TCP) {
		/* The pod's packets are those of the original direction, or replies. */
		const struct ip_ct_tcp_state *pod = opts.dir ? &ct->proto.tcp.seen[1] : &ct->proto.tcp.seen[0];
		const struct ip_ct_tcp_state *peer = opts.dir ? &ct->proto.tcp.seen[0] : &ct->proto.tcp.seen[1];
		__u8 both = pod->flags & peer->flags, either = pod->flags | peer->flags;

		if (ct->proto.tcp.state != CT_TCP_ESTABLISHED)
			why = both & CT_BE_LIBERAL ? WINDOW : UNANSWERED;
		else if (!(both & CT_BE_LIBERAL))
			why = WINDOW;
		if (f && ct->proto.tcp.state == CT_TCP_ESTABLISHED)
			f->doubted = 0;
		else if (f && why == WINDOW && goes_on(f))
			report(k, f, ASK_REOPEN);
		if (either & CT_UNACKNOWLEDGED)
			*again = AGAIN_SOON;
		if (f) {
			/* Of one that it found in the middle it does not know. */
			f->out.shift = both & CT_WINDOW_SCALE ? pod->td_scale : SHIFT_MOST;
			f->in.shift = both & CT_WINDOW_SCALE ? peer->td_scale : SHIFT_MOST;
			if (!(both & CT_BE_LIBERAL))
				report(k, f, ASK_LIBERAL);
			else if (!why && (either & CT_UNACKNOWLEDGED) && f->numbered &&
				 (pod->td_end != f->out.end || peer->td_end != f->in.end))
				report(k, f, ASK_ACKED);
			/* That it is behind, or would go on for ever to take the connection for one that
			 * sends again or cannot send: a forged packet may have said so. */
			if (!why && f->numbered &&
			    (f->out.end - pod->td_end >= RENEW || f->in.end - peer->td_end >= RENEW ||
			     ((!ct->proto.tcp.last_win || ct->proto.tcp.retrans) && (pod->td_end != f->out.end || peer->td_end != f->in.end))))
				report(k, f, ASK_RENEW);
		}
	}
	bpf_ct_release(ct);
	return why;
}

/* known returns the connection of a packet that was let go and came through. It becomes
 * known here. */
static __always_inline struct flow *known(struct __sk_buff *skb, struct cpu *c, const struct passing *p, int out, int six)
{
	__u64 hash = mix(&p->key);
	struct flow *f = bpf_map_lookup_elem(&flows, &p->key);
	struct flow *fresh = &c->fresh;
	__u32 again;
	int why;

	if (!f) {
		why = tracked(skb, p, 0, out, &again, six);
		if (why && why != WINDOW) {
			count(c, why);
			return 0;
		}
		__builtin_memset(fresh, 0, sizeof(*fresh));
		fresh->key = p->key;
		fresh->hint = hash % HINTS;
		fresh->far = p->far;
		if (six) {
			copy(fresh->pod6, end_of(&p->headers, out), sizeof(fresh->pod6));
			copy(fresh->peer6, end_of(&p->headers, !out), sizeof(fresh->peer6));
		}
		if (bpf_map_update_elem(&flows, &p->key, fresh, BPF_NOEXIST)) {
			count(c, FULL);
			return 0;
		}
		f = bpf_map_lookup_elem(&flows, &p->key);
	}
	if (six && f && !meets(f, &p->headers, out)) {
		count(c, UNLIKE);
		return 0;
	}
	/* What was seen of it with another peer is void. */
	if (f && f->far != p->far) {
		f->out.seen = f->in.seen = 0;
		f->far = p->far;
	}
	hint(hash);
	return f;
}

/* believe notes that the slow path let a packet through, and what it made of it. What
 * differs from the last time is believed from here on. */
static __always_inline void believe(struct way *w, const struct passing *p, __u32 place, __u32 again, int six)
{
	__u8 tos = TOS(&p->headers, six), ttl = TTL(&p->headers, six);

	if (w->place != place || w->device != p->device || w->tos != tos || w->ttl != ttl) {
		w->seen = 0;
		w->place = place;
		w->device = p->device;
		w->tos = tos;
		w->ttl = ttl;
		/* All of it is there for who reads the time below. */
		__sync_fetch_and_or(&w->seen, 0);
	}
	w->again = again;
	w->generation = p->generation;
	w->seen = p->at;
}

static __always_inline __u32 place_of_pod(struct cpu *c, const struct pod *p)
{
	__u32 *known = bpf_map_lookup_elem(&pod_places, p), place;

	if (known)
		return *known;
	/* Without end the count would come back to places that are in use. */
	if (pods_used >= PODS) {
		count(c, FULL);
		return 0;
	}
	place = __sync_fetch_and_add(&pods_used, 1) + 1;
	if (bpf_map_update_elem(&pods, &place, p, BPF_ANY) || bpf_map_update_elem(&pod_places, p, &place, BPF_ANY)) {
		count(c, FULL);
		return 0;
	}
	return place;
}

static __always_inline __u32 place_of_outer(struct cpu *c, const struct outer *o)
{
	__u32 *known = bpf_map_lookup_elem(&outer_places, o), place;

	if (known)
		return *known;
	/* Without end the count would come back to places that are in use. */
	if (outers_used >= OUTERS) {
		count(c, FULL);
		return 0;
	}
	place = __sync_fetch_and_add(&outers_used, 1) + 1;
	if (bpf_map_update_elem(&outers, &place, o, BPF_ANY) || bpf_map_update_elem(&outer_places, o, &place, BPF_ANY)) {
		count(c, FULL);
		return 0;
	}
	return place;
}

/* mtu_fits tells whether all that the packet will be cut into fits. Datagrams that travel
 * together (UDP_SEGMENT, and GRO of UDP) are the kernel's to take apart. */
static __always_inline int mtu_fits(const struct __sk_buff *skb, const struct headers *h, int six)
{
	if (skb->gso_size && PROTOCOL(h, six) != TCP)
		return 0;
	return segment(skb, h, six) <= mtu;
}

static __always_inline __u8 summed(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(s, ip_summed);
}

/* left tells whether it is the sum of the TCP or UDP header at an offset that is left to the
 * device, and not that of one in front of it or behind. */
static __always_inline int left(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return summed(skb) == CHECKSUM_PARTIAL && (unsigned long)s->head + s->csum_start == (unsigned long)s->data + at;
}

/* inner_summed tells whether somebody vouches for the sum of a header in the tunnel, and not
 * for the outer one alone, be it that there is none. */
static __always_inline int inner_summed(struct __sk_buff *skb, __u32 at)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return left(skb, at) || (summed(skb) == CHECKSUM_UNNECESSARY && BPF_CORE_READ_BITFIELD(s, csum_level));
}

/* pod_device returns the pod's end of the veth that a packet is at: each end has the other in
 * front of what it keeps for itself (struct veth_priv in drivers/net/veth.c). */
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

/* entry_of is what conntrack knows a packet by (nf_ct_get), where it has it. */
static __always_inline unsigned long entry_of(struct __sk_buff *skb)
{
	struct sk_buff *s = bpf_cast_to_kern_ctx(skb);

	return s->_nfct & ~7UL;
}

/* has_xdp tells whether a device has XDP programs, of any kind. */
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

/*
 * ends tells whether a packet that leaves its pod was made by an established socket of the
 * pod, and whether nothing in the pod would do with what comes for that socket anything but
 * to hand it over. Then nobody ever asks what marks a packet bore.
 */
static __always_inline int ends(struct __sk_buff *skb, const struct headers *h, const struct key *k, int six)
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
	if (!six && (sk->src_ip4 != k->pod || sk->dst_ip4 != k->peer))
		return 0;
	for (i = 0; six && i < 4; i++)
		if (sk->src_ip6[i] != h->ip[2 + i] || sk->dst_ip6[i] != h->ip[6 + i])
			return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	dev = pod_device(skb);
	if (!tcp || !dev || tcp->inet_conn.icsk_ulp_ops)
		return 0;
	net = tcp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net;
	hooks[0] = six ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_PRE_ROUTING]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_PRE_ROUTING]);
	hooks[1] = six ? BPF_CORE_READ(net, nf.hooks_ipv6[NF_LOCAL_IN]) : BPF_CORE_READ(net, nf.hooks_ipv4[NF_LOCAL_IN]);
	return net == BPF_CORE_READ(dev, nd_net.net) && !hooks[0] && !hooks[1] && !BPF_CORE_READ(dev, rx_handler) &&
	       !BPF_CORE_READ(dev, tcx_ingress) && !BPF_CORE_READ(dev, nf_hooks_ingress);
}

/* source_port is what the kernel gives the flow (udp_flow_src_port in
 * include/net/udp.h), or 0 where it takes other things than the hash. */
static __always_inline __be16 source_port(struct __sk_buff *skb, __u32 more)
{
	__u32 hash = bpf_get_hash_recalc(skb), from = port_from, to = port_to;

	if (!hash || from >= to)
		return 0;
	hash ^= hash << 16;
	return bpf_htons((((__u64)hash * (to - from + more)) >> 32) + from);
}

/* is_source_port tells whether a port is what the kernel gives the flow. Linux 7.2 and newer have
 * the end of the range in it, older ones leave it out: which it is shows where they differ. */
static __always_inline int is_source_port(struct __sk_buff *skb, __be16 port)
{
	__u32 more = ports_more;

	if (port == source_port(skb, more))
		return 1;
	if (port != source_port(skb, !more))
		return 0;
	ports_more = !more;
	return 1;
}

/* outer_tos is RFC 6040's, for a device whose type of service is 0
 * (INET_ECN_encapsulate in include/net/inet_ecn.h). */
static __always_inline __u8 outer_tos(__u8 inner)
{
	inner &= 3;
	return inner == 3 ? 2 : inner;
}

/* udp_sum is the outer checksum of a packet whose inner one is left to the device, by
 * local checksum offload (lco_csum in include/linux/skbuff.h): what the inner field
 * holds stands for all that it covers, and IPv4's header adds up to nothing. */
static __always_inline __u16 udp_sum(const struct outer *o, __be16 port, __be16 length, __u16 inner, const struct headers *h, int six)
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
	for (i = 0; six && i < IP6_HLEN / 4; i++)
		sum = add(sum, h->ip[i]);
	sum += (__u16)~inner;
	result = ~fold(sum);
	return result ? result : 0xffff;
}

/* turn_down notes that a way is not to be asked for a while. */
static __always_inline void turn_down(struct cpu *c, struct way *w, int why, __u64 now)
{
	count(c, why);
	w->seen = 0;
	w->not_before = now + (why == WINDOW ? AGAIN_SOON : NO);
}

/* encapsulate writes what stands in front of a packet, and leads it to its peer on the wire.
 * It returns 0, why it has left the packet alone, or less than 0. */
static __always_inline int encapsulate(struct __sk_buff *skb, const struct headers *h, const struct outer *known, __u16 check, __u64 far, int six)
{
	int translated = !six && far != FAR(h->ip[4], HALF(h->l4[0], 1));
	struct headers led;
	struct {
		struct outer outer;
		struct {
			__u32 ip[5];
		} inner;
	} w;
	__u32 sum = 0, gso = skb->gso_size;
	__be16 port = 0;
	__u32 *words;
	int i;

	/* Of a translated packet without a hash the kernel takes it later, from other headers;
	 * to ask for it now would change that. */
	if (!translated || skb->hash || any_sum)
		port = source_port(skb, ports_more);
	if (!port)
		return UNLIKE;
	if (LENGTH(h, six) > 0xffff - ROOM) /* one that GRO made, and the pod forwards */
		return LARGE;
	keep(&led, h, six);
	if (translated)
		translate(&led, 1, far);
	w.outer = *known;
	w.outer.head.tos = outer_tos(TOS(h, six));
	w.outer.head.length = bpf_htons(LENGTH(h, six) + ROOM);
	w.outer.head.id = bpf_get_prandom_u32();
	w.outer.head.port = port;
	w.outer.head.udp_length = bpf_htons(LENGTH(h, six) + ROOM - IP_HLEN);
	sum = 0x0045 | w.outer.head.tos << 8;
	sum += w.outer.head.length + w.outer.head.id + w.outer.head.fragment;
	sum += w.outer.head.ttl | UDP << 8;
	sum += w.outer.head.source[0] + w.outer.head.source[1] + w.outer.head.destination[0] + w.outer.head.destination[1];
	w.outer.head.ip_check = ~fold(sum);
	led.ip[HOP(six)] = hop(led.ip[HOP(six)], six);
	words = w.inner.ip;
	for (i = 0; i < CHANGES(six) / 4; i++)
		words[i] = led.ip[i];

	if (bpf_skb_adjust_room(skb, ROOM, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET |
				BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
				BPF_F_ADJ_ROOM_ENCAP_L2_ETH | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN)))
		return NO_ROOM;
	/* From here on there is no way back. */
	if (translated && renumber(skb, sizeof(w.outer.head) + IP_HLEN, 1, h, far, &check))
		return -1;
	/* What will be cut has no checksum: an eBPF program cannot ask for one to be
	 * made of each part. RFC 7348 (section 5) would have none in any packet. */
	if (w.outer.head.udp_check)
		w.outer.head.udp_check = gso ? 0 : udp_sum(&w.outer, port, w.outer.head.udp_length, check, &led, six);
	if (bpf_skb_store_bytes(skb, 0, &w.outer.head, sizeof(w.outer.head) + CHANGES(six), 0))
		return -1;
	return 0;
}

_Static_assert(sizeof(((struct outer *)0)->head) == ETH_HLEN + ROOM, "the outer header has its length");
_Static_assert(sizeof(struct outer) % 4 == 0, "the inner header follows at once");

/* find returns a connection by what the wire has of it, and its key as the pod has it. */
static __always_inline struct flow *find(const struct key *wire, struct key *k, int six)
{
	struct flow *f = bpf_map_lookup_elem(&flows, wire);
	const struct front *front;

	*k = *wire;
	if (!six && !f) {
		front = bpf_map_lookup_elem(&fronts, wire);
		if (front) {
			*k = front->key;
			f = bpf_map_lookup_elem(&flows, k);
		}
	}
	return f;
}

/* close forgets a connection that opens or ends. A look takes no lock. */
static __always_inline void close(const struct key *k, const struct flow *f)
{
	struct key wire;

	if (f->far != far_of(k)) {
		wire = with_far(k, f->far);
		bpf_map_delete_elem(&fronts, &wire);
	}
	bpf_map_delete_elem(&flows, k);
}

/* heeds tells whether conntrack, had it seen all, would take a packet for one that ends its connection:
 * a FIN that fits, and a reset that is not before what was acknowledged, or one number before it, as
 * some hosts reset what they have ended (tcp_reset_check in net/ipv4/tcp_input.c). */
static __always_inline int heeds(const struct flow *f, int out, const struct headers *h, __u32 end)
{
	const struct way *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u8 flags = FLAGS(h);

	if (!begins(w, back, SEQ(h), end))
		return 0;
	return flags & TCP_RST ? !later(back->acked, SEQ(h) + 1) : acknowledges(w, back, ACK(h));
}

/* odd has a connection be forgotten that a packet opens anew or ends, if it is one of its own:
 * what is not may be forged. A SYN from the wire always may be; an end that is long acknowledged is none.
 * Conntrack is told of a reset that
 * it would heed, if it had seen all. */
static __always_inline void odd(const struct key *k, struct flow *f, int out, int own, const struct headers *h, __u64 now, int six)
{
	const struct way *w = out ? &f->out : &f->in, *back = out ? &f->in : &f->out;
	__u8 flags = FLAGS(h);
	int next = SEQ(h) == back->acked || SEQ(h) == w->end;

	if (!own)
		return;
	if (flags & TCP_SYN) {
		if (out)
			close(k, f);
	} else if (!f->numbered) {
		return;
	} else if (!(flags & (TCP_FIN | TCP_RST))) {
		if (out)
			f->numbered = 0;
		else if ((flags & TCP_ACK) && fits(w, back, h, six))
			advance(f, 0, h, now, six);
	} else if (heeds(f, out, h, end_of_data(h, six)) && !later(back->acked, end_of_data(h, six) + 1)) {
		if ((flags & TCP_RST) && !out && !next)
			return; /* which the pod asks about (RFC 5961, section 3.2) */
		if ((flags & TCP_RST) && next)
			report(k, f, ASK_CLOSE);
		close(k, f);
	}
}

/* unlike tells whether a packet differs from those that were seen in what they have in
 * common. Congestion marks may come and go. */
static __always_inline int unlike(const struct way *w, const struct headers *h, int six)
{
	return ((w->tos ^ TOS(h, six)) & 0xfc) || w->ttl != TTL(h, six);
}

/* of_wire tells whether a connection is the one that the wire has so. */
static __always_inline int of_wire(const struct flow *f, const struct key *wire)
{
	struct key is = with_far(&f->key, *(const volatile __u64 *)&f->far);

	return same_key(&is, wire);
}

static __always_inline int equal_macs(const __u8 *a, const __u8 *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

/* leaves tells whether a packet that leaves a pod is of a connection that has its key: by the
 * device that it was seen to come from, if it was, as others can forge the rest. */
static __always_inline int leaves(const struct __sk_buff *skb, const struct flow *f, const struct key *k, const struct headers *h, int six)
{
	return (f->out.device == skb->ifindex || !f->out.device) && same_key(&f->key, k) && (!six || meets(f, h, 1));
}

/* arrives tells whether a packet that comes for a pod is of a connection that was found for it. */
static __always_inline int arrives(const struct flow *f, const struct key *wire, const struct key *own, const struct headers *h, int six)
{
	return same_key(&f->key, own) && (six ? meets(f, h, 0) : of_wire(f, wire));
}

/* meet takes the key and the headers of a packet that may be of a known connection, or is
 * looked at though it is not. It returns 0, or why the packet is not for the fast path. */
static __always_inline int meet(struct __sk_buff *skb, struct cpu *c, struct key *k, __u64 *hash, struct headers *h, __u16 *check, int out, int six)
{
	const __u8 *data = start(skb, ETH_HLEN + IP_HLEN + 8);
	int why;

	if (unlikely(!data))
		return OTHER;
	why = peek(skb, data, ETH_HLEN, k, out, six);
	if (unlikely(why))
		return why;
	*hash = mix(k);
	if (likely(!hinted(*hash)) && !noticed(skb, c, ETH_HLEN, k, *hash, six))
		return UNKNOWN;
	return parse(skb, ETH_HLEN, k->protocol, h, check, six);
}

/* priority is what ip_forward gives a packet by its type of service (rt_tos2prio in
 * include/net/route.h), and ip6_forward does not. */
static __always_inline __u32 priority(__u8 tos)
{
	/* Best effort, bulk, interactive, interactive bulk: four bits each, from the lowest. */
	return 0x4620 >> 4 * (tos >> 3 & 3) & 7;
}

static __always_inline int leave_of(struct __sk_buff *skb, struct cpu *c, int six)
{
	const struct outer *outer;
	struct headers h;
	struct flow *f;
	__u32 g, place;
	struct key k;
	__u16 check = 0;
	__u64 hash, now, far = 0;
	int why, ours = 0, in_step = 0;
	__u8 *data;

	why = meet(skb, c, &k, &hash, &h, &check, 1, six);
	if (why) {
		if (why == ODD_FLAGS) {
			unpick(hash);
			f = bpf_map_lookup_elem(&flows, &k);
			if (f)
				odd(&k, f, 1, leaves(skb, f, &k, &h, six), &h, 0, six);
		}
		goto slow;
	}
	now = bpf_ktime_get_coarse_ns();
	f = bpf_map_lookup_elem(&flows, &k);
	if (f) {
		hint(hash);
		far = *(const volatile __u64 *)&f->far;
		barrier(); /* the peer is read before it is known whose it is */
		ours = leaves(skb, f, &k, &h, six);
		in_step = k.protocol != TCP || (f->numbered >= BY_POD && fits(&f->out, &f->in, &h, six));
		if (ours && in_step && k.protocol == TCP)
			advance(f, 1, &h, now, six);
	}
	g = generation;
	why = DEAD;
	if (now >= alive_until)
		goto slow;
	why = MARKED;
	if (skb->mark)
		goto slow;
	if (!f) {
		why = UNKNOWN;
		if ((!hinted(hash) || worth(hash, now)) && is_watched(skb->ifindex, 0))
			goto look;
		goto slow;
	}
	/* Nobody takes away a connection of another pod. */
	why = UNLIKE;
	if (f->out.device && !ours)
		goto slow;
	why = believed(&f->out, &f->in, &k, now);
	if (why) {
		if (now < f->out.not_before)
			goto slow;
		goto look;
	}
	why = WINDOW;
	if (!in_step)
		goto slow;
	why = ASKED;
	if (ask(&f->out, now))
		goto look;
	why = UNLIKE;
	place = place_of(&f->out);
	outer = bpf_map_lookup_elem(&outers, &place);
	data = start(skb, ETH_HLEN);
	if (!outer || !outer->nic || !data || !equal_macs(data, f->mac) || unlike(&f->out, &h, six))
		goto look;
	why = MALFORMED;
	if (!six && !whole(h.ip))
		goto slow;
	why = LARGE;
	if (!mtu_fits(skb, &h, six) || segment(skb, &h, six) > f->out.mtu)
		goto slow;
	why = UNSUMMED;
	if (!left(skb, ETH_HLEN + HLEN(six)) && !any_sum)
		goto slow;
	why = encapsulate(skb, &h, outer, check, far, six);
	if (why < 0)
		return DROP;
	if (why)
		goto slow;
	if (!six)
		skb->priority = priority(TOS(&h, 0));
	count(c, FAST_OUT);
	return bpf_redirect(outer->nic, 0);
look:
	let_go(&c->out, &h, &k, skb, now, g, six);
	c->out.check = check;
	c->out.anew = !in_step;
	c->out.ends = ends(skb, &h, &k, six);
	c->out_stage = !bpf_skb_load_bytes(skb, 0, c->out.mac, sizeof(c->out.mac));
slow:
	count(c, why);
	return NEXT;
}

SEC("tc")
int leave(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c)
		return NEXT;
	c->out_stage = 0;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return leave_of(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return leave_of(skb, c, 1);
	count(c, OTHER);
	return NEXT;
}

/* load reads the headers of a packet at an offset, if it is of a protocol. */
static __always_inline int load(struct __sk_buff *skb, __u32 offset, __u8 protocol, struct headers *h, int six)
{
	h->l4[1] = h->l4[2] = h->l4[3] = 0;
	if (bpf_skb_load_bytes(skb, offset, h->ip, HLEN(six)))
		return -1;
	return bpf_skb_load_bytes(skb, offset + HLEN(six), h->l4, protocol == TCP ? sizeof(h->l4) : 6);
}

static __always_inline int tunnel_of(struct __sk_buff *skb, struct cpu *c, int six)
{
	struct passing *p = &c->out;
	struct headers h;
	__u64 far;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(six ? ETH_P_IPV6 : ETH_P_IP) || load(skb, ETH_HLEN, p->key.protocol, &h, six))
		return NEXT;
	far = six ? p->far : FAR(h.ip[4], HALF(h.l4[0], 1));
	if (far != p->far) {
		p->check = replaced(p->check, p->headers.ip[4], far);
		translate(&p->headers, 1, far);
		p->far = far;
	}
	if (same(&p->headers, &h, six)) {
		p->overlay = skb->ifindex;
		p->entry = entry_of(skb);
		c->out_stage = 2;
	} else if (resemble(&p->headers, &h, six)) {
		count(c, six ? moved(&p->headers, &h) : REWRITTEN);
	}
	return NEXT;
}

/* scout finds connections of pods that are not watched and that are worth it. */
static __always_inline int scout(struct __sk_buff *skb, struct cpu *c, int six)
{
	const __u8 *data = start(skb, ETH_HLEN + IP_HLEN + 8);
	struct key k;
	__u64 hash, now;

	if (!data || peek(skb, data, ETH_HLEN, &k, 1, six))
		return NEXT;
	hash = mix(&k);
	if (opens(skb, ETH_HLEN, &k, six)) {
		unpick(hash);
	} else if (pick(c) && !is_watched(0, k.pod)) { /* else it is for leave to find it worth it */
		now = bpf_ktime_get_coarse_ns();
		if (worth(hash, now))
			wish(c, &k, now);
	}
	return NEXT;
}

SEC("tc")
int tunnel(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c)
		return NEXT;
	if (c->out_stage == 1)
		return c->out.key.six ? tunnel_of(skb, c, 1) : tunnel_of(skb, c, 0);
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return scout(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return scout(skb, c, 1);
	return NEXT;
}

/* ours tells whether an outer header is one that a VXLAN device writes that is
 * understood. */
static __always_inline int ours(const struct outer *o, const struct overlay *v, int six)
{
	return o->nic == v->nic && o->head.protocol == bpf_htons(ETH_P_IP) &&
	       o->head.source[0] == v->source[0] && o->head.source[1] == v->source[1] && o->head.vxlan_port == v->port &&
	       o->head.vxlan[0] == bpf_htons(0x0800) && !o->head.vxlan[1] &&
	       o->head.vxlan[2] == v->vni[0] && o->head.vxlan[3] == v->vni[1] &&
	       o->head.inner[3] == v->mac[0] && o->head.inner[4] == v->mac[1] && o->head.inner[5] == v->mac[2] &&
	       o->head.inner[6] == bpf_htons(six ? ETH_P_IPV6 : ETH_P_IP);
}

/* common takes out of an outer header what is each packet's own. */
static __always_inline void common(struct outer *o)
{
	o->head.tos = 0;
	o->head.length = o->head.id = o->head.ip_check = o->head.port = o->head.udp_length = 0;
	o->head.udp_check = o->head.udp_check ? 0xffff : 0;
}

/* mtu_of_route is the longest inner packet that the route to another node takes without being
 * cut, or 0 if there is none: what it was set to, or has learnt of the way. */
static __always_inline __u16 mtu_of_route(struct __sk_buff *skb, const struct outer *o, __u32 overlay)
{
	struct bpf_fib_lookup fib = {
		.family = 2 /* AF_INET */, .l4_protocol = UDP, .ifindex = skb->ifindex,
		/* So long that it is told what is not too long. */
		.tot_len = 0xffff,
		.ipv4_src = o->head.source[0] | (__u32)o->head.source[1] << 16,
		.ipv4_dst = o->head.destination[0] | (__u32)o->head.destination[1] << 16,
	};

	long result;

	if (any_sum)
		return 0xffff;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_OUTPUT);
	if (result == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		/* It asks for forwarding at a device that is only sent by. */
		fib.ifindex = overlay;
		result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	}
	if (result != BPF_FIB_LKUP_RET_FRAG_NEEDED || fib.mtu_result <= ROOM)
		return 0;
	return fib.mtu_result - ROOM;
}

static __always_inline int wire_of(struct __sk_buff *skb, struct cpu *c, int six)
{
	const struct overlay *v;
	const struct pod *pod;
	struct passing *p = &c->out;
	struct outer o = {};
	struct headers h;
	struct flow *f;
	__u32 again, place;
	__u16 sum, longest;
	int why;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(ETH_P_IP) || skb->vlan_present || bpf_skb_load_bytes(skb, 0, &o.head, sizeof(o.head)) ||
	    load(skb, sizeof(o.head), p->key.protocol, &h, six) ||
	    o.head.version_words != 0x45 || o.head.ip_protocol != UDP || !same(&p->headers, &h, six))
		return NEXT;
	f = known(skb, c, p, 1, six);
	if (!f || p->at < f->out.not_before)
		return NEXT;
	/* A pod is where packets are delivered to it. */
	place = f->in.place;
	pod = bpf_map_lookup_elem(&pods, &place);
	if (pod && pod->veth && pod->veth != p->device) {
		count(c, UNLIKE);
		return NEXT;
	}

	/* Is it what leave would have written? */
	why = REWRITTEN;
	place = p->overlay;
	v = bpf_map_lookup_elem(&overlays, &place);
	o.nic = skb->ifindex;
	sum = o.head.udp_check;
	if (sum && !p->gso)
		sum = udp_sum(&o, o.head.port, o.head.udp_length, p->check, &h, six);
	if (!v || !ours(&o, v, six) || skb->mark || o.head.length != bpf_htons(LENGTH(&h, six) + ROOM) ||
	    o.head.udp_length != bpf_htons(LENGTH(&h, six) + ROOM - IP_HLEN) || o.head.tos != outer_tos(TOS(&h, six)) ||
	    !is_source_port(skb, o.head.port) || sum != o.head.udp_check)
		goto no;
	why = tracked(skb, p, f, 1, &again, six);
	if (why && why != WINDOW)
		goto no;
	if (p->key.protocol == TCP)
		count_on(f, 1, p, six);
	if (why)
		goto no;
	why = LARGE;
	longest = mtu_of_route(skb, &o, p->overlay);
	if (!longest)
		goto no;
	common(&o);
	place = place_of_outer(c, &o);
	if (!place)
		return NEXT;
	if (!equal_macs(f->mac, p->mac)) {
		f->out.seen = 0;
		__builtin_memcpy(f->mac, p->mac, sizeof(f->mac));
	}
	f->out.mtu = longest;
	believe(&f->out, p, place, again, six);
	f->ends = p->ends ? p->at : 0;
	return NEXT;
no:
	turn_down(c, &f->out, why, p->at);
	return NEXT;
}

SEC("tc")
int wire(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c || c->out_stage != 2)
		return NEXT;
	return c->out.key.six ? wire_of(skb, c, 1) : wire_of(skb, c, 0);
}

/* into puts a packet that is out of the tunnel into its pod. */
static __always_inline int into(struct __sk_buff *skb, struct cpu *c, const struct pod *pod, const struct headers *h,
				const struct key *wire, const struct key *own, int six)
{
	struct {
		__u8 to[6], from[6];
		__be16 protocol;
		__u8 ip[IP_HLEN];
	} head;
	int translated = !six && !same_key(own, wire);
	struct headers led;
	__u32 veth = pod->veth;
	__u16 check;

	__builtin_memcpy(head.to, pod->mac, 6);
	__builtin_memcpy(head.from, pod->from, 6);
	head.protocol = bpf_htons(six ? ETH_P_IPV6 : ETH_P_IP);
	keep(&led, h, six);
	if (translated)
		translate(&led, 0, far_of(own));
	led.ip[HOP(six)] = hop(led.ip[HOP(six)], six);
	__builtin_memcpy(head.ip, led.ip, CHANGES(six));
	if (bpf_skb_store_bytes(skb, 0, &head, __builtin_offsetof(typeof(head), ip) + CHANGES(six), 0) ||
	    (translated && renumber(skb, sizeof(head), 0, h, far_of(own), &check)))
		return DROP;
	count(c, FAST_IN);
	return bpf_redirect_peer(veth, 0);
}

static __always_inline int equal_outers(const struct outer *a, const struct outer *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;
	int i;

	for (i = 0; i < (int)sizeof(*a) / 4; i++)
		if (x[i] != y[i])
			return 0;
	return 1;
}

/*
 * land takes what the kernel would take out of the tunnel by the same steps: packets of
 * connections that arrive carries, with the outer header that was seen to come through to the
 * VXLAN device. What stands for many (GSO) bears the tunnel's marks, which only the kernel can
 * clear; it is left to it unless it goes straight to a socket, with which the marks end. All
 * that is not carried is for arrive to count.
 */
static __always_inline int land_of(struct __sk_buff *skb, struct cpu *c, __u8 *data, int six)
{
	const __u32 at = sizeof(((struct outer *)0)->head);
	const struct outer *known;
	const struct pod *pod;
	struct outer o = {};
	struct headers h;
	struct flow *f;
	struct key k, own;
	__u16 check = 0;
	__u32 g, place;
	__u64 now;

	if (peek(skb, data, at, &k, 0, six) || !hinted(mix(&k)))
		return NEXT;
	f = find(&k, &own, six);
	if (!f)
		return NEXT;
	g = generation;
	now = bpf_ktime_get_coarse_ns();
	if (skb->gso_size)
		f->gso = now;
	/* A stream's full segments are worth more together: they are left to GRO, unless the NIC
	 * has had them together. */
	if (skb->gso_size ? now - f->ends >= EVIDENCE : k.protocol == TCP && skb->len >= mtu && now - f->gso >= BEHIND) {
		f->large = now;
		return NEXT;
	}
	if (now >= alive_until || skb->mark || skb->pkt_type != PACKET_HOST || believed(&f->in, &f->out, &k, now) ||
	    now - f->large < BEHIND || parse(skb, at, k.protocol, &h, &check, six))
		return NEXT;
	data = start(skb, at);
	if (!data)
		return NEXT;
	copy(&o.head, data, sizeof(o.head));
	o.nic = skb->ifindex;
	/* What the kernel would find wrong with it, or make something of (RFC 6040). */
	if (o.head.inner[6] != bpf_htons(six ? ETH_P_IPV6 : ETH_P_IP) || !whole((const void *)&o.head.version_words) || o.head.ip_protocol != UDP ||
	    bpf_ntohs(o.head.length) != skb->len - ETH_HLEN || bpf_ntohs(o.head.udp_length) != skb->len - ETH_HLEN - IP_HLEN ||
	    (o.head.tos & 3) != outer_tos(TOS(&h, six)))
		return NEXT;
	common(&o);
	/* Somebody vouches for it, or there is none. */
	o.head.udp_check = 0;
	place = f->landed_place;
	known = bpf_map_lookup_elem(&outers, &place);
	if (k.protocol == TCP && (!f->numbered || !fits(&f->in, &f->out, &h, six)))
		return NEXT;
	if (!f->landed || now - f->landed >= EVIDENCE || f->landed_generation != g || !known || !equal_outers(known, &o) || ask(&f->in, now))
		goto look;
	place = place_of(&f->in);
	pod = bpf_map_lookup_elem(&pods, &place);
	if (!pod || !pod->veth || unlike(&f->in, &h, six) || !mtu_fits(skb, &h, six) || !arrives(f, &k, &own, &h, six) || (!six && !whole(h.ip)))
		return NEXT;
	if (!inner_summed(skb, at + HLEN(six)) && !any_sum)
		return NEXT;
	if (bpf_skb_adjust_room(skb, -ROOM, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET | (six ? DECAP_L3_IPV6 : 0)))
		return NEXT;
	/* As skb_checksum_init does at the outer UDP: of the sums that the device vouches for, one
	 * less. */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	if (k.protocol == TCP)
		advance(f, 0, &h, now, six);
	return into(skb, c, pod, &h, &k, &own, six);
look:
	if (c->lands && now - c->landing.at < SOON)
		return NEXT;
	c->landing.at = now;
	c->landing.generation = g;
	keep(&c->landing.headers, &h, six);
	c->landing.outer = o;
	c->lands = 1;
	return NEXT;
}

SEC("tc")
int land(struct __sk_buff *skb)
{
	const __u32 at = sizeof(((struct outer *)0)->head);
	struct cpu *c = this_cpu();
	__u8 *data = field(skb, data);

	if (!c || (void *)data + ETH_HLEN + IP_HLEN > field(skb, data_end) || data[ETH_HLEN + 9] != UDP || skb->protocol != bpf_htons(ETH_P_IP))
		return NEXT;
	data = start(skb, at + IP_HLEN + 8);
	if (!data)
		return NEXT;
	return data[at] >> 4 == 6 ? land_of(skb, c, data, 1) : land_of(skb, c, data, 0);
}

/* met is when a packet met land, in short, and never 0. */
static __always_inline __u32 met(const struct cpu *c)
{
	return c->landing.at | 1;
}

static __always_inline int arrive_of(struct __sk_buff *skb, struct cpu *c, int six)
{
	const struct pod *pod;
	struct headers h;
	struct flow *f;
	__u32 g, place, landed = 0;
	struct key k, own;
	__u16 check = 0;
	__u64 hash, now;
	int why, ours = 0, in_step = 0;
	__u8 sum;

	why = meet(skb, c, &k, &hash, &h, &check, 0, six);
	if (why) {
		if (why == ODD_FLAGS) {
			unpick(hash);
			f = find(&k, &own, six);
			if (f)
				odd(&own, f, 0, arrives(f, &k, &own, &h, six), &h, bpf_ktime_get_coarse_ns(), six);
		}
		goto slow;
	}
	now = bpf_ktime_get_coarse_ns();
	f = find(&k, &own, six);
	if (f) {
		hint(hash);
		ours = (f->in.device == skb->ifindex || !f->in.device) && arrives(f, &k, &own, &h, six);
		in_step = k.protocol != TCP || (f->numbered && fits(&f->in, &f->out, &h, six));
		if (ours && in_step && k.protocol == TCP)
			advance(f, 0, &h, now, six);
	}
	g = generation;
	why = DEAD;
	if (now >= alive_until)
		goto slow;
	why = MARKED;
	if (skb->mark)
		goto slow;
	why = UNLIKE;
	if (skb->pkt_type != PACKET_HOST)
		goto slow;
	if (!f) {
		why = UNKNOWN;
		if (hinted(hash) && !worth(hash, now))
			goto slow;
		if (is_watched(0, k.pod))
			goto look;
		wish(c, &k, now);
		goto slow;
	}
	if (skb->gso_size && now - f->gso >= BEHIND)
		f->large = now;
	why = ASKED;
	if (c->lands == 1 && equal(&c->landing.headers, &h, six)) {
		c->lands = 0;
		if (c->landing.generation == g)
			landed = met(c);
		if (now >= f->in.not_before)
			goto look;
	}
	why = believed(&f->in, &f->out, &k, now);
	if (why) {
		if (now < f->in.not_before)
			goto slow;
		goto look;
	}
	why = WINDOW;
	if (!in_step)
		goto slow;
	why = ASKED;
	if (ask(&f->in, now))
		goto look;
	why = UNLIKE;
	place = place_of(&f->in);
	pod = bpf_map_lookup_elem(&pods, &place);
	if (!pod || !pod->veth || !ours || unlike(&f->in, &h, six))
		goto look;
	why = MALFORMED;
	if (!six && !whole(h.ip))
		goto slow;
	why = LARGE;
	if (!mtu_fits(skb, &h, six))
		goto slow;
	why = UNSUMMED;
	sum = summed(skb);
	if (sum != CHECKSUM_PARTIAL && sum != CHECKSUM_UNNECESSARY && !any_sum)
		goto slow;
	return into(skb, c, pod, &h, &k, &own, six);
look:
	/* Packets may come in a list, and all meet this program before the first goes on. */
	if (!c->in_stage || now - c->in.at >= SOON) {
		let_go(&c->in, &h, &k, skb, now, g, six);
		c->in.landed = landed;
		if (landed)
			c->lands = 2;
		c->in.anew = !in_step;
		c->in_stage = 1;
	}
slow:
	count(c, why);
	return NEXT;
}

SEC("tc")
int arrive(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c)
		return NEXT;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return arrive_of(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return arrive_of(skb, c, 1);
	count(c, OTHER);
	return NEXT;
}

static __always_inline int deliver_of(struct __sk_buff *skb, struct cpu *c, int six)
{
	struct passing *p = &c->in;
	struct net_device *dev;
	struct owner owner = {};
	struct front front = {};
	struct pod pod = {};
	struct headers h, was;
	struct key key, wire;
	struct flow *f;
	__u32 again, place;
	__u8 mac[12];
	__u64 hash;
	int why, translated = 0;

	if (skb->protocol != bpf_htons(six ? ETH_P_IPV6 : ETH_P_IP) || skb->vlan_present || load(skb, ETH_HLEN, p->key.protocol, &h, six) ||
	    bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)))
		return NEXT;
	keep(&was, &p->headers, six);
	wire = key = p->key;
	if (!six) {
		key = with_far(&wire, FAR(h.ip[3], HALF(h.l4[0], 0)));
		translated = !same_key(&key, &wire);
	}
	if (translated)
		translate(&was, 0, far_of(&key));
	if (!same(&was, &h, six)) {
		if (resemble(&was, &h, six))
			count(c, six ? moved(&was, &h) : REWRITTEN);
		return NEXT;
	}
	pod.veth = skb->ifindex;
	owner.link = skb->ifindex;
	__builtin_memcpy(owner.mac, mac, sizeof(owner.mac));
	if (!bpf_map_lookup_elem(&owners, &owner)) {
		count(c, UNLIKE);
		return NEXT; /* it may come by the right link yet */
	}
	c->in_stage = 0;
	p->entry = entry_of(skb);
	p->key = key;
	f = known(skb, c, p, 0, six);
	if (!f || p->at < f->in.not_before)
		return NEXT;
	/* Packets that are put into the pod do not meet what its driver would run; nor is it
	 * known of a device that is not found. */
	dev = pod_device(skb);
	why = !dev || has_xdp(dev) ? REWRITTEN : tracked(skb, p, f, 0, &again, six);
	if (translated && (!why || why == WINDOW)) {
		hash = mix(&wire);
		front.key = p->key;
		front.hint = hash % HINTS;
		if (bpf_map_update_elem(&fronts, &wire, &front, BPF_ANY)) {
			count(c, FULL);
			return NEXT;
		}
		hint(hash);
	}
	if (p->key.protocol == TCP && (!why || why == WINDOW))
		count_on(f, 0, p, six);
	if (why) {
		turn_down(c, &f->in, why, p->at);
		return NEXT;
	}
	__builtin_memcpy(pod.mac, mac, 6);
	__builtin_memcpy(pod.from, mac + 6, 6);
	place = place_of_pod(c, &pod);
	if (!place)
		return NEXT;
	if (f->out.device && f->out.device != pod.veth) {
		f->out.seen = 0;
		f->out.device = 0;
	}
	believe(&f->in, p, place, again, six);
	/* Only what the slow path lets through to its pod takes a place. */
	if (c->lands != 2 || p->landed != met(c))
		return NEXT;
	c->lands = 0;
	place = place_of_outer(c, &c->landing.outer);
	if (place) {
		f->landed_place = place;
		f->landed_generation = p->generation;
		f->landed = p->at;
	}
	return NEXT;
}

SEC("tc")
int deliver(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c || !c->in_stage)
		return NEXT;
	return c->in.key.six ? deliver_of(skb, c, 1) : deliver_of(skb, c, 0);
}

/* extends tells whether a header of IPv6 is one between its own and TCP's. */
static __always_inline int extends(__u8 protocol)
{
	return protocol == HOP_BY_HOP || protocol == ROUTING || protocol == DESTINATION || protocol == FRAGMENT_HEADER ||
	       protocol == AUTHENTICATION;
}

/* What guard finds of a packet. */
enum { NO_END, END, HIDDEN };

/* ending_of tells whether a packet ends a connection of TCP, and takes its headers, and the number
 * after its last byte. IP options or extension headers may be in between. So many that they hide what
 * is behind them nobody sends but to hide it: conntrack would look behind any number. */
static __always_inline int ending_of(const struct bpf_dynptr *packet, struct headers *h, __u32 *end, int six)
{
	__u32 buffer[10], at = HLEN(six);
	const __u8 *data = bpf_dynptr_slice(packet, 0, buffer, HLEN(six));
	const __u32 *l4;
	__u8 protocol;
	int i;

	if (!data)
		return NO_END;
	copy(h->ip, data, HLEN(six));
	if (!six) {
		if (data[9] != TCP || (HALF(h->ip[1], 1) & bpf_htons(0x1fff)))
			return NO_END;
		at = (data[0] & 0xf) * 4;
	} else {
		protocol = data[6];
		for (i = 0; i < HEADERS_MOST && protocol != TCP; i++) {
			if (!extends(protocol))
				return NO_END;
			data = bpf_dynptr_slice(packet, at, buffer, 8);
			if (!data || (protocol == FRAGMENT_HEADER && ((const __u16 *)data)[1] & bpf_htons(0xfff8)))
				return NO_END;
			at += protocol == AUTHENTICATION ? (data[1] + 2) * 4 : protocol == FRAGMENT_HEADER ? 8 : (data[1] + 1) * 8;
			protocol = data[0];
		}
		if (protocol != TCP)
			return extends(protocol) ? HIDDEN : NO_END;
	}
	l4 = bpf_dynptr_slice(packet, at, buffer, sizeof(h->l4));
	if (!l4)
		return NO_END;
	copy(h->l4, l4, sizeof(h->l4));
	*end = SEQ(h) + bpf_dynptr_size(packet) - at - (BYTE(h->l4[3], 0) >> 4) * 4;
	return (FLAGS(h) & (TCP_FIN | TCP_RST)) && !(FLAGS(h) & TCP_SYN) ? END : NO_END;
}

static __always_inline int guard_of(const struct bpf_dynptr *packet, int six)
{
	__be32 source, destination;
	struct key wire, own;
	struct headers h;
	struct flow *f = 0;
	int out = 1, what;
	struct cpu *c;
	__u32 end;

	what = ending_of(packet, &h, &end, six);
	if (likely(what == NO_END))
		return NF_ACCEPT;
	if (what == HIDDEN)
		goto drop;
	source = six ? digest(end_of(&h, 1)) : h.ip[3];
	destination = six ? digest(end_of(&h, 0)) : h.ip[4];
	key_of(&own, source, destination, h.l4[0], TCP, 1, six);
	/* What is not hinted at, leave and arrive do not count on. */
	if (hinted(mix(&own)))
		f = bpf_map_lookup_elem(&flows, &own);
	if (!f) {
		out = 0;
		key_of(&wire, source, destination, h.l4[0], TCP, 0, six);
		if (hinted(mix(&wire)))
			f = find(&wire, &own, six);
	}
	if (!f || f->numbered != BY_BOTH || !counted(f) || !same_key(&f->key, &own) || (six && !meets(f, &h, out)) ||
	    heeds(f, out, &h, end))
		return NF_ACCEPT;
drop:
	c = this_cpu();
	if (c)
		count(c, FORGED);
	return NF_DROP;
}

/*
 * guard drops, before conntrack, what would end a connection that is known here, and that
 * conntrack would not heed if it saw all of it. A liberal conntrack heeds anything: it
 * would forget the connection soon, or at the next forged packet.
 */
SEC("netfilter")
int guard(struct bpf_nf_ctx *ctx)
{
	struct __sk_buff *skb = (void *)ctx->skb;
	struct bpf_dynptr packet;
	__u8 buffer[4], *data;

	if (bpf_dynptr_from_skb(skb, 0, &packet))
		return NF_ACCEPT;
	data = bpf_dynptr_slice(&packet, 0, buffer, sizeof(buffer));
	if (!data)
		return NF_ACCEPT;
	return data[0] >> 4 == 6 ? guard_of(&packet, 1) : guard_of(&packet, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
