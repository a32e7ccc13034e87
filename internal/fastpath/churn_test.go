//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

var (
	replaced = flag.Int("replaced", 120, "how many pods TestChurn replaces by others")
	burst    = flag.Int("burst", 50, "how many pods TestPodBurst creates on a node, up to 250")
)

const (
	addresses = 16 // which the pods of TestChurn share
	present   = 12 // pods at a time
	batch     = 4  // replaced at once
	knock     = 7000
)

// churn creates and deletes pods, while two other pods send to all of their addresses.
type churn struct {
	*world
	shape string
	nodes [2]struct {
		ns     netns.NsHandle
		links  *netlink.Handle
		tunnel netlink.Link
		bridge netlink.Link // flannel only
	}
	// who has the ID of the pod that has each address now: 0 while no pod has it, and during changes.
	who     []atomic.Uint64
	pods    []*churnPod
	made    uint64
	answers atomic.Uint64
}

// churnPod is a pod that receives everything that reaches its device.
type churnPod struct {
	id       uint64
	address  int
	node     int
	veth     netlink.Link
	mac      net.HardwareAddr
	socket   *net.UDPConn
	received atomic.Uint64
	// wrong describes the first message that was delivered here although it was sent to another pod.
	wrong atomic.Pointer[string]
	gone  sync.WaitGroup
}

// address returns the ith address, of the pods of node0 or of node1.
func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, byte(i % 2), byte(4 + i/2)}) }

func prefix(a netip.Addr, bits int) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, 32)}
}

func (w *world) churn(shape string, addresses int) *churn {
	w.Helper()
	c := &churn{world: w, shape: shape, who: make([]atomic.Uint64, addresses)}
	for i := range c.nodes {
		n := &c.nodes[i]
		n.ns = w.ns(fmt.Sprintf("n%d", i))
		var err error
		if n.links, err = netlink.NewHandleAt(n.ns, unix.NETLINK_ROUTE); err != nil {
			w.Fatal(err)
		}
		w.Cleanup(func() { n.links.Close(); n.ns.Close() })
		device := map[string]string{spec.ShapeFlannel: "flannel.1", spec.ShapeCalico: "vxlan.calico", overlay.ShapeRouted: "eth0"}[shape]
		if shape != spec.ShapeCalico {
			if n.bridge, err = n.links.LinkByName("cni0"); err != nil {
				w.Fatal(err)
			}
		}
		if n.tunnel, err = n.links.LinkByName(device); err != nil {
			w.Fatal(err)
		}
	}
	return c
}

// add creates a pod with an address.
func (c *churn) add(which, node int) {
	c.Helper()
	c.made++
	p := &churnPod{id: c.made, address: which, node: node}
	n, a := &c.nodes[node], address(which)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- err
			return // which ends the thread
		}
		defer home.Close()
		err = c.make(p, n.links, n.bridge, a)
		if back := netns.Set(home); back == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		c.Fatalf("make pod %d: %v", p.id, err)
	}
	if node != which%2 { // the other node routes the address, which needs a host route
		if err := c.nodes[1-node].links.RouteAdd(c.hostRoute(which, node)); err != nil {
			c.Fatal(err)
		}
	}
	if c.local && n.bridge != nil {
		c.announce(p)
	}
	p.gone.Go(func() { p.answer(c) })
	c.pods = append(c.pods, p)
	c.who[which].Store(p.id)
}

// announce tells the pods that send which MAC address a pod on their bridge has, as a network plugin does by ARP.
func (c *churn) announce(p *churnPod) {
	c.Helper()
	for _, place := range []string{"n0p0", c.farPod()} {
		c.in(place, func() error {
			return netlink.NeighSet(&netlink.Neigh{LinkIndex: eth0(), State: netlink.NUD_REACHABLE, IP: address(p.address).AsSlice(), HardwareAddr: p.mac})
		})
	}
}

// hostRoute returns the route to an address that is not on its usual node.
func (c *churn) hostRoute(which, node int) *netlink.Route {
	return &netlink.Route{LinkIndex: c.nodes[1-node].tunnel.Attrs().Index, Dst: prefix(address(which), 32),
		Gw: netip.AddrFrom4([4]byte{10, 244, byte(node), 0}).AsSlice(), Flags: int(netlink.FLAG_ONLINK)}
}

