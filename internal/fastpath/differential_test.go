//go:build linux

package fastpath_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

var (
	packets = flag.Int("packets", 8_000, "how many packets TestDifferential makes")
	seed    = flag.Uint64("seed", 0, "the seed of TestDifferential; 0 makes one up")
)

const (
	tcp, udp = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	// connections is the number of TCP connections, and of UDP connections, that are open at a
	// time. One in a few hundred packets ends a connection, so each round opens others.
	connections = 48
	round       = 4000
	// inFlight is the number of packets that the test sends before it waits for them.
	inFlight = 100
)

// vnet is struct virtio_net_hdr, which precedes each packet of a packet socket: its offload state.
type vnet struct {
	Flags, GSO                        byte
	Headers, Segment, SumStart, SumAt uint16
}

// groups is the multicast address of IGMPv3 reports, which a node sends at any time (RFC 3376).
var groups = []byte{0x01, 0x00, 0x5e, 0, 0, 22}

const (
	needsSum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	gsoTCP   = 1 // VIRTIO_NET_HDR_GSO_TCPV4
	gsoTCP6  = 4 // VIRTIO_NET_HDR_GSO_TCPV6
	gsoUDP   = 5 // VIRTIO_NET_HDR_GSO_UDP_L4
)

// injected is a packet that enters a node at an end.
type injected struct {
	end int
	vnet
	frame []byte
}

// Ends of a node: its pods, of which it has three in a local world, and the NIC.
const (
	pod0, pod1, pod2, atNIC = 0, 1, 2, 3
)

// isolatedNode is a node whose ends the test controls: what the node sends to pods or to the NIC is
// captured there and goes no further.
type isolatedNode struct {
	*world
	sockets [4]int
	links   [3]net.HardwareAddr
	like    grammar.Connection
	// far is the end of the peers of its connections: the NIC, or the second pod in a local world. hostile is a pod that has none.
	far, hostile int
	// four is an IPv4 connection to another node, even if the others are not.
	four grammar.Connection
	buf  []byte
	mark uint64
}

