//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"net"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
)

var mustOffload = flag.Bool("flowtables", false, "fail if the kernel has no flowtables")

// Tables for a flowtable: one of the test's own, and that of Calico's nftables data plane.
var (
	ownTable    = nftables.Table{Family: nftables.TableFamilyINet, Name: "test"}
	calicoTable = nftables.Table{Family: nftables.TableFamilyIPv4, Name: "calico"}
)

// flowtable adds a flowtable at devices of node 0, a rule that adds each established connection that the node forwards to it, and
// one that drops packets that conntrack calls invalid, like that of kube-proxy. It returns functions that count the packets with
// which the kernel tried to add a connection, and that delete the table; end is nil if the kernel has no flowtables.
func (w *world) flowtable(in nftables.Table, devices ...string) (tried func() uint64, end func()) {
	w.Helper()
	ns := w.ns("n0")
	defer ns.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		w.Fatal(err)
	}
	table := conn.AddTable(&in)
	conn.AddFlowtable(&nftables.Flowtable{Table: table, Name: "f", Devices: devices})
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
	inState := func(state uint32, does ...expr.Any) {
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append([]expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, state), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		}, does...)})
	}
	inState(expr.CtStateBitESTABLISHED, &expr.Counter{}, &expr.FlowOffload{Name: "f"})
	inState(expr.CtStateBitINVALID, &expr.Verdict{Kind: expr.VerdictDrop})
	if err := conn.Flush(); !*mustOffload && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP)) {
		w.Logf("this kernel has no flowtables; make kernels boots some that have: %v", err)
		return nil, nil
	} else if err != nil {
		w.Fatal(err)
	}
	return w.packets(table, chain), func() { w.rules("n0", func(conn *nftables.Conn) { conn.DelTable(table) }) }
}

// packets returns a function that reads the counter of a chain's first rule, on node 0.
func (w *world) packets(table *nftables.Table, chain *nftables.Chain) (count func() uint64) {
	return func() (n uint64) {
		w.Helper()
		w.rules("n0", func(conn *nftables.Conn) {
			rules, err := conn.GetRules(table, chain)
			if err != nil {
				w.Fatal(err)
			}
			for _, e := range rules[0].Exprs {
				if c, is := e.(*expr.Counter); is {
					n = c.Packets
				}
			}
		})
		return n
	}
}

// inFlowtable reports whether a flowtable of node 0 has a connection.
func (w *world) inFlowtable(e echo) (has bool) {
	w.Helper()
	w.in("n0", func() error {
		entry, err := conntrack.Find(flowOf(e.Conn))
		has = entry != nil && entry.Offloaded()
		return err
	})
	return has
}

// handshakes counts the handshake packets with which the fast path of node 0 resynchronises conntrack.
func (w *world) handshakes(e echo) (count func() uint64) {
	w.Helper()
	table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "handshakes"}
	chain := &nftables.Chain{Table: table, Name: "count", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRaw}
	port := binary.BigEndian.AppendUint16(nil, uint16(e.LocalAddr().(*net.TCPAddr).Port))
	w.rules("n0", func(conn *nftables.Conn) {
		conn.AddTable(table)
		conn.AddChain(chain)
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: port},
			&expr.Counter{},
		}})
	})
	return w.packets(table, chain)
}

// TestFlowtableAtDevices checks that a device with a flowtable is skipped, and named.
func TestFlowtableAtDevices(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	pod := w.device("n0", "pod").Attrs().Name
	for device, why := range map[string]string{
		"flannel.1": "flannel.1: it has a flowtable (inet test f), which the fast path would bypass",
		"cni0":      "cni0: it has a flowtable (inet test f), which packets of the pods behind it would bypass",
		pod:         "links of pods: they have a flowtable (inet test f), which the fast path would bypass",
	} {
		_, end := w.flowtable(ownTable, device)
		if end == nil {
			return
		}
		w.eventually(device+" is skipped", func() { w.trip(e, 1) }, func() bool { return w.skips(0, why) })
		if fast := w.roundTrips(e, 0, 100); fast > 0 {
			t.Errorf("%s: of 200 packets %d took the fast path", device, fast)
		}
		end()
		w.eventually(device+" is no longer skipped", func() { w.trip(e, 1) }, func() bool { return !w.skips(0, why) })
		w.accelerate(e)
	}
}

