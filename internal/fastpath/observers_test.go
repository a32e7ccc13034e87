//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
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
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
)

// noticed is the longest time after which the fast path notices a tcx program at one of its devices. It inspects the devices
// twice a second.
const noticed = 10 * time.Second // even on a machine that stalls: only the inspection finds the program

// device returns a device of a node: by its name, or the link of its first pod for "pod".
func (w *world) device(node, name string) (found netlink.Link) {
	w.Helper()
	index := 0
	if name == "pod" {
		w.in(node+"p0", func() error {
			l, err := netlink.LinkByName("eth0")
			if err == nil {
				index = l.Attrs().ParentIndex
			}
			return err
		})
	}
	w.in(node, func() (err error) {
		if index != 0 {
			found, err = netlink.LinkByIndex(index)
		} else {
			found, err = netlink.LinkByName(name)
		}
		return err
	})
	return found
}

// observe attaches something that counts the packets it sees to a device of a node. It returns the
// count, if there is one, and a function that detaches it.
type observe func(w *world, node string, l netlink.Link) (count func() uint64, end func())

func programOfTCX(at ebpf.AttachType) observe {
	return func(w *world, node string, l netlink.Link) (func() uint64, func()) {
		seen, counter := counting(w.T, 1, asm.Mov.Imm(asm.R2, 0))
		return counted(w, seen), w.attachTCX(node, l, at, counter)
	}
}

func (w *world) attachTCX(node string, l netlink.Link, at ebpf.AttachType, program *ebpf.Program) (end func()) {
	w.Helper()
	var attached link.Link
	w.in(node, func() (err error) {
		attached, err = link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: program, Attach: at})
		return err
	})
	w.Cleanup(func() { attached.Close() })
	return func() { attached.Close() }
}

func counted(w *world, seen *ebpf.Map) func() uint64 {
	return func() (n uint64) {
		if err := seen.Lookup(uint32(0), &n); err != nil {
			w.Fatal(err)
		}
		return n
	}
}

func filterOfTC(parent uint32) observe {
	return func(w *world, node string, l netlink.Link) (func() uint64, func()) {
		seen, counter := counting(w.T, 1, asm.Mov.Imm(asm.R2, 0))
		return counted(w, seen), w.attachTC(node, l, parent, counter)
	}
}

func (w *world) attachTC(node string, l netlink.Link, parent uint32, program *ebpf.Program) (end func()) {
	w.Helper()
	index := l.Attrs().Index
	clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 7},
		Fd:          program.FD(), Name: "test", DirectAction: true,
	}
	w.in(node, func() error {
		if err := netlink.QdiscAdd(clsact); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		return netlink.FilterAdd(filter)
	})
	return func() { w.in(node, func() error { return netlink.FilterDel(filter) }) }
}

func chainOfNftables(family nftables.TableFamily, hook *nftables.ChainHook) observe {
	return func(w *world, node string, l netlink.Link) (func() uint64, func()) {
		table := &nftables.Table{Family: family, Name: "test"}
		chain := &nftables.Chain{Table: table, Name: "count", Type: nftables.ChainTypeFilter, Hooknum: hook,
			Priority: nftables.ChainPriorityFilter, Device: l.Attrs().Name}
		w.rules(node, func(conn *nftables.Conn) {
			conn.AddTable(table)
			conn.AddChain(chain)
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
		})
		return func() (n uint64) {
				w.rules(node, func(conn *nftables.Conn) {
					rules, err := conn.GetRules(table, chain)
					if err != nil {
						w.Fatal(err)
					}
					n = rules[0].Exprs[0].(*expr.Counter).Packets
				})
				return n
			}, func() {
				w.rules(node, func(conn *nftables.Conn) { conn.DelTable(table) })
			}
	}
}

func queue(w *world, node string, l netlink.Link) (func() uint64, func()) {
	q := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
		Rate: 20e6 / 8, Buffer: 100000, Limit: 400000}
	w.in(node, func() error { return netlink.QdiscAdd(q) })
	return func() (n uint64) {
			w.in(node, func() error {
				all, err := netlink.QdiscList(l)
				for _, q := range all {
					if q.Type() == "tbf" {
						n = uint64(q.Attrs().Statistics.Basic.Packets)
					}
				}
				return err
			})
			return n
		}, func() {
			w.in(node, func() error { return netlink.QdiscDel(q) })
		}
}

