//go:build linux

package fastpath_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
)

// nodeAt is the address of a node.
func nodeAt(node int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 0, byte(node + 1)}) }

// gateway is the switch's address, once it forwards.
var gateway = netip.MustParseAddr("198.18.0.253")

// ways joins the nodes by a second wire, from eth1 to eth1, and has the switch forward.
func (w *world) ways() {
	w.Helper()
	far := w.ns("n1")
	defer far.Close()
	w.in("n0", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Flags = "eth1", net.FlagUp
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth1", PeerNamespace: netlink.NsFd(far)})
	})
	w.set("n1", "eth1", netlink.LinkSetUp)
	for node := range 2 {
		place := fmt.Sprintf("n%d", node)
		w.set(place, "eth1", func(l netlink.Link) error {
			return netlink.AddrAdd(l, &netlink.Addr{IPNet: prefix(netip.AddrFrom4([4]byte{198, 18, 1, byte(node + 1)}), 24)})
		})
		w.up(place, "eth1")
		for _, device := range []string{"eth0", "eth1"} { // packets may come by either
			w.sysctl(place, "net/ipv4/conf/"+device+"/rp_filter", "2")
		}
	}
	w.in("sw", func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if l.Type() == "bridge" {
				err = netlink.AddrAdd(l, &netlink.Addr{IPNet: prefix(gateway, 24)})
			}
		}
		return err
	})
	w.sysctl("sw", "net/ipv4/ip_forward", "1")
	w.sysctl("sw", "net/ipv4/conf/all/send_redirects", "0")
	w.sysctl("sw", "net/ipv4/conf/default/send_redirects", "0")
}

// way has what a node sends to the other go some way, or by one of several devices.
func (w *world) way(node int, r netlink.Route, devices ...string) {
	w.Helper()
	w.in(fmt.Sprintf("n%d", node), func() error {
		r.Dst = prefix(nodeAt(1-node), 32)
		for _, device := range devices {
			l, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: l.Attrs().Index, Gw: r.Gw})
		}
		return netlink.RouteReplace(&r)
	})
}

// noWay has it go the way that it went.
func (w *world) noWay(nodes ...int) {
	w.Helper()
	for _, node := range nodes {
		w.in(fmt.Sprintf("n%d", node), func() error {
			return netlink.RouteDel(&netlink.Route{Dst: prefix(nodeAt(1-node), 32), Scope: netlink.SCOPE_NOWHERE})
		})
	}
}

// by counts what a node has sent by a device.
func (w *world) by(node int, device string) (n uint64) {
	w.Helper()
	w.set(fmt.Sprintf("n%d", node), device, func(l netlink.Link) error { n = l.Attrs().Statistics.TxPackets; return nil })
	return n
}

// readdressNIC has the node's address be no NIC's, as where routes to nodes are learnt, or its first
// NIC's again.
func (w *world) readdressNIC(node int, away bool) {
	w.Helper()
	own, other := netlink.Addr{IPNet: prefix(nodeAt(node), 24)}, netlink.Addr{IPNet: prefix(netip.AddrFrom4([4]byte{198, 18, 2, byte(node + 1)}), 24)}
	w.in(fmt.Sprintf("n%d", node), func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		alone := &netlink.Addr{IPNet: prefix(nodeAt(node), 32)}
		if away {
			return errors.Join(netlink.AddrAdd(lo, alone), netlink.AddrDel(nic, &own), netlink.AddrAdd(nic, &other))
		}
		return errors.Join(netlink.AddrAdd(nic, &own), netlink.AddrDel(lo, alone), netlink.AddrDel(nic, &other))
	})
}

