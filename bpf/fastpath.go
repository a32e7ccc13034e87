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
	// Leave is for the ingress of a pod's veth on the node, Deliver for its egress.
	Leave, Deliver *ebpf.Program
	// Tunnel is for the egress of a VXLAN device, Arrive for its ingress.
	Tunnel, Arrive *ebpf.Program
	// Wire is for the egress of the NIC, Land for its ingress.
	Wire, Land *ebpf.Program

	objects fastpathObjects
	news    *ringbuf.Reader
	// noGuard says why there is no guard.
	noGuard error
	// What is in the maps of these names.
	owners  map[fastpathOwner]bool
	watched map[fastpathWatch]bool
}

// Reasons name what became of packets, in the order of enum why: the first two took
// the fast path.
var reasons = [...]string{
	"fast-out", "fast-in", "unknown", "odd-flags", "dead", "other", "options", "fragment", "last-hop", "malformed", "unsummed",
	"marked", "stale", "changed", "asked", "unlike", "large", "no-room",
	"untracked", "unanswered", "translated", "helped", "window", "rewritten", "full", "forged",
}

// Flow is a connection of a pod, from the pod's end.
type Flow struct {
	Pod, Peer netip.AddrPort
	// Protocol is TCP's or UDP's number.
	Protocol uint8
}

// Overlay is what the outer packets of a VXLAN device have.
type Overlay struct {
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
	f := &Fastpath{owners: make(map[fastpathOwner]bool), watched: make(map[fastpathWatch]bool)}
	if f.noGuard = spec.LoadAndAssign(&f.objects, nil); f.noGuard != nil {
		if err := withoutGuard(spec).LoadAndAssign(&f.objects, nil); err != nil {
			return nil, fmt.Errorf("load programs of the fast path: %w", explain(errors.Join(err, limitErr)))
		}
	}
	o := &f.objects
	f.Leave, f.Deliver, f.Tunnel, f.Arrive, f.Wire, f.Land = o.Leave, o.Deliver, o.Tunnel, o.Arrive, o.Wire, o.Land
	var err error
	if f.news, err = ringbuf.NewReader(o.News); err != nil {
		return nil, errors.Join(fmt.Errorf("open the fast path's news: %w", err), o.Close())
	}
	return f, nil
}

// Close lets go of programs and maps, and ends News.
func (f *Fastpath) Close() error { return errors.Join(f.news.Close(), f.objects.Close()) }

