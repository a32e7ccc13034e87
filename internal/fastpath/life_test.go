//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/spec"
)

// ping sends a datagram per millisecond from node0/pod0 to node1/pod0, which echoes.
type ping struct {
	*world
	near *net.UDPConn
	on   atomic.Bool
	// round distinguishes datagrams that were sent before and after begin.
	round, sent, back atomic.Uint64
	// newest is when the latest of the datagrams that came back was sent (UnixNano).
	newest atomic.Int64
}

func (w *world) ping() *ping {
	w.Helper()
	p := &ping{world: w, near: w.datagrams()}
	go func() {
		for got := make([]byte, 64); ; {
			n, err := p.near.Read(got)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n == 16 && binary.NativeEndian.Uint64(got) == p.round.Load() {
				p.back.Add(1)
				p.newest.Store(int64(binary.NativeEndian.Uint64(got[8:])))
			}
		}
	}()
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			if p.on.Load() {
				p.sent.Add(1)
				datagram := binary.NativeEndian.AppendUint64(nil, p.round.Load())
				_, _ = p.near.Write(binary.NativeEndian.AppendUint64(datagram, uint64(time.Now().UnixNano())))
			}
			select {
			case <-quit:
				return
			case <-tick.C:
			}
		}
	}()
	w.Cleanup(func() { close(quit); <-done })
	return p
}

func (p *ping) begin() {
	p.on.Store(false)
	p.round.Add(1)
	p.sent.Store(0)
	p.back.Store(0)
	p.on.Store(true)
}

// waitDelivered waits until most datagrams come back.
func (p *ping) waitDelivered() {
	p.Helper()
	sent, back := p.sent.Load(), p.back.Load()
	p.world.eventually("datagrams are delivered", func() { time.Sleep(20 * time.Millisecond) }, func() bool {
		n, m := p.sent.Load()-sent, p.back.Load()-back
		sent, back = sent+n, back+m
		return n > 0 && m >= n*3/4
	})
}

// stops checks that a change soon stops the datagrams, and undoes the change.
func (p *ping) stops(change, undo func()) {
	p.Helper()
	promptly(p, "datagrams that come back", func() time.Duration {
		if p.paths[0] != nil {
			p.waitAccelerated()
		}
		p.begin()
		p.waitDelivered()
		change()
		set := time.Now()
		p.eventually("the longest limit has passed", nil, func() bool { return time.Since(set) > within+soon })
		took := time.Unix(0, p.newest.Load()).Sub(set)
		undo()
		return took
	})
}

// lost stops sending, and returns how many datagrams did not come back.
func (p *ping) lost() int {
	p.on.Store(false)
	for began := time.Now(); time.Since(began) < 100*time.Millisecond && p.back.Load() < p.sent.Load(); {
		time.Sleep(time.Millisecond)
	}
	return int(p.sent.Load() - p.back.Load())
}

// waitAccelerated waits until the datagrams take the fast path of both nodes, both ways.
func (p *ping) waitAccelerated() {
	p.Helper()
	p.begin()
	defer p.on.Store(false)
	var sent uint64
	var before [2]map[string]uint64
	again := func() {
		sent = p.sent.Load()
		for i := range before {
			before[i] = p.counts(i)
		}
	}
	again()
	p.eventually("datagrams are accelerated", func() { time.Sleep(30 * time.Millisecond) }, func() bool {
		defer again()
		n := p.sent.Load() - sent
		for i := range before {
			now := p.counts(i)
			if n < 10 || now["fast-out"]-before[i]["fast-out"] < n*3/4 || now["fast-in"]-before[i]["fast-in"] < n*3/4 {
				return false
			}
		}
		return true
	})
}