func newIsolatedNode(t *testing.T, shape, offload string, six, local bool) *isolatedNode {
	t.Helper()
	a := &isolatedNode{far: atNIC, hostile: pod1, buf: make([]byte, 1<<17)}
	if local {
		a.world, a.far, a.hostile = newLocalWorld(t, shape, six), pod1, pod2
	} else {
		a.world = newWorldOf(t, shape, offload, six)
	}
	drop, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R0, 2), asm.Return(), // TC_ACT_SHOT
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer drop.Close()
	// Packets of a pod's stack have the hash of their socket, so most packets here have one too.
	hash, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // __sk_buff.len
		asm.And.Imm(asm.R2, 7),
		asm.JEq.Imm(asm.R2, 7, "none"),
		asm.FnGetHashRecalc.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("none"), // TCX_NEXT
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer hash.Close()
	var index []int // of the pods' links, on the node
	for _, i := range append(a.pods(), atNIC) {
		place, name := fmt.Sprintf("n0p%d", i), "eth0"
		if i == atNIC {
			place, name = "sw", "node0"
		}
		a.in(place, func() error {
			device, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if i != atNIC {
				a.links[i], index = device.Attrs().HardwareAddr, append(index, device.Attrs().ParentIndex)
				// So that it can send packets larger than the MTU of the path.
				if err := netlink.LinkSetMTU(device, 16000); err != nil {
					return err
				}
			}
			if a.sockets[i], err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			t.Cleanup(func() { unix.Close(a.sockets[i]) })
			timeout := unix.NsecToTimeval(int64(patience))
			attach := func(p *ebpf.Program, to ebpf.AttachType) error {
				held, err := link.AttachTCX(link.TCXOptions{Interface: device.Attrs().Index, Program: p, Attach: to})
				if err == nil {
					t.Cleanup(func() { held.Close() })
				}
				return err
			}
			return errors.Join(
				attach(drop, ebpf.AttachTCXIngress),
				attach(hash, ebpf.AttachTCXEgress),
				os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0), // it would send by itself
				unix.SetsockoptInt(a.sockets[i], unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
				unix.SetsockoptInt(a.sockets[i], unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
				unix.SetsockoptInt(a.sockets[i], unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
				unix.SetsockoptTimeval(a.sockets[i], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
				unix.Bind(a.sockets[i], &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: device.Attrs().Index}), // ETH_P_ALL in network order
			)
		})
	}
	var vteps, nics [2]net.HardwareAddr
	var tunnel *netlink.Vxlan
	for i := range vteps {
		a.in(fmt.Sprintf("n%d", i), func() error {
			links, err := netlink.LinkList()
			for _, l := range links {
				if v, ok := l.(*netlink.Vxlan); ok && v.SrcAddr.To4() != nil {
					tunnel, vteps[i] = v, v.HardwareAddr
				}
				if l.Attrs().Name == "eth0" {
					nics[i] = l.Attrs().HardwareAddr
				}
			}
			return err
		})
	}
	a.in("n0", func() error { return a.settle(index, nics[1]) })
	a.disableMasquerade()
	a.four = grammar.Connection{
		Peer: netip.AddrPortFrom(pod(1, 0), 5000), Front: netip.AddrPortFrom(pod(1, 0), 5000),
		MAC: a.links[0], Gateway: a.gateway(index[0]), MTU: 1450,
	}
	head := bytes.Join([][]byte{nics[0], nics[1], {0x08, 0x00}}, nil)
	if tunnel == nil {
		a.four.Routed = true
	} else {
		vni := binary.BigEndian.AppendUint32(nil, uint32(tunnel.VxlanId)<<8)
		port := binary.BigEndian.AppendUint16(nil, uint16(tunnel.Port))
		head = bytes.Join([][]byte{head,
			{0x45, 0, 0, 0, 0, 0, 0, 0, 64, udp, 0, 0, 198, 18, 0, 2, 198, 18, 0, 1},
			{0, 0}, port, {0, 0, 0, 0}, {0x08, 0, 0, 0}, vni,
			vteps[0], vteps[1], {0x08, 0x00}}, nil)
	}
	copy(a.four.Outer[:], head)
	a.like = a.four
	peer, to := a.pod(1, 0), a.links[0]
	if shape == spec.ShapeCalico {
		to = a.gateway(index[1])
	}
	if local {
		peer, a.like.Routed = a.pod(0, 1), true
		copy(a.like.Outer[:], slices.Concat(to, a.links[1], net.HardwareAddr{0x08, 0x00}))
	}
	a.like.Peer = netip.AddrPortFrom(peer, 5000)
	a.like.Front = a.like.Peer
	if six {
		copy(a.like.Outer[a.like.Start()-2:], []byte{0x86, 0xdd})
	}
	return a
}

func (a *isolatedNode) pods() []int { return []int{pod0, pod1, pod2}[:a.hostile+1] }

// dropSpoofed makes the node drop what the hostile pod sends with the addresses of a connection, as Calico does.
func (a *isolatedNode) dropSpoofed() {
	a.Helper()
	family, source := nftables.TableFamilyIPv4, &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
	if a.six {
		family, source.Offset, source.Len = nftables.TableFamilyIPv6, 8, 16
	}
	if a.shape == spec.ShapeFlannel { // elsewhere the packet comes from the bridge
		family = nftables.TableFamilyBridge
	}
	a.rules("n0", func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: family, Name: "spoofed"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
		for _, pod := range []int{pod0, pod1} {
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
				&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte(a.link(0, a.hostile)), 0)},
				source,
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.pod(0, pod).AsSlice()},
				&expr.Verdict{Kind: expr.VerdictDrop},
			}})
		}
	})
}

