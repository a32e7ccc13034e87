//go:build linux

package lab

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// TestNodesAndPods checks that in every shape, nodes reach all pods, and pods reach all nodes.
func TestNodesAndPods(t *testing.T) {
	for _, shape := range overlay.Shapes() {
		t.Run(shape, func(t *testing.T) {
			l := up(t, func(c *Config) { c.Shape, c.Pods = shape, 1 })
			for _, ends := range [][2]string{
				{"node0", "node0/pod0"}, {"node0/pod0", "node0"},
				{"node0", "node1/pod0"}, {"node0/pod0", "node1"},
			} {
				if shape == overlay.ShapeBridge && ends == [2]string{"node0", "node1/pod0"} {
					continue
				}
				for _, version := range []int{4, 6} {
					echo(t, connect(t, l, ends[0], ends[1], version, 1)[0])
				}
			}
		})
	}
}

// TestOnWire checks the encapsulation of packets on the wire in each shape.
func TestOnWire(t *testing.T) {
	for _, shape := range joined() {
		t.Run(shape, func(t *testing.T) {
			l := up(t, func(c *Config) { c.Shape = shape })
			for _, version := range []int{4, 6} {
				conn := connect(t, l, "node0/pod0", "node1/pod1", version, 1)[0] // and neighbours are known
				seen := capture(t, l, "switch", "node0")
				echo(t, conn)
				conn[0].Close()
				conn[1].Close()
				want := map[string]string{
					spec.ShapeFlannel:      "198.18.0.1 198.18.0.2 udp 8472",
					spec.ShapeCalico:       "198.18.0.1 198.18.0.2 udp 4789",
					overlay.ShapeRouted:    "10.244.0.2 10.244.1.3 tcp",
					overlay.ShapeEBPF:      "10.244.0.2 10.244.1.3 tcp",
					overlay.ShapeVXLANFlow: "198.18.0.1 198.18.0.2 udp 8472",
					overlay.ShapeUDP:       "198.18.0.1 198.18.0.2 udp 8285",
					overlay.ShapeWeave:     "198.18.0.1 198.18.0.2 udp 6783",
				}[shape]
				if version == 6 {
					switch shape {
					case spec.ShapeFlannel, spec.ShapeCalico:
						want = strings.NewReplacer("198.18.0.", "fd73:6c69:7000::").Replace(want)
					case overlay.ShapeRouted, overlay.ShapeEBPF:
						want = "fd73:6c69:7001::2 fd73:6c69:7001:1::3 tcp"
					}
				}
				var others []string
				n := 0
				for _, packet := range seen() {
					switch what := describe(packet); {
					case what == want:
						n++
					case what != "" && !strings.Contains(what, " icmp"):
						others = append(others, what)
					}
				}
				if n == 0 || len(others) > 0 {
					t.Errorf("IPv%d: %d packets from node0 are %s; others are %v", version, n, want, others)
				}
			}
		})
	}
}

// describe returns the outermost addresses and the protocol of a frame, or "" if it is not IP.
func describe(frame []byte) string {
	var from, to netip.Addr
	var protocol byte
	var next []byte
	switch {
	case len(frame) >= 34 && frame[12] == 8 && frame[13] == 0:
		from, to = netip.AddrFrom4([4]byte(frame[26:30])), netip.AddrFrom4([4]byte(frame[30:34]))
		protocol, next = frame[23], frame[34:]
	case len(frame) >= 54 && frame[12] == 0x86 && frame[13] == 0xdd:
		from, to = netip.AddrFrom16([16]byte(frame[22:38])), netip.AddrFrom16([16]byte(frame[38:54]))
		protocol, next = frame[20], frame[54:]
	default:
		return ""
	}
	switch {
	case protocol == unix.IPPROTO_UDP && len(next) >= 8:
		return fmt.Sprintf("%s %s udp %d", from, to, binary.BigEndian.Uint16(next[2:]))
	case protocol == unix.IPPROTO_TCP:
		return fmt.Sprintf("%s %s tcp", from, to)
	}
	return fmt.Sprintf("%s %s icmp or other", from, to) // neighbour discovery, groups
}

// capture captures what a device receives, until the returned function is called.
func capture(t *testing.T, l *Lab, place, device string) func() [][]byte {
	t.Helper()
	all := uint16(unix.ETH_P_ALL)<<8 | unix.ETH_P_ALL>>8
	fd := -1
	in(t, l, place, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index})
	})
	return func() (frames [][]byte) {
		defer unix.Close(fd)
		for {
			frame := make([]byte, 128)
			n, from, err := unix.Recvfrom(fd, frame, 0)
			if err != nil {
				return frames
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING {
				frames = append(frames, frame[:n])
			}
		}
	}
}

