package accel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/testenv"
)

// claimMachine locks the machine's flow table for this test, with the lock of
// `slipstream run`, and waits until nobody else holds it.
func claimMachine(t testing.TB) {
	t.Helper()
	testenv.NeedRoot(t)
	const path = "/run/slipstream/run.lock"
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	table, err := kernel.Sysctls{Proc: "/proc"}.Read(kernel.FlowTable)
	must(t, err)
	// A failed test would leave its value to the next one.
	t.Cleanup(func() { must(t, kernel.Sysctls{Proc: "/proc"}.Write(kernel.FlowTable, table)) })
}

// enter moves the test's goroutine into a new network namespace, and makes another one, elsewhere. Neither is pinned.
func enter(t testing.TB) (elsewhere netns.Handle) {
	t.Helper()
	testenv.NeedRoot(t)
	runtime.LockOSThread()
	before, err := vnetns.Get()
	must(t, err)
	elsewhere, err = vnetns.New()
	must(t, err)
	ns, err := vnetns.New()
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(vnetns.Set(before), ns.Close(), elsewhere.Close(), before.Close()); err != nil {
			t.Errorf("leave the test's network namespace: %v", err) // the thread stays locked
			return
		}
		runtime.UnlockOSThread()
	})
	return elsewhere
}

func file(ns netns.Handle) string { return fmt.Sprintf("/proc/self/fd/%d", ns) }

// node gives the namespace the devices of a node: a NIC with four queues, an
// overlay, a bridge, and one veth for each pod, whose peer is elsewhere.
func node(t testing.TB, elsewhere netns.Handle, pods int) {
	t.Helper()
	eth := addVeth(t, elsewhere, "eth0", 4)
	must(t, netlink.AddrAdd(eth, address(t, "192.0.2.1/24")))
	must(t, netlink.LinkSetUp(eth))
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}}))
	must(t, netlink.LinkAdd(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 1, Port: 8472, VtepDevIndex: eth.Attrs().Index,
	}))
	for i := range pods {
		addVeth(t, elsewhere, fmt.Sprintf("veth%d", i), 1)
	}
}

// addVeth adds a veth whose peer is elsewhere.
func addVeth(t testing.TB, elsewhere netns.Handle, name string, queues int) netlink.Link {
	t.Helper()
	peer := fmt.Sprintf("sa%x", rand.Uint32())
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, NumRxQueues: queues, NumTxQueues: queues}, PeerName: peer,
		PeerNamespace: netlink.NsFd(elsewhere),
	}))
	link, err := netlink.LinkByName(name)
	must(t, err)
	t.Cleanup(func() { _ = netlink.LinkDel(link) }) // at once: the kernel removes the namespace with a delay
	return link
}

func address(t testing.TB, cidr string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(cidr)
	must(t, err)
	return a
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// snapshot reads the current value of every setting that an accelerator can change.
func snapshot(t testing.TB) map[string]string {
	t.Helper()
	sys, err := netns.Sysfs()
	must(t, err)
	defer sys.Close()
	values := make(map[string]string)
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		queues, err := fs.Glob(sys.FS(), "class/net/"+l.Attrs().Name+"/queues/rx-*/rps_*")
		must(t, err)
		for _, path := range queues {
			b, err := sys.ReadFile(path)
			must(t, err)
			values[path] = string(b)
		}
	}
	values[kernel.FlowTable], err = kernel.Sysctls{Proc: "/proc"}.Read(kernel.FlowTable)
	must(t, err)
	return values
}

// changed maps "DEVICE/QUEUE SETTING" to the current value, for every setting that has changed. The settings of a new device
// count as having been 0.
func changed(before, after map[string]string) map[string]string {
	out := make(map[string]string)
	for path, value := range after {
		if name, setting, ok := kernel.SplitQueue(path); ok && before[path] != value && (before[path] != "" || strings.Trim(value, "0,\n") != "") {
			out[name+"/"+strings.Split(path, "/")[4]+" "+setting] = strings.TrimSpace(value)
		}
	}
	return out
}

func options(dir, owner string) Options {
	return Options{Place: place.Place{Name: owner, Kind: place.Node}, JournalDir: dir, Owner: owner}
}

func open(t testing.TB, o Options) *Applier {
	t.Helper()
	s, err := OpenApplier(o)
	must(t, err)
	t.Cleanup(func() {
		if _, err := s.Revert(context.Background()); err != nil {
			t.Errorf("revert %s: %v", o.Owner, err)
		}
		must(t, s.Close())
	})
	return s
}

