//go:build linux

package fastpath_test

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// network replaces flannel's shape in all tests that use it, so that they run on another network.
var network = flag.String("network", spec.ShapeFlannel, "the network of labs in flannel's shape")

// agentEnv makes this binary run the fast path in its network namespace until its input ends, as
// the agent does.
const agentEnv = "SLIPSTREAM_TEST_FASTPATH"

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(agentEnv) == "" {
		fastpath.IdleAfter(8)   // 4 s, because many tests wait until a fast path is idle
		fastpath.ForgetAfter(5) // 2.5 s, after TestConntrackTimeouts' entries have expired
		os.Exit(m.Run())
	}
	var f *fastpath.Fastpath
	ns, err := netns.Get()
	if err == nil {
		f, err = fastpath.Start(ns, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	// A failed test asks for the state by this signal.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR1)
	go func() {
		for range signals {
			fmt.Fprintln(os.Stderr, f.Describe())
		}
	}()
	fmt.Println("started")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

const patience = 20 * time.Second

// world is a lab of two nodes with two or three pods each, and the fast paths of the nodes.
type world struct {
	*testing.T
	name  string
	shape string
	paths [2]*fastpath.Fastpath
	// six makes its connections use IPv6; local makes them lead to the other pod of the same node.
	six, local bool
	// dialer and listener make its connections.
	dialer   net.Dialer
	listener net.ListenConfig
}

func newWorld(t *testing.T, shape, offload string) *world {
	return newWorldOfPods(t, shape, offload, 2)
}

// newWorldOfPods returns a world with this many pods on each node.
func newWorldOfPods(t *testing.T, shape, offload string, pods int) *world {
	t.Helper()
	testenv.NeedRoot(t)
	if shape == spec.ShapeFlannel {
		shape = *network
	}
	w := &world{T: t, shape: shape, name: fmt.Sprintf("fast-%x", sha1.Sum(fmt.Appendf(nil, "%s %d %d", t.Name(), os.Getpid(), time.Now().UnixNano())))[:13]}
	l, err := lab.Up(t.Context(), lab.Config{
		Name: w.name, Nodes: 2, Pods: pods, Shape: shape, NIC: spec.NIC{Offload: offload, MTU: 1500},
	}, lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return w
}

// ns opens the network namespace of "n0", "n0p1" or "sw".
func (w *world) ns(place string) netns.NsHandle {
	w.Helper()
	ns, err := netns.GetFromName("slip-" + w.name + "-" + place)
	if err != nil {
		w.Fatal(err)
	}
	return ns
}

func (w *world) in(place string, f func() error) {
	w.Helper()
	ns := w.ns(place)
	defer ns.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err == nil {
			defer home.Close()
			if err = netns.Set(ns); err == nil {
				err = f()
			}
			if err := netns.Set(home); err != nil {
				panic(err)
			}
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		w.Fatalf("in %s: %v", place, err)
	}
}

// start starts the fast paths of the nodes that forward the packets of connections. They end with the test, or when stop is called.
func (w *world) start(unseenBy ...string) {
	w.Helper()
	for i := range w.nodes() {
		w.startOn(i, unseenBy...)
	}
}

// startOn is start for one node, which takes half as long: the kernel verifies programs for most of that time.
func (w *world) startOn(i int, unseenBy ...string) {
	w.Helper()
	ns := w.ns(fmt.Sprintf("n%d", i))
	f, err := fastpath.Start(ns, slog.New(slog.NewTextHandler(w.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})), unseenBy...)
	if err != nil {
		w.Fatal(err)
	}
	w.paths[i] = f
	w.Cleanup(func() { w.stop(i); ns.Close() })
}

// sub runs a part of a test in the same world. What it opens ends with it.
func (w *world) sub(name string, test func()) {
	w.Helper()
	of := w.T
	of.Run(name, func(t *testing.T) {
		w.T = t
		defer func() { w.T = of }()
		test()
	})
}

func (w *world) stop(i int) {
	w.Helper()
	if w.paths[i] == nil {
		return
	}
	if err := w.paths[i].Close(); err != nil {
		w.Error(err)
	}
	w.paths[i] = nil
}

// counts returns the numbers of packets by reason: fast-out and fast-in are those of all kinds.
func (w *world) counts(node int) map[string]uint64 {
	w.Helper()
	counts, err := w.paths[node].Counts()
	if err != nil {
		w.Fatal(err)
	}
	for why, n := range counts {
		if name, kind, _ := record.SplitReason(why); kind != "" {
			counts[name] += n
		}
	}
	return counts
}

// wantKind checks that a node counts the packets and connections that it has accelerated as of one kind only.
func (w *world) wantKind(node int, kind string, e echo) {
	w.Helper()
	counts, err := w.paths[node].Counts()
	if err != nil {
		w.Fatal(err)
	}
	for why, n := range counts {
		if _, is, fast := record.SplitReason(why); fast && (n > 0) != (is == kind) {
			w.Errorf("node%d counts %d packets as %s; all are of the kind %s", node, n, why, kind)
		}
	}
	w.eventually("the connection is of its kind", func() { w.trip(e, 1) }, func() bool {
		_, kinds, err := w.paths[node].Connections()
		return err == nil && kinds[kind] > 0 && w.fastNow(node) == kinds[kind]
	})
}

// fastNow counts the connections that a node accelerates now.
func (w *world) fastNow(node int) (all int) {
	w.Helper()
	_, kinds, err := w.paths[node].Connections()
	if err != nil {
		w.Fatal(err)
	}
	for _, n := range kinds {
		all += n
	}
	return all
}

// eventually calls step, if there is one, and pauses, until a condition holds. The pauses leave the CPUs to other tests, many of
// which use connections at the same time.
func (w *world) eventually(what string, step func(), holds func() bool) {
	w.Helper()
	for begin := time.Now(); !holds(); {
		if time.Since(begin) > patience {
			for i, p := range w.paths {
				if p != nil {
					w.Logf("node%d: %v, skipped %q", i, w.counts(i), p.Skipped())
				}
			}
			w.Fatalf("%s: not within %s", what, patience)
		}
		if step != nil {
			step()
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// inspect calls step, which sends a packet of an ineligible connection, until a condition holds on the programs' counts. The
// connection does not keep its pod active, and on a busy machine the pod would be idle before enough packets are sampled.
func (w *world) inspect(step func(), holds func() bool) {
	w.Helper()
	w.eventually("packets are inspected", func() {
		for _, p := range w.paths {
			if p != nil {
				p.AttachAll()
			}
		}
		for range 32 { // the programs sample one in 32
			step()
		}
	}, holds)
}

func pod(node, n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, byte(node), byte(n + 2)}) }

func pod6(node, n int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0x73, 0x6c, 0x69, 0x70, 0x01, 7: byte(node), 15: byte(n + 2)})
}

// pod returns the address that connections of a pod use.
func (w *world) pod(node, n int) netip.Addr {
	if w.six {
		return pod6(node, n)
	}
	return pod(node, n)
}

// versions of IP inside the tunnel. The outer headers are IPv4.
var versions = map[string]bool{"IPv4": false, "IPv6": true}

// newWorldOf returns a world whose connections use one IP version. The lab has an IPv6 tunnel for
// IPv6; here IPv6 uses the IPv4 tunnel.
func newWorldOf(t *testing.T, shape, offload string, six bool) *world {
	t.Helper()
	return newWorld(t, shape, offload).of(six)
}

// newLocalWorld returns a world whose connections lead to another pod of the same node. A third pod has none.
func newLocalWorld(t *testing.T, shape string, six bool) *world {
	t.Helper()
	w := newWorldOfPods(t, shape, spec.OffloadFull, 3).of(six)
	w.local = true
	return w
}

// worldOf makes worlds with connections of each kind. Pods of a node are on a bridge, or the node routes between them.
var worldOf = map[string]func(*testing.T) *world{
	"vxlan":        func(t *testing.T) *world { return newWorld(t, spec.ShapeFlannel, spec.OffloadFull) },
	"routed":       func(t *testing.T) *world { return newWorld(t, overlay.ShapeRouted, spec.OffloadFull) },
	"local":        func(t *testing.T) *world { return newLocalWorld(t, spec.ShapeFlannel, false) },
	"local routed": func(t *testing.T) *world { return newLocalWorld(t, spec.ShapeCalico, false) },
}

func ofEachKind(t *testing.T, test func(*world)) {
	for kind, world := range worldOf {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(world(t))
		})
	}
}

