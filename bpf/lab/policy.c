// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Network policies for a node's pods, modelled on Cilium's (bpf/lib/policy.h and
 * bpf/lib/conntrack.h there): the source address of a new connection has an identity,
 * and the pod has an entry for each identity that some policy allows. The cost does
 * not depend on the number of policies.
 *
 *   policy_from_pod   ingress of a pod's veth on the node: remembers the connections
 *                     that the pod opens, so that their replies are accepted
 *   policy_to_pod     egress of that veth or, where programs redirect packets past it,
 *                     ingress of the NIC: accepts packets of known connections, and
 *                     those that a policy allows
 *
 * A pod without an entry in the map pods has no policies. ICMP always passes: policies
 * cover TCP and UDP. For fragments only the addresses count.
 */
#include "address.h"

/* The pods of this node that have policies, each with a number. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1024);
	__type(key, struct prefix);
	__type(value, __u32);
} pods SEC(".maps");

/* The identity of each address that a policy names. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct prefix);
	__type(value, __u32);
} identities SEC(".maps");

/* The policies of a pod allow connections from an identity. */
struct entry {
	__u32 pod;
	__u32 identity;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct entry);
	__type(value, __u8);
} allowed SEC(".maps");

/* A connection, in the direction of the packet that opened it. */
struct connection {
	struct address from, to;
	__be16 from_port, to_port;
	__u32 protocol;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct connection);
	__type(value, __u8);
} connections SEC(".maps");

enum kind { PASS, WITHOUT_PORTS, OPENS, CONTINUES };

/* parse fills in the connection of a packet. PASS: policies do not cover it. */
static __always_inline enum kind parse(struct __sk_buff *skb, struct connection *c)
{
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip;
	struct tcphdr tcp;
	int at = ETH_HLEN;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, at, &ip.v4, sizeof(ip.v4)))
			return PASS;
		c->from = (struct address){{0, 0, bpf_htonl(0xffff), ip.v4.saddr}};
		c->to = (struct address){{0, 0, bpf_htonl(0xffff), ip.v4.daddr}};
		c->protocol = ip.v4.protocol;
		if (ip.v4.frag_off & bpf_htons(IP_OFFSET | IP_MF))
			return WITHOUT_PORTS;
		at += ip.v4.ihl * 4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, at, &ip.v6, sizeof(ip.v6)))
			return PASS;
		__builtin_memcpy(&c->from, &ip.v6.saddr, sizeof(c->from));
		__builtin_memcpy(&c->to, &ip.v6.daddr, sizeof(c->to));
		c->protocol = ip.v6.nexthdr;
		at += sizeof(ip.v6);
	} else {
		return PASS;
	}
	switch (c->protocol) {
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return PASS;
	case IPPROTO_TCP:
		if (bpf_skb_load_bytes(skb, at, &tcp, sizeof(tcp)))
			return WITHOUT_PORTS;
		break;
	case IPPROTO_UDP:
		if (bpf_skb_load_bytes(skb, at, &tcp, sizeof(struct udphdr)))
			return WITHOUT_PORTS;
		break;
	default:
		return WITHOUT_PORTS;
	}
	c->from_port = tcp.source; /* where UDP has it, too */
	c->to_port = tcp.dest;
	return c->protocol == IPPROTO_TCP && tcp.syn && !tcp.ack ? OPENS : CONTINUES;
}

/* known tells whether the connection of a packet is known, in either direction. */
static __always_inline int known(const struct connection *c)
{
	struct connection back = {
		.from = c->to, .to = c->from, .from_port = c->to_port, .to_port = c->from_port, .protocol = c->protocol,
	};

	return bpf_map_lookup_elem(&connections, c) || bpf_map_lookup_elem(&connections, &back);
}

/* remember adds a connection to the map. If that fails, the next packet tries again. */
static __always_inline void remember(const struct connection *c)
{
	__u8 is = 1;

	bpf_map_update_elem(&connections, c, &is, BPF_ANY);
}

SEC("tc")
int policy_from_pod(struct __sk_buff *skb)
{
	struct connection c = {};
	enum kind kind = parse(skb, &c);

	if (kind == OPENS || (kind == CONTINUES && !known(&c)))
		remember(&c);
	return NEXT;
}

SEC("tc")
int policy_to_pod(struct __sk_buff *skb)
{
	struct connection c = {};
	enum kind kind = parse(skb, &c);
	struct prefix whole = {.bits = 128};
	struct entry entry = {};
	__u32 *found;

	if (kind == PASS || (kind == CONTINUES && known(&c)))
		return NEXT;
	whole.address = c.to;
	found = bpf_map_lookup_elem(&pods, &whole);
	if (!found)
		return NEXT;
	entry.pod = *found;
	whole.address = c.from;
	found = bpf_map_lookup_elem(&identities, &whole);
	if (!found)
		return DROP;
	entry.identity = *found;
	if (!bpf_map_lookup_elem(&allowed, &entry))
		return DROP;
	if (kind != WITHOUT_PORTS)
		remember(&c);
	return NEXT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
