// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A fast path for pods: packets of established connections go from the pod's veth to the NIC or into another pod, and
 * from the NIC or the VXLAN device into the pod, past bridge, routing and netfilter of the node. The
 * node encapsulates them as VXLAN, routes them as they are, or bridges them between its pods.
 *
 *   redirect_pod    tcx ingress of a pod's veth       encapsulates or routes, redirects to the NIC or into another pod
 *   observe_vxlan   tcx egress of the VXLAN device  ┐ observe what the slow path
 *   observe_nic     tcx egress of the NIC           ┘ writes into an outgoing probe
 *   observe_router  the same, if the NIC also sends packets of pods without outer headers
 *   decap_nic       tcx ingress of the NIC            decapsulates, redirects into the pod
 *   redirect_vxlan  tcx ingress of the VXLAN device ┐ redirect into the pod what arrives
 *   redirect_nic    tcx ingress of the NIC          ┘ without outer headers
 *   observe_pod     tcx egress of a pod's veth        observes what the slow path delivers
 *   drop_forged     netfilter, before conntrack       drops forged FINs and RSTs
 *   recover_flow    run by the agent                  adds the flow of a connection that a killed agent left
 *   read_conntrack  run by the agent                  reads the sequence numbers of a conntrack entry
 *
 * The fast path looks up no route and no neighbour. It writes the headers that the kernel itself
 * wrote for the same connection within the last second: the observe programs compare these, byte by byte, with what
 * the redirect programs would have written. A flow takes the fast path if
 * the slow path forwarded its packets in both directions within that second, in the current
 * generation, and conntrack has the connection as established. If the kernel translates the address
 * of a Service to that of a backend, so does the fast path.
 *
 * The outer headers are IPv4. The inner ones are IPv4 or IPv6: each program checks the version once,
 * and passes is_ipv6 on as a constant. The fast path does not translate IPv6.
 *
 * The programs do not change a packet that takes the slow path, but redirect_nic cuts off the padding of short frames.
 *
 * The agent attaches redirect_pod and observe_pod only to the links of pods with an eligible connection.
 * The programs of the VXLAN device or NIC find those by sampling, and ask the agent to attach. Only redirect_pod sees
 * connections between pods of the node: the agent attaches it to busy links for a second to sample them.
 *
 * The programs are here. The headers have their parts:
 *
 *   lib/net.h, kernel.h      protocols; the kernel's types, and its functions for programs
 *   packet.h, csum.h, skb.h  headers and checksums; fields of the kernel's sk_buff
 *   metadata.h               what queues, filters and sockets read besides the packet
 *   key.h, flow.h, seq.h     keys and state of connections; TCP sequence numbers
 *   run.h                    how long packets may wait in queues, so that no packet overtakes another
 *   nat.h, vxlan.h, pod.h    translation of the peer; outer headers; delivery into pods
 *   conntrack.h              conntrack look-ups
 *   probe.h, learn.h         packets that the programs recognise at later hooks; flows are learned from these
 *   bloom.h, sampling.h      which packets the programs look at
 *   segment.h, ending.h      TCP segments with any headers; how flows follow those that take the slow path
 *   cpu.h, index.h           state of each CPU; templates and links by index
 *   control.h, event.h       how the agent controls the programs; requests to the agent
 *   reason.h                 why packets take the slow path
 */
#include "conntrack.h"
#include "ending.h"
#include "pod.h"
#include "learn.h"
#include "sampling.h"
#include "skb.h"
#include "vxlan.h"

/* After the kernel had to decapsulate a packet of a flow, decap_nic leaves the flow to the kernel for this
 * long: packets that decap_nic decapsulates would overtake that one. */
#define REORDER_WINDOW (50 * MS)

/* check_forwarding returns 0 if the lease is valid and the packet has no mark, which rules of the slow path may read. Otherwise
 * it returns the reason. */
static __always_inline int check_forwarding(const struct __sk_buff *skb, __u64 now)
{
	if (now >= lease_expires)
		return REASON_LEASE_EXPIRED;
	return skb->mark ? REASON_SKB_MARK : 0;
}

/* Where a packet for a pod has come from. */
enum source { FROM_VXLAN, FROM_NIC, FROM_POD };

/* start_in_probe starts an incoming probe, unless one is under way: the kernel may pass a whole list of packets here before the first
 * reaches observe_pod. decapped is decap_id of a packet that decap_nic saw, or 0. */
static __always_inline void start_in_probe(struct __sk_buff *skb, struct cpu_state *c, const struct headers *h, const struct key *k, __u64 now, __u32 g,
					   __u32 decapped, int seq_unknown, enum source source, int is_ipv6)
{
	if (c->in_stage && now - c->in.at < PROBE_TTL)
		return;
	start_probe(&c->in, h, k, skb, now, g, is_ipv6);
	c->in.decapped = decapped;
	if (decapped)
		c->decap_stage = 2;
	c->in.seq_unknown = seq_unknown;
	c->in.from_pod = source == FROM_POD;
	c->in_stage = source != FROM_POD || !bpf_skb_load_bytes(skb, 0, c->in.mac, sizeof(c->in.mac));
}