// nodes returns the nodes that forward the packets of connections.
func (w *world) nodes() []string {
	if w.local {
		return []string{"n0"}
	}
	return []string{"n0", "n1"}
}

// farPod returns the pod to which connect leads, and otherPods those that have nothing to do with that connection.
func (w *world) farPod() string {
	if w.local {
		return "n0p1"
	}
	return "n1p0"
}

func (w *world) otherPods() []string {
	if w.local {
		return []string{"n0p2"}
	}
	return []string{"n0p1", "n1p1"}
}

// of makes the connections of a world use one IP version.
func (w *world) of(six bool) *world {
	w.Helper()
	w.six = six
	if !six || w.shape == overlay.ShapeRouted {
		return w
	}
	var recreateVXLAN [2]netlink.Link
	for i := range recreateVXLAN {
		w.in(fmt.Sprintf("n%d", i), func() error {
			links, err := netlink.LinkList()
			for _, l := range links {
				if v, ok := l.(*netlink.Vxlan); ok && v.SrcAddr.To4() != nil {
					recreateVXLAN[i] = l
				}
			}
			return err
		})
	}
	for i, l := range recreateVXLAN {
		w.in(fmt.Sprintf("n%d", i), func() error {
			index, first := l.Attrs().Index, net.IP(pod6(1-i, -2).AsSlice())
			to := &net.IPNet{IP: first, Mask: net.CIDRMask(64, 128)}
			return errors.Join(
				netlink.RouteDel(&netlink.Route{Dst: to}),
				netlink.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: first, HardwareAddr: recreateVXLAN[1-i].Attrs().HardwareAddr}),
				netlink.RouteAdd(&netlink.Route{LinkIndex: index, Dst: to, Gw: first, Flags: int(netlink.FLAG_ONLINK)}),
			)
		})
	}
	return w
}

// front sets up NAT in front of a server, and returns the address to which clients connect.
type front func(w *world, protocol byte, server netip.AddrPort) netip.AddrPort

func direct(_ *world, _ byte, server netip.AddrPort) netip.AddrPort { return server }

var service = netip.MustParseAddrPort("10.96.0.9:80")

// byService makes node0 translate the address of a Service to that of the server, and from then on
// to no other, as kube-proxy does.
func byService(w *world, protocol byte, server netip.AddrPort) netip.AddrPort {
	w.Helper()
	return w.dnat(service, server, protocol)
}

// rules changes the nftables rules of a node.
func (w *world) rules(node string, change func(*nftables.Conn)) {
	w.Helper()
	ns := w.ns(node)
	defer ns.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		w.Fatal(err)
	}
	change(conn)
	if err := conn.Flush(); err != nil {
		w.Fatal(err)
	}
}

// family returns the nftables family of an address, and the payload expression of the destination
// address.
func family(a netip.Addr) (f nftables.TableFamily, destination *expr.Payload) {
	p := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
	if a.Is4() {
		return nftables.TableFamilyIPv4, p
	}
	p.Offset, p.Len = 24, 16
	return nftables.TableFamilyIPv6, p
}

// dnat is byService for a given address and protocols.
func (w *world) dnat(from, server netip.AddrPort, protocols ...byte) netip.AddrPort {
	w.Helper()
	w.rules("n0", func(conn *nftables.Conn) {
		family, destination := family(from.Addr())
		table := conn.AddTable(&nftables.Table{Family: family, Name: "service"})
		conn.FlushTable(table)
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
		is := func(load expr.Any, data []byte) []expr.Any {
			return []expr.Any{load, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}}
		}
		for _, protocol := range protocols {
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(
				is(destination, from.Addr().AsSlice()),
				is(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, []byte{protocol}),
				is(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, binary.BigEndian.AppendUint16(nil, from.Port())),
				[]expr.Any{
					&expr.Immediate{Register: 1, Data: server.Addr().AsSlice()},
					&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, server.Port())},
					&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(family), RegAddrMin: 1, RegProtoMin: 2},
				})})
		}
	})
	return from
}

func masqueraded(w *world, _ byte, server netip.AddrPort) netip.AddrPort {
	w.Helper()
	w.rules("n0", func(conn *nftables.Conn) {
		family, destination := family(server.Addr())
		table := conn.AddTable(&nftables.Table{Family: family, Name: "masquerade"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "postrouting", Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			destination,
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: server.Addr().AsSlice()},
			&expr.Masq{},
		}})
	})
	return server
}

// echo is a connection from node0/pod0 to node1/pod0, or to node0/pod1 in a local world, which echoes.
type echo struct {
	net.Conn
	far net.Conn
}

func (w *world) connect() echo {
	w.Helper()
	return w.connectBy(direct)
}

func (w *world) connectBy(front front) echo {
	w.Helper()
	return w.connectOf(0, front)
}

// connectOf is connectBy between the pods with number n.
func (w *world) connectOf(n int, front front) echo {
	w.Helper()
	return w.connectFrom(n, n, front)
}

// connectFrom is connectOf for two pods with different numbers.
func (w *world) connectFrom(near, n int, front front) echo {
	w.Helper()
	var e echo
	var listener net.Listener
	node := 1
	if w.local {
		node, n = 0, 1-n
	}
	w.in(fmt.Sprintf("n%dp%d", node, n), func() (err error) {
		listener, err = w.listener.Listen(w.Context(), "tcp", ":0")
		return err
	})
	defer listener.Close()
	to := front(w, unix.IPPROTO_TCP, netip.AddrPortFrom(w.pod(node, n), uint16(listener.Addr().(*net.TCPAddr).Port)))
	w.in(fmt.Sprintf("n0p%d", near), func() (err error) {
		ctx, stop := context.WithTimeout(w.Context(), patience)
		defer stop()
		e.Conn, err = w.dialer.DialContext(ctx, "tcp", to.String())
		return err
	})
	var err error
	if e.far, err = listener.Accept(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { e.Close(); e.far.Close() })
	return e
}