// misdelivered counts the IPv4 packets that are delivered to the second pods although they are for
// others.
func (w *world) misdelivered() (count func() int) {
	w.Helper()
	fds := make(map[int]netip.Addr)
	for node := range 2 {
		w.in(fmt.Sprintf("n%dp1", node), func() error {
			protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(protocol))
			if err != nil {
				return err
			}
			fds[fd] = pod(node, 1)
			w.Cleanup(func() { unix.Close(fd) })
			return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: eth0()})
		})
	}
	return func() (n int) {
		w.Helper()
		for fd, own := range fds {
			for b := make([]byte, 64); ; {
				length, from, err := unix.Recvfrom(fd, b, 0)
				if errors.Is(err, unix.EAGAIN) {
					break
				}
				if err != nil {
					w.Fatal(err)
				}
				if length >= 20 && from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_HOST && netip.AddrFrom4([4]byte(b[16:20])) != own {
					n++
				}
			}
		}
		return n
	}
}

// comparison applies the same changes to two worlds: one with fast paths, and a reference without.
type comparison struct {
	fast, reference *world
	echoes          [2]echo
	pings           [2]*ping
	misdelivered    func() int
}

func newComparison(t *testing.T, shape string) *comparison {
	t.Helper()
	tw := &comparison{fast: newWorld(t, shape, spec.OffloadFull), reference: newWorld(t, shape, spec.OffloadFull)}
	tw.fast.start()
	for i, w := range []*world{tw.fast, tw.reference} {
		for node := range 2 {
			w.repeatARP(fmt.Sprintf("n%d", node), "eth0")
		}
		tw.echoes[i], tw.pings[i] = w.connect().back(), w.ping()
	}
	tw.misdelivered = tw.fast.misdelivered()
	tw.waitAccelerated(t)
	return tw
}

// apply makes the same change to both worlds. Afterwards the fast path may lose no more datagrams
// than the reference, and connections must continue.
func (tw *comparison) apply(t *testing.T, what func(*world)) {
	const tolerated = 500 // half of what is lost if a change goes unnoticed
	var lost [2]int
	for i, w := range []*world{tw.fast, tw.reference} {
		w.T = t
		p := tw.pings[i]
		p.begin()
		what(w)
		p.begin() // losses during the change depend on how long it took
		p.waitDelivered()
		lost[i] = p.lost()
		w.trip(tw.echoes[i], 1)
	}
	if lost[0] > lost[1]+tolerated {
		t.Errorf("%d datagrams were lost, %d without the fast path", lost[0], lost[1])
	}
}

// waitAccelerated waits until the connections are accelerated on both nodes, both ways, and checks
// that no packet was delivered to another pod.
func (tw *comparison) waitAccelerated(t *testing.T) {
	tw.fast.T, tw.reference.T = t, t
	tw.fast.accelerate(tw.echoes[0])
	tw.pings[0].waitAccelerated()
	if n := tw.misdelivered(); n > 0 {
		t.Errorf("%d packets were delivered to the wrong pods", n)
	}
}

// repeatARP makes a place retry an unanswered ARP request after 20 ms instead of one second.
func (w *world) repeatARP(place, device string) {
	w.Helper()
	w.sysctl(place, "net/ipv4/neigh/"+device+"/retrans_time_ms", "20")
}

func (w *world) set(place, device string, change func(netlink.Link) error) {
	w.Helper()
	w.in(place, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return change(l)
	})
}

// recreateVXLAN deletes the VXLAN devices of some nodes and creates them again with a change, as
// flannel and Calico do when they restart with another configuration.
func recreateVXLAN(name string, change func(*netlink.Vxlan), nodes ...string) func(*world) {
	return func(w *world) {
		for _, node := range nodes {
			w.in(node, func() error { return recreate(name, change) })
		}
	}
}

// TestSequencesAfterDeviceReplaced checks that the sequence numbers of a connection count as unknown once its VXLAN device has
// been replaced by another: packets may have passed before the programs were attached to the new device.
func TestSequencesAfterDeviceReplaced(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	known := func() bool {
		n, err := w.paths[0].SequenceNumbers(flowOf(e.Conn))
		if err != nil {
			t.Fatal(err)
		}
		return n != datapath.Sequence{}
	}
	w.eventually("sequence numbers are known", func() { w.trip(e, 1) }, known)
	recreateVXLAN("flannel.1", func(v *netlink.Vxlan) { v.Index = 0 }, "n0")(w)
	w.eventually("sequence numbers are unknown", nil, func() bool { return !known() })
	if all, _, err := w.paths[0].Connections(); err != nil || all != 1 {
		t.Errorf("sequence numbers were known until the flow was forgotten: %d flows, %v", all, err)
	}
	w.accelerate(e)
	w.eventually("sequence numbers are known again", func() { w.trip(e, 1) }, known)
}

