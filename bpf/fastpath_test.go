//go:build linux

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/grammar"
)

// version of IP is 4, or six.
type version bool

const four, six version = false, true

func (v version) String() string {
	if v {
		return "IPv6"
	}
	return "IPv4"
}

// ends are those of the connection that is known in these tests.
func (v version) ends() (pod, peer netip.AddrPort) {
	if v {
		return netip.MustParseAddrPort("[fd00::2]:40000"), netip.MustParseAddrPort("[fd00:0:0:1::2]:5000")
	}
	return knownPod, knownPeer
}

var (
	knownPod, knownPeer = netip.MustParseAddrPort("10.244.0.2:40000"), netip.MustParseAddrPort("10.244.1.2:5000")
	// As the pod has it where it is translated: a service.
	knownFront = netip.MustParseAddrPort("10.96.0.9:80")
	knownMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	gateway    = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

const (
	tcpACK, tcpSYN, tcpFIN, tcpRST, tcpURG = 0x10, 0x02, 0x01, 0x04, 0x20
	lo                                     = 1 // the device of prog.Run
)

// loadForTest loads the programs with constants set by name.
func loadForTest(t testing.TB, set map[string]any) *Fastpath {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	spec, err := loadFastpath()
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range set {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatal(err)
		}
	}
	f, err := newFastpath(spec)
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

// know has the connection on the fast path, as wire and deliver would, of a protocol.
func (f *Fastpath) know(t testing.TB, v version, protocol uint8, change func(*fastpathFlow)) {
	t.Helper()
	pod, peer := v.ends()
	f.knowAs(t, Flow{pod, peer, protocol}, change)
}

// byBoth is BY_BOTH of fastpath.c.
const byBoth = 3

// knowAs is know of a connection whose peer the pod has as another.
func (f *Fastpath) knowAs(t testing.TB, flow Flow, change func(*fastpathFlow)) {
	t.Helper()
	now := monotonic(t)
	if err := errors.Join(f.RenewLease(now+time.Minute), f.SetGeneration(7), f.SetNode(1450, 32768, 60999)); err != nil {
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
	v.SeqState = byBoth
	v.Out.SndNxt, v.In.SndNxt = 1000, 1000
	v.Out.WindowEnd, v.In.WindowEnd = 70000, 70000
	v.Decapped, v.DecappedGeneration, v.DecappedTemplate = uint64(now), 7, 2
	copy(v.Mac[:], slices.Concat(gateway, knownMAC))
	if change != nil {
		change(&v)
	}
	outer := fastpathEncapTemplate{Nic: lo}
	link := fastpathPodLink{Veth: lo, Mac: [6]uint8(knownMAC), From: [6]uint8(gateway)}
	if err := errors.Join(
		f.objects.Flows.Put(flow.key(), v),
		f.objects.ReverseNat.Put(wire, fastpathNatEntry{Key: flow.key()}),
		f.objects.Bloom.Set(bytes.Repeat([]byte{0xff}, int(f.objects.Bloom.Size()))),
		f.objects.EncapTemplates.Put(uint32(1), outer),
		f.objects.PodLinks.Put(uint32(1), link),
	); err != nil {
		t.Fatal(err)
	}
}

// forgetAll takes out what is known.
func (f *Fastpath) forgetAll() error {
	flows, err := f.Flows()
	for flow := range flows {
		err = errors.Join(err, f.Forget(flow))
	}
	return err
}

// knownConnection is the connection, to the device of prog.Run: its Ethernet address is 0.
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

// run has a program see a packet, and tells what it counted. The packet is to go on as
// it came.
func (f *Fastpath) run(t *testing.T, program *ebpf.Program, b []byte, mark uint32) string {
	t.Helper()
	before, err := f.Counts()
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
		t.Errorf("the program returns %d, want -1: on to the kernel", int32(code))
	}
	if !bytes.Equal(opts.DataOut, b) {
		t.Errorf("the packet was changed\nfrom %x\nto   %x", b, opts.DataOut)
	}
	return f.since(t, before)
}

// since is what was counted.
func (f *Fastpath) since(t *testing.T, before map[string]uint64) string {
	t.Helper()
	after, err := f.Counts()
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

// TestOdd has each odd packet go on as it came, for the reason that it is odd, beside one
// that is not odd. That one ends at the last question: prog.Run has no packet whose
// checksum a device vouches for.
func TestOdd(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) { testOdd(t, four) })
	t.Run("IPv6", func(t *testing.T) { testOdd(t, six) })
}

