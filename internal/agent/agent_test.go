package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/testenv"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testNode is the node of a test: a network namespace in which the test's goroutine stays, and a folder in which its pods'
// namespaces are pinned, as a container runtime does.
type testNode struct {
	t       testing.TB
	ns      netns.Handle
	netns   string
	journal string
	pods    map[string]*testPod
}

type testPod struct {
	handle netns.Handle
	file   string
}

func newTestNode(t testing.TB) *testNode {
	t.Helper()
	testenv.NeedRoot(t)
	runtime.LockOSThread()
	before, err := vnetns.Get()
	must(t, err)
	ns, err := vnetns.New()
	must(t, err)
	run := t.TempDir() // in memory, like /run: on a disk, the file system's journal would delay writers
	must(t, unix.Mount("tmpfs", run, "tmpfs", 0, ""))
	p := &testNode{t: t, ns: ns, netns: t.TempDir(), journal: filepath.Join(run, "journal"), pods: make(map[string]*testPod)}
	t.Cleanup(func() {
		must(t, unix.Unmount(run, unix.MNT_DETACH))
		for name := range p.pods {
			p.remove(name)
		}
		if err := errors.Join(vnetns.Set(before), ns.Close(), before.Close()); err != nil {
			t.Errorf("leave the test's network namespace: %v", err) // the thread stays locked
			return
		}
		runtime.UnlockOSThread()
	})
	return p
}

// nic gives the node a device of class nic: a veth whose peer belongs to no pod.
func (p *testNode) nic() {
	p.t.Helper()
	p.nicWith(0)
}

// nicWith is nic with this number of receive queues, or as many as the kernel chooses if it is 0.
func (p *testNode) nicWith(queues int) {
	p.t.Helper()
	wire, err := vnetns.New()
	must(p.t, err)
	p.t.Cleanup(func() { wire.Close() })
	must(p.t, vnetns.Set(p.ns))
	must(p.t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "eth0", NumRxQueues: queues, NumTxQueues: queues}, PeerName: "wire", PeerNamespace: netlink.NsFd(wire),
	}))
	link, err := netlink.LinkByName("eth0")
	must(p.t, err)
	addr, err := netlink.ParseAddr("192.0.2.1/24")
	must(p.t, err)
	must(p.t, netlink.AddrAdd(link, addr))
}

// namespace makes a pod's namespace and pins it, as a container runtime does first.
func (p *testNode) namespace(name string) *testPod {
	p.t.Helper()
	handle, err := vnetns.New()
	must(p.t, err)
	file := filepath.Join(p.netns, name)
	must(p.t, os.WriteFile(file, nil, 0o444))
	must(p.t, unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, ""))
	must(p.t, vnetns.Set(p.ns))
	pod := &testPod{handle, file}
	p.pods[name] = pod
	return pod
}

// veth connects the pod, as a CNI plugin does next.
func (p *testNode) veth(pod, host string) {
	p.t.Helper()
	must(p.t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: host}, PeerName: "eth0", PeerNamespace: netlink.NsFd(p.pods[pod].handle),
	}))
}

func (p *testNode) pod(name string) {
	p.t.Helper()
	p.namespace(name)
	p.veth(name, "veth-"+name)
}

// remove removes a pod: its namespace ends, and its veth with it.
func (p *testNode) remove(name string) {
	pod := p.pods[name]
	delete(p.pods, name)
	if l, err := netlink.LinkByName("veth-" + name); err == nil {
		_ = netlink.LinkDel(l)
	}
	_ = unix.Unmount(pod.file, unix.MNT_DETACH) // the test may have unmounted it already
	must(p.t, os.Remove(pod.file))
	must(p.t, pod.handle.Close())
}

func (p *testNode) in(pod string, fn func()) {
	p.t.Helper()
	must(p.t, vnetns.Set(p.pods[pod].handle))
	fn()
	must(p.t, vnetns.Set(p.ns))
}

