package accel

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/accel/kernel/kerneltest"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/testenv"
)

// pin mounts a namespace on a file, as container runtimes do.
func pin(t *testing.T, ns netns.Handle, path string) {
	t.Helper()
	testenv.WriteFile(t, path, "")
	must(t, netns.Do(ns, func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") }))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
}

func keeper(dir string) Options {
	return Options{Place: place.Place{Name: "node0", Kind: place.Node}, JournalDir: dir, Owner: "keeper", Persistent: true}
}

// podOf makes the veth of a pod, and returns the ID of the pod's namespace and the pod's end of the veth.
func podOf(t testing.TB, elsewhere netns.Handle, name string) (number int, end End) {
	t.Helper()
	a := addVeth(t, elsewhere, name, 1).Attrs()
	return a.NetNsID, End{Index: a.ParentIndex, Host: a.Index}
}

// maskIn reads the RPS mask of a device, given by its index, inside a namespace.
func maskIn(t testing.TB, ns netns.Handle, index int) (mask string) {
	t.Helper()
	must(t, netns.Do(ns, func() error {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return err
		}
		sys, err := kernel.OpenSysfs("")
		if err != nil {
			return err
		}
		defer sys.Close()
		mask, err = sys.Read("class/net/" + l.Attrs().Name + "/queues/rx-0/rps_cpus")
		return err
	}))
	return strings.TrimLeft(mask, "0,")
}

func TestFinder(t *testing.T) {
	elsewhere := enter(t)
	other, err := vnetns.New()
	must(t, err)
	defer other.Close()
	here, err := vnetns.New() // the node
	must(t, err)
	defer here.Close()
	dir := t.TempDir()
	number, _ := podOf(t, elsewhere, "veth0")
	podOf(t, other, "veth1") // another pod
	if number < 0 {
		t.Fatal("the veth's other end has no number")
	}
	f, err := NewFinder("/proc", filepath.Join(dir, "none"), dir)
	must(t, err)
	defer f.Close()
	if found := f.Find(number); len(found) != 0 {
		t.Errorf("found %v, which nobody stands for", found)
	}

	// Not a namespace, another namespace, a file that would block for ever, and a symbolic link.
	must(t, unix.Mkfifo(filepath.Join(dir, "0"), 0o600))
	testenv.WriteFile(t, filepath.Join(dir, "1"), "net:[1]")
	pin(t, other, filepath.Join(dir, "2"))
	must(t, os.Symlink(file(elsewhere), filepath.Join(dir, "3")))
	if found := f.Find(number); len(found) != 0 {
		t.Errorf("found %v among what is no pod's", found)
	}
	want := filepath.Join(dir, "4")
	pin(t, elsewhere, want)
	for range 2 { // when it is new, and when it is known
		found := f.Find(number, number+1000)
		if len(found) != 1 || found[number] == nil || found[number].File != want {
			t.Fatalf("found %v, want %s", found, want)
		}
		must(t, found[number].Close())
	}

	// A known namespace is found without listing everything, unless its file now refers to another one.
	f.proc, f.dirs = filepath.Join(dir, "none"), nil
	found := f.Find(number)
	if len(found) != 1 || found[number].File != want {
		t.Fatalf("found %v of what is known, want %s", found, want)
	}
	must(t, found[number].Close())
	must(t, unix.Unmount(want, unix.MNT_DETACH))
	pin(t, other, want)
	if found := f.Find(number); len(found) != 0 {
		t.Errorf("found %v by a file that another namespace has", found)
	}
	moved := filepath.Join(dir, "5")
	pin(t, elsewhere, moved)
	f.dirs = []string{dir}
	if found = f.Find(number); len(found) != 1 || found[number].File != moved {
		t.Fatalf("found %v, want %s", found, moved)
	}
	must(t, found[number].Close())
	must(t, unix.Unmount(want, unix.MNT_DETACH))
	want = moved

	// By address: it must be in one namespace, not in two.
	giveAddress := func(ns netns.Handle, cidr string) {
		must(t, netns.Do(ns, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return netlink.AddrAdd(lo, address(t, cidr))
		}))
	}
	ip := netip.MustParseAddr("198.51.100.7")
	if _, err := FindAddress("/proc", []string{dir}, ip); err == nil || !strings.Contains(err.Error(), "none of") {
		t.Errorf("an address that nobody has: %v", err)
	}
	giveAddress(elsewhere, ip.String()+"/32")
	n, err := FindAddress("/proc", []string{dir}, ip)
	must(t, err)
	if n.File != want {
		t.Errorf("%s has the address, want %s", n.File, want)
	}
	must(t, n.Close())
	giveAddress(other, ip.String()+"/32")
	if _, err := FindAddress("/proc", []string{dir}, ip); err == nil || !strings.Contains(err.Error(), "both") {
		t.Errorf("an address that two have: %v", err)
	}
}

