//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Flow is a connection, seen from its pod.
type Flow struct {
	Pod, Peer netip.AddrPort
	// Protocol is the IP protocol number of TCP or UDP.
	Protocol uint8
}

// PodKey is an address as map keys contain it: an IPv4 address, or the hash of an IPv6 address.
type PodKey struct {
	number uint32
	six    bool
}

// PodKeyOf returns the PodKey of an address.
func PodKeyOf(a netip.Addr) PodKey {
	if a.Is6() {
		return PodKey{hashAddr(words(a)), true}
	}
	ip := a.As4()
	return PodKey{binary.NativeEndian.Uint32(ip[:]), false}
}

// Addr returns the address of an IPv4 key. It is not known from an IPv6 key.
func (s PodKey) Addr() (a netip.Addr, known bool) {
	if s.six {
		return a, false
	}
	var ip [4]byte
	binary.NativeEndian.PutUint32(ip[:], s.number)
	return netip.AddrFrom4(ip), true
}

// IsChosen reports, for a TCP connection between two pods of a node, whether its only flow is that of f.Pod (see struct flow in
// bpf/fastpath/flow.h). wirePeer is the peer on the wire.
func (f Flow) IsChosen(wirePeer netip.AddrPort) bool {
	return f.Peer != wirePeer || PodKeyOf(f.Pod.Addr()).number < PodKeyOf(f.Peer.Addr()).number
}

func (f Flow) key() fastpathKey {
	half := func(a netip.AddrPort) (uint32, uint16) {
		port := binary.BigEndian.AppendUint16(nil, a.Port())
		return PodKeyOf(a.Addr()).number, binary.NativeEndian.Uint16(port)
	}
	k := fastpathKey{Protocol: f.Protocol}
	if f.Pod.Addr().Is6() {
		k.IsIpv6 = 1
	}
	k.Pod, k.PodPort = half(f.Pod)
	k.Peer, k.PeerPort = half(f.Peer)
	return k
}

// words returns an IPv6 address as two words of the programs.
func words(a netip.Addr) (w [2]uint64) {
	raw := a.As16()
	w[0], w[1] = binary.NativeEndian.Uint64(raw[:]), binary.NativeEndian.Uint64(raw[8:])
	return w
}

// hashAddr computes hash_address of key.h.
func hashAddr(w [2]uint64) uint32 {
	h := w[0]*0x9e3779b97f4a7c15 + w[1]
	h ^= h >> 32
	return uint32(h * 0xd6e8feb86659fd93 >> 32)
}

// flow returns the connection of a map entry.
func (k fastpathKey) flow(v fastpathFlow) Flow {
	end := func(ip uint32, whole [2]uint64, port uint16) netip.AddrPort {
		var p [2]byte
		binary.NativeEndian.PutUint16(p[:], port)
		var raw [16]byte
		if k.IsIpv6 == 0 {
			binary.NativeEndian.PutUint32(raw[:], ip)
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[:])), binary.BigEndian.Uint16(p[:]))
		}
		binary.NativeEndian.PutUint64(raw[:], whole[0])
		binary.NativeEndian.PutUint64(raw[8:], whole[1])
		return netip.AddrPortFrom(netip.AddrFrom16(raw), binary.BigEndian.Uint16(p[:]))
	}
	return Flow{Pod: end(k.Pod, v.Pod6, k.PodPort), Peer: end(k.Peer, v.Peer6, k.PeerPort), Protocol: k.Protocol}
}

// wirePeer computes PEER of key.h: the peer's address and port in one word.
func (k fastpathKey) wirePeer() uint64 { return uint64(k.Peer) | uint64(k.PeerPort)<<32 }

// withPeer computes with_peer of key.h: the key with another peer.
func (k fastpathKey) withPeer(wirePeer uint64) fastpathKey {
	k.Peer, k.PeerPort = uint32(wirePeer), uint16(wirePeer>>32)
	return k
}

// flowTTL is how long a flow stays valid after it was validated. FLOW_TTL of flow.h is a little less.
const flowTTL = time.Second