// settings reads every setting of this namespace that an accelerator can change.
func settings(t testing.TB) map[string]string {
	t.Helper()
	sys, err := netns.Sysfs()
	must(t, err)
	defer sys.Close()
	values := make(map[string]string)
	// Read sysfs, not netlink: the kernel cuts a netlink dump short when a device comes or goes.
	devices, err := fs.ReadDir(sys.FS(), "class/net")
	must(t, err)
	for _, d := range devices {
		dir := "class/net/" + d.Name() + "/queues"
		queues, _ := fs.ReadDir(sys.FS(), dir) // the device may have gone
		for _, q := range queues {
			for _, name := range []string{"rps_cpus", "rps_flow_cnt"} {
				path := dir + "/" + q.Name() + "/" + name
				if b, err := sys.ReadFile(path); err == nil {
					values[path] = string(b)
				}
			}
		}
	}
	return values
}

// snapshot reads the settings of the node and of its pods.
func (p *testNode) snapshot() map[string]map[string]string {
	p.t.Helper()
	all := map[string]map[string]string{"": settings(p.t)}
	for name := range p.pods {
		p.in(name, func() { all[name] = settings(p.t) })
	}
	return all
}

// masks maps "POD/DEVICE" to the RPS mask of its first queue, where one is set.
func (p *testNode) masks() map[string]string {
	p.t.Helper()
	out := make(map[string]string)
	for place, values := range p.snapshot() {
		for path, value := range values {
			f := strings.Split(path, "/")
			if mask := strings.TrimLeft(strings.TrimSpace(value), "0,"); mask != "" && f[4] == "rx-0" && f[5] == "rps_cpus" {
				out[place+"/"+f[2]] = mask
			}
		}
	}
	return out
}

func (p *testNode) options() Options {
	return Options{Node: "node0", JournalDir: p.journal, NetnsDirs: []string{p.netns}, Verify: time.Hour}
}

// running is an agent that runs in this process.
type running struct {
	*Agent
	t      testing.TB
	stop   func()
	events chan Event
}

func (p *testNode) start(o Options) *running {
	p.t.Helper()
	r := &running{t: p.t, events: make(chan Event, 100)}
	o.Notify = func(e Event) { r.events <- e }
	a, err := New(o)
	must(p.t, err)
	r.Agent = a
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			p.t.Errorf("agent: %v", err)
		}
		a.Close()
	}
	p.t.Cleanup(r.stop)
	return r
}

// eventually waits until want returns "". Otherwise it fails the test with the last text that want returned.
func eventually(t testing.TB, what string, want func() string) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, what, want)
}

func (p *testNode) wantMasks(what string, want map[string]string) {
	p.t.Helper()
	eventually(p.t, what, func() string { return cmp.Diff(want, p.masks()) })
}

func (r *running) wantState(policy string, state v1alpha1.State, reason string) v1alpha1.ObservedPolicy {
	r.t.Helper()
	var found v1alpha1.ObservedPolicy
	testenv.Eventually(r.t, time.Minute, "status of "+policy, func() string { // six agents may start at once, and load slowly
		s := r.Status()
		for _, o := range s.Policies {
			if o.Policy == policy && o.State == state && o.Reason == reason {
				found = o
				return ""
			}
		}
		return fmt.Sprintf("%+v, want %s %s", s, state, reason)
	})
	return found
}

func (p *testNode) wantJournal(want int) {
	p.t.Helper()
	eventually(p.t, "journal", func() string {
		files, err := filepath.Glob(filepath.Join(p.journal, "*.json*"))
		must(p.t, err)
		if len(files) != want {
			return fmt.Sprintf("%q, want %d", files, want)
		}
		return ""
	})
}

func rps(cpus string, devices ...string) v1alpha1.Accelerator {
	return v1alpha1.Accelerator{RPS: &v1alpha1.RPS{CPUs: cpus, Devices: devices}}
}

func one(p ...Policy) Desired { return Desired{Policies: p} }

