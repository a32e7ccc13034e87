//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// version is the IP version of the inner packets: four or six.
type version bool

const four, six version = false, true

func (v version) String() string {
	if v {
		return "IPv6"
	}
	return "IPv4"
}

// ends returns the addresses of the connection that these tests use.
func (v version) ends() (pod, peer netip.AddrPort) {
	if v {
		return netip.MustParseAddrPort("[fd00::2]:40000"), netip.MustParseAddrPort("[fd00:0:0:1::2]:5000")
	}
	return knownPod, knownPeer
}

var (
	knownPod, knownPeer = netip.MustParseAddrPort("10.244.0.2:40000"), netip.MustParseAddrPort("10.244.1.2:5000")
	// The peer's address as the pod sees it where NAT translates it: the address of a Service.
	knownService = netip.MustParseAddrPort("10.96.0.9:80")
	knownMAC     = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	gateway      = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

const (
	redirect = 7 // TC_ACT_REDIRECT (include/uapi/linux/pkt_cls.h)

	tcpACK, tcpSYN, tcpFIN, tcpRST, tcpPSH, tcpURG = 0x10, 0x02, 0x01, 0x04, 0x08, 0x20
	lo                                             = 1 // the device of prog.Run
)

// loadForTest loads the programs with the constants set.
func loadForTest(t testing.TB, set map[string]any) *Programs {
	t.Helper()
	testenv.NeedRoot(t)
	spec, err := loadFastpath()
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range set {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatal(err)
		}
	}
	f, err := load(spec)
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		t.Logf("%+v", verifier)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func monotonic(t testing.TB) time.Duration {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// addFlow adds the flow of the connection, as observe_nic and observe_pod would.
func (p *Programs) addFlow(t testing.TB, v version, protocol uint8, change func(*fastpathFlow)) {
	t.Helper()
	pod, peer := v.ends()
	p.addFlowOf(t, Flow{pod, peer, protocol}, change)
}

// seqConfirmed is SEQ_CONFIRMED of bpf/fastpath/seq.h.
const seqConfirmed = 3

// setSequence gives both sides of a connection the same sequence numbers.
func (v *fastpathFlow) setSequence(s Side) {
	v.Pod.SndNxt, v.Pod.RcvNxt, v.Pod.WindowEnd = s.Next, s.Expects, s.Edge
	v.Peer.SndNxt, v.Peer.RcvNxt, v.Peer.WindowEnd = s.Next, s.Expects, s.Edge
}

// addFlowOf is addFlow for a connection whose peer the pod knows by another address.
func (p *Programs) addFlowOf(t testing.TB, flow Flow, change func(*fastpathFlow)) {
	t.Helper()
	now := monotonic(t)
	if err := errors.Join(p.RenewLease(now+time.Minute), p.SetGeneration(7), p.SetNode(1450, 32768, 60999), p.SetRemotes([]Remote{knownRemote})); err != nil {
		t.Fatal(err)
	}
	pod, peer := version(flow.Pod.Addr().Is6()).ends()
	wire := Flow{pod, peer, flow.Protocol}.key()
	var v fastpathFlow
	v.Key = flow.key()
	if v.Key.IsIpv6 != 0 {
		v.Pod6, v.Peer6 = words(flow.Pod.Addr()), words(flow.Peer.Addr())
	}
	v.WirePeer = wire.wirePeer()
	v.Out.Validated, v.In.Validated = uint64(now), uint64(now)
	v.Out.RevalidateAfter, v.In.RevalidateAfter = 500e6, 500e6
	v.Out.Generation, v.In.Generation = 7, 7
	v.Out.Device, v.In.Device = lo, lo
	v.Out.Template, v.In.Template = 1, 1
	v.Out.Ttl, v.In.Ttl = 64, 64
	v.Out.Mtu = 1450
	v.SeqState = seqConfirmed
	v.setSequence(Side{Next: 1000, Edge: 70000})
	v.Decapped, v.DecappedGeneration, v.DecappedTemplate = uint64(now), 7, 2
	copy(v.Mac[:], slices.Concat(gateway, knownMAC))
	if change != nil {
		change(&v)
	}
	outer := fastpathEncapTemplate{Nic: lo}
	outer.Head.IpProtocol = unix.IPPROTO_UDP
	link := fastpathPodLink{Hops: 1, Veth: lo, Macs: [12]uint8(slices.Concat(knownMAC, gateway)), Sent: [12]uint8(slices.Concat(make([]byte, 6), gateway))}
	if err := errors.Join(
		p.objects.Flows.Put(flow.key(), v),
		p.objects.ReverseNat.Put(wire, fastpathNatEntry{Key: flow.key()}),
		p.objects.BloomA.Set(bytes.Repeat([]byte{0xff}, int(p.objects.BloomA.Size()))),
		p.objects.BloomB.Set(bytes.Repeat([]byte{0xff}, int(p.objects.BloomB.Size()))),
		p.objects.EncapTemplates.Put(uint32(1), outer),
		p.objects.PodLinks.Put(uint32(1), link),
	); err != nil {
		t.Fatal(err)
	}
}

func (p *Programs) deleteFlows() error {
	flows, err := p.Flows()
	for flow := range flows {
		err = errors.Join(err, p.Forget(flow))
	}
	return err
}

// knownRemote is the node that sends the packets of knownConnection.
var knownRemote = Remote{Device: lo, MAC: [6]byte(gateway), Address: netip.AddrFrom4([4]byte{198, 18, 0, 1})}

// knownConnection is the connection as the device of prog.Run sees it: its MAC address is 0.
func knownConnection(v version, sum bool) grammar.Connection {
	pod, peer := v.ends()
	c := grammar.Connection{Pod: pod, Peer: peer, Front: peer, MAC: knownMAC, Gateway: gateway, MTU: 1450}
	copy(c.Outer[:], head(v, sum))
	own := make(net.HardwareAddr, 6)
	copy(c.Outer[:], slices.Concat(own, gateway))
	copy(c.Outer[grammar.Overhead:], slices.Concat(own, gateway))
	return c
}

func outPacket(v version, protocol uint8) grammar.Packet {
	return knownConnection(v, false).Out(protocol)
}
func inPacket(v version, protocol uint8) grammar.Packet {
	return knownConnection(v, false).In(protocol)
}

// run runs a program on a packet and returns the reasons counted. It fails the test unless the
// packet is passed on unchanged.
func (p *Programs) run(t *testing.T, program *ebpf.Program, b []byte, mark uint32) string {
	t.Helper()
	before, err := p.Counts()
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(b)+256)
	skb := make([]byte, 192)
	binary.NativeEndian.PutUint32(skb[8:], mark) // struct __sk_buff
	opts := ebpf.RunOptions{Data: b, DataOut: got, Context: skb}
	code, err := program.Run(&opts)
	if err != nil {
		t.Fatal(err)
	}
	if int32(code) != -1 {
		t.Errorf("the program returns %d, want -1 (TCX_NEXT)", int32(code))
	}
	if !bytes.Equal(opts.DataOut, b) {
		t.Errorf("the packet changed\nfrom %x\nto   %x", b, opts.DataOut)
	}
	return p.since(t, before)
}

// since returns the reasons counted since before.
func (p *Programs) since(t *testing.T, before map[string]uint64) string {
	t.Helper()
	after, err := p.Counts()
	if err != nil {
		t.Fatal(err)
	}
	var why []string
	for name, n := range after {
		for range n - before[name] {
			why = append(why, name)
		}
	}
	slices.Sort(why)
	return fmt.Sprint(why)
}

// TestReasonNames checks that every counter of the programs has a name of its own, in the form that
// metrics use: REASON_NO_FLOW of enum reason becomes "no-flow".
func TestReasonNames(t *testing.T) {
	spec, err := loadFastpath()
	if err != nil {
		t.Fatal(err)
	}
	names, err := reasonsOf(spec.Types)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(fastpathCpuState{}.Reasons); len(names) != n {
		t.Errorf("%d reasons have names, want %d", len(names), n)
	}
	var first []string
	for _, way := range []string{"fast-out-", "fast-in-"} {
		first = append(first, way+KindVXLAN, way+KindRouted, way+KindLocal)
	}
	if first = append(first, "no-flow"); !slices.Equal(names[:len(first)], first) {
		t.Errorf("the first names are %q, want %q", names[:len(first)], first)
	}
	for i, name := range names {
		if slices.Contains(names[:i], name) || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz-") != "" {
			t.Errorf("reason %d is %q", i, name)
		}
	}
}