func TestKeepInside(t *testing.T) {
	elsewhere := enter(t)
	dir := t.TempDir()
	number, end := podOf(t, elsewhere, "veth0")
	_, decoy := podOf(t, elsewhere, "veth1")
	netnsDir := t.TempDir()
	pin(t, elsewhere, filepath.Join(netnsDir, "pod"))
	f, err := NewFinder("/proc", netnsDir)
	must(t, err)
	defer f.Close()
	keep := func(ends []End, accelerators ...v1alpha1.Accelerator) (netns.Cookie, Kept) {
		t.Helper()
		n := f.Find(number)[number]
		if n == nil {
			t.Fatal("the pod was not found")
		}
		defer n.Close()
		id, kept, err := n.KeepInside(t.Context(), keeper(dir), ends, v1alpha1.ForPolicy(accelerators...))
		must(t, err)
		return id, kept
	}
	id, kept := keep([]End{end}, rps("0", "pod", "nic"), rfs(1024, "", "pod"))
	if id == 0 || kept.Set != 2 || kept.Repaired != 0 || len(kept.Refused) != 0 {
		t.Errorf("%d: %+v, want 2 settings", id, kept)
	}
	if d := cmp.Diff(map[SettingOf]Count{{end.Index, "rps_cpus"}: {1, 1}, {end.Index, "rps_flow_cnt"}: {1, 1}}, kept.Counts); d != "" {
		t.Error(d)
	}
	if got := maskIn(t, elsewhere, end.Index); got != "1" {
		t.Errorf("the end's mask is %q", got)
	}
	if got := maskIn(t, elsewhere, decoy.Index); got != "" {
		t.Errorf("the mask of a device that nobody asked for is %q", got)
	}
	if _, err := os.Stat(filepath.Join(dir, "machine.json")); err == nil {
		t.Error("a pod holds the machine's table")
	}

	// The same settings again change nothing; another value keeps the original value as the one to
	// restore.
	if _, kept := keep([]End{end}, rps("0", "pod")); kept.Set != 0 || kept.Reverted != 1 {
		t.Errorf("less: %+v", kept)
	}
	if _, kept := keep([]End{end}, rps(fmt.Sprint(runtime.NumCPU()-1), "pod")); kept.Reverted != 1 || kept.Set != 1 {
		t.Errorf("otherwise: %+v", kept)
	}

	// The index belongs to another device by now.
	if _, kept := keep([]End{{Index: decoy.Index, Host: end.Host}, end}, rps("0", "pod")); len(kept.Counts) != 1 {
		t.Errorf("a device whose other end is elsewhere was taken: %+v", kept)
	}
	if _, kept := keep([]End{{Index: 4096, Host: end.Host}}, rps("0", "pod")); len(kept.Counts) != 0 || kept.Reverted != 1 {
		t.Errorf("an index that is nobody's: %+v", kept)
	}
	if got := maskIn(t, elsewhere, end.Index); got != "" {
		t.Errorf("left: %q", got)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
}

// TestNamespaceGoes removes a pod's namespace, file and veth in every order while somebody is inside the namespace, and checks
// that this affects nothing else.
func TestNamespaceGoes(t *testing.T) {
	testenv.NeedRoot(t)
	dir, netnsDir := t.TempDir(), t.TempDir()
	for name, leave := range map[string]func(veth, pinned string) error{
		"veth": func(veth, _ string) error { return delLink(veth) },
		"file": func(_, pinned string) error { return unix.Unmount(pinned, unix.MNT_DETACH) },
		"both": func(veth, pinned string) error {
			return errors.Join(delLink(veth), unix.Unmount(pinned, unix.MNT_DETACH))
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := enter(t)
			const veth = "veth0"
			number, end := podOf(t, pod, veth)
			pinned := filepath.Join(netnsDir, name)
			pin(t, pod, pinned)
			f, err := NewFinder("/proc", netnsDir)
			must(t, err)
			defer f.Close()
			n := f.Find(number)[number]
			if n == nil {
				t.Fatal("not found")
			}
			_, _, err = n.KeepInside(t.Context(), keeper(dir), []End{end}, v1alpha1.ForPolicy(rps("0", "pod")))
			must(t, err)
			must(t, leave(veth, pinned))
			_, kept, err := n.KeepInside(t.Context(), keeper(dir), []End{end}, v1alpha1.ForPolicy(rps("0", "pod")))
			if err != nil || len(kept.Refused) != 0 {
				t.Errorf("inside a pod that goes: %+v, %v", kept, err)
			}
			must(t, n.Close())
			if name != "veth" {
				if found := f.Find(number); len(found) != 0 {
					t.Errorf("it is held open: %v", found)
				}
			}
			if _, err := f.Sweep(t.Context(), keeper(dir), func(netns.Cookie) bool { return false }); err != nil {
				t.Error(err)
			}
			if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
				t.Errorf("left in the journal: %v", files)
			}
		})
	}
}