// gateway returns the MAC address to which a pod sends: that of the bridge of its link, or of the
// link.
func (a *isolatedNode) gateway(index int) (mac net.HardwareAddr) {
	a.Helper()
	a.in("n0", func() error {
		l, err := netlink.LinkByIndex(index)
		if err == nil && l.Attrs().MasterIndex != 0 {
			l, err = netlink.LinkByIndex(l.Attrs().MasterIndex)
		}
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	return mac
}

// settle gives the node permanent neighbours and turns off everything that timers trigger, because no two nodes would do that
// at the same packet.
func (a *isolatedNode) settle(index []int, nic net.HardwareAddr) error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	know := func(device int, ip net.IP, mac net.HardwareAddr) error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: device, State: netlink.NUD_PERMANENT, IP: ip, HardwareAddr: mac})
	}
	errs := []error{
		know(eth0.Attrs().Index, net.IPv4(198, 18, 0, 2), nic),
		know(eth0.Attrs().Index, net.IPv4(198, 18, 0, 254), nic), // the gateway of the default route
	}
	if a.six {
		errs = append(errs, know(eth0.Attrs().Index, net.ParseIP("fd73:6c69:7000::fe"), nic),
			know(eth0.Attrs().Index, net.ParseIP("fd73:6c69:7000::2"), nic))
	}
	asks := []string{"eth0"}
	for i, index := range index {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return err
		}
		errs = append(errs, netlink.LinkSetMTU(l, 16000))
		asks = append(asks, l.Attrs().Name)
		device := index
		if master := l.Attrs().MasterIndex; master != 0 {
			device = master
			// The kernel announces each address that a bridge learns, which takes effect some
			// packets later.
			errs = append(errs, netlink.LinkSetLearning(l, false), netlink.NeighSet(&netlink.Neigh{LinkIndex: index, Family: unix.AF_BRIDGE,
				Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: a.links[i]}))
			bridge, err := netlink.LinkByIndex(master)
			if err != nil {
				return err
			}
			asks = append(asks, bridge.Attrs().Name)
		}
		errs = append(errs, know(device, pod(0, i).AsSlice(), a.links[i]))
		if a.six {
			errs = append(errs, know(device, pod6(0, i).AsSlice(), a.links[i]))
		}
	}
	set := func(key, value string) {
		errs = append(errs, os.WriteFile("/proc/sys/net/"+key, []byte(value), 0))
	}
	for _, device := range asks {
		set("ipv4/neigh/"+device+"/mcast_solicit", "0") // no other host would answer
		set("ipv6/neigh/"+device+"/mcast_solicit", "0")
		set("ipv4/conf/"+device+"/send_redirects", "0")
	}
	set("ipv4/conf/all/send_redirects", "0")
	set("ipv4/icmp_ratemask", "0")
	set("ipv4/ipfrag_time", "3600")
	set("ipv4/ipfrag_high_thresh", fmt.Sprint(1<<30))
	if a.six {
		set("ipv6/icmp/ratelimit", "0")
		set("ipv6/icmp/ratemask", "0") // the rate limit applies to type 0 only, which does not exist
		set("ipv6/ip6frag_time", "3600")
		set("ipv6/ip6frag_high_thresh", fmt.Sprint(1<<30))
		set("netfilter/nf_conntrack_frag6_timeout", "3600")
		set("netfilter/nf_conntrack_frag6_high_thresh", fmt.Sprint(1<<30))
	} else {
		set("ipv6/conf/all/disable_ipv6", "1")
	}
	// The same as the fast path sets for its connections.
	set("netfilter/nf_conntrack_tcp_be_liberal", "1")
	set("netfilter/nf_conntrack_tcp_ignore_invalid_rst", "1")
	return errors.Join(errs...)
}