func testOdd(t *testing.T, v version) {
	f := loadForTest(t, nil)
	if n := len(fastpathCpuState{}.Reasons); len(reasons) != n {
		t.Fatalf("there are names for %d reasons, want %d", len(reasons), n)
	}
	multicast := netip.MustParseAddr("224.0.0.5")
	if v {
		multicast = netip.MustParseAddr("ff02::5")
	}
	twins := "csum-unverified" // IPv4 has none: its keys are whole
	if v {
		twins = "mismatch"
	}
	type test struct {
		name string
		odd  func(*grammar.Packet)
		mark uint32
		flow func(*fastpathFlow)
		want string
	}
	both := []test{
		{name: "nothing odd", want: "csum-unverified"},
		{name: "congestion", odd: func(p *grammar.Packet) { p.TOS = 3 }, want: "csum-unverified"},
		{name: "push", odd: func(p *grammar.Packet) { p.Flags |= 0x08 }, want: "csum-unverified"},
		{name: "no don't-fragment", odd: func(p *grammar.Packet) { p.Fragment = 0 }, want: "csum-unverified"},
		{name: "options", odd: func(p *grammar.Packet) { p.Options = 4 }, want: "ip-options"},
		{name: "first fragment", odd: func(p *grammar.Packet) { p.Fragment = 0x2000 }, want: "fragment"},
		{name: "last fragment", odd: func(p *grammar.Packet) { p.Fragment = 1 }, want: "fragment"},
		{name: "evil", odd: func(p *grammar.Packet) { p.Fragment = 0x8000 }, want: "fragment"},
		{name: "last hop", odd: func(p *grammar.Packet) { p.TTL = 1 }, want: "ttl"},
		{name: "no hop", odd: func(p *grammar.Packet) { p.TTL = 0 }, want: "ttl"},
		{name: "other hops", odd: func(p *grammar.Packet) { p.TTL = 63 }, want: "mismatch"},
		{name: "other service", odd: func(p *grammar.Packet) { p.TOS = 0x28 }, want: "mismatch"},
		{name: "too large", odd: func(p *grammar.Packet) { p.Payload = 1500 }, want: "exceeds-mtu"},
		{name: "something behind", odd: func(p *grammar.Packet) { p.Trailing = 4 }, want: "malformed"},
		{name: "too short", odd: func(p *grammar.Packet) { p.Trailing = -4 }, want: "malformed"},
		{name: "marked", mark: 1, want: "skb-mark"},
		{name: "ICMP", odd: func(p *grammar.Packet) { p.Protocol = unix.IPPROTO_ICMP }, want: "not-tcp-udp"},
		{name: "other port", odd: func(p *grammar.Packet) {
			p.Source = netip.AddrPortFrom(p.Source.Addr(), 1)
		}, want: "no-flow"},
		{name: "multicast", odd: func(p *grammar.Packet) {
			p.Target = netip.AddrPortFrom(multicast, p.Target.Port())
		}, want: "no-flow"},
		{name: "time to ask", flow: func(v *fastpathFlow) { v.Out.Validated -= 500e6; v.In.Validated -= 500e6 }, want: "revalidate"},
		{name: "another's entry", flow: func(v *fastpathFlow) { v.Key.PodPort++ }, want: "mismatch"},
		{name: "a twin's packet", flow: func(e *fastpathFlow) { e.Pod6[1]++; e.Peer6[0]++ }, want: twins},
		{name: "nowhere to go", flow: func(v *fastpathFlow) { v.Out.Template, v.In.Template = 2, 2 }, want: "mismatch"},
		{name: "another device", flow: func(v *fastpathFlow) { v.Out.Device, v.In.Device = 2, 2 }, want: "mismatch"},
	}
	tcp := []test{
		{name: "open", odd: func(p *grammar.Packet) { p.Flags = tcpSYN }, want: "tcp-flags"},
		{name: "opened", odd: func(p *grammar.Packet) { p.Flags |= tcpSYN }, want: "tcp-flags"},
		{name: "close", odd: func(p *grammar.Packet) { p.Flags |= tcpFIN }, want: "tcp-flags"},
		{name: "reset", odd: func(p *grammar.Packet) { p.Flags |= tcpRST }, want: "tcp-flags"},
		{name: "urgent", odd: func(p *grammar.Packet) { p.Flags |= tcpURG }, want: "tcp-flags"},
		{name: "no flags", odd: func(p *grammar.Packet) { p.Flags = 0 }, want: "tcp-flags"},
	}
	udp := []test{
		{name: "longer than it is", odd: func(p *grammar.Packet) { p.UDPLength = 1 }, want: "malformed"},
		{name: "shorter than it is", odd: func(p *grammar.Packet) { p.UDPLength = -1 }, want: "malformed"},
	}
	for _, way := range []struct {
		name    string
		program *ebpf.Program
		base    func(version, uint8) grammar.Packet
		own     []test
	}{
		{"encap", f.Encap, outPacket, []test{
			{name: "past the gateway", odd: func(p *grammar.Packet) { p.To = net.HardwareAddr{2, 0, 0, 0, 0, 9} }, want: "mismatch"},
			{name: "in another's name", odd: func(p *grammar.Packet) { p.From = net.HardwareAddr{2, 0, 0, 0, 0, 9} }, want: "mismatch"},
		}},
		{"vxlan_ingress", f.VXLANIngress, inPacket, []test{
			{name: "to another host", odd: func(p *grammar.Packet) { p.To = gateway }, want: "mismatch"},
		}},
	} {
		for _, of := range []struct {
			name     string
			protocol uint8
			own      []test
		}{{"TCP", unix.IPPROTO_TCP, tcp}, {"UDP", unix.IPPROTO_UDP, udp}} {
			for _, tt := range slices.Concat(both, way.own, of.own) {
				t.Run(way.name+" "+of.name+" "+tt.name, func(t *testing.T) {
					f.know(t, v, of.protocol, tt.flow)
					p := way.base(v, of.protocol)
					if tt.odd != nil {
						tt.odd(&p)
					}
					if got := f.run(t, way.program, p.Bytes(), tt.mark); got != "["+tt.want+"]" {
						t.Errorf("counted %s, want [%s]", got, tt.want)
					}
				})
			}
			// What was seen is void in time, and with a change. A stream needs both ways.
			for _, tt := range []struct {
				name   string
				change func(seen *uint64, generation *uint32)
				want   string
			}{
				{"not seen", func(seen *uint64, _ *uint32) { *seen = 0 }, "[flow-expired]"},
				{"seen long ago", func(seen *uint64, _ *uint32) { *seen -= 1e9 }, "[flow-expired]"},
				{"changed", func(_ *uint64, generation *uint32) { *generation-- }, "[invalidated]"},
			} {
				for _, side := range []string{"encap", "vxlan_ingress"} {
					t.Run(way.name+" "+of.name+" "+tt.name+" by "+side, func(t *testing.T) {
						f.know(t, v, of.protocol, func(v *fastpathFlow) {
							if side == "encap" {
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
			// Of IPv6 the header has none, and UDP must have one.
			at, want := 24, "[malformed]"
			if v {
				at, want = 14+40+6, "[csum-unverified]"
				if of.protocol == unix.IPPROTO_UDP {
					want = "[malformed]"
				}
			}
			t.Run(way.name+" "+of.name+" wrong sum", func(t *testing.T) {
				f.know(t, v, of.protocol, nil)
				b := way.base(v, of.protocol).Bytes()
				b[at]++
				b[at+1]++ // of 0xffff that makes 0
				if got := f.run(t, way.program, b, 0); got != want {
					t.Errorf("counted %s, want %s", got, want)
				}
			})
			t.Run(way.name+" "+of.name+" nobody alive", func(t *testing.T) {
				f.know(t, v, of.protocol, nil)
				if err := f.RenewLease(monotonic(t)); err != nil {
					t.Fatal(err)
				}
				if got := f.run(t, way.program, way.base(v, of.protocol).Bytes(), 0); got != "[lease-expired]" {
					t.Errorf("counted %s, want [dead]", got)
				}
			})
		}
	}
}

// TestLand has a packet be taken out of the tunnel, and left in it for each of the reasons
// that the known connection can give.
func TestLand(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	for _, tt := range []struct {
		name        string
		flow        func(*fastpathFlow)
		full, lands bool
	}{
		{name: "seen", lands: true},
		{name: "full", full: true},
		{name: "a large one was before it", flow: func(v *fastpathFlow) { v.GsoPossible = v.Decapped }},
		{name: "a large one was long before it", flow: func(v *fastpathFlow) { v.GsoPossible = v.Decapped - 100e6 }, lands: true},
		{name: "none has landed", flow: func(v *fastpathFlow) { v.Decapped = 0 }},
		{name: "none has landed of late", flow: func(v *fastpathFlow) { v.Decapped -= 1e9 }},
		{name: "something has changed", flow: func(v *fastpathFlow) { v.DecappedGeneration-- }},
		{name: "others have landed", flow: func(v *fastpathFlow) { v.DecappedTemplate = 1 }},
		{name: "nowhere have they landed", flow: func(v *fastpathFlow) { v.DecappedTemplate = 3 }},
		{name: "arrive would not carry it", flow: func(v *fastpathFlow) { v.In.Validated -= 1e9 }},
		{name: "time to ask", flow: func(v *fastpathFlow) { v.In.Validated -= 500e6 }},
		{name: "another's entry", flow: func(v *fastpathFlow) { v.Key.PodPort++ }},
		{name: "led elsewhere", flow: func(v *fastpathFlow) { v.WirePeer++; v.Peer6[1]++ }},
		{name: "nowhere to go", flow: func(v *fastpathFlow) { v.In.Template = 2 }},
	} {
		for i := range 4 {
			v, protocol := version(i&1 != 0), []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP}[i/2]
			f.know(t, v, protocol, tt.flow)
			if err := f.objects.EncapTemplates.Put(uint32(2), landedForTest(v)); err != nil {
				t.Fatal(err)
			}
			inner := inPacket(v, protocol)
			if tt.full {
				inner.Payload = 1400
			}
			b := knownConnection(v, false).Wrap(inner.Bytes())
			lands := tt.lands || tt.full && protocol == unix.IPPROTO_UDP
			if !lands {
				if got := f.run(t, f.NICDecap, b, 0); got != "[]" {
					t.Errorf("%s %s: counted %s, want nothing", v, tt.name, got)
				}
			} else if code, _, err := f.NICDecap.Test(b); err != nil || code != redirect {
				t.Errorf("%s %s: it returns %d, error %v, want it redirected", v, tt.name, int32(code), err)
			}
			// A full one holds up the stream's others.
			if tt.full && !lands {
				f.run(t, f.NICDecap, knownConnection(v, false).Wrap(inPacket(v, protocol).Bytes()), 0)
			}
		}
	}
}

// TestLandedKind has nothing be known of how a packet came that the kernel would take for one of
// the other version of IP.
func TestLandedKind(t *testing.T) {
	f := loadForTest(t, nil)
	for _, v := range []version{four, six} {
		for _, other := range []bool{false, true} {
			f.know(t, v, unix.IPPROTO_UDP, func(e *fastpathFlow) { e.Decapped = 0 })
			b := knownConnection(v, false).Wrap(inPacket(v, unix.IPPROTO_UDP).Bytes())
			if other {
				copy(b[grammar.Head-2:], head(!v, false)[grammar.Head-2:])
			}
			each := make([]fastpathCpuState, ebpf.MustPossibleCPU())
			if err := f.objects.CpuStates.Put(uint32(0), each); err != nil {
				t.Fatal(err)
			}
			f.run(t, f.NICDecap, b, 0)
			if err := f.objects.CpuStates.Lookup(uint32(0), &each); err != nil {
				t.Fatal(err)
			}
			lands := slices.ContainsFunc(each, func(c fastpathCpuState) bool { return c.DecapStage != 0 })
			if lands == other {
				t.Errorf("%s, said to be of the other version %t: it is kept to be known again %t", v, other, lands)
			}
		}
	}
}

// TestSegments has a packet that is to be cut be as long as the longest of its parts.
func TestSegments(t *testing.T) {
	f := loadForTest(t, nil)
	for _, v := range []version{four, six} {
		for over, want := range []string{"[csum-unverified]", "[exceeds-mtu]"} {
			f.know(t, v, unix.IPPROTO_TCP, nil)
			p := outPacket(v, unix.IPPROTO_TCP)
			p.Payload = 3000
			skb := make([]byte, 192) // struct __sk_buff, and in it how many parts, and their length
			binary.NativeEndian.PutUint32(skb[164:], 3)
			binary.NativeEndian.PutUint32(skb[176:], uint32(1450-v.header()-20+over))
			before, err := f.Counts()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Encap.Run(&ebpf.RunOptions{Data: p.Bytes(), DataOut: make([]byte, 5000), Context: skb}); err != nil {
				t.Fatal(err)
			}
			if got := f.since(t, before); got != want {
				t.Errorf("%s, %d more than fit: counted %s, want %s", v, over, got, want)
			}
		}
	}
}

// TestPlaces has the fast path be worn when most places are used up, and none be used twice
// when all are.
func TestPlaces(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	o := &f.objects
	for _, of := range []struct {
		used *ebpf.Variable
		all  uint32
	}{{o.TemplatesUsed, o.EncapTemplates.MaxEntries()}, {o.PodLinksUsed, o.PodLinks.MaxEntries()}} {
		for used, want := range map[uint32]bool{0: false, of.all/4*3 - 1: false, of.all / 4 * 3: true, of.all: true} {
			if err := of.used.Set(used); err != nil {
				t.Fatal(err)
			}
			if worn, err := f.TablesWorn(); err != nil || worn != want {
				t.Errorf("with %d of %d places used it says %t, error %v, want %t", used, of.all, worn, err, want)
			}
		}
		if err := of.used.Set(uint32(0)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInjected has packets of VXLAN that nobody has let through to a pod take no place for their
// outer headers, of which there are only so many.
func TestInjected(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	f.know(t, four, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.Decapped = 0 })
	p := inPacket(four, unix.IPPROTO_UDP).Bytes()
	for n := range byte(10) {
		c := knownConnection(four, false)
		c.Outer[grammar.Overhead+11] = n // who says to have sent it
		f.run(t, f.NICDecap, c.Wrap(p), 0)
		if got := f.run(t, f.VXLANIngress, p, 0); got != "[revalidate]" {
			t.Errorf("counted %s, want [asked]", got)
		}
		if err := f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU())); err != nil {
			t.Fatal(err)
		}
	}
	var used uint32
	if err := f.objects.TemplatesUsed.Get(&used); err != nil || used != 0 {
		t.Errorf("%d places are used, error %v, want none", used, err)
	}
}

// TestLists has a packet that was let go be known again although others met arrive before it
// went on, as they do where the kernel receives packets in lists.
func TestLists(t *testing.T) {
	f := loadForTest(t, nil)
	f.know(t, four, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.In.Validated -= 1e9 })
	if err := f.SetLinkMACs([]LinkMAC{{Link: lo, MAC: [6]byte(knownMAC)}}); err != nil {
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
		{"nothing was let go", f.ObservePod, delivered, "[]"},
		{"one is let go", f.VXLANIngress, inPacket(four, unix.IPPROTO_UDP), "[flow-expired]"},
		{"another comes", f.VXLANIngress, other, "[no-flow]"},
		{"and goes on", f.ObservePod, other, "[rewritten]"}, // it is much like the first
		{"it is sent to all links", f.ObservePod, elsewhere, "[mismatch]"},
		// Behind lo no pod's device is found, which might have XDP: that is asked of this one alone.
		{"it goes on", f.ObservePod, delivered, "[rewritten]"},
		{"it has gone on", f.ObservePod, delivered, "[]"},
	} {
		if got := f.run(t, step.program, step.packet.Bytes(), 0); got != step.want {
			t.Errorf("%s: counted %s, want %s", step.what, got, step.want)
		}
	}
}

// TestCloseForgets has a connection be unknown from then on that opens anew or closes, and stay
// known where somebody else may have said so: by another device, out of its window, or by a SYN
// from the wire. Conntrack is told of a reset that is exactly the next.
func TestCloseForgets(t *testing.T) {
	f := loadForTest(t, nil)
	const acked, end, edge = 900, 1000, 70000
	for _, tt := range []struct {
		name    string
		flags   byte
		seq     uint32
		device  uint32
		in      bool
		forgets bool
		closes  bool
	}{
		{name: "the pod opens it", flags: tcpSYN, seq: 1 << 31, forgets: true},
		{name: "the pod lets it be opened", flags: tcpSYN | tcpACK, seq: 1 << 31, forgets: true},
		{name: "another pod opens it", flags: tcpSYN, device: lo + 1},
		{name: "it is said to open", flags: tcpSYN, in: true, seq: end},
		{name: "the pod ends it", flags: tcpFIN | tcpACK, seq: end, forgets: true},
		{name: "its peer ends it", flags: tcpFIN | tcpACK, seq: end, in: true, forgets: true},
		{name: "another pod ends it", flags: tcpFIN | tcpACK, seq: end, device: lo + 1},
		{name: "an end out of the window", flags: tcpFIN | tcpACK, seq: edge + 1},
		{name: "an end before the window", flags: tcpFIN | tcpACK, seq: acked - 102, in: true},
		{name: "an end with what was acknowledged", flags: tcpFIN | tcpACK, seq: acked - 50, in: true, forgets: true},
		{name: "the pod resets it", flags: tcpRST, seq: end, forgets: true, closes: true},
		{name: "its peer resets it", flags: tcpRST | tcpACK, seq: end, in: true, forgets: true, closes: true},
		{name: "a reset of what is acknowledged", flags: tcpRST, seq: acked, in: true, forgets: true, closes: true},
		{name: "a reset in the window", flags: tcpRST, seq: end + 1, forgets: true},
		{name: "a reset out of the window", flags: tcpRST, seq: edge + 1, in: true},
		{name: "a reset before the window", flags: tcpRST, seq: acked - 102},
		{name: "another pod resets it", flags: tcpRST, seq: end, device: lo + 1},
		{name: "its peer resets it in the window", flags: tcpRST, seq: end + 1, in: true},
		{name: "something urgent", flags: tcpURG | tcpACK, seq: end},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.know(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) {
				v.Out.Device += tt.device
				v.Out.RcvNxt, v.In.RcvNxt, v.Out.SndNxt, v.In.SndNxt, v.Out.WindowEnd, v.In.WindowEnd = acked, acked, end, end, edge, edge
			})
			p, program := outPacket(four, unix.IPPROTO_TCP), f.Encap
			if tt.in {
				p, program = inPacket(four, unix.IPPROTO_TCP), f.VXLANIngress
			}
			p.Flags = tt.flags
			b := p.Bytes()
			binary.BigEndian.PutUint32(b[14+20+4:], tt.seq)
			f.run(t, program, b, 0)
			flows, err := f.Flows()
			if err != nil {
				t.Fatal(err)
			}
			if forgets := len(flows) == 0; forgets != tt.forgets {
				t.Errorf("it is forgotten: %t, want %t", forgets, tt.forgets)
			}
			f.events.SetDeadline(time.Now())
			news, err := f.ReadEvent()
			if told := err == nil && news.Kind == EventReset; told != tt.closes {
				t.Errorf("conntrack is to be told: %t, want %t (%+v, %v)", told, tt.closes, news, err)
			}
		})
	}
}

// TestNumbers has packets of a connection be carried as long as they fit its numbers, and these
// go on with them.
func TestNumbers(t *testing.T) {
	for _, v := range []version{four, six} {
		f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
		for _, tt := range []struct {
			name      string
			seq, ack  uint32
			in        bool
			carried   bool
			out, back Side // afterwards
		}{
			{"the next", 1000, 900, false, true, Side{1100, 900, 70000}, Side{1000, 900, 70000}},
			{"the next but a few", 5000, 1000, false, true, Side{5100, 1000, 70000}, Side{1000, 900, 70000}},
			{"once more", 900, 900, false, true, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"the last that fits", 70000, 900, false, true, Side{70100, 900, 70100}, Side{1000, 900, 70000}},
			{"the oldest that fits", 1<<32 - (0xffff - 900 + 100), 900, false, true, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"older", 1<<32 - (0xffff - 900 + 101), 900, false, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"the oldest acknowledgement", 1000, 1<<32 - (0xffff - 900), false, true, Side{1100, 900, 70000}, Side{1000, 900, 70000}},
			{"an older one", 1000, 1<<32 - (0xffff - 900 + 1), false, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"out of the window", 70001, 900, false, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"an acknowledgement of what was not seen yet", 1000, 1200, false, true, Side{1100, 1200, 70000}, Side{1200, 900, 70000}},
			{"an acknowledgement of what cannot have been sent", 1000, 70001, false, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
			{"what opens the window", 1000, 70000, false, true, Side{1100, 70000, 70000}, Side{70000, 900, 70000 + 256}},
			{"the peer's next", 1000, 900, true, true, Side{1000, 900, 70000}, Side{1100, 900, 70000}},
			{"the peer's, out of the window", 70001, 900, true, false, Side{1000, 900, 70000}, Side{1000, 900, 70000}},
		} {
			f.know(t, v, unix.IPPROTO_TCP, func(v *fastpathFlow) {
				v.Out.RcvNxt, v.In.RcvNxt, v.Out.SndNxt, v.In.SndNxt, v.Out.WindowEnd, v.In.WindowEnd = 900, 900, 1000, 1000, 70000, 70000
			})
			p, program := outPacket(v, unix.IPPROTO_TCP), f.Encap
			if tt.in {
				p, program = inPacket(v, unix.IPPROTO_TCP), f.VXLANIngress
			}
			b := p.Bytes()
			binary.BigEndian.PutUint32(b[14+v.header()+4:], tt.seq)
			binary.BigEndian.PutUint32(b[14+v.header()+8:], tt.ack)
			code, err := program.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)})
			if err != nil || code == redirect != tt.carried {
				t.Errorf("%s, %s: it returns %d, error %v; carried %t, want %t", v, tt.name, int32(code), err, code == redirect, tt.carried)
			}
			pod, peer := v.ends()
			n, err := f.Sequence(Flow{pod, peer, unix.IPPROTO_TCP}, monotonic(t))
			if err != nil || n.Pod != tt.out || n.Peer != tt.back {
				t.Errorf("%s, %s: numbers are %+v, error %v, want %+v and %+v", v, tt.name, n, err, tt.out, tt.back)
			}
		}
	}
}