// make creates a pod as a container runtime and a network plugin do. Its thread stays in the pod's network namespace.
func (c *churn) make(p *churnPod, node *netlink.Handle, bridge netlink.Link, a netip.Addr) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	ns, err := netns.Get()
	if err != nil {
		return err
	}
	defer ns.Close() // its socket and its device keep it
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Flags = fmt.Sprintf("pod%d", p.id), 1450, net.FlagUp
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(ns)
	gateway, bits := netip.AddrFrom4([4]byte{169, 254, 1, 1}), 32
	if bridge == nil {
		veth.HardwareAddr = net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}
	} else {
		veth.MasterIndex = bridge.Attrs().Index
		gateway, bits = netip.AddrFrom4([4]byte{10, 244, byte(p.node), 1}), 24
	}
	if err := node.LinkAdd(veth); err != nil {
		return err
	}
	p.veth = veth
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	p.mac = eth0.Attrs().HardwareAddr
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	// The pod accepts packets for any address, so that the test sees misdelivered ones, but answers ARP only for its own.
	rule := netlink.NewRule()
	rule.IifName, rule.Table, rule.Priority = "eth0", 100, 1
	if err := errors.Join(
		os.WriteFile("/proc/sys/net/ipv4/conf/all/arp_ignore", []byte("1"), 0),
		netlink.LinkSetUp(eth0), netlink.LinkSetUp(lo),
		netlink.RuleAdd(rule),
		netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: prefix(netip.IPv4Unspecified(), 0), Type: unix.RTN_LOCAL, Table: 100, Scope: netlink.SCOPE_HOST}),
		netlink.AddrAdd(eth0, &netlink.Addr{IPNet: prefix(a, bits)}),
	); err != nil {
		return err
	}
	if bridge == nil {
		err = errors.Join(
			netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: prefix(gateway, 32), Scope: netlink.SCOPE_LINK}),
			netlink.NeighSet(&netlink.Neigh{LinkIndex: eth0.Attrs().Index, State: netlink.NUD_PERMANENT, IP: gateway.AsSlice(), HardwareAddr: veth.HardwareAddr}),
			node.NeighSet(&netlink.Neigh{LinkIndex: veth.Index, State: netlink.NUD_REACHABLE, IP: a.AsSlice(), HardwareAddr: eth0.Attrs().HardwareAddr}),
			node.RouteAdd(&netlink.Route{LinkIndex: veth.Index, Dst: prefix(a, 32), Scope: netlink.SCOPE_LINK}),
		)
	} else {
		err = node.NeighSet(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, State: netlink.NUD_REACHABLE, IP: a.AsSlice(), HardwareAddr: eth0.Attrs().HardwareAddr})
	}
	if err == nil {
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: prefix(netip.IPv4Unspecified(), 0), Gw: gateway.AsSlice()})
	}
	if err == nil {
		p.socket, err = net.ListenUDP("udp4", &net.UDPAddr{Port: knock})
	}
	return err
}

// message encodes the index of an address and a pod's ID: in a request the ID of the pod that has the address, in a reply that
// of the pod that sends it.
func message(which int, id uint64) []byte {
	return binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(make([]byte, 0, 16), uint64(which)), id)
}

func (p *churnPod) answer(c *churn) {
	buf, own := make([]byte, 64), message(p.address, p.id)
	for {
		n, from, err := p.socket.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		if n != len(own) || string(buf[:n]) != string(own) {
			wrong := fmt.Sprintf("pod %d, which has %s, received %x, want %x", p.id, address(p.address), buf[:n], own)
			p.wrong.CompareAndSwap(nil, &wrong)
		}
		p.received.Add(1)
		_, _ = p.socket.WriteToUDPAddrPort(own, from)
	}
}

// remove deletes pods as a container runtime and a network plugin do.
func (c *churn) remove(pods ...*churnPod) {
	c.Helper()
	const group = 7
	var errs []error
	for _, p := range pods {
		c.pods = slices.DeleteFunc(c.pods, func(other *churnPod) bool { return other == p })
		c.who[p.address].Store(0)
		errs = append(errs, c.nodes[p.node].links.LinkSetGroup(p.veth, group))
	}
	for i := range c.nodes {
		c.in(fmt.Sprintf("n%d", i), func() error { // all at once: each deletion waits for all CPUs
			r := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
			r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
			r.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
			_, err := r.Execute(unix.NETLINK_ROUTE, 0)
			if errors.Is(err, unix.ENODEV) { // there are none
				return nil
			}
			return err
		})
	}
	for _, p := range pods {
		if n := &c.nodes[p.node]; n.bridge != nil {
			errs = append(errs, n.links.NeighDel(&netlink.Neigh{LinkIndex: n.bridge.Attrs().Index, IP: address(p.address).AsSlice()}))
		}
		if p.node != p.address%2 {
			errs = append(errs, c.nodes[1-p.node].links.RouteDel(c.hostRoute(p.address, p.node)))
		}
		errs = append(errs, p.socket.Close())
		p.gone.Wait()
		if wrong := p.wrong.Load(); wrong != nil {
			c.Error(*wrong)
		}
	}
	if err := errors.Join(errs...); err != nil {
		c.Fatalf("remove pods: %v", err)
	}
}

