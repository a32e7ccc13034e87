//go:build linux

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Fastpath are the programs of the fast path of one node, and what they know:
// fastpath.c says where each belongs and what it does. The caller attaches them, and
// keeps them alive by Beat.
type Fastpath struct {
	// Encap is for the ingress of a pod's veth on the node, ObservePod for its egress.
	Encap, ObservePod *ebpf.Program
	// ObserveVXLAN is for the egress of a VXLAN device, VXLANIngress for its ingress.
	ObserveVXLAN, VXLANIngress *ebpf.Program
	// ObserveNIC is for the egress of the NIC, NICDecap for its ingress.
	ObserveNIC, NICDecap *ebpf.Program

	objects fastpathObjects
	events  *ringbuf.Reader
	// noDropForged says why there is no guard.
	noDropForged error
	// What is in the maps of these names.
	linkMACs map[fastpathLinkMac]bool
	watched  map[fastpathWatch]bool
}

// Reasons name what became of packets, in the order of enum why: the first two took
// the fast path.
var reasons = [...]string{
	"fast-out", "fast-in", "no-flow", "tcp-flags", "lease-expired", "not-tcp-udp", "ip-options", "fragment", "ttl", "malformed",
	"csum-unverified", "skb-mark", "flow-expired", "invalidated", "revalidate", "mismatch", "exceeds-mtu", "encap-failed",
	"untracked", "unreplied", "nat", "ct-helper", "tcp-window", "rewritten", "table-full", "forged",
}

// Flow is a connection of a pod, from the pod's end.
type Flow struct {
	Pod, Peer netip.AddrPort
	// Protocol is TCP's or UDP's number.
	Protocol uint8
}

// VXLANDevice is what the outer packets of a VXLAN device have.
type VXLANDevice struct {
	// NIC is the index of the device that they leave by.
	NIC int
	// Source is their IPv4 address, Port the destination port.
	Source netip.Addr
	Port   uint16
	VNI    uint32
	// MAC is the VXLAN device's own.
	MAC net.HardwareAddr
}

// LoadFastpath loads them. They do nothing yet. An error says what the kernel lacks.
func LoadFastpath() (*Fastpath, error) {
	spec, err := loadFastpath()
	if err != nil {
		return nil, fmt.Errorf("read programs of the fast path: %w", err)
	}
	return newFastpath(spec)
}

func newFastpath(spec *ebpf.CollectionSpec) (*Fastpath, error) {
	limitErr := rlimit.RemoveMemlock() // as with OpenSoftirq
	f := &Fastpath{linkMACs: make(map[fastpathLinkMac]bool), watched: make(map[fastpathWatch]bool)}
	if f.noDropForged = spec.LoadAndAssign(&f.objects, nil); f.noDropForged != nil {
		if err := withoutDropForged(spec).LoadAndAssign(&f.objects, nil); err != nil {
			return nil, fmt.Errorf("load programs of the fast path: %w", explain(errors.Join(err, limitErr)))
		}
	}
	o := &f.objects
	f.Encap, f.ObservePod, f.ObserveVXLAN, f.VXLANIngress = o.Encap, o.ObservePod, o.ObserveVxlan, o.VxlanIngress
	f.ObserveNIC, f.NICDecap = o.ObserveNic, o.NicDecap
	var err error
	if f.events, err = ringbuf.NewReader(o.Events); err != nil {
		return nil, errors.Join(fmt.Errorf("open the fast path's news: %w", err), o.Close())
	}
	return f, nil
}

// Close lets go of programs and maps, and ends News.
func (f *Fastpath) Close() error { return errors.Join(f.events.Close(), f.objects.Close()) }

// RenewLease lets the programs work until a time of CLOCK_MONOTONIC.
func (f *Fastpath) RenewLease(until time.Duration) error {
	if err := f.objects.LeaseExpires.Set(uint64(until)); err != nil {
		return fmt.Errorf("keep the fast path alive: %w", err)
	}
	return nil
}

// SetGeneration makes void what was seen in any other.
func (f *Fastpath) SetGeneration(n uint32) error {
	if err := f.objects.Generation.Set(n); err != nil {
		return fmt.Errorf("invalidate the fast path: %w", err)
	}
	return nil
}

// SetNode tells the length of the longest packet that fits on all ways, and the range
// that source ports of outer packets are from, its end left out.
func (f *Fastpath) SetNode(mtu int, from, to uint16) error {
	if err := errors.Join(
		f.objects.Mtu.Set(uint32(mtu)),
		f.objects.PortFrom.Set(uint32(from)),
		f.objects.PortTo.Set(uint32(to)),
	); err != nil {
		return fmt.Errorf("tell the fast path of its node: %w", err)
	}
	return nil
}