// TestRenew has the agent be asked once for each gigabyte that conntrack has not seen.
func TestRenew(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	const step = 1 << 28
	f.know(t, four, unix.IPPROTO_TCP, func(v *fastpathFlow) { v.Out.WindowEnd, v.In.WindowEnd = step, step })
	b := outPacket(four, unix.IPPROTO_TCP).Bytes()
	asked := 0
	for n := range uint32(16) { // 4 GiB
		pod, peer := four.ends()
		var v fastpathFlow
		if err := f.objects.Flows.Lookup(Flow{pod, peer, unix.IPPROTO_TCP}.key(), &v); err != nil {
			t.Fatal(err)
		}
		v.Out.Validated, v.In.Validated, v.In.RcvNxt, v.Out.WindowEnd = uint64(monotonic(t)), uint64(monotonic(t)), n*step, (n+1)*step
		if err := f.objects.Flows.Put(v.Key, v); err != nil {
			t.Fatal(err)
		}
		binary.BigEndian.PutUint32(b[14+20+4:], n*step+1000)
		for range 3 {
			if code, err := f.Encap.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)}); err != nil || code != redirect {
				t.Fatalf("it returns %d, error %v", int32(code), err)
			}
		}
		f.events.SetDeadline(time.Now())
		for {
			news, err := f.ReadEvent()
			if err != nil {
				break
			}
			if news.Kind != EventResync {
				t.Errorf("asked for %+v, want a renewal", news)
			}
			asked++
		}
	}
	if asked != 3 {
		t.Errorf("asked %d times in 4 GiB, the first 256 MiB of which begin at 0; want 3", asked)
	}
}

