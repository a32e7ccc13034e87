// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A socket filter for netlink's neighbour notifications: it drops those about bridges' FDB
 * entries, except for the MAC addresses in a map, and passes all others.
 *
 * A bridge learns a MAC address from each frame with a new source, and sends a notification. A
 * pod that spoofs addresses would keep the subscriber busy and overrun the socket's buffer, and
 * relevant notifications would be lost. With the filter, a spoofed address costs one run of this
 * program, while the kernel receives the pod's frame.
 */
#include <linux/neighbour.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>

#include "lib/net.h"

/* The number of bytes of a message that pass. */
#define ALL -1
#define NONE 0

/* The size of the map. */
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
} subscribed SEC(".maps");

/* The beginning of a bridge's notification (fdb_fill_info in net/bridge/br_fdb.c). Messages that
 * begin otherwise pass, such as those of VXLAN devices, which lack NDA_MASTER. */
struct learned {
	struct nlmsghdr head;
	struct ndmsg about;
	struct nlattr address_head;
	struct address address;
	__u8 zero[2];
	struct nlattr master_head;
};

SEC("socket")
int filter_neighbours(struct __sk_buff *skb)
{
	struct learned m;

	if (bpf_skb_load_bytes(skb, 0, &m, sizeof(m)) ||
	    (m.head.nlmsg_type != RTM_NEWNEIGH && m.head.nlmsg_type != RTM_DELNEIGH) || m.about.ndm_family != AF_BRIDGE ||
	    m.address_head.nla_type != NDA_LLADDR || m.address_head.nla_len != NLA_HDRLEN + ETH_ALEN ||
	    m.master_head.nla_type != NDA_MASTER)
		return ALL;
	return bpf_map_lookup_elem(&subscribed, &m.address) ? ALL : NONE;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