// TestWaysChange has the way to the other node change while packets are carried: they go where
// the kernel sends them, and those by another NIC than the VXLAN device names are left to it.
func TestWaysChange(t *testing.T) {
	tw := newTwins(t, v1alpha1.ShapeFlannel)
	for _, w := range []*world{tw.fast, tw.slow} {
		w.ways()
	}
	w, e := tw.fast, tw.echoes[0]
	const trips = 200
	for _, tt := range []struct {
		name string
		do   func(*world)
		back func(*world)
		// how packets go then: of node0 and node1, those that they send by eth1, and those that
		// are carried of what they send.
		other, carried [2]bool
		// forwarded: the switch does, and not just passes.
		forwarded bool
	}{
		{name: "a more specific route",
			do:   func(w *world) { w.way(0, netlink.Route{}, "eth0") },
			back: func(w *world) { w.noWay(0) }, carried: [2]bool{true, true}},
		{name: "a gateway",
			do:   func(w *world) { w.way(0, netlink.Route{Gw: gateway.AsSlice()}, "eth0") },
			back: func(w *world) { w.noWay(0) }, carried: [2]bool{true, true}, forwarded: true},
		{name: "another NIC",
			do: func(w *world) {
				w.way(0, netlink.Route{}, "eth1")
				w.way(1, netlink.Route{}, "eth1")
			},
			back: func(w *world) { w.noWay(0, 1) }, other: [2]bool{true, true}},
		{name: "another NIC back",
			do:   func(w *world) { w.way(1, netlink.Route{}, "eth1") },
			back: func(w *world) { w.noWay(1) }, other: [2]bool{false, true}, carried: [2]bool{true, false}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tw.happens(t, tt.do)
			for i, want := range tt.carried {
				if !want {
					continue
				}
				w.eventually("it is carried", func() {}, func() bool {
					before := w.counts(i)["fast-out"]
					w.trip(e, trips)
					return w.counts(i)["fast-out"]-before >= trips*3/4
				})
			}
			var fast, other [2]uint64
			for i := range fast {
				fast[i], other[i] = w.counts(i)["fast-out"], w.by(i, "eth1")
			}
			forwarded := w.forwarded("sw")
			w.trip(e, trips)
			for i := range fast {
				fast[i], other[i] = w.counts(i)["fast-out"]-fast[i], w.by(i, "eth1")-other[i]
				if carried := fast[i] > 0; carried != tt.carried[i] {
					t.Errorf("of %d packets of node%d %d were carried", trips, i, fast[i])
				}
				if (other[i] >= trips) != tt.other[i] || (other[i] > trips/10) != tt.other[i] {
					t.Errorf("of %d packets of node%d %d went by the other NIC", trips, i, other[i])
				}
			}
			if n := w.forwarded("sw") - forwarded; (n >= trips) != tt.forwarded {
				t.Errorf("of %d packets %d went by the gateway", trips, n)
			}
			tw.happens(t, tt.back)
			tw.carried(t)
		})
	}
	t.Run("none", func(t *testing.T) {
		tw.happens(t, func(w *world) {
			w.way(0, netlink.Route{Type: unix.RTN_BLACKHOLE})
			time.Sleep(soon)
			p := tw.pulses[0]
			if w == tw.slow {
				p = tw.pulses[1]
			}
			back := p.back.Load()
			time.Sleep(2 * soon)
			if n := p.back.Load() - back; n > 0 {
				t.Errorf("%d datagrams came back without a way", n)
			}
			w.noWay(0)
		})
		tw.carried(t)
	})
	t.Run("several", func(t *testing.T) {
		// The kernel prefers the NIC that has the source's address; here none has.
		tw.happens(t, func(w *world) {
			for i := range 2 {
				w.readdressNIC(i, true)
				w.sysctl(fmt.Sprintf("n%d", i), "net/ipv4/fib_multipath_hash_policy", "1")
				w.way(i, netlink.Route{}, "eth0", "eth1")
			}
		})
		var first, second bool
		devices := []string{"eth0", "eth1"}
		for range 40 {
			if first && second {
				break
			}
			// The kernel chooses anew where the route is not what it was.
			slices.Reverse(devices)
			w.way(0, netlink.Route{}, devices...)
			e := w.connect().back()
			for began := time.Now(); time.Since(began) < 150*time.Millisecond; {
				w.trip(e, 10)
			}
			fast, other := w.counts(0)["fast-out"], w.by(0, "eth1")
			w.trip(e, trips)
			fast, other = w.counts(0)["fast-out"]-fast, w.by(0, "eth1")-other
			first = first || fast >= trips*3/4
			second = second || other >= trips*3/4
			if fast+other > trips*11/10 {
				t.Errorf("of %d packets %d were carried, and %d went by the other NIC", trips, fast, other)
			}
		}
		if !first || !second {
			t.Errorf("a connection was carried by its NIC: %t; one was left by the other: %t", first, second)
		}
		tw.happens(t, func(w *world) {
			for i := range 2 {
				w.readdressNIC(i, false)
			}
			w.noWay(0, 1)
		})
		tw.carried(t)
	})
}

// TestStreamLearnsMTU has a stream go on when something between the nodes says that its packets are
// too long for the way: the kernel cuts them, as it does without the fast path, and what is short
// enough is carried.
func TestStreamLearnsMTU(t *testing.T) {
	const size = 4 << 20
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	w.transfer(e, size)
	w.learn("n0", 1300)
	time.Sleep(600 * time.Millisecond) // the kernel is asked twice a second
	w.trip(e, 10)
	before := w.cut("n0")
	w.transfer(e, size)
	if n := w.cut("n0") - before; n < size/1448 {
		t.Errorf("the kernel made %d fragments of %d bytes", n, size)
	}
	w.warm(e)
}

// TestVLANs has pods be carried whose bridges filter VLANs; and what is put out of its pod's VLAN gets
// to it no more.
func TestVLANs(t *testing.T) {
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	for _, node := range []string{"n0", "n1"} {
		has := true
		w.set(node, "cni0", func(l netlink.Link) error {
			on := true
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.Index = l.Attrs().Name, l.Attrs().Index
			err := netlink.LinkModify(&netlink.Bridge{LinkAttrs: attrs, VlanFiltering: &on})
			if errors.Is(err, unix.EOPNOTSUPP) {
				has, err = false, nil
			}
			return err
		})
		if !has {
			t.Log("this kernel's bridges do not filter VLANs; make kernels boots some whose do")
			return
		}
	}
	w.start()
	e, p := w.connect().back(), w.pulse()
	w.warm(e)
	p.carried()
	p.begin()
	p.through()
	link := w.link(1, 0)
	w.set("n1", link, func(l netlink.Link) error { return netlink.BridgeVlanDel(l, 1, true, true, false, false) })
	time.Sleep(soon)
	back := p.back.Load()
	time.Sleep(2 * soon)
	if n := p.back.Load() - back; n > 0 {
		t.Errorf("%d datagrams came back from a pod that is in no VLAN", n)
	}
	w.set("n1", link, func(l netlink.Link) error { return netlink.BridgeVlanAdd(l, 1, true, true, false, false) })
	p.through()
	p.on.Store(false)
	w.warm(e)
	p.carried()
}
