package accel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/accel/journal"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
)

var fastAccelerator = []v1alpha1.Accelerator{{Fastpath: new(v1alpha1.Fastpath)}}

// TestFastpathOfWhatEnds checks that persistent settings with the fast path, which would end with the process, are refused
// before anything has changed.
func TestFastpathOfWhatEnds(t *testing.T) {
	node(t, enter(t), 1)
	before := snapshot(t)
	s, err := OpenApplier(Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: t.TempDir(), Owner: "test", Persistent: true})
	must(t, err)
	defer s.Close()
	rps := v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: []string{v1alpha1.DeviceNIC}, CPUs: "0"}}
	_, err = s.Apply(t.Context(), append(fastAccelerator, rps))
	if err == nil || !strings.Contains(err.Error(), "slipstream agent --policy FILE") {
		t.Errorf("error %v, want one that says who can hold it", err)
	}
	for path, value := range snapshot(t) {
		if before[path] != value {
			t.Errorf("%s reads %s, was %s", path, value, before[path])
		}
	}
}

// TestFastpathWithoutDevices checks the message if no device is supported: why each is skipped, or that there is none.
func TestFastpathWithoutDevices(t *testing.T) {
	const unsupported = "the fast path supports no VXLAN device and no NIC of this node: "
	for want, skipped := range map[string][]string{
		unsupported + "it has no VXLAN device, and no NIC with a route through a gateway": nil,
		unsupported + "vx: it sets a TOS (tos); lo: other":                                {"vx: it sets a TOS (tos)", "lo: other"},
	} {
		if is := (fastState{skipped: skipped}).condition(); is.Message != want || is.Reason != v1alpha1.ReasonImpossible {
			t.Errorf("%s: %q, want %q", is.Reason, is.Message, want)
		}
	}
	const want = "idle: no pod has an eligible connection; only connections between pods of this node are eligible: vx: it sets a TOS (tos)"
	if is := (fastState{local: true, skipped: []string{"vx: it sets a TOS (tos)"}}).condition(); is.Message != want || is.Reason != v1alpha1.ReasonSkipped || is.Failed {
		t.Errorf("with pods' links: %s: %q, failed %t, want %q", is.Reason, is.Message, is.Failed, want)
	}
}

// TestFastpathHolder reads the status of a fast path and tries to take it over, while nobody listens on its socket, and while
// its holder hangs.
func TestFastpathHolder(t *testing.T) {
	enter(t)
	o := Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: t.TempDir(), Owner: "test"}
	s, err := OpenApplier(o)
	must(t, err)
	defer s.Close()
	ask := func(what, problem string, want int) {
		t.Helper()
		all, err := Fastpaths(o)
		if err != nil || len(all) != want || want > 0 && !strings.Contains(all[0].Problem, problem) {
			t.Errorf("%s: %+v, %v, want %d", what, all, err, want)
		}
	}
	ask("nobody", "", 0)

	hold, err := s.listenFast()
	must(t, err)
	file := hold.file
	ask("who hangs", "does not answer", 1)
	began := time.Now()
	if _, err := s.listenFast(); !errors.Is(err, journal.ErrHeld) || time.Since(began) > 10*fastWait {
		t.Errorf("%v after %s, want journal.ErrHeld", err, time.Since(began))
	}

	// A killed process leaves its socket like this.
	must(t, hold.Close())
	if _, err := os.Lstat(file); err != nil {
		t.Fatal(err)
	}
	ask("who is dead", "", 0)
	dead := filepath.Join(o.JournalDir, fastPrefix+"2")
	must(t, os.Rename(file, dead))
	hold, err = s.listenFast()
	must(t, err)
	if _, err := os.Lstat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want what a dead process has left elsewhere to be gone", err)
	}
	hold.serve(func() (Fastpath, error) { return Fastpath{Place: "here"}, errors.New("no counters") })
	ask("who answers", "no counters", 1)
	must(t, hold.close())
	ask("who let go", "", 0)

	hold, err = s.listenFast()
	must(t, err)
	recovered := func(what string, want error) {
		t.Helper()
		_, err := Recover(t.Context(), o)
		must(t, err)
		if _, err := os.Lstat(file); !errors.Is(err, want) {
			t.Errorf("the socket of %s: %v, want %v", what, err, want)
		}
	}
	recovered("who hangs", nil)
	must(t, hold.Close())
	recovered("who is dead", fs.ErrNotExist)

	// Files that are not sockets, and a socket that sends no status.
	must(t, os.WriteFile(filepath.Join(o.JournalDir, fastPrefix+"junk"), nil, 0o600))
	ask("a file", "", 0)
	l, err := net.Listen("unix", filepath.Join(o.JournalDir, fastPrefix+"1"))
	must(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("{\"place\": 1"))
			c.Close()
		}
	}()
	ask("who talks nonsense", "does not answer", 1)
}

