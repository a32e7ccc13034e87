//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/grammar"
)

var flood = flag.Int("flood", 100_000, "how many new connections TestFlood makes")

// firstPacket returns the first packet of a new connection between the second pods of the nodes: a
// SYN, or a datagram.
func firstPacket(n int) []byte {
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

// TestFlood checks that a connection stays accelerated, without pauses, while another pod opens new
// connections as fast as it can. -flood 1000000 takes half a minute.
func TestFlood(t *testing.T) {
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
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
			if err := unix.Sendto(socket, firstPacket(n), 0, to); err != nil && !errors.Is(err, unix.ENOBUFS) {
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
	t.Logf("%d connections in %s: meanwhile %d round trips, %d left by the fast path, the longest took %s; at most %d flows; %v",
		*flood, time.Since(began), trips, fast, longest, most, now)
	if fast < trips*9/10 {
		t.Errorf("%d of %d round trips left by the fast path", fast, trips)
	}
	if longest > 5*time.Second { // a stalled machine causes one or two pauses by itself
		t.Errorf("a round trip took %s", longest)
	}
	if most > 100 || now["table-full"] > 0 {
		t.Errorf("%d flows, %d packets counted as table-full", most, now["table-full"])
	}
}

// table returns the map with this name of a node's fast path. It waits until a program that uses it is attached.
func (w *world) table(node, name string) (table *ebpf.Map) {
	w.Helper()
	w.eventually("a program of "+node+" has the map "+name, nil, func() bool {
		w.in(node, func() (err error) {
			table, err = attachedTable(name)
			return err
		})
		return table != nil
	})
	w.Cleanup(func() { table.Close() })
	return table
}

// attachedTable returns the map of that name that a program attached in this network namespace has, or nil.
func attachedTable(name string) (*ebpf.Map, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
			if errors.Is(err, unix.ENODEV) { // gone since
				continue
			}
			if err != nil {
				return nil, err
			}
			for _, p := range q.Programs {
				if table, err := tableOf(p.ID, name); table != nil || err != nil {
					return table, err
				}
			}
		}
	}
	return nil, nil
}

// tableOf returns a program's map of that name, or nil.
func tableOf(id ebpf.ProgramID, name string) (*ebpf.Map, error) {
	p, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, os.ErrNotExist) { // detached since
		return nil, nil
	}
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

// fill fills a map of a node's fast path, and returns the number of keys it added.
func (w *world) fill(node, table string) (n int) {
	w.Helper()
	m := w.table(node, table)
	if m.Type() == ebpf.Array {
		return w.take(m)
	}
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

// take takes all free entries of a table, given the map of their states, and returns how many.
func (w *world) take(states *ebpf.Map) (n int) {
	w.Helper()
	const taken = uint64(1) // ENTRY_TAKEN of bpf/fastpath/index.h: the agent leaves those alone
	for entry := range states.MaxEntries() {
		var state uint64
		err := states.Lookup(entry, &state)
		if err == nil && state == 0 {
			n++
			err = states.Put(entry, taken)
		}
		if err != nil {
			w.Fatal(err)
		}
	}
	return n
}

// entries counts the entries of a node's table that are not free, given the map of their states.
func (w *world) entries(node, states string) func() int {
	w.Helper()
	m := w.table(node, states)
	return func() (n int) {
		w.Helper()
		for entry := range m.MaxEntries() {
			var state uint64
			if err := m.Lookup(entry, &state); err != nil {
				w.Fatal(err)
			}
			if state != 0 {
				n++
			}
		}
		return n
	}
}

// TestFullFlowTable checks that a connection without room in the flow table takes the slow path,
// counted as table-full, while a known one stays accelerated, and that the first is accelerated
// once idle flows have been deleted.
func TestFullFlowTable(t *testing.T) {
	t.Parallel()
	w, known := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	filled := w.fill("n0", "flows")
	t.Logf("%d flows fill the table", filled)
	began := time.Now()
	late := w.connect().back()
	trip := func(e echo) {
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("packets are counted as table-full", func() { trip(late) }, func() bool { return w.counts(0)["table-full"] > 10 })
	w.accelerate(known)
	w.eventually("flows are deleted", func() { trip(known) }, func() bool {
		all, _, err := w.paths[0].Connections()
		return err == nil && all < filled
	})
	took := time.Since(began)
	t.Logf("flows were deleted after %s", took)
	// A flow that was never validated is noted by one sweep and deleted by the next.
	if took > 2*fastpath.SweepInterval+10*time.Second {
		t.Errorf("flows were deleted after %s", took)
	}
	w.eventually("both connections are accelerated", func() { trip(late); trip(known) }, func() bool { return w.fastNow(0) == 2 })
}

// TestFullTables checks that when a map is full, a connection that is already in it stays
// accelerated, and a new one takes the slow path.
func TestFullTables(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		table string
		// front and pod determine the new connection.
		front front
		pod   int
		// why is the reason under which its packets are counted; empty for none.
		why string
	}{
		{"reverse_nat", byService, 0, "table-full"},
		{"pod_link_states", direct, 1, "table-full"},
		{"link_macs", direct, 1, "mismatch"},
		{"watched_pods", direct, 1, ""},
	} {
		t.Run(tt.table, func(t *testing.T) {
			t.Parallel()
			w, known := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
			t.Logf("%d keys fill the map", w.fill("n0", tt.table))
			late := w.connectOf(tt.pod, tt.front).back()
			began, before := time.Now(), w.counts(0)[tt.why]
			w.eventually("packets are inspected", func() { w.trip(late, 10); w.trip(known, 10) }, func() bool {
				return time.Since(began) > within && (tt.why == "" || w.counts(0)[tt.why] > before)
			})
			w.eventually("one connection is accelerated", func() { w.trip(late, 10); w.trip(known, 10) }, func() bool {
				fast := w.fastNow(0)
				if fast > 1 {
					t.Fatalf("%d connections are accelerated, want 1", fast)
				}
				return fast == 1
			})
			if err := w.paths[0].Problem(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestManyVXLANDevices checks that connections stay accelerated, and other VXLAN devices are
// skipped, on a node with more VXLAN devices than the fast path supports.
func TestManyVXLANDevices(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	nic := w.device("n0", "eth0").Attrs().Index
	w.in("n0", func() (err error) {
		for n := range 20 {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.Flags = fmt.Sprintf("tunnel%d", n), net.FlagUp
			err = errors.Join(err, netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1000 + n, SrcAddr: net.IPv4(198, 18, 0, 1).To4(), VtepDevIndex: nic, Port: 8472}))
		}
		return err
	})
	w.eventually("some devices are skipped", func() { w.trip(e, 1) }, func() bool {
		return w.skips(0, ": the fast path supports 16 VXLAN devices, and there are more")
	})
	w.accelerate(e)
	if err := w.paths[0].Problem(); err != nil {
		t.Error(err)
	}
}
