//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Services of a cluster, translated where a socket connects, after Cilium's
 * datapath (bpf/bpf_sock.c there): what is sent has a backend's address from the
 * first packet on, and no packet is looked at.
 *
 *   connect       TCP, and UDP that is connected: takes a backend by chance
 *   sendmsg       UDP that is not: takes one for each datagram
 *   recvmsg       UDP: what came from a backend came from the service
 *   getpeername   as the application was told, so it is told again
 *
 * All are for a cgroup, whose sockets see them. The cost is the same for any number
 * of backends: one look-up for the service and one for the backend.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define OK 1 /* what these programs return to let the call go on */

/*
 * An address as the socket calls have it, in network order. IPv4 is mapped into IPv6
 * (RFC 4291, section 2.5.5.2), as sockets of IPv6 that speak it have it: whichever way
 * an application asks, it is the same service.
 */
struct address {
	__be32 ip[4];
	__be16 port;
	__u16 protocol;
};

struct service {
	__u32 id;
	__u32 backends;
};

struct slot {
	__u32 service;
	__u32 number; /* 0 to backends-1 */
};

/* What a socket was told that a backend's address is. */
struct peer {
	__u64 socket;
	struct address backend;
	__u32 unused; /* would be padding, which nobody sets */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct address);
	__type(value, struct service);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct slot);
	__type(value, struct address);
} backends SEC(".maps");

/* Sockets that are gone make room for others; of as many as Cilium keeps. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct peer);
	__type(value, struct address);
} peers SEC(".maps");

/* get is the address that the call has, of an IP version that is known when this is compiled. */
static __always_inline void get(struct bpf_sock_addr *ctx, int version, struct address *a)
{
	if (version == 4) {
		a->ip[0] = 0;
		a->ip[1] = 0;
		a->ip[2] = bpf_htonl(0xffff);
		a->ip[3] = ctx->user_ip4;
	} else {
		a->ip[0] = ctx->user_ip6[0];
		a->ip[1] = ctx->user_ip6[1];
		a->ip[2] = ctx->user_ip6[2];
		a->ip[3] = ctx->user_ip6[3];
	}
	a->port = ctx->user_port;
	a->protocol = ctx->protocol;
}

/*
 * put gives the call another. A service and its backends are of one version, so what
 * was mapped stays mapped: the kernel has chosen by it already.
 */
static __always_inline void put(struct bpf_sock_addr *ctx, int version, const struct address *a)
{
	if (version == 4) {
		ctx->user_ip4 = a->ip[3];
	} else {
		ctx->user_ip6[0] = a->ip[0];
		ctx->user_ip6[1] = a->ip[1];
		ctx->user_ip6[2] = a->ip[2];
		ctx->user_ip6[3] = a->ip[3];
	}
	ctx->user_port = a->port;
}

/* translate gives the call the address of a backend, if its own is a service's. */
static __always_inline int translate(struct bpf_sock_addr *ctx, int version)
{
	struct address to;
	struct service *service;
	struct address *backend;
	struct slot slot;
	struct peer peer = {};

	get(ctx, version, &to);
	service = bpf_map_lookup_elem(&services, &to);
	if (!service || !service->backends)
		return OK;
	slot.service = service->id;
	slot.number = bpf_get_prandom_u32() % service->backends;
	backend = bpf_map_lookup_elem(&backends, &slot);
	if (!backend)
		return OK;
	peer.socket = bpf_get_socket_cookie(ctx);
	peer.backend = *backend;
	bpf_map_update_elem(&peers, &peer, &to, BPF_ANY);
	put(ctx, version, &peer.backend);
	return OK;
}

/* restore gives the call the address that the application knows. */
static __always_inline int restore(struct bpf_sock_addr *ctx, int version)
{
	struct peer peer = {.socket = bpf_get_socket_cookie(ctx)};
	struct address *told;

	get(ctx, version, &peer.backend);
	told = bpf_map_lookup_elem(&peers, &peer);
	if (told)
		put(ctx, version, told);
	return OK;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return translate(ctx, 4);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return translate(ctx, 4);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return restore(ctx, 4);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return restore(ctx, 4);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return translate(ctx, 6);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return translate(ctx, 6);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return restore(ctx, 6);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return restore(ctx, 6);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