func TestApplyRevert(t *testing.T) {
	claimMachine(t)
	elsewhere := enter(t)
	node(t, elsewhere, 2)
	dir := filepath.Join(t.TempDir(), "journal")
	s := open(t, options(dir, "node0"))
	before := snapshot(t)
	accelerators := []v1alpha1.Accelerator{rps("0", "nic"), rfs(4096, "", "nic", "host-veth"), rps("all", "overlay")}

	planned, err := s.Plan(t.Context(), accelerators)
	must(t, err)
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Fatalf("plan changed something: %s", d)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("plan made the journal: %v", err)
	}

	settings, err := s.Apply(t.Context(), accelerators)
	must(t, err)
	all := first(runtime.NumCPU()).MaskLike(strings.TrimSpace(before["class/net/lo/queues/rx-0/rps_cpus"]))
	one := cpuset.New(0).MaskLike(all)
	want := map[string]string{
		"eth0/rx-0 rps_cpus": one, "eth0/rx-1 rps_cpus": one, "eth0/rx-2 rps_cpus": one, "eth0/rx-3 rps_cpus": one,
		"eth0/rx-0 rps_flow_cnt": "1024", "eth0/rx-1 rps_flow_cnt": "1024", "eth0/rx-2 rps_flow_cnt": "1024", "eth0/rx-3 rps_flow_cnt": "1024",
		"flannel.1/rx-0 rps_cpus": all,
		"veth0/rx-0 rps_flow_cnt": "4096", "veth1/rx-0 rps_flow_cnt": "4096",
	}
	after := snapshot(t)
	if d := cmp.Diff(want, changed(before, after)); d != "" {
		t.Errorf("applied: %s", d)
	}
	if after[kernel.FlowTable] != "4096" {
		t.Errorf("the machine's table has %s entries, want 4096", after[kernel.FlowTable])
	}
	if settings[0].Path != kernel.FlowTable {
		t.Errorf("first set was %s, want the machine's table", settings[0].Path)
	}
	for i, set := range settings {
		if set.Got != set.Want || set.Place != "node0" {
			t.Errorf("%+v: does not read back, or is nowhere", set)
		}
		planned[i].Got = set.Got
	}
	if d := cmp.Diff(planned, settings); d != "" {
		t.Errorf("planned and applied: %s", d)
	}

	held, err := Status(t.Context(), Options{JournalDir: dir})
	must(t, err)
	if len(held) != len(settings) {
		t.Errorf("status lists %d settings, want %d", len(held), len(settings))
	}
	for _, h := range held {
		if h.Got != h.Want || len(h.Holders) != 1 || h.Holders[0].PID != os.Getpid() {
			t.Errorf("status: %+v", h)
		}
	}
	if _, err := s.Apply(t.Context(), accelerators); err == nil {
		t.Error("a second apply is no error")
	}
	if restored, err := Recover(t.Context(), Options{JournalDir: dir}); err != nil || restored != nil {
		t.Errorf("recover while the holder lives: %v, %v, want nothing", restored, err)
	}

	restored, err := s.Revert(t.Context())
	if err != nil || restored != len(settings) {
		t.Errorf("restored %d, %v, want %d", restored, err, len(settings))
	}
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Errorf("reverted: %s", d)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
	if s.Settings() != nil {
		t.Errorf("settings after revert: %v", s.Settings())
	}
}

func TestPodPlace(t *testing.T) {
	elsewhere := enter(t)
	addVeth(t, elsewhere, "eth0", 2)
	o := options(t.TempDir(), "node0/pod0")
	o.Place.Kind = place.Pod
	s := open(t, o)
	before := snapshot(t)
	_, err := s.Apply(t.Context(), []v1alpha1.Accelerator{rps("0", "pod", "nic", "host-veth")})
	must(t, err)
	mask := cpuset.New(0).MaskLike(strings.TrimSpace(before["class/net/lo/queues/rx-0/rps_cpus"]))
	if d := cmp.Diff(map[string]string{"eth0/rx-0 rps_cpus": mask, "eth0/rx-1 rps_cpus": mask}, changed(before, snapshot(t))); d != "" {
		t.Error(d)
	}
}

// events is a slog.Handler that sends messages to a channel, so that a test can wait for one.
type events chan string

func (e events) Enabled(context.Context, slog.Level) bool { return true }
func (e events) WithAttrs([]slog.Attr) slog.Handler       { return e }
func (e events) WithGroup(string) slog.Handler            { return e }
func (e events) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "device" || a.Key == "error" {
			text += " " + a.Value.String()
		}
		return true
	})
	e <- text
	return nil
}