// TestConnectionInFlowtable has a rule add an accelerated connection to a flowtable that is at the NIC alone, so no device is skipped.
// Linux before 7.2 takes the connection into it. Then all its packets take the slow path, and its conntrack entry is left to the
// flowtable: it is not resynchronised. Later kernels want the flowtable at both devices of the connection and do not take it: then
// it is accelerated as before.
func TestConnectionInFlowtable(t *testing.T) {
	t.Parallel()
	for _, shape := range []string{spec.ShapeFlannel, overlay.ShapeRouted} {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w, e := accelerated(t, shape, spec.OffloadFull)
			e.noKeepalive(t)
			tried, end := w.flowtable(ownTable, "eth0")
			if end == nil {
				return
			}
			handshakes := w.handshakes(e)
			w.eventually("the rule adds the connection", func() { w.trip(e, 10) }, func() bool { return tried() > 0 })
			took := w.inFlowtable(e)
			t.Logf("the kernel took the connection into the flowtable: %t", took)
			if took {
				w.leftToFlowtable(e, handshakes)
			} else {
				w.accelerate(e)
				if w.inFlowtable(e) {
					t.Error("the connection is accelerated, and in the flowtable")
				}
			}
			w.trip(e, 10)
			end()
			w.accelerate(e)
		})
	}
}

// leftToFlowtable checks that a connection that is in a flowtable takes the slow path, and that it has not been resynchronised by
// the time that its flow is forgotten.
func (w *world) leftToFlowtable(e echo, handshakes func() uint64) {
	w.Helper()
	w.eventually("packets are counted as those of a flowtable", func() { w.trip(e, 10) }, func() bool { return w.counts(0)["flowtable"] > 5 })
	if fast := w.roundTrips(e, 0, 100); fast > 0 {
		w.Errorf("of 200 packets %d took the fast path", fast)
	}
	w.forgotten(nil)
	if n := handshakes(); n > 0 {
		w.Errorf("conntrack was resynchronised with a connection in a flowtable: %d packets", n)
	}
}

// forgotten waits until node 0 knows no connection any more.
func (w *world) forgotten(step func()) {
	w.Helper()
	w.eventually("no connection is known", step, func() bool {
		known, _, err := w.paths[0].Connections()
		return err == nil && known == 0
	})
}

// TestFlowtableOfCalico has a flowtable as Calico's nftables data plane makes it: at the VXLAN device and at the links of all pods.
// The node skips these devices and names the flowtable. Accelerated connections to the other node and within the node move into it,
// as do new ones, and their conntrack entries are left to it while the agent forgets their flows. Without it they are accelerated again.
func TestFlowtableOfCalico(t *testing.T) {
	t.Parallel()
	for kind, local := range map[string]bool{"to the other node": false, "within the node": true} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeCalico, spec.OffloadFull)
			w.local = local
			w.start()
			e := w.connect().back()
			e.noKeepalive(t)
			w.accelerate(e)
			_, end := w.flowtable(calicoTable, "vxlan.calico", w.link(0, 0), w.link(0, 1))
			if end == nil {
				return
			}
			handshakes := w.handshakes(e)
			for _, why := range []string{
				"vxlan.calico: it has a flowtable (ip calico f), which the fast path would bypass",
				"links of pods: they have a flowtable (ip calico f), which the fast path would bypass",
			} {
				w.eventually("the flowtable is named", func() { w.trip(e, 1) }, func() bool { return w.skips(0, why) })
			}
			if n := w.paths[0].SkippedBy()["flowtable"]; n != 3 {
				t.Errorf("%d devices are skipped for the flowtable, want 3", n)
			}
			w.eventually("the connection is in the flowtable", func() { w.trip(e, 10) }, func() bool { return w.inFlowtable(e) })
			late := w.connect().back()
			w.eventually("a new connection is in the flowtable", func() { w.trip(late, 10) }, func() bool { return w.inFlowtable(late) })
			if fast := w.roundTrips(e, 0, 100) + w.roundTrips(late, 0, 100); fast > 0 {
				t.Errorf("of 400 packets %d took the fast path", fast)
			}
			w.forgotten(func() { w.trip(e, 10) })
			if n := handshakes(); n > 0 {
				t.Errorf("conntrack was resynchronised with a connection in a flowtable: %d packets", n)
			}
			if hooks := w.paths[0].Hooks(); len(hooks) > 0 {
				t.Errorf("programs are attached: %v", hooks)
			}
			end()
			w.accelerate(e)
			w.accelerate(late)
		})
	}
}