// TestSlowPathReasons checks that each kind of packet that the fast path cannot forward is passed
// on unchanged and counted under the right reason. An ordinary packet ends at the last check:
// prog.Run has no packet whose checksum a device has verified.
func TestSlowPathReasons(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) { testSlowPathReasons(t, four) })
	t.Run("IPv6", func(t *testing.T) { testSlowPathReasons(t, six) })
}

func testSlowPathReasons(t *testing.T, v version) {
	f := loadForTest(t, nil)
	multicast := netip.MustParseAddr("224.0.0.5")
	if v {
		multicast = netip.MustParseAddr("ff02::5")
	}
	collision := "csum-unverified" // IPv4 keys are not hashed
	if v {
		collision = "mismatch"
	}
	type test struct {
		name string
		odd  func(*grammar.Packet)
		mark uint32
		flow func(*fastpathFlow)
		want string
	}
	both := []test{
		{name: "ordinary", want: "csum-unverified"},
		{name: "ECN CE", odd: func(p *grammar.Packet) { p.TOS = 3 }, want: "csum-unverified"},
		{name: "PSH", odd: func(p *grammar.Packet) { p.Flags |= 0x08 }, want: "csum-unverified"},
		{name: "DF not set", odd: func(p *grammar.Packet) { p.Fragment = 0 }, want: "csum-unverified"},
		{name: "IP options", odd: func(p *grammar.Packet) { p.Options = 4 }, want: "ip-options"},
		{name: "first fragment", odd: func(p *grammar.Packet) { p.Fragment = 0x2000 }, want: "fragment"},
		{name: "last fragment", odd: func(p *grammar.Packet) { p.Fragment = 1 }, want: "fragment"},
		{name: "reserved fragment bit", odd: func(p *grammar.Packet) { p.Fragment = 0x8000 }, want: "fragment"},
		{name: "TTL 1", odd: func(p *grammar.Packet) { p.TTL = 1 }, want: "ttl"},
		{name: "TTL 0", odd: func(p *grammar.Packet) { p.TTL = 0 }, want: "ttl"},
		{name: "another TTL", odd: func(p *grammar.Packet) { p.TTL = 63 }, want: "mismatch"},
		{name: "another TOS", odd: func(p *grammar.Packet) { p.TOS = 0x28 }, want: "mismatch"},
		{name: "larger than the MTU", odd: func(p *grammar.Packet) { p.Payload = 1500 }, want: "exceeds-mtu"},
		{name: "trailing bytes", odd: func(p *grammar.Packet) { p.Trailing = 4 }, want: "malformed"},
		{name: "truncated", odd: func(p *grammar.Packet) { p.Trailing = -4 }, want: "malformed"},
		{name: "skb mark", mark: 1, want: "skb-mark"},
		{name: "ICMP", odd: func(p *grammar.Packet) { p.Protocol = unix.IPPROTO_ICMP }, want: "not-tcp-udp"},
		{name: "another port", odd: func(p *grammar.Packet) {
			p.Source = netip.AddrPortFrom(p.Source.Addr(), 1)
		}, want: "no-flow"},
		{name: "multicast", odd: func(p *grammar.Packet) {
			p.Target = netip.AddrPortFrom(multicast, p.Target.Port())
		}, want: "no-flow"},
		{name: "due for revalidation", flow: func(v *fastpathFlow) { v.Out.Validated -= 500e6; v.In.Validated -= 500e6 }, want: "revalidate"},
		{name: "flow of another connection", flow: func(v *fastpathFlow) { v.Key.PodPort++ }, want: "mismatch"},
		{name: "address hash collision", flow: func(e *fastpathFlow) { e.Pod6[1]++; e.Peer6[0]++ }, want: collision},
		{name: "unused template", flow: func(v *fastpathFlow) { v.Out.Template, v.In.Template = 2, 2 }, want: "mismatch"},
		{name: "another device", flow: func(v *fastpathFlow) { v.Out.Device, v.In.Device = 2, 2 }, want: "mismatch"},
	}
	tcp := []test{
		{name: "SYN", odd: func(p *grammar.Packet) { p.Flags = tcpSYN }, want: "tcp-flags"},
		{name: "SYN ACK", odd: func(p *grammar.Packet) { p.Flags |= tcpSYN }, want: "tcp-flags"},
		{name: "FIN", odd: func(p *grammar.Packet) { p.Flags |= tcpFIN }, want: "tcp-flags"},
		{name: "RST", odd: func(p *grammar.Packet) { p.Flags |= tcpRST }, want: "tcp-flags"},
		{name: "URG", odd: func(p *grammar.Packet) { p.Flags |= tcpURG }, want: "tcp-flags"},
		{name: "no flags", odd: func(p *grammar.Packet) { p.Flags = 0 }, want: "tcp-flags"},
	}
	udp := []test{
		{name: "UDP length too long", odd: func(p *grammar.Packet) { p.UDPLength = 1 }, want: "malformed"},
		{name: "UDP length too short", odd: func(p *grammar.Packet) { p.UDPLength = -1 }, want: "malformed"},
	}
	for _, way := range []struct {
		name    string
		program *ebpf.Program
		base    func(version, uint8) grammar.Packet
		own     []test
	}{
		{"redirect_pod", f.RedirectPod, outPacket, []test{
			{name: "not to the gateway's MAC", odd: func(p *grammar.Packet) { p.To = net.HardwareAddr{2, 0, 0, 0, 0, 9} }, want: "mismatch"},
			{name: "from another MAC", odd: func(p *grammar.Packet) { p.From = net.HardwareAddr{2, 0, 0, 0, 0, 9} }, want: "mismatch"},
		}},
		{"redirect_vxlan", f.RedirectVXLAN, inPacket, []test{
			{name: "to another MAC", odd: func(p *grammar.Packet) { p.To = gateway }, want: "mismatch"},
		}},
	} {
		for _, of := range []struct {
			name     string
			protocol uint8
			own      []test
		}{{"TCP", unix.IPPROTO_TCP, tcp}, {"UDP", unix.IPPROTO_UDP, udp}} {
			for _, tt := range slices.Concat(both, way.own, of.own) {
				t.Run(way.name+" "+of.name+" "+tt.name, func(t *testing.T) {
					f.addFlow(t, v, of.protocol, tt.flow)
					p := way.base(v, of.protocol)
					if tt.odd != nil {
						tt.odd(&p)
					}
					if got := f.run(t, way.program, p.Bytes(), tt.mark); got != "["+tt.want+"]" {
						t.Errorf("counted %s, want [%s]", got, tt.want)
					}
				})
			}
			// A flow expires with time and is invalidated by changes. TCP needs both directions.
			for _, tt := range []struct {
				name   string
				change func(seen *uint64, generation *uint32)
				want   string
			}{
				{"never validated", func(seen *uint64, _ *uint32) { *seen = 0 }, "[flow-expired]"},
				{"expired", func(seen *uint64, _ *uint32) { *seen -= 1e9 }, "[flow-expired]"},
				{"invalidated", func(_ *uint64, generation *uint32) { *generation-- }, "[invalidated]"},
			} {
				for _, side := range []string{"redirect_pod", "redirect_vxlan"} {
					t.Run(way.name+" "+of.name+" "+tt.name+" by "+side, func(t *testing.T) {
						f.addFlow(t, v, of.protocol, func(v *fastpathFlow) {
							if side == "redirect_pod" {
								tt.change(&v.Out.Validated, &v.Out.Generation)
							} else {
								tt.change(&v.In.Validated, &v.In.Generation)
							}
						})
						want := tt.want
						if of.protocol == unix.IPPROTO_UDP && side != way.name {
							want = "[csum-unverified]"
						}
						if got := f.run(t, way.program, way.base(v, of.protocol).Bytes(), 0); got != want {
							t.Errorf("counted %s, want %s", got, want)
						}
					})
				}
			}
			// The IPv6 header has no checksum, and UDP over IPv6 must have one.
			at, want := 24, "[malformed]"
			if v {
				at, want = 14+40+6, "[csum-unverified]"
				if of.protocol == unix.IPPROTO_UDP {
					want = "[malformed]"
				}
			}
			t.Run(way.name+" "+of.name+" wrong checksum", func(t *testing.T) {
				f.addFlow(t, v, of.protocol, nil)
				b := way.base(v, of.protocol).Bytes()
				b[at]++
				b[at+1]++ // 0xffff becomes 0
				if got := f.run(t, way.program, b, 0); got != want {
					t.Errorf("counted %s, want %s", got, want)
				}
			})
			t.Run(way.name+" "+of.name+" lease expired", func(t *testing.T) {
				f.addFlow(t, v, of.protocol, nil)
				if err := f.RenewLease(monotonic(t)); err != nil {
					t.Fatal(err)
				}
				if got := f.run(t, way.program, way.base(v, of.protocol).Bytes(), 0); got != "[lease-expired]" {
					t.Errorf("counted %s, want [lease-expired]", got)
				}
			})
		}
	}
}