func xdp(w *world, node string, l netlink.Link) (func() uint64, func()) {
	var attached link.Link
	w.in(node, func() (err error) {
		attached, err = link.AttachXDP(link.XDPOptions{Interface: l.Attrs().Index, Flags: link.XDPGenericMode,
			Program: program(w.T, ebpf.XDP, asm.Mov.Imm(asm.R0, 2))}) // XDP_PASS
		return err
	})
	w.Cleanup(func() { attached.Close() })
	return nil, func() { attached.Close() }
}

var (
	tcxIn, tcxOut       = programOfTCX(ebpf.AttachTCXIngress), programOfTCX(ebpf.AttachTCXEgress)
	tcIn, tcOut         = filterOfTC(netlink.HANDLE_MIN_INGRESS), filterOfTC(netlink.HANDLE_MIN_EGRESS)
	netdevIn, netdevOut = chainOfNftables(nftables.TableFamilyNetdev, nftables.ChainHookIngress), chainOfNftables(nftables.TableFamilyNetdev, netdevEgress)
	inetIn              = chainOfNftables(nftables.TableFamilyINet, inetIngress)
	netdevEgress        = nftables.ChainHookRef(unix.NF_NETDEV_EGRESS)
	inetIngress         = nftables.ChainHookRef(5) // NF_INET_INGRESS
)

// skips reports whether a node skips something for this reason.
func (w *world) skips(node int, why string) bool {
	return slices.ContainsFunc(w.paths[node].Skipped(), func(r string) bool { return strings.Contains(r, why) })
}

// roundTrips makes round trips, and returns how many packets took the fast path of a node
// meanwhile.
func (w *world) roundTrips(e echo, node, n int) (fast uint64) {
	w.Helper()
	before := w.counts(node)
	for range n {
		if err := e.trip(patience); err != nil {
			w.Fatal(err)
		}
	}
	after := w.counts(node)
	return after["fast-out"] + after["fast-in"] - before["fast-out"] - before["fast-in"]
}

