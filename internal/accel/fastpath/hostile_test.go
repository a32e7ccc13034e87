//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/grammar"
)

// tap sends frames by a device of a place.
type tap struct {
	*world
	fd, index int
}

func (w *world) tap(place, device string) tap {
	w.Helper()
	t := tap{world: w}
	w.in(place, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		t.index = l.Attrs().Index
		t.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	w.Cleanup(func() { unix.Close(t.fd) })
	return t
}

// from sends a frame of no known protocol, or of one that is given, in an address's name.
func (t tap) from(source net.HardwareAddr, protocol uint16, payload ...byte) {
	if err := unix.Sendto(t.fd, grammar.Frame(source, protocol, payload...), 0, &unix.SockaddrLinklayer{Ifindex: t.index, Halen: 6}); err != nil && !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("send a frame: %v", err)
	}
}

// floods sends frames from as many addresses, some 20,000 a second.
func (t tap) floods(addresses int) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for i := range addresses {
		t.from(grammar.MadeUp(i), 0x88b5)
		if i%100 == 99 {
			<-tick.C
		}
	}
}

// during makes round trips, at a rate at which each change costs some, until what runs meanwhile
// has ended, and tells which part of them set out by the fast path of node0.
func (w *world) during(e echo, runs func()) (share float64) {
	w.Helper()
	var over atomic.Bool
	var running sync.WaitGroup
	running.Go(func() { defer over.Store(true); runs() })
	defer running.Wait()
	before, trips := w.counts(0), 0
	for ; !over.Load(); trips++ {
		if err := e.trip(patience); err != nil {
			w.Fatal(err)
		}
		time.Sleep(500 * time.Microsecond)
	}
	now := w.counts(0)
	w.Logf("%d round trips meanwhile: %d set out by the fast path, %d were looked at anew", trips, now["fast-out"]-before["fast-out"], now["invalidated"]-before["invalidated"])
	return float64(now["fast-out"]-before["fast-out"]) / float64(trips)
}

// usage is what a process has used of CPUs, and the bytes of memory that it has.
func usage(t *testing.T, process int) (cpu time.Duration, memory int) {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", process))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	var user, kernel, pages int
	// Fields 14, 15 and 24 of proc_pid_stat(5); a tick is 10 ms.
	if _, err := fmt.Sscan(fields[11]+" "+fields[12]+" "+fields[21], &user, &kernel, &pages); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+kernel) * 10 * time.Millisecond, pages * os.Getpagesize()
}

// entries are those of a node's bridges and VXLAN devices.
func (w *world) entries(node string) (n int) {
	w.Helper()
	w.in(node, func() error {
		all, err := netlink.NeighList(0, unix.AF_BRIDGE)
		n = len(all)
		return err
	})
	return n
}

// slow counts the packets of some round trips that node0 forwarded by its own stack.
func (w *world) slow(e echo, trips int) int {
	w.Helper()
	before := w.forwarded("n0")
	for range trips {
		if err := e.trip(patience); err != nil {
			w.Fatal(err)
		}
	}
	return w.forwarded("n0") - before
}