// Beat lets the programs work until a time of CLOCK_MONOTONIC.
func (f *Fastpath) Beat(until time.Duration) error {
	if err := f.objects.AliveUntil.Set(uint64(until)); err != nil {
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

// SetOverlays tells of the VXLAN devices, by index, whose packets may take the fast
// path: these and no others.
func (f *Fastpath) SetOverlays(all map[int]Overlay) error {
	m := f.objects.Overlays
	var known []uint32
	var index uint32
	var value fastpathOverlay
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

// Owner is an Ethernet address that is at a pod's link, by its index on the node.
type Owner struct {
	Link int
	MAC  [6]byte
}

// SetOwners tells at which links of pods which Ethernet addresses are: packets to these
// may be delivered there, and no others. It is not to be called more than once at a time.
func (f *Fastpath) SetOwners(all []Owner) error {
	want := make(map[fastpathOwner]bool, len(all))
	for _, o := range all {
		want[fastpathOwner{Link: uint32(o.Link), Mac: o.MAC}] = true
	}
	// If there is no room, packets to the others are counted as unlike.
	return follow(f.objects.Owners, f.owners, want)
}

// value is an overlay as the programs have it: in network order.
func (o Overlay) value() fastpathOverlay {
	words := func(to []uint16, from []byte) {
		for i := range to {
			to[i] = binary.NativeEndian.Uint16(from[2*i:])
		}
	}
	v := fastpathOverlay{Nic: uint32(o.NIC)}
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
			want[fastpathWatch{Pod: ShortOf(a).number}] = true
		}
	}
	return follow(f.objects.Watched, f.watched, want)
}

// follow has the keys of a map be those that are wanted, as far as there is room. It knows
// those that are there.
func follow[K comparable](m *ebpf.Map, there, want map[K]bool) error {
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

// Ask is what the programs ask for, as enum ask of fastpath.c.
type Ask uint32

// What is to be done of a connection: see fastpath.c.
const (
	// AskWatch is for a pod that has a connection which is worth it, and is not watched.
	AskWatch Ask = iota
	// AskLiberal has conntrack stop checking a connection's window.
	AskLiberal
	// AskAcked has conntrack know that all that it has seen was acknowledged.
	AskAcked
	// AskRenew has conntrack know the numbers that a connection has got to.
	AskRenew
	// AskClose has conntrack know that a connection was reset.
	AskClose
	// AskReopen has conntrack know that a connection goes on, which it took to have ended.
	AskReopen
	asks
)

// News is what the programs ask for.
type News struct {
	Ask Ask
	// Pod is the address of the pod to watch; of another host maybe.
	Pod Short
	// Flow is the connection of all other asks.
	Flow Flow
}

// Short is what keys have of an address: all of IPv4's, a digest of IPv6's.
type Short struct {
	number uint32
	six    bool
}

// ShortOf is that of an address.
func ShortOf(a netip.Addr) Short {
	if a.Is6() {
		return Short{digest(words(a)), true}
	}
	ip := a.As4()
	return Short{binary.NativeEndian.Uint32(ip[:]), false}
}

// Addr is the address, if it is known: one of IPv4.
func (s Short) Addr() (a netip.Addr, known bool) {
	if s.six {
		return a, false
	}
	var ip [4]byte
	binary.NativeEndian.PutUint32(ip[:], s.number)
	return netip.AddrFrom4(ip), true
}

// News waits, until Close, for something to be done; the same may come more than once.
func (f *Fastpath) News() (News, error) {
	r, err := f.news.Read()
	if err != nil {
		return News{}, fmt.Errorf("wait for news of the fast path: %w", err)
	}
	return decodeNews(r.RawSample)
}

// decodeNews reads struct told of fastpath.c.
func decodeNews(b []byte) (News, error) {
	var told struct {
		Key         fastpathKey
		Pod6, Peer6 [2]uint64
		Ask         Ask
		_           uint32
	}
	if _, err := binary.Decode(b, binary.NativeEndian, &told); err != nil {
		return News{}, fmt.Errorf("read news of the fast path: %w", err)
	}
	switch {
	case told.Ask >= asks:
		return News{}, fmt.Errorf("read news of the fast path: nothing is known to ask by %d", told.Ask)
	case told.Ask == AskWatch:
		return News{Pod: Short{told.Key.Pod, told.Key.Six != 0}}, nil
	}
	return News{Ask: told.Ask, Flow: told.Key.flow(fastpathFlow{Pod6: told.Pod6, Peer6: told.Peer6})}, nil
}

// flow is the connection of an entry.
func (k fastpathKey) flow(v fastpathFlow) Flow {
	end := func(ip uint32, whole [2]uint64, port uint16) netip.AddrPort {
		var p [2]byte
		binary.NativeEndian.PutUint16(p[:], port)
		var raw [16]byte
		if k.Six == 0 {
			binary.NativeEndian.PutUint32(raw[:], ip)
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[:])), binary.BigEndian.Uint16(p[:]))
		}
		binary.NativeEndian.PutUint64(raw[:], whole[0])
		binary.NativeEndian.PutUint64(raw[8:], whole[1])
		return netip.AddrPortFrom(netip.AddrFrom16(raw), binary.BigEndian.Uint16(p[:]))
	}
	return Flow{Pod: end(k.Pod, v.Pod6, k.PodPort), Peer: end(k.Peer, v.Peer6, k.PeerPort), Protocol: k.Protocol}
}

// Seen is what is known of a connection.
type Seen struct {
	// At is when it was last seen to be let through, the later of both ways
	// (CLOCK_MONOTONIC; 0 if it has not been).
	At time.Duration
	// Link is its pod's, by its index; 0 if it was never let through.
	Link int
}

// Numbers are how far a connection of TCP has got, by what its packets said, and when the last one
// was seen, to the millisecond (CLOCK_MONOTONIC). They are zero if not all of it is known.
type Numbers struct {
	Pod, Peer Side
	Last      time.Duration
}

// Side is one side of a connection of TCP, in numbers of RFC 9293: what it sends next, what it
// expects next, and how far the other side lets it send.
type Side struct{ Next, Expects, Edge uint32 }

// Quiet tells whether all that either side has sent was acknowledged.
func (n Numbers) Quiet() bool {
	return n != Numbers{} && n.Pod.Next == n.Peer.Expects && n.Peer.Next == n.Pod.Expects
}

// Numbers are those of a connection now, at a time of CLOCK_MONOTONIC.
func (f *Fastpath) Numbers(flow Flow, now time.Duration) (Numbers, error) {
	var epoch uint32
	var v fastpathFlow
	err := f.objects.Flows.Lookup(flow.key(), &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Numbers{}, nil
	}
	if err = errors.Join(err, f.objects.Epoch.Get(&epoch)); err != nil {
		return Numbers{}, fmt.Errorf("look up a connection of the fast path: %w", err)
	}
	if v.Numbered == 0 || v.Doubted != 0 || v.Out.Epoch != epoch || v.In.Epoch != epoch {
		return Numbers{}, nil
	}
	ago := uint32(now/time.Millisecond) - v.Last
	return Numbers{
		Pod: Side{v.Out.End, v.Out.Acked, v.Out.Edge}, Peer: Side{v.In.End, v.In.Acked, v.In.Edge},
		Last: (now/time.Millisecond - time.Duration(int32(ago))) * time.Millisecond,
	}, nil
}