// send makes a pod of each node, or two of node0 in a local world, send to every address, 8,000 datagrams a second, until the test ends.
func (c *churn) send() {
	c.Helper()
	var sockets []*net.UDPConn
	quit := make(chan struct{})
	var all sync.WaitGroup
	for i, place := range []string{"n0p0", c.farPod()} {
		c.in(place, func() error {
			s, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 6000})
			sockets = append(sockets, s)
			return err
		})
		all.Go(func() {
			buf := make([]byte, 64)
			for {
				n, from, err := sockets[i].ReadFromUDPAddrPort(buf)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err != nil {
					continue // an ICMP error from the node
				}
				if a := binary.NativeEndian.Uint64(buf); n != 16 || a >= uint64(len(c.who)) || address(int(a)) != from.Addr() {
					c.Errorf("%s answered %x", from, buf[:n])
				}
				c.answers.Add(1)
			}
		})
	}
	all.Go(func() {
		tick := time.NewTicker(time.Duration(len(c.who)) * time.Second / 8000)
		defer tick.Stop()
		for {
			for a := range c.who {
				id := c.who[a].Load()
				if id == 0 {
					continue
				}
				for _, s := range sockets {
					_, _ = s.WriteToUDPAddrPort(message(a, id), netip.AddrPortFrom(address(a), knock))
				}
			}
			select {
			case <-quit:
				return
			case <-tick.C:
			}
		}
	})
	c.Cleanup(func() {
		close(quit)
		for _, s := range sockets {
			s.Close()
		}
		all.Wait()
	})
}

// taken counts the packets that took the fast path of either node, by kind.
func (w *world) taken() map[string]uint64 {
	w.Helper()
	taken := make(map[string]uint64)
	for _, f := range w.paths {
		counts, err := f.Counts()
		if err != nil {
			w.Fatal(err)
		}
		for why, n := range counts {
			if _, kind, fast := record.SplitReason(why); fast {
				taken[kind] += n
			}
		}
	}
	return taken
}

// restart restarts a node's fast path.
func (w *world) restart(i int) {
	w.Helper()
	w.stop(i)
	w.startOn(i)
}