// TestMadeUp has a pod send from Ethernet addresses that it makes up: the process that holds the
// fast path takes neither CPU nor memory for them, and another pod's connection stays on it. One
// that begins when bridges have learned them all takes it too.
func TestMadeUp(t *testing.T) {
	const addresses = 40_000
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	hostile := w.tap("n0p1", "eth0")
	holder := w.hold("n0")
	e := w.connect().back()
	w.eventually("fast path", func() {}, func() bool { return w.slow(e, 100) < 20 })
	cpu, memory := usage(t, holder.Process.Pid)
	var over atomic.Bool
	began := time.Now()
	go func() { hostile.floods(addresses); over.Store(true) }()
	trips, slows := 0, 0
	for ; !over.Load(); trips += 100 {
		slows += w.slow(e, 100)
	}
	took := time.Since(began)
	cpuNow, memoryNow := usage(t, holder.Process.Pid)
	t.Logf("%d addresses in %v: %v of CPU and %d KiB more; %d of %d packets went the slow way", addresses, took, cpuNow-cpu, (memoryNow-memory)>>10, slows, 2*trips)
	if cpuNow-cpu > took/40+30*time.Millisecond {
		t.Errorf("it took %v of CPU in %v", cpuNow-cpu, took)
	}
	if memoryNow-memory > 8<<20 {
		t.Errorf("it grew by %d KiB", (memoryNow-memory)>>10)
	}
	if slows > 2*trips/10 {
		t.Errorf("%d of %d packets went the slow way", slows, 2*trips)
	}
	if n := w.entries("n0"); n < addresses {
		t.Errorf("there are %d entries only", n)
	}
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait()
	w.start()
	w.warm(e)
	late := w.connect().back()
	w.warm(late)
	before := w.paths[0].Generation()
	if share := w.during(e, func() { hostile.floods(addresses / 4) }); share < 0.7 {
		t.Errorf("%.2f of the round trips set out by the fast path meanwhile", share)
	}
	if n := w.paths[0].Generation() - before; n > 2 {
		t.Errorf("%d times all was void for addresses that nobody has", n)
	}
}

// sysctl sets one of a place.
func (w *world) sysctl(place, key, value string) {
	w.Helper()
	w.in(place, func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) })
}

// TestScan has a pod send to addresses that nobody has, pods' and others': nothing that was
// seen is void for that.
func TestScan(t *testing.T) {
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	for _, device := range []string{"eth0", "cni0"} { // so that the kernel soon knows
		w.sysctl("n0", "net/ipv4/neigh/"+device+"/retrans_time_ms", "20")
		w.sysctl("n0", "net/ipv4/neigh/"+device+"/mcast_solicit", "1")
	}
	w.in("n0", func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: prefix(netip.MustParseAddr("198.19.0.0"), 16), Scope: netlink.SCOPE_LINK})
	})
	var socket *net.UDPConn
	w.in("n0p1", func() (err error) {
		socket, err = net.ListenUDP("udp4", nil)
		return err
	})
	t.Cleanup(func() { socket.Close() })
	node, quit := w.ns("n0"), make(chan struct{})
	defer node.Close()
	updates := make(chan netlink.NeighUpdate, 1000)
	if err := netlink.NeighSubscribeAt(node, updates, quit); err != nil {
		t.Fatal(err)
	}
	defer close(quit)
	var failed atomic.Int64
	go func() {
		for u := range updates {
			if u.Type == unix.RTM_NEWNEIGH && u.State == unix.NUD_FAILED {
				failed.Add(1)
			}
		}
	}()
	w.warm(e)
	before := w.paths[0].Generation()
	share := w.during(e, func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for i := range 300 {
			for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{198, 19, byte(i / 250), byte(1 + i%250)}), pod(0, 10+i%200)} {
				_, _ = socket.WriteToUDPAddrPort([]byte("datagram"), netip.AddrPortFrom(a, 9)) // that there is nobody, from the node
			}
			<-tick.C
		}
	})
	voids := w.paths[0].Generation() - before
	t.Logf("%d neighbours failed, all was void %d times, %.2f set out by the fast path", failed.Load(), voids, share)
	if failed.Load() < 250 || voids > 2 || share < 0.7 {
		t.Error("want many, none and nearly all")
	}
}

// second gives node0's second pod another link to the bridge.
func (w *world) second() tap {
	w.Helper()
	far := w.ns("n0p1")
	defer far.Close()
	w.in("n0", func() error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex, attrs.Flags = "second", bridge.Attrs().Index, net.FlagUp
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "other", PeerNamespace: netlink.NsFd(far)})
	})
	w.in("n0p1", func() error {
		l, err := netlink.LinkByName("other")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	})
	return w.tap("n0p1", "other")
}

