//go:build linux

package bpf

import (
	"math"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// newNamespace moves the test's thread into a new network namespace. The namespace goes when
// nothing refers to it any more: neither the thread, which ends with the test's goroutine, nor the
// handle.
func newNamespace(t testing.TB) netns.NsHandle {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}); err != nil {
		t.Fatal(err)
	}
	return ns
}

func rehash(t *testing.T) *ebpf.Program {
	t.Helper()
	prog, err := LoadRehash()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	return prog
}

// TestRehashRun checks that the program passes every packet on unchanged.
func TestRehashRun(t *testing.T) {
	newNamespace(t)
	prog := rehash(t)
	ethernet := func(kind uint16, rest ...byte) []byte {
		return append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, byte(kind >> 8), byte(kind)}, rest...)
	}
	ipv4 := []byte{0x45, 0, 0, 28, 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0x34, 0x12, 0xb5, 0, 8, 0, 0}
	ipv6 := append([]byte{0x60, 0, 0, 0, 0, 8, unix.IPPROTO_UDP, 64}, make([]byte, 32+8)...)
	for name, packet := range map[string][]byte{
		"IPv4":  ethernet(unix.ETH_P_IP, ipv4...),
		"IPv6":  ethernet(unix.ETH_P_IPV6, ipv6...),
		"ARP":   ethernet(unix.ETH_P_ARP, make([]byte, 28)...),
		"other": ethernet(unix.ETH_P_802_EX1, 0x45),
	} {
		out := make([]byte, len(packet))
		verdict, err := prog.Run(&ebpf.RunOptions{Data: packet, DataOut: out})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if int32(verdict) != -1 {
			t.Errorf("%s: verdict %d, want -1 (TC_ACT_UNSPEC)", name, int32(verdict))
		}
		if diff := cmp.Diff(packet, out); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestRehashOnWire checks the program's effect across a veth. A packet arrives with its sender's hash;
// with the program, sockets that send the same headers get the same hash, as from a NIC.
func TestRehashOnWire(t *testing.T) {
	far := newNamespace(t)
	near := newNamespace(t)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "wire"}, PeerName: "far", PeerNamespace: netlink.NsFd(far)}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	wire := configure(t, "wire", "192.0.2.1/30")

	if err := netns.Set(far); err != nil {
		t.Fatal(err)
	}
	seen := watchHash(t, configure(t, "far", "192.0.2.2/30"))
	if err := netns.Set(near); err != nil {
		t.Fatal(err)
	}

	// Each dial draws a hash for its socket (sk_set_txhash in include/net/sock.h), which its
	// packets carry.
	hash := func() uint32 {
		conn, err := net.DialUDP("udp", &net.UDPAddr{Port: 4660}, &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 4789})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := seen.Update(uint32(0), uint32(0), ebpf.UpdateAny); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		var h uint32
		for deadline := time.Now().Add(5 * time.Second); h == 0; runtime.Gosched() {
			if err := seen.Lookup(uint32(0), &h); err != nil {
				t.Fatal(err)
			}
			if time.Now().After(deadline) {
				t.Fatal("no packet with a hash arrived")
			}
		}
		return h
	}
	hash() // resolve the neighbour
	if a, b := hash(), hash(); a == b {
		t.Errorf("without the program, both sockets have hash %#x", a)
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: wire, Program: rehash(t), Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if a, b := hash(), hash(); a != b {
		t.Errorf("with the program, the sockets have hashes %#x and %#x", a, b)
	}
}

// configure sets a device's address and returns its index.
func configure(t *testing.T, name, address string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(l, addr); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Index
}

// watchHash stores the hash of the last IPv4 UDP packet to port 4789 that a device received, in an
// array of one element.
func watchHash(t *testing.T, device int) *ebpf.Map {
	t.Helper()
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { seen.Close() })
	const portAt = 14 + 20 + 2 // after the Ethernet and IPv4 headers
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(portAt, asm.Half), // ends the program if the packet is shorter
			asm.JNE.Imm(asm.R0, 4789, "out"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMem(asm.R1, asm.R6, 17*4, asm.Word), // __sk_buff.hash
			asm.StoreMem(asm.RFP, -8, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -8),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { prog.Close() })
	l, err := link.AttachTCX(link.TCXOptions{Interface: device, Program: prog, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return seen
}

// loopRate sends n datagrams from a socket to itself over the loopback device, one at a time, and
// returns the rate per second of the thread's CPU time. That includes the softirq of each datagram,
// and excludes other load on the machine.
func loopRate(b *testing.B, n int) float64 {
	b.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		b.Fatal(err)
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		b.Fatal(err)
	}
	if err := unix.Connect(fd, self); err != nil {
		b.Fatal(err)
	}
	cpuTime := func() int64 {
		var t unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
			b.Fatal(err)
		}
		return t.Nano()
	}
	message := make([]byte, 64)
	begin := cpuTime()
	for range n {
		if _, err := unix.Write(fd, message); err != nil {
			b.Fatal(err)
		}
		if _, err := unix.Read(fd, message); err != nil {
			b.Fatal(err)
		}
	}
	return float64(n) / float64(cpuTime()-begin) * 1e9
}

// BenchmarkSoftirq measures the overhead of the probe where it is highest: on packets that cause
// one softirq each. A block is such traffic with and without the probe, in random order. The ratio
// of rates comes with its 95 % interval over the blocks, so give it -benchtime 1000x. ns/packet is
// the difference between the two. ns/softirq is the kernel's own account of both programs; it has
// one more clock reading for each, and lacks the cost of calling them.
func BenchmarkSoftirq(b *testing.B) {
	newNamespace(b)
	const packets = 5000 // some 20 ms
	rate := func(attached bool) float64 {
		if attached {
			s, err := OpenSoftirq()
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
		}
		return loopRate(b, packets)
	}
	loopRate(b, packets) // warm caches
	var ratios []float64
	var extra float64 // seconds per packet
	for b.Loop() {
		var with, without float64
		if rand.IntN(2) == 0 {
			with, without = rate(true), rate(false)
		} else {
			without, with = rate(false), rate(true)
		}
		ratios = append(ratios, math.Log(with/without))
		extra += 1/with - 1/without
	}
	b.ReportMetric(0, "ns/op") // would be the length of the blocks
	if n := float64(len(ratios)); n > 1 {
		b.ReportMetric(extra/n*1e9, "ns/packet")
		mean, sd := stat.MeanStdDev(ratios, nil)
		half := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: n - 1}.Quantile(.975) * sd / math.Sqrt(n)
		b.ReportMetric(math.Exp(mean), "rate-ratio")
		b.ReportMetric(math.Exp(mean-half), "rate-ratio-lo95")
		b.ReportMetric(math.Exp(mean+half), "rate-ratio-hi95")
	}

	s, err := OpenSoftirq()
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	accounting, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Fatal(err)
	}
	defer accounting.Close()
	loopRate(b, 10*packets)
	var cost float64
	for _, p := range []*ebpf.Program{s.objects.SoftirqEntry, s.objects.SoftirqExit} {
		stats, err := p.Stats()
		if err != nil {
			b.Fatal(err)
		}
		cost += float64(stats.Runtime.Nanoseconds()) / float64(max(1, stats.RunCount))
	}
	b.ReportMetric(cost, "ns/softirq")
}