// SetVXLANDevices tells of the VXLAN devices, by index, whose packets may take the fast
// path: these and no others.
func (f *Fastpath) SetVXLANDevices(all map[int]VXLANDevice) error {
	m := f.objects.VxlanDevices
	var known []uint32
	var index uint32
	var value fastpathVxlanDevice
	for i := m.Iterate(); i.Next(&index, &value); {
		known = append(known, index)
	}
	for _, index := range known {
		if _, still := all[int(index)]; !still {
			if err := m.Delete(index); err != nil {
				return fmt.Errorf("forget VXLAN device %d: %w", index, err)
			}
		}
	}
	for index, o := range all {
		if err := m.Put(uint32(index), o.value()); err != nil {
			return fmt.Errorf("tell the fast path of VXLAN device %d: %w", index, err)
		}
	}
	return nil
}

// LinkMAC is an Ethernet address that is at a pod's link, by its index on the node.
type LinkMAC struct {
	Link int
	MAC  [6]byte
}

// SetLinkMACs tells at which links of pods which Ethernet addresses are: packets to these
// may be delivered there, and no others. It is not to be called more than once at a time.
func (f *Fastpath) SetLinkMACs(all []LinkMAC) error {
	want := make(map[fastpathLinkMac]bool, len(all))
	for _, o := range all {
		want[fastpathLinkMac{Link: uint32(o.Link), Mac: o.MAC}] = true
	}
	// If there is no room, packets to the others are counted as unlike.
	return updateSet(f.objects.LinkMacs, f.linkMACs, want)
}

// value is an overlay as the programs have it: in network order.
func (o VXLANDevice) value() fastpathVxlanDevice {
	words := func(to []uint16, from []byte) {
		for i := range to {
			to[i] = binary.NativeEndian.Uint16(from[2*i:])
		}
	}
	v := fastpathVxlanDevice{Nic: uint32(o.NIC)}
	source := o.Source.As4()
	words(v.Source[:], source[:])
	words(v.Mac[:], o.MAC)
	words(v.Vni[:], binary.BigEndian.AppendUint32(nil, o.VNI<<8))
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], o.Port)
	v.Port = binary.NativeEndian.Uint16(port[:])
	return v
}

// Pod is the link of a pod, by its index on the node, and the addresses that are known to be
// there.
type Pod struct {
	Link      int
	Addresses []netip.Addr
}

// SetWatched tells which pods' links have all programs: new connections of these pods are
// looked at, and of the others News tells. It is not to be called more than once at a time.
func (f *Fastpath) SetWatched(all []Pod) error {
	want := make(map[fastpathWatch]bool)
	for _, p := range all {
		want[fastpathWatch{Device: uint32(p.Link)}] = true
		for _, a := range p.Addresses {
			want[fastpathWatch{Pod: PodKeyOf(a).number}] = true
		}
	}
	return updateSet(f.objects.WatchedPods, f.watched, want)
}

// updateSet has the keys of a map be those that are wanted, as far as there is room. It knows
// those that are there.
func updateSet[K comparable](m *ebpf.Map, there, want map[K]bool) error {
	for k := range there {
		if want[k] {
			continue
		}
		if err := m.Delete(k); err != nil {
			return fmt.Errorf("take %+v out of the fast path's %s: %w", k, m, err)
		}
		delete(there, k)
	}
	for k := range want {
		if there[k] {
			continue
		}
		err := m.Put(k, uint8(1))
		if errors.Is(err, unix.E2BIG) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("put %+v into the fast path's %s: %w", k, m, err)
		}
		there[k] = true
	}
	return nil
}

// EventKind is what the programs ask for, as enum ask of fastpath.c.
type EventKind uint32

// What is to be done of a connection: see fastpath.c.
const (
	// EventAttach is for a pod that has a connection which is worth it, and is not watched.
	EventAttach EventKind = iota
	// EventLiberal has conntrack stop checking a connection's window.
	EventLiberal
	// EventAcked has conntrack know that all that it has seen was acknowledged.
	EventAcked
	// EventResync has conntrack know the numbers that a connection has got to.
	EventResync
	// EventReset has conntrack know that a connection was reset.
	EventReset
	// EventReopen has conntrack know that a connection goes on, which it took to have ended.
	EventReopen
	eventKinds
)

// Event is what the programs ask for.
type Event struct {
	Kind EventKind
	// Pod is the address of the pod to watch; of another host maybe.
	Pod PodKey
	// Flow is the connection of all other asks.
	Flow Flow
}

// PodKey is what keys have of an address: all of IPv4's, a digest of IPv6's.
type PodKey struct {
	number uint32
	six    bool
}