// TestObservers attaches an observer, which sees or delays packets on the slow path, to a device while a connection is
// accelerated. The observer must see all packets, and the device must be skipped, with a reason, as long as the observer is
// there.
func TestObservers(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w, e := accelerated(t, shape, spec.OffloadFull)
			type place struct {
				name, device string
				observe
				why string
			}
			tunnel := map[string]string{spec.ShapeFlannel: "flannel.1", spec.ShapeCalico: "vxlan.calico"}[shape]
			places := []place{
				{"qdisc of the pod's link", "pod", queue, ": it has a queue (tbf), which the fast path would bypass"},
				{"tcx egress of the pod's link", "pod", tcxOut, ": it has a tcx program at its egress ("},
			}
			if shape == overlay.ShapeRouted {
				places = append(places,
					place{"tc ingress of the NIC", "eth0", tcIn, "eth0: it has tc filters at its ingress, which the fast path would bypass"},
					place{"nftables ingress of the NIC", "eth0", netdevIn, "eth0: it has an nftables chain at its ingress (netdev test count), which the fast path would bypass"},
					place{"nftables egress of the NIC", "eth0", netdevOut, "eth0: it has an nftables chain at its egress (netdev test count), which the fast path would bypass"},
				)
			} else {
				places = append(places,
					place{"qdisc of the VXLAN device", tunnel, queue, tunnel + ": it has a queue (tbf), which the fast path would bypass"},
					place{"tcx ingress of the VXLAN device", tunnel, tcxIn, tunnel + ": it has a tcx program at its ingress ("},
					place{"tcx egress of the VXLAN device", tunnel, tcxOut, tunnel + ": it has a tcx program at its egress ("},
					place{"nftables egress of the NIC", "eth0", netdevOut, tunnel + ": its NIC eth0 has an nftables chain at its egress (netdev test count), which the fast path would bypass"},
				)
			}
			if shape == spec.ShapeFlannel {
				const behind = ", which packets of the pods behind it would bypass"
				places = append(places,
					place{"tc ingress of the VXLAN device", tunnel, tcIn, tunnel + ": it has tc filters at its ingress, which the fast path would bypass"},
					place{"tc egress of the VXLAN device", tunnel, tcOut, tunnel + ": it has tc filters at its egress, which the fast path would bypass"},
					place{"nftables ingress of the VXLAN device", tunnel, netdevIn, tunnel + ": it has an nftables chain at its ingress (netdev test count), which the fast path would bypass"},
					place{"nftables inet ingress of the VXLAN device", tunnel, inetIn, tunnel + ": it has an nftables chain at its ingress (inet test count), which the fast path would bypass"},
					place{"nftables egress of the VXLAN device", tunnel, netdevOut, tunnel + ": it has an nftables chain at its egress (netdev test count), which the fast path would bypass"},
					place{"XDP of the VXLAN device", tunnel, xdp, tunnel + ": it has an XDP program, which the fast path would bypass"},
					place{"qdisc of the bridge", "cni0", queue, "cni0: it has a queue (tbf)" + behind},
					place{"tcx ingress of the bridge", "cni0", tcxIn, "cni0: it has a tcx program at its ingress ("},
					place{"tcx egress of the bridge", "cni0", tcxOut, "cni0: it has a tcx program at its egress ("},
					place{"tc ingress of the bridge", "cni0", tcIn, "cni0: it has tc filters at its ingress" + behind},
					place{"tc egress of the bridge", "cni0", tcOut, "cni0: it has tc filters at its egress" + behind},
					place{"nftables ingress of the bridge", "cni0", netdevIn, "cni0: it has an nftables chain at its ingress (netdev test count)" + behind},
					place{"nftables egress of the bridge", "cni0", netdevOut, "cni0: it has an nftables chain at its egress (netdev test count)" + behind},
					place{"XDP of the bridge", "cni0", xdp, "cni0: it has an XDP program" + behind},
					place{"tc ingress of the pod's link", "pod", tcIn, ": it has tc filters at its ingress, which the fast path would bypass"},
					place{"tc egress of the pod's link", "pod", tcOut, ": it has tc filters at its egress, which the fast path would bypass"},
					place{"nftables ingress of the pod's link", "pod", netdevIn, ": it has an nftables chain at its ingress (netdev test count), which the fast path would bypass"},
					place{"nftables egress of the pod's link", "pod", netdevOut, ": it has an nftables chain at its egress (netdev test count), which the fast path would bypass"},
				)
			}
			for _, p := range places {
				count, end := p.observe(w, "n0", w.device("n0", p.device))
				came := time.Now()
				w.eventually(p.name+": the device is skipped", func() { _ = e.trip(patience) }, func() bool { return w.skips(0, p.why) })
				if took := time.Since(came); took > noticed {
					t.Errorf("%s: the device was skipped after %s", p.name, took)
				}
				before := uint64(0)
				if count != nil {
					before = count()
				}
				if fast := w.roundTrips(e, 0, 100); fast > 0 {
					t.Errorf("%s: of 200 packets %d took the fast path", p.name, fast)
				}
				if count != nil && count()-before < 100 {
					t.Errorf("%s: of 100 packets the observer saw %d", p.name, count()-before)
				}
				// By then the connection has been sampled, and the agent has been asked to attach
				// programs again.
				sampled := time.Now().Add(300 * time.Millisecond)
				w.eventually("the connection is sampled", func() { _ = e.trip(patience) }, func() bool { return time.Now().After(sampled) })
				end()
				went := time.Now()
				w.eventually(p.name+": the device is no longer skipped", func() { _ = e.trip(patience) }, func() bool { return !w.skips(0, p.why) })
				if took := time.Since(went); took > noticed {
					t.Errorf("%s: the device was skipped for %s after the observer had gone", p.name, took)
				}
				w.accelerate(e)
			}
		})
	}
}

// TestNICObservers checks that the kernel decapsulates if the NIC's ingress has an observer that
// decap_nic would bypass.
func TestNICObservers(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	for _, p := range []struct {
		observe
		why string
	}{
		{tcIn, "eth0: it has tc filters at its ingress, which the fast path would bypass: the kernel decapsulates its packets"},
		{netdevIn, "eth0: it has an nftables chain at its ingress (netdev test count), which the fast path would bypass: the kernel decapsulates its packets"},
	} {
		count, end := p.observe(w, "n1", w.device("n1", "eth0"))
		w.eventually("the device is skipped", func() { _ = e.trip(patience) }, func() bool { return w.skips(1, p.why) })
		w.accelerate(e)
		before := count()
		if fast := w.roundTrips(e, 1, 100); fast < 180 {
			t.Errorf("of 200 packets %d took the fast path", fast)
		}
		if n := count() - before; n < 100 {
			t.Errorf("%s: the observer saw %d of 100 packets", p.why, n)
		}
		end()
		w.accelerate(e)
	}
}