// TestSequencesAfterPodDeleted deletes a pod while a connection of another pod is accelerated: the sequence numbers of that
// connection stay known.
func TestSequencesAfterPodDeleted(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	other := w.connectOf(1, direct).back()
	w.accelerate(other)
	known := func() bool {
		n, err := w.paths[0].SequenceNumbers(flowOf(e.Conn))
		if err != nil {
			t.Fatal(err)
		}
		return n.Last != 0
	}
	link := w.link(0, 1)
	w.eventually("sequence numbers are known", func() { w.trip(e, 10) }, known)
	w.set("n0", link, netlink.LinkDel)
	w.eventually("the programs are detached", nil, func() bool {
		return !slices.Contains(w.devicesWith(0, "redirect_pod"), link) && len(w.devicesWith(0, "redirect_pod")) == 1
	})
	if !known() {
		t.Errorf("the sequence numbers are unknown: %s", w.paths[0].Describe())
	}
}

// replaceLinks gives the first pods of both nodes new links with other MAC addresses. The pods keep
// their sockets and addresses.
func replaceLinks(w *world) {
	for node := range 2 {
		w.replaceLinks(node)
	}
}

func (w *world) replaceLinks(node int) {
	w.Helper()
	place, name := fmt.Sprintf("n%d", node), w.link(node, 0)
	var was netlink.Link
	var addSecondLink []netlink.Route // to the pod, if it is not on a bridge
	w.in(place, func() (err error) {
		if was, err = netlink.LinkByName(name); err != nil {
			return err
		}
		addSecondLink, err = netlink.RouteList(was, netlink.FAMILY_V4)
		return err
	})
	ns := w.ns(place + "p0")
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Flags, attrs.MasterIndex, attrs.HardwareAddr = name, was.Attrs().MTU, net.FlagUp, was.Attrs().MasterIndex, was.Attrs().HardwareAddr
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(ns)
	var addresses []netlink.Addr
	var routes []netlink.Route
	w.in(place+"p0", func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		var errs [2]error
		addresses, errs[0] = netlink.AddrList(l, netlink.FAMILY_V4)
		routes, errs[1] = netlink.RouteList(l, netlink.FAMILY_V4)
		return errors.Join(errs[:]...)
	})
	w.in(place, func() error { return errors.Join(netlink.LinkDel(was), netlink.LinkAdd(veth)) })
	// The node leaves requests unanswered until it has the route to the pod.
	w.repeatARP(place, name)
	w.repeatARP(place+"p0", "eth0")
	if attrs.MasterIndex == 0 { // then the node answers ARP for the gateway
		w.sysctl(place, "net/ipv4/conf/"+name+"/proxy_arp", "1")
		w.sysctl(place, "net/ipv4/neigh/"+name+"/proxy_delay", "0")
	}
	w.in(place+"p0", func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		for _, a := range addresses {
			err = errors.Join(err, netlink.AddrAdd(l, &netlink.Addr{IPNet: a.IPNet}))
		}
		for _, linked := range []bool{true, false} { // the route to the gateway must come before the route through it
			for _, r := range routes {
				if r.LinkIndex = l.Attrs().Index; (r.Gw == nil) == linked {
					err = errors.Join(err, netlink.RouteReplace(&r))
				}
			}
		}
		return err
	})
	w.in(place, func() error {
		for _, r := range addSecondLink {
			r.LinkIndex = veth.Index
			if err := netlink.RouteReplace(&r); err != nil {
				return err
			}
		}
		return nil
	})
	w.deleteNeighbour(place, pod(node, 0))
	w.waitUp(place, name)
	w.waitUp(place+"p0", "eth0")
}

