//go:build linux

package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// session is a TCP connection whose ends the test simulates.
type session struct {
	grammar.Connection
	// next has the next sequence numbers of the pod and of the peer.
	next  [2]uint32
	ended string
}

// Ends of a session.
const (
	ofPod, ofPeer = 0, 1
	// windowScale is the scale that both ends announce.
	windowScale = 7
)

// segment describes a segment that an end sends.
type segment struct {
	flags   byte
	seq     uint32
	payload int
	// options has the TCP options, ipOptions the length of the IP options, and padding the length of the padding behind the
	// packet.
	options            []byte
	ipOptions, padding int
	ttl                byte
	// inFull means that the sender computes the whole checksum. wrong is added to it.
	inFull bool
	wrong  uint16
	// fragments is the number of fragments of the packet. If reversed, the last one is sent first.
	fragments int
	reversed  bool
	gso       uint16
}

// frames returns a segment of an end as it enters the node.
func (s *session) frames(end int, of segment) []injected {
	p := s.Out(tcp)
	if end == ofPeer {
		p = s.In(tcp)
	}
	p.Flags, p.Options, p.Payload, p.Trailing = of.flags, of.ipOptions, len(of.options)+of.payload, of.padding
	if of.ttl != 0 {
		p.TTL = of.ttl
	}
	if of.fragments > 1 {
		p.Fragment = 0
	}
	b := p.Bytes()
	l4 := len(b) - of.padding - p.Payload - 20
	h := b[l4:]
	binary.BigEndian.PutUint32(h[4:], of.seq)
	if of.flags&0x10 != 0 {
		binary.BigEndian.PutUint32(h[8:], s.next[1-end])
	}
	h[12] = byte(5+len(of.options)/4) << 4
	binary.BigEndian.PutUint16(h[14:], 0xffff)
	copy(h[20:], of.options)
	pseudo := s.pseudoSum(p, len(b)-of.padding-l4)
	at := injected{end: pod0, frame: b}
	if of.inFull {
		sum := ^grammar.Sum(uint32(pseudo), h[:len(h)-of.padding])
		binary.BigEndian.PutUint16(h[16:], sum+of.wrong)
	} else {
		binary.BigEndian.PutUint16(h[16:], pseudo)
		at.vnet = vnet{Flags: needsSum, SumStart: uint16(l4), SumAt: 16}
	}
	all := []injected{at}
	if of.gso > 0 {
		all[0].GSO, all[0].Segment, all[0].Headers = gsoTCP, of.gso, uint16(l4+20)
		if p.Six() {
			all[0].GSO = gsoTCP6
		}
	}
	if of.fragments > 1 {
		all = nil
		for _, f := range split(b, l4, of.fragments) {
			all = append(all, injected{end: pod0, frame: f})
		}
		if of.reversed {
			slices.Reverse(all)
		}
	}
	if end == ofPeer {
		for i := range all {
			all[i].end, all[i].frame = atNIC, s.Wrap(all[i].frame)
			if all[i].Flags != 0 {
				all[i].SumStart += uint16(s.Start() - 14)
			}
		}
	}
	return all
}

// pseudoSum returns the sum of a packet's pseudo header, from which a device completes the checksum.
func (s *session) pseudoSum(p grammar.Packet, length int) uint16 {
	return grammar.Sum(uint32(tcp)+uint32(length), slices.Concat(p.Source.Addr().AsSlice(), p.Target.Addr().AsSlice()))
}

// split splits an IPv4 packet into fragments.
func split(b []byte, l4, n int) (all [][]byte) {
	each := (len(b)-l4)/n/8*8 + 8
	for at := l4; at < len(b); at += each {
		f := append(slices.Clone(b[:l4]), b[at:min(at+each, len(b))]...)
		place := uint16((at - l4) / 8)
		if at+each < len(b) {
			place |= 0x2000
		}
		binary.BigEndian.PutUint16(f[16:], uint16(len(f)-14))
		binary.BigEndian.PutUint16(f[20:], place)
		f[24], f[25] = 0, 0
		binary.BigEndian.PutUint16(f[24:], ^grammar.Sum(0, f[14:l4]))
		all = append(all, f)
	}
	return all
}