// TestNodeWideObservers checks that no packet takes the fast path on a node with a setting that
// needs to see all packets.
func TestNodeWideObservers(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	sysctl := func(key string) (begin, end func()) {
		set := func(value string) func() {
			return func() { w.in("n0", func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) }) }
		}
		return set("1"), set("0")
	}
	policy := &netlink.XfrmPolicy{
		Src: &net.IPNet{IP: net.IPv4(192, 0, 2, 0).To4(), Mask: net.CIDRMask(24, 32)}, Dst: &net.IPNet{IP: net.IPv4(198, 51, 100, 0).To4(), Mask: net.CIDRMask(24, 32)},
		Dir: netlink.XFRM_DIR_OUT, Action: netlink.XFRM_POLICY_BLOCK,
	}
	account, unaccount := sysctl("net/netfilter/nf_conntrack_acct")
	perPath, perDevice := sysctl("net/ipv4/ip_forward_use_pmtu")
	for _, tt := range []struct {
		why        string
		begin, end func()
	}{
		{"all devices: net.netfilter.nf_conntrack_acct is set", account, unaccount},
		{"all devices: net.ipv4.ip_forward_use_pmtu is set", perPath, perDevice},
		{"all devices: there are IPsec policies",
			func() { w.in("n0", func() error { return netlink.XfrmPolicyAdd(policy) }) },
			func() { w.in("n0", func() error { return netlink.XfrmPolicyDel(policy) }) }},
	} {
		tt.begin()
		came := time.Now()
		w.eventually("the device is skipped", func() { _ = e.trip(patience) }, func() bool { return w.skips(0, tt.why) })
		if took := time.Since(came); took > noticed {
			t.Errorf("%s: noticed after %s", tt.why, took)
		}
		if fast := w.roundTrips(e, 0, 100); fast > 0 {
			t.Errorf("%s: of 200 packets %d took the fast path", tt.why, fast)
		}
		tt.end()
		w.accelerate(e)
	}
}

// TestUnseenBy checks that packets bypass the kinds of observers in unseenBy, and no others.
func TestUnseenBy(t *testing.T) {
	t.Parallel()
	type kind struct {
		name, why string
		begin     func(w *world)
	}
	at := func(device string, o observe) func(w *world) {
		return func(w *world) { o(w, "n0", w.device("n0", device)) }
	}
	kinds := []kind{
		{v1alpha1.UnseenByTCX, "cni0: it has a tcx program", at("cni0", tcxIn)},
		{v1alpha1.UnseenByTC, "flannel.1: it has tc filters", at("flannel.1", tcOut)},
		{v1alpha1.UnseenByQueue, "flannel.1: it has a queue", at("flannel.1", queue)},
		{v1alpha1.UnseenByNetdev, "flannel.1: its NIC eth0 has an nftables chain", at("eth0", netdevOut)},
		{v1alpha1.UnseenByAccounting, "all devices: net.netfilter.nf_conntrack_acct is set", func(w *world) {
			w.in("n0", func() error { return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_acct", []byte("1"), 0) })
		}},
	}
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	var all []string
	for _, k := range kinds {
		k.begin(w)
		all = append(all, k.name)
	}
	for _, k := range kinds {
		w.startOn(0, slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == k.name })...)
		if !w.skips(0, k.why) {
			t.Errorf("with all kinds but %s in unseenBy, skipped are %q", k.name, w.paths[0].Skipped())
		}
		w.stop(0)
	}
	w.start(all...)
	w.accelerate(w.connect().back())
}

// TestTCXProgramAttachedBehind checks that a tcx program that is attached after one of ours soon
// sees all packets. Programs ahead of ours see them anyway.
func TestTCXProgramAttachedBehind(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	for _, at := range []struct{ node, device string }{{"n0", "pod"}, {"n1", "eth0"}} {
		node := int(at.node[1] - '0')
		count, _ := tcxIn(w, at.node, w.device(at.node, at.device))
		came := time.Now()
		w.eventually("the program sees all packets", nil, func() bool {
			before := count()
			return w.roundTrips(e, node, 50) > 90 && count()-before >= 50
		})
		if took := time.Since(came); took > noticed {
			t.Errorf("%s: the program saw all packets after %s", at.device, took)
		}
		if n := w.paths[node].Repaired(); n > 0 {
			t.Errorf("%d programs count as repaired", n)
		}
	}
}

