//go:build linux

package lab

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

var offloads = []string{spec.OffloadFull, spec.OffloadNone}

// byEBPF are the shapes in which eBPF carries pods' packets past netfilter.
var byEBPF = []string{overlay.ShapeVXLANFlow, overlay.ShapeEBPF}

// joined returns the shapes in which pods of different nodes reach each other.
func joined() []string {
	return slices.DeleteFunc(overlay.Shapes(), func(s string) bool { return s == overlay.ShapeBridge })
}

// TestPaths checks that every path carries TCP with its original addresses, and that connections are tracked unless eBPF
// carries packets past conntrack.
func TestPaths(t *testing.T) {
	for _, shape := range overlay.Shapes() {
		for _, offload := range offloads {
			t.Run(shape+" "+offload, func(t *testing.T) {
				l := up(t, func(c *Config) { c.Nodes, c.Shape, c.NIC.Offload = 3, shape, offload })
				for _, ends := range [][2]string{
					{"node0", "node1"}, {"node2", "node0"},
					{"node0/pod0", "node1/pod1"}, {"node2/pod1", "node1/pod1"},
					{"node0/pod0", "node0/pod1"}, // on one node
				} {
					from, to := placeOf(t, l, ends[0]), placeOf(t, l, ends[1])
					for _, version := range []int{4, 6} {
						if shape == overlay.ShapeBridge && from.Kind == place.Pod && from.Node != to.Node {
							unreachable(t, l, from, to, version)
						} else {
							reachable(t, l, from, to, version)
						}
					}
				}
			})
		}
	}
}

// reachable checks that a connection carries data and comes from its client's address, and that conntrack tracks it if its
// packets pass netfilter.
func reachable(t *testing.T, l *Lab, from, to place.Place, version int) {
	t.Helper()
	tracked := from.Kind == place.Node || !slices.Contains(byEBPF, l.state.Config.Shape)
	conn := connect(t, l, from.Name, to.Name, version, 1)[0]
	echo(t, conn)
	remote := conn[1].RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	if want := from.IP(version); remote != want {
		t.Errorf("%s to %s: comes from %s, want %s", from.Name, to.Name, remote, want)
	}
	port := conn[1].LocalAddr().(*net.TCPAddr).Port
	for _, node := range []string{from.Node, to.Node} {
		if got := tracks(t, l, node, to.IP(version), port); got != tracked {
			t.Errorf("%s to %s, IPv%d: tracked on %s: %t, want %t", from.Name, to.Name, version, node, got, tracked)
		}
	}
}

// unreachable checks that a client immediately gets the error that there is no route.
func unreachable(t *testing.T, l *Lab, from, to place.Place, version int) {
	t.Helper()
	in(t, l, from.Name, func() error {
		_, err := net.Dial("tcp", netip.AddrPortFrom(to.IP(version), 1).String())
		if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("%s to %s: %v, want unreachable", from.Name, to.Name, err)
		}
		return nil
	})
	in(t, l, from.Node, func() error {
		if routes, err := netlink.RouteGet(to.IP(version).AsSlice()); err == nil {
			t.Errorf("%s has a way to %s: %v", from.Node, to.Name, routes)
		}
		return nil
	})
}