var node0 = place.Place{Name: "node0", Kind: place.Node}

var plus = Policy{Name: "plus", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "nic", "overlay", "host-veth", "pod"))}

func TestPodsComeAndLeave(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	before := p.snapshot()
	a := p.start(p.options())

	// No policy is set yet, so nothing must be set.
	p.pod("b")
	if masks := p.masks(); len(masks) != 0 {
		t.Errorf("set before any policy: %v", masks)
	}
	a.Set(one(plus))
	want := map[string]string{"/eth0": "1", "/veth-a": "1", "/veth-b": "1", "a/eth0": "1", "b/eth0": "1"}
	p.wantMasks("policy on", want)
	if o := a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied); o.Settings != 5 || o.Verified != 5 {
		t.Errorf("%+v, want 5 settings, verified", o)
	}

	p.pod("c")
	want["/veth-c"], want["c/eth0"] = "1", "1"
	p.wantMasks("a pod comes", want)

	// Give one pod a second network, and rename existing devices.
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "veth-c2"}, PeerName: "net1", PeerNamespace: netlink.NsFd(p.pods["c"].handle),
	}))
	want["/veth-c2"], want["c/net1"] = "1", "1"
	p.wantMasks("a second network", want)
	rename(t, "veth-b", "cali-b")
	p.in("b", func() { rename(t, "eth0", "renamed") })
	delete(want, "/veth-b")
	delete(want, "b/eth0")
	want["/cali-b"], want["b/renamed"] = "1", "1"
	p.wantMasks("renamed", want)

	p.wantJournal(4)
	p.remove("c")
	for name := range want {
		if strings.Contains(name, "c2") || strings.HasPrefix(name, "c/") || name == "/veth-c" {
			delete(want, name)
		}
	}
	p.wantMasks("a pod leaves", want)
	p.wantJournal(3)
	eventually(t, "settings", func() string {
		if s := a.Status(); s.Settings != 5 || s.Pods != 2 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})

	rename(t, "cali-b", "veth-b")
	p.in("b", func() { rename(t, "renamed", "eth0") })
	a.Set(one())
	p.wantMasks("policy off", map[string]string{})
	p.remove("b")
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Errorf("not as before: %s", d)
	}
	p.wantJournal(0)
	eventually(t, "ready without a policy", func() string {
		if s := a.Status(); !s.Ready || s.Reason != v1alpha1.ReasonNoPolicy {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}

func rename(t testing.TB, from, to string) {
	t.Helper()
	l, err := netlink.LinkByName(from)
	must(t, err)
	must(t, netlink.LinkSetName(l, to))
}

// TestVerificationGivesWay checks that a pod that appears during a verification waits for only a few other pods.
func TestVerificationGivesWay(t *testing.T) {
	p := newTestNode(t)
	for i := range 10 {
		p.pod(fmt.Sprintf("pod%d", i))
	}
	a, err := New(p.options())
	must(t, err)
	defer a.Close()
	settle := func() (full bool) { // records the queued notifications
		for len(a.watch.changes) > 0 {
			full = a.note(<-a.watch.changes) || full
		}
		return full
	}
	a.Set(one(Policy{Name: "all", Accelerate: v1alpha1.ForPolicy(rps("all", "pod"))}))
	must(t, a.pass(t.Context(), a.take()))
	must(t, a.pass(t.Context(), true))
	settle()
	want := func(what string, unverified int, late string) {
		t.Helper()
		if got := p.masks()["late/eth0"]; len(a.unverified) != unverified || got != late {
			t.Errorf("%s: %d pods are to be verified, the late one's mask is %q; want %d and %q", what, len(a.unverified), got, unverified, late)
		}
	}
	p.pod("late")
	want("all verified once, then one more", 10, "")
	eventually(t, "messages", func() string {
		if len(a.watch.changes) == 0 {
			return "none"
		}
		return ""
	})
	a.verifyPart(t.Context(), time.Minute)
	want("a message waits", 10-verifyTogether, "")
	for want := ""; want == ""; want = p.masks()["late/eth0"] {
		must(t, a.pass(t.Context(), settle()))
	}
	want("the late pod went first", 10-verifyTogether, "3")
	settle()
	a.verifyPart(t.Context(), 1)
	want("the CPU time of a part is used up", 10-2*verifyTogether, "3")
	for len(a.unverified) > 0 {
		settle()
		a.verifyPart(t.Context(), time.Minute)
	}
	for _, g := range a.groups {
		if g.verified.IsZero() || g.err != nil {
			t.Errorf("%s: verified %v, %v", g.name(), g.verified, g.err)
		}
	}
}

// TestAdopt checks that an agent leaves its settings when it ends, and that the next one adopts those that are still wanted and
// restores the others.
func TestAdopt(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	before := p.snapshot()
	a := p.start(p.options())
	a.Set(one(plus))
	want := map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"}
	p.wantMasks("policy on", want)
	a.stop()
	if d := cmp.Diff(want, p.masks()); d != "" {
		t.Errorf("after the agent ended: %s", d)
	}

	// Before the agent has policies, it must not take settings for unwanted and restore them.
	a = p.start(p.options())
	p.pod("passes")
	p.remove("passes")
	if d := cmp.Diff(want, p.masks()); d != "" {
		t.Errorf("before any policy was read: %s", d)
	}
	a.Set(one(plus))
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	if d := cmp.Diff(want, p.masks()); d != "" {
		t.Errorf("adopted: %s", d)
	}
	select {
	case e := <-a.events:
		t.Errorf("adopting is told of: %+v", e)
	default:
	}
	a.stop()

	// At the next start, the policy has changed.
	a = p.start(p.options())
	a.Set(one(Policy{Name: "plus", Generation: 2, Accelerate: v1alpha1.ForPolicy(rps("0", "nic"))}))
	p.wantMasks("less is wanted", map[string]string{"/eth0": "1"})
	a.stop()

	a = p.start(p.options())
	a.Set(one())
	p.wantMasks("nothing is wanted", map[string]string{})
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Error(d)
	}
	p.wantJournal(0)

	// When no agent runs, a person can restore the settings.
	a.Set(one(plus))
	p.wantMasks("on again", want)
	a.stop()
	b, err := New(p.options())
	must(t, err)
	defer b.Close()
	if n, err := b.Revert(t.Context()); err != nil || n != 3 {
		t.Errorf("reverted %d, %v, want 3", n, err)
	}
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Error(d)
	}
	p.wantJournal(0)
}

