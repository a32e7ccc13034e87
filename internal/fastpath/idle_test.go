//go:build linux

package fastpath_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// programs returns the names of the programs that are attached on a node, as the kernel reports
// them.
func (w *world) programs(node int) string {
	w.Helper()
	var kinds []string
	w.in(fmt.Sprintf("n%d", node), func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
				if err != nil {
					return err
				}
				for _, a := range q.Programs {
					p, err := ebpf.NewProgramFromID(a.ID)
					if errors.Is(err, os.ErrNotExist) {
						continue // it has been unloaded
					}
					if err != nil {
						return err
					}
					info, err := p.Info()
					p.Close()
					if err != nil {
						return err
					}
					kinds = append(kinds, info.Name)
				}
			}
		}
		return err
	})
	slices.Sort(kinds)
	return fmt.Sprint(slices.Compact(kinds))
}

// sendShort sends ten datagrams, each in a connection of its own, from the ports that follow port.
func (w *world) sendShort(port int) {
	w.Helper()
	w.in("n0p0", func() error {
		for n := range 10 {
			s, err := net.DialUDP("udp4", &net.UDPAddr{Port: port + n}, &net.UDPAddr{IP: pod(1, 0).AsSlice(), Port: 9})
			if err != nil {
				return err
			}
			_, err = s.Write([]byte("datagram"))
			if err := errors.Join(err, s.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

const idle, active = "[]", "[decap_nic observe_nic observe_pod observe_vxlan redirect_pod redirect_vxlan]"

// TestIdle checks that no programs are attached while no connection is eligible, except that observe_vxlan and redirect_vxlan,
// and redirect_pod at the link of the pod, sample now and then while there is traffic.
func TestIdle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "flannel", "full")
	w.start()
	want := func(programs string) {
		t.Helper()
		w.eventually("programs "+programs, nil, func() bool { return w.programs(0) == programs && w.programs(1) == programs })
	}
	want(idle)
	seen := map[string]int{}
	looks, network, link := 0, 0, 0
	port := 20000
	for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(10 * time.Millisecond) { // limits the rate
		w.sendShort(port)
		port += 10
		is := w.programs(0)
		seen[is]++
		looks++
		if strings.Contains(is, "redirect_vxlan") {
			network++
		}
		if strings.Contains(is, "redirect_pod") {
			link++
		}
		if hooks := w.paths[0].Hooks(); hooks != nil {
			t.Fatalf("the fast path is active: %v", hooks)
		}
	}
	t.Log(seen)
	if network == 0 || network > looks/2 || link > looks*2/3 || seen[active] > 0 {
		t.Errorf("with short connections programs were %v", seen)
	}
	want(idle)
	for range 2 {
		e := w.connect().back()
		w.accelerate(e)
		want(active)
		// A connection that starts while the fast path goes idle must be accelerated nevertheless.
		for _, f := range w.paths {
			f.GoIdle()
		}
		want(idle)
		w.accelerate(e)
		want(active)
		e.Close()
		e.far.Close()
		want(idle)
	}
}

// TestTCXChainFull checks that a full tcx chain at the VXLAN device is reported once, not with each
// attempt to attach.
func TestTCXChainFull(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "flannel", "full")
	w.in("n0", func() error {
		l, err := netlink.LinkByName("flannel.1")
		for err == nil {
			next := program(t, ebpf.SchedCLS, asm.Mov.Imm(asm.R0, -1))
			var at link.Link
			if at, err = link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: next, Attach: ebpf.AttachTCXIngress}); err == nil {
				t.Cleanup(func() { at.Close() })
			}
		}
		if errors.Is(err, unix.ERANGE) {
			return nil // the chain is full
		}
		return err
	})
	w.start(v1alpha1.UnseenByTCX)
	port := 20000
	expectSampling := func(what string, there bool) {
		w.Helper()
		w.eventually("sampling programs "+what, func() { w.sendShort(port); port += 10 }, func() bool { return strings.Contains(w.programs(0), "observe_vxlan") == there })
	}
	expectSampling("attached", true)
	expectSampling("detached", false)
	skipped := w.paths[0].Skipped()
	if !slices.ContainsFunc(skipped, func(r string) bool { return strings.HasPrefix(r, "flannel.1: attach redirect_vxlan: ") }) {
		t.Errorf("skipped %q", skipped)
	}
	select {
	case <-w.paths[0].Changes():
	default:
		t.Error("no change was reported")
	}
	expectSampling("attached again", true)
	expectSampling("detached again", false)
	select {
	case <-w.paths[0].Changes():
		t.Errorf("the change was reported again: %q", w.paths[0].Skipped())
	default:
	}
}

