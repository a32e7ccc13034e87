//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
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
	if most > 100 || now["table-full"] > 0 {
		t.Errorf("%d connections were known, %d found no room", most, now["table-full"])
	}
}

// table is one of those of a node's fast path.
func (w *world) table(node, name string) (table *ebpf.Map) {
	w.Helper()
	w.in(node, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
				if err != nil {
					return err
				}
				for _, p := range q.Programs {
					if table, err = tableOf(p.ID, name); table != nil || err != nil {
						return err
					}
				}
			}
		}
		return fmt.Errorf("no program has a table %s", name)
	})
	w.Cleanup(func() { table.Close() })
	return table
}

// tableOf is a program's table of that name, or nil.
func tableOf(id ebpf.ProgramID, name string) (*ebpf.Map, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, err
		}
		if about, err := m.Info(); err == nil && about.Name == name {
			return m, nil
		}
		m.Close()
	}
	return nil, nil
}

// fill has a table of a node's fast path have no room, and tells how many keys it took.
func (w *world) fill(node, table string) (n int) {
	w.Helper()
	m := w.table(node, table)
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	for ; ; n++ {
		binary.NativeEndian.PutUint64(key, rand.Uint64())
		if err := m.Put(key, value); errors.Is(err, unix.E2BIG) {
			return n
		} else if err != nil {
			w.Fatal(err)
		}
	}
}

// TestFull has a connection that finds no room go the slow way, and say why, while one
// that is known stays; and has it take the fast path when those that are idle are gone.
func TestFull(t *testing.T) {
	w, known := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	filled := w.fill("n0", "flows")
	t.Logf("%d connections fill it", filled)
	began := time.Now()
	late := w.connect().back()
	trip := func(e echo) {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("there is no room", func() { trip(late) }, func() bool { return w.counts(0)["table-full"] > 10 })
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

// TestExhausted has a connection be carried that found room in the tables of a node, and one that
// does not go the slow way, when one of them is full.
func TestExhausted(t *testing.T) {
	for _, tt := range []struct {
		table string
		// front stands in front of the server of the connection that comes too late, which is of
		// this pod.
		front front
		pod   int
		// why its packets are counted, if they are.
		why string
	}{
		{"reverse_nat", byService, 0, "table-full"},
		{"pod_link_index", direct, 1, "table-full"},
		{"link_macs", direct, 1, "mismatch"},
		{"watched", direct, 1, ""},
	} {
		t.Run(tt.table, func(t *testing.T) {
			w, known := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
			t.Logf("%d keys fill it", w.fill("n0", tt.table))
			late := w.connectOf(tt.pod, tt.front).back()
			began, before := time.Now(), w.counts(0)[tt.why]
			w.eventually("it is looked at", func() { w.trip(late, 10); w.trip(known, 10) }, func() bool {
				return time.Since(began) > within && (tt.why == "" || w.counts(0)[tt.why] > before)
			})
			if _, fast, err := w.paths[0].Connections(); fast != 1 || err != nil {
				t.Errorf("%d connections are carried, want 1: %v", fast, err)
			}
			if err := w.paths[0].Problem(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestManyTunnels has connections be carried, and others' VXLAN devices be left alone, on a node
// that has more of them than there is room for.
func TestManyTunnels(t *testing.T) {
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	nic := w.device("n0", "eth0").Attrs().Index
	w.in("n0", func() (err error) {
		for n := range 20 {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.Flags = fmt.Sprintf("tunnel%d", n), net.FlagUp
			err = errors.Join(err, netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1000 + n, SrcAddr: net.IPv4(198, 18, 0, 1).To4(), VtepDevIndex: nic, Port: 8472}))
		}
		return err
	})
	w.eventually("some are left alone", func() { w.trip(e, 1) }, func() bool {
		return w.refuses(0, ": the fast path supports 16 VXLAN devices, and there are more")
	})
	w.warm(e)
	if err := w.paths[0].Problem(); err != nil {
		t.Error(err)
	}
}