// open returns the handshake of a session that the end by begins.
func (s *session) open(by int) []injected {
	options := []byte{1, 1, 4, 2, 1, 3, 3, windowScale} // SACK permitted, window scale
	syn := s.frames(by, segment{flags: tcpSYN, seq: s.next[by], options: options})
	s.next[by]++
	answer := s.frames(1-by, segment{flags: tcpSYN | 0x10, seq: s.next[1-by], options: options})
	s.next[1-by]++
	return slices.Concat(syn, answer, s.frames(by, segment{flags: 0x10, seq: s.next[by]}))
}

// plain returns a segment of an end, and the acknowledgement of the other.
func (s *session) plain(end, payload int) []injected {
	all := s.frames(end, segment{flags: 0x18, seq: s.next[end], payload: payload})
	s.next[end] += uint32(payload)
	return append(all, s.frames(1-end, segment{flags: 0x10, seq: s.next[1-end]})...)
}

// any returns a valid but unusual segment of an end, or one that its receiver ignores.
func (s *session) any(r *rand.Rand, end int, large bool) []injected {
	of := segment{flags: 0x10, seq: s.next[end], payload: r.IntN(1300)}
	repeat := false
	switch r.IntN(16) {
	case 0, 1:
		of.ipOptions = 8 * (1 + r.IntN(4))
	case 2, 3:
		of.padding = 1 + r.IntN(60)
	case 4:
		of.ttl, repeat = 1, true // the node drops it
	case 5:
		of.flags |= 0x20 // urgent
	case 6:
		if !s.Pod.Addr().Is6() {
			of.payload += 100
			of.fragments, of.reversed, of.inFull = 2+r.IntN(3), r.IntN(2) == 0, true
		}
	case 7:
		of.inFull, of.wrong, repeat = true, 1+uint16(r.IntN(1000)), true // the receiver drops it
	case 8:
		if large && end == ofPod {
			of.payload, of.gso = 2000+r.IntN(12_000), 1200
		}
	case 9:
		of.payload = 0 // an acknowledgement
	case 10:
		of.seq, of.payload = of.seq-1, 0 // a keepalive
	case 11:
		of.inFull = true
	case 12:
		back := min(1000, of.payload)
		of.seq, of.payload = of.seq-uint32(back), back // a retransmission
	}
	all := s.frames(end, of)
	if repeat {
		of.ttl, of.wrong = 0, 0
		all = append(all, s.frames(end, of)...)
	}
	if after := of.seq + uint32(of.payload); int32(after-s.next[end]) > 0 {
		s.next[end] = after
	}
	return all
}

func (s *session) end(r *rand.Rand) (all []injected) {
	by := r.IntN(2)
	switch s.ended = []string{"FIN", "FIN with options", "RST"}[r.IntN(3)]; s.ended {
	case "RST":
		return s.frames(by, segment{flags: tcpRST | 0x10, seq: s.next[by]})
	default:
		options := 0
		if s.ended != "FIN" {
			options = 8
		}
		for _, end := range []int{by, 1 - by} {
			all = append(all, s.frames(end, segment{flags: 0x11, seq: s.next[end], ipOptions: options})...)
			s.next[end]++
			all = append(all, s.frames(1-end, segment{flags: 0x10, seq: s.next[1-end], ipOptions: options})...)
		}
	}
	return all
}