func (e events) want(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-e:
		if got != want {
			t.Fatalf("it says %q, want %q", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("no %q within 10 s", want)
	}
}

func TestFollow(t *testing.T) {
	elsewhere := enter(t)
	node(t, elsewhere, 1)
	o := options(t.TempDir(), "node0")
	log := make(events, 16)
	o.Log = slog.New(log)
	s := open(t, o)
	before := snapshot(t)
	_, err := s.Apply(t.Context(), []v1alpha1.Accelerator{rps("0", "host-veth")})
	must(t, err)
	mask := cpuset.New(0).MaskLike(strings.TrimSpace(before["class/net/lo/queues/rx-0/rps_cpus"]))
	step := func(want ...string) {
		t.Helper()
		devices := make(map[string]string)
		for _, name := range want {
			devices[name+"/rx-0 rps_cpus"] = mask
		}
		if d := cmp.Diff(devices, changed(before, snapshot(t))); d != "" {
			t.Errorf("applied: %s", d)
		}
		settings := s.Settings()
		for _, name := range want {
			if !hasDevice(settings, name) || len(settings) != len(want) {
				t.Errorf("settings: %v, want those of %v", settings, want)
			}
		}
		held, err := Status(t.Context(), o)
		must(t, err)
		if len(held) != len(want) {
			t.Errorf("held: %v, want those of %v", held, want)
		}
	}
	step("veth0")

	veth7 := addVeth(t, elsewhere, "veth7", 1)
	log.want(t, "accelerated a device that appeared veth7")
	step("veth0", "veth7")

	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}})) // of no class
	must(t, netlink.LinkSetName(veth7, "veth8"))
	addVeth(t, elsewhere, "veth9", 1)
	log.want(t, "accelerated a device that appeared veth9")
	step("veth0", "veth8", "veth9")

	first, err := netlink.LinkByName("veth0")
	must(t, err)
	must(t, netlink.LinkDel(first))
	log.want(t, "device is gone veth0")
	step("veth8", "veth9")

	// A lost notification ends the subscription.
	s.stopFollowing()
	addVeth(t, elsewhere, "veth10", 1)
	lost := &subscription{changes: make(chan netlink.LinkUpdate), done: make(chan struct{})}
	close(lost.changes)
	s.follower = s.follow(lost)
	log.want(t, "accelerated a device that appeared veth10")
	step("veth8", "veth9", "veth10")

	if restored, err := s.Revert(t.Context()); err != nil || restored != 3 {
		t.Errorf("restored %d, %v, want 3", restored, err)
	}
	if d := cmp.Diff(map[string]string{}, changed(before, snapshot(t))); d != "" {
		t.Errorf("reverted: %s", d)
	}
}

func TestTwoHolders(t *testing.T) {
	claimMachine(t)
	elsewhere := enter(t)
	node(t, elsewhere, 0)
	dir := t.TempDir()
	before := snapshot(t)
	table := func(want string) {
		t.Helper()
		if got := snapshot(t)[kernel.FlowTable]; got != want {
			t.Errorf("the table has %s entries, want %s", got, want)
		}
	}
	one, two, three := open(t, options(dir, "one")), open(t, options(dir, "two")), open(t, options(dir, "three"))
	for _, s := range []*Applier{one, two} {
		_, err := s.Apply(t.Context(), []v1alpha1.Accelerator{rfs(2048, "", "nic")})
		must(t, err)
	}
	table("2048")
	_, err := three.Apply(t.Context(), []v1alpha1.Accelerator{rfs(4096, "", "overlay")})
	if !errors.Is(err, journal.ErrHeld) || !strings.Contains(err.Error(), "one (process") {
		t.Errorf("another value: %v, want journal.ErrHeld and who holds it", err)
	}
	if got := snapshot(t)["class/net/flannel.1/queues/rx-0/rps_flow_cnt"]; got != "0\n" {
		t.Errorf("what was refused was applied in part: %s", got)
	}
	if restored, err := one.Revert(t.Context()); err != nil || restored != 0 {
		t.Errorf("the first to let go restored %d, %v, want nothing", restored, err)
	}
	table("2048")
	if restored, err := two.Revert(t.Context()); err != nil || restored != 5 {
		t.Errorf("the last to let go restored %d, %v, want 5", restored, err)
	}
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Error(d)
	}

	// Persistent settings belong to their owner, whichever process that is.
	o := options(dir, "cli")
	o.Persistent = true
	s, err := OpenApplier(o)
	must(t, err)
	_, err = s.Apply(t.Context(), []v1alpha1.Accelerator{rfs(2048, "", "nic")})
	must(t, err)
	must(t, s.Close())
	if restored, err := Recover(t.Context(), o); err != nil || restored != nil {
		t.Errorf("recover: %v, %v, want nothing of what is persistent", restored, err)
	}
	table("2048")
	if restored, err := open(t, o).Revert(t.Context()); err != nil || restored != 5 {
		t.Errorf("restored %d, %v, want 5", restored, err)
	}
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Error(d)
	}
}