/* redirect_known redirects into the pod a packet of a known flow that has no outer headers. */
static __always_inline int redirect_known(struct __sk_buff *skb, struct cpu_state *c, struct flow *f, const struct key *k, const struct key *own,
					  const struct headers *h, __u64 now, enum source source, int is_ipv6)
{
	const struct pod_link *pod;
	__u32 g, index, decapped = 0;
	int reason, ours, in_sequence;
	const __u8 *data;
	__u8 sum;

	reason = REASON_MISMATCH;
	if (source != FROM_POD && skb->pkt_type != PACKET_HOST)
		goto slow;
	ours = (f->in.device == skb->ifindex || !f->in.device) && to_pod(f, k, own, h, is_ipv6);
	in_sequence = k->protocol != IPPROTO_TCP || follow(f, 0, ours, h, seq_end(h, is_ipv6), now);
	g = generation;
	reason = check_forwarding(skb, now);
	if (reason)
		goto slow;
	if (source != FROM_POD && skb->gso_size && now - f->gso >= REORDER_WINDOW)
		f->left = now;
	reason = REASON_REVALIDATE;
	if (source == FROM_VXLAN && c->decap_stage == 1 && begins_with(h, &c->decap_probe.headers, is_ipv6) && same_metadata(skb, &c->decap_probe.metadata)) {
		c->decap_stage = 0;
		if (c->decap_probe.generation == g)
			decapped = decap_id(c);
		if (ours) {
			f->in.revalidated = now;
			start_detour(&f->in);
		}
		if (now >= f->in.backoff_until)
			goto probe;
	}
	reason = check_flow(&f->in, &f->out, k, now);
	if (reason) {
		if (now < f->in.backoff_until)
			goto slow;
		goto probe;
	}
	reason = REASON_TCP_WINDOW;
	if (!in_sequence)
		goto slow;
	reason = REASON_REVALIDATE;
	if (ours && revalidate_due(&f->in, now))
		goto detour;
	if (behind_detour(&f->in, now))
		goto slow;
	reason = REASON_MISMATCH;
	if (!ours)
		goto probe;
	index = template_of(&f->in);
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if (!pod || !pod->veth || header_changed(&f->in, h, is_ipv6))
		goto detour;
	data = source == FROM_POD ? pull_data(skb, ETH_HLEN) : 0;
	if (source == FROM_POD && (!data || !equal_macs(data, pod->sent)))
		goto detour;
	reason = REASON_MALFORMED;
	if (!is_ipv6 && !ip_csum_ok(h->ip))
		goto slow;
	reason = REASON_EXCEEDS_MTU;
	if (!fits_mtu(skb, h, is_ipv6)) {
		start_detour(&f->in);
		goto slow;
	}
	reason = REASON_CSUM_UNVERIFIED;
	sum = csum_state(skb);
	if (sum != CHECKSUM_PARTIAL && sum != CHECKSUM_UNNECESSARY && !skip_csum_checks)
		goto slow;
	reason = source == FROM_VXLAN ? REASON_FAST_IN_VXLAN : source == FROM_NIC ? REASON_FAST_IN_ROUTED : REASON_FAST_IN_LOCAL;
	return redirect_to_pod(skb, c, pod, h, reason, peer_of(k), peer_of(own), is_ipv6);
detour:
	start_detour(&f->in);
probe:
	start_in_probe(skb, c, h, k, now, g, decapped, !in_sequence, source, is_ipv6);
slow:
	count(c, reason);
	return NEXT;
}

/* redirect_in redirects a packet for a pod that has arrived without outer headers, at the VXLAN device or at the NIC. Most packets at
 * the NIC are not for pods: these are not counted. */
static __always_inline int redirect_in(struct __sk_buff *skb, struct cpu_state *c, enum source source, int is_ipv6)
{
	struct headers h;
	struct flow *f;
	struct key k, own;
	__u16 check = 0;
	__u64 hash, now;
	__u32 g;
	int reason;

	reason = read_key(skb, &k, 0, is_ipv6);
	if (reason)
		goto refused;
	hash = hash_key(&k);
	if (likely(!bloom_test(hash)) && !admit_sampled(skb, c, ETH_HLEN, &k, hash, is_ipv6)) {
		reason = REASON_NO_FLOW;
		goto refused;
	}
	if (source == FROM_NIC && unlikely(skb->len <= ETH_ZLEN))
		cut_padding(skb, is_ipv6);
	reason = parse_headers(skb, ETH_HLEN, k.protocol, &h, &check, is_ipv6);
	if (reason)
		goto refused;
	now = bpf_ktime_get_coarse_ns();
	f = find_flow(&k, &own, is_ipv6);
	if (f)
		return redirect_known(skb, c, f, &k, &own, &h, now, source, is_ipv6);
	g = generation;
	reason = check_forwarding(skb, now);
	if (reason)
		goto slow;
	reason = REASON_MISMATCH;
	if (skb->pkt_type != PACKET_HOST)
		goto slow;
	reason = REASON_NO_FLOW;
	if (bloom_test(hash) && !admit(hash, now))
		goto slow;
	if (!is_watched(0, k.pod)) {
		if (source == FROM_NIC && !is_forwarded(skb, &h, 0, is_ipv6))
			return NEXT;
		request_attach(c, &k, now);
	} else {
		start_in_probe(skb, c, &h, &k, now, g, 0, 1, source, is_ipv6);
	}
	goto slow;
refused:
	if (is_refused(reason))
		follow_refused(skb, 0);
	if (source == FROM_NIC && (reason == REASON_NO_FLOW || reason == REASON_NOT_TCP_UDP))
		return NEXT;
slow:
	count(c, reason);
	return NEXT;
}