// echo sends a message of several packets, and back.
func echo(t *testing.T, ends [2]*net.TCPConn) {
	t.Helper()
	for _, c := range ends {
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	go func() { _, _ = io.CopyN(ends[1], ends[1], 64<<10) }()
	if _, err := ends[0].Write(make([]byte, 64<<10)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(ends[0], make([]byte, 64<<10)); err != nil {
		t.Fatal(err)
	}
}

// tracks reports whether a node tracks a connection to an address.
func tracks(t *testing.T, l *Lab, node string, to netip.Addr, port int) (found bool) {
	t.Helper()
	in(t, l, node, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer h.Close()
		family := netlink.InetFamily(unix.AF_INET)
		if to.Is6() {
			family = unix.AF_INET6
		}
		flows, err := h.ConntrackTableList(netlink.ConntrackTable, family)
		for _, f := range flows {
			found = found || f.Forward.DstIP.Equal(to.AsSlice()) && int(f.Forward.DstPort) == port
		}
		return err
	})
	return found
}

// TestMTU checks that a packet as large as the MTU passes unfragmented, and that one with a byte more is not sent.
func TestMTU(t *testing.T) {
	for _, shape := range joined() {
		for _, mtu := range []int{1500, 9000} {
			t.Run(fmt.Sprint(shape, mtu), func(t *testing.T) {
				l := up(t, func(c *Config) { c.Shape, c.NIC.MTU = shape, mtu })
				pods := map[string][2]int{
					spec.ShapeFlannel: {mtu - 50, mtu - 70}, spec.ShapeCalico: {mtu - 50, mtu - 70},
					overlay.ShapeRouted: {mtu, mtu}, overlay.ShapeEBPF: {mtu, mtu}, overlay.ShapeVXLANFlow: {mtu - 50, mtu - 50}, overlay.ShapeUDP: {mtu - 28, mtu - 28},
					overlay.ShapeWeave: {mtu - 62, mtu - 62},
				}[shape]
				for _, c := range []struct {
					from, to   string
					version    int
					mtu, lower int
				}{
					{"node0", "node1", 4, mtu, 20}, {"node0", "node1", 6, mtu, 40},
					{"node0/pod0", "node1/pod0", 4, pods[0], 20}, {"node0/pod0", "node1/pod0", 6, pods[1], 40},
				} {
					size := c.mtu - c.lower - 8 // without the headers of IP and UDP
					send := datagrams(t, l, c.from, c.to, c.version)
					if err := send(size); err != nil {
						t.Errorf("%s IPv%d: packet of %d: %v", c.from, c.version, c.mtu, err)
					}
					if err := send(size + 1); !errors.Is(err, unix.EMSGSIZE) {
						t.Errorf("%s IPv%d: packet of %d: %v, want %v", c.from, c.version, c.mtu+1, err, unix.EMSGSIZE)
					}
				}
				in(t, l, "node0", func() error {
					v4, err := os.ReadFile("/proc/thread-self/net/snmp")
					if err != nil {
						return err
					}
					v6, err := os.ReadFile("/proc/thread-self/net/snmp6")
					if err != nil {
						return err
					}
					if n := fragments(string(v4), string(v6)); n != 0 {
						t.Errorf("%d fragments on the wire", n)
					}
					return nil
				})
			})
		}
	}
}

// fragments returns how many fragments a namespace has made, given its snmp and snmp6.
func fragments(v4, v6 string) (n int) {
	var header []string
	for line := range strings.Lines(v4) {
		fields := strings.Fields(line)
		if fields[0] != "Ip:" {
			continue
		}
		for i := range header {
			if header[i] == "FragCreates" {
				n, _ = strconv.Atoi(fields[i])
			}
		}
		header = fields
	}
	for line := range strings.Lines(v6) {
		if fields := strings.Fields(line); fields[0] == "Ip6FragCreates" {
			more, _ := strconv.Atoi(fields[1])
			n += more
		}
	}
	return n
}

// datagrams returns a function that sends a datagram of a given size with DF, and waits until it arrives.
func datagrams(t *testing.T, l *Lab, from, to string, version int) func(size int) error {
	t.Helper()
	var server, client *net.UDPConn
	in(t, l, to, func() (err error) {
		server, err = net.ListenUDP("udp", &net.UDPAddr{IP: placeOf(t, l, to).IP(version).AsSlice()})
		return err
	})
	t.Cleanup(func() { server.Close() })
	in(t, l, from, func() (err error) {
		client, err = net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
		return err
	})
	t.Cleanup(func() { client.Close() })
	dontFragment(t, client, version)
	return func(size int) error {
		if _, err := client.Write(make([]byte, size)); err != nil {
			return err
		}
		if err := server.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		n, err := server.Read(make([]byte, 1<<16))
		if err == nil && n != size {
			err = fmt.Errorf("%d bytes arrived", n)
		}
		return err
	}
}

// dontFragment makes the socket return an error for packets that are too big.
func dontFragment(t *testing.T, c *net.UDPConn, version int) {
	t.Helper()
	set := map[int][2]int{unix.IP_MTU_DISCOVER: {unix.IPPROTO_IP, unix.IP_PMTUDISC_DO}, unix.IP_RECVERR: {unix.IPPROTO_IP, 1}}
	if version == 6 {
		set = map[int][2]int{unix.IPV6_MTU_DISCOVER: {unix.IPPROTO_IPV6, unix.IPV6_PMTUDISC_DO}, unix.IPV6_RECVERR: {unix.IPPROTO_IPV6, 1}}
	}
	setOptions(t, c, set)
}

// setOptions sets options of a socket: a level and a value each.
func setOptions(t *testing.T, c *net.UDPConn, options map[int][2]int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		for option, v := range options {
			failed = errors.Join(failed, unix.SetsockoptInt(int(fd), v[0], option, v[1]))
		}
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

func counters(t *testing.T, l *Lab, place, device string) (s netlink.LinkStatistics) {
	t.Helper()
	in(t, l, place, func() error {
		link, err := netlink.LinkByName(device)
		if err == nil {
			s = *link.Attrs().Statistics
		}
		return err
	})
	return s
}

// TestOffload checks that with full offload, packets that are larger than the MTU cross the wire, and that without, the sender
// segments and the receiver merges them, but not the switch.
func TestOffload(t *testing.T) {
	devices := map[string]string{spec.ShapeFlannel: "flannel.1", spec.ShapeCalico: "vxlan.calico", overlay.ShapeVXLANFlow: "cilium_vxlan"}
	for shape, overlay := range devices {
		for _, offload := range offloads {
			t.Run(shape+" "+offload, func(t *testing.T) {
				l := up(t, func(c *Config) { c.Shape, c.NIC.Offload = shape, offload })
				largest := watch(t, l, "switch", "node0")
				flood(t, l, "node0", "node1", 2, time.Second/4) // the switch could merge these, but not VXLAN packets
				before := [...]netlink.LinkStatistics{counters(t, l, "switch", "node0"), counters(t, l, "node1", "eth0")}
				flood(t, l, "node0/pod0", "node1/pod0", 2, time.Second/2)
				if n := largest(); n <= 1514 != (offload == spec.OffloadNone) {
					t.Errorf("the switch has packets of %d bytes", n)
				}
				size := func(bytes, packets uint64) int { return int(bytes / max(packets, 1)) }
				sent, in := counters(t, l, "node0", overlay), counters(t, l, "switch", "node0")
				out, got := counters(t, l, "node1", "eth0"), counters(t, l, "node1", overlay)
				sizes := []int{
					size(sent.TxBytes, sent.TxPackets), size(in.RxBytes-before[0].RxBytes, in.RxPackets-before[0].RxPackets),
					size(out.RxBytes-before[1].RxBytes, out.RxPackets-before[1].RxPackets), size(got.RxBytes, got.RxPackets),
				}
				t.Logf("bytes a packet: sent by the overlay %d, into the switch %d, out of it %d, received by the overlay %d",
					sizes[0], sizes[1], sizes[2], sizes[3])
				for i, s := range sizes {
					onWire := i == 1 || i == 2
					if cut := s <= 1514; cut != (onWire && offload == spec.OffloadNone) {
						t.Errorf("packets are %d bytes at step %d", s, i)
					}
				}
			})
		}
	}
}

// watch captures what a device receives, after GRO. The returned function stops that, and returns the size of the largest
// packet.
func watch(t *testing.T, l *Lab, place, device string) (largest func() int) {
	t.Helper()
	all := uint16(unix.ETH_P_ALL)<<8 | unix.ETH_P_ALL>>8
	fd := -1
	in(t, l, place, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 10_000}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}),
		)
	})
	var stop atomic.Bool
	found := make(chan int)
	go func() {
		most := 0
		for !stop.Load() {
			n, from, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_TRUNC)
			if ll, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && ll.Pkttype != unix.PACKET_OUTGOING {
				most = max(most, n)
			}
		}
		unix.Close(fd)
		found <- most
	}()
	return func() int {
		stop.Store(true)
		return <-found
	}
}