func (w *world) deleteNeighbour(node string, address netip.Addr) {
	w.Helper()
	w.in(node, func() error {
		all, err := netlink.NeighList(0, netlink.FAMILY_V4)
		for _, n := range all {
			if n.IP.Equal(address.AsSlice()) && n.State&(unix.NUD_PERMANENT|unix.NUD_NOARP) == 0 {
				err = errors.Join(err, netlink.NeighDel(&n))
			}
		}
		return err
	})
}

// changePodMAC changes the MAC address of the second node's first pod.
func changePodMAC(w *world) {
	w.set("n1p0", "eth0", func(l netlink.Link) error {
		m := l.Attrs().HardwareAddr
		m[5] ^= 1
		return netlink.LinkSetHardwareAddr(l, m)
	})
	w.deleteNeighbour("n1", pod(1, 0))
}

// changeNICMAC changes the MAC address of the second node's NIC.
func changeNICMAC(w *world) {
	w.set("n1", "eth0", func(l netlink.Link) error {
		m := l.Attrs().HardwareAddr
		m[5] ^= 1
		return netlink.LinkSetHardwareAddr(l, m)
	})
	w.deleteNeighbour("n0", netip.MustParseAddr("198.18.0.2"))
}

// flap sets the first node's NIC down, and up again.
func flap(w *world) {
	w.set("n0", "eth0", netlink.LinkSetDown)
	time.Sleep(100 * time.Millisecond) // how long it stays so
	w.set("n0", "eth0", netlink.LinkSetUp)
	w.waitUp("n0", "eth0")
	w.waitUp("sw", "node0")
}

// waitUp waits until a device is operational, which can take the kernel a second (linkwatch_event).
func (w *world) waitUp(place, device string) {
	w.Helper()
	w.eventually(device+" is up", nil, func() (up bool) {
		w.set(place, device, func(l netlink.Link) error { up = l.Attrs().OperState == netlink.OperUp; return nil })
		return up
	})
}

// reattachToBridge takes the link of the second node's first pod out of the bridge, and puts it
// back.
func reattachToBridge(w *world) {
	link := w.link(1, 0)
	w.set("n1", link, func(l netlink.Link) error { return netlink.LinkSetNoMaster(l) })
	time.Sleep(100 * time.Millisecond) // how long it stays so
	w.set("n1", link, func(l netlink.Link) error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, bridge)
	})
}