// TestUnusualSegments sends valid segments of every form in mid-connection: with IP options, padding or urgent data, in
// fragments, larger than the MTU, with wrong checksums, on their last hop. It sends the same to a node with the fast path and to
// a reference node without it. Both drop packets that conntrack calls invalid. The packets that come out must be the same, and so
// must the conntrack entries once connections are idle or have ended. Most of the time it waits until they are idle, so it sends over all
// networks at the same time; no other test runs then. -packets 1000000 takes eight minutes.
func TestUnusualSegments(t *testing.T) {
	testenv.NeedRoot(t)
	for i, shape := range shapes {
		for version, six := range versions {
			t.Run(shape+" "+version, func(t *testing.T) {
				t.Parallel()
				sendUnusualSegments(t, shape, offloads[i%2], six, *packets/6)
			})
		}
	}
}

// TestForgedRSTBeforeThePeerSends checks that a RST outside the window does not close an entry that has just become liberal, if only the
// pod has sent since.
func TestForgedRSTBeforeThePeerSends(t *testing.T) {
	testenv.NeedRoot(t)
	p := newSimulation(t, spec.ShapeFlannel, spec.OffloadFull, false)
	fast := p.sides[0]
	s := &session{Connection: fast.other(0), next: [2]uint32{p.Uint32(), p.Uint32()}}
	same := p.sameOutput(s.open(ofPod))
	fast.eventually("conntrack does not check the window", func() {
		for range 100 {
			same = same && p.sameOutput(s.plain(ofPod, 10)[:1])
		}
	}, func() bool { is := fast.entry(s); return !same || is.Flags[0]&is.Flags[1]&flagLiberal != 0 })
	if !same || !p.sameOutput(s.frames(ofPeer, segment{flags: tcpRST, seq: s.next[ofPeer] + 1<<30})) {
		t.Fatal("the nodes differ")
	}
	if is := fast.entry(s); is.State != stateEstablished || is.Timeout <= closeTimeout {
		t.Errorf("conntrack has %+v", is)
	}
	if !p.untilAccelerated([]*session{s}) {
		t.Fatal("the nodes differ once the peer sends")
	}
}

func sendUnusualSegments(t *testing.T, shape, offload string, six bool, want int) {
	p := newSimulation(t, shape, offload, six)
	fast := p.sides[0]
	sum := func() uint64 { c := fast.counts(0); return c["fast-out"] + c["fast-in"] }
	began, lost := sum(), 0
	for p.shown < want {
		before, dropped := p.shown, droppedByBacklog(t)
		if p.round(min(20_000, want-p.shown)) {
			continue
		}
		if droppedByBacklog(t) == dropped {
			t.Fatal("the nodes differ")
		}
		// All network namespaces share the CPUs' backlogs, and another test may fill them.
		p.shown = before
		if lost++; lost == 10 {
			t.Fatal("the kernel dropped packets for lack of room in ten rounds")
		}
	}
	t.Logf("%d packets, %d on the fast path, %d rounds repeated; %v", p.shown, sum()-began, lost, fast.counts(0))
}

// simulation sends the packets of sessions to two nodes. Only the first has the fast path.
type simulation struct {
	*testing.T
	*rand.Rand
	sides [2]*isolatedNode
	// large means that the pod may send GSO packets.
	large       bool
	made, shown int
}

func newSimulation(t *testing.T, shape, offload string, six bool) *simulation {
	t.Helper()
	sides := [2]*isolatedNode{newIsolatedNode(t, shape, offload, six, false), newIsolatedNode(t, shape, offload, six, false)}
	for _, a := range sides {
		a.dnat(service, a.four.Peer, tcp)
		a.dropInvalid("n0")
		a.in("n0", func() error { // settle has made conntrack liberal
			return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", []byte("0"), 0)
		})
	}
	sides[0].startOn(0)
	testenv.PinThread(t) // or the last packet may overtake another
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return &simulation{T: t, Rand: rand.New(rand.NewPCG(seed, 0)), sides: sides, large: offload == offloads[0]}
}