/* send_from_pod forwards a packet from a pod to its peer: to the NIC, or into a pod of the same node. */
static __always_inline int send_from_pod(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const struct encap_template *outer = 0;
	const struct pod_link *pod = 0;
	struct headers h;
	struct flow *f;
	__u32 g, index, end;
	struct key k, own;
	__u16 check = 0;
	__u64 hash, now, wire_peer = 0;
	int reason, encapsulated, ours = 0, in_sequence = 0, is_incoming = 0;
	__u8 *data;

	reason = read_key(skb, &k, 1, is_ipv6);
	if (reason)
		goto refused;
	hash = hash_key(&k);
	f = bloom_test(hash) ? bpf_map_lookup_elem(&flows, &k) : 0;
	if (!f) {
		own = reverse(&k);
		f = find_flow_between(skb, &own, is_ipv6);
		is_incoming = f != 0;
		if (!f && likely(!bloom_test(hash)) && !admit_sampled(skb, c, ETH_HLEN, &k, hash, is_ipv6)) {
			reason = REASON_NO_FLOW;
			goto slow;
		}
	}
	reason = parse_headers(skb, ETH_HLEN, k.protocol, &h, &check, is_ipv6);
	if (reason)
		goto refused;
	now = bpf_ktime_get_coarse_ns();
	if (is_incoming) {
		k = reverse(&k);
		return redirect_known(skb, c, f, &k, &own, &h, now, FROM_POD, is_ipv6);
	}
	if (f) {
		wire_peer = *(const volatile __u64 *)&f->wire_peer;
		barrier(); /* read the peer before from_pod checks whose it is */
		ours = from_pod(skb, f, &k, &h, is_ipv6);
		end = seq_end(&h, is_ipv6);
		if (unlikely(f->recovering) && ours && recover_seq(f, &h, end))
			return DROP;
		in_sequence = k.protocol != IPPROTO_TCP || follow(f, 1, ours, &h, end, now);
	}
	g = generation;
	reason = check_forwarding(skb, now);
	if (reason)
		goto slow;
	if (!f) {
		reason = REASON_NO_FLOW;
		if (bloom_test(hash) && !admit(hash, now))
			goto slow;
		request_attach_between(skb, c, &k, &h, now, is_ipv6); /* no program at another device samples its packets */
		if (is_watched(skb->ifindex, 0))
			goto probe;
		goto slow;
	}
	/* A flow belongs to the pod whose packets validated it. */
	reason = REASON_MISMATCH;
	if (f->out.device && !ours)
		goto slow;
	reason = check_flow(&f->out, &f->in, &k, now);
	if (reason) {
		if (now < f->out.backoff_until)
			goto slow;
		goto probe;
	}
	reason = REASON_TCP_WINDOW;
	if (!in_sequence) {
		if (f->seq_state)
			goto slow;
		goto probe; /* which makes the numbers known again */
	}
	index = template_of(&f->out);
	reason = REASON_REVALIDATE;
	if (revalidate_due(&f->out, now))
		goto detour;
	if (index & TO_POD && behind_detour(&f->out, now))
		goto slow;
	reason = REASON_MISMATCH;
	if (index & TO_POD)
		pod = peer_pod(index);
	else
		outer = bpf_map_lookup_elem(&encap_templates, &index);
	data = pull_data(skb, ETH_HLEN);
	if (!(pod ? pod->veth : outer ? outer->nic : 0) || !data || !equal_macs(data, f->mac) || header_changed(&f->out, &h, is_ipv6))
		goto detour;
	reason = REASON_MALFORMED;
	if (!is_ipv6 && !ip_csum_ok(h.ip))
		goto slow;
	reason = REASON_EXCEEDS_MTU;
	if (!fits_mtu(skb, &h, is_ipv6) || segment_length(skb, &h, is_ipv6) > f->out.mtu) {
		if (index & TO_POD)
			start_detour(&f->out);
		goto slow;
	}
	reason = REASON_CSUM_UNVERIFIED;
	if (!csum_offloaded(skb, ETH_HLEN + HLEN(is_ipv6)) && !skip_csum_checks)
		goto slow;
	if (pod)
		return redirect_to_pod(skb, c, pod, &h, REASON_FAST_OUT_LOCAL, peer_of(&k), wire_peer, is_ipv6);
	if (!outer) /* for the verifier */
		goto slow;
	encapsulated = is_encap(outer);
	if (encapsulated)
		reason = encapsulate(skb, &h, outer, check, wire_peer, is_ipv6);
	else
		reason = forward_headers(skb, outer->head.to, 1, &h, 1, peer_of(&k), wire_peer, is_ipv6);
	if (reason < 0)
		return DROP;
	if (reason)
		goto slow;
	set_metadata_at_nic(skb, &h, encapsulated, is_ipv6);
	count(c, encapsulated ? REASON_FAST_OUT_VXLAN : REASON_FAST_OUT_ROUTED);
	return bpf_redirect(outer->nic, 0);
detour:
	if (index & TO_POD)
		start_detour(&f->out);
probe:
	start_probe(&c->out, &h, &k, skb, now, g, is_ipv6);
	c->out.delivery_time = delivery_time(skb);
	c->out.priority = priority_of(skb, &h, is_ipv6);
	c->out.queue = skb->queue_mapping;
	c->out.check = check;
	c->out.seq_unknown = !in_sequence;
	c->out.socket_ended = ends_at_socket(skb, &h, &k, is_ipv6);
	c->out_stage = !bpf_skb_load_bytes(skb, 0, c->out.mac, sizeof(c->out.mac));
	goto slow;
refused:
	if (is_refused(reason) && follow_refused(skb, 1) == DROP)
		return DROP;
slow:
	count(c, reason);
	return NEXT;
}