// TestNICDecap checks when decap_nic decapsulates a packet, and all conditions of the flow under
// which it leaves the packet to the kernel.
func TestNICDecap(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	for _, tt := range []struct {
		name           string
		flow           func(*fastpathFlow)
		odd            func(*grammar.Packet)
		marked         bool // by a router (ECN)
		full, decapped bool
		left           bool // the flow's next packets, too
		detour         bool // those of the same batch, too
	}{
		{name: "decapsulated before", decapped: true},
		{name: "full-sized", full: true},
		{name: "marked by a router", marked: true, left: true},
		{name: "another TOS", odd: func(p *grammar.Packet) { p.TOS = 0x28 }, left: true},
		{name: "another TTL", odd: func(p *grammar.Packet) { p.TTL = 63 }, left: true},
		{name: "expiring", odd: func(p *grammar.Packet) { p.TTL = 1 }, left: true},
		{name: "just after a GSO packet", flow: func(v *fastpathFlow) { v.Left = v.Decapped }, left: true},
		{name: "long after a GSO packet", flow: func(v *fastpathFlow) { v.Left = v.Decapped - 100e6 }, detour: true},
		{name: "never decapsulated", flow: func(v *fastpathFlow) { v.Decapped = 0 }},
		{name: "not decapsulated recently", flow: func(v *fastpathFlow) { v.Decapped -= 1e9 }},
		{name: "invalidated", flow: func(v *fastpathFlow) { v.DecappedGeneration-- }},
		{name: "other outer headers", flow: func(v *fastpathFlow) { v.DecappedTemplate = 1 }},
		{name: "unused template", flow: func(v *fastpathFlow) { v.DecappedTemplate = 3 }},
		{name: "flow expired", flow: func(v *fastpathFlow) { v.In.Validated -= 1e9 }},
		{name: "due for revalidation", flow: func(v *fastpathFlow) { v.In.Validated -= 500e6 }, detour: true},
		{name: "flow of another connection", flow: func(v *fastpathFlow) { v.Key.PodPort++ }},
		{name: "translated by NAT", flow: func(v *fastpathFlow) { v.WirePeer++; v.Peer6[1]++ }},
		{name: "unused pod link", flow: func(v *fastpathFlow) { v.In.Template = 2 }, left: true},
	} {
		for i := range 4 {
			v, protocol := version(i&1 != 0), []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP}[i/2]
			f.addFlow(t, v, protocol, tt.flow)
			if err := f.objects.DecapTemplates.Put(uint32(2), decapTemplateForTest(v)); err != nil {
				t.Fatal(err)
			}
			inner := inPacket(v, protocol)
			if tt.full {
				inner.Payload = 1400
			}
			if tt.odd != nil {
				tt.odd(&inner)
			}
			b := knownConnection(v, false).Wrap(inner.Bytes())
			if tt.marked {
				b[15] |= 3
				b[24], b[25] = 0, 0
				binary.BigEndian.PutUint16(b[24:], ^grammar.Sum(0, b[14:34]))
			}
			decapped := tt.decapped || tt.full && protocol == unix.IPPROTO_UDP
			if !decapped {
				if got := f.run(t, f.DecapNIC, b, 0); got != "[]" {
					t.Errorf("%s %s: counted %s, want nothing", v, tt.name, got)
				}
			} else if code, _, err := f.DecapNIC.Test(b); err != nil || code != redirect {
				t.Errorf("%s %s: decap_nic returns %d, error %v, want a redirect", v, tt.name, int32(code), err)
			}
			// GRO may merge a full-sized packet of a stream.
			left := tt.left || tt.full && !decapped
			pod, peer := v.ends()
			if f, known, err := f.lookUp(Flow{pod, peer, protocol}.key()); err != nil || !known || (f.Left != 0) != left || (f.In.Run != 0) != tt.detour {
				t.Errorf("%s %s: known %t, left to the kernel at %d, run %d, error %v", v, tt.name, known, f.Left, f.In.Run, err)
			}
		}
	}
}