// Kinds of connections, with which the names of reasons end: encapsulated in VXLAN, routed between nodes without encapsulation,
// and between pods of this node.
const (
	KindVXLAN  = "vxlan"
	KindRouted = "routed"
	KindLocal  = "local"
)

// Accelerated counts the known connections, and by kind those that are accelerated at a time of CLOCK_MONOTONIC. A TCP
// connection is accelerated if both directions are valid, a UDP connection if either is.
func (p *Programs) Accelerated(now time.Duration) (known int, fast map[string]int, err error) {
	var generation uint32
	if err := p.objects.Generation.Get(&generation); err != nil {
		return 0, nil, fmt.Errorf("count connections of the fast path: %w", err)
	}
	valid := func(validated uint64, in uint32) bool {
		return validated != 0 && in == generation && time.Duration(validated) > now-flowTTL
	}
	fast = map[string]int{KindVXLAN: 0, KindRouted: 0, KindLocal: 0}
	err = each(p.objects.Flows, func(k fastpathKey, v fastpathFlow) error {
		known++
		out, in := valid(v.Out.Validated, v.Out.Generation), valid(v.In.Validated, v.In.Generation)
		if !(out && in) && !(k.Protocol == unix.IPPROTO_UDP && (out || in)) {
			return nil
		}
		kind, err := p.kindOf(&v)
		fast[kind]++
		return err
	})
	if err != nil {
		return 0, nil, fmt.Errorf("count connections of the fast path: %w", err)
	}
	return known, fast, nil
}

// kindOf returns the kind of a connection. It follows from the path of the pod's packets, or from the device at which packets
// arrive if the pod only receives.
func (p *Programs) kindOf(v *fastpathFlow) (string, error) {
	if _, is := toPod(v.Out.Template); is {
		return KindLocal, nil
	}
	if v.Out.Template != 0 {
		var outer fastpathEncapTemplate
		if err := p.objects.EncapTemplates.Lookup(v.Out.Template, &outer); err != nil {
			return "", fmt.Errorf("look up the outer headers of a connection: %w", err)
		}
		if outer.Head.IpProtocol == unix.IPPROTO_UDP { // is_encap of bpf/fastpath/vxlan.h
			return KindVXLAN, nil
		}
		return KindRouted, nil
	}
	for kind, devices := range map[string]*ebpf.Map{KindRouted: p.objects.Routers, KindLocal: p.objects.PodDevices} {
		var is uint8
		if err := devices.Lookup(v.In.Device, &is); err == nil {
			return kind, nil
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return "", fmt.Errorf("look up the device of a connection: %w", err)
		}
	}
	return KindVXLAN, nil
}

// Activity is the state of a flow.
type Activity struct {
	// Validated is the time at which the flow was last validated in either direction (CLOCK_MONOTONIC; 0 if it
	// never was).
	Validated time.Duration
	// Link is the index of the pod's link, or 0 if the flow was never validated. PeerLink is the index of the peer's link, if
	// the peer is a pod of this node.
	Link, PeerLink int
}