// TestFlows has what is known told by its ends, and forgotten by them.
func TestFlows(t *testing.T) {
	for _, v := range []version{four, six} {
		t.Run(v.String(), func(t *testing.T) { testFlows(t, v) })
	}
}

func testFlows(t *testing.T, v version) {
	f := loadForTest(t, nil)
	f.know(t, v, unix.IPPROTO_UDP, nil)
	pod, peer := v.ends()
	want := Flow{pod, peer, unix.IPPROTO_UDP}
	flows, err := f.Flows()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := flows[want]; !ok || len(flows) != 1 {
		t.Errorf("known are %v, want %v", flows, want)
	}
	for _, link := range []struct {
		device, place uint32
		want          int
	}{{5, 1, 5}, {0, 1, lo}, {5, 0, 5}, {0, 0, 0}} {
		f.know(t, v, unix.IPPROTO_UDP, func(v *fastpathFlow) { v.Out.Device, v.In.Template = link.device, link.place })
		if flows, err = f.Flows(); err != nil || flows[want].Link != link.want || flows[want].Validated == 0 {
			t.Errorf("seen %+v, error %v, want link %d", flows[want], err, link.want)
		}
	}
	for range 2 { // that it is gone already is no error
		if err := f.Forget(want); err != nil {
			t.Error(err)
		}
	}
	if flows, err = f.Flows(); err != nil || len(flows) != 0 {
		t.Errorf("known are %v, error %v", flows, err)
	}
	hints := make([]byte, f.objects.Bloom.Size())
	if err := f.objects.Bloom.Get(hints); err != nil {
		t.Fatal(err)
	}
	if slices.Max(hints) > 0 {
		t.Error("there is a hint at a connection, and none is known")
	}
}