// PodKeyOf is that of an address.
func PodKeyOf(a netip.Addr) PodKey {
	if a.Is6() {
		return PodKey{hashAddr(words(a)), true}
	}
	ip := a.As4()
	return PodKey{binary.NativeEndian.Uint32(ip[:]), false}
}

// Addr is the address, if it is known: one of IPv4.
func (s PodKey) Addr() (a netip.Addr, known bool) {
	if s.six {
		return a, false
	}
	var ip [4]byte
	binary.NativeEndian.PutUint32(ip[:], s.number)
	return netip.AddrFrom4(ip), true
}

// Event waits, until Close, for something to be done; the same may come more than once.
func (f *Fastpath) ReadEvent() (Event, error) {
	r, err := f.events.Read()
	if err != nil {
		return Event{}, fmt.Errorf("wait for news of the fast path: %w", err)
	}
	return decodeEvent(r.RawSample)
}

// decodeEvent reads struct told of fastpath.c.
func decodeEvent(b []byte) (Event, error) {
	var told struct {
		Key         fastpathKey
		Pod6, Peer6 [2]uint64
		Ask         EventKind
		_           uint32
	}
	if _, err := binary.Decode(b, binary.NativeEndian, &told); err != nil {
		return Event{}, fmt.Errorf("read news of the fast path: %w", err)
	}
	switch {
	case told.Ask >= eventKinds:
		return Event{}, fmt.Errorf("read news of the fast path: nothing is known to ask by %d", told.Ask)
	case told.Ask == EventAttach:
		return Event{Pod: PodKey{told.Key.Pod, told.Key.IsIpv6 != 0}}, nil
	}
	return Event{Kind: told.Ask, Flow: told.Key.flow(fastpathFlow{Pod6: told.Pod6, Peer6: told.Peer6})}, nil
}

// flow is the connection of an entry.
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

// Activity is what is known of a connection.
type Activity struct {
	// Validated is when it was last seen to be let through, the later of both ways
	// (CLOCK_MONOTONIC; 0 if it has not been).
	Validated time.Duration
	// Link is its pod's, by its index; 0 if it was never let through.
	Link int
}

// Sequence are how far a connection of TCP has got, by what its packets said, and when the last one
// was seen, to the millisecond (CLOCK_MONOTONIC). They are zero if not all of it is known.
type Sequence struct {
	Pod, Peer Side
	Last      time.Duration
}

// Side is one side of a connection of TCP, in numbers of RFC 9293: what it sends next, what it
// expects next, and how far the other side lets it send.
type Side struct{ Next, Expects, Edge uint32 }

// Acknowledged tells whether all that either side has sent was acknowledged.
func (n Sequence) Acknowledged() bool {
	return n != Sequence{} && n.Pod.Next == n.Peer.Expects && n.Peer.Next == n.Pod.Expects
}

// Sequence are those of a connection now, at a time of CLOCK_MONOTONIC.
func (f *Fastpath) Sequence(flow Flow, now time.Duration) (Sequence, error) {
	var epoch uint32
	var v fastpathFlow
	err := f.objects.Flows.Lookup(flow.key(), &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Sequence{}, nil
	}
	if err = errors.Join(err, f.objects.Epoch.Get(&epoch)); err != nil {
		return Sequence{}, fmt.Errorf("look up a connection of the fast path: %w", err)
	}
	if v.SeqState == 0 || v.MaybeClosed != 0 || v.Out.Epoch != epoch || v.In.Epoch != epoch {
		return Sequence{}, nil
	}
	ago := uint32(now/time.Millisecond) - v.LastMs
	return Sequence{
		Pod: Side{v.Out.SndNxt, v.Out.RcvNxt, v.Out.WindowEnd}, Peer: Side{v.In.SndNxt, v.In.RcvNxt, v.In.WindowEnd},
		Last: (now/time.Millisecond - time.Duration(int32(ago))) * time.Millisecond,
	}, nil
}

// InvalidateSequences has numbers of connections not be believed until another packet of each way was seen:
// programs that see all are about to be taken off, and attached again.
func (f *Fastpath) InvalidateSequences() error {
	var epoch uint32
	if err := f.objects.Epoch.Get(&epoch); err != nil {
		return fmt.Errorf("ask for the epoch of the fast path: %w", err)
	}
	if err := f.objects.Epoch.Set(epoch + 1); err != nil {
		return fmt.Errorf("begin an epoch of the fast path: %w", err)
	}
	return nil
}