// TestRetryPause checks that Keep soon retries a start that timed out on a busy machine, but not one that cannot succeed.
func TestRetryPause(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, dialled := new(net.Dialer).DialContext(ctx, "tcp4", "127.0.0.1:1")
	a, _ := net.Pipe()
	_ = a.SetReadDeadline(time.Unix(1, 0))
	_, read := a.Read(make([]byte, 1))
	for err, want := range map[error]time.Duration{
		dialled: retrySoon, read: retrySoon, journal.ErrHeld: 0, errors.New("this kernel lacks tcx"): retryAfter, unix.EPERM: retryAfter,
	} {
		if got := retryPause(Forbidden(fmt.Errorf("try the fast path: %w", err))); got != want {
			t.Errorf("%v is tried again after %s, want %s", err, got, want)
		}
	}
}

// TestFastpathChanges checks that a skipped device is reported without Keep.
func TestFastpathChanges(t *testing.T) {
	node(t, enter(t), 1)
	s, err := OpenKeeper(Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: t.TempDir(), Owner: "test", Persistent: true})
	must(t, err)
	defer s.Close()
	v, err := s.View()
	must(t, err)
	_, err = s.Keep(t.Context(), v, v1alpha1.ForPolicy(fastAccelerator...))
	must(t, err)
	must(t, netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "other"}, FlowBased: true, Port: 4789}))
	for limit := time.After(10 * time.Second); ; {
		select {
		case <-s.Changes():
		case <-limit:
			t.Fatalf("no change is reported: %+v", s.States())
		}
		if alone := s.States()[0].Message; strings.Contains(alone, "other: ") {
			return
		}
	}
}

// TestFastpathBesideCilium attaches a program with a name of Cilium's, by tcx or tc, on a node that routes packets of pods. As
// long as it is there, the condition says so in one sentence, and no program is attached to any device, whatever unseenBy
// allows.
func TestFastpathBesideCilium(t *testing.T) {
	node(t, enter(t), 1)
	nic, err := netlink.LinkByName("eth0")
	must(t, err)
	index := nic.Attrs().Index
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: index, Dst: address(t, "10.244.1.0/24").IPNet, Gw: net.IPv4(192, 0, 2, 2)}))
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "cil_to_netdev", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	must(t, err)
	defer program.Close()
	for by, attach := range map[string]func() (end func() error){
		"tcx": func() func() error {
			l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: program, Attach: ebpf.AttachTCXEgress})
			must(t, err)
			return l.Close
		},
		"tc": func() func() error {
			qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
			must(t, netlink.QdiscAdd(qdisc))
			must(t, netlink.FilterAdd(&netlink.BpfFilter{
				FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
				Fd:          program.FD(), Name: "cil_to_netdev", DirectAction: true,
			}))
			return func() error { return netlink.QdiscDel(qdisc) }
		},
	} {
		// Not a subtest: that would run on a thread of another namespace.
		end := attach()
		wanted := []v1alpha1.Accelerator{{Fastpath: &v1alpha1.Fastpath{UnseenBy: []string{v1alpha1.UnseenByTCX, v1alpha1.UnseenByTC}}}}
		keep := func() State {
			s, err := OpenKeeper(Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: t.TempDir(), Owner: "test", Persistent: true})
			must(t, err)
			defer s.Close()
			v, err := s.View()
			must(t, err)
			_, err = s.Keep(t.Context(), v, v1alpha1.ForPolicy(wanted...))
			must(t, err)
			return s.States()[0]
		}
		const sentence = "the fast path supports no VXLAN device and no NIC of this node: all devices: " +
			"Cilium's programs already handle the packets of pods (cil_to_netdev at the egress of eth0)"
		is := keep()
		if is.Message != sentence || is.Reason != v1alpha1.ReasonImpossible || !is.Failed || len(is.Attached) > 0 {
			t.Errorf("%s: with it: %+v", by, is)
		}
		must(t, end())
		if is := keep(); is.Failed {
			t.Errorf("%s: without it: %+v", by, is)
		}
	}
}