// disableMasquerade stops the node from masquerading what it forwards: it would choose a random
// port.
func (a *isolatedNode) disableMasquerade() {
	a.Helper()
	a.rules("n0", func(conn *nftables.Conn) {
		for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
			conn.FlushChain(&nftables.Chain{Table: &nftables.Table{Family: family, Name: "slipstream"}, Name: "postrouting"})
		}
	})
}

// inject sends a packet into an end. It reports whether the device accepted it.
func (a *isolatedNode) inject(s injected) bool {
	a.Helper()
	b := binary.LittleEndian.AppendUint16([]byte{s.Flags, s.GSO}, s.Headers)
	for _, v := range []uint16{s.Segment, s.SumStart, s.SumAt} {
		b = binary.LittleEndian.AppendUint16(b, v)
	}
	_, err := unix.Write(a.sockets[s.end], append(b, s.frame...))
	if err != nil && !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOMEM) {
		a.Fatalf("send at end %d: %v: %x", s.end, err, s.frame)
	}
	return err == nil
}

// collect calls see for each packet that left the node at an end. It injects marker packets and waits for them, to know that
// all earlier packets have passed.
func (a *isolatedNode) collect(see func(end int, frame []byte)) {
	a.Helper()
	c := a.four
	c.Pod = netip.AddrPortFrom(pod(0, 0), 9)
	c.Peer = netip.AddrPortFrom(c.Peer.Addr(), 9)
	c.Front = c.Peer
	for range 2 { // GRO may hold packets back
		a.mark++
		last := binary.BigEndian.AppendUint64([]byte("the last"), a.mark)
		out, in := c.Out(253), c.In(253) // a protocol for experiments (RFC 3692), which no connection has
		out.Payload, in.Payload = 0, 0
		outer, inner := append(out.Bytes(), last...), append(in.Bytes(), last...)
		for _, b := range [][]byte{outer, inner} {
			binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
			binary.BigEndian.PutUint16(b[38:], uint16(len(b)-34))
			b[24], b[25] = 0, 0
			binary.BigEndian.PutUint16(b[24:], ^grammar.Sum(0, b[14:34]))
		}
		a.inject(injected{end: pod0, frame: outer})
		a.inject(injected{end: atNIC, frame: c.Wrap(inner)})
		for _, end := range append([]int{atNIC}, a.pods()...) {
			for {
				flags := 0
				if end == pod1 || end == pod2 { // no marker packet goes there
					flags = unix.MSG_DONTWAIT
				}
				n, _, err := unix.Recvfrom(a.sockets[end], a.buf, flags)
				if flags != 0 && errors.Is(err, unix.EAGAIN) {
					break
				}
				if err != nil {
					a.Fatalf("end %d: %v", end, err)
				}
				b := a.buf[:n]
				if bytes.HasSuffix(b, last) {
					break
				}
				if !bytes.Contains(b, last[:8]) && !bytes.Equal(b[10:16], groups) && !isUnsolicited(b[10:]) {
					see(end, b)
				}
			}
		}
	}
}

// isUnsolicited reports whether a node may send a frame like this by itself at any time: IPv6
// multicast, or an ICMPv6 redirect (once a second).
func isUnsolicited(frame []byte) bool {
	return frame[0] == 0x33 && frame[1] == 0x33 ||
		len(frame) > 54 && frame[12] == 0x86 && frame[14]>>4 == 6 && frame[20] == unix.IPPROTO_ICMPV6 && frame[54] == 137
}