// TestWay checks that packets use only the devices of their shape. If eBPF carries them, the kernel forwards none, and packets
// to a pod bypass the node's end of its veth pair.
func TestWay(t *testing.T) {
	accounting, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		testenv.NeedRoot(t)
		t.Fatal(err)
	}
	defer accounting.Close()
	type way struct {
		// The kernel of either node forwards them.
		Forwarded bool
		// The device of the shape carries them.
		Overlay bool
		// The node's end of the receiving pod's veth pair carries them.
		HostVeth bool
		// The programs that see them, on the sender's and the receiver's node.
		Out, In string
	}
	for shape, want := range map[string]way{
		overlay.ShapeRouted:    {Forwarded: true, HostVeth: true},
		overlay.ShapeUDP:       {Forwarded: true, Overlay: true, HostVeth: true},
		overlay.ShapeWeave:     {Overlay: true, HostVeth: true},
		overlay.ShapeVXLANFlow: {Overlay: true, Out: "tunnel_out", In: "tunnel_in"},
		overlay.ShapeEBPF:      {Out: "route_out", In: "route_in"},
	} {
		for _, version := range []int{4, 6} {
			t.Run(fmt.Sprintf("%s IPv%d", shape, version), func(t *testing.T) {
				l := up(t, func(c *Config) { c.Shape, c.Pods = shape, 1 })
				overlay := map[string]string{overlay.ShapeUDP: "flannel0", overlay.ShapeWeave: "vethwe-bridge", overlay.ShapeVXLANFlow: "cilium_vxlan"}[shape]
				server := layout(l.state.Config)[1].Pods[0].Veth
				client := layout(l.state.Config)[0].Pods[0].Veth
				nicIn := network.NIC
				if overlay != "" {
					nicIn = overlay
				}
				send := datagrams(t, l, "node0/pod0", "node1/pod0", version)
				if err := send(100); err != nil {
					t.Fatal(err)
				}
				const n = 200
				read := func() []uint64 {
					var carried uint64
					if overlay != "" {
						carried = counters(t, l, "node0", overlay).TxPackets
					}
					return []uint64{
						forwarded(t, l, "node0", version), forwarded(t, l, "node1", version),
						carried, counters(t, l, "node1", server).TxPackets,
						runs(t, l, "node0", client, want.Out), runs(t, l, "node1", nicIn, want.In),
					}
				}
				before := read()
				for range n {
					if err := send(100); err != nil {
						t.Fatal(err)
					}
				}
				after := read()
				for i, c := range []struct {
					what string
					want bool
				}{
					{"forwarded by the sender's kernel", want.Forwarded}, {"forwarded by the receiver's kernel", want.Forwarded},
					{"on the overlay's device", want.Overlay},
					{"on the node's end of the receiving pod's link", want.HostVeth},
					{"seen by " + want.Out, want.Out != ""}, {"seen by " + want.In, want.In != ""},
				} {
					// A few other packets resolve neighbours.
					if got := after[i] - before[i]; c.want && got < n || !c.want && got > n/10 {
						t.Errorf("%d of %d packets are %s, want it to be %t", got, n, c.what, c.want)
					}
				}
			})
		}
	}
}

// forwarded returns how many packets a node's kernel has forwarded.
func forwarded(t *testing.T, l *Lab, place string, version int) (n uint64) {
	t.Helper()
	in(t, l, place, func() error {
		if version == 6 {
			text, err := os.ReadFile("/proc/thread-self/net/snmp6")
			for line := range strings.Lines(string(text)) {
				if f := strings.Fields(line); f[0] == "Ip6OutForwDatagrams" {
					n, _ = strconv.ParseUint(f[1], 10, 64)
				}
			}
			return err
		}
		text, err := os.ReadFile("/proc/thread-self/net/snmp")
		var header []string
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if i := slices.Index(header, "ForwDatagrams"); f[0] == "Ip:" && i > 0 {
				n, _ = strconv.ParseUint(f[i], 10, 64)
			}
			header = f
		}
		return err
	})
	return n
}

// runs returns how often a program has run at the ingress of a device.
func runs(t *testing.T, l *Lab, place, device, name string) (n uint64) {
	t.Helper()
	in(t, l, place, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		filters, err := netlink.FilterList(link, netlink.HANDLE_MIN_INGRESS)
		if err != nil {
			return err
		}
		for _, f := range filters {
			f, ok := f.(*netlink.BpfFilter)
			if !ok || f.Name != name {
				continue
			}
			p, err := ebpf.NewProgramFromID(ebpf.ProgramID(f.Id))
			if err != nil {
				return err
			}
			defer p.Close()
			stats, err := p.Stats()
			if err != nil {
				return err
			}
			n += stats.RunCount
		}
		return nil
	})
	return n
}