// TestFastpathUnseenBy checks that the running fast path, and the planned one, use the UnseenBy that was wanted last.
func TestFastpathUnseenBy(t *testing.T) {
	node(t, enter(t), 1)
	nic, err := netlink.LinkByName("eth0")
	must(t, err)
	overlay := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "tunnel", Flags: net.FlagUp}, VxlanId: 7, Port: 4790,
		VtepDevIndex: nic.Attrs().Index, SrcAddr: net.IPv4(192, 0, 2, 1).To4()}
	must(t, netlink.LinkAdd(overlay))
	must(t, netlink.QdiscAdd(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: overlay.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
		Rate: 1 << 20, Buffer: 1 << 16, Limit: 1 << 20}))
	o := Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: t.TempDir(), Owner: "test", Persistent: true}
	s, err := OpenKeeper(o)
	must(t, err)
	defer s.Close()
	v, err := s.View()
	must(t, err)
	for _, unseenBy := range [][]string{nil, {v1alpha1.UnseenByTC, v1alpha1.UnseenByQueue}, {v1alpha1.UnseenByTC}} {
		wanted := []v1alpha1.Accelerator{{Fastpath: &v1alpha1.Fastpath{UnseenBy: unseenBy}}}
		given := slices.Contains(unseenBy, v1alpha1.UnseenByQueue)
		_, err = s.Keep(t.Context(), v, v1alpha1.ForPolicy(wanted...))
		must(t, err)
		alone := s.States()[0].Message
		if strings.Contains(alone, "tunnel: it has a queue (tbf)") == given {
			t.Errorf("unseen by %q: skipped: %s", unseenBy, alone)
		}
		plan, err := open(t, o).Plan(t.Context(), wanted)
		must(t, err)
		if planned := slices.ContainsFunc(plan, func(p record.Setting) bool { return p.Path == "tcx/tunnel/observe_vxlan" }); planned != given {
			t.Errorf("unseen by %q: planned is %v", unseenBy, plan)
		}
	}
}

// TestInForce checks that InForce reports what is accelerated in this network namespace, and nothing else.
func TestInForce(t *testing.T) {
	elsewhere := enter(t)
	node(t, elsewhere, 0)
	o := options(filepath.Join(t.TempDir(), "journal"), "node0")
	o.Owner, o.Persistent = "somebody", true
	ask := func(what string, want ...string) {
		t.Helper()
		got, busy, err := InForce(Options{JournalDir: o.JournalDir})
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", what, err, diff)
		}
		if fast := len(want) == 2; len(busy) > 0 != fast || fast && busy["fastpath"] != want[1] {
			t.Errorf("%s: busy: %v", what, busy)
		}
	}
	ask("no journal")
	s := open(t, o)
	_, err := s.Apply(t.Context(), []v1alpha1.Accelerator{rps("0", "nic")})
	must(t, err)
	ask("applied", "4 settings by somebody")
	hold, err := s.listenFast()
	must(t, err)
	hold.serve(func() (Fastpath, error) { return Fastpath{Holder: hold.holder}, nil })
	ask("the fast path too", "4 settings by somebody", "the fast path by "+hold.holder.String())
	must(t, netns.Do(elsewhere, func() error {
		ask("elsewhere")
		return nil
	}))
	must(t, hold.close())
	_, err = s.Revert(t.Context())
	must(t, err)
	ask("reverted")

	// Settings of a dead process do not count: they will be restored soon.
	b, err := s.journal.Book(s.id, "node0", s.sys)
	must(t, err)
	_, err = b.AddHolder(journal.Holder{Owner: "dead", PID: 1 << 30, Start: 1}, []journal.Change{{Path: "class/net/eth0/queues/rx-0/rps_cpus", Link: 2, Was: "0", Want: "1"}})
	must(t, err)
	must(t, b.Save())
	ask("dead")
}