func TestChangedMeanwhile(t *testing.T) {
	elsewhere := enter(t)
	node(t, elsewhere, 0)
	s := open(t, options(t.TempDir(), "node0"))
	_, err := s.Apply(t.Context(), []v1alpha1.Accelerator{rps("0", "nic")})
	must(t, err)
	const path = "class/net/eth0/queues/rx-1/rps_cpus"
	must(t, s.sys.Write(path, "0"))
	must(t, s.sys.Write("class/net/eth0/queues/rx-2/rps_cpus", first(runtime.NumCPU()).Mask()))
	restored, err := s.Revert(t.Context())
	if !errors.Is(err, journal.ErrChanged) || restored != 2 {
		t.Errorf("restored %d, %v, want 2 and journal.ErrChanged", restored, err)
	}
	if got, _ := s.sys.Read("class/net/eth0/queues/rx-2/rps_cpus"); strings.Trim(got, "0,") == "" {
		t.Errorf("somebody's mask was overwritten with %s", got)
	}
}

// TestRecoverOtherNamespaces recovers the settings that a dead process has left in another namespace, and those of a namespace
// that is gone.
func TestRecoverOtherNamespaces(t *testing.T) {
	claimMachine(t)
	dir := t.TempDir()
	table, err := kernel.Sysctls{Proc: "/proc"}.Read(kernel.FlowTable)
	must(t, err)
	t.Run("gone", func(t *testing.T) {
		elsewhere := enter(t)
		node(t, elsewhere, 0)
		applyAndDie(t, dir)
	})
	elsewhere := enter(t)
	node(t, elsewhere, 1)
	// A mount keeps a namespace alive without any process in it.
	mount := filepath.Join(t.TempDir(), "name of a place")
	testenv.WriteFile(t, mount, "")
	must(t, unix.Mount("/proc/thread-self/ns/net", mount, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(mount, unix.MNT_DETACH)) })
	before := snapshot(t)
	before[kernel.FlowTable] = table
	applyAndDie(t, dir)
	if cmp.Equal(before, snapshot(t)) {
		t.Fatal("nothing was applied")
	}
	must(t, netns.Do(elsewhere, func() error {
		held, err := Status(t.Context(), Options{JournalDir: dir})
		if err != nil || len(held) != 5 {
			t.Errorf("status: %v, %v, want the 5 settings of the namespace that is there", held, err)
		}
		restored, err := Recover(t.Context(), Options{JournalDir: dir})
		if err != nil || len(restored) != 5 {
			t.Errorf("recovered %v, %v, want 5 settings", restored, err)
		}
		return nil
	}))
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Error(d)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
}

// applyAndDie leaves settings of a process that does not exist.
func applyAndDie(t *testing.T, dir string) {
	t.Helper()
	s, err := OpenApplier(options(dir, "dead"))
	must(t, err)
	s.holder.Start = 1
	_, err = s.Apply(t.Context(), []v1alpha1.Accelerator{rfs(2048, "", "nic")})
	must(t, err)
	must(t, s.Close())
}

func TestDevices(t *testing.T) {
	testenv.NeedRoot(t)
	elsewhere := enter(t)
	addVeth(t, elsewhere, "veth0", 3)
	devices, err := Devices(false)
	must(t, err)
	var names []string
	for _, d := range devices {
		names = append(names, fmt.Sprintf("%s %s %s %d", d.Name, d.Kind, d.Class, d.RxQueues))
	}
	for _, want := range []string{"lo device  1", "veth0 veth host-veth 3"} {
		if !strings.Contains(strings.Join(names, "\n"), want) {
			t.Errorf("devices %q, want one to be %q", names, want)
		}
	}
}

// The journal under SIGKILL.