// TestTaken has what was seen be void when a pod takes the Ethernet address of another, as the
// bridge then sends it what is for that; and when the two take it from each other all the time,
// that be none of a third's business, whose packets keep to the fast path.
func TestTaken(t *testing.T) {
	const restful = time.Second
	defer fastpath.ChangesWithin(fastpath.ChangesWithin(restful))
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	one, other := w.tap("n0p1", "eth0"), w.second()
	taken := grammar.MadeUp(1)
	w.in("n0", func() error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, State: netlink.NUD_REACHABLE, IP: pod(0, 70).AsSlice(), HardwareAddr: taken})
	})
	f := w.paths[0]
	before, sent := 0, 0
	w.eventually("nothing changes any more", func() { before = f.Generation(); time.Sleep(200 * time.Millisecond) },
		func() bool { return before == f.Generation() })
	w.eventually("what was seen is void when it is taken, and when it is taken back", func() {
		time.Sleep(20 * time.Millisecond) // until the programs are told where it is
		[]tap{one, other}[sent%2].from(taken, 0x88b5)
		sent++
	}, func() bool { return f.Generation() >= before+3 })
	if sent > 10 {
		t.Errorf("that was when it had been taken %d times", sent)
	}
	restless := func() bool {
		return slices.ContainsFunc(f.Skipped(), func(r string) bool {
			return strings.Contains(r, ": the MAC addresses behind it change too often")
		})
	}
	w.warm(e)
	before = f.Generation()
	times := 0
	share := w.during(e, func() {
		for began := time.Now(); time.Since(began) < 3*time.Second; time.Sleep(100 * time.Microsecond) {
			one.from(taken, 0x88b5)
			other.from(taken, 0x88b5)
			if restless() {
				times++
			}
		}
	})
	voids := f.Generation() - before
	t.Logf("all was void %d times, %.2f set out by the fast path", voids, share)
	if voids < 4 || voids > 2000 || share < 0.7 {
		t.Error("a pod suffers of what others do to each other")
	}
	if times == 0 {
		t.Error("nobody is told why the two are left to the slow path")
	}
	w.warm(e)
	began := time.Now()
	w.eventually("it is over", func() { time.Sleep(10 * time.Millisecond) }, func() bool { return !restless() })
	if took := time.Since(began); took > restful+fastpath.Look+time.Second {
		t.Errorf("it was over after %v", took)
	}
}

// TestAnswers has a pod say for many addresses of IP that they are at Ethernet addresses which it
// makes up, others each time. Its node believes that, and a connection of another pod goes on.
func TestAnswers(t *testing.T) {
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	hostile := w.tap("n0p1", "eth0")
	w.sysctl("n0", "net/ipv4/neigh/cni0/locktime", "0") // the sooner it believes others
	gateway := pod(0, -1).As4()
	const answers = 200
	before := w.paths[0].Generation()
	share := w.during(e, func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := range 10 * answers {
			m, ip := grammar.MadeUp(i), pod(0, 20+i%answers).As4()
			// A question of that address, in Ethernet and IPv4 (RFC 826).
			question := slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, m, ip[:], make([]byte, 6), gateway[:])
			hostile.from(m, unix.ETH_P_ARP, question...)
			<-tick.C
		}
	})
	believed := 0
	w.in("n0", func() error {
		all, err := netlink.NeighList(0, unix.AF_INET)
		for _, n := range all {
			if len(n.HardwareAddr) == 6 && n.HardwareAddr[1] == 0x77 {
				believed++
			}
		}
		return err
	})
	voids := w.paths[0].Generation() - before
	t.Logf("%d are believed, all was void %d times, %.2f set out by the fast path", believed, voids, share)
	if believed < answers*9/10 || voids > 2*answers || share < 0.7 {
		t.Error("want most to be believed, few to matter, and most to set out by it")
	}
	w.warm(e)
}

