//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/grammar"
)

var flood = flag.Int("flood", 100_000, "how many new connections TestFlood makes")

// beginning is a packet that begins a connection between the second pods of the
// nodes that there was none of: a SYN, or a datagram.
func beginning(n int) []byte {
	b := make([]byte, 40)
	b[0], b[8] = 0x45, 64
	from, to := pod(0, 1).As4(), pod(1, 1).As4()
	copy(b[12:], from[:])
	copy(b[16:], to[:])
	binary.BigEndian.PutUint16(b[20:], uint16(1024+n%60_000))
	binary.BigEndian.PutUint16(b[22:], uint16(1024+n/60_000))
	b[9] = unix.IPPROTO_TCP
	b[32], b[33] = 5<<4, 0x02
	at, pseudo := 36, uint32(unix.IPPROTO_TCP+20)
	if n%2 == 0 {
		b = b[:28]
		b[9], b[25] = unix.IPPROTO_UDP, 8
		at, pseudo = 26, unix.IPPROTO_UDP+8
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[at:], ^grammar.Sum(pseudo+uint32(grammar.Sum(0, b[12:20])), b[20:]))
	return b
}

// TestFlood has a connection stay on the fast path, and stop for no time, while another pod
// begins new ones as fast as it can: they take nothing from it. -flood 1000000 takes half a
// minute.
func TestFlood(t *testing.T) {
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	socket := -1
	w.in("n0p1", func() (err error) {
		socket, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	t.Cleanup(func() { unix.Close(socket) })
	var over atomic.Bool
	go func() {
		defer over.Store(true)
		to := &unix.SockaddrInet4{Addr: pod(1, 1).As4()}
		for n := range *flood {
			if err := unix.Sendto(socket, beginning(n), 0, to); err != nil && !errors.Is(err, unix.ENOBUFS) {
				t.Errorf("connection %d: %v", n, err)
				return
			}
		}
	}()
	before, began := w.counts(0), time.Now()
	var trips uint64
	var longest time.Duration
	most := 0
	for !over.Load() {
		sent := time.Now()
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
		trips++
		longest = max(longest, time.Since(sent))
		if trips%1000 == 0 {
			known, _, err := w.paths[0].Connections()
			if err != nil {
				t.Fatal(err)
			}
			most = max(most, known)
		}
	}
	now := w.counts(0)
	fast := now["fast-out"] - before["fast-out"]
	t.Logf("%d connections in %s: meanwhile %d round trips, of which %d set out by the fast path, the longest %s; %d connections were known at most; %v",
		*flood, time.Since(began), trips, fast, longest, most, now)
	if fast < trips*9/10 {
		t.Errorf("%d of %d round trips set out by the fast path", fast, trips)
	}
	if longest > time.Second {
		t.Errorf("a round trip took %s", longest)
	}
	if most > 100 || now["full"] > 0 {
		t.Errorf("%d connections were known, %d found no room", most, now["full"])
	}
}

// fill has a node's table of connections have no room, and tells how many it took.
func (w *world) fill(node string) (n int) {
	w.Helper()
	w.in(node, func() error {
		l, err := netlink.LinkByName("flannel.1")
		if err != nil {
			return err
		}
		q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return err
		}
		program, err := ebpf.NewProgramFromID(q.Programs[0].ID)
		if err != nil {
			return err
		}
		defer program.Close()
		info, err := program.Info()
		if err != nil {
			return err
		}
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			if err != nil {
				return err
			}
			defer m.Close()
			about, err := m.Info()
			if err != nil {
				return err
			}
			if about.Name != "flows" {
				continue
			}
			key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
			for ; ; n++ {
				binary.NativeEndian.PutUint64(key, rand.Uint64())
				if err := m.Put(key, value); errors.Is(err, unix.E2BIG) {
					return nil
				} else if err != nil {
					return err
				}
			}
		}
		return errors.New("the program knows no connections")
	})
	return n
}

// TestFull has a connection that finds no room go the slow way, and say why, while one
// that is known stays; and has it take the fast path when those that are idle are gone.
func TestFull(t *testing.T) {
	w, known := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	filled := w.fill("n0")
	t.Logf("%d connections fill it", filled)
	began := time.Now()
	late := w.connect().back()
	trip := func(e echo) {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("there is no room", func() { trip(late) }, func() bool { return w.counts(0)["full"] > 10 })
	w.warm(known)
	connections := func() (all, fast int) {
		all, fast, err := w.paths[0].Connections()
		if err != nil {
			t.Fatal(err)
		}
		return all, fast
	}
	w.eventually("there is room again", func() { trip(known) }, func() bool { all, _ := connections(); return all < filled })
	took := time.Since(began)
	t.Logf("there was room after %s", took)
	// What was never seen to get through is noted at one look and forgotten at the next.
	if took > 2*fastpath.Look+2*time.Second {
		t.Errorf("there was room after %s", took)
	}
	w.eventually("both are on the fast path", func() { trip(late); trip(known) }, func() bool { _, fast := connections(); return fast == 2 })
}