// normalise returns a captured frame without the fields that may differ: identifications of the
// kernel's own packets, ICMP timestamps, the outer checksum of GSO packets, and the split into
// fragments of memory. Open connections have ports from port on. toPeer tells
// whether the frame left for a peer or the NIC, and start is the offset of the pod's packet in it.
func normalise(toPeer bool, b []byte, port uint16, start int) string {
	b[2], b[3] = 0, 0
	header := func(at int) {
		if len(b) < at+20 || b[at]>>4 != 4 {
			return
		}
		// ICMP errors quote the options of the packet that they answer.
		if size := int(b[at]&0xf) * 4; size < 20 || len(b) < at+size || grammar.Sum(0, b[at:at+size]) != 0xffff {
			return
		}
		for _, i := range []int{4, 5, 10, 11} {
			b[at+i] = 0
		}
	}
	icmp := func(at int) {
		header(at)
		const timestampReply = 14
		if l4 := at + int(b[at]&0xf)*4; b[at]>>4 == 4 && len(b) >= l4+20 && b[l4] == timestampReply {
			clear(b[l4+2 : l4+4])   // the checksum
			clear(b[l4+12 : l4+20]) // receive and transmit timestamps
		}
	}
	const outer = 10 + 14
	inner := 10 + start
	if toPeer && len(b) >= inner+20 && (inner == outer || b[outer-2] == 0x08 && b[outer+9] == udp) {
		header(outer)
		if b[1] != 0 && inner > outer {
			b[outer+26], b[outer+27] = 0, 0
		}
		if b[inner+9] == unix.IPPROTO_ICMP {
			icmp(inner)
		}
		// Two packets that belong to no open connection may have the same tuple on the wire by
		// chance. The kernel then gives one of them a random port.
		own, from, ends := pod(0, 0).AsSlice(), inner+12, inner+20
		if b[inner]>>4 == 6 {
			own, from, ends = pod6(0, 0).AsSlice(), inner+8, inner+40
		}
		if len(b) > ends+20 && (!bytes.Equal(b[from:from+len(own)], own) || binary.BigEndian.Uint16(b[ends:])-port >= connections) {
			fields := []int{ends, ends + 6, ends + 16}
			if inner > outer {
				fields = append(fields, outer+20, outer+26)
			}
			for _, i := range fields {
				b[i], b[i+1] = 0, 0
			}
		}
	} else if len(b) > outer+20 && b[outer+9] == unix.IPPROTO_ICMP {
		icmp(outer)
	}
	return string(b)
}

// inside parses the IP packet at offset at. It returns the offset of TCP or UDP, the protocol, and the sum of the pseudo
// header.
func inside(b []byte, at int) (l4 int, protocol byte, pseudo uint32, ok bool) {
	switch {
	case len(b) >= at+20+18 && b[at] == 0x45:
		l4, protocol, pseudo = at+20, b[at+9], uint32(grammar.Sum(0, b[at+12:at+20]))
	case len(b) >= at+40+18 && b[at]>>4 == 6:
		l4, protocol, pseudo = at+40, b[at+6], uint32(grammar.Sum(0, b[at+8:at+40]))
	}
	return l4, protocol, uint32(grammar.Sum(pseudo+uint32(protocol)+uint32(len(b)-l4), nil)), protocol == tcp || protocol == udp
}

// partialChecksum leaves a packet's checksum to the device, as a pod's stack does.
func partialChecksum(b []byte, at int) vnet {
	l4, protocol, _, ok := inside(b, at)
	if !ok {
		return vnet{}
	}
	v := vnet{Flags: needsSum, SumStart: uint16(l4), SumAt: 6}
	if protocol == tcp {
		v.SumAt = 16
	}
	return v
}

// setChecksums sets the TCP and UDP checksums of the packet at an offset.
func setChecksums(b []byte, at int) {
	l4, protocol, pseudo, ok := inside(b, at)
	if !ok {
		return
	}
	field := l4 + 6
	if protocol == tcp {
		field = l4 + 16
	}
	b[field], b[field+1] = 0, 0
	s := ^grammar.Sum(pseudo, b[l4:])
	if s == 0 {
		s = 0xffff
	}
	binary.BigEndian.PutUint16(b[field:], s)
}

