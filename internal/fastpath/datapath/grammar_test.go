//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

var packets = flag.Int("packets", 50_000, "how many packets TestGrammar makes")

// takesFastPath reports whether a packet takes the fast path according to docs/explanation/fastpath.md.
func takesFastPath(b []byte, v version, out bool, service netip.AddrPort) bool {
	kind, size := []byte{0x08, 0x00}, v.header()
	if v {
		kind = []byte{0x86, 0xdd}
	}
	if len(b) < 14+size+8 || !bytes.Equal(b[12:14], kind) {
		return false
	}
	ip := b[14:]
	half := func(at int) int { return int(binary.BigEndian.Uint16(ip[at:])) }
	l4, want := ip[size:], inPacket(v, 0)
	if out {
		want = outPacket(v, 0)
		want.Target = service
	}
	ends := slices.Concat(want.Source.Addr().AsSlice(), want.Target.Addr().AsSlice())
	switch {
	case out && (!bytes.Equal(b[:6], gateway) || !bytes.Equal(b[6:12], knownMAC)),
		!out && !bytes.Equal(b[:6], want.To),
		len(ip) > 1450, grammar.TOS(ip)>>2 != 0, !bytes.Equal(ip[size-len(ends):size], ends),
		half(size) != int(want.Source.Port()), half(size+2) != int(want.Target.Port()):
		return false
	}
	if v {
		if ip[0]>>4 != 6 || half(4) != len(ip)-40 || ip[7] != 64 {
			return false
		}
	} else if ip[0] != 0x45 || half(2) != len(ip) || grammar.Sum(0, ip[:20]) != 0xffff || half(6)&^0x4000 != 0 || ip[8] != 64 {
		return false
	}
	switch v.protocol(b) {
	case unix.IPPROTO_TCP:
		return len(l4) >= 20 && l4[12]>>4 >= 5 && int(l4[12]>>4)*4 <= len(l4) && l4[12]&0xf == 0 && l4[13]&0x37 == tcpACK
	case unix.IPPROTO_UDP:
		return half(size+4) == len(l4) && (v == four || half(size+6) != 0)
	}
	return false
}

// inWindow reports whether a TCP segment starts within its window and acknowledges no more than the other side has sent, and
// neither number is older than the largest window. Windows have no scale.
func (p *Programs) inWindow(t *testing.T, b []byte, v version, out bool, flow Flow) bool {
	t.Helper()
	n, err := p.Sequence(flow, monotonic(t))
	if err != nil {
		t.Fatal(err)
	}
	from, to := n.Pod, n.Peer
	if !out {
		from, to = to, from
	}
	l4 := b[14+v.header():]
	seq, ack := binary.BigEndian.Uint32(l4[4:]), binary.BigEndian.Uint32(l4[8:])
	end := seq + uint32(len(l4)) - uint32(l4[12]>>4)*4
	return int32(seq-from.Edge) <= 0 && int32(ack-to.Edge) <= 0 && int32(to.Expects-0xffff-end) <= 0 && int32(from.Expects-0xffff-ack) <= 0
}