// back makes the far end echo everything that it receives.
func (e echo) back() echo {
	go func() { _, _ = io.Copy(e.far, e.far) }()
	return e
}

func (e echo) trip(wait time.Duration) error {
	var message, got [64]byte
	binary.NativeEndian.PutUint64(message[:], uint64(time.Now().UnixNano()))
	if err := e.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	if _, err := e.Write(message[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(e, got[:]); err != nil {
		return err
	}
	if got != message {
		return errors.New("the echo differs")
	}
	return nil
}

// accelerate makes round trips until all packets take the fast path, on both nodes, both ways.
func (w *world) accelerate(e echo) {
	w.Helper()
	before := []map[string]uint64{w.counts(0)}
	if !w.local {
		before = append(before, w.counts(1))
	}
	w.eventually("fast path", func() {
		w.trip(e, 10) // one packet in 32 is sampled, and on an idle node only now and then
	}, func() bool {
		for i := range before {
			now := w.counts(i)
			if now["fast-out"] < before[i]["fast-out"]+10 || now["fast-in"] < before[i]["fast-in"]+10 {
				return false
			}
		}
		return true
	})
}

// sent counts the packets from pods of node0 that took the fast path. What a pod of the node sends to another is outgoing or incoming
// for the flow.
func (w *world) sent() uint64 {
	w.Helper()
	c := w.counts(0)
	if w.local {
		return c["fast-out"] + c["fast-in"]
	}
	return c["fast-out"]
}

var streamed = flag.Int("streamed", 64, "MiB that a stream sends at a time")

// stream sends until many packets have taken the fast path, and compares what arrives.
func (w *world) stream(e echo) {
	w.Helper()
	size := int64(*streamed) << 20
	block := make([]byte, 1<<16)
	var before uint64
	w.eventually("much of the stream takes the fast path", func() {
		before = w.sent()
		sum := make(chan [20]byte, 1)
		go func() {
			h := sha1.New()
			_, _ = io.CopyN(h, e.far, size)
			sum <- [20]byte(h.Sum(nil))
		}()
		h := sha1.New()
		for i := range int(size) / len(block) {
			for j := range 64 {
				binary.NativeEndian.PutUint64(block[j*1024:], uint64(i*j)*0x9e3779b97f4a7c15)
			}
			h.Write(block)
			if _, err := e.Write(block); err != nil {
				w.Fatal(err)
			}
		}
		if got, want := <-sum, [20]byte(h.Sum(nil)); got != want {
			w.Fatal("the data received differs from the data sent")
		}
	}, func() bool { return before > 0 && w.sent()-before > uint64(size)/(1<<16)/2 })
}

// accelerated returns a world and an accelerated connection in it.
func accelerated(t *testing.T, shape, offload string) (*world, echo) {
	t.Helper()
	w := newWorld(t, shape, offload)
	w.start()
	e := w.connect().back()
	w.accelerate(e)
	return w, e
}

var (
	tunnels  = []string{spec.ShapeFlannel, spec.ShapeCalico}
	shapes   = append(slices.Clip(tunnels), overlay.ShapeRouted)
	offloads = []string{spec.OffloadFull, spec.OffloadNone}
)

// TestFastPath checks that connections of either IP version take the fast path of both nodes, both ways, in each shape and with each
// NIC, and that their data arrives. In a tunnel, single packets are decapsulated at the NIC, unless that would bypass a tc filter.
func TestFastPath(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		for _, offload := range offloads {
			t.Run(shape+" "+offload, func(t *testing.T) {
				t.Parallel()
				w := newWorldOf(t, shape, offload, true) // with IPv4 as in all worlds
				w.start()
				for _, version := range []string{"IPv6", "IPv4"} {
					w.six = versions[version]
					w.sub(version, w.checkAccelerated)
					if w.shape != overlay.ShapeRouted {
						w.sub(version+" decapsulated at the NIC", w.checkDecappedAtNIC)
					}
				}
				if shape == spec.ShapeFlannel && w.shape != overlay.ShapeRouted {
					w.sub("filter at the NIC", w.checkFilterAtNIC)
				}
			})
		}
	}
}

func (w *world) checkAccelerated() {
	e := w.connect()
	w.stream(e)
	w.accelerate(e.back())
	kind := "vxlan"
	if w.shape == overlay.ShapeRouted {
		kind = "routed"
	}
	for i := range w.paths {
		w.wantKind(i, kind, e)
		c := w.counts(i)
		w.Logf("node%d: %v", i, c)
		for _, why := range []string{"encap-failed", "table-full", "rewritten", "csum-unverified", "exceeds-mtu"} {
			if c[why] > 0 {
				w.Errorf("node%d: %d packets counted as %s", i, c[why], why)
			}
		}
	}
}

// byKernel returns how many of 100 packets of a connection that arrive at node1 the kernel decapsulates.
func (w *world) byKernel(e echo) uint64 {
	w.Helper()
	before := w.decappedByKernel("n1")
	w.trip(e, 100)
	return w.decappedByKernel("n1") - before
}

func (w *world) checkDecappedAtNIC() {
	e := w.connect().back()
	w.eventually("decap_nic decapsulates", nil, func() bool { return w.byKernel(e) < 20 })
}

func (w *world) checkFilterAtNIC() {
	e := w.connect().back()
	w.eventually("decap_nic decapsulates", nil, func() bool { return w.byKernel(e) < 20 })
	w.filter("n1", netlink.HANDLE_MIN_INGRESS, func(l netlink.Link) bool { return l.Attrs().Name == "eth0" })
	w.eventually("the kernel decapsulates", nil, func() bool { return w.byKernel(e) >= 100 })
	w.accelerate(e)
}

// TestService checks that connections to a Service take the fast path both ways while node0
// translates their peer, and that they follow when the Service gets another backend.
func TestService(t *testing.T) {
	t.Parallel()
	for _, offload := range offloads {
		t.Run("TCP "+offload, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, offload)
			w.start()
			e := w.connectBy(byService)
			w.stream(e)
			w.accelerate(e.back())
			// Unrelated rule changes must end no connection.
			byService(w, unix.IPPROTO_TCP, netip.AddrPortFrom(pod(1, 1), 9))
			w.accelerate(e)
		})
	}
	t.Run("UDP", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
		w.start()
		var servers [2]*net.UDPConn
		var got [2]atomic.Int64
		for i := range servers {
			w.in(fmt.Sprintf("n1p%d", i), func() (err error) {
				servers[i], err = net.ListenUDP("udp4", &net.UDPAddr{IP: pod(1, i).AsSlice()})
				return err
			})
			t.Cleanup(func() { servers[i].Close() })
			go func() {
				buf := make([]byte, 64)
				for {
					n, from, err := servers[i].ReadFromUDP(buf)
					if err != nil {
						return
					}
					got[i].Add(1)
					_, _ = servers[i].WriteToUDP(buf[:n], from)
				}
			}()
		}
		dnat := func(i int) { byService(w, unix.IPPROTO_UDP, servers[i].LocalAddr().(*net.UDPAddr).AddrPort()) }
		dnat(0)
		var near *net.UDPConn
		w.in("n0p0", func() (err error) {
			near, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(service))
			return err
		})
		t.Cleanup(func() { near.Close() })
		trip := func() {
			buf := make([]byte, 64)
			_ = near.SetDeadline(time.Now().Add(patience))
			if _, err := near.Write([]byte("datagram")); err != nil {
				t.Fatal(err)
			}
			if _, err := near.Read(buf); err != nil {
				t.Fatal(err)
			}
		}
		for i := range servers {
			if i > 0 {
				// Until the agent has read the kernel's notification, the fast path carries datagrams to
				// the old server, whose replies need the conntrack entry that is deleted here.
				before := w.paths[0].Generation()
				dnat(i)
				w.eventually("the flows are invalidated", nil, func() bool { return w.paths[0].Generation() > before })
				w.in("n0", func() error {
					_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, dnatTo(service))
					return err
				})
				trip()
				if n := got[i].Load(); n != 1 {
					t.Fatalf("%d datagrams reached the new server, want 1", n)
				}
			}
			before := got[1-i].Load()
			c0, c1 := w.counts(0), w.counts(1)
			w.eventually("fast path", trip, func() bool {
				n0, n1 := w.counts(0), w.counts(1)
				return n0["fast-out"] > c0["fast-out"]+100 && n0["fast-in"] > c0["fast-in"]+100 && n1["fast-in"] > c1["fast-in"]+100
			})
			if n := got[1-i].Load() - before; n > 0 {
				t.Errorf("%d datagrams reached the other server", n)
			}
		}
	})
	t.Run("UDP not connected", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
		w.start()
		w.datagramsBy(byService) // starts the server
		var near *net.UDPConn
		w.in("n0p0", func() (err error) {
			near, err = net.ListenUDP("udp4", nil)
			return err
		})
		defer near.Close()
		w.eventually("packets are inspected", func() {
			buf := make([]byte, 64)
			_ = near.SetDeadline(time.Now().Add(patience))
			if _, err := near.WriteToUDPAddrPort([]byte("datagram"), service); err != nil {
				t.Fatal(err)
			}
			if _, err := near.Read(buf); err != nil {
				t.Fatal(err)
			}
		}, func() bool {
			c := w.counts(0)
			if w.shape == overlay.ShapeRouted { // no outer header depends on a hash
				return c["fast-out"] > 100 && c["fast-in"] > 100
			}
			return c["mismatch"] > 100 && c["fast-in"] > 100
		})
		if n := w.counts(0)["fast-out"]; n > 0 && w.shape != overlay.ShapeRouted {
			t.Errorf("%d packets left by the fast path", n)
		}
	})
	// Connections with masquerading, or with any NAT of IPv6, are not accelerated.
	t.Run("not accelerated", func(t *testing.T) {
		t.Parallel()
		w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true)
		w.startOn(0)
		for _, tt := range []struct {
			name  string
			six   bool
			front front
		}{
			{"IPv6", true, func(w *world, protocol byte, server netip.AddrPort) netip.AddrPort {
				return w.dnat(netip.MustParseAddrPort("[fd73:6c69:7002::9]:80"), server, protocol)
			}},
			{"masqueraded", false, masqueraded},
			{"masqueraded IPv6", true, masqueraded},
		} {
			w.six = tt.six
			w.sub(tt.name, func() {
				e := w.connectBy(tt.front).back()
				slow := func() uint64 { c := w.counts(0); return c["nat"] + c["rewritten"] + c["untracked"] }
				before := slow()
				w.inspect(func() { w.trip(e, 1) }, func() bool { return slow() > before+5 })
				if c := w.counts(0); c["fast-out"]+c["fast-in"] > 0 {
					w.Errorf("packets took the fast path: %v", c)
				}
			})
		}
	})
}