SEC("tc")
int redirect_pod(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	c->out_stage = 0;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return send_from_pod(skb, c, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return send_from_pod(skb, c, 1);
	count(c, REASON_NOT_TCP_UDP);
	return NEXT;
}

/* hops_of_probe returns 1 if a packet is the outgoing probe after the node has routed it, 0 after the node has bridged it, or -1. */
static __always_inline int hops_of_probe(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct probe *p = &c->out;
	struct headers h;
	__u64 wire_peer;
	int hops;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || load_headers(skb, ETH_HLEN, p->key.protocol, &h, is_ipv6))
		return -1;
	wire_peer = is_ipv6 ? p->wire_peer : PEER(h.ip[4], HALF(h.l4[0], 1));
	if (wire_peer != p->wire_peer) {
		p->check = csum_replace(p->check, p->headers.ip[4], wire_peer);
		nat_headers(&p->headers, 1, wire_peer);
		p->wire_peer = wire_peer;
	}
	hops = hops_between(&p->headers, &h, is_ipv6);
	if (hops >= 0)
		p->ct = ct_entry(skb);
	else if (equal_except_nat(&p->headers, &h, is_ipv6))
		count(c, is_ipv6 ? nat_reason(&p->headers, &h) : REASON_REWRITTEN);
	return hops;
}

static __always_inline int observe_vxlan_ip(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	if (hops_of_probe(skb, c, is_ipv6) == 1) {
		c->out.overlay = skb->ifindex;
		c->out_stage = 2;
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
		return sample_unwatched(skb, c, 0, 0);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? sample_unwatched(skb, c, 0, 1) : NEXT;
}

/* check_encapsulation returns 0 if redirect_pod would write what the VXLAN device wrote, or the reason why not. It stores the
 * template of the outer headers, and the longest inner packet. */
static __always_inline int check_encapsulation(struct __sk_buff *skb, const struct probe *p, const struct headers *h, struct encap_template *o, __u16 *longest, int is_ipv6)
{
	const struct vxlan_device *v = bpf_map_lookup_elem(&vxlan_devices, &p->overlay);
	__u16 sum = o->head.udp_check;

	if (sum && !p->gso)
		sum = udp_sum(o, o->head.port, o->head.udp_length, p->check, h, is_ipv6);
	if (!v || !is_expected_outer(o, v, is_ipv6) || !is_metadata_at_nic(skb, p->priority, p->delivery_time, 0) ||
	    o->head.length != bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD) ||
	    o->head.udp_length != bpf_htons(LENGTH(h, is_ipv6) + ENCAP_OVERHEAD - IP_HLEN) || o->head.tos != outer_tos(TOS(h, is_ipv6)) ||
	    !is_source_port(skb, o->head.port) || sum != o->head.udp_check)
		return REASON_REWRITTEN;
	*longest = encap_mtu(skb, o, p->overlay);
	clear_per_packet(o);
	return 0;
}