// TestLongConnectionAmongShort checks that sampling finds a long connection among many short ones,
// even when it samples rarely.
func TestLongConnectionAmongShort(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "flannel", "full")
	w.start()
	stop, ended := make(chan struct{}), make(chan error, 1)
	var sent atomic.Int64
	near := w.ns("n0p1")
	defer near.Close()
	go func() {
		ended <- fastpath.Within(near, func() error {
			// A socket of package net would take too long to open.
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
			if err != nil {
				return err
			}
			defer unix.Close(s)
			tick := time.NewTicker(time.Millisecond) // conntrack has an entry for each
			defer tick.Stop()
			for n := uint32(0); ; n++ {
				if n%10 == 0 {
					select {
					case <-stop:
						return nil
					case <-tick.C:
					}
				}
				datagram := []byte{byte(n >> 8), byte(n), 9, byte(n >> 16), 0, 8, 0, 0} // source port, destination port, length, no checksum
				if err := unix.Sendto(s, datagram, 0, &unix.SockaddrInet4{Addr: pod(1, 1).As4()}); err != nil && !errors.Is(err, unix.ENOBUFS) {
					return err
				}
				sent.Add(1)
			}
		})
	}()
	// Wait until the detector's programs have been attached and detached three times.
	for turns, was, looked := 0, false, time.Now(); turns < 6; time.Sleep(5 * time.Millisecond) {
		if now := strings.Contains(w.programs(0), "redirect_vxlan"); now != was {
			turns, was = turns+1, now
		}
		if time.Since(looked) > time.Minute {
			t.Fatalf("after %d turns of sampling there are no more", turns)
		}
	}
	e := w.connect().back()
	began, before := time.Now(), sent.Load()
	w.accelerate(e)
	t.Logf("accelerated after %v and %d short connections", time.Since(began), sent.Load()-before)
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// shortConnection makes a connection of one message from node0's n-th pod.
func (w *world) shortConnection(n int) {
	w.Helper()
	e := w.connectOf(n, direct).back()
	if err := e.trip(patience); err != nil {
		w.Fatal(err)
	}
	e.Close()
	e.far.Close()
}

// link returns the name of the node's end of a pod's link.
func (w *world) link(node, pod int) (name string) {
	w.Helper()
	var index int
	w.in(fmt.Sprintf("n%dp%d", node, pod), func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			index = l.Attrs().ParentIndex
		}
		return err
	})
	w.in(fmt.Sprintf("n%d", node), func() error {
		l, err := netlink.LinkByIndex(index)
		if err == nil {
			name = l.Attrs().Name
		}
		return err
	})
	return name
}

func (w *world) devicesWith(node int, program string) (devices []string) {
	for _, h := range w.paths[node].Hooks() {
		if h.Program == program {
			devices = append(devices, h.Device)
		}
	}
	slices.Sort(devices)
	return devices
}

// TestProgramsOnlyAtActivePods checks that only pods with an eligible connection have programs at
// their links: other pods get them with their first eligible connection, and lose them some time
// after the last.
func TestProgramsOnlyAtActivePods(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shape, "full")
			w.start()
			want := func(step func(), pods ...int) {
				t.Helper()
				holds := func() bool {
					for node := range w.paths {
						var links []string
						for _, n := range pods {
							links = append(links, w.link(node, n))
						}
						slices.Sort(links)
						for _, program := range []string{"observe_pod", "redirect_pod"} {
							if !slices.Equal(w.devicesWith(node, program), links) {
								return false
							}
						}
					}
					return true
				}
				w.eventually(fmt.Sprintf("programs are at the links of pods %v", pods), step, holds)
			}
			accelerated := func(n int) echo {
				t.Helper()
				e := w.connectOf(n, direct).back()
				start := time.Now()
				w.accelerate(e)
				took := time.Since(start)
				t.Logf("accelerated after %v", took)
				if took > 8*time.Second {
					t.Errorf("accelerated after %v", took)
				}
				return e
			}
			first := accelerated(0)
			goesOn := func() {
				if err := first.trip(patience); err != nil {
					t.Fatal(err)
				}
			}
			want(goesOn, 0)
			for range 10 {
				w.shortConnection(1)
			}
			want(goesOn, 0)
			second := accelerated(1)
			want(goesOn, 0, 1)
			w.accelerate(first)
			second.Close()
			second.far.Close()
			want(goesOn, 0)
			w.accelerate(first)
			first.Close()
			first.far.Close()
			want(func() {})
			for node := range w.paths {
				if got := w.programs(node); strings.Contains(got, "observe_pod") {
					t.Errorf("node%d has %s", node, got)
				}
			}
		})
	}
}

// TestIneligibleConnectionKeepsPrograms checks that a pod keeps its programs while it has overlay
// traffic that never becomes eligible. Attach requests for it do not stop, and the programs must
// not be detached and attached again and again.
func TestIneligibleConnectionKeepsPrograms(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "flannel", "full")
	w.untracked(0)
	w.start()
	e := w.connect().back()
	trip := func() {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	has := func() bool { return slices.Contains(w.devicesWith(0, "observe_pod"), w.link(0, 0)) }
	w.eventually("the pod's link has programs", trip, has)
	for began := time.Now(); time.Since(began) < 15*time.Second; trip() {
		if !has() {
			t.Fatalf("the pod's link has no programs after %v", time.Since(began))
		}
	}
	if c := w.counts(0); c["fast-out"]+c["fast-in"] > 0 || c["untracked"] == 0 {
		t.Errorf("packets took the fast path: %v", c)
	}
	e.Close()
	w.eventually("the pod's link has no programs", nil, func() bool { return len(w.devicesWith(0, "observe_pod")) == 0 })
}