// untracked makes node0 not track datagrams of this length or more. They are not translated, even
// if others of their connection are.
func (w *world) untracked(length uint16) {
	w.Helper()
	family, at := nftables.TableFamilyIPv4, uint32(2)
	if w.six {
		family, at = nftables.TableFamilyIPv6, 4
	}
	w.rules("n0", func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: family, Name: "untracked"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: at, Len: 2},
			&expr.Cmp{Op: expr.CmpOpGte, Register: 1, Data: binary.BigEndian.AppendUint16(nil, length)},
			&expr.Notrack{},
		}})
	})
}

// anotherPod returns the address of another pod, which node0 translates to the server's.
func anotherPod(w *world, protocol byte, server netip.AddrPort) netip.AddrPort {
	w.Helper()
	return w.dnat(netip.AddrPortFrom(w.pod(1, 1), server.Port()), server, protocol)
}

// TestUntranslatedDatagrams checks that untracked datagrams, which are delivered without
// translation, do not validate the flow of a connection whose other datagrams are translated: the
// fast path would deliver them to another pod.
func TestUntranslatedDatagrams(t *testing.T) {
	t.Parallel()
	for name, front := range map[string]front{"to another pod": anotherPod, "masqueraded": masqueraded} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true)
			near := make(map[string]*net.UDPConn)
			for version, six := range versions {
				w.six = six
				c := w.datagramsBy(front)
				w.untracked(600)
				_ = c.SetDeadline(time.Now().Add(patience))
				if _, err := c.Write([]byte("datagram")); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 64)); err != nil {
					t.Fatal(err)
				}
				near[version] = c
			}
			w.startOn(0)
			for version, c := range near {
				before := w.counts(0)["nat"]
				w.inspect(func() { _, _ = c.Write(make([]byte, 1000)) }, func() bool { return w.counts(0)["nat"] > before+5 || w.counts(0)["fast-out"] > 0 })
				if now := w.counts(0); now["fast-out"]+now["fast-in"] > 0 {
					t.Errorf("%s: packets took the fast path: %v", version, now)
				}
			}
		})
	}
}

// dnatTo matches conntrack entries of connections to an address.
type dnatTo netip.AddrPort

func (to dnatTo) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	return f.Forward.DstIP.Equal(netip.AddrPort(to).Addr().AsSlice())
}

// decappedByKernel counts the packets that a node's kernel has decapsulated.
func (w *world) decappedByKernel(node string) (n uint64) {
	w.Helper()
	w.in(node, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if l.Type() == "vxlan" {
				n += l.Attrs().Statistics.RxPackets
			}
		}
		return err
	})
	return n
}