// TestNICDecapChecksInnerProtocol checks that decap_nic does not remember a packet whose inner
// Ethernet type names the other IP version.
func TestNICDecapChecksInnerProtocol(t *testing.T) {
	f := loadForTest(t, nil)
	for _, v := range []version{four, six} {
		for _, other := range []bool{false, true} {
			f.addFlow(t, v, unix.IPPROTO_UDP, func(e *fastpathFlow) { e.Decapped = 0 })
			b := knownConnection(v, false).Wrap(inPacket(v, unix.IPPROTO_UDP).Bytes())
			if other {
				copy(b[grammar.Head-2:], head(!v, false)[grammar.Head-2:])
			}
			decapped := f.remembers(t, b)
			if decapped == other {
				t.Errorf("%s, inner type of the other version %t: remembered %t", v, other, decapped)
			}
		}
	}
}

// TestGSOSegmentsExceedMTU checks that a GSO packet is compared with the MTU by the length of its
// segments.
func TestGSOSegmentsExceedMTU(t *testing.T) {
	f := loadForTest(t, nil)
	for _, v := range []version{four, six} {
		for over, want := range []string{"[csum-unverified]", "[exceeds-mtu]"} {
			f.addFlow(t, v, unix.IPPROTO_TCP, nil)
			p := outPacket(v, unix.IPPROTO_TCP)
			p.Payload = 3000
			skb := make([]byte, 192) // struct __sk_buff, with gso_segs and gso_size
			binary.NativeEndian.PutUint32(skb[164:], 3)
			binary.NativeEndian.PutUint32(skb[176:], uint32(1450-v.header()-20+over))
			before, err := f.Counts()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.RedirectPod.Run(&ebpf.RunOptions{Data: p.Bytes(), DataOut: make([]byte, 5000), Context: skb}); err != nil {
				t.Fatal(err)
			}
			if got := f.since(t, before); got != want {
				t.Errorf("%s, %d bytes over the MTU: counted %s, want %s", v, over, got, want)
			}
		}
	}
}

// TestProbeInPacketList checks that observe_pod recognises a probe although other packets pass redirect_vxlan first, as they do
// when the kernel receives packets in lists.
func TestProbeInPacketList(t *testing.T) {
	f := loadForTest(t, nil)
	testenv.PinThread(t) // each CPU has a probe of its own
	f.addFlow(t, four, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.In.Validated -= 1e9 })
	if err := errors.Join(f.SetLinkMACs([]LinkMAC{{Link: lo, MAC: [6]byte(knownMAC)}}), f.SetRouters([]int{lo})); err != nil {
		t.Fatal(err)
	}
	other := inPacket(four, unix.IPPROTO_UDP)
	other.Source = netip.AddrPortFrom(other.Source.Addr(), 1)
	delivered := inPacket(four, unix.IPPROTO_UDP)
	delivered.To, delivered.From, delivered.TTL = knownMAC, gateway, 63
	elsewhere := delivered
	elsewhere.To = gateway
	for _, step := range []struct {
		what    string
		program *ebpf.Program
		packet  grammar.Packet
		want    string
	}{
		{"no probe", f.ObservePod, delivered, "[]"},
		{"a probe starts", f.RedirectVXLAN, inPacket(four, unix.IPPROTO_UDP), "[flow-expired]"},
		{"another packet arrives", f.RedirectVXLAN, other, "[no-flow]"},
		{"it is delivered", f.ObservePod, other, "[rewritten]"}, // it has the same headers as the probe
		{"the probe is flooded to another link", f.ObservePod, elsewhere, "[mismatch]"},
		// lo leads to no pod's device, so it counts as a device that may have XDP. Only this probe gets as far as that check.
		{"the probe is delivered", f.ObservePod, delivered, "[rewritten]"},
		{"delivered once more", f.ObservePod, delivered, "[]"},
	} {
		if got := f.run(t, step.program, step.packet.Bytes(), 0); got != step.want {
			t.Errorf("%s: counted %s, want %s", step.what, got, step.want)
		}
	}
}