// TestNodeConnections checks that connections of a pod to its node do not attach programs.
func TestNodeConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "flannel", "full")
	w.start()
	first := w.connect().back()
	w.accelerate(first)
	first.Close()
	var near net.Conn
	var listener net.Listener
	w.in("n0", func() (err error) {
		listener, err = net.Listen("tcp4", ":0")
		return err
	})
	defer listener.Close()
	w.in("n0p0", func() (err error) {
		near, err = net.DialTCP("tcp4", nil, &net.TCPAddr{IP: pod(0, -1).AsSlice(), Port: listener.Addr().(*net.TCPAddr).Port})
		return err
	})
	far, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	e := echo{near, far}.back()
	w.eventually("the pod's link has no programs", func() {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}, func() bool { return len(w.paths[0].Hooks()) == 0 })
}

// TestLeaseRenewedDuringAttach checks that the lease is renewed while programs are being attached
// to many pods, however long that takes.
func TestLeaseRenewedDuringAttach(t *testing.T) {
	w := newWorld(t, "flannel", "full")
	far := w.ns("n0p1")
	defer far.Close()
	w.start()
	e := w.connect().back()
	w.accelerate(e)
	pods := 0
	for took := time.Duration(0); took <= fastpath.LeaseTime+time.Second; {
		w.in("n0", func() error {
			for range max(150, pods) {
				attrs := netlink.NewLinkAttrs()
				attrs.Name = fmt.Sprintf("many%d", pods)
				pods++
				if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far" + attrs.Name, PeerNamespace: netlink.NsFd(far)}); err != nil {
					return err
				}
			}
			return nil
		})
		testenv.Retry(t, 3, func() error { // on a busy machine the lease may expire once
			var expired uint64
			took, expired = w.attachUnderLoad(e, 2*pods)
			t.Logf("attaching to %d pods took %v", pods, took)
			if expired > 0 {
				return fmt.Errorf("the lease had expired for %d packets", expired)
			}
			return nil
		})
	}
}

// attachUnderLoad attaches all programs again while a connection is in use. It returns how long that took, and the number of
// packets that took the slow path because the lease had expired.
func (w *world) attachUnderLoad(e echo, all int) (took time.Duration, expired uint64) {
	w.Helper()
	hooks := func() int { return len(w.paths[0].Hooks()) } // it takes the lock that is held while programs are attached
	w.paths[0].GoIdle()
	w.eventually("all programs are detached", nil, func() bool { return hooks() == 0 })
	before := w.counts(0)["lease-expired"]
	ended := make(chan error, 1)
	var stop atomic.Bool
	began := time.Now()
	go func() {
		for !stop.Load() {
			if err := e.trip(patience); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	w.eventually("all programs are attached", w.paths[0].AttachAll, func() bool { return hooks() >= all })
	took = time.Since(began)
	stop.Store(true)
	if err := <-ended; err != nil {
		w.Fatal(err)
	}
	return took, w.counts(0)["lease-expired"] - before
}

// TestOwnTrafficOfNodes sends datagrams between the nodes themselves, which route packets of their pods over the same NICs. The
// detector samples them, but requests programs for no pod, and nothing counts them.
func TestOwnTrafficOfNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, overlay.ShapeRouted, spec.OffloadFull)
	var near, far *net.UDPConn
	w.in("n1", func() (err error) {
		far, err = net.ListenUDP("udp4", nil)
		return err
	})
	w.in("n0", func() (err error) {
		near, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(198, 18, 0, 2), Port: far.LocalAddr().(*net.UDPAddr).Port})
		return err
	})
	t.Cleanup(func() { near.Close(); far.Close() })
	go func() {
		buf := make([]byte, 64)
		for {
			n, from, err := far.ReadFromUDP(buf)
			if err != nil {
				return
			}
			_, _ = far.WriteToUDP(buf[:n], from)
		}
	}()
	w.start()
	buf := make([]byte, 64)
	trip := func() {
		for range 100 {
			_ = near.SetDeadline(time.Now().Add(patience))
			if _, err := near.Write([]byte("datagram")); err != nil {
				t.Fatal(err)
			}
			if _, err := near.Read(buf); err != nil {
				t.Fatal(err)
			}
		}
	}
	for round := range 2 {
		for _, on := range []bool{true, false} {
			w.eventually(fmt.Sprintf("round %d: the detector is on: %t", round, on), trip, func() bool { return w.paths[0].Detecting() == on })
		}
	}
	for node, p := range w.paths {
		counts := w.counts(node)
		if n := p.Requested(); n > 0 || len(p.Hooks()) > 0 || counts["no-flow"] > 20 { // the kernels' own ARP and IPv6 packets may be sampled
			t.Errorf("node%d: programs are requested for %d addresses, %v are attached; %v", node, n, p.Hooks(), counts)
		}
	}
	// A pod is found nevertheless.
	w.connect().back()
}