// recreateBridge deletes a node's bridge and creates another for the same pods.
func recreateBridge(w *world) {
	links := []string{w.link(0, 0), w.link(0, 1)}
	w.in("n0", func() error {
		old, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = "cni0", old.Attrs().MTU, net.FlagUp
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := errors.Join(netlink.LinkDel(old), netlink.LinkAdd(bridge),
			netlink.AddrAdd(bridge, &netlink.Addr{IPNet: prefix(pod(0, -1), 24)})); err != nil {
			return err
		}
		for _, name := range links {
			l, err := netlink.LinkByName(name)
			if err == nil {
				err = netlink.LinkSetMaster(l, bridge)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	w.flushGateway("n0p0")
	w.flushGateway("n0p1")
}

// flushGateway deletes a pod's neighbour entry of its gateway, as a pod does that announces a new
// MAC address.
func (w *world) flushGateway(place string) {
	w.Helper()
	w.in(place, func() error {
		all, err := netlink.NeighList(eth0(), netlink.FAMILY_V4)
		for _, n := range all {
			if n.State&unix.NUD_PERMANENT == 0 {
				err = errors.Join(err, netlink.NeighDel(&n))
			}
		}
		return err
	})
}

// TestDeviceChanges checks that connections survive changes of the devices on their path.
func TestDeviceChanges(t *testing.T) {
	t.Parallel()
	same := func(*netlink.Vxlan) {}
	for _, s := range []struct {
		shape string
		cases map[string]func(*world)
	}{
		{spec.ShapeFlannel, map[string]func(*world){
			"NIC down and up":        flap,
			"VXLAN device recreated": recreateVXLAN("flannel.1", same, "n0"),
			"VXLAN device MTU":       recreateVXLAN("flannel.1", func(v *netlink.Vxlan) { v.MTU = 1400 }, "n1"),
			"VNI":                    recreateVXLAN("flannel.1", func(v *netlink.Vxlan) { v.VxlanId++ }, "n0", "n1"),
			"VXLAN port":             recreateVXLAN("flannel.1", func(v *netlink.Vxlan) { v.Port ^= 1 }, "n0", "n1"),
			"bridge recreated":       recreateBridge,
			"pod links replaced":     replaceLinks,
			"pod MAC":                changePodMAC,
			"NIC MAC":                changeNICMAC,
			"pod link reattached":    reattachToBridge,
		}},
		{spec.ShapeCalico, map[string]func(*world){
			"VXLAN device recreated": recreateVXLAN("vxlan.calico", same, "n1"),
			"pod links replaced":     replaceLinks,
		}},
	} {
		t.Run(s.shape, func(t *testing.T) {
			t.Parallel()
			tw := newComparison(t, s.shape)
			for name, what := range s.cases {
				t.Run(name, func(t *testing.T) {
					tw.apply(t, what)
					tw.waitAccelerated(t)
				})
			}
		})
	}
}

// TestPodAddressMoves moves an address between pods, all of which would accept its packets. Packets
// that are sent after the kernel has learned of the move must be delivered to the right pod.
func TestPodAddressMoves(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.start()
	for _, device := range []string{"all", "cni0"} { // otherwise the sender is redirected to the other pod
		w.sysctl("n0", "net/ipv4/conf/"+device+"/send_redirects", "0")
	}
	address := netip.AddrFrom4([4]byte{10, 244, 1, 77})
	at := []struct{ node, pod int }{{1, 0}, {1, 1}, {0, 1}}
	// last is, for each pod, when the last datagram that it received was sent.
	var last [3]atomic.Int64
	for i, p := range at {
		place := fmt.Sprintf("n%dp%d", p.node, p.pod)
		w.sysctl(place, "net/ipv4/conf/all/arp_ignore", "1")
		w.set(place, "lo", func(l netlink.Link) error {
			return netlink.AddrAdd(l, &netlink.Addr{IPNet: prefix(address, 32)})
		})
		var socket *net.UDPConn
		w.in(place, func() (err error) {
			socket, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(address, knock)))
			return err
		})
		t.Cleanup(func() { socket.Close() })
		go func() {
			for got := make([]byte, 8); ; {
				n, from, err := socket.ReadFromUDPAddrPort(got)
				if err != nil {
					return
				}
				last[i].Store(int64(binary.NativeEndian.Uint64(got)))
				_, _ = socket.WriteToUDPAddrPort(got[:n], from)
			}
		}()
	}
	var near *net.UDPConn
	w.in("n0p0", func() (err error) {
		near, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(address, knock)))
		return err
	})
	t.Cleanup(func() { near.Close() })
	send := func() {
		time.Sleep(time.Millisecond) // limits the rate
		_, _ = near.Write(binary.NativeEndian.AppendUint64(nil, uint64(time.Now().UnixNano())))
	}
	byRoute := func(i int) {
		w.set(fmt.Sprintf("n%d", at[i].node), "cni0", func(l netlink.Link) error {
			return netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: prefix(address, 32), Gw: pod(at[i].node, at[i].pod).AsSlice()})
		})
	}
	noRoute := func(node string) {
		w.in(node, func() error { return netlink.RouteDel(&netlink.Route{Dst: prefix(address, 32)}) })
	}
	byNeighbour := func(i int) {
		var m net.HardwareAddr
		w.set(fmt.Sprintf("n%dp%d", at[i].node, at[i].pod), "eth0", func(l netlink.Link) error { m = l.Attrs().HardwareAddr; return nil })
		w.set(fmt.Sprintf("n%d", at[i].node), "cni0", func(l netlink.Link) error {
			return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_REACHABLE, IP: address.AsSlice(), HardwareAddr: m})
		})
	}
	moves := []struct {
		how string
		to  int
		do  func(to int)
	}{
		{"route", 0, byRoute},
		{"route", 1, byRoute},
		{"route to the other node", 2, byRoute},
		{"route back from the other node", 1, func(int) { noRoute("n0") }},
		{"neighbour entry", 0, func(to int) { byNeighbour(to); noRoute("n1") }},
		{"neighbour entry", 1, byNeighbour},
		{"neighbour entry", 0, byNeighbour},
	}
	promptly(t, "to a pod that no longer has the address", func() (longest time.Duration) {
		for _, move := range moves {
			name := fmt.Sprintf("%s to pod %v", move.how, at[move.to])
			move.do(move.to)
			moved := time.Now()
			w.eventually(name+": datagrams arrive there", send, func() bool { return last[move.to].Load() > moved.Add(within+soon).UnixNano() })
			for i := range at {
				if late := time.Unix(0, last[i].Load()).Sub(moved); i != move.to {
					longest = max(longest, late)
					if late > soon {
						t.Logf("%s: a datagram sent %s later was delivered to pod %v", name, late, at[i])
					}
				}
			}
			if at[move.to].node == 0 {
				continue
			}
			out, in := w.counts(0)["fast-out"], w.counts(1)["fast-in"]
			w.eventually(name+": datagrams take the fast path", send, func() bool { return w.counts(0)["fast-out"] > out+100 && w.counts(1)["fast-in"] > in+100 })
		}
		return longest
	})
}