// TestFragmentsAndErrors checks that a datagram in many fragments arrives, and that the sender gets an error if nobody listens.
func TestFragmentsAndErrors(t *testing.T) {
	for _, shape := range joined() {
		for _, offload := range offloads {
			t.Run(shape+" "+offload, func(t *testing.T) {
				l := up(t, func(c *Config) { c.Shape, c.Pods, c.NIC.Offload = shape, 1, offload })
				for _, version := range []int{4, 6} {
					from, server := udpEnds(t, l, version)
					message := make([]byte, 20_000)
					for i := range message {
						message[i] = byte(i * 7 >> 3)
					}
					if _, err := from.Write(message); err != nil {
						t.Fatal(err)
					}
					got := make([]byte, 1<<16)
					if n, err := server.Read(got); err != nil || !bytes.Equal(got[:n], message) {
						t.Errorf("IPv%d: %d bytes of %d arrive, %v", version, n, len(message), err)
					}
					server.Close()
					if _, err := from.Write(message[:10]); err != nil {
						t.Fatal(err)
					}
					if _, err := from.Read(got); !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("IPv%d: nobody listens: %v, want %v", version, err, unix.ECONNREFUSED)
					}
				}
			})
		}
	}
}

// udpEnds returns a socket in node0/pod0, and the socket in node1/pod0 to which it sends.
func udpEnds(t *testing.T, l *Lab, version int) (client, server *net.UDPConn) {
	t.Helper()
	in(t, l, "node1/pod0", func() (err error) {
		server, err = net.ListenUDP("udp", &net.UDPAddr{IP: placeOf(t, l, "node1/pod0").IP(version).AsSlice()})
		return err
	})
	in(t, l, "node0/pod0", func() (err error) {
		client, err = net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
		return err
	})
	t.Cleanup(func() { client.Close(); server.Close() })
	deadline := time.Now().Add(10 * time.Second)
	if err := errors.Join(client.SetDeadline(deadline), server.SetDeadline(deadline)); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// TestHops checks that packets have the same number of hops whether eBPF or the kernel forwards them, and that the node that
// drops a packet with too small a TTL tells the sender.
func TestHops(t *testing.T) {
	for _, shape := range append(byEBPF, overlay.ShapeRouted) {
		t.Run(shape, func(t *testing.T) {
			l := up(t, func(c *Config) { c.Shape, c.Pods = shape, 1 })
			for _, version := range []int{4, 6} {
				for hops := 1; hops <= 3; hops++ {
					client, server := udpEnds(t, l, version)
					set := map[int][2]int{unix.IP_TTL: {unix.IPPROTO_IP, hops}, unix.IP_RECVERR: {unix.IPPROTO_IP, 1}}
					if version == 6 {
						set = map[int][2]int{unix.IPV6_UNICAST_HOPS: {unix.IPPROTO_IPV6, hops}, unix.IPV6_RECVERR: {unix.IPPROTO_IPV6, 1}}
					}
					setOptions(t, client, set)
					if _, err := client.Write([]byte("x")); err != nil {
						t.Fatal(err)
					}
					if hops < 3 {
						if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.EHOSTUNREACH) {
							t.Errorf("IPv%d, %d hops: %v, want %v", version, hops, err, unix.EHOSTUNREACH)
						}
						continue
					}
					if _, err := server.Read(make([]byte, 1)); err != nil {
						t.Errorf("IPv%d, %d hops: %v", version, hops, err)
					}
				}
			}
		})
	}
}