// TestOverrides has a pod say of an address of IPv6 that it is at one Ethernet address, and at
// another, as fast as it can: its node believes that at once. The process that holds the fast path
// takes some CPU for it, and another pod's connection keeps to it for the most part.
func TestOverrides(t *testing.T) {
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	hostile, taken := w.tap("n0p1", "eth0"), pod6(0, 70)
	w.in("n0", func() error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, State: netlink.NUD_REACHABLE, IP: taken.AsSlice(), HardwareAddr: grammar.MadeUp(1)})
	})
	var advertisements [2][]byte // RFC 4861, section 4.4: to all nodes, to override what is known
	for i := range advertisements {
		says := slices.Concat([]byte{136, 0, 0, 0, 0x20, 0, 0, 0}, taken.AsSlice(), []byte{2, 1}, grammar.MadeUp(i))
		head := slices.Concat([]byte{0x60, 0, 0, 0, 0, byte(len(says)), unix.IPPROTO_ICMPV6, 255}, pod6(0, 1).AsSlice(), []byte{0xff, 2, 15: 1})
		binary.BigEndian.PutUint16(says[2:], ^grammar.Sum(uint32(unix.IPPROTO_ICMPV6+len(says))+uint32(grammar.Sum(0, head[8:])), says))
		advertisements[i] = slices.Concat(head, says)
	}
	holder := w.hold("n0")
	e := w.connect().back()
	w.eventually("fast path", func() {}, func() bool { return w.slow(e, 100) < 20 })
	cpu, _ := usage(t, holder.Process.Pid)
	var over atomic.Bool
	var sent int
	began := time.Now()
	go func() {
		defer over.Store(true)
		for ; time.Since(began) < 3*time.Second; sent++ {
			hostile.from(grammar.MadeUp(sent%2), unix.ETH_P_IPV6, advertisements[sent%2]...)
		}
	}()
	trips, slows := 0, 0
	for ; !over.Load(); trips++ {
		slows += w.slow(e, 1)
		time.Sleep(500 * time.Microsecond) // the rate, at which each change costs some
	}
	took := time.Since(began)
	cpuNow, _ := usage(t, holder.Process.Pid)
	t.Logf("%d advertisements in %v: %v of CPU; %d of %d packets went the slow way", sent, took, cpuNow-cpu, slows, 2*trips)
	if cpuNow-cpu > took/5 {
		t.Errorf("it took %v of CPU in %v", cpuNow-cpu, took)
	}
	if slows > 2*trips/3 {
		t.Errorf("%d of %d packets went the slow way", slows, 2*trips)
	}
	w.eventually("fast path again", func() {}, func() bool { return w.slow(e, 100) < 20 })
}

// TestPaced has a fast path look at its devices at once when it is asked to, and however often it is
// asked, for a tenth of the time at most.
func TestPaced(t *testing.T) {
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	far := w.ns("n0p1")
	defer far.Close()
	w.in("n0", func() error {
		for n := range 100 { // so that it has something to look at
			attrs := netlink.NewLinkAttrs()
			attrs.Name = fmt.Sprintf("many%d", n)
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far" + attrs.Name, PeerNamespace: netlink.NsFd(far)}); err != nil {
				return err
			}
		}
		return nil
	})
	w.start()
	f := w.paths[0]
	var looks int
	var pauses, longest time.Duration
	last, _ := f.Looked()
	began := time.Now()
	for time.Since(began) < 2*time.Second {
		f.Look()
		if which, pause := f.Looked(); which != last {
			last = which
			looks++
			pauses += pause
			longest = max(longest, pause)
		}
		time.Sleep(100 * time.Microsecond) // or it does nothing else
	}
	took := time.Since(began)
	t.Logf("%d looks in %v, to be %v apart together", looks, took, pauses)
	if looks < 2 || pauses-longest > took {
		t.Error("want some, and no more than there is time for")
	}
}
