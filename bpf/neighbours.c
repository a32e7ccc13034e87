//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A filter of a netlink socket that listens to neighbours: of what bridges learn it lets
 * through what is about Ethernet addresses that matter, and all else.
 *
 * A bridge learns an address from each frame with a source that it has not seen, and announces
 * it. A pod that makes such addresses up would keep whoever listens busy, and what he is to hear
 * would be lost among them. Here they cost no more than this program, which runs while the
 * pod's own frame is taken in.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/neighbour.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <bpf/bpf_helpers.h>

#define AF_BRIDGE 7 /* include/linux/socket.h */

/* How much of a message goes on: all of it, or none. */
#define ALL -1
#define NONE 0

/* How many addresses may matter. */
#define ADDRESSES 32768

struct address {
	__u8 mac[ETH_ALEN];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u8);
} matter SEC(".maps");

/* What a bridge announces begins with (fdb_fill_info in net/bridge/br_fdb.c). One that begins
 * otherwise is let through: a VXLAN device's has no master. */
struct learned {
	struct nlmsghdr head;
	struct ndmsg about;
	struct nlattr address_head;
	struct address address;
	__u8 zero[2];
	struct nlattr master_head;
};

SEC("socket")
int hear(struct __sk_buff *skb)
{
	struct learned m;

	if (bpf_skb_load_bytes(skb, 0, &m, sizeof(m)) ||
	    (m.head.nlmsg_type != RTM_NEWNEIGH && m.head.nlmsg_type != RTM_DELNEIGH) || m.about.ndm_family != AF_BRIDGE ||
	    m.address_head.nla_type != NDA_LLADDR || m.address_head.nla_len != NLA_HDRLEN + ETH_ALEN ||
	    m.master_head.nla_type != NDA_MASTER)
		return ALL;
	return bpf_map_lookup_elem(&matter, &m.address) ? ALL : NONE;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