// round sends this many packets of new sessions, and reports whether both nodes forwarded the same.
func (p *simulation) round(packets int) bool {
	p.Helper()
	var all []*session
	for range connections {
		all = append(all, &session{Connection: p.sides[0].other(p.made), next: [2]uint32{p.Uint32(), p.Uint32()}})
		p.made++
	}
	if !p.accelerate(all) || !p.talk(all, packets) {
		return false
	}
	same := true
	p.sides[0].eventually("the sequence numbers are known", func() {
		var last [][]injected
		for _, s := range all {
			if s.ended == "" {
				last = append(last, slices.Concat(s.plain(ofPod, 10), s.plain(ofPeer, 10)))
			}
		}
		same = p.sameOutput(together(last))
	}, func() bool { return !same || p.sides[0].allKnown(all) })
	if !same || !p.sameOutput(together(lastWords(all))) || !p.sameEntries(all) {
		return false
	}
	// Check that idle connections still work, and end as they should.
	var ends [][]injected
	for _, s := range all {
		if s.ended == "" {
			ends = append(ends, slices.Concat(s.plain(ofPeer, 10), s.plain(ofPod, 10), s.end(p.Rand)))
		}
	}
	return p.sameOutput(together(ends)) && p.sameEntries(all)
}

// talk sends this many unusual packets of the sessions, some of which end on the way.
func (p *simulation) talk(all []*session, packets int) bool {
	p.Helper()
	for n := 0; n < packets; {
		var batch []injected
		for end := p.IntN(2); len(batch) < inFlight; {
			s := all[p.IntN(len(all))]
			switch {
			case s.ended != "":
			case n > packets/2 && p.IntN(2000) == 0:
				batch = append(batch, s.end(p.Rand)...)
			default:
				batch = append(batch, s.any(p.Rand, end, p.large)...)
			}
		}
		n += len(batch)
		p.shown += len(batch)
		if !p.sameOutput(batch) {
			return false
		}
	}
	return true
}

// droppedByBacklog returns the number of packets that the kernel has dropped because the backlog of a CPU was full
// (net.core.netdev_max_backlog).
func droppedByBacklog(t *testing.T) (sum uint64) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		n, err := strconv.ParseUint(strings.Fields(line)[1], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// accelerate opens sessions on both nodes, and waits until those of the first are accelerated.
func (p *simulation) accelerate(all []*session) bool {
	p.Helper()
	var handshakes [][]injected
	for i, s := range all {
		by := ofPod
		if s.Front != service && i%4 == 1 {
			by = ofPeer
		}
		handshakes = append(handshakes, s.open(by))
	}
	return p.sameOutput(together(handshakes)) && p.untilAccelerated(all)
}

// untilAccelerated sends packets both ways until the first node accelerates all sessions.
func (p *simulation) untilAccelerated(all []*session) bool {
	p.Helper()
	same := true
	var out, in uint64
	p.sides[0].eventually("the sessions are accelerated", func() {
		before := p.sides[0].counts(0)
		var talk [][]injected
		for _, s := range all {
			talk = append(talk, slices.Concat(s.plain(ofPod, 100), s.plain(ofPeer, 100)))
		}
		same = p.sameOutput(together(talk))
		now := p.sides[0].counts(0)
		out, in = now["fast-out"]-before["fast-out"], now["fast-in"]-before["fast-in"]
	}, func() bool { return !same || min(out, in) >= uint64(2*len(all))*9/10 })
	return same
}

// keepalives is the source MAC address of the keepalives by which the agent asks pods for sequence numbers (recover.go).
var keepalives = []byte{2, 0, 0, 0, 0, 1}

// sameOutput injects packets into both nodes, and reports whether the same comes out. Conntrack must see a packet before the
// other end's packet that acknowledges it, so sameOutput waits whenever the sending end changes.
func (p *simulation) sameOutput(batch []injected) bool {
	p.Helper()
	for len(batch) > 0 {
		n := slices.IndexFunc(batch, func(s injected) bool { return s.end != batch[0].end })
		if n < 0 {
			n = len(batch)
		}
		if !p.sameOutputOf(batch[:n]) {
			return false
		}
		batch = batch[n:]
	}
	return true
}

// sameOutputOf is sameOutput for packets from one end.
func (p *simulation) sameOutputOf(batch []injected) bool {
	p.Helper()
	came := make(map[string]int)
	for i, a := range p.sides {
		each := 1 - 2*i
		for _, s := range batch {
			a.inject(s)
		}
		a.collect(func(end int, frame []byte) {
			if !bytes.Equal(frame[10+6:10+12], keepalives) {
				came[fmt.Sprint(end)+normalise(end == atNIC, frame, 0, a.like.Start())] += each
			}
		})
	}
	same := true
	for frame, n := range came {
		if n != 0 {
			same = false
			p.Logf("the node with the fast path sent this frame %+d times more to end %s: %x %x", n, frame[:1], frame[1:11], frame[11:min(len(frame), 200)])
		}
	}
	return same
}

// together interleaves the packets of several sessions: the first of each, then the second of each, and so on.
func together(sessions [][]injected) (all []injected) {
	for i := 0; ; i++ {
		for _, end := range []int{pod0, atNIC} {
			for _, s := range sessions {
				if i < len(s) && s[i].end == end {
					all = append(all, s[i])
				}
			}
		}
		if !slices.ContainsFunc(sessions, func(s []injected) bool { return i+1 < len(s) }) {
			return all
		}
	}
}

// sameEntries waits until both nodes have the same conntrack entries of all sessions.
func (p *simulation) sameEntries(all []*session) bool {
	p.Helper()
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		why := differences(p.sides, all)
		if why == "" {
			return true
		}
		if time.Since(began) > patience {
			p.Logf("conntrack entries differ:%s\n%s", why, p.sides[0].paths[0].Describe())
			return false
		}
	}
}