// withoutRST clears the RST flag of the packet at an offset. Conntrack judges an RST by all packets
// of the connection that it has seen, and with the fast path it has seen fewer (see TestReset).
func withoutRST(b []byte, at int) []byte {
	flags := 0
	switch {
	case len(b) < at+20:
	case b[at]>>4 != 6 && b[at+9] == tcp:
		flags = at + int(b[at]&0xf)*4 + 13
	case b[at]>>4 == 6:
		next, l4 := b[at+6], at+40
		for len(b) > l4+8 && (next == 0 || next == 43 || next == 44 || next == 60) {
			size := 8
			if next != 44 {
				size += int(b[l4+1]) * 8
			}
			next, l4 = b[l4], l4+size
		}
		if next == tcp {
			flags = l4 + 13
		}
	}
	if flags > 0 && len(b) > flags {
		b[flags] &^= 0x04
	}
	return b
}

// segment makes the kernel segment a packet of TCP or UDP later (GSO), if it has a partial checksum.
func (s *injected) segment(g grammar.Grammar) {
	switch s.SumAt {
	case 16:
		s.GSO, s.Headers, s.Segment = gsoTCP, s.SumStart+20, []uint16{1410, 1411, 1398, 536, 100}[g.IntN(5)]
		if s.SumStart == 54 {
			s.GSO = gsoTCP6
		}
	case 6:
		s.GSO, s.Headers, s.Segment = gsoUDP, s.SumStart+8, []uint16{1422, 1423, 1410, 548, 112}[g.IntN(5)]
	}
	if s.SumStart == 54 {
		s.Segment -= 20
	}
}

func (a *isolatedNode) randomPacket(g grammar.Grammar) injected {
	if g.IntN(2) == 0 {
		s := injected{end: pod0, frame: withoutRST(g.Packet(true), 14)}
		if g.IntN(20) == 0 {
			s.end = a.hostile
		}
		switch g.IntN(10) {
		case 0:
		case 1:
			s.vnet = partialChecksum(s.frame, grammar.Head) // the inner checksum, as with a tunnel in the pod
		default:
			s.vnet = partialChecksum(s.frame, 14)
		}
		if g.Large && s.SumStart <= 54 && len(s.frame) > g.MTU+14 && g.IntN(8) > 0 {
			s.segment(g)
		}
		return s
	}
	start := g.Start()
	s := injected{end: a.far, frame: withoutRST(g.Wrapped(), start)}
	if a.local && g.IntN(20) == 0 {
		s.end = a.hostile
	}
	switch g.IntN(8) {
	case 0: // checksum not verified
	case 1:
		setChecksums(s.frame, start)
	case 2:
		setChecksums(s.frame, start)
		setChecksums(s.frame, 14)
	case 3:
		s.vnet = partialChecksum(s.frame, 14) // the outer checksum
	default:
		s.vnet = partialChecksum(s.frame, start)
	}
	return s
}

// open returns the packets that open a connection, from either end. far is the end of the peer.
func open(c grammar.Connection, far int, byPod bool) (all []injected) {
	step := func(out bool, protocol, flags byte) {
		p, s := c.Out(protocol), injected{end: pod0}
		if !out {
			p, s = c.In(protocol), injected{end: far}
		}
		p.Flags = flags
		b := p.Bytes()
		s.vnet = partialChecksum(b, 14)
		_, _, pseudo, _ := inside(b, 14)
		binary.BigEndian.PutUint16(b[s.SumStart+s.SumAt:], uint16(pseudo))
		if s.frame = b; !out {
			s.frame = c.Wrap(b)
			s.vnet = partialChecksum(s.frame, c.Start())
		}
		all = append(all, s)
	}
	step(byPod, tcp, 0x02)
	step(!byPod, tcp, 0x12)
	step(byPod, tcp, 0x10)
	step(byPod, udp, 0)
	step(!byPod, udp, 0)
	return all
}

// talk returns a packet each way of an open connection, of either protocol.
func talk(c grammar.Connection, far int) []injected {
	return append(open(c, far, false)[2:], open(c, far, true)[2:3]...)
}