/* learn_out learns from an outgoing probe that has reached the NIC (with outer headers o) or another pod (with link to). */
static __always_inline int learn_out(struct __sk_buff *skb, struct cpu_state *c, const struct headers *h, struct encap_template *o, const struct pod_link *to, int is_ipv6)
{
	const struct pod_link *pod;
	struct probe *p = &c->out;
	struct flow *f;
	__u32 interval, index;
	__u16 longest = 0;
	int reason;

	f = find_or_create_flow(skb, c, p, 1, is_ipv6);
	if (!f || p->at < f->out.backoff_until)
		return NEXT;
	/* Packets from the pod must come from the link at which packets for it are delivered. If a bridge connects two pods, an
	 * entry in pod_links has the sender's MAC address: a pod that makes some up must not fill that map. */
	index = f->in.template;
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if ((pod && pod->veth && pod->veth != p->device) || (to && !to->hops && !owns_mac(p->device, p->mac + ETH_ALEN))) {
		count(c, REASON_MISMATCH);
		return NEXT;
	}

	reason = !same_metadata(skb, &p->metadata) ? REASON_REWRITTEN : 0;
	if (!reason && to) {
		reason = reaches_pod(skb) && is_known_device(p->device, 1) ? 0 : REASON_REWRITTEN;
		longest = mtu;
	} else if (!reason && skb->mark) {
		reason = REASON_REWRITTEN;
	} else if (!reason && is_encap(o)) {
		reason = check_encapsulation(skb, p, h, o, &longest, is_ipv6);
	} else if (!reason) {
		if (!bpf_map_lookup_elem(&routers, &o->nic) || !is_metadata_at_nic(skb, p->priority, p->delivery_time, p->queue))
			reason = REASON_REWRITTEN;
		else
			longest = route_mtu(skb, h, is_ipv6);
	}
	if (reason)
		goto ineligible;
	reason = check_conntrack(skb, p, f, 1, &interval, is_ipv6);
	if (reason && reason != REASON_TCP_WINDOW)
		goto ineligible;
	if (p->key.protocol == IPPROTO_TCP)
		record_seq(f, 1, p, is_ipv6);
	if (reason)
		goto ineligible;
	reason = REASON_EXCEEDS_MTU;
	if (!longest)
		goto ineligible;
	index = to ? pod_link_of(c, to) : template_for(c, o);
	if (!index)
		return NEXT;
	if (to) {
		index |= TO_POD;
		start_detour(&f->out);
	}
	if (!equal_macs(f->mac, p->mac)) {
		f->out.validated = 0;
		__builtin_memcpy(f->mac, p->mac, sizeof(f->mac));
	}
	f->out.mtu = longest;
	record_probe(&f->out, p, index, interval, is_ipv6);
	f->socket_ended = p->socket_ended ? p->at : 0;
	return NEXT;
ineligible:
	back_off(c, &f->out, reason, p->at);
	return NEXT;
}

/* observe_encapsulated observes a packet that a VXLAN device has encapsulated. */
static __always_inline int observe_encapsulated(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct encap_template o = {.nic = skb->ifindex};
	struct headers h;

	c->out_stage = 0;
	if (skb->protocol != bpf_htons(ETH_P_IP) || skb->vlan_present || bpf_skb_load_bytes(skb, 0, &o.head, sizeof(o.head)) ||
	    load_headers(skb, sizeof(o.head), c->out.key.protocol, &h, is_ipv6) ||
	    o.head.ihl_version != 0x45 || !is_encap(&o) || hops_between(&c->out.headers, &h, is_ipv6) != 1)
		return NEXT;
	return learn_out(skb, c, &h, &o, 0, is_ipv6);
}

/* observe_routed observes a packet that the node routes as it is. */
static __always_inline int observe_routed(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct encap_template o = {.nic = skb->ifindex};

	if (hops_of_probe(skb, c, is_ipv6) != 1 || skb->vlan_present || bpf_skb_load_bytes(skb, 0, &o.head, ETH_HLEN))
		return NEXT;
	return learn_out(skb, c, &c->out.headers, &o, 0, is_ipv6);
}

SEC("tc")
int observe_nic(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c || c->out_stage != 2)
		return NEXT;
	return c->out.key.is_ipv6 ? observe_encapsulated(skb, c, 1) : observe_encapsulated(skb, c, 0);
}

SEC("tc")
int observe_router(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (c->out_stage == 2)
		return c->out.key.is_ipv6 ? observe_encapsulated(skb, c, 1) : observe_encapsulated(skb, c, 0);
	if (c->out_stage)
		return c->out.key.is_ipv6 ? observe_routed(skb, c, 1) : observe_routed(skb, c, 0);
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return sample_unwatched(skb, c, 1, 0);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? sample_unwatched(skb, c, 1, 1) : NEXT;
}

/* decap_nic decapsulates the packets that redirect_vxlan would redirect, if a packet with the same
 * outer headers has reached the VXLAN device. GSO packets keep tunnel state that only the kernel can
 * clear, so the kernel decapsulates them, unless they are TCP packets that go straight to a socket, where
 * nothing reads that state. redirect_vxlan counts all packets that the kernel decapsulates. */