// TestLargePacketsDecappedAtNIC checks that large packets are decapsulated at the NIC while a
// socket of the pod is their only possible destination, and by the kernel while anything in the pod
// could do something else with them.
func TestLargePacketsDecappedAtNIC(t *testing.T) {
	t.Parallel()
	for version, six := range versions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			testLargePacketsDecappedAtNIC(t, six)
		})
	}
}

// segmentOf returns the receive MSS estimate of one end of a connection.
func segmentOf(t *testing.T, c net.Conn) (bytes uint32) {
	t.Helper()
	option(t, c.(*net.TCPConn), func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			bytes = info.Rcv_mss
		}
		return err
	})
	return bytes
}

func testLargePacketsDecappedAtNIC(t *testing.T, six bool) {
	w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, six)
	// The other end would accept longer segments than this one sends.
	w.in("n0p0", func() error {
		l, err := netlink.LinkByIndex(eth0())
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, 1300)
	})
	e := w.connect()
	go func() { _, _ = e.Write(make([]byte, 1<<20)) }()
	if _, err := io.CopyN(io.Discard, e.far, 1<<20); err != nil {
		t.Fatal(err)
	}
	segment := segmentOf(t, e.far)
	w.start()
	ip := nftables.TableFamilyIPv4
	if six {
		ip = nftables.TableFamilyIPv6
	}
	// byKernel returns the share of a stream's packets that the kernel decapsulates.
	byKernel := func() float64 {
		fast, kernel := w.counts(1)["fast-in"], w.decappedByKernel("n1")
		w.stream(e)
		return float64(w.decappedByKernel("n1")-kernel) / float64(w.counts(1)["fast-in"]-fast)
	}
	table := func(family nftables.TableFamily, c nftables.Chain) func() func() {
		return func() func() {
			t := &nftables.Table{Family: family, Name: "test"}
			w.rules("n1p0", func(conn *nftables.Conn) {
				conn.AddTable(t)
				c.Name, c.Table, c.Type, c.Priority = "test", t, nftables.ChainTypeFilter, nftables.ChainPriorityFilter
				conn.AddChain(&c)
			})
			return func() { w.rules("n1p0", func(conn *nftables.Conn) { conn.DelTable(t) }) }
		}
	}
	for _, tt := range []struct {
		name  string
		begin func() (end func())
	}{
		{"nftables prerouting chain", table(ip, nftables.Chain{Hooknum: nftables.ChainHookPrerouting})},
		{"nftables input chain", table(ip, nftables.Chain{Hooknum: nftables.ChainHookInput})},
		{"nftables netdev chain", table(nftables.TableFamilyNetdev, nftables.Chain{Hooknum: nftables.ChainHookIngress, Device: "eth0"})},
		{"tcx program", func() func() {
			var at link.Link
			w.in("n1p0", func() (err error) {
				at, err = link.AttachTCX(link.TCXOptions{Interface: eth0(), Program: program(t, ebpf.SchedCLS, asm.Mov.Imm(asm.R0, -1)), Attach: ebpf.AttachTCXIngress})
				return err
			})
			return func() { at.Close() }
		}},
		{"macvlan", func() func() {
			above := &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "above"}, Mode: netlink.MACVLAN_MODE_BRIDGE}
			w.in("n1p0", func() error {
				above.ParentIndex = eth0()
				return netlink.LinkAdd(above)
			})
			return func() { w.in("n1p0", func() error { return netlink.LinkDel(above) }) }
		}},
	} {
		w.eventually("decap_nic decapsulates", nil, func() bool { return byKernel() < 0.1 })
		if now := segmentOf(t, e.far); now != segment {
			t.Errorf("the receiver's MSS estimate is %d bytes, on the slow path %d", now, segment)
		}
		end := tt.begin()
		w.eventually("the kernel decapsulates: "+tt.name, nil, func() bool { return byKernel() > 0.9 })
		end()
	}

	// The fast path would bypass XDP programs of the pod, so it must not deliver there.
	w.in("n1p0", func() error {
		at, err := link.AttachXDP(link.XDPOptions{Interface: eth0(), Program: program(t, ebpf.XDP, asm.Mov.Imm(asm.R0, 2)), Flags: link.XDPDriverMode}) // XDP_PASS
		if err == nil {
			t.Cleanup(func() { at.Close() })
		}
		return err
	})
	w.eventually("no packet takes the fast path", nil, func() bool {
		before := w.counts(1)["fast-in"]
		w.stream(e)
		return w.counts(1)["fast-in"] == before
	})
}

// TestPodForwards checks that packets to a pod that forwards them take the fast path, but that
// large ones are decapsulated by the kernel: otherwise they would keep their tunnel GSO type.
func TestPodForwards(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.start()
	// node1/pod1 is reached through node1/pod0, which answers ARP for its address.
	const behind = "10.244.1.77"
	inner := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "inner"}, PeerName: "outer"}
	far := w.ns("n1p1")
	defer far.Close()
	inner.PeerNamespace = netlink.NsFd(far)
	route := func(device string, to netip.Prefix) error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err == nil {
			err = netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{
				IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), 32)}, Scope: netlink.SCOPE_LINK})
		}
		return err
	}
	w.in("n1p0", func() error {
		return errors.Join(netlink.LinkAdd(inner), route("inner", netip.MustParsePrefix(behind+"/32")),
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv4/conf/all/proxy_arp", []byte("1"), 0))
	})
	var listener net.Listener
	w.in("n1p1", func() (err error) {
		// The pod must not answer for its address on another device.
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/all/arp_ignore", []byte("1"), 0); err != nil {
			return err
		}
		l, err := netlink.LinkByName("outer")
		if err == nil {
			err = netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(behind), Mask: net.CIDRMask(32, 32)}})
		}
		if err == nil {
			err = route("outer", netip.PrefixFrom(pod(0, 0), 32))
		}
		if err == nil {
			listener, err = net.Listen("tcp4", behind+":0")
		}
		return err
	})
	defer listener.Close()
	var e echo
	w.in("n0p0", func() (err error) {
		e.Conn, err = net.DialTimeout("tcp4", listener.Addr().String(), patience)
		return err
	})
	var err error
	if e.far, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close(); e.far.Close() })
	var fast, kernel uint64
	w.eventually("packets take the fast path", nil, func() bool {
		before, taken := w.counts(1)["fast-in"], w.decappedByKernel("n1")
		w.stream(e)
		fast, kernel = w.counts(1)["fast-in"]-before, w.decappedByKernel("n1")-taken
		return fast >= 1000
	})
	if float64(kernel) < 0.9*float64(fast) {
		t.Errorf("of %d packets the kernel decapsulated %d, want all", fast, kernel)
	}
}

// eth0 returns the index of the pod's device in the current namespace.
func eth0() int {
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		return 0 // no device
	}
	return l.Attrs().Index
}