// Flows returns the known connections. It also clears the bits of deleted ones in the Bloom filter, so that the programs no
// longer look them up.
func (p *Programs) Flows() (map[Flow]Activity, error) {
	all := make(map[Flow]Activity)
	translated := make(map[fastpathKey]uint64)
	used := make(bloomBits, p.objects.BloomA.Size()/8)
	err := each(p.objects.Flows, func(k fastpathKey, v fastpathFlow) error {
		link := int(v.Out.Device)
		var err error
		if link == 0 && v.In.Template != 0 { // UDP in one direction, into the pod
			if link, err = p.podLink(v.In.Template); err != nil {
				return err
			}
		}
		peer := 0
		if entry, is := toPod(v.Out.Template); is {
			if peer, err = p.podLink(entry); err != nil {
				return err
			}
		}
		all[k.flow(v)] = Activity{Validated: time.Duration(max(v.Out.Validated, v.In.Validated)), Link: link, PeerLink: peer}
		used.set(v.BloomBit)
		if v.WirePeer != k.wirePeer() {
			translated[k] = v.WirePeer
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list connections of the fast path: %w", err)
	}
	if err := p.sweepReverseNAT(translated, used); err != nil {
		return nil, err
	}
	return all, p.clearBloom(used)
}

// podLink returns the index of the link of an entry in pod_links.
func (p *Programs) podLink(entry uint32) (index int, err error) {
	var pod fastpathPodLink
	if err := p.objects.PodLinks.Lookup(entry, &pod); err != nil {
		return 0, fmt.Errorf("look up the link of a pod: %w", err)
	}
	return int(pod.Veth), nil
}

// toPod returns the entry in pod_links to which an outgoing direction refers if its peer is a pod of this node.
func toPod(template uint32) (entry uint32, is bool) {
	const flag = 1 << 31 // TO_POD of bpf/fastpath/flow.h
	return template &^ flag, template&flag != 0
}

// clearBloom clears the bits of deleted flows: those of the chosen Bloom filter that are not in used. It rebuilds the other
// filter, and makes the programs test that one.
func (p *Programs) clearBloom(used bloomBits) error {
	chosen, filters, err := p.bloomFilters()
	if err != nil {
		return err
	}
	tested, other := filters[chosen], filters[1-chosen]
	has, err := readBloom(tested)
	if err != nil || used.contains(has) {
		return err
	}
	// The programs create a flow before they set its bit. So if writeBloom overwrites a bit that they have just set, usedBits
	// finds the flow, and the loop writes it again.
	for done := false; !done; done = has.contains(used) {
		if err := writeBloom(other, used); err != nil {
			return err
		}
		if used, err = p.usedBits(); err != nil {
			return err
		}
		if has, err = readBloom(other); err != nil {
			return err
		}
	}
	if err := p.objects.BloomChosen.Set(1 - chosen); err != nil {
		return fmt.Errorf("switch the fast path to another Bloom filter: %w", err)
	}
	return nil
}

// usedBits returns the bits of all flows and reverse NAT entries.
func (p *Programs) usedBits() (bloomBits, error) {
	used := make(bloomBits, p.objects.BloomA.Size()/8)
	err := errors.Join(
		each(p.objects.Flows, func(_ fastpathKey, v fastpathFlow) error {
			used.set(v.BloomBit)
			return nil
		}),
		each(p.objects.ReverseNat, func(_ fastpathKey, v fastpathNatEntry) error {
			used.set(v.BloomBit)
			return nil
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("list connections of the fast path: %w", err)
	}
	return used, nil
}

// bloomBits holds the bits of a Bloom filter, in words as in the programs.
type bloomBits []uint64

func (b bloomBits) set(bit uint32) { b[bit/64] |= 1 << (bit % 64) }

func (b bloomBits) contains(others bloomBits) bool {
	for i := range others {
		if others[i]&^b[i] != 0 {
			return false
		}
	}
	return true
}

// bloomFilters returns both Bloom filters, and the index of the one that the programs test.
func (p *Programs) bloomFilters() (chosen uint32, filters [2]*ebpf.Variable, err error) {
	if err := p.objects.BloomChosen.Get(&chosen); err != nil {
		return 0, filters, fmt.Errorf("read which Bloom filter the fast path tests: %w", err)
	}
	return chosen, [2]*ebpf.Variable{p.objects.BloomA, p.objects.BloomB}, nil
}

func readBloom(filter *ebpf.Variable) (bloomBits, error) {
	bits := make(bloomBits, filter.Size()/8)
	if err := filter.Get([]uint64(bits)); err != nil {
		return nil, fmt.Errorf("read a Bloom filter of the fast path: %w", err)
	}
	return bits, nil
}

func writeBloom(filter *ebpf.Variable, bits bloomBits) error {
	if err := filter.Set([]uint64(bits)); err != nil {
		return fmt.Errorf("write a Bloom filter of the fast path: %w", err)
	}
	return nil
}

// sweepReverseNAT deletes the reverse NAT entries of deleted flows, and sets the bits of the remaining entries in used.
// translated maps each flow with NAT to its peer on the wire.
func (p *Programs) sweepReverseNAT(translated map[fastpathKey]uint64, used bloomBits) error {
	gone := make(map[fastpathKey]fastpathKey)
	err := each(p.objects.ReverseNat, func(wire fastpathKey, entry fastpathNatEntry) error {
		if translated[entry.Key] != wire.wirePeer() {
			// The flow may be newer than translated.
			v, known, err := p.lookUp(entry.Key)
			if err != nil {
				return err
			}
			if !known || v.WirePeer != wire.wirePeer() {
				gone[wire] = entry.Key
				return nil
			}
		}
		used.set(entry.BloomBit)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list reverse NAT entries of the fast path: %w", err)
	}
	for wire, flow := range gone {
		if err := p.deleteReverseNAT(wire, flow); err != nil {
			return err
		}
	}
	return nil
}

// deleteReverseNAT deletes the reverse NAT entry of a deleted flow. If the programs have just created the flow again, it
// deletes the flow too: without the entry, the peer's packets would not find it, and its sequence numbers would become stale.
// The pod's next packets create both again.
func (p *Programs) deleteReverseNAT(wire, flow fastpathKey) error {
	if err := remove(p.objects.ReverseNat, wire); err != nil {
		return err
	}
	v, known, err := p.lookUp(flow)
	if err != nil || !known || v.WirePeer != wire.wirePeer() {
		return err
	}
	return remove(p.objects.Flows, flow)
}

// Now reads CLOCK_MONOTONIC, the clock of the programs.
func Now() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// Sequence holds the TCP sequence numbers of both sides of a connection, and the time of its last packet, to the millisecond
// (CLOCK_MONOTONIC). It is zero unless all of them are known.
type Sequence struct {
	Pod, Peer Side
	// Retransmitted means that the pod has retransmitted its last data several times.
	Retransmitted bool
	Last          time.Duration
}

// Side holds the sequence numbers of one side of a TCP connection (RFC 9293): SND.NXT, RCV.NXT, and the right edge of the
// window that the other side announced.
type Side struct{ Next, Expects, Edge uint32 }

// Acknowledged reports whether all data of both sides is acknowledged.
func (n Sequence) Acknowledged() bool {
	return n != Sequence{} && n.Pod.Next == n.Peer.Expects && n.Peer.Next == n.Pod.Expects
}

// PeerUnseen reports whether the programs have seen no acknowledgement of the pod's last data, although the pod does not
// retransmit it. If the connection is idle, the acknowledgement took a path that the programs do not see.
func (n Sequence) PeerUnseen() bool { return n.Pod.Next != n.Peer.Expects && !n.Retransmitted }

// seqFromPod is SEQ_FROM_POD of bpf/fastpath/seq.h: redirect_pod has seen a packet of the pod. Before that, it may not have
// been attached, and may have missed an acknowledgement. Do not wait for a packet of the peer after it: the pod's packet may be
// the last one of the connection.
const seqFromPod = 2

// retransmissions is RETRANSMISSIONS of bpf/fastpath/seq.h.
const retransmissions = 3

// Sequence returns the sequence numbers of a connection. now is the current time of CLOCK_MONOTONIC.
func (p *Programs) Sequence(flow Flow, now time.Duration) (Sequence, error) {
	var epoch uint32
	v, known, err := p.lookUp(flow.key())
	if err != nil || !known {
		return Sequence{}, err
	}
	if err := p.objects.Epoch.Get(&epoch); err != nil {
		return Sequence{}, fmt.Errorf("read the epoch of the fast path: %w", err)
	}
	if v.SeqState < seqFromPod || v.MaybeClosed != 0 || v.Pod.Epoch != epoch || v.Peer.Epoch != epoch {
		return Sequence{}, nil
	}
	ago := uint32(now/time.Millisecond) - v.LastMs
	return Sequence{
		Pod: Side{v.Pod.SndNxt, v.Pod.RcvNxt, v.Pod.WindowEnd}, Peer: Side{v.Peer.SndNxt, v.Peer.RcvNxt, v.Peer.WindowEnd},
		Retransmitted: v.Retransmitted >= retransmissions,
		Last:          (now/time.Millisecond - time.Duration(int32(ago))) * time.Millisecond,
	}, nil
}

// ConntrackAhead reports whether conntrack, in the calling thread's network namespace, has seen later data of a connection than
// n: packets took a path that the programs do not see.
func (p *Programs) ConntrackAhead(flow Flow, n Sequence) (bool, error) {
	t := fastpathTracked{Key: flow.key()}
	if flow.Pod.Addr().Is6() {
		t.Pod6, t.Peer6 = words(flow.Pod.Addr()), words(flow.Peer.Addr())
	}
	const ethernet = 14
	frame, err := binary.Append(make([]byte, ethernet), binary.NativeEndian, &t)
	if err != nil {
		return false, fmt.Errorf("encode a connection of the fast path: %w", err)
	}
	answer := make([]byte, len(frame))
	code, err := p.objects.ReadConntrack.Run(&ebpf.RunOptions{Data: frame, DataOut: answer})
	if err != nil {
		return false, fmt.Errorf("read conntrack's sequence numbers: %w", err)
	}
	if code != 0 {
		return false, nil
	}
	if _, err := binary.Decode(answer[ethernet:], binary.NativeEndian, &t); err != nil {
		return false, fmt.Errorf("decode conntrack's sequence numbers: %w", err)
	}
	return int32(t.Pod-n.Pod.Next) > 0 || int32(t.Peer-n.Peer.Next) > 0, nil
}

// InvalidateSequences invalidates the sequence numbers of each connection until the programs have seen another packet in each
// direction. Call it when packets may have passed without a program.
func (p *Programs) InvalidateSequences() error {
	var epoch uint32
	if err := p.objects.Epoch.Get(&epoch); err != nil {
		return fmt.Errorf("read the epoch of the fast path: %w", err)
	}
	if err := p.objects.Epoch.Set(epoch + 1); err != nil {
		return fmt.Errorf("set the epoch of the fast path: %w", err)
	}
	return nil
}

// Capacity returns the size of the flow table, in flows.
func (p *Programs) Capacity() int { return int(p.objects.Flows.MaxEntries()) }

// Known reports whether a connection has a flow.
func (p *Programs) Known(flow Flow) (bool, error) {
	_, known, err := p.lookUp(flow.key())
	return known, err
}

func (p *Programs) lookUp(k fastpathKey) (v fastpathFlow, known bool, err error) {
	switch err := p.objects.Flows.Lookup(k, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return v, false, nil
	case err != nil:
		return v, false, fmt.Errorf("look up a connection of the fast path: %w", err)
	}
	return v, true, nil
}

// Forget deletes the flow of a connection.
func (p *Programs) Forget(flow Flow) error {
	k := flow.key()
	v, known, err := p.lookUp(k)
	if err != nil || !known {
		return err
	}
	if v.WirePeer != k.wirePeer() {
		// Delete the entry before the flow. In the other order, this could delete the entry of a flow that the programs have
		// just created again.
		err = remove(p.objects.ReverseNat, k.withPeer(v.WirePeer))
	}
	return errors.Join(err, remove(p.objects.Flows, k))
}

// remove deletes a connection's entry, if there is one.
func remove(m *ebpf.Map, k fastpathKey) error {
	if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget a connection of the fast path: %w", err)
	}
	return nil
}

// each calls fn with the entries of a hash map until fn fails. It reads them in batches: an iterator needs two system calls per
// entry, and ends early if its current entry is deleted.
func each[K, V any](m *ebpf.Map, fn func(K, V) error) error {
	keys, values := make([]K, 512), make([]V, 512)
	for cursor := new(ebpf.MapBatchCursor); ; {
		n, err := m.BatchLookup(cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		for i := range n {
			if err := fn(keys[i], values[i]); err != nil {
				return err
			}
		}
		if err != nil {
			return nil // that was the last batch
		}
	}
}