// TestForged has wire believe nothing of what it has not seen on its way from a pod and
// over the VXLAN device: anybody can send what looks like it.
func TestForged(t *testing.T) {
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
		"nothing is on its way":       {stage: 0, want: "[]"},
		"it has not left the tunnel":  {stage: 1, want: "[]"},
		"another is on its way":       {stage: 2, odd: func(c *fastpathCpuState) { c.Out.Headers.Ip[1]++ }, want: "[]"},
		"its device is not a tunnel":  {stage: 2, want: "[rewritten]"},
		"it has not been asked about": {stage: 2, odd: func(c *fastpathCpuState) { c.Out.Key.PodPort++ }, want: "[untracked]"},
	} {
		t.Run(name, func(t *testing.T) {
			f.know(t, four, unix.IPPROTO_UDP, nil)
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
				t.Errorf("known before %v, after %v", before, after)
			}
		})
	}
}

// BenchmarkSlow tells what a packet pays on its way that is not for the fast path.
func BenchmarkSlow(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	f, err := LoadFastpath()
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := f.RenewLease(1 << 62); err != nil {
		b.Fatal(err)
	}
	for _, p := range []*ebpf.Program{f.Encap, f.ObserveVXLAN, f.ObserveNIC, f.NICDecap, f.VXLANIngress, f.ObservePod} {
		b.Run(p.String(), func(b *testing.B) {
			_, took, err := p.Benchmark(outPacket(four, unix.IPPROTO_UDP).Bytes(), b.N, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}
