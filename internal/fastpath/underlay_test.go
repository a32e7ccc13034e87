//go:build linux

package fastpath_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

func nodeAddress(node int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 0, byte(node + 1)}) }

// gateway is the address of the switch, once it forwards.
var gateway = netip.MustParseAddr("198.18.0.253")

// addSecondLink adds a second wire between the nodes, from eth1 to eth1, and makes the switch
// forward.
func (w *world) addSecondLink() {
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
		w.waitUp(place, "eth1")
		for _, device := range []string{"eth0", "eth1"} { // packets may arrive by either
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

// setRoute sets a node's route to the other node, through one or more devices.
func (w *world) setRoute(node int, r netlink.Route, devices ...string) {
	w.Helper()
	w.in(fmt.Sprintf("n%d", node), func() error {
		r.Dst = prefix(nodeAddress(1-node), 32)
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

func (w *world) resetRoute(nodes ...int) {
	w.Helper()
	for _, node := range nodes {
		w.in(fmt.Sprintf("n%d", node), func() error {
			return netlink.RouteDel(&netlink.Route{Dst: prefix(nodeAddress(1-node), 32), Scope: netlink.SCOPE_NOWHERE})
		})
	}
}

// sentBy returns the number of packets that a node has sent through a device.
func (w *world) sentBy(node int, device string) (n uint64) {
	w.Helper()
	w.set(fmt.Sprintf("n%d", node), device, func(l netlink.Link) error { n = l.Attrs().Statistics.TxPackets; return nil })
	return n
}

// moveNodeAddress moves the node's address to the loopback device, as on nodes whose routes a
// routing protocol announces, or back to its first NIC.
func (w *world) moveNodeAddress(node int, away bool) {
	w.Helper()
	own, other := netlink.Addr{IPNet: prefix(nodeAddress(node), 24)}, netlink.Addr{IPNet: prefix(netip.AddrFrom4([4]byte{198, 18, 2, byte(node + 1)}), 24)}
	w.in(fmt.Sprintf("n%d", node), func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		host := &netlink.Addr{IPNet: prefix(nodeAddress(node), 32)}
		if away {
			return errors.Join(netlink.AddrAdd(lo, host), netlink.AddrDel(nic, &own), netlink.AddrAdd(nic, &other))
		}
		return errors.Join(netlink.AddrAdd(nic, &own), netlink.AddrDel(lo, host), netlink.AddrDel(nic, &other))
	})
}

// TestRouteChanges changes the route to the other node while a connection is accelerated. Packets
// must go where the kernel sends them, and packets that leave by a NIC other than that of the VXLAN
// device must take the slow path.
func TestRouteChanges(t *testing.T) {
	t.Parallel()
	tw := newComparison(t, spec.ShapeFlannel)
	for _, w := range []*world{tw.fast, tw.reference} {
		w.addSecondLink()
	}
	w, e := tw.fast, tw.echoes[0]
	const trips = 200
	for _, tt := range []struct {
		name string
		do   func(*world)
		back func(*world)
		// For node0 and node1: other means that packets leave by eth1, accelerated that they take
		// the fast path.
		other, accelerated [2]bool
		// forwarded means that the switch routes the packets instead of bridging them.
		forwarded bool
	}{
		{name: "more specific route",
			do:   func(w *world) { w.setRoute(0, netlink.Route{}, "eth0") },
			back: func(w *world) { w.resetRoute(0) }, accelerated: [2]bool{true, true}},
		{name: "gateway",
			do:   func(w *world) { w.setRoute(0, netlink.Route{Gw: gateway.AsSlice()}, "eth0") },
			back: func(w *world) { w.resetRoute(0) }, accelerated: [2]bool{true, true}, forwarded: true},
		{name: "another NIC",
			do: func(w *world) {
				w.setRoute(0, netlink.Route{}, "eth1")
				w.setRoute(1, netlink.Route{}, "eth1")
			},
			back: func(w *world) { w.resetRoute(0, 1) }, other: [2]bool{true, true}},
		{name: "another NIC one way",
			do:   func(w *world) { w.setRoute(1, netlink.Route{}, "eth1") },
			back: func(w *world) { w.resetRoute(1) }, other: [2]bool{false, true}, accelerated: [2]bool{true, false}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tw.apply(t, tt.do)
			for i, want := range tt.accelerated {
				if !want {
					continue
				}
				w.eventually("packets take the fast path", nil, func() bool {
					before := w.counts(i)["fast-out"]
					w.trip(e, trips)
					return w.counts(i)["fast-out"]-before >= trips*3/4
				})
			}
			var fast, other [2]uint64
			for i := range fast {
				fast[i], other[i] = w.counts(i)["fast-out"], w.sentBy(i, "eth1")
			}
			forwarded := w.forwarded("sw")
			w.trip(e, trips)
			for i := range fast {
				fast[i], other[i] = w.counts(i)["fast-out"]-fast[i], w.sentBy(i, "eth1")-other[i]
				if accelerated := fast[i] > 0; accelerated != tt.accelerated[i] {
					t.Errorf("of %d packets of node%d %d took the fast path", trips, i, fast[i])
				}
				if (other[i] >= trips) != tt.other[i] || (other[i] > trips/10) != tt.other[i] {
					t.Errorf("of %d packets of node%d %d left by the other NIC", trips, i, other[i])
				}
			}
			if n := w.forwarded("sw") - forwarded; (n >= trips) != tt.forwarded {
				t.Errorf("of %d packets %d passed the gateway", trips, n)
			}
			tw.apply(t, tt.back)
			tw.waitAccelerated(t)
		})
	}
	t.Run("blackhole", func(t *testing.T) {
		tw.apply(t, func(w *world) {
			p := tw.pings[0]
			if w == tw.reference {
				p = tw.pings[1]
			}
			p.stops(func() { w.setRoute(0, netlink.Route{Type: unix.RTN_BLACKHOLE}) }, func() { w.resetRoute(0) })
		})
		tw.waitAccelerated(t)
	})
	t.Run("multipath", func(t *testing.T) {
		// The kernel prefers the NIC that has the source address. Here none has.
		tw.apply(t, func(w *world) {
			for i := range 2 {
				w.moveNodeAddress(i, true)
				w.sysctl(fmt.Sprintf("n%d", i), "net/ipv4/fib_multipath_hash_policy", "1")
				w.setRoute(i, netlink.Route{}, "eth0", "eth1")
			}
		})
		var first, second bool
		devices := []string{"eth0", "eth1"}
		for range 40 {
			if first && second {
				break
			}
			// The kernel chooses a new hash when the route changes.
			slices.Reverse(devices)
			w.setRoute(0, netlink.Route{}, devices...)
			e := w.connect().back()
			for began := time.Now(); time.Since(began) < 150*time.Millisecond; {
				w.trip(e, 10)
			}
			fast, other := w.counts(0)["fast-out"], w.sentBy(0, "eth1")
			w.trip(e, trips)
			fast, other = w.counts(0)["fast-out"]-fast, w.sentBy(0, "eth1")-other
			first = first || fast >= trips*3/4
			second = second || other >= trips*3/4
			if fast+other > trips*11/10 {
				t.Errorf("of %d packets %d took the fast path, and %d left by the other NIC", trips, fast, other)
			}
		}
		if !first || !second {
			t.Errorf("a connection was accelerated by its NIC: %t; one took the slow path by the other: %t", first, second)
		}
		tw.apply(t, func(w *world) {
			for i := range 2 {
				w.moveNodeAddress(i, false)
			}
			w.resetRoute(0, 1)
		})
		tw.waitAccelerated(t)
	})
}

// TestStreamPMTU checks that a stream continues after ICMP has reported a smaller path MTU: the
// kernel fragments its packets, as without the fast path, and small packets stay accelerated.
func TestStreamPMTU(t *testing.T) {
	t.Parallel()
	const size = 4 << 20
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	w.transfer(e, size)
	w.learnPMTU("n0", 1300)
	time.Sleep(600 * time.Millisecond) // routes are read twice a second
	w.trip(e, 10)
	before := w.fragments("n0")
	w.transfer(e, size)
	if n := w.fragments("n0") - before; n < size/1448 {
		t.Errorf("the kernel made %d fragments of %d bytes", n, size)
	}
	w.accelerate(e)
}

// TestBridgeVLANFiltering checks that pods on VLAN-filtering bridges are accelerated, and that a
// pod that is removed from its VLAN receives nothing.
func TestBridgeVLANFiltering(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
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
			t.Log("bridges of this kernel do not filter VLANs; make kernels boots some that do")
			return
		}
	}
	w.start()
	e, p := w.connect().back(), w.ping()
	w.accelerate(e)
	p.waitAccelerated()
	link := w.link(1, 0)
	p.stops(func() {
		w.set("n1", link, func(l netlink.Link) error { return netlink.BridgeVlanDel(l, 1, true, true, false, false) })
	}, func() {
		w.set("n1", link, func(l netlink.Link) error { return netlink.BridgeVlanAdd(l, 1, true, true, false, false) })
	})
	p.waitDelivered()
	p.on.Store(false)
	w.accelerate(e)
	p.waitAccelerated()
}

// polled is the longest time after which the fast path has noticed a change of a sysctl on a busy machine. It reads them twice a
// second. Without that, it would notice the change with the next scan of the devices, some seconds later.
const polled = 5 * time.Second

// TestSourcePortsPolled changes the range of source ports, which the kernel does not announce.
func TestSourcePortsPolled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.startOn(0)
	w.in("n0", func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("20000 30000"), 0)
	})
	testenv.Await(t, polled, "the programs know the range", func() bool { return w.paths[0].SourcePorts() == [2]uint16{20000, 30000} })
}
