//go:build linux

package fastpath_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/spec"
)

// Offsets in struct __sk_buff (include/uapi/linux/bpf.h).
const (
	skbPacketType, skbMark, skbQueue, skbVLAN, skbPriority, skbTCIndex, skbTime, skbTimeType = 4, 8, 12, 20, 32, 44, 152, 180
)

// metadata has the properties of a packet, besides its bytes, that later hooks read.
type metadata struct {
	Priority, Mark, Queue, TCIndex, PacketType, VLAN, Realm, TimeType uint32
	// Time is the delivery time in units of 2⁵⁶ ns: 0, or the value that a test has set.
	Time uint64
}

// recordMetadata records the metadata of the packets to a TCP port that pass a device. head is the number of bytes of headers
// before TCP. Each call of take returns what was recorded since the last one.
func (w *world) recordMetadata(place string, at ebpf.AttachType, head int32, port uint16) (take func() map[metadata]uint64) {
	w.Helper()
	size := int16(binary.Size(metadata{}))
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: uint32(size), ValueSize: 8, MaxEntries: 256})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { seen.Close() })
	does := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(head+2, asm.Half),
		asm.JNE.Imm(asm.R0, int32(port), "out"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.FnGetRouteRealm.Call(),
		asm.StoreMem(asm.R10, -size+24, asm.R0, asm.Word),
	}
	for i, field := range []int16{skbPriority, skbMark, skbQueue, skbTCIndex, skbPacketType, skbVLAN} {
		does = append(does, asm.LoadMem(asm.R0, asm.R6, field, asm.Word), asm.StoreMem(asm.R10, -size+4*int16(i), asm.R0, asm.Word))
	}
	does = append(does,
		asm.LoadMem(asm.R0, asm.R6, skbTimeType, asm.Byte),
		asm.StoreMem(asm.R10, -size+28, asm.R0, asm.Word),
		asm.Mov.Imm(asm.R1, 0),
		asm.JEq.Imm(asm.R0, 0, "no delivery time"), // but perhaps a receive timestamp: any packet socket of the machine enables those
		asm.LoadMem(asm.R1, asm.R6, skbTime, asm.DWord),
		asm.RSh.Imm(asm.R1, 56),
		asm.StoreMem(asm.R10, -size+32, asm.R1, asm.DWord).WithSymbol("no delivery time"),
		asm.Mov.Imm(asm.R0, 0),
		asm.StoreMem(asm.R10, -size-8, asm.R0, asm.DWord),
	)
	pointers := []asm.Instruction{
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, int32(-size)),
		asm.LoadMapPtr(asm.R1, seen.FD()),
	}
	does = slices.Concat(does, pointers, asm.Instructions{
		asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, int32(-size-8)),
		asm.Mov.Imm(asm.R4, 1), // BPF_NOEXIST
		asm.FnMapUpdateElem.Call(),
	}, pointers, asm.Instructions{
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
	})
	w.atEth0(place, at, program(w.T, ebpf.SchedCLS, does...))
	return func() map[metadata]uint64 {
		all := make(map[metadata]uint64)
		var key metadata
		var n uint64
		for each := seen.Iterate(); each.Next(&key, &n); {
			all[key] = n
		}
		for key := range all {
			if err := seen.Delete(key); err != nil {
				w.Fatal(err)
			}
		}
		return all
	}
}

func (w *world) atEth0(place string, at ebpf.AttachType, p *ebpf.Program) {
	w.Helper()
	w.in(place, func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: eth0(), Program: p, Attach: at})
		if err == nil {
			w.Cleanup(func() { l.Close() })
		}
		return err
	})
}

// setField returns a program that sets a field of struct __sk_buff.
func (w *world) setField(field int16, value int32) *ebpf.Program {
	return program(w.T, ebpf.SchedCLS, asm.Mov.Imm(asm.R0, value), asm.StoreMem(asm.R1, field, asm.R0, asm.Word), asm.Mov.Imm(asm.R0, -1))
}

// setTime returns a program that sets the delivery time, in the units of metadata.Time.
func (w *world) setTime(time uint64) *ebpf.Program {
	return program(w.T, ebpf.SchedCLS, asm.LoadImm(asm.R2, int64(time<<56), asm.DWord), asm.Mov.Imm(asm.R3, 1), asm.FnSkbSetTstamp.Call(), asm.Mov.Imm(asm.R0, -1))
}

// classOfTest is the class 1:10 of a qdisc, as in skb->priority.
const classOfTest = 1<<16 | 0x10