func delLink(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkDel(l)
}

// TestKeep checks that Keep on a node repairs drift, leaves settings of other holders alone, restores what is no longer wanted,
// and sets the other settings if it cannot set one.
func TestKeep(t *testing.T) {
	claimMachine(t)
	elsewhere := enter(t)
	node(t, elsewhere, 2)
	dir := t.TempDir()
	s, err := OpenKeeper(keeper(dir))
	must(t, err)
	defer s.Close()
	before := snapshot(t)
	keep := func(accelerators ...v1alpha1.Accelerator) Kept {
		t.Helper()
		view, err := s.View()
		must(t, err)
		kept, err := s.Keep(t.Context(), view, v1alpha1.ForPolicy(accelerators...))
		must(t, err)
		return kept
	}
	all := []v1alpha1.Accelerator{rps("0", "nic", "host-veth"), rfs(2048, "", "overlay")}
	if kept := keep(all...); kept.Set != 4+2+1+1 || kept.Repaired != 0 {
		t.Errorf("first: %+v", kept)
	}
	if kept := keep(all...); kept.Set+kept.Repaired+kept.Reverted != 0 || len(kept.Counts) != 5 {
		t.Errorf("again: %+v", kept)
	}
	must(t, s.sys.Write("class/net/eth0/queues/rx-1/rps_cpus", "0"))
	must(t, kernel.Sysctls{Proc: "/proc"}.Write(kernel.FlowTable, "512"))
	if kept := keep(all...); kept.Repaired != 2 || kept.Set != 0 {
		t.Errorf("drift: %+v", kept)
	}

	other := open(t, options(dir, "an experiment"))
	_, err = other.Apply(t.Context(), []v1alpha1.Accelerator{rps("0", "overlay")})
	must(t, err)
	kept := keep(append(all, rps(first(runtime.NumCPU()).String(), "overlay"))...)
	if len(kept.Refused) != 1 || !errors.Is(kept.Refused[0].Err, journal.ErrHeld) || kept.Refused[0].File != "rps_cpus" {
		t.Errorf("held: %+v", kept.Refused)
	}

	// KeepDevices sets only the new devices, and only after a Keep.
	link := addVeth(t, elsewhere, "veth7", 1)
	kept, err = s.KeepDevices(t.Context(), []Device{
		{Name: "veth7", Index: link.Attrs().Index, Kind: "veth", Class: v1alpha1.DeviceHostVeth},
		{Name: "veth8", Index: 4096, Kind: "veth", Class: v1alpha1.DeviceHostVeth},
	})
	if err != nil || kept.Set != 1 || kept.Reverted != 0 {
		t.Errorf("a device that came: %+v, %v", kept, err)
	}
	unkept, err := OpenKeeper(keeper(dir))
	must(t, err)
	defer unkept.Close()
	if _, err := unkept.KeepDevices(t.Context(), nil); err == nil {
		t.Error("devices are kept before anything is")
	}

	if _, err := other.Revert(t.Context()); err != nil {
		t.Error(err)
	}
	must(t, netlink.LinkDel(link))
	if kept := keep(); kept.Reverted == 0 || len(kept.Counts) != 0 {
		t.Errorf("nothing wanted: %+v", kept)
	}
	if d := cmp.Diff(before, snapshot(t)); d != "" {
		t.Error(d)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json*")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
}

// TestKeepCrashAtEveryStep crashes a keeper at each operation on a setting in turn, while it applies one policy, then another,
// and then none. Every setting that differs from its original value must be in the journal, and the next keeper must restore
// it.
func TestKeepCrashAtEveryStep(t *testing.T) {
	steps := 0
	for ; keepCrashAfter(t, steps); steps++ {
	}
	if steps < 20 {
		t.Errorf("it took %d steps, want more", steps)
	}
}

const (
	queue0 = "class/net/eth0/queues/rx-0/rps_cpus"
	queue1 = "class/net/eth0/queues/rx-1/rps_cpus"
)

func keepCrashAfter(t *testing.T, steps int) (crashed bool) {
	t.Helper()
	found := map[string]string{queue0: "0", queue1: "2"}
	table := &kerneltest.Memory{Values: map[string]string{kernel.FlowTable: "0"}}
	queues := &kerneltest.Memory{Values: map[string]string{
		queue0: "0", queue1: "2", "class/net/eth0/queues/rx-0/rps_flow_cnt": "0", "class/net/eth0/queues/rx-1/rps_flow_cnt": "0",
	}}
	dir := t.TempDir()
	j, err := journal.Open(dir, kerneltest.Proc(t, nil))
	must(t, err)
	books := func(left *int) (machine, place *journal.Book) {
		machine, err1 := j.Book(netns.ID{}, "machine", kerneltest.Crash{Store: table, Left: left})
		place, err2 := j.Book(netns.ID{Cookie: 9}, "node0", kerneltest.Crash{Store: queues, Left: left})
		must(t, errors.Join(err1, err2))
		return machine, place
	}
	devices := []Device{{Name: "eth0", Index: 2, Class: "nic", RxQueues: 2}}
	plan := func(accelerators ...v1alpha1.Accelerator) *Plan {
		p, err := makePlan(Kinds(), v1alpha1.ForPolicy(accelerators...), cpuset.ParseList)
		must(t, err)
		return p
	}
	plans := map[string]*Plan{
		"first": plan(rfs(1024, "0", "nic")), "second": plan(rps("0-1", "nic")), "none": plan(),
	}
	life := func(left int, course ...string) (crashed bool) {
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(kerneltest.Crash); !ok {
					panic(r)
				}
				crashed = true
			}
		}()
		s := &Keeper{namespace: &namespace{options: Options{Proc: "/proc"}, journal: j, holder: journal.Holder{Owner: "agent"}}}
		for _, name := range course {
			machine, place := books(&left)
			s.wanted = plans[name]
			if kept, err := s.keep(machine, place, devices, true); err != nil || len(kept.Refused) != 0 {
				t.Errorf("after %d steps: %s: %v %v", steps, name, err, kept.Refused)
			}
		}
		return false
	}
	crashed = life(steps, "first", "second", "none")

	never := 1000
	machine, place := books(&never)
	for _, b := range []*journal.Book{machine, place} {
		was := map[string]string{kernel.FlowTable: "0", queue0: "0", queue1: "2"}
		values := table.Values
		if b == place {
			values = queues.Values
		}
		for path, now := range values {
			before := was[path]
			if before == "" {
				before = "0"
			}
			if e := b.Find(path); now != before && (e == nil || e.Was != before) {
				t.Errorf("after %d steps %s reads %s, was %s, and the journal says %+v", steps, path, now, before, e)
			}
		}
	}
	life(1000, "first", "none")
	for path, was := range found {
		if queues.Values[path] != was {
			t.Errorf("after %d steps: %s reads %s in the end, was %s", steps, path, queues.Values[path], was)
		}
	}
	if table.Values[kernel.FlowTable] != "0" || queues.Values["class/net/eth0/queues/rx-0/rps_flow_cnt"] != "0" {
		t.Errorf("after %d steps: the table reads %s in the end", steps, table.Values[kernel.FlowTable])
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.json")); files != nil {
		t.Errorf("left in the journal: %v", files)
	}
	return crashed
}