// program loads an eBPF program that returns the value in R0.
func program(t *testing.T, kind ebpf.ProgramType, does ...asm.Instruction) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, License: "GPL", Instructions: append(does, asm.Return())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// array returns an array map for a program.
func array(t *testing.T, valueSize, entries uint32) *ebpf.Map {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: valueSize, MaxEntries: entries})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// lookUpFirst puts a pointer to the first value of an array into R0, or jumps to missing. It overwrites R1 to R5.
func lookUpFirst(m *ebpf.Map, missing string) asm.Instructions {
	return asm.Instructions{
		asm.StoreImm(asm.R10, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, missing),
	}
}

// counting returns a program that counts packets by the value in R2 and passes them. A jump to
// "out" passes without counting.
func counting(t *testing.T, kinds uint32, kind ...asm.Instruction) (*ebpf.Map, *ebpf.Program) {
	t.Helper()
	seen := array(t, 8, kinds)
	return seen, program(t, ebpf.SchedCLS, append(kind,
		asm.StoreMem(asm.R10, -4, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, seen.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
	)...)
}

// filter adds a tc filter to a device of a node that passes all packets.
func (w *world) filter(node string, parent uint32, is func(netlink.Link) bool) {
	w.Helper()
	pass := program(w.T, ebpf.SchedCLS, asm.Mov.Imm(asm.R0, -1))
	w.in(node, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(links, is)
		if i < 0 {
			return errors.New("no such device")
		}
		index := links[i].Attrs().Index
		err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		return netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
			Fd:          pass.FD(), Name: "pass", DirectAction: true,
		})
	})
}

// TestVXLANFlooding checks that a VXLAN device is skipped if it floods frames to unknown MAC
// addresses, by a default FDB entry: the fast path would send one copy only.
func TestVXLANFlooding(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	w.in("n0", func() error {
		l, err := netlink.LinkByName("flannel.1")
		if err != nil {
			return err
		}
		return netlink.NeighAppend(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE, Flags: unix.NTF_SELF,
			State: unix.NUD_PERMANENT, HardwareAddr: make(net.HardwareAddr, 6), IP: net.IPv4(198, 18, 0, 9)})
	})
	w.eventually("the device is skipped", func() { _ = e.trip(patience) }, func() bool {
		return slices.Contains(w.paths[0].Skipped(), "flannel.1: it floods packets with unknown destinations")
	})
}

// datagrams returns a UDP socket in node0/pod0 whose peer in node1/pod0, or in node0/pod1 in a local world, echoes.
func (w *world) datagrams() *net.UDPConn {
	w.Helper()
	return w.datagramsBy(direct)
}

func (w *world) datagramsBy(front front) *net.UDPConn {
	w.Helper()
	near, far := w.datagramPair(front)
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := far.ReadFromUDP(buf)
			if err != nil {
				return
			}
			_, _ = far.WriteToUDP(buf[:n], from)
		}
	}()
	return near
}

// datagramPair returns a UDP socket in node0/pod0 and that of its peer.
func (w *world) datagramPair(front front) (near, far *net.UDPConn) {
	w.Helper()
	address := w.pod(1, 0)
	if w.local {
		address = w.pod(0, 1)
	}
	w.in(w.farPod(), func() (err error) {
		far, err = net.ListenUDP("udp", &net.UDPAddr{IP: address.AsSlice()})
		return err
	})
	to := front(w, unix.IPPROTO_UDP, far.LocalAddr().(*net.UDPAddr).AddrPort())
	w.in("n0p0", func() (err error) {
		near, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		return err
	})
	w.Cleanup(func() { near.Close(); far.Close() })
	for _, c := range []*net.UDPConn{near, far} { // so that nothing is lost while the machine stalls
		option(w.T, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20) })
	}
	return near, far
}

// drop makes a node drop the packets that it forwards to the port of datagrams.
func (w *world) drop(node string) {
	w.Helper()
	w.rules(node, func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "test"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}})
	})
}

func (w *world) dropNothing(node string) {
	w.Helper()
	w.rules(node, func(conn *nftables.Conn) {
		conn.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "test"})
	})
}

// TestDrop checks that whatever makes the slow path drop a connection also stops the fast path: at
// once if the kernel announces the change, within a second if not. Datagrams are sent at a fixed
// rate without waiting: those that revalidate the flow are dropped.
func TestDrop(t *testing.T) {
	t.Parallel()
	for _, node := range []string{"n0", "n1"} {
		for _, tt := range []struct {
			name     string
			shape    string
			six      bool
			notified bool
			drop     func(*world)
		}{
			{"notified IPv6", spec.ShapeFlannel, true, true, func(w *world) { w.drop(node) }},
			{"by a route IPv6", spec.ShapeCalico, true, true, func(w *world) {
				w.in(node, func() error {
					// Drop what goes to the pods of the other node, or to the node's own pod.
					to := w.pod(1, 0)
					return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(128, 128)}, Type: unix.RTN_BLACKHOLE, Priority: 1})
				})
			}},
			{"notified", spec.ShapeFlannel, false, true, func(w *world) { w.drop(node) }},
			{"not notified", spec.ShapeCalico, false, false, func(w *world) {
				w.in(node, func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) })
			}},
		} {
			t.Run(tt.name+" "+node, func(t *testing.T) {
				t.Parallel()
				if tt.notified {
					promptly(t, tt.name, func() time.Duration {
						took, _ := deliveredAfter(t, newWorldOf(t, tt.shape, spec.OffloadNone, tt.six), tt.drop)
						return took
					})
					return
				}
				took, pause := deliveredAfter(t, newWorldOf(t, tt.shape, spec.OffloadNone, tt.six), tt.drop)
				if took > within {
					t.Errorf("packets were delivered for %s, want at most %s", took, within)
				}
				// A stalled machine sends no datagram while the flow is valid.
				if least := 100 * time.Millisecond; took < least && pause < least {
					t.Errorf("packets were delivered for %s only: did the kernel notify?", took)
				}
			})
		}
	}
}

// deliveredAfter makes the nodes drop datagrams. took is how long datagrams were still delivered after that; pause is the longest
// time between two that were sent.
func deliveredAfter(t *testing.T, w *world, drop func(*world)) (took, pause time.Duration) {
	t.Helper()
	w.start()
	near := w.datagrams()
	var last atomic.Int64
	go func() {
		for got := make([]byte, 64); ; {
			if _, err := near.Read(got); err != nil {
				return
			}
			last.Store(int64(binary.NativeEndian.Uint64(got))) // when it was sent
		}
	}()
	sent := time.Now()
	send := func() {
		time.Sleep(time.Millisecond) // limits the rate
		now := time.Now()
		pause, sent = max(pause, now.Sub(sent)), now
		_, _ = near.Write(binary.NativeEndian.AppendUint64(nil, uint64(sent.UnixNano())))
	}
	w.eventually("fast path", send, func() bool {
		if w.local {
			return w.sent() > 40
		}
		return w.counts(0)["fast-out"] > 20 && w.counts(1)["fast-out"] > 20
	})
	pause = 0
	drop(w)
	set := time.Now()
	w.eventually("packets are dropped", send, func() bool {
		return time.Since(set) > 2*time.Second && time.Since(time.Unix(0, last.Load())) > time.Second
	})
	w.stop(0) // free the CPUs for the next attempt
	w.stop(1)
	return time.Unix(0, last.Load()).Sub(set), pause
}