// TestChurn deletes pods that receive traffic, and creates others with their addresses, on the same
// node or the other, or with all pods on one node. No pod may receive packets for another, and the tables must be empty in the
// end. -replaced 10000 takes some minutes.
func TestChurn(t *testing.T) {
	t.Parallel()
	cases := []struct {
		shape, offload string
		local          bool
		kinds          []string // these take the fast path
	}{
		{spec.ShapeFlannel, spec.OffloadFull, false, []string{"vxlan", "local"}},
		{spec.ShapeCalico, spec.OffloadNone, false, []string{"vxlan", "local"}},
		{overlay.ShapeRouted, spec.OffloadFull, false, []string{"routed", "local"}},
		{spec.ShapeFlannel, spec.OffloadFull, true, []string{"local"}},
		{spec.ShapeCalico, spec.OffloadFull, true, []string{"local"}},
	}
	for _, tt := range cases {
		t.Run(fmt.Sprintf("%s local %t", tt.shape, tt.local), func(t *testing.T) {
			t.Parallel()
			shape := tt.shape
			w := newWorld(t, shape, tt.offload)
			w.start() // on both nodes
			w.local = tt.local
			numbers := addresses
			if w.local {
				numbers *= 2 // half of them are of node0
			}
			c := w.churn(shape, numbers)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			random := func() int { return r.IntN(addresses) * numbers / addresses }
			add := func() {
				a := random()
				for c.who[a].Load() != 0 {
					a = random()
				}
				node := a % 2
				if shape == spec.ShapeCalico && !w.local { // flannel has no routes to single pods
					node = r.IntN(2)
				}
				c.add(a, node)
			}
			c.send()
			for range present {
				add()
			}
			w.eventually("packets of each kind take the fast path", nil, func() bool {
				taken := w.taken()
				return !slices.ContainsFunc(tt.kinds, func(kind string) bool { return taken[kind] < 100 })
			})
			tables := make(map[string]func() int)
			for _, node := range w.nodes() {
				for _, states := range []string{"encap_states", "decap_states", "pod_link_states"} {
					tables[states+" of "+node] = w.entries(node, states)
				}
			}
			began := time.Now()
			for range *replaced / len(cases) / batch {
				r.Shuffle(len(c.pods), func(i, j int) { c.pods[i], c.pods[j] = c.pods[j], c.pods[i] })
				gone := slices.Clone(c.pods[:batch])
				if before := w.taken()["local"]; w.local { // connections within a node are found after seconds
					w.eventually("packets take the fast path again", nil, func() bool { return w.taken()["local"] > before+2000 })
				}
				for _, p := range gone {
					w.eventually(fmt.Sprintf("pod %d receives messages", p.id), nil, func() bool {
						return p.received.Load() > 20
					})
				}
				c.remove(gone...)
				for range batch {
					add()
				}
				if t.Failed() {
					return
				}
			}
			took := time.Since(began)
			c.remove(slices.Clone(c.pods)...)
			var accelerated uint64
			taken := w.taken()
			for _, n := range taken {
				accelerated += n
			}
			for i := range w.paths {
				t.Logf("node%d: %v", i, w.counts(i))
			}
			t.Logf("%d pods in %s; %d answers; packets that took the fast path: %v", c.made, took, c.answers.Load(), taken)
			for i, path := range w.paths {
				w.eventually(fmt.Sprintf("node%d forgets the flows", i), nil, func() bool {
					n, _, err := path.Connections()
					return n == 0 && err == nil
				})
			}
			for name, entries := range tables {
				w.eventually(name+" are free", func() { time.Sleep(100 * time.Millisecond) }, func() bool { return entries() == 0 })
			}
			if accelerated < c.answers.Load()/2 && !w.local {
				t.Error("too few packets took the fast path")
			}
		})
	}
}

// TestDeletedPodIsNoRepair checks that the programs of a pod that has just been deleted do not count as detached by another
// process.
func TestDeletedPodIsNoRepair(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	name := w.link(0, 0)
	if err := w.paths[0].VerifyAfter(func() { w.set("n0", name, netlink.LinkDel) }); err != nil {
		t.Error(err)
	}
	if n := w.paths[0].Repaired(); n != 0 {
		t.Errorf("%d programs count as repaired", n)
	}
	e.Close()
}

// TestPodBurst creates many pods on a node at once and deletes them again, twice, while another pod has a connection. No pod may
// receive packets for another. The agent's memory must not grow, and no entries of its tables may stay in use. -burst 250 takes
// about a minute.
func TestPodBurst(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	agent := w.startAgent("n0")
	e := w.connect().back()
	w.eventually("the connection is accelerated", nil, func() bool { return w.isFast(e) })
	flows, links := w.table("n0", "flows"), w.entries("n0", "pod_link_states")
	c := w.churn(spec.ShapeFlannel, 2**burst)
	c.send()
	var memory [2]int
	for round := range memory {
		began, answers := time.Now(), c.answers.Load()
		for i := range *burst {
			c.add(2*i, 0)
			w.trip(e, 1)
		}
		w.eventually("pods answer", func() { w.trip(e, 1) }, func() bool { return c.answers.Load() > answers+uint64(*burst) })
		for len(c.pods) > 0 {
			c.remove(slices.Clone(c.pods[:min(25, len(c.pods))])...)
			w.trip(e, 1)
		}
		t.Logf("%d pods came and went in %v; %d pod links are in use", *burst, time.Since(began), links())
		w.eventually("the flows are forgotten", func() { w.trip(e, 1) }, func() bool { return w.size(flows) <= 1 })
		w.eventually("the pod links are free", func() { w.trip(e, 1) }, func() bool { return links() <= 1 })
		_, memory[round] = usage(t, agent.Process.Pid)
	}
	if grown := memory[1] - memory[0]; grown > 4<<20 {
		t.Errorf("the agent grew by %d KiB", grown>>10)
	}
	w.eventually("the connection is accelerated again", nil, func() bool { return w.isFast(e) })
}

func (w *world) size(m *ebpf.Map) (n int) {
	w.Helper()
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	i := m.Iterate()
	for i.Next(&key, &value) {
		n++
	}
	if err := i.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		w.Fatal(err)
	}
	return n
}