func TestConflictAndNonsense(t *testing.T) {
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	a := p.start(p.options())
	none := fmt.Sprint(runtime.NumCPU() + 1)
	a.Set(one(
		Policy{Name: "first", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "nic"))},
		Policy{Name: "later", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0-1", "nic"), rps("0", "pod"))},
		Policy{Name: "agrees", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "nic", "host-veth"))},
		Policy{Name: "impossible", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps(none, "pod"))},
		Policy{Name: "invalid", Generation: 1, Invalid: errors.New("spec.accelerate: is missing")},
		Policy{Name: "contradicts", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "pod"), rps("0-1", "pod"))},
		Policy{Name: "nothing", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "overlay"), v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Devices: []string{"overlay"}, Entries: 1024}})},
	))
	p.wantMasks("the first wins", map[string]string{"/eth0": "1", "/veth-a": "1"})
	a.wantState("first", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.wantState("agrees", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	if o := a.wantState("later", v1alpha1.StateFailed, v1alpha1.ReasonConflict); !strings.Contains(o.Message, "policy first takes precedence") || o.Settings != 0 {
		t.Errorf("%+v, want one that names the first", o)
	}
	if o := a.wantState("impossible", v1alpha1.StateFailed, v1alpha1.ReasonImpossible); !strings.Contains(o.Message, "not online") {
		t.Errorf("%+v, want one that names the CPUs", o)
	}
	a.wantState("invalid", v1alpha1.StateFailed, v1alpha1.ReasonInvalid)
	a.wantState("contradicts", v1alpha1.StateFailed, v1alpha1.ReasonInvalid)
	a.wantState("nothing", v1alpha1.StatePending, v1alpha1.ReasonNoDevice)
	if s := a.Status(); s.Ready || s.Reason != v1alpha1.ReasonConflict {
		t.Errorf("%+v, want not ready", s)
	}

	// The first policy is deleted, so the later one is applied.
	a.Set(one(Policy{Name: "later", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0-1", "nic"), rps("0", "pod"))}))
	p.wantMasks("the first is gone", map[string]string{"/eth0": "3", "a/eth0": "1"})
	a.wantState("later", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
}

// TestFewEntries checks that the agent refuses only the policy whose flow table is smaller than a device's queues, and applies
// the others, in new pods too.
func TestFewEntries(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nicWith(4)
	a := p.start(p.options())
	few := v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Devices: []string{"nic", "pod"}, Entries: 2}}
	a.Set(one(Policy{Name: "few", Generation: 1, Accelerate: v1alpha1.ForPolicy(few)}, plus))
	if o := a.wantState("few", v1alpha1.StateFailed, v1alpha1.ReasonImpossible); o.Settings != 0 || o.Message != "rfs entries 2 are fewer than the 4 receive queues of eth0" {
		t.Errorf("%+v", o)
	}
	p.pod("a")
	p.wantMasks("the other policy", map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"})
	if o := a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied); o.Settings != o.Verified {
		t.Errorf("%+v", o)
	}
}

// TestAdoptAfterFailure checks that settings in pods stay while an agent that has just started cannot keep those of the node.
func TestAdoptAfterFailure(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	want := map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"}
	a := p.start(p.options())
	a.Set(one(plus))
	p.wantMasks("policy on", want)
	a.stop()

	damaged := filepath.Join(p.journal, "machine.json")
	must(t, os.WriteFile(damaged, []byte("{"), 0o600))
	a = p.start(p.options())
	a.Set(one(plus))
	a.wantState("plus", v1alpha1.StateFailed, v1alpha1.ReasonError)
	if d := cmp.Diff(want, p.masks()); d != "" {
		t.Errorf("while passes fail: %s", d)
	}

	must(t, os.Remove(damaged))
	a.Set(one(Policy{Name: "plus", Generation: 2, Accelerate: v1alpha1.ForPolicy(rps("0", "nic"))}))
	p.wantMasks("less is wanted", map[string]string{"/eth0": "1"})
}

// TestLaterVersionIsInvalid checks that a policy stays applied while a later version of it is invalid, and says so.
func TestLaterVersionIsInvalid(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	a := p.start(p.options())
	policy := plus
	a.Set(one(policy))
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	policy.LaterInvalid = "generation 2 is invalid"
	a.Set(one(policy))
	if o := a.wantState("plus", v1alpha1.StateFailed, v1alpha1.ReasonInvalid); o.Message != "generation 2 is invalid" || o.Generation != 1 || o.Verified != 1 {
		t.Errorf("%+v, want one that says so, and has the setting", o)
	}
	p.wantMasks("it stays", map[string]string{"/eth0": "1"})
	a.Set(one(plus))
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
}

// TestPolicyIsCreatedAgain checks that a policy that was deleted and created again, while its agent did not hear of it, is another
// one, although its name and generation are the same.
func TestPolicyIsCreatedAgain(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	a := p.start(p.options())
	policy := Policy{Name: "plus", UID: "1", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "nic", "pod"))}
	a.Set(one(policy))
	p.wantMasks("the first", map[string]string{"/eth0": "1", "a/eth0": "1"})
	policy.UID, policy.Accelerate = "2", v1alpha1.ForPolicy(rps("0-1", "nic", "pod"))
	a.Set(one(policy))
	p.wantMasks("the second", map[string]string{"/eth0": "3", "a/eth0": "3"})
}

// TestSelector checks that a policy that selects pods is not applied to a namespace until it is known to which pod that
// belongs.
func TestSelector(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	for i, name := range []string{"web", "db", "both"} {
		p.pod(name)
		p.in(name, func() {
			eth0, err := netlink.LinkByName("eth0")
			must(t, err)
			addr, err := netlink.ParseAddr(fmt.Sprintf("10.9.0.%d/24", i+1))
			must(t, err)
			must(t, netlink.AddrAdd(eth0, addr))
		})
	}
	labelled := func(key string) func(map[string]string) bool {
		return func(labels map[string]string) bool { return labels[key] != "" }
	}
	pod := func(name, ip string, labels ...string) Pod {
		pod := Pod{Name: "default/" + name, Labels: make(map[string]string), Addresses: []netip.Addr{netip.MustParseAddr(ip)}}
		for _, l := range labels {
			pod.Labels[l] = "yes"
		}
		return pod
	}
	policies := []Policy{
		{Name: "web", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "pod")), Selector: "web", Pods: labelled("web")},
		{Name: "db", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("1", "pod")), Selector: "db", Pods: labelled("db")},
	}
	a := p.start(p.options())
	a.Set(Desired{Policies: policies})
	a.wantState("web", v1alpha1.StatePending, v1alpha1.ReasonNoDevice)
	a.Set(Desired{Policies: policies, Pods: []Pod{pod("web", "10.9.0.1", "web")}})
	p.wantMasks("web is known", map[string]string{"web/eth0": "1"})
	a.Set(Desired{Policies: policies, Pods: []Pod{pod("web", "10.9.0.1", "web"), pod("db", "10.9.0.2", "db"), pod("both", "10.9.0.3", "web", "db")}})
	p.wantMasks("all are known", map[string]string{"web/eth0": "1", "db/eth0": "2", "both/eth0": "1"})
	if o := a.wantState("db", v1alpha1.StateFailed, v1alpha1.ReasonConflict); o.Settings != 1 || !strings.Contains(o.Message, "in 1 pods") {
		t.Errorf("%+v, want one setting, and one pod that another policy has", o)
	}
	// One label goes, another comes.
	a.Set(Desired{Policies: policies, Pods: []Pod{pod("web", "10.9.0.1", "db"), pod("db", "10.9.0.2"), pod("both", "10.9.0.3", "db")}})
	p.wantMasks("labels changed", map[string]string{"web/eth0": "2", "both/eth0": "2"})
	a.wantState("db", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	// A pod is gone from the list before its namespace is.
	a.Set(Desired{Policies: policies, Pods: []Pod{pod("both", "10.9.0.3", "db")}})
	p.wantMasks("a pod is gone", map[string]string{"both/eth0": "2"})
}