// TestOneWayDatagrams checks that one-way datagrams take the fast path once one has been answered,
// and not before: netfilter rules see each of them as NEW until then. A drop rule stops them at
// once.
func TestOneWayDatagrams(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shape, spec.OffloadFull)
			routed := netip.AddrFrom4([4]byte{10, 244, 1, 77})
			w.route("n1", routed, pod(1, 0))
			w.in("n1p0", func() error {
				lo, err := netlink.LinkByName("lo")
				if err != nil {
					return err
				}
				return netlink.AddrAdd(lo, &netlink.Addr{IPNet: prefix(routed, 32)})
			})
			for _, node := range []string{"n0", "n1"} { // an entry that has seen one answer lasts until its turn
				w.sysctl(node, "net/netfilter/nf_conntrack_udp_timeout", "600")
			}
			answered, answeredRouted, silent := w.oneWay(pod(1, 0)), w.oneWay(routed), w.oneWay(pod(1, 0))
			// The other pod sends only these answers, before any program is attached.
			answered.answer()
			answeredRouted.answer()
			w.start()
			w.sub("answered", answered.checkFast)
			w.goIdle()
			w.sub("answered from a routed address", answeredRouted.checkFast)
			w.sub("not answered", silent.checkSlow)
		})
	}
}

// oneWay is a socket of node0/pod0 that sends datagrams to one of node1/pod0.
type oneWay struct {
	*world
	near, far *net.UDPConn
	last      atomic.Int64 // when the latest datagram that arrived was sent
}

func (w *world) oneWay(to netip.Addr) *oneWay {
	w.Helper()
	c := &oneWay{world: w}
	w.in("n1p0", func() (err error) {
		c.far, err = net.ListenUDP("udp4", &net.UDPAddr{IP: to.AsSlice()})
		return err
	})
	w.in("n0p0", func() (err error) {
		c.near, err = net.DialUDP("udp4", nil, c.far.LocalAddr().(*net.UDPAddr))
		return err
	})
	w.Cleanup(func() { c.near.Close(); c.far.Close() })
	return c
}

// answer has one datagram answered.
func (c *oneWay) answer() {
	c.Helper()
	buf := make([]byte, 64)
	for _, end := range []*net.UDPConn{c.near, c.far} {
		_ = end.SetReadDeadline(time.Now().Add(patience))
	}
	if _, err := c.near.Write([]byte("datagram")); err != nil {
		c.Fatal(err)
	}
	n, from, err := c.far.ReadFromUDP(buf)
	if err == nil {
		_, err = c.far.WriteToUDP(buf[:n], from)
	}
	if err == nil {
		_, err = c.near.Read(buf)
	}
	if err != nil {
		c.Fatal(err)
	}
	_ = c.far.SetReadDeadline(time.Time{})
}

func (c *oneWay) send() {
	_, _ = c.near.Write(binary.NativeEndian.AppendUint64(nil, uint64(time.Now().UnixNano())))
}

func (c *oneWay) checkSlow() {
	before := [2]map[string]uint64{c.counts(0), c.counts(1)}
	since := func(node int, why string) uint64 { return c.counts(node)[why] - before[node][why] }
	c.inspect(c.send, func() bool { return since(0, "unreplied") > 5 && since(1, "unreplied") > 5 })
	if out, in := since(0, "fast-out"), since(1, "fast-in"); out > 0 || in > 0 {
		c.Errorf("%d packets left and %d arrived by the fast path", out, in)
	}
}

func (c *oneWay) checkFast() {
	go func() {
		for buf := make([]byte, 64); ; {
			if _, err := c.far.Read(buf); err != nil {
				return
			}
			c.last.Store(int64(binary.NativeEndian.Uint64(buf))) // when it was sent
		}
	}()
	promptly(c, "a rule that drops them", func() time.Duration {
		out, in := c.counts(0)["fast-out"], c.counts(1)["fast-in"]
		c.eventually("fast path", func() {
			for range 10 {
				c.send()
			}
		}, func() bool { return c.counts(0)["fast-out"] > out+1000 && c.counts(1)["fast-in"] > in+1000 })
		c.drop("n1")
		set := time.Now()
		c.eventually("packets are dropped", c.send, func() bool { return time.Since(set) > 2*time.Second })
		took := time.Unix(0, c.last.Load()).Sub(set)
		c.dropNothing("n1")
		return took
	})
}

// goIdle makes the fast paths idle, as if there had been no connection for a while.
func (w *world) goIdle() {
	w.Helper()
	for i := range w.nodes() {
		w.paths[i].GoIdle()
		w.eventually("all programs are detached", nil, func() bool { return len(w.paths[i].Hooks()) == 0 })
	}
}

// route makes a node route an address to one of its pods, although the pod has another address.
func (w *world) route(node string, address, pod netip.Addr) {
	w.Helper()
	w.in(node, func() error {
		to, err := netlink.RouteGet(pod.AsSlice())
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: prefix(address, 32), Gw: pod.AsSlice(), LinkIndex: to[0].LinkIndex, Flags: int(netlink.FLAG_ONLINK)})
	})
}

// TestRevalidation checks that an unrelated route change invalidates a flow, and that the
// connection is accelerated again.
func TestRevalidation(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	before := w.counts(0)["invalidated"]
	w.in("n0", func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}, Type: unix.RTN_BLACKHOLE})
	})
	w.eventually("the flow is invalidated", func() { _ = e.trip(patience) }, func() bool { return w.counts(0)["invalidated"] > before })
	w.accelerate(e)
}

// startAgent runs the fast path of a node in another process.
func (w *world) startAgent(node string) *exec.Cmd {
	w.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), agentEnv+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		w.Fatal(err)
	}
	w.in(node, cmd.Start)
	w.Cleanup(func() { _ = cmd.Process.Kill(); stdin.Close(); _ = cmd.Wait() })
	line := make([]byte, 64)
	n, err := stdout.Read(line)
	if err != nil || string(line[:n]) != "started\n" {
		w.Fatalf("the agent prints %q: %v", line[:n], err)
	}
	return cmd
}

// forwarded returns how many packets the IP stack of a node has forwarded.
func (w *world) forwarded(node string) (n int) { return w.snmp(node, "Ip:", "ForwDatagrams") }

// slow returns how many packets of connections the kernel of node0 has forwarded. It does not count bridged ones, but the link of a pod counts
// what the node sends to it. The fast path bypasses both.
func (w *world) slow() (n int) {
	w.Helper()
	if !w.local {
		return w.forwarded("n0")
	}
	for pod := range 2 {
		w.set("n0", w.link(0, pod), func(l netlink.Link) error {
			n += int(l.Attrs().Statistics.TxPackets)
			return nil
		})
	}
	return n
}