// suspend stops a process, and waits until all its threads are stopped.
func (w *world) suspend(agent *exec.Cmd) {
	w.Helper()
	if err := agent.Process.Signal(unix.SIGSTOP); err != nil {
		w.Fatal(err)
	}
	w.eventually("the process has stopped", nil, func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", agent.Process.Pid))
		for _, thread := range threads {
			stat, failed := os.ReadFile(thread)
			err = errors.Join(err, failed)
			if _, state, _ := strings.Cut(string(stat), ") "); state == "" || state[0] != 'T' {
				return false
			}
		}
		if err != nil {
			w.Fatal(err)
		}
		return true
	})
}

func (w *world) resume(agent *exec.Cmd) {
	w.Helper()
	if err := agent.Process.Signal(unix.SIGCONT); err != nil {
		w.Fatal(err)
	}
}

// TestAgentSuspended stops the agent, as when a machine is suspended, and continues it. A drop rule
// that is added meanwhile must take effect within a second, even if the agent has not been notified
// by then. A VXLAN device that is recreated meanwhile must be used.
func TestAgentSuspended(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	agent := w.startAgent("n0")
	e, p := w.connect().back(), w.ping()
	for _, pause := range []time.Duration{fastpath.LeaseTime / 3, fastpath.LeaseTime + time.Second} {
		w.eventually("fast path", nil, func() bool { return w.slowPackets(e, 100) < 20 })
		p.begin()
		before := 0
		w.eventually("datagrams are accelerated", func() { before = w.forwarded("n0"); time.Sleep(50 * time.Millisecond) },
			func() bool { return p.back.Load() > 100 && w.forwarded("n0")-before < 20 })
		w.suspend(agent)
		w.drop("n0")
		set := time.Now()
		going := false
		w.eventually("the pause is over", nil, func() bool {
			if !going && time.Since(set) > pause {
				going = true
				w.resume(agent)
			}
			return time.Since(set) > max(pause, within)+500*time.Millisecond
		})
		took := time.Unix(0, p.newest.Load()).Sub(set)
		t.Logf("stopped for %s: datagrams that were sent until %s after the rule were delivered", pause, took)
		if took > within {
			t.Errorf("stopped for %s: datagrams were delivered for %s after a rule that drops them", pause, took)
		}
		p.on.Store(false)
		w.dropNothing("n0")
	}
	w.eventually("fast path again", nil, func() bool { return w.slowPackets(e, 100) < 20 })
	w.suspend(agent)
	recreateVXLAN("flannel.1", func(v *netlink.Vxlan) { v.VxlanId++ }, "n0", "n1")(w)
	w.trip(e, 100)
	w.resume(agent)
	w.eventually("fast path with the new device", nil, func() bool { return w.slowPackets(e, 100) < 20 })
}