// TestKeepFewEntries checks that a pod whose device has more queues than the flow table has entries lacks only the flow counts
// of that device.
func TestKeepFewEntries(t *testing.T) {
	elsewhere := enter(t)
	veth := addVeth(t, elsewhere, "veth0", 4).Attrs()
	netnsDir := t.TempDir()
	pin(t, elsewhere, filepath.Join(netnsDir, "pod"))
	f, err := NewFinder("/proc", netnsDir)
	must(t, err)
	defer f.Close()
	n := f.Find(veth.NetNsID)[veth.NetNsID]
	if n == nil {
		t.Fatal("the pod was not found")
	}
	defer n.Close()
	end := End{Index: veth.ParentIndex, Host: veth.Index}
	_, kept, err := n.KeepInside(t.Context(), keeper(t.TempDir()), []End{end}, v1alpha1.ForPolicy(rps("0", "pod"), rfs(2, "", "pod")))
	must(t, err)
	if d := cmp.Diff(map[SettingOf]Count{{end.Index, "rps_cpus"}: {4, 4}}, kept.Counts); d != "" {
		t.Error(d)
	}
	if len(kept.Refused) != 1 || !errors.As(kept.Refused[0].Err, new(Impossible)) || kept.Refused[0].SettingOf != (SettingOf{end.Index, flowCount}) {
		t.Errorf("refused: %+v", kept.Refused)
	}
}