// TestNoDrops checks that the wire drops nothing of 16 streams.
func TestNoDrops(t *testing.T) {
	for _, offload := range offloads {
		for _, end := range []string{"", "/pod0"} {
			t.Run(offload+end, func(t *testing.T) {
				l := up(t, func(c *Config) { c.NIC.Offload = offload })
				type device struct{ place, name string }
				devices := []device{{"node0", "eth0"}, {"switch", "node0"}, {"switch", "node1"}, {"node1", "eth0"}}
				drops := func() (all []uint64) {
					for _, d := range devices {
						s := counters(t, l, d.place, d.name)
						all = append(all, s.RxDropped+s.TxDropped)
					}
					return all
				}
				before := drops()
				bytes, took, again := flood(t, l, "node0"+end, "node1"+end, 16, time.Second)
				t.Logf("%.2f Gbit/s, %d segments sent again", float64(bytes)*8e-9/took.Seconds(), again)
				diff := cmp.Diff(before, drops())
				queues, requeues := queues(t, l)
				if queues != 3 { // the NIC's, and both ports'
					t.Errorf("%d devices have a queue", queues)
				}
				if diff != "" && offload == spec.OffloadNone && requeues == 0 {
					t.Skip("the veth of this kernel drops what its ring does not hold (before Linux 6.16)")
				}
				if diff != "" {
					t.Errorf("drops at %v (-before +after):\n%s", devices, diff)
				}
			})
		}
	}
}

