package agent

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	tcx "github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

var (
	fastAccelerator = v1alpha1.Accelerator{Fastpath: new(v1alpha1.Fastpath)}
	fastPolicy      = Policy{Name: "fast", Generation: 1, Accelerate: v1alpha1.ForPolicy(fastAccelerator)}
)

// newOverlay returns a node of a lab, in which the test's goroutine stays. The other node has no agent.
func newOverlay(t testing.TB) *testNode {
	t.Helper()
	testenv.NeedRoot(t)
	name := fmt.Sprintf("agent-%x", sha1.Sum(fmt.Appendf(nil, "%s %d", t.Name(), os.Getpid())))[:14]
	l, err := lab.Up(t.Context(), lab.Config{
		Name: name, Nodes: 2, Pods: 2, Shape: spec.ShapeFlannel, NIC: spec.NIC{Offload: spec.OffloadFull, MTU: 1500},
	}, lab.Options{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	space := func(place string) netns.NsHandle {
		ns, err := netns.GetFromName("slip-" + name + "-" + place)
		must(t, err)
		t.Cleanup(func() { ns.Close() })
		return ns
	}
	// The name of this journal alone is longer than a socket address can be.
	p := &testNode{t: t, ns: space("n0"), netns: t.TempDir(), journal: filepath.Join(t.TempDir(), strings.Repeat("j", 108)), pods: make(map[string]*testPod)}
	runtime.LockOSThread()
	home, err := netns.Get()
	must(t, err)
	must(t, netns.Set(p.ns))
	t.Cleanup(func() {
		for name := range p.pods {
			if !slices.Contains(labPods, name) {
				p.remove(name)
			}
		}
		if err := errors.Join(netns.Set(home), home.Close()); err != nil {
			t.Errorf("leave the test's network namespace: %v", err)
			return
		}
		runtime.UnlockOSThread()
	})
	for _, pod := range labPods {
		p.pods[pod] = &testPod{handle: space(pod)}
	}
	// Remove the IPv6 device: these tests need only the IPv4 one.
	l6, err := netlink.LinkByName("flannel-v6.1")
	must(t, err)
	must(t, netlink.LinkDel(l6))
	return p
}

// labPods are a pod of this node and one of the other node.
var labPods = []string{"n0p0", "n1p0"}

// connect makes a connection from a pod of this node to one of the other.
func (p *testNode) connect() (near, far net.Conn) {
	p.t.Helper()
	var listener net.Listener
	var err error
	p.in("n1p0", func() { listener, err = net.Listen("tcp4", "10.244.1.2:0") })
	must(p.t, err)
	defer listener.Close()
	p.in("n0p0", func() { near, err = net.DialTimeout("tcp4", listener.Addr().String(), 10*time.Second) })
	must(p.t, err)
	far, err = listener.Accept()
	must(p.t, err)
	return near, far
}

// echo makes such a connection to an echo server.
func (p *testNode) echo() net.Conn {
	p.t.Helper()
	near, far := p.connect()
	p.t.Cleanup(func() { near.Close(); far.Close() })
	go func() { _, _ = io.Copy(far, far) }()
	return near
}

// trip sends a message and waits until it comes back.
func trip(t testing.TB, c net.Conn) {
	t.Helper()
	var sent, got [64]byte
	binary.NativeEndian.PutUint64(sent[:], uint64(time.Now().UnixNano()))
	must(t, c.SetDeadline(time.Now().Add(20*time.Second)))
	_, err := c.Write(sent[:])
	if err == nil {
		_, err = io.ReadFull(c, got[:])
	}
	must(t, err)
	if got != sent {
		t.Fatal("something else came back")
	}
}

// accelerated exchanges messages until this many more packets have taken the fast path in each direction.
func (r *running) accelerated(what string, c net.Conn, packets uint64) {
	r.t.Helper()
	out, in := r.packets("fast-out"), r.packets("fast-in")
	eventually(r.t, what, func() string {
		for range 20 { // one in 32 packets is sampled
			trip(r.t, c)
		}
		if nowOut, nowIn := r.packets("fast-out"), r.packets("fast-in"); nowOut < out+packets || nowIn < in+packets {
			return fmt.Sprintf("%d packets out, %d in", nowOut-out, nowIn-in)
		}
		return ""
	})
}

// packets returns how many packets took the fast path over VXLAN, out or in.
func (r *running) packets(reason string) uint64 {
	r.t.Helper()
	return uint64(max(0, r.metric(fmt.Sprintf("slipstream_fastpath_packets_total{kind=\"vxlan\",reason=%q}", reason))))
}

// programs returns the devices of this thread's network namespace that have programs.
func programs(t testing.TB) (names []string) {
	t.Helper()
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			q, err := tcx.QueryPrograms(tcx.QueryOptions{Target: l.Attrs().Index, Attach: at})
			if errors.Is(err, unix.ENODEV) {
				continue
			}
			must(t, err)
			for range q.Programs {
				names = append(names, l.Attrs().Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// metric reads a metric of an agent; it returns -1 if there is none.
func (r *running) metric(name string) float64 {
	r.t.Helper()
	w := httptest.NewRecorder()
	r.Metrics().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (.*)$`).FindStringSubmatch(w.Body.String())
	if m == nil {
		return -1
	}
	v, err := strconv.ParseFloat(m[1], 64)
	must(r.t, err)
	return v
}

// recreate deletes the overlay's device and creates it again, as a network plugin does when it restarts.
func recreate(t testing.TB) {
	t.Helper()
	l, err := netlink.LinkByName("flannel.1")
	must(t, err)
	old := l.(*netlink.Vxlan)
	fdb, err := netlink.NeighList(old.Index, unix.AF_BRIDGE)
	must(t, err)
	neighbours, err := netlink.NeighList(old.Index, unix.AF_INET)
	must(t, err)
	routes, err := netlink.RouteList(old, netlink.FAMILY_V4)
	must(t, err)
	addresses, err := netlink.AddrList(old, netlink.FAMILY_V4)
	must(t, err)
	must(t, netlink.LinkDel(old))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = old.Name, old.MTU, old.HardwareAddr
	made := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: old.VxlanId, VtepDevIndex: old.VtepDevIndex, SrcAddr: old.SrcAddr, Port: old.Port}
	must(t, netlink.LinkAdd(made))
	must(t, netlink.LinkSetUp(made))
	for _, a := range addresses {
		must(t, netlink.AddrAdd(made, &netlink.Addr{IPNet: a.IPNet, Scope: a.Scope}))
	}
	for _, n := range slices.Concat(fdb, neighbours) {
		if n.State != netlink.NUD_PERMANENT || n.Family == unix.AF_BRIDGE && n.IP == nil {
			continue
		}
		must(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: made.Index, Family: n.Family, Flags: n.Flags, State: n.State, IP: n.IP, HardwareAddr: n.HardwareAddr}))
	}
	for _, r := range routes {
		if r.Gw != nil {
			must(t, netlink.RouteReplace(&netlink.Route{LinkIndex: made.Index, Dst: r.Dst, Gw: r.Gw, Flags: int(netlink.FLAG_ONLINK)}))
		}
	}
	if made.Index == old.Index {
		t.Fatal("the device has the same index")
	}
}

// TestFastpath checks the fast path on a node with an overlay: switched on, while pods come and go,
// when the network plugin restarts, when the agent restarts, when somebody detaches programs, when
// another process wants it too, and switched off.
func TestFastpath(t *testing.T) {
	t.Parallel()
	p := newOverlay(t)
	before := programs(t)
	o := p.options()
	o.Verify = 300 * time.Millisecond
	a := p.start(o)
	c := p.echo()
	a.Set(one(fastPolicy))
	applied := a.wantState("fast", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	if s := a.Status(); applied.Settings != 0 || s.state("fastpath").Status != accel.StatusTrue || !strings.Contains(applied.Message, "idle: ") {
		t.Errorf("%+v %+v, want it to sleep", applied, s.state("fastpath"))
	}
	hooks := func(what string, want int) {
		t.Helper()
		eventually(t, what, func() string {
			s := a.Status()
			if s.state("fastpath").Kind == "" || len(s.state("fastpath").Attached) != want || s.Settings != want || s.Policies[0].Settings != want {
				return fmt.Sprintf("%+v, want %d hooks", s, want)
			}
			return ""
		})
	}
	a.accelerated("policy on", c, 100)
	const active = 6 // observe_nic and decap_nic, observe_vxlan and redirect_vxlan, and for the active pod observe_pod and redirect_pod
	hooks("active", active)
	if s := a.Status(); !s.Ready || s.state("fastpath").Status != accel.StatusTrue || s.state("fastpath").Reason != v1alpha1.ReasonAttached {
		t.Errorf("%+v %+v", s, s.state("fastpath"))
	}
	if on, fast, packets := a.metric("slipstream_fastpath_up"), a.metric(`slipstream_fastpath_flows{kind="vxlan",path="fast"}`), a.metric(`slipstream_fastpath_packets_total{kind="vxlan",reason="fast-out"}`); on != 1 || fast != 1 || packets < 100 {
		t.Errorf("up %v, flows %v, packets %v", on, fast, packets)
	}
	held, err := accel.Fastpaths(accel.Options{JournalDir: p.journal})
	if err != nil || len(held) != 1 || held[0].Place != "node0" || held[0].Holder.PID != os.Getpid() || len(held[0].Hooks) != active || held[0].Packets["fast-in-vxlan"] < 100 || held[0].Kinds["vxlan"] != 1 {
		t.Errorf("asked from outside: %+v, %v", held, err)
	}
	// A device that packets must not bypass.
	p.pod("shaped")
	shape(t, "veth-shaped")
	a.wantEvent(v1alpha1.ReasonSkipped, "veth-shaped")
	hooks("it is shaped", active)
	s := a.Status()
	if is := s.state("fastpath"); is.Reason != v1alpha1.ReasonSkipped || is.Status != accel.StatusTrue || !strings.Contains(is.Message, "veth-shaped: it has a queue (tbf)") || !strings.Contains(s.Policies[0].Message, "veth-shaped") {
		t.Errorf("%+v %+v", s.state("fastpath"), s.Policies)
	}
	if shaped, other := a.metric(`slipstream_fastpath_devices_skipped{reason="queue"}`), a.metric(`slipstream_fastpath_devices_skipped{reason="flowtable"}`); shaped != 1 || other != 0 {
		t.Errorf("%v devices are counted as skipped for a queue and %v for a flowtable, want 1 and 0", shaped, other)
	}
	p.remove("shaped")
	hooks("it leaves", active)

	// Somebody detaches a program.
	a.detachOne()
	a.wantEvent("Repaired", "1 settings of node0")
	hooks("attached again", active)
	a.accelerated("repaired", c, 100)

	// Another process wants the fast path here: an experiment's worker.
	other, err := accel.OpenApplier(accel.Options{Place: node0, JournalDir: p.journal, Owner: "other"})
	must(t, err)
	defer other.Close()
	if _, err := other.Apply(t.Context(), []v1alpha1.Accelerator{fastAccelerator}); !errors.Is(err, journal.ErrHeld) || !strings.Contains(err.Error(), fmt.Sprintf("held already by agent (process %d)", os.Getpid())) {
		t.Errorf("held twice: %v", err)
	}

	// A network plugin restarts, under traffic.
	stop, talking := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(talking)
		for {
			select {
			case <-stop:
				return
			default:
				trip(t, c)
			}
		}
	}()
	recreate(t)
	hooks("another device", active)
	close(stop)
	<-talking
	a.accelerated("another device", c, 100)

	// The next agent, while another process holds the fast path and afterwards.
	a.stop()
	// A process that another test forks inherits the links, and holds them until its exec.
	eventually(t, "after the agent ended", func() string { return cmp.Diff(before, programs(t)) })
	trip(t, c)
	if _, err := other.Apply(t.Context(), []v1alpha1.Accelerator{fastAccelerator}); err != nil {
		t.Error(err)
	}
	a = p.start(o)
	a.Set(one(fastPolicy))
	a.wantState("fast", v1alpha1.StateFailed, v1alpha1.ReasonHeld)
	if up := a.metric("slipstream_fastpath_up"); up != 0 {
		t.Errorf("up %v, want 0", up)
	}
	_, err = other.Revert(t.Context())
	must(t, err)
	a.wantState("fast", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.accelerated("another agent", c, 100)

	a.Set(one())
	eventually(t, "policy off", func() string { return cmp.Diff(before, programs(t)) })
	trip(t, c)
	eventually(t, "nobody holds it", func() string {
		held, err := accel.Fastpaths(accel.Options{JournalDir: p.journal})
		if err != nil || len(held) != 0 {
			return fmt.Sprintf("%+v, %v", held, err)
		}
		return ""
	})
	eventually(t, "status", func() string {
		if s := a.Status(); s.state("fastpath").Kind != "" || s.Settings != 0 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	if up := a.metric("slipstream_fastpath_up"); up != -1 {
		t.Errorf("up %v, want none", up)
	}
	if files, err := filepath.Glob(filepath.Join(p.journal, "fastpath-*")); err != nil || len(files) > 0 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

// shape limits the rate of a device with a qdisc.
func shape(t testing.TB, device string) {
	t.Helper()
	l, err := netlink.LinkByName(device)
	must(t, err)
	must(t, netlink.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       1e6, Buffer: 1e4, Limit: 1e5,
	}))
}

func (r *running) wantEvent(reason, text string) {
	r.t.Helper()
	var seen []Event
	limit := time.After(10 * time.Second)
	for {
		select {
		case e := <-r.events:
			if seen = append(seen, e); e.Reason == reason && strings.Contains(e.Message, text) {
				return
			}
		case <-limit:
			r.t.Fatalf("no event %s with %q in %+v", reason, text, seen)
		}
	}
}

// detachOne detaches a program as bpftool does: by its link, which any process can open.
func (r *running) detachOne() {
	r.t.Helper()
	l, err := netlink.LinkByName("flannel.1")
	must(r.t, err)
	q, err := tcx.QueryPrograms(tcx.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXIngress})
	must(r.t, err)
	id, ok := q.Programs[0].LinkID()
	if !ok {
		r.t.Fatal("the program is not attached by a link")
	}
	there, err := tcx.NewFromID(id)
	must(r.t, err)
	defer there.Close()
	must(r.t, there.Detach())
}

// removeGateways removes the node's default routes, and returns them.
func (p *testNode) removeGateways() (removed []netlink.Route) {
	p.t.Helper()
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	must(p.t, err)
	for _, r := range routes {
		if r.Gw != nil && (r.Dst == nil || r.Dst.IP.IsUnspecified()) {
			must(p.t, netlink.RouteDel(&r))
			removed = append(removed, r)
		}
	}
	return removed
}

// TestFastpathCannot checks a node without an overlay, with and without pods whose links it supports, with and without a route through a
// gateway, and one whose only overlay is of an unsupported kind.
func TestFastpathCannot(t *testing.T) {
	t.Parallel()
	p := newOverlay(t)
	a := p.start(p.options()) // which scans only after notifications
	a.Set(one(fastPolicy))
	if o := a.wantState("fast", v1alpha1.StateApplied, v1alpha1.ReasonApplied); o.Settings != 0 || o.Message != "fast path: idle: no pod has an eligible connection" {
		t.Errorf("%+v", o)
	}
	p.pod("new")
	shape(t, "veth-new") // no notification about a link announces this
	a.wantEvent(v1alpha1.ReasonSkipped, "veth-new")
	gateways := p.removeGateways()
	l, err := netlink.LinkByName("flannel.1")
	must(t, err)
	must(t, netlink.LinkDel(l))
	const local = "only connections between pods of this node are eligible"
	eventually(t, "connections between pods of the node are eligible", func() string {
		s := a.Status()
		if c := s.state("fastpath"); !strings.Contains(c.Message, local) {
			return fmt.Sprintf("%+v", c)
		}
		return ""
	})
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		if l.Type() == "veth" && l.Attrs().NetNsID >= 0 && l.Attrs().MasterIndex != 0 && l.Attrs().Name != "veth-new" {
			shape(t, l.Attrs().Name)
		}
	}
	o := a.wantState("fast", v1alpha1.StateFailed, v1alpha1.ReasonImpossible)
	if !strings.Contains(o.Message, "supports no VXLAN device and no NIC of this node") || !strings.Contains(o.Message, "veth-new: it has a queue") {
		t.Errorf("%+v", o)
	}
	for _, r := range gateways {
		must(t, netlink.RouteAdd(&r))
	}
	a.wantState("fast", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = "other", net.FlagUp
	must(t, netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: 4789}))
	o = a.wantState("fast", v1alpha1.StateFailed, v1alpha1.ReasonImpossible)
	if !strings.Contains(o.Message, "other: each packet has its own tunnel key") {
		t.Errorf("%+v", o)
	}
	if s := a.Status(); s.state("fastpath").Status != accel.StatusFalse || s.state("fastpath").Reason != v1alpha1.ReasonImpossible {
		t.Errorf("%+v", s.state("fastpath"))
	}
}

// TestFastpathOfTheUnit checks that the systemd unit has the capabilities that the fast path needs,
// in addition to those for other settings.
func TestFastpathOfTheUnit(t *testing.T) {
	t.Parallel()
	p := newOverlay(t)
	unit, err := os.ReadFile(filepath.Join("..", "..", "packaging", "slipstream-agent.service"))
	must(t, err)
	m := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("the unit bounds no capabilities")
	}
	set := "-all"
	for _, c := range strings.Fields(strings.ToLower(string(m[1]))) {
		set += ",+" + strings.TrimPrefix(c, "cap_")
	}
	testenv.NeedProgram(t, "setpriv", "apt-get install util-linux")
	p.load()
	p.child(time.Hour, fastPolicy.Accelerate, "setpriv", "--bounding-set", set).until(t, 6)
}

// TestUnitPermitsAddressFamilies checks that the systemd unit permits every address family whose
// sockets the agent's code opens.
func TestUnitPermitsAddressFamilies(t *testing.T) {
	t.Parallel()
	unit, err := os.ReadFile(filepath.Join("..", "..", "packaging", "slipstream-agent.service"))
	must(t, err)
	m := regexp.MustCompile(`(?m)^RestrictAddressFamilies=(.*)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("the unit restricts no families")
	}
	permitted, opened := strings.Fields(string(m[1])), 0
	opens := regexp.MustCompile(`Socket\(unix\.(AF_\w+)`)
	for _, pattern := range []string{"*.go", "../accel/*.go", "../accel/*/*.go", "../netns/*.go", "../nic/*.go"} {
		files, err := filepath.Glob(pattern)
		must(t, err)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			must(t, err)
			for _, family := range opens.FindAllSubmatch(text, -1) {
				opened++
				if !slices.Contains(permitted, string(family[1])) {
					t.Errorf("%s opens a socket of %s, which the unit refuses", file, family[1])
				}
			}
		}
	}
	if opened == 0 {
		t.Error("the test found no socket")
	}
}