// snmp returns a counter of /proc/net/snmp of a place.
func (w *world) snmp(place, protocol, counter string) (n int) {
	w.Helper()
	w.in(place, func() error {
		snmp, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		extensions, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(snmp) + string(extensions)) {
			f := strings.Fields(line)
			if f[0] != protocol {
				continue
			}
			if names == nil {
				names = f
				continue
			}
			_, err = fmt.Sscan(f[slices.Index(names, counter)], &n)
		}
		return err
	})
	return n
}

// TestAgentKilled checks that a connection continues on the slow path when the agent hangs or is
// killed, and is accelerated again afterwards. It has no other test beside it, because it measures how soon
// that is.
func TestAgentKilled(t *testing.T) {
	ofEachKind(t, func(w *world) { testAgentKilled(w.T, w) })
}

func testAgentKilled(t *testing.T, w *world) {
	agent := w.startAgent("n0")
	e := w.connect().back()
	trips := func(n int) (slow int) {
		t.Helper()
		before := w.slow()
		w.trip(e, n)
		return w.slow() - before
	}
	fast := func() bool { return trips(100) < 20 }
	w.eventually("fast path", nil, fast)

	w.suspend(agent)
	stopped := time.Now()
	w.eventually("slow path", nil, func() bool { return trips(10) >= 20 })
	if took := time.Since(stopped); took > fastpath.LeaseTime+2*time.Second {
		t.Errorf("the fast path was in use %s after the agent had stopped", took)
	}
	w.resume(agent)
	w.eventually("fast path again", nil, fast)

	if err := agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = agent.Wait()
	if slow := trips(100); slow < 200 {
		t.Errorf("%d of 200 packets were forwarded by the kernel after the agent was killed", slow)
	}
	if left := w.hooks("n0"); len(left) > 0 {
		t.Errorf("programs are still attached to %v", left)
	}
	w.startAgent("n0")
	w.eventually("fast path with another agent", nil, fast)
}

// hooks returns the devices of a node that have tcx programs.
func (w *world) hooks(node string) (names []string) {
	w.Helper()
	w.in(node, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
				if err != nil {
					return err
				}
				if len(q.Programs) > 0 {
					names = append(names, l.Attrs().Name)
				}
			}
		}
		return nil
	})
	return names
}

// state returns the configuration of a node that the fast path could change, as text.
func (w *world) state(node string) (lines []string) {
	w.Helper()
	w.in(node, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			a := l.Attrs()
			lines = append(lines, fmt.Sprintf("%s %d %s %d %s %d", a.Name, a.MTU, a.HardwareAddr, a.MasterIndex, a.Flags, a.Promisc))
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				filters, err := netlink.FilterList(l, parent)
				if err != nil {
					return err
				}
				lines = append(lines, fmt.Sprintf("%s has %d filters", a.Name, len(filters)))
			}
		}
		routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, r := range routes {
			lines = append(lines, r.String())
		}
		qdiscs, err := netlink.QdiscList(nil)
		if err != nil {
			return err
		}
		for _, q := range qdiscs {
			lines = append(lines, fmt.Sprint(q.Type(), q.Attrs()))
		}
		return nil
	})
	return append(lines, w.hooks(node)...)
}

// TestClose checks that closing the fast path restores the node and breaks no connection, in each kind of network.
func TestClose(t *testing.T) {
	t.Parallel()
	for name, world := range worldOf {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := world(t)
			before := w.state("n0")
			w.start()
			e := w.connect().back()
			w.accelerate(e)
			kind, _, _ := strings.Cut(name, " ") // both kinds of pods of one node are counted as local
			w.wantKind(0, kind, e)
			if got := w.hooks("n0"); len(got) == 0 {
				t.Error("no programs are attached")
			}
			w.stop(0)
			for range 100 {
				if err := e.trip(patience); err != nil {
					t.Fatal(err)
				}
			}
			if d := cmp.Diff(before, w.state("n0")); d != "" {
				t.Errorf("the node differs (-before +after):\n%s", d)
			}
		})
	}
}

// TestReset checks that an RST is delivered however many packets conntrack has missed, from a connection that is accelerated and after
// the fast path has stopped.
func TestReset(t *testing.T) {
	t.Parallel()
	network := func(t *testing.T) *world {
		w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, true) // with IPv4 as in all worlds
		w.start()
		w.dropInvalid("n0")
		w.dropInvalid("n1")
		return w
	}
	sizes := []int64{1 << 20, 3 << 30, 5 << 30} // every other over IPv6
	t.Run("accelerated", func(t *testing.T) {
		t.Parallel()
		w := network(t)
		for i, size := range sizes {
			w.six = i != 1
			w.sub(fmt.Sprint(size), func() { w.receive(size)() })
		}
	})
	for i, size := range sizes {
		t.Run(fmt.Sprintf("stopped after %d", size), func(t *testing.T) {
			t.Parallel()
			w := network(t)
			w.six = i == 1
			end := w.receive(size)
			w.stop(0)
			w.stop(1)
			end()
		})
	}
}

// receive makes the far end of a connection receive this much data. The returned function resets the connection, and checks that the far
// end and conntrack notice.
func (w *world) receive(size int64) (end func()) {
	w.Helper()
	e := w.connect()
	var received atomic.Int64
	ended := make(chan error, 1)
	go func() {
		buf := make([]byte, 1<<20)
		for {
			n, err := e.far.Read(buf)
			received.Add(int64(n))
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	before := w.counts(0)["fast-out"]
	block := make([]byte, 1<<20)
	for range size >> 20 {
		if _, err := e.Write(block); err != nil {
			w.Fatal(err)
		}
	}
	w.eventually("all data arrives", func() { runtime.Gosched() }, func() bool { return received.Load() == size })
	if c := w.counts(0); size > 1<<30 && c["fast-out"] < before+1000 {
		w.Errorf("packets did not take the fast path: %v", c)
	}
	return func() {
		if err := e.Conn.(*net.TCPConn).SetLinger(0); err != nil {
			w.Fatal(err)
		}
		e.Close()
		select {
		case err := <-ended:
			if !errors.Is(err, unix.ECONNRESET) {
				w.Errorf("the other end reads %v, want ECONNRESET", err)
			}
		case <-time.After(patience):
			w.Error("the RST did not arrive")
		}
		w.eventually("conntrack is in CLOSE", nil, func() bool {
			a, b := w.conntrack("n0", e), w.conntrack("n1", e)
			return a.State == stateClose && b.State == stateClose && a.Timeout <= closeTimeout && b.Timeout <= closeTimeout
		})
	}
}

// TestProbe checks that the self-test passes here and leaves nothing behind.
func TestProbe(t *testing.T) {
	t.Parallel()
	testenv.NeedRoot(t)
	for kind, probe := range map[string]func(context.Context) error{"VXLAN": fastpath.Probe, "routed": fastpath.ProbeRouted} {
		begin := time.Now()
		if err := probe(t.Context()); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		t.Logf("%s: the self-test took %s", kind, time.Since(begin))
	}
}