// queues returns the number of qdiscs of node0 and of the switch, and how often a full ring requeued packets.
func queues(t *testing.T, l *Lab) (n int, requeues uint32) {
	t.Helper()
	for _, p := range []string{"node0", "switch"} {
		in(t, l, p, func() error {
			links, err := netlink.LinkList()
			if err != nil {
				return err
			}
			for _, link := range links {
				qdiscs, err := netlink.QdiscList(link)
				if err != nil {
					return err
				}
				for _, q := range qdiscs {
					if q.Type() == "pfifo" && q.Attrs().Statistics != nil {
						n++
						requeues += q.Attrs().Statistics.Queue.Requeues
					}
				}
			}
			return nil
		})
	}
	return n, requeues
}

// TestRate checks that the wire carries its rate and never more. It has ten tries, because a busy machine may pause it.
func TestRate(t *testing.T) {
	const rate = 500e6
	for _, offload := range offloads {
		t.Run(offload, func(t *testing.T) {
			l := up(t, func(c *Config) { c.NIC.Offload, c.NIC.Rate = offload, "500Mbit" })
			for _, ends := range [][2]string{{"node0", "node1"}, {"node1", "node0"}} {
				var got float64
				for try := 0; try < 10 && got < 0.95*rate; try++ {
					bytes, took, _ := flood(t, l, ends[0], ends[1], 4, time.Second)
					// A frame of 1514 bytes has 1448 bytes of the stream.
					got = float64(bytes) * 8 / took.Seconds() * 1514 / 1448
					t.Logf("%s to %s: %.1f Mbit/s on the wire", ends[0], ends[1], got/1e6)
				}
				if got < 0.95*rate || got > 1.05*rate {
					t.Errorf("%s to %s: %.1f Mbit/s on the wire, want 500 ± 5%%", ends[0], ends[1], got/1e6)
				}
			}
		})
	}
}