// TestSYNFINAndRSTDeleteFlow checks that a SYN, FIN or RST of the connection deletes its flow, but not one that anybody can
// forge: one that arrives at another device, one outside the window, or a SYN from the wire. Only an RST with exactly the next
// sequence number moves conntrack to CLOSE.
func TestSYNFINAndRSTDeleteFlow(t *testing.T) {
	f := loadForTest(t, nil)
	const acked, end, edge = 900, 1000, 70000
	for _, tt := range []struct {
		name    string
		flags   byte
		seq     uint32
		device  uint32
		in      bool
		deleted bool
		closes  bool
	}{
		{name: "SYN of the pod", flags: tcpSYN, seq: 1 << 31, deleted: true},
		{name: "SYN ACK of the pod", flags: tcpSYN | tcpACK, seq: 1 << 31, deleted: true},
		{name: "SYN of another pod", flags: tcpSYN, device: lo + 1},
		{name: "SYN from the wire", flags: tcpSYN, in: true, seq: end},
		{name: "FIN of the pod", flags: tcpFIN | tcpACK, seq: end, deleted: true},
		{name: "FIN of the peer", flags: tcpFIN | tcpACK, seq: end, in: true, deleted: true},
		{name: "FIN of another pod", flags: tcpFIN | tcpACK, seq: end, device: lo + 1},
		{name: "FIN beyond the window", flags: tcpFIN | tcpACK, seq: edge + 1},
		{name: "FIN before the window", flags: tcpFIN | tcpACK, seq: acked - 102, in: true},
		{name: "FIN with acknowledged data", flags: tcpFIN | tcpACK, seq: acked - 50, in: true, deleted: true},
		{name: "RST of the pod", flags: tcpRST, seq: end, deleted: true, closes: true},
		{name: "RST of the peer", flags: tcpRST | tcpACK, seq: end, in: true, deleted: true, closes: true},
		{name: "RST at the highest acknowledgement", flags: tcpRST, seq: acked, in: true, deleted: true, closes: true},
		{name: "RST in the window", flags: tcpRST, seq: end + 1, deleted: true},
		{name: "RST beyond the window", flags: tcpRST, seq: edge + 1, in: true},
		{name: "RST before the window", flags: tcpRST, seq: acked - 102},
		{name: "RST of another pod", flags: tcpRST, seq: end, device: lo + 1},
		{name: "RST of the peer in the window", flags: tcpRST, seq: end + 1, in: true},
		{name: "URG", flags: tcpURG | tcpACK, seq: end},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) {
				v.Out.Device += tt.device
				v.setSequence(Side{end, acked, edge})
			})
			p, program := outPacket(four, unix.IPPROTO_TCP), f.RedirectPod
			if tt.in {
				p, program = inPacket(four, unix.IPPROTO_TCP), f.RedirectVXLAN
			}
			p.Flags = tt.flags
			b := p.Bytes()
			binary.BigEndian.PutUint32(b[14+20+4:], tt.seq)
			f.run(t, program, b, 0)
			flows, err := f.Flows()
			if err != nil {
				t.Fatal(err)
			}
			if deleted := len(flows) == 0; deleted != tt.deleted {
				t.Errorf("flow deleted: %t, want %t", deleted, tt.deleted)
			}
			f.events.SetDeadline(time.Now())
			event, err := f.ReadEvent()
			if isReset := err == nil && event.Kind == EventReset; isReset != tt.closes {
				t.Errorf("reset event: %t, want %t (%+v, %v)", isReset, tt.closes, event, err)
			}
		})
	}
}

// TestSequenceNumbers checks that TCP packets take the fast path only if they match the known sequence numbers, and that they
// advance these. A packet from the pod that does not match makes them unknown.
func TestSequenceNumbers(t *testing.T) {
	unknown := Side{}
	for _, v := range []version{four, six} {
		f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
		for _, tt := range []struct {
			name       string
			seq, ack   uint32
			in         bool
			redirected bool
			out, back  Side // after the packet
		}{
			{"next segment", 1000, 900, false, true, Side{1100, 900, 70000}, Side{1000, 900, 70000}},
			{"gap", 5000, 1000, false, true, Side{5100, 1000, 70000}, Side{1000, 900, 70000}},
			{"retransmission", 900, 900, false, true, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"right edge of the window", 70000, 900, false, true, Side{70100, 900, 70100}, Side{1000, 900, 70000}},
			{"oldest segment accepted", 1<<32 - (0xffff - 900 + 100), 900, false, true, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"too old a segment", 1<<32 - (0xffff - 900 + 101), 900, false, false, unknown, unknown},
			{"oldest acknowledgement accepted", 1000, 1<<32 - (0xffff - 900), false, true, Side{1100, 900, 70000}, Side{1000, 900, 70000}},
			{"too old an acknowledgement", 1000, 1<<32 - (0xffff - 900 + 1), false, false, unknown, unknown},
			{"beyond the window", 70001, 900, false, false, unknown, unknown},
			{"acknowledgement of data not seen yet", 1000, 1200, false, true, Side{1100, 1200, 70000}, Side{1200, 900, 70000}},
			{"acknowledgement beyond the window", 1000, 70001, false, false, unknown, unknown},
			{"acknowledgement that moves the window", 1000, 70000, false, true, Side{1100, 70000, 70000}, Side{70000, 900, 70000 + 256}},
			{"next segment of the peer", 1000, 900, true, true, Side{1000, 900, 70000}, Side{1100, 900, 70000}},
			{"segment of the peer beyond the window", 70001, 900, true, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
		} {
			f.addFlow(t, v, unix.IPPROTO_TCP, func(v *fastpathFlow) {
				v.setSequence(Side{1000, 900, 70000})
			})
			p, program := outPacket(v, unix.IPPROTO_TCP), f.RedirectPod
			if tt.in {
				p, program = inPacket(v, unix.IPPROTO_TCP), f.RedirectVXLAN
			}
			b := segment(p, v, tt.seq, tt.ack, 256)
			code, err := program.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)})
			if err != nil || code == redirect != tt.redirected {
				t.Errorf("%s, %s: the program returns %d, error %v; redirected %t, want %t", v, tt.name, int32(code), err, code == redirect, tt.redirected)
			}
			pod, peer := v.ends()
			n, err := f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t))
			if err != nil || n.Pod != tt.out || n.Peer != tt.back {
				t.Errorf("%s, %s: sequence numbers are %+v, error %v, want %+v and %+v", v, tt.name, n, err, tt.out, tt.back)
			}
		}
	}
}

