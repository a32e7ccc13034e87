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
	"slipstream.dev/internal/accel/fastpath"
)

// programs are the kinds of programs that are attached on a node, as the kernel has it.
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
						continue // it went
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

// strays are ten datagrams, each one of its own: from ports that follow one.
func (w *world) strays(port int) {
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

const asleep, scouting, awake = "[]", "[arrive tunnel]", "[arrive deliver land leave tunnel wire]"

// While no connection is worth it there are no programs, but for those that look for one, now
// and then, where there are packets.
func TestSleep(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	w := newWorld(t, "flannel", "full")
	w.start()
	want := func(programs string) {
		t.Helper()
		w.eventually("programs "+programs, func() {}, func() bool { return w.programs(0) == programs && w.programs(1) == programs })
	}
	want(asleep)
	seen := map[string]int{}
	port := 20000
	for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(10 * time.Millisecond) { // the rate
		w.strays(port)
		port += 10
		seen[w.programs(0)]++
		if hooks := w.paths[0].Hooks(); hooks != nil {
			t.Fatalf("it is awake: %v", hooks)
		}
	}
	t.Log(seen)
	if seen[scouting] == 0 || seen[scouting] > seen[asleep] || seen[awake] > 0 {
		t.Errorf("programs were %v, of short connections", seen)
	}
	want(asleep)
	for range 2 {
		e := w.connect().back()
		w.warm(e)
		want(awake)
		// One that becomes known as they fall asleep does not stay without them.
		for _, f := range w.paths {
			f.Sleep()
		}
		want(asleep)
		w.warm(e)
		want(awake)
		e.Close()
		e.far.Close()
		want(asleep)
	}
}

// Where a scout finds no room that is said once, not whenever they come.
func TestNoRoom(t *testing.T) {
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
			return nil // there is no room for more
		}
		return err
	})
	w.start(v1alpha1.UnseenByTCX)
	port := 20000
	scouts := func(they string, there bool) {
		w.Helper()
		w.eventually("scouts "+they, func() { w.strays(port); port += 10 }, func() bool { return strings.Contains(w.programs(0), "observe_vxlan") == there })
	}
	scouts("come", true)
	scouts("go", false)
	refused := w.paths[0].Skipped()
	if !slices.ContainsFunc(refused, func(r string) bool { return strings.HasPrefix(r, "flannel.1: attach arrive: ") }) {
		t.Errorf("refused %q", refused)
	}
	select {
	case <-w.paths[0].Changes():
	default:
		t.Error("it is no news")
	}
	scouts("come again", true)
	scouts("go again", false)
	select {
	case <-w.paths[0].Changes():
		t.Errorf("it is news again: %q", w.paths[0].Skipped())
	default:
	}
}

// One that lasts is found among many that do not, also by scouts that come rarely.
func TestAmongShort(t *testing.T) {
	w := newWorld(t, "flannel", "full")
	w.start()
	stop, ended := make(chan struct{}), make(chan error, 1)
	var sent atomic.Int64
	near := w.ns("n0p1")
	defer near.Close()
	go func() {
		ended <- fastpath.Within(near, func() error {
			// Not of the net package, which takes its time to make a socket.
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
			if err != nil {
				return err
			}
			defer unix.Close(s)
			tick := time.NewTicker(time.Millisecond) // conntrack remembers each of them
			defer tick.Stop()
			for n := uint32(0); ; n++ {
				if n%10 == 0 {
					select {
					case <-stop:
						return nil
					case <-tick.C:
					}
				}
				datagram := []byte{byte(n >> 8), byte(n), 9, byte(n >> 16), 0, 8, 0, 0} // from port, to port, length, no sum
				if err := unix.Sendto(s, datagram, 0, &unix.SockaddrInet4{Addr: pod(1, 1).As4()}); err != nil && !errors.Is(err, unix.ENOBUFS) {
					return err
				}
				sent.Add(1)
			}
		})
	}()
	for turns, was := 0, asleep; turns < 6; { // they have come for the third time, and gone
		if now := w.programs(0); now != was && (now == asleep || now == scouting) {
			turns, was = turns+1, now
		}
	}
	e := w.connect().back()
	began, before := time.Now(), sent.Load()
	w.warm(e)
	t.Logf("carried after %v, in which %d datagrams were sent", time.Since(began), sent.Load()-before)
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// short is a connection of a message, from node0's n-th pod.
func (w *world) short(n int) {
	w.Helper()
	e := w.connectOf(n, direct).back()
	if err := e.trip(patience); err != nil {
		w.Fatal(err)
	}
	e.Close()
	e.far.Close()
}

// link is the node's end of a pod's link.
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

// having are the devices of a node that have a program.
func (w *world) having(node int, program string) (devices []string) {
	for _, h := range w.paths[node].Hooks() {
		if h.Program == program {
			devices = append(devices, h.Device)
		}
	}
	slices.Sort(devices)
	return devices
}

// Only pods that have a connection worth it have programs at their links; the others get them
// when they have one, and lose them some time after the last.
func TestWatched(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	for _, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
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
						for _, program := range []string{"observe_pod", "encap"} {
							if !slices.Equal(w.having(node, program), links) {
								return false
							}
						}
					}
					return true
				}
				w.eventually(fmt.Sprintf("pods %v are watched", pods), step, holds)
			}
			carried := func(n int) echo {
				t.Helper()
				e := w.connectOf(n, direct).back()
				start := time.Now()
				w.warm(e)
				took := time.Since(start)
				t.Logf("carried after %v", took)
				if took > 3*time.Second {
					t.Errorf("carried after %v", took)
				}
				return e
			}
			first := carried(0)
			goesOn := func() {
				if err := first.trip(patience); err != nil {
					t.Fatal(err)
				}
			}
			want(goesOn, 0)
			for range 10 {
				w.short(1)
			}
			want(goesOn, 0)
			second := carried(1)
			want(goesOn, 0, 1)
			w.warm(first)
			second.Close()
			second.far.Close()
			want(goesOn, 0)
			w.warm(first)
			first.Close()
			first.far.Close()
			want(func() {})
			for node := range w.paths {
				if got := w.programs(node); got != asleep && got != scouting {
					t.Errorf("node%d has %s", node, got)
				}
			}
		})
	}
}