static __always_inline int decap_nic_ip(struct __sk_buff *skb, struct cpu_state *c, __u8 *data, int is_ipv6)
{
	const __u32 at = OUTER_HLEN;
	const struct encap_template *known;
	const struct pod_link *pod;
	struct encap_template o = {};
	struct headers h;
	struct remote from;
	struct flow *f;
	struct key k, own;
	__u16 check = 0;
	__u32 g, index, end;
	__u64 now, left;

	if (peek_flow(skb, data, at, &k, 0, is_ipv6) || !bloom_test(hash_key(&k)))
		return NEXT;
	f = find_flow(&k, &own, is_ipv6);
	if (!f)
		return NEXT;
	g = generation;
	now = bpf_ktime_get_coarse_ns();
	if (skb->gso_size && f->gso != now)
		f->gso = now;
	/* Leave a stream's full segments to GRO: merging them saves more than decapsulating each
	 * here. If the NIC merges them already, GRO gains nothing. */
	if (skb->gso_size ? now - f->socket_ended >= FLOW_TTL : k.protocol == IPPROTO_TCP && skb->len >= mtu && now - f->gso >= REORDER_WINDOW) {
		f->left = now;
		return NEXT;
	}
	if (now >= lease_expires || check_flow(&f->in, &f->out, &k, now) || behind_detour(&f->in, now))
		return NEXT;
	left = f->left;
	if (left) {
		if ((__s64)(now - left) < (__s64)REORDER_WINDOW) /* another CPU may have written a later time */
			return NEXT;
		/* Earlier packets of this batch may have been left to the kernel. */
		start_detour(&f->in);
		__sync_val_compare_and_swap(&f->left, left, 0);
		return NEXT;
	}
	data = pull_data(skb, at);
	if (!data)
		return NEXT;
	copy(&o.head, data, sizeof(o.head));
	o.nic = skb->ifindex;
	if (skb->mark || skb->pkt_type != PACKET_HOST || parse_headers(skb, at, k.protocol, &h, &check, is_ipv6))
		goto leave;
	/* The kernel would reject these packets, or change their inner header (RFC 6040). */
	if (o.head.inner[6] != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || !ip_csum_ok((const void *)&o.head.ihl_version) || o.head.ip_protocol != IPPROTO_UDP ||
	    bpf_ntohs(o.head.length) != skb->len - ETH_HLEN || bpf_ntohs(o.head.udp_length) != skb->len - ETH_HLEN - IP_HLEN ||
	    (o.head.tos & 3) != outer_tos(TOS(&h, is_ipv6)))
		goto leave;
	clear_per_packet(&o);
	/* The outer checksum is verified, or there is none. */
	o.head.udp_check = 0;
	index = f->decapped_template;
	known = bpf_map_lookup_elem(&decap_templates, &index);
	end = seq_end(&h, is_ipv6);
	if (k.protocol == IPPROTO_TCP && (!f->seq_state || !in_window(f, 0, &h, end)))
		return NEXT;
	if (!f->decapped || now - f->decapped >= FLOW_TTL || f->decapped_generation != g || !known || !equal_words(known, &o, sizeof(o)))
		goto probe;
	if (revalidate_due(&f->in, now)) {
		start_detour(&f->in);
		goto probe;
	}
	if (!to_pod(f, &k, &own, &h, is_ipv6))
		return NEXT;
	index = template_of(&f->in);
	pod = bpf_map_lookup_elem(&pod_links, &index);
	if (!pod || !pod->veth || header_changed(&f->in, &h, is_ipv6) || !fits_mtu(skb, &h, is_ipv6) || (!is_ipv6 && !ip_csum_ok(h.ip)) ||
	    (!inner_csum_verified(skb, at + HLEN(is_ipv6)) && !skip_csum_checks))
		goto leave;
	if (decapsulate(skb, is_ipv6))
		return NEXT;
	if (k.protocol == IPPROTO_TCP)
		update_seq(f, 0, &h, end, now);
	return redirect_to_pod(skb, c, pod, &h, REASON_FAST_IN_VXLAN, peer_of(&k), peer_of(&own), is_ipv6);
probe:
	from = sender(&o, f->in.device);
	if (!is_remote(&from))
		return NEXT;
	if (c->decap_stage && now - c->decap_probe.at < PROBE_TTL)
		return NEXT;
	c->decap_probe.at = now;
	c->decap_probe.generation = g;
	copy_headers(&c->decap_probe.headers, &h, is_ipv6);
	c->decap_probe.outer = o;
	read_metadata(skb, &c->decap_probe.metadata);
	c->decap_stage = 1;
	return NEXT;
leave:
	from = sender(&o, f->in.device);
	if (is_remote(&from))
		f->left = now;
	return NEXT;
}

SEC("tc")
int decap_nic(struct __sk_buff *skb)
{
	const __u32 at = OUTER_HLEN;
	struct cpu_state *c = this_cpu();
	__u8 *data = field(skb, data);

	if (!c || (void *)data + ETH_HLEN + IP_HLEN > field(skb, data_end) || data[ETH_HLEN + 9] != IPPROTO_UDP || skb->protocol != bpf_htons(ETH_P_IP))
		return NEXT;
	data = pull_data(skb, at + IP_HLEN + 8);
	if (!data)
		return NEXT;
	return data[at] >> 4 == 6 ? decap_nic_ip(skb, c, data, 1) : decap_nic_ip(skb, c, data, 0);
}

SEC("tc")
int redirect_vxlan(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return redirect_in(skb, c, FROM_VXLAN, 0);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return redirect_in(skb, c, FROM_VXLAN, 1);
	count(c, REASON_NOT_TCP_UDP);
	return NEXT;
}

SEC("tc")
int redirect_nic(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (likely(skb->protocol == bpf_htons(ETH_P_IP)))
		return redirect_in(skb, c, FROM_NIC, 0);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? redirect_in(skb, c, FROM_NIC, 1) : NEXT;
}