// endDetours lets packets take the fast path although one before them did not.
func (p *Programs) endDetours(t *testing.T, flows ...Flow) {
	t.Helper()
	for _, flow := range flows {
		v, known, err := p.lookUp(flow.key())
		if err == nil && known {
			v.Left, v.In.Run = 0, 0
			err = p.objects.Flows.Put(flow.key(), v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (v version) header() int {
	if v {
		return 40
	}
	return 20
}

// protocol returns the protocol of a packet, if the packet is long enough.
func (v version) protocol(b []byte) byte {
	at := 14 + 9
	if v {
		at = 14 + 6
	}
	if len(b) <= at {
		return 0
	}
	return b[at]
}

// hopped returns an IP packet after one hop.
func hopped(ip []byte) []byte {
	ip = bytes.Clone(ip)
	if ip[0]>>4 == 6 {
		ip[7]--
		return ip
	}
	ip[8]--
	ip[10], ip[11] = 0, 0
	binary.BigEndian.PutUint16(ip[10:], ^grammar.Sum(0, ip[:20]))
	return ip
}

// translated returns an IP packet in which NAT has changed one address and port. at is the offset
// of the address: 12 for the source, 16 for the destination.
func translated(ip []byte, at int, to netip.AddrPort) []byte {
	ip = bytes.Clone(ip)
	address, port := to.Addr().AsSlice(), binary.BigEndian.AppendUint16(nil, to.Port())
	l4 := ip[20+(at-12)/2:]
	check := ip[26:28]
	if ip[9] == unix.IPPROTO_TCP {
		check = ip[36:38]
	}
	if ip[9] == unix.IPPROTO_TCP || check[0]|check[1] != 0 {
		sum := uint32(^binary.BigEndian.Uint16(check)) // RFC 1624
		for i := range 2 {
			sum += uint32(^binary.BigEndian.Uint16(ip[at+2*i:])) + uint32(binary.BigEndian.Uint16(address[2*i:]))
		}
		sum += uint32(^binary.BigEndian.Uint16(l4)) + uint32(to.Port())
		binary.BigEndian.PutUint16(check, ^grammar.Sum(sum, nil))
		if ip[9] == unix.IPPROTO_UDP && check[0]|check[1] == 0 {
			check[0], check[1] = 0xff, 0xff
		}
	}
	copy(ip[at:], address)
	copy(l4, port)
	return ip
}

// head returns the headers that precede all packets of the connection on the wire.
func head(v version, sum bool) []byte {
	raw := slices.Concat([]byte{2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 1, 2, 0x08, 0x00}, // Ethernet
		[]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2}, // IP
		[]byte{0, 0, 0x21, 0x18, 0, 0, 0, 0}, []byte{0x08, 0, 0, 0, 0, 0, 1, 0},       // UDP, VXLAN
		[]byte{2, 0, 0, 0, 2, 1, 2, 0, 0, 0, 2, 2, 0x08, 0x00})
	if v {
		raw[62], raw[63] = 0x86, 0xdd
	}
	if sum {
		raw[40], raw[41] = 0xff, 0xff
	}
	return raw
}

// outerOf returns headers as an encapsulation template.
func outerOf(head []byte) (o fastpathEncapTemplate) {
	if _, err := binary.Decode(head, binary.NativeEndian, &o.Head); err != nil {
		panic(err)
	}
	o.Nic = lo
	return o
}

func encapTemplateForTest(v version, sum bool) fastpathEncapTemplate { return outerOf(head(v, sum)) }

// decapTemplateForTest returns the template of the outer headers that the kernel removed last,
// without the checksum.
func decapTemplateForTest(v version) fastpathEncapTemplate {
	known := knownConnection(v, false)
	return outerOf(known.Outer[:])
}

// isDecapped reports whether decap_nic decapsulates a packet according to docs/explanation/fastpath.md.
func isDecapped(b []byte, v version, service netip.AddrPort) bool {
	if len(b) < 64+28 || !takesFastPath(b[50:], v, false, service) {
		return false
	}
	known := knownConnection(v, false)
	want := known.Outer[:]
	half := func(at int) int { return int(binary.BigEndian.Uint16(b[at:])) }
	if b[14] != 0x45 || grammar.Sum(0, b[14:34]) != 0xffff || half(16) != len(b)-14 || half(38) != len(b)-34 ||
		b[15]&3 != []byte{0, 1, 2, 2}[grammar.TOS(b[64:])&3] || v.protocol(b[50:]) == unix.IPPROTO_TCP && len(b) >= 1450 {
		return false
	}
	is := bytes.Clone(b[:64])
	for _, at := range []int{15, 16, 17, 18, 19, 24, 25, 34, 35, 38, 39, 40, 41} {
		is[at], want[at] = 0, 0
	}
	return bytes.Equal(is, want)
}

// flow has the fields from which the kernel computes the flow hash of a packet.
type flow struct {
	protocol byte
	label    uint32
}

// encapsulated checks that redirect_pod has encapsulated a packet as the kernel would have.
func encapsulated(t *testing.T, b, got []byte, v version, sum bool, isTranslated bool, ports map[flow]uint16) {
	t.Helper()
	if len(got) != len(b)+50 {
		t.Fatalf("%d bytes became %d, want 50 more", len(b), len(got))
	}
	want := head(v, sum)
	want[15] = []byte{0, 1, 2, 2}[grammar.TOS(b[14:])&3] // RFC 6040
	binary.BigEndian.PutUint16(want[16:], uint16(len(got)-14))
	copy(want[18:20], got[18:20]) // the identification is arbitrary
	binary.BigEndian.PutUint16(want[24:], ^grammar.Sum(0, want[14:34]))
	port := binary.BigEndian.Uint16(got[34:])
	of := flow{protocol: v.protocol(b)}
	if v {
		of.label = binary.BigEndian.Uint32(b[14:]) & 0xfffff
	}
	if first, known := ports[of]; known && first != port || port < 32768 || port >= 60999 {
		t.Fatalf("the source port is %d, was %d", port, first)
	}
	ports[of] = port
	copy(want[34:36], got[34:36])
	binary.BigEndian.PutUint16(want[38:], uint16(len(got)-34))
	inner := b[14:]
	if isTranslated {
		inner = translated(inner, 16, knownPeer)
	}
	want = append(want, hopped(inner)...)
	copy(want[40:42], got[40:42])
	if !bytes.Equal(got, want) {
		t.Fatalf("packet %x\ngot    %x\nwant   %x", b, got, want)
	}
	if !sum {
		if got[40] != 0 || got[41] != 0 {
			t.Fatalf("there is an outer checksum, %x", got[40:42])
		}
		return
	}
	// The device sets the inner checksum to the complement of the previous value of its field.
	l4 := 64 + v.header()
	at := l4 + 6
	if v.protocol(b) == unix.IPPROTO_TCP {
		at = l4 + 16
	}
	field := binary.BigEndian.Uint16(got[at:])
	got[at], got[at+1] = 0, 0
	rest := grammar.Sum(0, got[l4:])
	binary.BigEndian.PutUint16(got[at:], grammar.Sum(uint32(^field)+uint32(^rest), nil))
	pseudo := uint32(grammar.Sum(0, got[26:34])) + unix.IPPROTO_UDP + uint32(len(got)-34)
	if s := grammar.Sum(pseudo, got[34:]); s != 0xffff {
		t.Fatalf("the outer checksum is wrong: %#x of %x", s, got)
	}
}

// TestGrammar runs redirect_pod, redirect_vxlan and decap_nic on random packets while a connection is
// accelerated. Packets that take the fast path must leave as the kernel would have sent them; all
// others must be passed on unchanged.
func TestGrammar(t *testing.T) {
	f := loadForTest(t, map[string]any{"skip_csum_checks": uint8(1)})
	g := grammar.Grammar{Rand: rand.New(rand.NewPCG(1, 2))}
	ports := make(map[flow]uint16)
	skb := make([]byte, 192)
	var fast, slow int
	of := make(map[version]int)
	var known time.Time
	sum, v := false, four
	for range *packets {
		if time.Since(known) > 100*time.Millisecond { // before revalidation is due
			known = time.Now()
			sum = !sum
			service := g.Front
			if sum {
				v = version(g.IntN(2) > 0)
				_, service = v.ends()
				if !v && g.IntN(2) > 0 {
					service = knownService
				}
				clear(ports)
			}
			g.Connection = knownConnection(v, sum)
			g.Front = service
			if err := f.deleteFlows(); err != nil {
				t.Fatal(err)
			}
			f.addFlowOf(t, Flow{g.Pod, g.Front, unix.IPPROTO_TCP}, nil)
			f.addFlowOf(t, Flow{g.Pod, g.Front, unix.IPPROTO_UDP}, nil)
			if err := errors.Join(f.objects.EncapTemplates.Put(uint32(1), encapTemplateForTest(v, sum)), f.objects.DecapTemplates.Put(uint32(2), decapTemplateForTest(v))); err != nil {
				t.Fatal(err)
			}
		}
		f.endDetours(t, Flow{g.Pod, g.Front, unix.IPPROTO_TCP}, Flow{g.Pod, g.Front, unix.IPPROTO_UDP})
		program := []*ebpf.Program{f.RedirectPod, f.RedirectVXLAN, f.DecapNIC}[g.IntN(3)]
		out := program == f.RedirectPod
		var b, inner []byte
		var want bool
		if program == f.DecapNIC {
			b = g.Wrapped()
			want = isDecapped(b, v, g.Front)
			inner = b[grammar.Overhead:]
		} else {
			b = g.Packet(out)
			want = takesFastPath(b, v, out, g.Front)
			inner = b
		}
		isTranslated := g.Front != g.Peer
		mark := uint32(0)
		if g.IntN(50) == 0 {
			mark = 1 << g.IntN(32)
		}
		want = want && mark == 0 && (v.protocol(inner) != unix.IPPROTO_TCP || f.inWindow(t, inner, v, out, Flow{g.Pod, g.Front, unix.IPPROTO_TCP}))
		binary.NativeEndian.PutUint32(skb[8:], mark) // struct __sk_buff
		o := ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64), Context: skb}
		code, err := program.Run(&o)
		if errors.Is(err, unix.EINVAL) && len(b) < 14+40 {
			continue // prog.Run accepts no packet shorter than an IP header
		}
		if err != nil {
			t.Fatalf("%x: %v", b, err)
		}
		if time.Since(known) > 400*time.Millisecond { // the machine has stalled, and revalidation may have been due
			known = time.Time{}
			if err := f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU())); err != nil {
				t.Fatal(err)
			}
			continue
		}
		switch {
		case code != redirect && int32(code) != -1:
			t.Fatalf("%s returns %d for %x", program, int32(code), b)
		case (code == redirect) != want:
			counts, err := f.Counts()
			t.Fatalf("%s, mark %d: redirected %t, want %t: %x (%v, %v)", program, mark, code == redirect, want, b, counts, err)
		case code != redirect:
			slow++
			if !bytes.Equal(o.DataOut, b) {
				t.Fatalf("%s changed a packet\nfrom %x\nto   %x", program, b, o.DataOut)
			}
		case out:
			fast++
			encapsulated(t, b, o.DataOut, v, sum, isTranslated, ports)
			of[v]++
		default:
			fast++
			of[v]++
			ip := inner[14:]
			if isTranslated {
				ip = translated(ip, 12, knownService)
			}
			if want := slices.Concat(knownMAC, gateway, inner[12:14], hopped(ip)); !bytes.Equal(o.DataOut, want) {
				t.Fatalf("packet %x\ngot    %x\nwant   %x", b, o.DataOut, want)
			}
		}
		if code != redirect && program == f.DecapNIC {
			// Otherwise the programs would take a later packet with the same headers for this probe.
			if err := f.objects.CpuStates.Put(uint32(0), make([]fastpathCpuState, ebpf.MustPossibleCPU())); err != nil {
				t.Fatal(err)
			}
		}
		if code != redirect && v.protocol(b) == unix.IPPROTO_TCP && program != f.DecapNIC {
			known = time.Time{} // it may have deleted the flow
		}
	}
	t.Logf("%d packets took the fast path (%v), %d the slow path", fast, of, slow)
	if min(of[four], of[six]) < *packets/20 || slow < *packets/10 {
		t.Error("too few packets of one kind")
	}
}