// setPriority makes an nftables chain set the class of all packets, or of those that a device has received, until end is called.
func (w *world) setPriority(node string, hook *nftables.ChainHook, from string) (end func()) {
	w.Helper()
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "class"}
	chain := &nftables.Chain{Table: table, Name: "class", Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityMangle}
	w.rules(node, func(c *nftables.Conn) {
		c.AddTable(table)
		c.AddChain(chain)
		var does []expr.Any
		if from != "" {
			does = append(does, &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte(from), 0)})
		}
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(does,
			&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint32(nil, classOfTest)},
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: 1},
		)})
	})
	return func() { w.rules(node, func(c *nftables.Conn) { c.DelTable(table) }) }
}

// classify makes a variant of iptables set the class of the packets in a chain. It returns nil if the kernel does not
// support that variant.
func (w *world) classify(program, chain string) (end func()) {
	w.Helper()
	if !w.has(program) {
		return nil
	}
	run := func(verb string) {
		w.in("n0", func() error {
			out, err := exec.Command(program, "-w", "-t", "mangle", verb, chain, "-j", "CLASSIFY", "--set-class", "1:10").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	run("-A")
	return func() { run("-D") }
}

// realm gives the route to the other node a realm.
func (w *world) realm() (end func()) {
	w.Helper()
	set := func(realm int) {
		w.in("n0", func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_SCOPE)
			for _, r := range routes {
				r.Realm = realm
				err = errors.Join(err, netlink.RouteReplace(&r))
			}
			return err
		})
	}
	set(5)
	return func() { set(0) }
}

// metadataTest sets metadata on a node, beside a connection from node 0 to node 1.
type metadataTest struct {
	name string
	// set sets metadata until the returned function is called. It returns nil if this kernel cannot do that.
	set func(*world) (end func())
	// tos is the TOS that the client's socket sets.
	tos int
	// slow is the node on which the connection must take the slow path while the metadata is set; empty for none.
	slow string
	// unseenBy is set if programs on the slow path set metadata.
	unseenBy []string
	six      bool
	shape    string
	// world is the name of the network that the test shares with others, which set metadata in turn; empty for a network of its own. A
	// program at a device of the fast path must be there before, so these tests have their own.
	world string
}

func (tt metadataTest) String() string {
	version := map[bool]string{false: "IPv4", true: "IPv6"}[tt.six]
	return fmt.Sprintf("%s %s %s TOS %d", tt.name, cmp.Or(tt.shape, spec.ShapeFlannel), version, tt.tos)
}

func metadataTests() []metadataTest {
	at := func(node, device string, side ebpf.AttachType, p func(*world) *ebpf.Program) func(*world) func() {
		return func(w *world) func() { return w.attachTCX(node, w.device(node, device), side, p(w)) }
	}
	field := func(field int16, value int32) func(*world) *ebpf.Program {
		return func(w *world) *ebpf.Program { return w.setField(field, value) }
	}
	sysctl := func(w *world) func() {
		w.sysctl("n0", "net/ipv4/ip_forward_update_priority", "0")
		return func() { w.sysctl("n0", "net/ipv4/ip_forward_update_priority", "1") }
	}
	forward := func(node, from string) func(*world) func() {
		return func(w *world) func() { return w.setPriority(node, nftables.ChainHookForward, from) }
	}
	const in, out = ebpf.AttachTCXIngress, ebpf.AttachTCXEgress
	tcx := []string{v1alpha1.UnseenByTCX}
	const nothing, calico, rules, others, bridge = "nothing", "nothing Calico", "rules", "other settings", "programs at the bridge"
	return []metadataTest{
		{name: "nothing", world: nothing},
		{name: "nothing", six: true, world: nothing},
		{name: "nothing", shape: spec.ShapeCalico, world: calico},
		{name: "TOS", tos: 0x10, world: nothing},
		{name: "TOS", tos: 0x10, six: true, world: nothing},
		{name: "sending: nftables sets the class", set: forward("n0", ""), slow: "n0", world: rules},
		{name: "sending: nftables sets the class", set: forward("n0", ""), slow: "n0", shape: spec.ShapeCalico, world: calico},
		{name: "sending: nftables sets the class", set: forward("n0", ""), slow: "n0", six: true, world: rules},
		{name: "sending: nftables sets the class of the outer packet", slow: "n0", world: rules, set: func(w *world) func() {
			return w.setPriority("n0", nftables.ChainHookPostrouting, "")
		}},
		{name: "sending: iptables sets the class", slow: "n0", world: rules, set: func(w *world) func() { return w.classify("iptables-legacy", "FORWARD") }},
		{name: "sending: iptables sets the class of the outer packet", slow: "n0", world: rules, set: func(w *world) func() { return w.classify("iptables-legacy", "OUTPUT") }},
		{name: "sending: iptables sets the class", slow: "n0", six: true, world: rules, set: func(w *world) func() { return w.classify("ip6tables-legacy", "FORWARD") }},
		{name: "sending: forwarding keeps the priority", set: sysctl, world: others},
		{name: "sending: forwarding keeps the priority", set: sysctl, tos: 0x10, slow: "n0", world: others},
		{name: "sending: the route has a realm", set: (*world).realm, slow: "n0", world: others},
		{name: "sending: a program at the bridge sets the priority", world: bridge, unseenBy: tcx, set: at("n0", "cni0", in, field(skbPriority, 9))}, // ip_forward overwrites it
		{name: "sending: a program at the VXLAN device sets the priority", unseenBy: tcx, slow: "n0", set: at("n0", "flannel.1", out, field(skbPriority, 9))},
		{name: "sending: a program at the bridge sets tc_index", world: bridge, unseenBy: tcx, slow: "n0", set: at("n0", "cni0", in, field(skbTCIndex, 9))},
		{name: "sending: a program at the bridge sets the queue", world: bridge, unseenBy: tcx, set: at("n0", "cni0", in, field(skbQueue, 3))}, // the VXLAN device chooses again
		{name: "sending: a program at the VXLAN device sets the delivery time", unseenBy: tcx, slow: "n0", set: at("n0", "flannel.1", out, func(w *world) *ebpf.Program { return w.setTime(3) })},
		{name: "sending: a program at the pod's link sets the priority", set: at("n0", "pod", in, field(skbPriority, 9))},
		{name: "sending: a program at the pod's link sets the priority", set: at("n0", "pod", in, field(skbPriority, 9)), six: true},
		{name: "sending: a program at the pod's link sets tc_index", set: at("n0", "pod", in, field(skbTCIndex, 9))},
		{name: "sending: a program at the pod's link sets the queue", set: at("n0", "pod", in, field(skbQueue, 3))},
		{name: "sending: a program at the pod's link sets the delivery time", set: at("n0", "pod", in, func(w *world) *ebpf.Program { return w.setTime(3) })},
		{name: "sending: a program at the NIC sets the priority", slow: "n0", set: at("n0", "eth0", out, field(skbPriority, 9))},
		{name: "receiving: nftables sets the class", set: forward("n1", "flannel.1"), world: others},
		{name: "receiving: a program at the NIC sets the priority", set: at("n1", "eth0", in, field(skbPriority, 9))},
		{name: "receiving: a program at the NIC sets the priority", set: at("n1", "eth0", in, field(skbPriority, 9)), six: true},
		{name: "receiving: a program at the NIC sets tc_index", set: at("n1", "eth0", in, field(skbTCIndex, 9))},
		{name: "receiving: a program at the NIC sets the queue", set: at("n1", "eth0", in, field(skbQueue, 3))},
		{name: "receiving: a program at the VXLAN device sets tc_index", unseenBy: tcx, set: at("n1", "flannel.1", in, field(skbTCIndex, 9))},
		{name: "receiving: a program at the bridge sets tc_index", world: bridge, unseenBy: tcx, slow: "n1", set: at("n1", "cni0", out, field(skbTCIndex, 9))},
	}
}

// TestMetadata compares the metadata of packets, at the NIC that sends them and in the pod that receives them, with and
// without the fast path. If the slow path sets metadata that the fast path would not, the connection must stay on it.
func TestMetadata(t *testing.T) {
	t.Parallel()
	worlds := make(map[string][]metadataTest)
	for _, tt := range metadataTests() {
		name := cmp.Or(tt.world, tt.String())
		worlds[name] = append(worlds[name], tt)
	}
	for name, tests := range worlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			six := slices.ContainsFunc(tests, func(tt metadataTest) bool { return tt.six })
			w := newWorldOf(t, cmp.Or(tests[0].shape, spec.ShapeFlannel), spec.OffloadFull, six) // with IPv4 in any case
			var all []*metadataRun
			for _, tt := range tests {
				w.six = tt.six
				r := &metadataRun{tt: tt, world: w}
				if !r.prepare() {
					continue
				}
				if len(tests) > 1 {
					r.end()
				}
				all = append(all, r)
			}
			w.start(tests[0].unseenBy...)
			for _, r := range all {
				w.six = r.tt.six
				w.sub(r.tt.String(), func() {
					if len(tests) > 1 {
						r.end = r.begin()
					}
					r.check()
				})
			}
		})
	}
}