// TestTooBig checks that eBPF does not carry packets that are larger than the MTU of the route, and that the pod is told the
// MTU.
func TestTooBig(t *testing.T) {
	for _, shape := range byEBPF {
		t.Run(shape, func(t *testing.T) {
			l := up(t, func(c *Config) { c.Shape = shape })
			largest := 1450
			if shape == overlay.ShapeEBPF {
				// The route has a smaller MTU than the pods know.
				largest = 1400
				in(t, l, "node0", func() error {
					return netlink.LinkSetMTU(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: network.NIC}}, largest)
				})
			}
			// The pod does not know the route's MTU yet.
			in(t, l, "node0/pod0", func() error {
				for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
					all, err := netlink.RouteList(nil, family)
					if err != nil {
						return err
					}
					for _, r := range all {
						if r.Gw == nil {
							continue
						}
						r.MTU = 0
						if err := netlink.RouteReplace(&r); err != nil {
							return err
						}
					}
				}
				return nil
			})
			for version, headers := range map[int]int{4: 28, 6: 48} {
				client, server := udpEnds(t, l, version)
				dontFragment(t, client, version)
				fits := largest - headers
				if _, err := client.Write(make([]byte, fits+1)); err != nil {
					t.Fatalf("IPv%d: packet of %d: %v: it is not sent at all", version, largest+1, err)
				}
				if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("IPv%d: packet of %d: the sender is told %v, want %v", version, largest+1, err, unix.EMSGSIZE)
				}
				if _, err := client.Write(make([]byte, fits)); err != nil {
					t.Errorf("IPv%d: packet of %d: %v", version, largest, err)
				}
				if n, err := server.Read(make([]byte, 1<<16)); n != fits {
					t.Errorf("IPv%d: %d bytes arrive, %v, want %d", version, n, err, fits)
				}
				// The same for a GSO packet with segments of that size. The pod does not know the MTU to this address yet.
				conn := connect(t, l, "node0/pod0", "node1/pod1", version, 1)[0]
				echo(t, conn)
				control(t, conn[0], func(fd int) error {
					info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
					// Without the headers of IP and TCP with timestamps.
					if most := largest - headers - 24; err == nil && int(info.Snd_mss) > most {
						t.Errorf("IPv%d: TCP sends segments of %d bytes, want %d at most", version, info.Snd_mss, most)
					}
					return err
				})
			}
		})
	}
}

// TestTunnelKey checks that a packet from the tunnel is accepted only with the right key, and only from the node of the pod
// with its source address.
func TestTunnelKey(t *testing.T) {
	const vni = 2 // of the tunnels
	l := up(t, func(c *Config) { c.Shape, c.Nodes, c.Pods = overlay.ShapeVXLANFlow, 3, 1 })
	to := placeOf(t, l, "node0/pod0")
	var server *net.UDPConn
	in(t, l, to.Name, func() (err error) {
		server, err = net.ListenUDP("udp", &net.UDPAddr{IP: to.IPv4.AsSlice()})
		return err
	})
	defer server.Close()
	port := server.LocalAddr().(*net.UDPAddr).Port
	var outer *net.UDPConn
	in(t, l, "node2", func() (err error) {
		outer, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: placeOf(t, l, "node0").IPv4.AsSlice(), Port: 8472})
		return err
	})
	defer outer.Close()
	send := func(vni int, from netip.Addr, change func([]byte) []byte, message string) {
		inner := append(make([]byte, 14), udpPacket(from, to.IPv4, port, message)...)
		copy(inner, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0})
		inner = change(inner)
		vxlan := append([]byte{8, 0, 0, 0, byte(vni >> 16), byte(vni >> 8), byte(vni), 0}, inner...)
		if _, err := outer.Write(vxlan); err != nil {
			t.Fatal(err)
		}
	}
	same := func(b []byte) []byte { return b }
	own, others := placeOf(t, l, "node2/pod0").IPv4, placeOf(t, l, "node1/pod0").IPv4
	send(vni+1, own, same, "another key")
	send(vni, others, same, "another node's pod")
	send(vni, to.IPv4, same, "the receiver itself")
	send(vni, own, func(b []byte) []byte { return b[:20] }, "truncated")
	send(vni, own, func(b []byte) []byte { b[14] = 0x65; return b }, "of another version")
	send(vni, own, func(b []byte) []byte { b[12], b[13] = 8, 6; return b }, "of ARP")
	send(vni, own, func(b []byte) []byte { b[14+3] = 255; return b }, "longer than it is")
	send(vni, own, same, "good")
	if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	for {
		n, from, err := server.ReadFromUDPAddrPort(got)
		if err != nil {
			t.Fatal(err)
		}
		if string(got[:n]) == "good" && from.Addr() == own {
			break
		}
		t.Errorf("%q from %s arrives", got[:n], from)
	}
}

// udpPacket returns an IPv4 packet without a UDP checksum.
func udpPacket(from, to netip.Addr, port int, message string) []byte {
	p := make([]byte, 28, 28+len(message))
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(28+len(message)))
	copy(p[12:], from.AsSlice())
	copy(p[16:], to.AsSlice())
	binary.BigEndian.PutUint16(p[10:], ^grammar.Sum(0, p[:20]))
	binary.BigEndian.PutUint16(p[20:], 9999)
	binary.BigEndian.PutUint16(p[22:], uint16(port))
	binary.BigEndian.PutUint16(p[24:], uint16(8+len(message)))
	return append(p, message...)
}