/* observe_delivery observes a packet from the network, or from the peer's pod, that the slow path delivers to a pod. */
static __always_inline int observe_delivery(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	const struct pod_link *peer;
	struct probe *p = &c->in;
	struct pod_link pod = {};
	struct headers h, was;
	struct key key, wire;
	struct flow *f;
	__u32 interval, index;
	int reason, hops, translated = 0;

	if (skb->protocol != bpf_htons(is_ipv6 ? ETH_P_IPV6 : ETH_P_IP) || skb->vlan_present || load_headers(skb, ETH_HLEN, p->key.protocol, &h, is_ipv6) ||
	    bpf_skb_load_bytes(skb, 0, pod.macs, sizeof(pod.macs)))
		return NEXT;
	copy_headers(&was, &p->headers, is_ipv6);
	wire = key = p->key;
	if (!is_ipv6) {
		key = with_peer(&wire, PEER(h.ip[3], HALF(h.l4[0], 0)));
		translated = !same_key(&key, &wire);
	}
	if (translated)
		nat_headers(&was, 0, peer_of(&key));
	hops = hops_between(&was, &h, is_ipv6);
	if (!hops && !p->from_pod)
		hops = -1; /* the node routes what comes from the network */
	if (hops < 0) {
		if (equal_except_nat(&was, &h, is_ipv6))
			count(c, is_ipv6 ? nat_reason(&was, &h) : REASON_REWRITTEN);
		return NEXT;
	}
	if (!owns_mac(skb->ifindex, pod.macs)) {
		count(c, REASON_MISMATCH);
		return NEXT; /* the right port may deliver it yet */
	}
	c->in_stage = 0;
	p->ct = ct_entry(skb);
	p->key = key;
	f = find_or_create_flow(skb, c, p, 0, is_ipv6);
	if (!f || p->at < f->in.backoff_until)
		return NEXT;
	/* Packets of a pod must come from the link to which those for it go. */
	peer = peer_pod(f->out.template);
	if (p->from_pod != (peer && peer->veth == p->device) || !is_known_device(p->device, p->from_pod) ||
	    (p->from_pod && !owns_mac(p->device, p->mac + ETH_ALEN))) {
		count(c, REASON_MISMATCH);
		return NEXT;
	}
	reason = !reaches_pod(skb) || !same_metadata(skb, &p->metadata) ? REASON_REWRITTEN : check_conntrack(skb, p, f, 0, &interval, is_ipv6);
	if (p->key.protocol == IPPROTO_TCP && (!reason || reason == REASON_TCP_WINDOW))
		record_seq(f, 0, p, is_ipv6);
	if (reason) {
		back_off(c, &f->in, reason, p->at);
		return NEXT;
	}
	pod.veth = skb->ifindex;
	pod.hops = hops;
	if (p->from_pod)
		__builtin_memcpy(pod.sent, p->mac, sizeof(pod.sent));
	index = pod_link_of(c, &pod);
	if (!index)
		return NEXT;
	if (f->out.device && f->out.device != pod.veth) {
		f->out.validated = 0;
		f->out.device = 0;
	}
	start_detour(&f->in);
	record_probe(&f->in, p, index, interval, is_ipv6);
	if (c->decap_stage == 2 && p->decapped == decap_id(c))
		learn_decapped(c, f, p);
	return NEXT;
}

/* observe_local observes a packet that the slow path delivers to a pod. It returns 0 unless that is the outgoing probe of
 * another pod. */
static __always_inline int observe_local(struct __sk_buff *skb, struct cpu_state *c, int is_ipv6)
{
	struct pod_link pod = {.veth = skb->ifindex};
	const struct key *k = &c->out.key;
	int hops;

	if (skb->ifindex == c->out.device || skb->vlan_present || bpf_skb_load_bytes(skb, 0, pod.macs, sizeof(pod.macs)) || !owns_mac(skb->ifindex, pod.macs))
		return 0; /* the right port may deliver it yet */
	hops = hops_of_probe(skb, c, is_ipv6);
	if (hops < 0)
		return 0;
	/* Any other TCP connection has the flow of the other pod. */
	if (k->protocol != IPPROTO_TCP || c->out.wire_peer != peer_of(k) || k->pod < k->peer) {
		pod.hops = hops;
		learn_out(skb, c, &c->out.headers, 0, &pod, is_ipv6);
	}
	return 1;
}

SEC("tc")
int observe_pod(struct __sk_buff *skb)
{
	struct cpu_state *c = this_cpu();

	if (!c)
		return NEXT;
	if (c->out_stage == 1 && (c->out.key.is_ipv6 ? observe_local(skb, c, 1) : observe_local(skb, c, 0)))
		return NEXT;
	if (c->in_stage)
		return c->in.key.is_ipv6 ? observe_delivery(skb, c, 1) : observe_delivery(skb, c, 0);
	return NEXT;
}