const (
	kills   = 200
	killEnv = "SLIPSTREAM_TEST_ACCEL_JOURNAL"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(killEnv); dir != "" {
		if err := applyForEver(dir, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// applyForEver runs in the child process: it applies and reverts in a loop, and reports each step.
func applyForEver(dir string, progress io.Writer) error {
	o := options(dir, "doomed")
	s, err := OpenApplier(o)
	if err != nil {
		return err
	}
	for ctx := context.Background(); ; {
		if _, err := progress.Write([]byte{'.'}); err != nil {
			return err
		}
		if _, err := s.Apply(ctx, []v1alpha1.Accelerator{
			rfs(1<<12, "0", "nic", "overlay"), rps("all", "host-veth"),
		}); err != nil {
			return err
		}
		if _, err := progress.Write([]byte{'.'}); err != nil {
			return err
		}
		if _, err := s.Revert(ctx); err != nil {
			return err
		}
	}
}

func TestKill(t *testing.T) {
	claimMachine(t)
	elsewhere := enter(t)
	node(t, elsewhere, 6)
	// The values at the start need not be zero.
	sys, err := kernel.OpenSysfs("")
	must(t, err)
	defer sys.Close()
	must(t, sys.Write("class/net/eth0/queues/rx-2/rps_cpus", "1"))
	must(t, sys.Write("class/net/veth3/queues/rx-0/rps_cpus", "1"))
	must(t, sys.Write("class/net/eth0/queues/rx-1/rps_flow_cnt", "64"))
	before := snapshot(t)

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	recovered := 0
	for kill := range kills {
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), killEnv+"="+dir)
		child.Stderr = os.Stderr
		out, err := child.StdoutPipe()
		must(t, err)
		must(t, child.Start()) // forked by this thread, so in its namespace
		// Wait for a random number of applies and reverts, then for a random moment of the next
		// one.
		progress := bufio.NewReader(out)
		for range 1 + random.IntN(4) {
			if _, err := progress.ReadByte(); err != nil {
				t.Fatalf("kill %d: the child ended: %v", kill, err)
			}
		}
		time.Sleep(time.Duration(random.Int64N(int64(6 * time.Millisecond))))
		must(t, child.Process.Kill())
		// A zombie counts as dead: its parent may not reap it for a long time.
		must(t, unix.Waitid(unix.P_PID, child.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
		restored, err := Recover(t.Context(), Options{JournalDir: dir})
		if err != nil {
			t.Fatalf("kill %d: %v", kill, err)
		}
		if len(restored) > 0 {
			recovered++
		}
		if d := cmp.Diff(before, snapshot(t)); d != "" {
			t.Fatalf("kill %d: not as it was: %s", kill, d)
		}
		_ = child.Wait()
		if files, _ := filepath.Glob(filepath.Join(dir, "*.json")); files != nil {
			t.Fatalf("kill %d: left in the journal: %v", kill, files)
		}
	}
	t.Logf("%d of %d as before; %d had something to restore", kills, kills, recovered)
	if recovered < kills/4 {
		t.Errorf("only %d of %d kills left something to restore", recovered, kills)
	}
}

func BenchmarkOpenClose(b *testing.B) {
	enter(b)
	for b.Loop() {
		s, err := OpenApplier(options(b.TempDir(), "node0"))
		must(b, err)
		must(b, s.Close())
	}
}

// BenchmarkApplyRevert applies and reverts on two nodes of 20 devices, one after
// the other as a trial does at worst.
func BenchmarkApplyRevert(b *testing.B) {
	for name, accelerators := range map[string][]v1alpha1.Accelerator{
		"rps": {rps("all", "nic", "overlay", "host-veth")},
		"rfs": {rfs(32768, "all", "nic", "overlay", "host-veth")},
	} {
		b.Run(name, func(b *testing.B) {
			claimMachine(b)
			dir := b.TempDir()
			var nodes []*Applier
			for i := range 2 {
				name := fmt.Sprintf("node%d", i)
				node(b, enter(b), 18)
				nodes = append(nodes, open(b, options(dir, name)))
			}
			var apply, revert time.Duration
			for b.Loop() {
				start := time.Now()
				for _, s := range nodes {
					_, err := s.Apply(b.Context(), accelerators)
					must(b, err)
				}
				apply += time.Since(start)
				start = time.Now()
				for _, s := range nodes {
					_, err := s.Revert(b.Context())
					must(b, err)
				}
				revert += time.Since(start)
			}
			b.ReportMetric(float64(apply.Microseconds())/float64(b.N)/1e3, "apply-ms")
			b.ReportMetric(float64(revert.Microseconds())/float64(b.N)/1e3, "revert-ms")
		})
	}
}

// first returns CPUs 0 to n-1.
func first(n int) cpuset.Set {
	cpus := make([]int, n)
	for i := range cpus {
		cpus[i] = i
	}
	return cpuset.New(cpus...)
}

func openSys(t *testing.T, dir string) kernel.Sysfs {
	t.Helper()
	sys, err := kernel.OpenSysfs(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sys.Close() })
	return sys
}
