// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Socket-level load balancing of Services, modelled on Cilium's (bpf/bpf_sock.c
 * there): a socket connects to a backend in place of the Service, so that no packet
 * needs NAT.
 *
 *   connect       TCP and connected UDP: selects a random backend
 *   sendmsg       unconnected UDP: selects one for each datagram
 *   recvmsg       UDP: translates the backend's address back to the Service's
 *   getpeername   returns the Service's address to the application
 *
 * All are attached to a cgroup, and run for its sockets. The cost does not depend on
 * the number of backends: one look-up for the Service and one for the backend.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define OK 1 /* the return value that allows the call */

/*
 * An address as in the system calls, in network order. IPv4 addresses are mapped into
 * IPv6 (RFC 4291, section 2.5.5.2), as IPv6 sockets use them, so that sockets of both
 * families find the same Service.
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

/* A socket and its backend. The map peers stores the Service that the socket asked for. */
struct peer {
	__u64 socket;
	struct address backend;
	__u32 unused; /* explicit, because padding would be uninitialised */
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

/* LRU, because nothing deletes the entries of closed sockets; as large as Cilium's. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct peer);
	__type(value, struct address);
} peers SEC(".maps");

/* get reads the address of the call. The IP version is a compile-time constant. */
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
 * put replaces the address of the call. A Service and its backends have the same IP
 * version, so a mapped address stays mapped: the kernel has chosen its path already.
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

/* translate replaces the address of a Service by that of a backend. */
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

/* restore replaces the address of a backend by that of the Service that the socket used. */
static __always_inline int restore(struct bpf_sock_addr *ctx, int version)
{
	struct peer peer = {.socket = bpf_get_socket_cookie(ctx)};
	struct address *service;

	get(ctx, version, &peer.backend);
	service = bpf_map_lookup_elem(&peers, &peer);
	if (service)
		put(ctx, version, service);
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
