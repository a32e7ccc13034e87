//go:build linux

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Fastpath has the programs and maps of the fast path of one node: fastpath.c says where
// each program is attached and what it does. The caller attaches them, and renews their
// lease by RenewLease.
type Fastpath struct {
	// Encap belongs on the ingress of a pod's veth on the node, ObservePod on its egress.
	Encap, ObservePod *ebpf.Program
	// ObserveVXLAN belongs on the egress of a VXLAN device, VXLANIngress on its ingress.
	ObserveVXLAN, VXLANIngress *ebpf.Program
	// ObserveNIC belongs on the egress of the NIC, NICDecap on its ingress.
	ObserveNIC, NICDecap *ebpf.Program

	objects fastpathObjects
	events  *ringbuf.Reader
	// noDropForged is why the kernel did not load drop_forged, if so.
	noDropForged error
	// linkMACs and watched mirror the keys of the maps link_macs and watched_pods.
	linkMACs map[fastpathLinkMac]bool
	watched  map[fastpathWatch]bool
}

// reasons names the values of enum reason in fastpath.c, in its order: packets of the first two
// took the fast path.
var reasons = [...]string{
	"fast-out", "fast-in", "no-flow", "tcp-flags", "lease-expired", "not-tcp-udp", "ip-options", "fragment", "ttl", "malformed",
	"csum-unverified", "skb-mark", "flow-expired", "invalidated", "revalidate", "mismatch", "exceeds-mtu", "encap-failed",
	"untracked", "unreplied", "nat", "ct-helper", "tcp-window", "rewritten", "table-full", "forged",
}

// Flow is a connection, seen from its pod.
type Flow struct {
	Pod, Peer netip.AddrPort
	// Protocol is the IP protocol number of TCP or UDP.
	Protocol uint8
}

// VXLANDevice has the settings of a VXLAN device that appear in its outer headers.
type VXLANDevice struct {
	// NIC is the index of the underlying device.
	NIC int
	// Source is the outer IPv4 source address, Port the outer destination port.
	Source netip.Addr
	Port   uint16
	VNI    uint32
	// MAC is the MAC address of the VXLAN device.
	MAC net.HardwareAddr
}

// LoadFastpath loads the programs. They forward nothing until RenewLease. An error says what the
// kernel lacks.
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
		return nil, errors.Join(fmt.Errorf("open the ring buffer of the fast path: %w", err), o.Close())
	}
	return f, nil
}

// Close closes programs and maps, and makes ReadEvent return.
func (f *Fastpath) Close() error { return errors.Join(f.events.Close(), f.objects.Close()) }

// RenewLease lets the programs forward packets until a time of CLOCK_MONOTONIC.
func (f *Fastpath) RenewLease(until time.Duration) error {
	if err := f.objects.LeaseExpires.Set(uint64(until)); err != nil {
		return fmt.Errorf("renew the lease of the fast path: %w", err)
	}
	return nil
}

// SetGeneration invalidates flows that were validated in any other generation.
func (f *Fastpath) SetGeneration(n uint32) error {
	if err := f.objects.Generation.Set(n); err != nil {
		return fmt.Errorf("invalidate the fast path: %w", err)
	}
	return nil
}

// SetNode configures the least MTU of all paths, and the range of source ports of outer packets,
// without its end.
func (f *Fastpath) SetNode(mtu int, from, to uint16) error {
	if err := errors.Join(
		f.objects.Mtu.Set(uint32(mtu)),
		f.objects.PortFrom.Set(uint32(from)),
		f.objects.PortTo.Set(uint32(to)),
	); err != nil {
		return fmt.Errorf("configure the fast path of the node: %w", err)
	}
	return nil
}

// SetVXLANDevices replaces the VXLAN devices, by index, whose packets may take the fast path.
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
				return fmt.Errorf("remove VXLAN device %d: %w", index, err)
			}
		}
	}
	for index, o := range all {
		if err := m.Put(uint32(index), o.value()); err != nil {
			return fmt.Errorf("add VXLAN device %d: %w", index, err)
		}
	}
	return nil
}