// TestFlowHash checks that RPS of the receiver hashes the headers on the wire: connections between the same ports land on one
// CPU, and some between other ports on another CPU. With the sender's hash, which differs for each connection, the former would
// not.
func TestFlowHash(t *testing.T) {
	cores, err := availableCPUs("/sys")
	if err != nil {
		t.Fatal(err)
	}
	cpus := slices.Concat(cores...)
	if len(cpus) < 2 {
		t.Skip("needs two CPUs")
	}
	for _, offload := range offloads {
		t.Run(offload, func(t *testing.T) {
			l := up(t, func(c *Config) { c.NIC.Offload = offload })
			in(t, l, "node1", func() error {
				return setRPS(fmt.Sprintf("%x", 1<<cpus[0]|1<<cpus[1]))
			})
			const n = 24
			same, other := make(map[int]int), make(map[int]int)
			for i := range n {
				same[landing(t, l, 7000, 7001)]++
				other[landing(t, l, 7100+i, 7001)]++
			}
			t.Logf("connections a CPU: between the same ports %v, between others %v", same, other)
			if len(same) != 1 {
				t.Errorf("connections between the same ports land on several CPUs: %v", same)
			}
			if len(other) != 2 {
				t.Errorf("%d connections between different ports do not land on both CPUs: %v", n, other)
			}
		})
	}
}

// landing returns the CPU that receives the packets of a connection between two ports.
func landing(t *testing.T, l *Lab, from, to int) (cpu int) {
	t.Helper()
	var listener *net.TCPListener
	in(t, l, "node1", func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(placeOf(t, l, "node1").IPv4, uint16(to))))
		return err
	})
	defer listener.Close()
	var client *net.TCPConn
	in(t, l, "node0", func() (err error) {
		local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(placeOf(t, l, "node0").IPv4, uint16(from)))
		client, err = net.DialTCP("tcp", local, listener.Addr().(*net.TCPAddr))
		return err
	})
	defer client.Close()
	server, err := listener.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	// Reset the connection, so that its ports are free for the next one.
	if err := errors.Join(client.SetLinger(0), server.SetLinger(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	control(t, server, func(fd int) (err error) {
		cpu, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_INCOMING_CPU)
		return err
	})
	return cpu
}