// Flows are the connections that are known. From then on the programs look for no others.
func (f *Fastpath) Flows() (map[Flow]Activity, error) {
	all := make(map[Flow]Activity)
	led := make(map[fastpathKey]uint64)
	hints := make([]uint64, f.objects.Bloom.Size()/8)
	before := make([]uint64, len(hints))
	if err := f.objects.Bloom.Get(before); err != nil {
		return nil, fmt.Errorf("ask the fast path which connections are known: %w", err)
	}
	var k fastpathKey
	var v fastpathFlow
	i := f.objects.Flows.Iterate()
	for i.Next(&k, &v) {
		link := v.Out.Device
		if link == 0 && v.In.Template != 0 { // datagrams that come, and none that go
			var pod fastpathPodLink
			if err := f.objects.PodLinks.Lookup(v.In.Template, &pod); err != nil {
				return nil, fmt.Errorf("look up the pod of a connection of the fast path: %w", err)
			}
			link = pod.Veth
		}
		all[k.flow(v)] = Activity{Validated: time.Duration(max(v.Out.Validated, v.In.Validated)), Link: int(link)}
		hints[v.BloomBit/64] |= 1 << (v.BloomBit % 64)
		if v.WirePeer != k.wirePeer() {
			led[k] = v.WirePeer
		}
	}
	switch err := i.Err(); {
	case errors.Is(err, ebpf.ErrIterationAborted):
		// One that changes all the time is not read to its end; what was read is true, but not all
		// that is to be hinted at.
		return all, nil
	case err != nil:
		return nil, fmt.Errorf("list connections of the fast path: %w", err)
	}
	switch err := f.sweepReverseNAT(led, hints); {
	case errors.Is(err, ebpf.ErrIterationAborted):
		return all, nil
	case err != nil:
		return nil, err
	}
	// Those that became known meanwhile are left alone.
	now := make([]uint64, len(hints))
	if err := f.objects.Bloom.Get(now); err != nil {
		return nil, fmt.Errorf("ask the fast path which connections are known: %w", err)
	}
	for i := range hints {
		hints[i] |= now[i] &^ before[i]
	}
	if err := f.objects.Bloom.Set(hints); err != nil {
		return nil, fmt.Errorf("tell the fast path which connections are known: %w", err)
	}
	return all, nil
}

// sweepReverseNAT takes out what led to connections that are gone, and hints at the others: led
// are those whose peer is translated, and to what.
func (f *Fastpath) sweepReverseNAT(led map[fastpathKey]uint64, hints []uint64) error {
	var wire fastpathKey
	var front fastpathNatEntry
	var gone []fastpathKey
	i := f.objects.ReverseNat.Iterate()
	for i.Next(&wire, &front) {
		if led[front.Key] != wire.wirePeer() {
			// It may have become known since.
			var v fastpathFlow
			err := f.objects.Flows.Lookup(front.Key, &v)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("look up a connection of the fast path: %w", err)
			}
			if err != nil || v.WirePeer != wire.wirePeer() {
				gone = append(gone, wire)
				continue
			}
		}
		hints[front.BloomBit/64] |= 1 << (front.BloomBit % 64)
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("list translated connections of the fast path: %w", err)
	}
	for _, wire := range gone {
		if err := f.objects.ReverseNat.Delete(wire); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget a translated connection of the fast path: %w", err)
		}
	}
	return nil
}

// wirePeer is FAR of fastpath.c: the peer in one word.
func (k fastpathKey) wirePeer() uint64 { return uint64(k.Peer) | uint64(k.PeerPort)<<32 }

// Room is how many connections can be known.
func (f *Fastpath) Room() int { return int(f.objects.Flows.MaxEntries()) }

// Forget takes a connection out.
func (f *Fastpath) Forget(flow Flow) error {
	if err := f.objects.Flows.Delete(flow.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget a connection of the fast path: %w", err)
	}
	return nil
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

// words are an address of IPv6 as the programs have it.
func words(a netip.Addr) (w [2]uint64) {
	raw := a.As16()
	w[0], w[1] = binary.NativeEndian.Uint64(raw[:]), binary.NativeEndian.Uint64(raw[8:])
	return w
}

// hashAddr is that of fastpath.c: what stands for an address of IPv6 in a key.
func hashAddr(w [2]uint64) uint32 {
	h := w[0]*0x9e3779b97f4a7c15 + w[1]
	h ^= h >> 32
	return uint32(h * 0xd6e8feb86659fd93 >> 32)
}

// Counts tells what became of packets, by reason: "fast-out" and "fast-in" took the
// fast path, all others say why not. A packet can count twice: as one that was let go
// to see, and as what was found then.
func (f *Fastpath) Counts() (map[string]uint64, error) {
	var each []fastpathCpuState
	if err := f.objects.CpuStates.Lookup(uint32(0), &each); err != nil {
		return nil, fmt.Errorf("read counters of the fast path: %w", err)
	}
	counts := make(map[string]uint64, len(reasons))
	for why, name := range reasons {
		for _, cpu := range each {
			counts[name] += cpu.Reasons[why]
		}
	}
	return counts, nil
}