// TestObserversNotBypassed checks that observers in a pod, and at the hooks of a node that the fast
// path does not bypass, see all packets of an accelerated connection.
func TestObserversNotBypassed(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	for _, tt := range []struct {
		place, device, name string
		observe
	}{
		{"n0p0", "eth0", "tcx in", tcxIn},
		{"n0p0", "eth0", "tcx out", tcxOut},
		{"n0p0", "eth0", "tc in", tcIn},
		{"n0p0", "eth0", "tc out", tcOut},
		{"n0p0", "eth0", "nftables in", netdevIn},
		{"n0p0", "eth0", "nftables out", netdevOut},
		{"n0p0", "eth0", "queue", queue},
		{"n0", "pod", "tcx in", tcxIn},
		{"n0", "eth0", "tcx in", tcxIn},
		{"n0", "eth0", "tcx out", tcxOut},
		{"n0", "eth0", "tc in", tcIn},
		{"n0", "eth0", "tc out", tcOut},
		{"n0", "eth0", "nftables in", netdevIn},
	} {
		count, end := tt.observe(w, tt.place, w.device(tt.place, tt.device))
		name := tt.place + " " + tt.device + " " + tt.name
		var saw, fast uint64
		w.eventually(name+": the observer sees all packets", func() {
			before := count()
			fast = w.roundTrips(e, 0, 100)
			saw = count() - before
		}, func() bool { return saw >= 100 && fast >= 180 })
		end()
	}
}

// captureCount starts a capture at a device, as tcpdump does, and returns a function that returns
// the number of packets in and out.
func (w *world) captureCount(place string, l netlink.Link) func() (in, out int) {
	w.Helper()
	fd := -1
	w.in(place, func() (err error) {
		every := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, every); err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(every), Ifindex: l.Attrs().Index}))
	})
	w.Cleanup(func() { unix.Close(fd) })
	return func() (in, out int) {
		for {
			_, from, err := unix.Recvfrom(fd, make([]byte, 64), 0)
			if errors.Is(err, unix.EAGAIN) {
				return in, out
			}
			if err != nil {
				w.Fatal(err)
			}
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				out++
			} else {
				in++
			}
		}
	}
}

// TestPacketCapture checks that a capture sees the packets that docs/explanation/fastpath.md says
// it sees.
func TestPacketCapture(t *testing.T) {
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	const n = 500
	few, all := [2]int{0, n / 10}, [2]int{n, n * 11 / 10}
	type tap struct {
		where   string
		in, out [2]int
		count   func() (in, out int)
	}
	taps := []tap{
		{"the pod's device", all, all, w.captureCount("n0p0", w.device("n0p0", "eth0"))},
		{"the pod's link", all, few, w.captureCount("n0", w.device("n0", "pod"))},
		{"the bridge", few, few, w.captureCount("n0", w.device("n0", "cni0"))},
		{"the VXLAN device", few, few, w.captureCount("n0", w.device("n0", "flannel.1"))},
		{"the NIC", all, all, w.captureCount("n0", w.device("n0", "eth0"))},
	}
	w.accelerate(e)
	for _, tap := range taps {
		tap.count()
	}
	if fast := w.roundTrips(e, 0, n); fast < 2*n*9/10 {
		t.Fatalf("of %d packets %d took the fast path", 2*n, fast)
	}
	for _, tap := range taps {
		in, out := tap.count()
		if in < tap.in[0] || in > tap.in[1] || out < tap.out[0] || out > tap.out[1] {
			t.Errorf("a capture at %s saw %d of %d in and %d out, want %v and %v", tap.where, in, n, out, tap.in, tap.out)
		}
	}
}

// onUpperDevice puts an upper device on the NICs of both nodes, and makes the VXLAN devices send
// through it. It reports whether the kernel supports such devices.
func (w *world) onUpperDevice(with func(nic netlink.Link) netlink.Link) (has bool) {
	w.Helper()
	has = true
	for _, node := range []string{"n0", "n1"} {
		w.in(node, func() error {
			nic, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			addresses, err := netlink.AddrList(nic, netlink.FAMILY_V4)
			if err != nil {
				return err
			}
			above := with(nic)
			if err := netlink.LinkAdd(above); errors.Is(err, unix.EOPNOTSUPP) {
				has = false
				return nil
			} else if err != nil {
				return err
			}
			if _, is := above.(*netlink.Bond); is {
				err = netlink.LinkSetDown(nic) // a bond accepts no device that is up
			}
			if above.Attrs().ParentIndex == 0 { // it has lower devices, as a bridge or a bond
				err = errors.Join(err, netlink.LinkSetMaster(nic, above))
			}
			if err := errors.Join(err, netlink.LinkSetUp(nic), netlink.LinkSetUp(above)); err != nil {
				return err
			}
			for _, a := range addresses {
				if err := errors.Join(netlink.AddrDel(nic, &a), netlink.AddrAdd(above, &netlink.Addr{IPNet: a.IPNet})); err != nil {
					return err
				}
			}
			return recreate("flannel.1", func(v *netlink.Vxlan) { v.VtepDevIndex = above.Attrs().Index })
		})
	}
	return has
}