// A pod that has a connection over the overlay which never becomes known is asked for again and
// again. It is not to lose its programs and get them back all the time, and is watched on.
func TestNeverKnown(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	w := newWorld(t, "flannel", "full")
	w.untracked(0)
	w.start()
	e := w.connect().back()
	trip := func() {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	has := func() bool { return slices.Contains(w.having(0, "observe_pod"), w.link(0, 0)) }
	w.eventually("it is watched", trip, has)
	for began := time.Now(); time.Since(began) < 15*time.Second; trip() {
		if !has() {
			t.Fatalf("it is watched no more after %v", time.Since(began))
		}
	}
	if c := w.counts(0); c["fast-out"]+c["fast-in"] > 0 || c["untracked"] == 0 {
		t.Errorf("it became known: %v", c)
	}
	e.Close()
	w.eventually("it is not watched", func() {}, func() bool { return len(w.having(0, "observe_pod")) == 0 })
}

// Connections that stay on their node, or go elsewhere, are no reason to watch a pod.
func TestNear(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	w := newWorld(t, "flannel", "full")
	w.start()
	first := w.connect().back()
	w.warm(first)
	first.Close()
	var near net.Conn
	var listener net.Listener
	w.in("n0p1", func() (err error) {
		listener, err = net.Listen("tcp4", ":0")
		return err
	})
	defer listener.Close()
	w.in("n0p0", func() (err error) {
		near, err = net.DialTCP("tcp4", nil, &net.TCPAddr{IP: pod(0, 1).AsSlice(), Port: listener.Addr().(*net.TCPAddr).Port})
		return err
	})
	far, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	e := echo{near, far}.back()
	w.eventually("it is not watched", func() {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}, func() bool { return len(w.paths[0].Hooks()) == 0 })
}

// A node's many pods may take longer to attach programs to than the heart beats without: the
// fast path does not stop for that.
func TestBeatsOn(t *testing.T) {
	w := newWorld(t, "flannel", "full")
	far := w.ns("n0p1")
	defer far.Close()
	w.start()
	e := w.connect().back()
	w.warm(e)
	hooks := func() int { return len(w.paths[0].Hooks()) } // waits while programs are attached
	for pods, more := 0, 300; ; more = pods {
		w.in("n0", func() error {
			for range more {
				attrs := netlink.NewLinkAttrs()
				attrs.Name = fmt.Sprintf("many%d", pods)
				pods++
				if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far" + attrs.Name, PeerNamespace: netlink.NsFd(far)}); err != nil {
					return err
				}
			}
			return nil
		})
		w.paths[0].Sleep()
		w.eventually("all is off", func() {}, func() bool { return hooks() == 0 })
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
		w.eventually("all is on", w.paths[0].WatchAll, func() bool { return hooks() >= 2*pods })
		took := time.Since(began)
		stop.Store(true)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d pods took %v", pods, took)
		if n := w.counts(0)["lease-expired"] - before; n > 0 {
			t.Errorf("the heart did not beat for %d packets", n)
		}
		if took > fastpath.LeaseTime+time.Second || t.Failed() {
			return
		}
	}
}