// segment returns a packet of the fast path's connection with these sequence numbers and window.
func segment(p grammar.Packet, v version, seq, ack uint32, window uint16) []byte {
	b := p.Bytes()
	tcp := b[14+v.header():]
	binary.BigEndian.PutUint32(tcp[4:], seq)
	binary.BigEndian.PutUint32(tcp[8:], ack)
	binary.BigEndian.PutUint16(tcp[14:], window)
	return b
}

// TestSequenceNumbersOfAStream sends a stream of many windows. Acknowledgements must move the window, and nothing beyond it may
// take the fast path.
func TestSequenceNumbersOfAStream(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	run := func(program *ebpf.Program, b []byte) (redirected bool) {
		t.Helper()
		code, err := program.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)})
		if err != nil {
			t.Fatal(err)
		}
		return code == redirect
	}
	const window, length = 50_000, 100
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.setSequence(Side{Next: 1000, Expects: 1000, Edge: 1000 + window}) })
	out := func(seq uint32) bool {
		return run(f.RedirectPod, segment(outPacket(four, unix.IPPROTO_TCP), four, seq, 1000, window))
	}
	in := func(ack uint32) bool {
		return run(f.RedirectVXLAN, segment(inPacket(four, unix.IPPROTO_TCP), four, 900, ack, window))
	}
	seq := uint32(1000)
	for i := range 100 {
		if seq += window - length; !out(seq) {
			t.Fatalf("window %d: its last segment takes the slow path", i)
		}
		if seq += length; !in(seq) {
			t.Fatalf("window %d: its acknowledgement takes the slow path", i)
		}
	}
	pod, peer := four.ends()
	n, err := f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t))
	if want := (Side{seq, 1000, seq + window}); err != nil || n.Pod != want || n.Peer.Expects != seq {
		t.Errorf("sequence numbers are %+v, error %v; want those of the pod to be %+v", n, err, want)
	}
	if out(seq + window + 1) {
		t.Error("a segment beyond the window takes the fast path")
	}
}

// TestForgedAcknowledgements has a peer acknowledge data that the pod has not sent. The programs must not record such an
// acknowledgement, and the peer must not be able to move the window further with each of them.
func TestForgedAcknowledgements(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	const edge = 70_000
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.setSequence(Side{1000, 900, edge}) })
	pod, peer := four.ends()
	var n Sequence
	for range 100 {
		var err error
		if n, err = f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t)); err != nil {
			t.Fatal(err)
		}
		b := segment(inPacket(four, unix.IPPROTO_TCP), four, 900, n.Pod.Edge, 0xffff)
		if _, err := f.RedirectVXLAN.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)}); err != nil {
			t.Fatal(err)
		}
	}
	if want := (Side{1000, 900, edge}); n.Pod != want || n.Peer.Expects != 1000 {
		t.Errorf("sequence numbers are %+v, want those of the pod to be %+v, and the peer to expect 1000", n, want)
	}
}

// TestDataPastThePrograms checks data of the peer that bypasses the programs. The pod's acknowledgements must advance the end
// of that data, even after 2^31 bytes: sequence numbers are compared modulo 2^32.
func TestDataPastThePrograms(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	const scale, window = 7, 0xffff
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) {
		v.Out.Scale = scale
		v.setSequence(Side{1000, 1000, 1000 + window<<scale})
	})
	ack := uint32(1000)
	for range 400 { // 3.3 GB
		ack += window << scale
		b := segment(outPacket(four, unix.IPPROTO_TCP), four, 1000, ack, window)
		if _, err := f.RedirectPod.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)}); err != nil {
			t.Fatal(err)
		}
	}
	pod, peer := four.ends()
	n, err := f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t))
	if err != nil || n.Peer.Next != ack || n.Pod.Expects != ack {
		t.Errorf("sequence numbers are %+v, error %v; want the peer to have sent what the pod acknowledged: %d", n, err, ack)
	}
}

// TestSequenceNumbersUnknown checks that sequence numbers count as unknown until redirect_pod has seen a packet
// of the pod.
func TestSequenceNumbersUnknown(t *testing.T) {
	f := loadForTest(t, nil)
	pod, peer := four.ends()
	for state, want := range map[uint8]bool{0: false, 1: false, seqFromPod: true, seqConfirmed: true} {
		f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.SeqState = state })
		n, err := f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t))
		if known := n != (Sequence{}); err != nil || known != want {
			t.Errorf("state %d: known %t, error %v, want %t", state, known, err, want)
		}
	}
}

