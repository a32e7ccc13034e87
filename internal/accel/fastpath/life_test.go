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
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
)

// pulse is a datagram a millisecond from node0/pod0 to node1/pod0, which sends each back.
type pulse struct {
	*world
	near *net.UDPConn
	on   atomic.Bool
	// round tells datagrams that were sent before reset from those after.
	round, sent, back atomic.Uint64
}

func (w *world) pulse() *pulse {
	w.Helper()
	p := &pulse{world: w, near: w.datagrams()}
	go func() {
		for got := make([]byte, 64); ; {
			n, err := p.near.Read(got)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n == 8 && binary.NativeEndian.Uint64(got) == p.round.Load() {
				p.back.Add(1)
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
				_, _ = p.near.Write(binary.NativeEndian.AppendUint64(nil, p.round.Load()))
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

func (p *pulse) begin() {
	p.on.Store(false)
	p.round.Add(1)
	p.sent.Store(0)
	p.back.Store(0)
	p.on.Store(true)
}

// through waits until most of what is sent comes back.
func (p *pulse) through() {
	p.Helper()
	sent, back := p.sent.Load(), p.back.Load()
	p.world.eventually("datagrams get through", func() { time.Sleep(20 * time.Millisecond) }, func() bool {
		n, m := p.sent.Load()-sent, p.back.Load()-back
		sent, back = sent+n, back+m
		return n > 0 && m >= n*3/4
	})
}

// lost ends it, and counts those that did not come back.
func (p *pulse) lost() int {
	p.on.Store(false)
	for began := time.Now(); time.Since(began) < 100*time.Millisecond && p.back.Load() < p.sent.Load(); {
		time.Sleep(time.Millisecond)
	}
	return int(p.sent.Load() - p.back.Load())
}

// carried waits until it takes the fast path of both nodes, both ways.
func (p *pulse) carried() {
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
	p.eventually("datagrams are carried", func() { time.Sleep(30 * time.Millisecond) }, func() bool {
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

// strangers counts the packets of IPv4 that are put into the second pods though they are for others.
func (w *world) strangers() (count func() int) {
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

// twins are two worlds to which the same happens, one with fast paths, and one without.
type twins struct {
	fast, slow *world
	echoes     [2]echo
	pulses     [2]*pulse
	strangers  func() int
}

func newTwins(t *testing.T, shape string) *twins {
	t.Helper()
	tw := &twins{fast: newWorld(t, shape, v1alpha1.OffloadFull), slow: newWorld(t, shape, v1alpha1.OffloadFull)}
	tw.fast.start()
	for i, w := range []*world{tw.fast, tw.slow} {
		for node := range 2 { // or a question that is lost is asked again after a second
			w.sysctl(fmt.Sprintf("n%d", node), "net/ipv4/neigh/eth0/retrans_time_ms", "20")
		}
		tw.echoes[i], tw.pulses[i] = w.connect().back(), w.pulse()
	}
	tw.strangers = tw.fast.strangers()
	tw.carried(t)
	return tw
}

// happens has the same happen to both. No more datagrams are lost from then on than without the fast
// path, and connections go on.
func (tw *twins) happens(t *testing.T, what func(*world)) {
	const tolerated = 500 // half of what goes on to be carried if nobody hears of a change
	var lost [2]int
	for i, w := range []*world{tw.fast, tw.slow} {
		w.T = t
		p := tw.pulses[i]
		p.begin()
		what(w)
		p.begin() // what is lost meanwhile depends on how long that took
		p.through()
		lost[i] = p.lost()
		w.trip(tw.echoes[i], 1)
	}
	if lost[0] > lost[1]+tolerated {
		t.Errorf("%d datagrams were lost, %d without the fast path", lost[0], lost[1])
	}
}

// carried has connections be carried on both nodes, both ways, with nothing put into other pods.
func (tw *twins) carried(t *testing.T) {
	tw.fast.T, tw.slow.T = t, t
	tw.fast.warm(tw.echoes[0])
	tw.pulses[0].carried()
	if n := tw.strangers(); n > 0 {
		t.Errorf("%d packets were put into pods that they were not for", n)
	}
}

// set changes a device of a place.
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

// tunnels makes the VXLAN devices of some nodes anew, as flannel and Calico do when they start again
// and want others.
func tunnels(name string, change func(*netlink.Vxlan), nodes ...string) func(*world) {
	return func(w *world) {
		for _, node := range nodes {
			w.in(node, func() error { return remake(name, change) })
		}
	}
}

// relink gives the first pods of both nodes other links, with other Ethernet addresses: they have
// their sockets and addresses still.
func relink(w *world) {
	for node := range 2 {
		w.relink(node)
	}
}

func (w *world) relink(node int) {
	w.Helper()
	place, name := fmt.Sprintf("n%d", node), w.link(node, 0)
	var was netlink.Link
	var ways []netlink.Route // to the pod, where no bridge leads there
	w.in(place, func() (err error) {
		if was, err = netlink.LinkByName(name); err != nil {
			return err
		}
		ways, err = netlink.RouteList(was, netlink.FAMILY_V4)
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
	if attrs.MasterIndex == 0 { // then the node answers for the gateway
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
		for _, linked := range []bool{true, false} { // what a gateway is reached by goes first
			for _, r := range routes {
				if r.LinkIndex = l.Attrs().Index; (r.Gw == nil) == linked {
					err = errors.Join(err, netlink.RouteReplace(&r))
				}
			}
		}
		return err
	})
	w.in(place, func() error {
		for _, r := range ways {
			r.LinkIndex = veth.Index
			if err := netlink.RouteReplace(&r); err != nil {
				return err
			}
		}
		return nil
	})
	w.forgotten(place, pod(node, 0))
	w.up(place, name)
	w.up(place+"p0", "eth0")
}

// forgotten has a node not know any more where an address is.
func (w *world) forgotten(node string, address netip.Addr) {
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

// readdress gives the second node's first pod another Ethernet address.
func readdress(w *world) {
	w.set("n1p0", "eth0", func(l netlink.Link) error {
		m := l.Attrs().HardwareAddr
		m[5] ^= 1
		return netlink.LinkSetHardwareAddr(l, m)
	})
	w.forgotten("n1", pod(1, 0))
}

// rewire gives the second node's NIC another Ethernet address.
func rewire(w *world) {
	w.set("n1", "eth0", func(l netlink.Link) error {
		m := l.Attrs().HardwareAddr
		m[5] ^= 1
		return netlink.LinkSetHardwareAddr(l, m)
	})
	w.forgotten("n0", netip.MustParseAddr("198.18.0.2"))
}

// flap takes the first node's NIC down, and up again.
func flap(w *world) {
	w.set("n0", "eth0", netlink.LinkSetDown)
	time.Sleep(100 * time.Millisecond) // for so long
	w.set("n0", "eth0", netlink.LinkSetUp)
	w.up("n0", "eth0")
	w.up("sw", "node0")
}

// up waits until a device is, which the kernel may take a second for (linkwatch_event).
func (w *world) up(place, device string) {
	w.Helper()
	w.eventually(device+" is up", func() { time.Sleep(time.Millisecond) }, func() (up bool) {
		w.set(place, device, func(l netlink.Link) error { up = l.Attrs().OperState == netlink.OperUp; return nil })
		return up
	})
}

// replug takes the link of the second node's first pod out of the bridge, and puts it back.
func replug(w *world) {
	link := w.link(1, 0)
	w.set("n1", link, func(l netlink.Link) error { return netlink.LinkSetNoMaster(l) })
	time.Sleep(100 * time.Millisecond) // for so long
	w.set("n1", link, func(l netlink.Link) error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, bridge)
	})
}

// rebridge deletes a node's bridge and makes another for the same pods.
func rebridge(w *world) {
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
	w.forgets("n0p0")
	w.forgets("n0p1")
}

// forgets has a pod not know any more where its gateway is, as one does that says so to its
// neighbours.
func (w *world) forgets(place string) {
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

// TestDevicesChange has connections go on through what happens to the devices on their way.
func TestDevicesChange(t *testing.T) {
	same := func(*netlink.Vxlan) {}
	for _, s := range []struct {
		shape string
		cases map[string]func(*world)
	}{
		{v1alpha1.ShapeFlannel, map[string]func(*world){
			"the NIC goes down and up":            flap,
			"the VXLAN device is made anew":       tunnels("flannel.1", same, "n0"),
			"the VXLAN device gets narrower":      tunnels("flannel.1", func(v *netlink.Vxlan) { v.MTU = 1400 }, "n1"),
			"the overlay's number changes":        tunnels("flannel.1", func(v *netlink.Vxlan) { v.VxlanId++ }, "n0", "n1"),
			"the overlay's port changes":          tunnels("flannel.1", func(v *netlink.Vxlan) { v.Port ^= 1 }, "n0", "n1"),
			"the bridge is made anew":             rebridge,
			"pods get other links":                relink,
			"a pod gets another Ethernet address": readdress,
			"a NIC gets another Ethernet address": rewire,
			"a pod's link is out of the bridge":   replug,
		}},
		{v1alpha1.ShapeCalico, map[string]func(*world){
			"the VXLAN device is made anew": tunnels("vxlan.calico", same, "n1"),
			"pods get other links":          relink,
		}},
	} {
		t.Run(s.shape, func(t *testing.T) {
			tw := newTwins(t, s.shape)
			for name, what := range s.cases {
				t.Run(name, func(t *testing.T) {
					tw.happens(t, what)
					tw.carried(t)
				})
			}
		})
	}
}

// TestAddressMoves has an address move from pod to pod, all of which are there and would take what
// is for it: what is sent later than the kernel knows of that is put into the right one.
func TestAddressMoves(t *testing.T) {
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	w.start()
	for _, device := range []string{"all", "cni0"} { // or the sender is told to send to the other pod itself
		w.sysctl("n0", "net/ipv4/conf/"+device+"/send_redirects", "0")
	}
	address := netip.AddrFrom4([4]byte{10, 244, 1, 77})
	at := []struct{ node, pod int }{{1, 0}, {1, 1}, {0, 1}}
	// last is when the last of what a pod received was sent.
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
		time.Sleep(time.Millisecond) // the rate
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
	for _, move := range []struct {
		how string
		to  int
		do  func(to int)
	}{
		{"by a route", 0, byRoute},
		{"by a route", 1, byRoute},
		{"to the other node", 2, byRoute},
		{"from the other node", 1, func(int) { noRoute("n0") }},
		{"by a neighbour's entry", 0, func(to int) { byNeighbour(to); noRoute("n1") }},
		{"by a neighbour's entry", 1, byNeighbour},
		{"by a neighbour's entry", 0, byNeighbour},
	} {
		name := fmt.Sprintf("%s to pod %v", move.how, at[move.to])
		move.do(move.to)
		moved := time.Now()
		w.eventually(name+": it is there", send, func() bool { return last[move.to].Load() > moved.Add(2*soon).UnixNano() })
		for i := range at {
			if late := time.Unix(0, last[i].Load()).Sub(moved); i != move.to && late > soon {
				t.Errorf("%s: what was sent %s later was put into pod %v", name, late, at[i])
			}
		}
		if at[move.to].node == 0 {
			continue
		}
		out, in := w.counts(0)["fast-out"], w.counts(1)["fast-in"]
		w.eventually(name+": it is carried", send, func() bool { return w.counts(0)["fast-out"] > out+100 && w.counts(1)["fast-in"] > in+100 })
	}
}

// suspend stops a process, and waits until it does nothing any more.
func (w *world) suspend(holder *exec.Cmd) {
	w.Helper()
	if err := holder.Process.Signal(unix.SIGSTOP); err != nil {
		w.Fatal(err)
	}
	w.eventually("the process has stopped", func() { time.Sleep(time.Millisecond) }, func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", holder.Process.Pid))
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

// TestHolderIsSuspended stops the process that holds the fast path, as a machine that is suspended
// does, and has it go on. A rule that comes meanwhile ends what was carried within a second, also
// if it was not heard of by then; and a device that was made anew meanwhile is carried by.
func TestHolderIsSuspended(t *testing.T) {
	w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	holder := w.hold("n0")
	e, p := w.connect().back(), w.pulse()
	for _, pause := range []time.Duration{fastpath.LeaseTime / 3, fastpath.LeaseTime + time.Second} {
		w.eventually("fast path", func() {}, func() bool { return w.slow(e, 100) < 20 })
		p.begin()
		before := 0
		w.eventually("datagrams are carried", func() { before = w.forwarded("n0"); time.Sleep(50 * time.Millisecond) },
			func() bool { return p.back.Load() > 100 && w.forwarded("n0")-before < 20 })
		w.suspend(holder)
		w.drop("n0")
		set := time.Now()
		back, last, going := p.back.Load(), set, false
		w.eventually("the time is over", func() { time.Sleep(time.Millisecond) }, func() bool {
			if now := p.back.Load(); now != back {
				back, last = now, time.Now()
			}
			if !going && time.Since(set) > pause {
				going = true
				if err := holder.Process.Signal(unix.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}
			return time.Since(set) > max(pause, within)+500*time.Millisecond
		})
		t.Logf("stopped for %s: delivered for %s after the rule", pause, last.Sub(set))
		if took := last.Sub(set); took > within {
			t.Errorf("stopped for %s: datagrams were delivered for %s after a rule that drops them", pause, took)
		}
		p.on.Store(false)
		w.rules("n0", func(conn *nftables.Conn) {
			conn.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "test"})
		})
	}
	w.eventually("fast path again", func() {}, func() bool { return w.slow(e, 100) < 20 })
	w.suspend(holder)
	tunnels("flannel.1", func(v *netlink.Vxlan) { v.VxlanId++ }, "n0", "n1")(w)
	w.trip(e, 100)
	if err := holder.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.eventually("fast path by the new device", func() {}, func() bool { return w.slow(e, 100) < 20 })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s until the process had looked at the new device", took)
	}
}