// metadataRun is a test with its connection. recorded is what packets have without the fast path, by place.
type metadataRun struct {
	*world
	tt        metadataTest
	e         echo
	end       func()
	recorders map[string]func() map[metadata]uint64
	recorded  map[string]map[metadata]uint64
}

// begin sets metadata until end is called. It returns nil if this kernel cannot do that.
func (r *metadataRun) begin() (end func()) {
	r.Helper()
	if r.tt.set == nil {
		return func() {}
	}
	return r.tt.set(r.world)
}

// prepare records metadata without the fast path. It reports whether this kernel can set it.
func (r *metadataRun) prepare() bool {
	r.Helper()
	r.e = r.connect().back()
	r.e.noKeepalive(r.T)
	r.setTOS(r.e, r.tt.tos)
	if r.end = r.begin(); r.end == nil {
		return false
	}
	port := uint16(r.e.RemoteAddr().(*net.TCPAddr).Port)
	ip := int32(20)
	if r.tt.six {
		ip = 40
	}
	r.recorders = map[string]func() map[metadata]uint64{
		"at the NIC": r.recordMetadata("n0", ebpf.AttachTCXEgress, 14+50+ip, port),
		"in the pod": r.recordMetadata("n1p0", ebpf.AttachTCXIngress, 14+ip, port),
	}
	r.trip(r.e, 100)
	r.recorded = make(map[string]map[metadata]uint64)
	for where, take := range r.recorders {
		if r.recorded[where] = take(); len(r.recorded[where]) == 0 {
			r.Fatalf("no packets %s", where)
		}
	}
	return true
}