// TestResyncEvents checks that the agent is asked to resynchronise conntrack once for each gigabyte
// that conntrack has not seen.
func TestResyncEvents(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	const step = 1 << 28
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.setSequence(Side{Edge: step}) })
	b := outPacket(four, unix.IPPROTO_TCP).Bytes()
	events := 0
	for n := range uint32(16) { // 4 GiB
		pod, peer := four.ends()
		var v fastpathFlow
		if err := f.objects.Flows.Lookup(Flow{pod, peer, unix.IPPROTO_TCP}.key(), &v); err != nil {
			t.Fatal(err)
		}
		v.Out.Validated, v.In.Validated, v.Peer.RcvNxt, v.Pod.WindowEnd = uint64(monotonic(t)), uint64(monotonic(t)), n*step, (n+1)*step
		if err := f.objects.Flows.Put(v.Key, v); err != nil {
			t.Fatal(err)
		}
		binary.BigEndian.PutUint32(b[14+20+4:], n*step+1000)
		for range 3 {
			if code, err := f.RedirectPod.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)}); err != nil || code != redirect {
				t.Fatalf("redirect_pod returns %d, error %v", int32(code), err)
			}
		}
		f.events.SetDeadline(time.Now())
		for {
			event, err := f.ReadEvent()
			if err != nil {
				break
			}
			if event.Kind != EventResync {
				t.Errorf("event %+v, want a resync", event)
			}
			events++
		}
	}
	if events != 3 {
		t.Errorf("%d resync events in 4 GiB that begin at sequence number 0, want 3", events)
	}
}

// TestFlows checks that flows are listed and deleted by their addresses and ports.
func TestFlows(t *testing.T) {
	for _, v := range []version{four, six} {
		t.Run(v.String(), func(t *testing.T) { testFlows(t, v) })
	}
}

func testFlows(t *testing.T, v version) {
	f := loadForTest(t, nil)
	f.addFlow(t, v, unix.IPPROTO_UDP, nil)
	pod, peer := v.ends()
	want := Flow{pod, peer, unix.IPPROTO_UDP}
	flows, err := f.Flows()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := flows[want]; !ok || len(flows) != 1 {
		t.Errorf("flows are %v, want %v", flows, want)
	}
	for _, link := range []struct {
		device, place uint32
		want          int
	}{{5, 1, 5}, {0, 1, lo}, {5, 0, 5}, {0, 0, 0}} {
		f.addFlow(t, v, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.Out.Device, v.In.Template = link.device, link.place })
		if flows, err = f.Flows(); err != nil || flows[want].Link != link.want || flows[want].Validated == 0 {
			t.Errorf("flow %+v, error %v, want link %d", flows[want], err, link.want)
		}
	}
	for range 2 { // deleting it again is no error
		if err := f.Forget(want); err != nil {
			t.Error(err)
		}
	}
	if flows, err = f.Flows(); err != nil || len(flows) != 0 {
		t.Errorf("flows are %v, error %v", flows, err)
	}
	if slices.Max(f.bloom(t)) > 0 {
		t.Error("the Bloom filter has a bit set although there are no flows")
	}
}

// TestReverseNATEndsWithFlow checks that a flow with NAT and its reverse NAT entry are deleted together, whichever the agent
// deletes.
func TestReverseNATEndsWithFlow(t *testing.T) {
	f := loadForTest(t, nil)
	pod, backend := four.ends()
	flow := Flow{pod, netip.MustParseAddrPort("10.96.0.1:80"), unix.IPPROTO_TCP}
	wire := Flow{pod, backend, unix.IPPROTO_TCP}.key()
	for name, forget := range map[string]func() error{
		"flow":              func() error { return f.Forget(flow) },
		"reverse NAT entry": func() error { return f.deleteReverseNAT(wire, flow.key()) },
		"flow behind the agent's back": func() error {
			err := f.objects.Flows.Delete(flow.key())
			_, listErr := f.Flows()
			return errors.Join(err, listErr)
		},
	} {
		f.addFlowOf(t, flow, nil)
		if err := forget(); err != nil {
			t.Fatal(err)
		}
		if known, err := f.Known(flow); err != nil || known {
			t.Errorf("%s deleted: the flow is still there (error %v)", name, err)
		}
		var entry fastpathNatEntry
		if err := f.objects.ReverseNat.Lookup(wire, &entry); !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Errorf("%s deleted: the reverse NAT entry is still there (error %v)", name, err)
		}
	}
}

// TestFlowsWhileOthersAreDeleted checks that Flows returns every connection that stays, while others come and go.
func TestFlowsWhileOthersAreDeleted(t *testing.T) {
	f := loadForTest(t, nil)
	f.addFlow(t, four, unix.IPPROTO_TCP, nil)
	var template fastpathFlow
	pod, peer := four.ends()
	if err := f.objects.Flows.Lookup(Flow{pod, peer, unix.IPPROTO_TCP}.key(), &template); err != nil {
		t.Fatal(err)
	}
	const staying, churning = 12000, 1000
	put := func(i int) fastpathKey {
		k := template.Key
		k.Pod = uint32(i)
		v := template
		v.Key = k
		if err := f.objects.Flows.Put(k, v); err != nil {
			t.Error(err)
		}
		return k
	}
	for i := range staying {
		put(i)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			default:
			}
			if err := f.objects.Flows.Delete(put(staying + i%churning)); err != nil {
				t.Error(err)
			}
		}
	}()
	for range 20 {
		flows, err := f.Flows()
		if err != nil {
			t.Fatal(err)
		}
		stayed := 0
		for flow := range flows {
			if flow.key().Pod < staying {
				stayed++
			}
		}
		if stayed != staying {
			t.Errorf("%d of %d connections", stayed, staying)
		}
	}
	close(quit)
	<-done
}

// bloom returns the Bloom filter that the programs test.
func (p *Programs) bloom(t *testing.T) bloomBits {
	t.Helper()
	chosen, filters, err := p.bloomFilters()
	if err != nil {
		t.Fatal(err)
	}
	bits, err := readBloom(filters[chosen])
	if err != nil {
		t.Fatal(err)
	}
	return bits
}

// TestBloomBitOfNewFlow creates a flow after the agent has listed the flows, in place of a deleted one with the same bits. The
// new flow must keep its bits in the Bloom filter and its sequence numbers, and bits without a flow must be cleared.
func TestBloomBitOfNewFlow(t *testing.T) {
	f := loadForTest(t, nil)
	pod, peer := four.ends()
	flow := Flow{pod, peer, unix.IPPROTO_TCP}
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.BloomBit = 4711 })
	wire, now := flow.key(), monotonic(t)
	wire.PodPort++
	if err := f.objects.ReverseNat.Put(wire, fastpathNatEntry{Key: flow.key(), BloomBit: 42}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // so that each filter is used once
		if err := f.clearBloom(make(bloomBits, len(f.bloom(t)))); err != nil {
			t.Fatal(err)
		}
		bits := f.bloom(t)
		for _, bit := range []int{4711, 42} {
			if bits[bit/64]&(1<<(bit%64)) == 0 {
				t.Errorf("bit %d is cleared", bit)
			}
		}
		if bits[1] != 0 {
			t.Error("the bits of no flow are still set")
		}
	}
	if n, err := f.Sequence(flow, now); err != nil || n == (Sequence{}) {
		t.Errorf("sequence numbers %v, error %v", n, err)
	}
}