// recreate deletes a VXLAN device of the current namespace, and creates it again with a change.
func recreate(name string, change func(*netlink.Vxlan)) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	old := l.(*netlink.Vxlan)
	addresses, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	routes, err := netlink.RouteList(l, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	entries, err := netlink.NeighList(old.Index, unix.AF_BRIDGE)
	if err != nil {
		return err
	}
	neighbours, err := netlink.NeighList(old.Index, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = old.Name, old.MTU, old.HardwareAddr
	again := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: old.VxlanId, SrcAddr: old.SrcAddr, VtepDevIndex: old.VtepDevIndex, Port: old.Port, UDPCSum: old.UDPCSum}
	change(again)
	if err := errors.Join(netlink.LinkDel(old), netlink.LinkAdd(again), netlink.LinkSetUp(again)); err != nil {
		return err
	}
	for _, a := range addresses {
		if err := netlink.AddrReplace(again, &netlink.Addr{IPNet: a.IPNet, Scope: a.Scope}); err != nil {
			return err
		}
	}
	for _, n := range append(entries, neighbours...) {
		n.LinkIndex, n.State = again.Index, netlink.NUD_PERMANENT
		if err := netlink.NeighSet(&n); err != nil {
			return fmt.Errorf("neighbour %v: %w", n, err)
		}
	}
	for _, r := range routes {
		r.LinkIndex = again.Index
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("route %v: %w", r, err)
		}
	}
	return nil
}

// TestLowerDevices checks that a VXLAN device that sends through an upper device of the NIC is
// accelerated, and that one that sends through a lower device of another is skipped, because the
// fast path would bypass the hooks of that other device.
func TestLowerDevices(t *testing.T) {
	t.Parallel()
	attrs := func(nic netlink.Link) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU = "above", nic.Attrs().MTU
		return a
	}
	for name, above := range map[string]func(netlink.Link) netlink.Link{
		"bridge": func(nic netlink.Link) netlink.Link {
			return &netlink.Bridge{LinkAttrs: attrs(nic)}
		},
		"macvlan": func(nic netlink.Link) netlink.Link {
			a := attrs(nic)
			a.ParentIndex = nic.Attrs().Index
			return &netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE}
		},
		"VLAN": func(nic netlink.Link) netlink.Link {
			a := attrs(nic)
			a.ParentIndex = nic.Attrs().Index
			return &netlink.Vlan{LinkAttrs: a, VlanId: 7}
		},
		"bond": func(nic netlink.Link) netlink.Link {
			bond := netlink.NewLinkBond(attrs(nic))
			bond.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
			return bond
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
			if !w.onUpperDevice(above) {
				t.Logf("this kernel has no %s; make kernels boots some that have", name)
				return
			}
			w.start()
			e := w.connect().back()
			if name != "bridge" {
				w.accelerate(e)
				return
			}
			// A bridge computes the checksums of encapsulated packets before its ports, and a wire
			// without a NIC verifies none: packets arrive with unverified checksums.
			w.eventually("packets leave by the fast path", func() { w.roundTrips(e, 0, 10) }, func() bool {
				return w.counts(0)["fast-out"] > 100 && w.counts(1)["fast-out"] > 100
			})
			for i := range w.paths {
				if w.skips(i, "eth0") {
					t.Errorf("the NIC is taken for a pod's link: %q", w.paths[i].Skipped())
				}
			}
			w.in("n0", func() error {
				nic, err := netlink.LinkByName("eth0")
				if err == nil {
					err = recreate("flannel.1", func(v *netlink.Vxlan) { v.VtepDevIndex = nic.Attrs().Index })
				}
				return err
			})
			w.eventually("the device is skipped", nil, func() bool {
				return w.skips(0, "flannel.1: its NIC eth0 has the master above, which the fast path would bypass")
			})
		})
	}
}