// TestDifferential sends packets of all kinds from pods, and from the wire or another pod, to two nodes: one with
// the fast path and accelerated connections, and a reference without. A hostile pod sends some in the name of others, with their
// MAC and IP addresses; between pods of a node, a rule drops these. The packets that come out at
// the other ends must be the same, byte for byte except identifications. -packets 1000000 takes 80
// s.
func TestDifferential(t *testing.T) {
	testenv.NeedRoot(t)
	t.Cleanup(kernelLog(t))
	// Much of the time a network waits for its agent. Three at a time keep a CPU busy, and have at most three times inFlight packets in
	// its backlog, which has room for 1000 (net.core.netdev_max_backlog).
	turns := make(chan struct{}, 3)
	kinds := []struct {
		shape, offload string
		six, local     bool
	}{
		{shapes[0], offloads[0], false, false}, {shapes[1], offloads[1], false, false}, {shapes[0], offloads[1], true, false}, {shapes[1], offloads[0], true, false},
		{shapes[2], offloads[0], false, false}, {shapes[2], offloads[1], true, false},
		{shapes[0], offloads[0], false, true}, {shapes[1], offloads[0], false, true}, {shapes[0], offloads[0], true, true},
	}
	for _, kind := range kinds {
		t.Run(fmt.Sprintf("%s IPv6 %t local %t", kind.shape, kind.six, kind.local), func(t *testing.T) {
			t.Parallel()
			turns <- struct{}{}
			defer func() { <-turns }()
			var sides [2]*isolatedNode
			for i := range sides {
				sides[i] = newIsolatedNode(t, kind.shape, kind.offload, kind.six, kind.local)
				if !kind.six {
					sides[i].dnat(service, sides[i].like.Peer, tcp, udp)
				}
				if kind.local {
					sides[i].dropSpoofed()
				}
			}
			fast := sides[0]
			fast.startOn(0)
			testenv.PinThread(t) // or the last packet may overtake another
			seed := cmp.Or(*seed, uint64(time.Now().UnixNano()))
			t.Logf("seed %d", seed)
			g := grammar.Grammar{Rand: rand.New(rand.NewPCG(seed, 0)), Large: kind.offload == spec.OffloadFull}
			var known []grammar.Connection
			var made, shown, rejected, differ int
			var accelerated, large uint64
			sum := func() uint64 { c := fast.counts(0); return c["fast-out"] + c["fast-in"] }
			for n := 0; n < *packets/len(kinds); n += inFlight {
				if n%round == 0 {
					known = known[:0]
					for range connections {
						known = append(known, fast.other(made))
						made++
					}
					begin(t, sides, known)
				}
				packetsIn := make([]injected, inFlight)
				for i := range packetsIn {
					g.Connection = known[g.IntN(len(known))]
					packetsIn[i] = fast.randomPacket(g)
				}
				if kind.local {
					fast.paths[0].AttachAll() // also to the hostile pod
				}
				came := make(map[string]int)
				before, forged := sum(), fast.counts(0)["forged"]
				for i, a := range sides {
					each := 1 - 2*i
					for _, s := range packetsIn {
						if !a.inject(s) {
							rejected++
						}
					}
					a.collect(func(end int, frame []byte) {
						if frame[1] != 0 {
							large++
						}
						start := fast.four.Start()
						if end == fast.far {
							start = fast.like.Start()
						}
						came[fmt.Sprint(end)+normalise(end == fast.far || end == atNIC, frame, known[0].Pod.Port(), start)] += each
					})
				}
				accelerated += sum() - before
				shown += inFlight
				// The reference node may forward or answer what the fast path drops as forged.
				forged = fast.counts(0)["forged"] - forged
				for frame, n := range came {
					if n == 0 {
						continue
					}
					if n < 0 && uint64(-n) <= forged {
						forged -= uint64(-n)
						continue
					}
					differ++
					if differ <= 10 {
						t.Errorf("the node with the fast path sent this frame %+d times more to end %s: %x %x", n, frame[:1], frame[1:11], frame[11:min(len(frame), 200)])
					}
				}
				if differ > 0 {
					for _, s := range packetsIn {
						t.Logf("injected at end %d: %v %x", s.end, s.vnet, s.frame[:min(len(s.frame), 150)])
					}
					break
				}
			}
			t.Logf("%d packets, %d not accepted, %d on the fast path, %d GSO packets came out, %d differences; %v",
				shown, rejected/2, accelerated, large, differ, fast.counts(0))
			if accelerated < uint64(shown)/20 {
				t.Error("too few packets took the fast path")
			}
		})
	}
}

