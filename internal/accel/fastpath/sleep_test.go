//go:build linux

package fastpath_test

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel/fastpath"
)

// programs are the kinds of programs that are attached on a node.
func (w *world) programs(node int) string {
	var kinds []string
	for _, h := range w.paths[node].Hooks() {
		kinds = append(kinds, h.Program)
	}
	slices.Sort(kinds)
	return fmt.Sprint(slices.Compact(kinds))
}

const asleep, awake = "[arrive leave]", "[arrive deliver land leave tunnel wire]"

// While no connection is worth it there are only the programs that see when one is.
func TestSleep(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	w := newWorld(t, "flannel", "full")
	w.start()
	want := func(programs string) {
		t.Helper()
		w.eventually("programs "+programs, func() {}, func() bool { return w.programs(0) == programs && w.programs(1) == programs })
	}
	want(asleep)
	for range 3 {
		w.short(0)
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

// Only pods that have a connection worth it have the program that sees what is delivered; the
// others get it when they have one, and lose it some time after the last.
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
						if !slices.Equal(w.having(node, "deliver"), links) {
							return false
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
			if got := w.having(0, "leave"); len(got) != 2 {
				t.Errorf("leave is at %v", got)
			}
			first.Close()
			first.far.Close()
			want(func() {})
			for node := range w.paths {
				if got := w.programs(node); got != asleep {
					t.Errorf("node%d has %s", node, got)
				}
			}
		})
	}
}

// A pod whose connections stay on their node, or go elsewhere, is asked for as well. It is not
// to lose its program and get it back all the time, and is watched on.
func TestNeverKnown(t *testing.T) {
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
	trip := func() {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	has := func() bool { return slices.Contains(w.having(0, "deliver"), w.link(0, 0)) }
	w.eventually("it is watched", trip, has)
	for began := time.Now(); time.Since(began) < 15*time.Second; trip() {
		if !has() {
			t.Fatalf("it is watched no more after %v", time.Since(began))
		}
	}
	other := w.connect().back()
	w.warm(other)
	other.Close()
	near.Close()
	w.eventually("it is not watched", func() {}, func() bool { return len(w.having(0, "deliver")) == 0 })
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
	pmtu := func(value string) {
		w.in("n0", func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward_use_pmtu", []byte(value), 0) })
		w.paths[0].Verify()
	}
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
		// All off, and on again.
		pmtu("1")
		w.eventually("all is off", func() {}, func() bool { return hooks() == 0 })
		before := w.counts(0)["dead"]
		ended := make(chan error, 1)
		var stop atomic.Bool
		began := time.Now()
		pmtu("0")
		go func() {
			for !stop.Load() {
				if err := e.trip(patience); err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
		w.eventually("all is on", func() {}, func() bool { return hooks() >= pods })
		took := time.Since(began)
		stop.Store(true)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d pods took %v", pods, took)
		if n := w.counts(0)["dead"] - before; n > 0 {
			t.Errorf("the heart did not beat for %d packets", n)
		}
		if took > fastpath.Life+time.Second || t.Failed() {
			return
		}
	}
}