// TestListOfPods checks that a new list of pods makes the agent look for their namespaces, without verifying namespaces that
// still belong to no pod.
func TestListOfPods(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.pod("nobody's")
	p.pod("web")
	p.in("web", func() {
		eth0, err := netlink.LinkByName("eth0")
		must(t, err)
		addr, err := netlink.ParseAddr("10.9.0.1/24")
		must(t, err)
		must(t, netlink.AddrAdd(eth0, addr))
	})
	drift := func() {
		p.in("nobody's", func() {
			sys, err := netns.Sysfs()
			must(t, err)
			defer sys.Close()
			must(t, sys.WriteFile("class/net/eth0/queues/rx-0/rps_cpus", []byte("2"), 0))
		})
	}
	policies := []Policy{
		{Name: "all", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "pod"))},
		{Name: "web", Generation: 1, Accelerate: v1alpha1.ForPolicy(rps("0", "pod")), Selector: "web", Pods: func(labels map[string]string) bool { return labels["web"] != "" }},
	}
	o := p.options()
	o.Verify = time.Hour // after the first verification
	var a *running
	testenv.Retry(t, 3, func() error { // on a busy machine, the first verification may come before the change
		a = p.start(o)
		a.Set(Desired{Policies: policies})
		p.wantMasks("policies on", map[string]string{"nobody's/eth0": "1", "web/eth0": "1"})
		drift()
		for deadline := time.Now().Add(3 * firstVerify); p.masks()["nobody's/eth0"] != "1"; time.Sleep(firstVerify / 100) {
			if time.Now().After(deadline) {
				a.stop()
				return errors.New("no verification repaired the setting")
			}
		}
		return nil
	})
	drift()
	a.Set(Desired{Policies: policies, Pods: []Pod{{Name: "default/web", Labels: map[string]string{"web": "yes"}, Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.1")}}}})
	a.wantState("web", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	if got := p.masks(); got["nobody's/eth0"] != "2" {
		t.Errorf("masks %v: the namespace that is no pod's was verified", got)
	}
}

// TestDriftAndHeld checks that the agent repairs a changed setting and reports it, and that it does not touch settings that an
// experiment holds.
func TestDriftAndHeld(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	o := p.options()
	o.Verify = 50 * time.Millisecond
	a := p.start(o)
	a.Set(one(plus))
	want := map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"}
	p.wantMasks("policy on", want)
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	for _, where := range []string{"", "a"} {
		drift := func() {
			sys, err := netns.Sysfs()
			must(t, err)
			defer sys.Close()
			must(t, sys.WriteFile("class/net/eth0/queues/rx-0/rps_cpus", []byte("2"), 0))
		}
		if where == "" {
			drift()
		} else {
			p.in(where, drift)
		}
		p.wantMasks("repaired", want)
		select {
		case e := <-a.events:
			if e.Reason != "Repaired" || !strings.Contains(e.Message, "1 settings of node0") {
				t.Errorf("event %+v, want one of a repair", e)
			}
		case <-time.After(10 * time.Second):
			t.Error("no event of a repair")
		}
	}
	a.Set(one())
	p.wantMasks("policy off", map[string]string{})

	ho := a.options.accel(node0)
	ho.Owner, ho.Persistent = "an experiment", false
	s, err := accel.OpenApplier(ho)
	must(t, err)
	defer s.Close()
	_, err = s.Apply(t.Context(), []v1alpha1.Accelerator{rps("1", "nic")})
	must(t, err)
	a.Set(one(plus))
	if o := a.wantState("plus", v1alpha1.StateFailed, v1alpha1.ReasonHeld); !strings.Contains(o.Message, "an experiment (process") {
		t.Errorf("%+v, want one that says who", o)
	}
	p.wantMasks("the rest is had", map[string]string{"/eth0": "2", "/veth-a": "1", "a/eth0": "1"})
	_, err = s.Revert(t.Context())
	must(t, err)
	p.wantMasks("the experiment is over", want)
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
}

// TestNoteOfBridge checks that the agent does not mistake a bridge's notification that a port has left for the deletion of the
// device: both come from the same multicast group.
func TestNoteOfBridge(t *testing.T) {
	t.Parallel()
	a := &Agent{metrics: newMetrics(accel.Kinds())}
	known := link{name: "veth0", kind: "veth", class: v1alpha1.DeviceHostVeth, number: 1, peer: 2, announced: true}
	a.links = map[int]link{5: known}
	for _, kind := range []uint16{unix.RTM_DELLINK, unix.RTM_NEWLINK} {
		u := netlink.LinkUpdate{Header: unix.NlMsghdr{Type: kind}, Link: &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 5, Name: "veth0"}}}
		u.IfInfomsg.Family, u.IfInfomsg.Index = unix.AF_BRIDGE, 5
		if full := a.note(u); full || a.links[5] != known {
			t.Errorf("message %d: full pass %v, known is %+v", kind, full, a.links[5])
		}
	}
}
