//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"net"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
)

// flowtable adds a flowtable at devices of node 0, which takes over each established connection that the node forwards, and a
// rule that drops packets that conntrack calls invalid, like that of kube-proxy. It returns a function that deletes both, or nil
// if the kernel has no flowtables.
func (w *world) flowtable(devices ...string) (end func()) {
	w.Helper()
	ns := w.ns("n0")
	defer ns.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		w.Fatal(err)
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "test"})
	conn.AddFlowtable(&nftables.Flowtable{Table: table, Name: "f", Devices: devices})
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
	inState := func(state uint32, does expr.Any) {
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, state), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
			does,
		}})
	}
	inState(expr.CtStateBitINVALID, &expr.Verdict{Kind: expr.VerdictDrop})
	inState(expr.CtStateBitESTABLISHED, &expr.FlowOffload{Name: "f"})
	if err := conn.Flush(); errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		w.Logf("this kernel has no flowtables; make kernels boots some that have: %v", err)
		return nil
	} else if err != nil {
		w.Fatal(err)
	}
	return func() { w.rules("n0", func(conn *nftables.Conn) { conn.DelTable(table) }) }
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
	return func() (n uint64) {
		w.rules("n0", func(conn *nftables.Conn) {
			rules, err := conn.GetRules(table, chain)
			if err != nil {
				w.Fatal(err)
			}
			n = rules[0].Exprs[4].(*expr.Counter).Packets
		})
		return n
	}
}

// TestFlowtableAtDevices checks that a device with a flowtable is skipped, and named.
func TestFlowtableAtDevices(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	pod := w.device("n0", "pod").Attrs().Name
	for device, why := range map[string]string{
		"flannel.1": "flannel.1: it has a flowtable (inet test f), which the fast path would bypass",
		"cni0":      "cni0: it has a flowtable (inet test f), which packets of the pods behind it would bypass",
		pod:         pod + ": it has a flowtable (inet test f), which the fast path would bypass",
	} {
		end := w.flowtable(device)
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

// TestConnectionInFlowtable checks that an accelerated connection that a flowtable takes over takes the slow path, and that its
// conntrack entry is left to the flowtable: it is not resynchronised. The flowtable is at none of the connection's devices, so no
// device is skipped.
func TestConnectionInFlowtable(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	end := w.flowtable("eth0")
	if end == nil {
		return
	}
	handshakes := w.handshakes(e)
	w.eventually("the connection is in the flowtable", func() { w.trip(e, 10) }, func() bool { return w.counts(0)["flowtable"] > 5 })
	if fast := w.roundTrips(e, 0, 100); fast > 0 {
		t.Errorf("of 200 packets %d took the fast path", fast)
	}
	w.eventually("the connection is idle", nil, func() bool {
		known, _, err := w.paths[0].Connections()
		return err == nil && known == 0
	})
	if n := handshakes(); n > 0 {
		t.Errorf("conntrack was resynchronised with a connection in a flowtable: %d packets", n)
	}
	w.trip(e, 10)
	end()
	w.accelerate(e)
}