func differences(sides [2]*isolatedNode, all []*session) (why string) {
	for _, s := range all {
		fast, reference := sides[0].entry(s), sides[1].entry(s)
		if s.ended != "" { // conntrack may stay liberal with a connection that has ended
			for i := range fast.Flags {
				fast.Flags[i] &^= flagLiberal
			}
		}
		late := int(fast.Timeout) - int(reference.Timeout)
		if fast.State != reference.State || s.ended == "" && fast.Flags != reference.Flags || late < -3 || late > 3 {
			why += fmt.Sprintf("\n%s to %s (%s): %+v, without the fast path %+v", s.Pod, s.Front, s.ended, fast, reference)
		}
	}
	return why
}

// lastWords returns the packets that open sessions send before they become idle. Some are never acknowledged, so that the pod
// retransmits them.
func lastWords(all []*session) (words [][]injected) {
	for i, s := range all {
		if s.ended != "" {
			continue
		}
		switch i % 4 {
		case 0:
			word := segment{flags: 0x18, seq: s.next[ofPod], payload: 10}
			words = append(words, slices.Repeat(s.frames(ofPod, word), 4))
			s.next[ofPod] += 10
		case 1:
			words = append(words, s.plain(ofPeer, 10)[:1])
		default:
			words = append(words, slices.Concat(s.plain(ofPod, 10), s.plain(ofPeer, 10)))
		}
	}
	return words
}

// allKnown reports whether the sequence numbers of all open sessions are known. The pods here have no TCP that answers when the
// agent asks for them.
func (a *isolatedNode) allKnown(all []*session) bool {
	a.Helper()
	for _, s := range all {
		n, err := a.paths[0].SequenceNumbers(s.flow())
		if err != nil {
			a.Fatal(err)
		}
		if s.ended == "" && n == (datapath.Sequence{}) {
			return false
		}
	}
	return true
}

func (s *session) flow() datapath.Flow {
	return datapath.Flow{Pod: s.Pod, Peer: s.Front, Protocol: unix.IPPROTO_TCP}
}

func (a *isolatedNode) entry(s *session) (is conntrack.Progress) {
	a.Helper()
	a.in("n0", func() (err error) {
		is, err = progress(s.flow())
		return err
	})
	return is
}