// TestShapes checks that the names, addresses and settings of devices are those of the products.
func TestShapes(t *testing.T) {
	type device struct {
		Name, Kind     string
		MTU            int
		VNI, Port      int
		Learns, Master bool
	}
	for shape, want := range map[string][]device{
		spec.ShapeFlannel: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cni0", Kind: "bridge", MTU: 1450},
			{Name: "flannel.1", Kind: "vxlan", MTU: 1450, VNI: 1, Port: 8472},
			{Name: "flannel-v6.1", Kind: "vxlan", MTU: 1430, VNI: 1, Port: 8472},
			{Name: "veth20bd5ce7", Kind: "veth", MTU: 1450, Master: true},
		},
		spec.ShapeCalico: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "vxlan.calico", Kind: "vxlan", MTU: 1450, VNI: 4096, Port: 4789},
			{Name: "vxlan-v6.calico", Kind: "vxlan", MTU: 1430, VNI: 4096, Port: 4789},
			{Name: "cali20bd5ce70d7", Kind: "veth", MTU: 1450},
		},
		overlay.ShapeRouted: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cni0", Kind: "bridge", MTU: 1500},
			{Name: "veth20bd5ce7", Kind: "veth", MTU: 1500, Master: true},
		},
		overlay.ShapeBridge: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cni0", Kind: "bridge", MTU: 1500},
			{Name: "veth20bd5ce7", Kind: "veth", MTU: 1500, Master: true},
		},
		overlay.ShapeVXLANFlow: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cilium_net", Kind: "veth", MTU: 1500},
			{Name: "cilium_host", Kind: "veth", MTU: 1500},
			{Name: "cilium_vxlan", Kind: "vxlan", MTU: 1450, Port: 8472},
			{Name: "lxc20bd5ce70d74", Kind: "veth", MTU: 1500},
		},
		overlay.ShapeEBPF: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cilium_net", Kind: "veth", MTU: 1500},
			{Name: "cilium_host", Kind: "veth", MTU: 1500},
			{Name: "lxc20bd5ce70d74", Kind: "veth", MTU: 1500},
		},
		overlay.ShapeUDP: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "cni0", Kind: "bridge", MTU: 1472},
			{Name: "flannel0", Kind: "tuntap", MTU: 1472},
			{Name: "veth20bd5ce7", Kind: "veth", MTU: 1472, Master: true},
		},
		overlay.ShapeWeave: {
			{Name: "lo", Kind: "device", MTU: 65536},
			{Name: "eth0", Kind: "veth", MTU: 1500},
			{Name: "weave", Kind: "bridge", MTU: 1438},
			{Name: "vethwe-pcap", Kind: "veth", MTU: 1438},
			{Name: "vethwe-bridge", Kind: "veth", MTU: 1438, Master: true},
			{Name: "veth20bd5ce7", Kind: "veth", MTU: 1438, Master: true},
		},
	} {
		t.Run(shape, func(t *testing.T) {
			l := up(t, func(c *Config) { c.Shape, c.Pods = shape, 1 })
			var got []device
			in(t, l, "node0", func() error {
				links, err := netlink.LinkList()
				for _, link := range links {
					a := link.Attrs()
					d := device{Name: a.Name, Kind: link.Type(), MTU: a.MTU, Master: a.MasterIndex != 0}
					if v, ok := link.(*netlink.Vxlan); ok {
						d.VNI, d.Port, d.Learns = v.VxlanId, v.Port, v.Learning
					}
					got = append(got, d)
				}
				return err
			})
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("devices of node0 (-want +got):\n%s", diff)
			}
		})
	}
}

// TestInterruptCPU checks that if a node has a CPU for interrupts, packets from its NIC go there.
func TestInterruptCPU(t *testing.T) {
	testenv.NeedRoot(t)
	cores, err := availableCPUs("/sys")
	if err != nil {
		t.Fatal(err)
	}
	cpus := slices.Concat(cores...)
	name := "slip-" + labName(t)
	ns, err := network.Create(name, func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := network.Remove(name); err != nil {
			t.Error(err)
		}
	})
	w, err := newWire(config("x").NIC, ns)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	// For simplicity, the NIC's peer is in the same namespace.
	irq := cpus[len(cpus)-1]
	if err := w.connect(ns, layout(config("x"))[0], irq); err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error {
		sys, err := netns.Sysfs()
		if err != nil {
			return err
		}
		defer sys.Close()
		got, err := sys.ReadFile("class/net/eth0/queues/rx-0/rps_cpus")
		if want := cpuset.New(irq).Mask(); strings.TrimLeft(strings.TrimSpace(string(got)), "0,") != want {
			t.Errorf("rps_cpus of the NIC is %s, want %s", got, want)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestTrackedBriefly checks that a closed connection leaves the conntrack table, which all labs of the machine share, within
// seconds and not two minutes.
func TestTrackedBriefly(t *testing.T) {
	l := up(t, func(*Config) {})
	for _, pair := range connect(t, l, "node0/pod0", "node1/pod0", 4, 3) {
		for _, end := range pair {
			if err := end.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		tracked := 0
		for _, node := range []string{"node0", "node1"} {
			in(t, l, node, func() error {
				flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
				for _, f := range flows {
					if f.Forward.Protocol == unix.IPPROTO_TCP {
						tracked++
					}
				}
				return err
			})
		}
		if tracked == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are tracked still", tracked)
		}
	}
}