// check uses the connection with the fast path.
func (r *metadataRun) check() {
	for _, take := range r.recorders {
		take() // its last acknowledgement, delayed until the metadata of another test was set
	}
	if r.tt.slow == "" {
		r.accelerate(r.e)
	} else {
		node := int(r.tt.slow[1] - '0')
		before := r.counts(node)
		r.eventually("packets take the slow path because it rewrites them", func() { r.trip(r.e, 10) }, func() bool {
			return r.counts(node)["rewritten"] >= before["rewritten"]+5
		})
	}
	for range 50 { // longer than a flow stays valid
		r.trip(r.e, 10)
		time.Sleep(20 * time.Millisecond)
	}
	for where, take := range r.recorders {
		for is, n := range take() {
			if r.recorded[where][is] == 0 {
				r.Errorf("%s, %d packets have %+v; without the fast path they have %+v", where, n, is, slices.Collect(maps.Keys(r.recorded[where])))
			}
		}
	}
	r.end()
	if r.tt.slow != "" {
		r.accelerate(r.e)
	}
}

// setTOS sets the TOS of the packets that both ends of a connection send.
func (w *world) setTOS(e echo, tos int) {
	w.Helper()
	for _, c := range []net.Conn{e.Conn, e.far} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			w.Fatal(err)
		}
		set := func(fd uintptr) {
			if w.six {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, tos)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, tos)
			}
		}
		if failed := raw.Control(set); failed != nil || err != nil {
			w.Fatal(failed, err)
		}
	}
}

// TestClassOfQueue checks that all packets that a netfilter rule assigns to a class of the NIC's qdisc are in that class, even if
// the rule comes while the connection is accelerated.
func TestClassOfQueue(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	const others = 1<<16 | 0x20
	w.in("n0", func() error {
		attrs := netlink.QdiscAttrs{LinkIndex: eth0(), Handle: classOfTest &^ 0xffff, Parent: netlink.HANDLE_ROOT}
		queue := netlink.NewHtb(attrs)
		queue.Defcls = others & 0xffff
		all, err := netlink.QdiscList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: eth0()}})
		for _, q := range all {
			if q.Attrs().Parent == netlink.HANDLE_ROOT {
				err = errors.Join(err, netlink.QdiscDel(q))
			}
		}
		err = errors.Join(err, netlink.QdiscAdd(queue))
		for _, class := range []uint32{classOfTest, others} {
			err = errors.Join(err, netlink.ClassAdd(netlink.NewHtbClass(
				netlink.ClassAttrs{LinkIndex: eth0(), Parent: attrs.Handle, Handle: class}, netlink.HtbClassAttrs{Rate: 1e9})))
		}
		return err
	})
	packets := func() (n uint32) {
		w.in("n0", func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			all, err := netlink.ClassList(l, netlink.HANDLE_NONE)
			for _, c := range all {
				if c.Attrs().Handle == classOfTest {
					n = c.Attrs().Statistics.Basic.Packets
				}
			}
			return err
		})
		return n
	}
	w.accelerate(e)
	rewritten := w.counts(0)["rewritten"]
	w.setPriority("n0", nftables.ChainHookForward, "")
	w.eventually("the rule takes effect", func() { w.trip(e, 1) }, func() bool { return w.counts(0)["rewritten"] > rewritten })
	before := packets()
	const trips = 2000
	for range trips / 10 {
		w.trip(e, 10)
		time.Sleep(5 * time.Millisecond) // the whole loop must outlast a flow's validity
	}
	if n := packets() - before; n < trips {
		t.Errorf("of %d packets %d were in their class", trips, n)
	}
}