// Miss has numbers of connections not be believed until another packet of each way was seen:
// programs that see all are about to be taken off, and attached again.
func (f *Fastpath) Miss() error {
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
func (f *Fastpath) Flows() (map[Flow]Seen, error) {
	all := make(map[Flow]Seen)
	led := make(map[fastpathKey]uint64)
	hints := make([]uint64, f.objects.Hints.Size()/8)
	before := make([]uint64, len(hints))
	if err := f.objects.Hints.Get(before); err != nil {
		return nil, fmt.Errorf("ask the fast path which connections are known: %w", err)
	}
	var k fastpathKey
	var v fastpathFlow
	i := f.objects.Flows.Iterate()
	for i.Next(&k, &v) {
		link := v.Out.Device
		if link == 0 && v.In.Place != 0 { // datagrams that come, and none that go
			var pod fastpathPod
			if err := f.objects.fastpathMaps.Pods.Lookup(v.In.Place, &pod); err != nil {
				return nil, fmt.Errorf("look up the pod of a connection of the fast path: %w", err)
			}
			link = pod.Veth
		}
		all[k.flow(v)] = Seen{At: time.Duration(max(v.Out.Seen, v.In.Seen)), Link: int(link)}
		hints[v.Hint/64] |= 1 << (v.Hint % 64)
		if v.Far != k.far() {
			led[k] = v.Far
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
	switch err := f.sweepFronts(led, hints); {
	case errors.Is(err, ebpf.ErrIterationAborted):
		return all, nil
	case err != nil:
		return nil, err
	}
	// Those that became known meanwhile are left alone.
	now := make([]uint64, len(hints))
	if err := f.objects.Hints.Get(now); err != nil {
		return nil, fmt.Errorf("ask the fast path which connections are known: %w", err)
	}
	for i := range hints {
		hints[i] |= now[i] &^ before[i]
	}
	if err := f.objects.Hints.Set(hints); err != nil {
		return nil, fmt.Errorf("tell the fast path which connections are known: %w", err)
	}
	return all, nil
}

// sweepFronts takes out what led to connections that are gone, and hints at the others: led
// are those whose peer is translated, and to what.
func (f *Fastpath) sweepFronts(led map[fastpathKey]uint64, hints []uint64) error {
	var wire fastpathKey
	var front fastpathFront
	var gone []fastpathKey
	i := f.objects.Fronts.Iterate()
	for i.Next(&wire, &front) {
		if led[front.Key] != wire.far() {
			// It may have become known since.
			var v fastpathFlow
			err := f.objects.Flows.Lookup(front.Key, &v)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("look up a connection of the fast path: %w", err)
			}
			if err != nil || v.Far != wire.far() {
				gone = append(gone, wire)
				continue
			}
		}
		hints[front.Hint/64] |= 1 << (front.Hint % 64)
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("list translated connections of the fast path: %w", err)
	}
	for _, wire := range gone {
		if err := f.objects.Fronts.Delete(wire); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget a translated connection of the fast path: %w", err)
		}
	}
	return nil
}

// far is FAR of fastpath.c: the peer in one word.
func (k fastpathKey) far() uint64 { return uint64(k.Peer) | uint64(k.PeerPort)<<32 }

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
		return ShortOf(a.Addr()).number, binary.NativeEndian.Uint16(port)
	}
	k := fastpathKey{Protocol: f.Protocol}
	if f.Pod.Addr().Is6() {
		k.Six = 1
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

// digest is that of fastpath.c: what stands for an address of IPv6 in a key.
func digest(w [2]uint64) uint32 {
	h := w[0]*0x9e3779b97f4a7c15 + w[1]
	h ^= h >> 32
	return uint32(h * 0xd6e8feb86659fd93 >> 32)
}

// Counts tells what became of packets, by reason: "fast-out" and "fast-in" took the
// fast path, all others say why not. A packet can count twice: as one that was let go
// to see, and as what was found then.
func (f *Fastpath) Counts() (map[string]uint64, error) {
	var each []fastpathCpu
	if err := f.objects.Cpus.Lookup(uint32(0), &each); err != nil {
		return nil, fmt.Errorf("read counters of the fast path: %w", err)
	}
	counts := make(map[string]uint64, len(reasons))
	for why, name := range reasons {
		for _, cpu := range each {
			counts[name] += cpu.Whys[why]
		}
	}
	return counts, nil
}