static __always_inline int drop_forged_ip(struct sk_buff *skb, const __u32 *start, int is_ipv6)
{
	struct key wire, own;
	struct segment s;
	const struct headers *h = &s.headers;
	struct flow *f = 0;
	int out = 1, what;
	struct cpu_state *c;

	what = find_ending(skb, start, &s, is_ipv6);
	if (likely(what == NOT_SEGMENT))
		return NF_ACCEPT;
	if (what == TOO_MANY_HEADERS)
		goto drop;
	segment_key(&own, h, 1, is_ipv6);
	/* redirect_pod and redirect_vxlan do not update flows whose Bloom filter bit is clear. */
	if (bloom_test(hash_key(&own)))
		f = bpf_map_lookup_elem(&flows, &own);
	if (!f) {
		out = 0;
		segment_key(&wire, h, 0, is_ipv6);
		if (bloom_test(hash_key(&wire)))
			f = find_flow(&wire, &own, is_ipv6);
	}
	if (!f || !same_key(&f->key, &own) || (is_ipv6 && !addresses_match(f, h, out)))
		return NF_ACCEPT;
	if (f->seq_state < SEQ_FROM_POD || !seq_complete(f) || ends_connection(f, out, h, s.end)) {
		/* Conntrack may give the entry a timeout of seconds. If the connection stays open, its next packet must take
		 * the slow path to renew it: it may be the last one for a while. */
		f->out.generation = f->in.generation = generation - 1;
		return NF_ACCEPT;
	}
drop:
	c = this_cpu();
	if (c)
		count(c, REASON_FORGED);
	return NF_DROP;
}

/* drop_forged drops those FINs and RSTs of known flows that conntrack would mark as invalid if it had seen
 * all packets. A liberal entry accepts them, and conntrack then deletes it, soon or at the next
 * forged packet. The pod's first packet shows how far the peer may send, but not how far the pod may: until the
 * peer's next packet, drop_forged accepts more in the pod's name than conntrack would. */
SEC("netfilter")
int drop_forged(struct bpf_nf_ctx *ctx)
{
	const __u32 four = IP_HLEN + TCP_START, six = IP6_HLEN + TCP_START;
	__u32 start[(IP6_HLEN + TCP_START) / 4];
	struct sk_buff *skb = ctx->skb;

	/* A shorter packet has no TCP header. */
	if (read_skb(skb, 0, start, four))
		return NF_ACCEPT;
	if (likely(*(__u8 *)start >> 4 != 6))
		return drop_forged_ip(skb, start, 0);
	return read_skb(skb, four, (void *)start + four, six - four) ? NF_ACCEPT : drop_forged_ip(skb, start, 1);
}

/* The sequence numbers after the last data that conntrack has seen from each side of a connection (td_end). */
struct tracked {
	struct key key;
	word pod6[2], peer6[2];
	__u32 pod, peer;
};

/* Keeps the type in BTF, which has only the types of maps, variables and programs. */
const struct tracked *tracked_type __attribute__((unused));

/* read_conntrack completes the struct tracked that follows an Ethernet header. It returns 0, or -1 if conntrack does not have the
 * connection. */
SEC("tc")
int read_conntrack(struct __sk_buff *skb)
{
	struct bpf_ct_opts opts = {};
	struct tracked t;
	struct nf_conn *ct;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &t, sizeof(t)))
		return -1;
	ct = look_up_conntrack(skb, &t.key, t.pod6, t.peer6, &opts, t.key.is_ipv6);
	if (!ct)
		return -1;
	t.pod = opts.dir ? ct->proto.tcp.seen[1].td_end : ct->proto.tcp.seen[0].td_end;
	t.peer = opts.dir ? ct->proto.tcp.seen[0].td_end : ct->proto.tcp.seen[1].td_end;
	bpf_ct_release(ct);
	return bpf_skb_store_bytes(skb, ETH_HLEN, &t, sizeof(t), 0);
}

/* A connection whose conntrack entry a killed agent left liberal. */
struct recovery {
	struct key key;
	__u64 wire_peer;
	word pod6[2], peer6[2];
	/* The pod's link; the window scales of pod and peer; when the last packet was seen, ms; the
	 * acknowledgement number of the keepalive. */
	__u32 device, scale[2], last_ms, acknowledged;
};

/* Keeps the type in BTF, which has only the types of maps, variables and programs. */
const struct recovery *recovery_type __attribute__((unused));

/* recover_flow adds a flow, right before the agent sends the pod a keepalive. The flow takes its sequence numbers from the pod's
 * next packet, if that has no data: it is the answer. recover_flow returns 0 or a negative errno, such as EEXIST. */
SEC("syscall")
int recover_flow(struct recovery *r)
{
	__u64 hash = hash_key(&r->key);
	struct flow f = {.key = r->key, .wire_peer = r->wire_peer, .bloom_bit = hash % BLOOM_BITS, .recovering = RECOVERING, .last_ms = r->last_ms};
	long err;

	__builtin_memcpy(f.pod6, r->pod6, sizeof(f.pod6));
	__builtin_memcpy(f.peer6, r->peer6, sizeof(f.peer6));
	f.out.device = r->device;
	f.out.scale = r->scale[0];
	f.in.scale = r->scale[1];
	f.resynced[0] = r->acknowledged;
	err = bpf_map_update_elem(&flows, &f.key, &f, BPF_NOEXIST);
	if (err)
		return err;
	if (f.wire_peer != peer_of(&f.key) && add_reverse_nat(&f.key, f.wire_peer)) {
		bpf_map_delete_elem(&flows, &f.key);
		return -1;
	}
	bloom_set(hash);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