// other returns the nth connection, to the peer or through the Service. None of the last 200 rounds
// had it.
func (a *isolatedNode) other(n int) grammar.Connection {
	c := a.like
	c.Pod = netip.AddrPortFrom(a.pod(0, 0), uint16(20_000+n%(200*connections)))
	if n%2 == 0 && !a.six { // IPv6 connections to a Service are not accelerated
		c.Front, c.Gateway = service, a.four.Gateway
	} else { // it must be unique on the wire, or the kernel would choose a random port
		c.Peer = netip.AddrPortFrom(c.Peer.Addr(), 7000)
		c.Front = c.Peer
		if a.local && a.shape != spec.ShapeCalico {
			c.Gateway = a.links[1] // bridged
		}
	}
	return c
}

// begin removes all connections from both nodes, opens others, and waits until those of the first node are accelerated.
func begin(t *testing.T, sides [2]*isolatedNode, all []grammar.Connection) {
	t.Helper()
	nothing := func(int, []byte) {}
	for _, a := range sides {
		a.in("n0", func() error {
			// The kernel does not announce deleted conntrack entries, so flows would stay
			// valid for a second. It announces routes that are added and deleted.
			nowhere := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}, Type: unix.RTN_BLACKHOLE}
			return errors.Join(netlink.ConntrackTableFlush(netlink.ConntrackTable), netlink.RouteAdd(nowhere), netlink.RouteDel(nowhere))
		})
		for i, c := range all {
			for _, s := range open(c, a.far, c.Front == service || i%4 == 1) {
				a.inject(s)
			}
		}
		a.collect(nothing)
	}
	a := sides[0]
	var out, in uint64
	a.eventually("the connections are accelerated", func() {
		before := a.counts(0)
		for _, c := range all {
			for _, s := range talk(c, a.far) {
				a.inject(s)
			}
		}
		a.collect(nothing)
		now := a.counts(0)
		out, in = now["fast-out"]-before["fast-out"], now["fast-in"]-before["fast-in"]
	}, func() bool {
		return (a.local || min(out, in) >= uint64(2*len(all))*9/10) && out+in >= uint64(4*len(all))*9/10
	})
}

// kernelLog returns a function that fails the test if the kernel has logged a warning since.
func kernelLog(t *testing.T) func() {
	t.Helper()
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Seek(fd, 0, unix.SEEK_END)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return func() {
		t.Helper()
		buf := make([]byte, 1<<13)
		for {
			n, err := unix.Read(fd, buf)
			if errors.Is(err, unix.EAGAIN) {
				return
			}
			if errors.Is(err, unix.EPIPE) {
				t.Error("the kernel's log has lost messages")
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			// Documentation/ABI/testing/dev-kmsg
			var priority int
			about, text, _ := strings.Cut(string(buf[:n]), ";")
			if _, err := fmt.Sscanf(about, "%d,", &priority); err != nil {
				t.Fatal(err)
			}
			if priority&7 <= 4 && !strings.Contains(text, "callbacks suppressed") {
				t.Errorf("the kernel warns: %s", text)
			}
		}
	}
}