// TestSequenceNumbersOnTwoCPUs passes two packets at the same time on two CPUs. The programs must keep the sequence number and
// the acknowledgement of the later packet.
func TestSequenceNumbersOnTwoCPUs(t *testing.T) {
	testenv.NeedCPUs(t, 2)
	f := loadForTest(t, nil)
	f.addFlow(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.Peer.SndNxt += 1 << 20 })
	pod, peer := four.ends()
	flow := Flow{pod, peer, unix.IPPROTO_TCP}
	const rounds = 20_000
	var begun, ended [rounds]atomic.Int32
	meet := func(at *atomic.Int32) {
		for at.Add(1); at.Load() < 2; {
			runtime.Gosched()
		}
	}
	// Each round, the packet of CPU 1 is the later one.
	send := func(cpu int, after func(seq uint32)) error {
		runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
		var on unix.CPUSet
		on.Set(cpu)
		if err := unix.SchedSetaffinity(0, &on); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", cpu, err)
		}
		b := outPacket(four, unix.IPPROTO_TCP).Bytes()
		for i := range uint32(rounds) {
			seq := 2000 + 2*i + uint32(cpu)
			binary.BigEndian.PutUint32(b[14+20+4:], seq)
			binary.BigEndian.PutUint32(b[14+20+8:], seq)
			meet(&begun[i])
			_, err := f.RedirectPod.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)})
			meet(&ended[i])
			if err != nil {
				return err
			}
			after(seq)
		}
		return nil
	}
	var senders errgroup.Group
	senders.Go(func() error { return send(0, func(uint32) {}) })
	lost := 0
	senders.Go(func() error {
		length := uint32(0)
		return send(1, func(seq uint32) {
			v, _, err := f.lookUp(flow.key())
			if err != nil {
				t.Error(err)
			}
			if length == 0 {
				length = v.Pod.SndNxt - seq
			}
			if v.Pod.SndNxt != seq+length || v.Pod.RcvNxt != seq {
				lost++
			}
		})
	})
	if err := senders.Wait(); err != nil {
		t.Fatal(err)
	}
	if lost > 0 {
		t.Errorf("in %d of %d rounds the numbers are not those of the later packet", lost, rounds)
	}
}

// TestObserveNICIgnoresForgedPackets checks that a packet validates a flow at observe_nic only if the programs have followed it
// from the pod through the VXLAN device: anybody can send packets that look the same.
func TestObserveNICIgnoresForgedPackets(t *testing.T) {
	f := loadForTest(t, nil)
	inner := outPacket(four, unix.IPPROTO_UDP)
	sent := inner.Bytes()
	inner.TTL--
	arrived := inner.Bytes()
	outer := grammar.Packet{To: gateway, From: knownMAC, Source: netip.MustParseAddrPort("198.18.0.1:50000"), Target: netip.MustParseAddrPort("198.18.0.2:8472"),
		Protocol: unix.IPPROTO_UDP, TTL: 64, Payload: 8 + len(arrived)}
	frame := outer.Bytes()
	copy(frame[14+28+8:], arrived)
	for name, tt := range map[string]struct {
		stage uint8
		odd   func(*fastpathCpuState)
		want  string
	}{
		"no probe":                     {stage: 0, want: "[]"},
		"not seen at the VXLAN device": {stage: 1, want: "[]"},
		"the probe is another packet":  {stage: 2, odd: func(c *fastpathCpuState) { c.Out.Headers.Ip[1]++ }, want: "[]"},
		"not by a VXLAN device":        {stage: 2, want: "[rewritten]"},
		"conntrack has no entry":       {stage: 2, odd: func(c *fastpathCpuState) { c.Out.Key.PodPort++ }, want: "[untracked]"},
	} {
		t.Run(name, func(t *testing.T) {
			f.addFlow(t, four, unix.IPPROTO_UDP, nil)
			each := make([]fastpathCpuState, ebpf.MustPossibleCPU())
			for i := range each {
				p := &each[i].Out
				each[i].OutStage = tt.stage
				p.Key, p.At, p.Generation, p.Device = Flow{knownPod, knownPeer, unix.IPPROTO_UDP}.key(), uint64(monotonic(t)), 7, lo
				p.WirePeer = p.Key.wirePeer()
				for j := range p.Headers.Ip {
					p.Headers.Ip[j] = binary.NativeEndian.Uint32(sent[14+4*j:])
				}
				for j := range 2 {
					p.Headers.L4[j] = binary.NativeEndian.Uint32(sent[34+4*j:])
				}
				if tt.odd != nil {
					tt.odd(&each[i])
				}
			}
			if err := f.objects.CpuStates.Put(uint32(0), each); err != nil {
				t.Fatal(err)
			}
			before, err := f.Flows()
			if err != nil {
				t.Fatal(err)
			}
			if got := f.run(t, f.ObserveNIC, frame, 0); got != tt.want {
				t.Errorf("counted %s, want %s", got, tt.want)
			}
			after, err := f.Flows()
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(before, after) {
				t.Errorf("flows before %v, after %v", before, after)
			}
		})
	}
}

// BenchmarkSlowPath measures the overhead for a packet that takes the slow path.
func BenchmarkSlowPath(b *testing.B) {
	testenv.NeedRoot(b)
	f, err := Load()
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := f.RenewLease(1 << 62); err != nil {
		b.Fatal(err)
	}
	for _, p := range []*ebpf.Program{f.RedirectPod, f.ObserveVXLAN, f.ObserveNIC, f.DecapNIC, f.RedirectVXLAN, f.ObservePod} {
		b.Run(p.String(), func(b *testing.B) {
			_, took, err := p.Benchmark(outPacket(four, unix.IPPROTO_UDP).Bytes(), b.N, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}