// LinkMAC is a MAC address behind a pod's link, which is given by its index on the node.
type LinkMAC struct {
	Link int
	MAC  [6]byte
}

// SetLinkMACs replaces the MAC addresses behind pods' links: the fast path delivers packets to a
// link only for these. It is not safe for concurrent use.
func (f *Fastpath) SetLinkMACs(all []LinkMAC) error {
	want := make(map[fastpathLinkMac]bool, len(all))
	for _, o := range all {
		want[fastpathLinkMac{Link: uint32(o.Link), Mac: o.MAC}] = true
	}
	// If the map is full, packets to the other addresses take the slow path as mismatch.
	return updateSet(f.objects.LinkMacs, f.linkMACs, want)
}

// value returns the device as the programs have it: in network byte order.
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

// Pod is the link of a pod, by its index on the node, and the known addresses behind it.
type Pod struct {
	Link      int
	Addresses []netip.Addr
}

// SetWatched replaces the pods whose links have all programs. The programs create flows for the
// connections of these pods; for those of others they send EventAttach. It is not safe for
// concurrent use.
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

// updateSet makes the keys of a map those in want, as far as there is room, and keeps there in
// step with the map.
func updateSet[K comparable](m *ebpf.Map, there, want map[K]bool) error {
	for k := range there {
		if want[k] {
			continue
		}
		if err := m.Delete(k); err != nil {
			return fmt.Errorf("delete %+v from the fast path's %s: %w", k, m, err)
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

// EventKind is what an event asks the agent to do, in the order of enum event_kind in fastpath.c.
type EventKind uint32

const (
	// EventAttach requests programs for the link of an idle pod that has an eligible connection.
	EventAttach EventKind = iota
	// EventLiberal makes the conntrack entry of a connection liberal.
	EventLiberal
	// EventAcked clears conntrack's flag of unacknowledged data.
	EventAcked
	// EventResync resynchronises conntrack with a connection.
	EventResync
	// EventReset moves the conntrack entry of a connection to CLOSE.
	EventReset
	// EventReopen moves the conntrack entry of a connection that has not ended back to ESTABLISHED.
	EventReopen
	eventKinds
)

// Event is an event from the programs to the agent.
type Event struct {
	Kind EventKind
	// Pod is the address of an EventAttach; it may belong to another host.
	Pod PodKey
	// Flow is the connection of all other kinds.
	Flow Flow
}

// PodKey is the form of an address in map keys: a whole IPv4 address, or the hash of an IPv6 address.
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

// Addr returns the address if the key tells: that of IPv4.
func (s PodKey) Addr() (a netip.Addr, known bool) {
	if s.six {
		return a, false
	}
	var ip [4]byte
	binary.NativeEndian.PutUint32(ip[:], s.number)
	return netip.AddrFrom4(ip), true
}

// ReadEvent waits for the next event, until Close. The same event may come more than once.
func (f *Fastpath) ReadEvent() (Event, error) {
	r, err := f.events.Read()
	if err != nil {
		return Event{}, fmt.Errorf("wait for an event of the fast path: %w", err)
	}
	return decodeEvent(r.RawSample)
}

// decodeEvent decodes struct event of fastpath.c.
func decodeEvent(b []byte) (Event, error) {
	var event struct {
		Key         fastpathKey
		Pod6, Peer6 [2]uint64
		Kind        EventKind
		_           uint32
	}
	if _, err := binary.Decode(b, binary.NativeEndian, &event); err != nil {
		return Event{}, fmt.Errorf("decode an event of the fast path: %w", err)
	}
	switch {
	case event.Kind >= eventKinds:
		return Event{}, fmt.Errorf("decode an event of the fast path: unknown kind %d", event.Kind)
	case event.Kind == EventAttach:
		return Event{Pod: PodKey{event.Key.Pod, event.Key.IsIpv6 != 0}}, nil
	}
	return Event{Kind: event.Kind, Flow: event.Key.flow(fastpathFlow{Pod6: event.Pod6, Peer6: event.Peer6})}, nil
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

// Activity is the state of a flow.
type Activity struct {
	// Validated is when the flow was last validated in either direction (CLOCK_MONOTONIC; 0 if it
	// never was).
	Validated time.Duration
	// Link is the index of the pod's link, 0 if the flow was never validated.
	Link int
}

// Sequence has the TCP sequence numbers of both sides of a connection, and when its last packet was
// seen, to the millisecond (CLOCK_MONOTONIC). It is zero if not all of that is known.
type Sequence struct {
	Pod, Peer Side
	Last      time.Duration
}

// Side has the sequence numbers of one side of a TCP connection (RFC 9293): SND.NXT, RCV.NXT, and the
// right edge of the window that the other side announced.
type Side struct{ Next, Expects, Edge uint32 }

// Acknowledged reports whether all data of both sides is acknowledged.
func (n Sequence) Acknowledged() bool {
	return n != Sequence{} && n.Pod.Next == n.Peer.Expects && n.Peer.Next == n.Pod.Expects
}

// Sequence returns the sequence numbers of a connection at a time of CLOCK_MONOTONIC, which is now.
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

// each calls fn with the entries of a hash map until fn fails. It reads them in batches: an iterator
// needs two system calls for each entry, and ends early if the entry that it has reached is deleted.
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

// InvalidateSequences invalidates all sequence numbers, until the programs have seen another packet
// in each direction: while a program is detached, packets pass unseen.
func (f *Fastpath) InvalidateSequences() error {
	var epoch uint32
	if err := f.objects.Epoch.Get(&epoch); err != nil {
		return fmt.Errorf("read the epoch of the fast path: %w", err)
	}
	if err := f.objects.Epoch.Set(epoch + 1); err != nil {
		return fmt.Errorf("set the epoch of the fast path: %w", err)
	}
	return nil
}

// Flows returns the known connections. It also clears the Bloom filter's bits of deleted ones, so that
// the programs no longer look these up.
func (f *Fastpath) Flows() (map[Flow]Activity, error) {
	all := make(map[Flow]Activity)
	translated := make(map[fastpathKey]uint64)
	before, err := f.bloom()
	if err != nil {
		return nil, err
	}
	used := make([]uint64, len(before))
	err = each(f.objects.Flows, func(k fastpathKey, v fastpathFlow) error {
		link := v.Out.Device
		if link == 0 && v.In.Template != 0 { // UDP in one direction, into the pod
			var pod fastpathPodLink
			if err := f.objects.PodLinks.Lookup(v.In.Template, &pod); err != nil {
				return fmt.Errorf("look up the pod's link: %w", err)
			}
			link = pod.Veth
		}
		all[k.flow(v)] = Activity{Validated: time.Duration(max(v.Out.Validated, v.In.Validated)), Link: int(link)}
		used[v.BloomBit/64] |= 1 << (v.BloomBit % 64)
		if v.WirePeer != k.wirePeer() {
			translated[k] = v.WirePeer
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list connections of the fast path: %w", err)
	}
	if err := f.sweepReverseNAT(translated, used); err != nil {
		return nil, err
	}
	return all, f.clearBloom(before, used)
}

// clearBloom clears the Bloom filter's bits that no flow has. used has the bits of the flows, read after
// the filter was before.
func (f *Fastpath) clearBloom(before, used []uint64) error {
	now, err := f.bloom()
	if err != nil {
		return err
	}
	for i := range used {
		used[i] |= now[i] &^ before[i] // of flows that were created meanwhile
	}
	if slices.Equal(used, now) {
		return nil
	}
	if err := f.setBloom(used); err != nil {
		return err
	}
	// That may have cleared the bit of a flow: one that was created just now, or meanwhile in the place of
	// a deleted flow that had set the same bit. The programs have not seen all packets of such a flow. They
	// create a flow before they set its bit, so it is found here.
	for {
		used, err := f.usedBits()
		if err != nil {
			return err
		}
		now, err := f.bloom()
		if err != nil {
			return err
		}
		lost := false
		for i := range now {
			lost = lost || used[i]&^now[i] != 0
			now[i] |= used[i]
		}
		if !lost {
			return nil
		}
		if err := errors.Join(f.setBloom(now), f.InvalidateSequences()); err != nil {
			return err
		}
	}
}

// usedBits returns the Bloom filter's bits of all flows and reverse NAT entries.
func (f *Fastpath) usedBits() ([]uint64, error) {
	used := make([]uint64, f.objects.Bloom.Size()/8)
	err := errors.Join(
		each(f.objects.Flows, func(_ fastpathKey, v fastpathFlow) error {
			used[v.BloomBit/64] |= 1 << (v.BloomBit % 64)
			return nil
		}),
		each(f.objects.ReverseNat, func(_ fastpathKey, v fastpathNatEntry) error {
			used[v.BloomBit/64] |= 1 << (v.BloomBit % 64)
			return nil
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("list connections of the fast path: %w", err)
	}
	return used, nil
}

func (f *Fastpath) bloom() ([]uint64, error) {
	bits := make([]uint64, f.objects.Bloom.Size()/8)
	if err := f.objects.Bloom.Get(bits); err != nil {
		return nil, fmt.Errorf("read the Bloom filter of the fast path: %w", err)
	}
	return bits, nil
}

func (f *Fastpath) setBloom(bits []uint64) error {
	if err := f.objects.Bloom.Set(bits); err != nil {
		return fmt.Errorf("write the Bloom filter of the fast path: %w", err)
	}
	return nil
}

// sweepReverseNAT deletes the reverse NAT entries of deleted flows, and sets the bits of the others in
// used. translated has the peer on the wire of each flow with NAT.
func (f *Fastpath) sweepReverseNAT(translated map[fastpathKey]uint64, used []uint64) error {
	var gone []fastpathKey
	err := each(f.objects.ReverseNat, func(wire fastpathKey, entry fastpathNatEntry) error {
		if translated[entry.Key] != wire.wirePeer() {
			// The flow may be new.
			var v fastpathFlow
			err := f.objects.Flows.Lookup(entry.Key, &v)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("look up a connection of the fast path: %w", err)
			}
			if err != nil || v.WirePeer != wire.wirePeer() {
				gone = append(gone, wire)
				return nil
			}
		}
		used[entry.BloomBit/64] |= 1 << (entry.BloomBit % 64)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list reverse NAT entries of the fast path: %w", err)
	}
	for _, wire := range gone {
		if err := f.objects.ReverseNat.Delete(wire); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete a reverse NAT entry of the fast path: %w", err)
		}
	}
	return nil
}

// wirePeer is PEER of fastpath.c: the peer in one word.
func (k fastpathKey) wirePeer() uint64 { return uint64(k.Peer) | uint64(k.PeerPort)<<32 }

// Room returns the size of the flow table.
func (f *Fastpath) Room() int { return int(f.objects.Flows.MaxEntries()) }

// Known reports whether a connection has a flow.
func (f *Fastpath) Known(flow Flow) (bool, error) {
	var v fastpathFlow
	switch err := f.objects.Flows.Lookup(flow.key(), &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up a connection of the fast path: %w", err)
	}
	return true, nil
}

// Forget deletes the flow of a connection.
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

// words returns an IPv6 address as the programs have it.
func words(a netip.Addr) (w [2]uint64) {
	raw := a.As16()
	w[0], w[1] = binary.NativeEndian.Uint64(raw[:]), binary.NativeEndian.Uint64(raw[8:])
	return w
}

// hashAddr is hash_address of fastpath.c: the form of an IPv6 address in keys.
func hashAddr(w [2]uint64) uint32 {
	h := w[0]*0x9e3779b97f4a7c15 + w[1]
	h ^= h >> 32
	return uint32(h * 0xd6e8feb86659fd93 >> 32)
}

// Counts returns the number of packets by reason: "fast-out" and "fast-in" took the fast path, all
// others took the slow path for that reason. A packet can count twice: as "revalidate", and for
// the reason that the probe found.
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
