//go:build linux

package programs

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// Return codes of the programs (include/uapi/linux/pkt_cls.h).
const (
	next     = -1
	drop     = 2
	redirect = 7
)

var (
	podMAC  = net.HardwareAddr{2, 0, 0, 0, 0, 7}
	vethMAC = net.HardwareAddr{2, 0, 0, 0, 0, 8}
)

// Addresses of the pod.
const pod4, pod6 = "10.1.0.2", "fd00:1::2"

// node makes this thread's network namespace a node with one pod, 10.1.0.2, and a NIC that leads to another node, 192.0.2.2 and
// 2001:db8::2, with pods in 10.2.0.0/24 and fd00:2::/64. There is no route to the node of 10.3.0.0/24.
func node(t *testing.T) *HostRouting {
	t.Helper()
	testenv.EnterNamespace(t)
	sysctl(t, "net/ipv4/ip_forward", "1")
	sysctl(t, "net/ipv6/conf/all/forwarding", "1")
	for _, d := range [][2]string{{"nic", "wire"}, {"veth", "pod"}, {"tunnel", "nowhere"}} {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: d[0], MTU: 1500, TxQLen: -1})
		veth.PeerName = d[1]
		if err := netlink.LinkAdd(veth); err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: d[1]}}); err != nil {
			t.Fatal(err)
		}
	}
	nic := configure(t, "nic", "192.0.2.1/24")
	veth := configure(t, "veth", "169.254.0.1/32")
	tunnel := configure(t, "tunnel", "169.254.0.2/32")
	for _, r := range [][2]string{{"10.2.0.0/24", "192.0.2.2"}, {"fd00:2::/64", "fe80::2"}} {
		_, to, err := net.ParseCIDR(r[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: nic, Dst: to, Gw: net.ParseIP(r[1])}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := LoadHostRouting(tunnel, 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	for _, a := range []string{pod4, pod6} {
		if err := p.AddPod(netip.MustParseAddr(a), veth, podMAC, vethMAC); err != nil {
			t.Fatal(err)
		}
	}
	for prefix, node := range map[string]string{
		"10.1.0.0/24": "0.0.0.0", "fd00:1::/64": "0.0.0.0", "10.2.0.0/24": "192.0.2.2", "fd00:2::/64": "192.0.2.2", "10.3.0.0/24": "192.0.2.3",
	} {
		if err := p.AddNode(netip.MustParsePrefix(prefix), netip.MustParseAddr(node)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func frame(from, to string, payload int) []byte {
	a, b := netip.MustParseAddr(from), netip.MustParseAddr(to)
	kind, header := uint16(unix.ETH_P_IP), make([]byte, 20)
	if a.Is6() {
		kind, header = unix.ETH_P_IPV6, make([]byte, 40)
		header[0], header[6], header[7] = 0x60, unix.IPPROTO_UDP, 64
		binary.BigEndian.PutUint16(header[4:], uint16(8+payload))
		copy(header[8:], a.AsSlice())
		copy(header[24:], b.AsSlice())
	} else {
		header[0], header[8], header[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(header[2:], uint16(28+payload))
		copy(header[12:], a.AsSlice())
		copy(header[16:], b.AsSlice())
		sum(header)
	}
	// The destination is the MAC address of the loopback device, which receives packets of a test run: packets to others are
	// PACKET_OTHERHOST.
	f := append(make([]byte, 12), byte(kind>>8), byte(kind))
	f = append(f, header...)
	return append(f, make([]byte, 8+payload)...)
}

// sum sets the checksum of an IPv4 header.
func sum(header []byte) {
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^grammar.Sum(0, header[:20]))
}

func TestPodPrograms(t *testing.T) {
	p := node(t)
	const remote4, remote6 = "10.2.0.9", "fd00:2::9"
	change := func(f []byte, change func([]byte)) []byte {
		change(f[14:])
		if f[12] == 8 {
			sum(f[14:])
		}
		return f
	}
	hops := func(f []byte, n byte) []byte {
		return change(f, func(ip []byte) {
			if f[12] == 8 {
				ip[8] = n
			} else {
				ip[7] = n
			}
		})
	}
	type verdicts struct{ routeOut, routeIn, tunnelOut, tunnelHost int32 }
	kernels := verdicts{next, next, next, drop}
	for name, c := range map[string]struct {
		frame []byte
		want  verdicts
	}{
		"to a pod of the node":          {frame(remote4, pod4, 10), verdicts{redirect, redirect, redirect, drop}},
		"to a pod of the node, IPv6":    {frame(remote6, pod6, 10), verdicts{redirect, redirect, redirect, drop}},
		"to another node's pod":         {frame(pod4, remote4, 10), verdicts{redirect, next, redirect, redirect}},
		"to another node's pod, IPv6":   {frame(pod6, remote6, 10), verdicts{redirect, next, redirect, redirect}},
		"as large as the MTU":           {frame(pod4, remote4, 1472), verdicts{redirect, next, redirect, redirect}},
		"as large as the MTU, IPv6":     {frame(pod6, remote6, 1452), verdicts{redirect, next, redirect, redirect}},
		"larger than the MTU":           {frame(pod4, remote4, 1473), verdicts{next, next, next, redirect}},
		"larger than the MTU, IPv6":     {frame(pod6, remote6, 1453), verdicts{next, next, next, redirect}},
		"to an unknown local pod":       {frame(remote4, "10.1.0.99", 10), kernels},
		"to an unknown local pod, IPv6": {frame(remote6, "fd00:1::99", 10), kernels},
		"to an external address":        {frame(pod4, "198.51.100.1", 10), kernels},
		"to an external address, IPv6":  {frame(pod6, "2001:db8::1", 10), kernels},
		"to the node":                   {frame(pod4, "192.0.2.1", 10), kernels},
		"to multicast":                  {frame(pod4, "224.0.0.1", 10), kernels},
		"to multicast, IPv6":            {frame(pod6, "ff02::1", 10), kernels},
		"without a route":               {frame(pod4, "10.3.0.1", 10), verdicts{next, next, redirect, redirect}},
		"TTL 1":                         {hops(frame(pod4, remote4, 10), 1), verdicts{next, next, next, redirect}},
		"hop limit 1":                   {hops(frame(pod6, remote6, 10), 1), verdicts{next, next, next, redirect}},
		"TTL 0":                         {hops(frame(remote4, pod4, 10), 0), kernels},
		"TTL 2":                         {hops(frame(pod4, remote4, 10), 2), verdicts{redirect, next, redirect, redirect}},
		"fragment": {change(frame(pod4, remote4, 10), func(ip []byte) { ip[6], ip[7] = 0x20, 10 }),
			verdicts{redirect, next, redirect, redirect}},
		"ICMP error": {change(frame(remote4, pod4, 40), func(ip []byte) { ip[9], ip[20] = unix.IPPROTO_ICMP, 3 }),
			verdicts{redirect, redirect, redirect, drop}},
		"IP options": {change(frame(pod4, remote4, 10), func(ip []byte) { ip[0] = 0x46 }),
			verdicts{next, next, next, redirect}},
		"header length too short": {change(frame(pod4, remote4, 10), func(ip []byte) { ip[0] = 0x44 }),
			verdicts{next, next, next, redirect}},
		"hop-by-hop options": {change(frame(pod6, remote6, 10), func(ip []byte) { ip[6] = 0 }),
			verdicts{next, next, next, redirect}},
		"total length too long": {change(frame(pod4, remote4, 10), func(ip []byte) { ip[2] = 0xff }),
			verdicts{next, next, next, redirect}},
		"payload length too long, IPv6": {change(frame(pod6, remote6, 10), func(ip []byte) { ip[4] = 0xff }),
			verdicts{next, next, next, redirect}},
		"from the loopback address":       {frame("127.0.0.1", pod4, 10), kernels},
		"from 0.0.0.0":                    {frame("0.0.0.0", pod4, 10), kernels},
		"from multicast":                  {frame("224.0.0.5", pod4, 10), kernels},
		"from broadcast":                  {frame("255.255.255.255", pod4, 10), kernels},
		"from link-local, IPv6":           {frame("fe80::1", pod6, 10), kernels},
		"from the loopback address, IPv6": {frame("::1", pod6, 10), kernels},
		"from multicast, IPv6":            {frame("ff02::1", pod6, 10), kernels},
		"an IPv4 address in IPv6":         {frame("::ffff:10.2.0.9", "::ffff:10.1.0.2", 10), kernels},
		"wrong IP version":                {change(frame(remote4, pod4, 10), func(ip []byte) { ip[0] = 0x65 }), kernels},
		"wrong IP version, IPv6": {change(frame(remote6, pod6, 10), func(ip []byte) { ip[0] = 0x40 }),
			kernels},
		// A test run needs at least an Ethernet header. A tunnel can deliver less, which the lab's tests cover.
		"IP header only": {frame(pod4, remote4, 0)[:14+20], verdicts{next, next, next, redirect}},
		"ARP":            {append(append(make([]byte, 12), 8, 6), make([]byte, 28)...), kernels},
		"VLAN":           {append(append(make([]byte, 12), 0x81, 0, 0, 1), frame(remote4, pod4, 10)[12:]...), kernels},
		"to another MAC": {append([]byte{2, 9, 9, 9, 9, 9}, frame(remote4, pod4, 10)[6:]...), verdicts{redirect, next, redirect, drop}},
	} {
		if name == "an IPv4 address in IPv6" {
			// Otherwise netip turns it into an IPv4 address.
			c.frame = frame(remote6, pod6, 10)
			mapped := func(a string) []byte { b := netip.MustParseAddr(a).As16(); return b[:] }
			copy(c.frame[14+8:], mapped(remote4))
			copy(c.frame[14+24:], mapped(pod4))
		}
		got := verdicts{
			routeOut: verdict(t, name, p.RouteOut, c.frame, true), routeIn: verdict(t, name, p.RouteIn, c.frame, true),
			tunnelOut: verdict(t, name, p.TunnelOut, c.frame, true), tunnelHost: verdict(t, name, p.TunnelHost, c.frame, false),
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(verdicts{})); diff != "" {
			t.Errorf("%s: verdicts (-want +got):\n%s", name, diff)
		}
		// A packet that is not from a tunnel has no tunnel key.
		verdict, err := p.TunnelIn.Run(&ebpf.RunOptions{Data: c.frame})
		if err != nil || int32(verdict) != drop {
			t.Errorf("%s: %s: verdict %d, %v, want %d", name, p.TunnelIn, int32(verdict), err, drop)
		}
	}
}

// verdict runs a program on a frame, and checks what the program changes: nothing or, if it routes and redirects the packet,
// the TTL with the checksum, and the MAC addresses to those of the pod.
func verdict(t *testing.T, name string, program *ebpf.Program, frame []byte, routes bool) int32 {
	t.Helper()
	out := make([]byte, len(frame))
	verdict, err := program.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
	if err != nil {
		t.Fatalf("%s: %s: %v", name, program, err)
	}
	want := bytes.Clone(frame)
	if int32(verdict) == redirect && routes {
		to := netip.AddrFrom16([16]byte(want[14+24 : 14+40]))
		if want[12] == 8 {
			want[14+8]--
			sum(want[14:])
			to = netip.AddrFrom4([4]byte(want[14+16 : 14+20]))
		} else {
			want[14+7]--
		}
		if to.String() == pod4 || to.String() == pod6 {
			copy(want, append(bytes.Clone(podMAC), vethMAC...))
		}
	}
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("%s: %s changes (-want +got):\n%s", name, program, diff)
	}
	return int32(verdict)
}

func sysctl(t *testing.T, key, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/"+key, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}
