package accel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel"
)

// withMemory returns the root of a procfs of a machine with this much memory, in KiB.
func withMemory(t *testing.T, memory string) (proc string) {
	t.Helper()
	proc = t.TempDir()
	entries, err := os.ReadDir("/proc")
	must(t, err)
	for _, e := range entries {
		if e.Name() != "meminfo" {
			must(t, os.Symlink(filepath.Join("/proc", e.Name()), filepath.Join(proc, e.Name())))
		}
	}
	must(t, os.WriteFile(filepath.Join(proc, "meminfo"), []byte("MemFree: 1 kB\nMemTotal:       "+memory+" kB\n"), 0o600))
	return proc
}

// TestFlowMemory checks that the tables of RFS take at most 2% of the machine's memory: a keeper leaves out devices that do not
// fit, even those that come later, and an applier refuses the whole plan.
func TestFlowMemory(t *testing.T) {
	claimMachine(t)
	elsewhere := enter(t)
	node(t, elsewhere, 3)
	dir := t.TempDir()
	o := keeper(dir)
	o.Proc = withMemory(t, "97280") // 2% are 1.9 MiB: 0.25 MiB for the machine's table, and 0.75 for each of two devices
	s, err := OpenKeeper(o)
	must(t, err)
	defer s.Close()
	view, err := s.View()
	must(t, err)
	kept, err := s.Keep(t.Context(), view, v1alpha1.ForPolicy(rfs(65536, "", "nic", "host-veth")))
	must(t, err)
	want := "RFS of veth1 needs 0.8 MiB of kernel memory; with it, the tables of RFS on this machine take 2.5 MiB, and may take 1.9 MiB (2% of its memory): lower rfs.entries"
	if kept.Set != 1+4+1 || len(kept.Refused) != 2 || kept.Refused[0].File != "rps_flow_cnt" || !strings.Contains(kept.Refused[0].Err.Error(), want) {
		t.Errorf("%+v", kept)
	}
	for device, want := range map[string]string{"veth0": "65536", "veth1": "0", "veth2": "0"} {
		if got, err := s.sys.Read(kernel.Queue(device, 0, "rps_flow_cnt")); got != want || err != nil {
			t.Errorf("%s has %s entries, %v, want %s", device, got, err, want)
		}
	}
	link := addVeth(t, elsewhere, "veth7", 1)
	kept, err = s.KeepDevices(t.Context(), []Device{{Name: "veth7", Index: link.Attrs().Index, Kind: "veth", Class: v1alpha1.DeviceHostVeth}})
	if err != nil || kept.Set != 0 || len(kept.Refused) != 1 || kept.Refused[0].Link != link.Attrs().Index {
		t.Errorf("a device that came: %+v, %v", kept, err)
	}

	other := options(dir, "an experiment")
	other.Persistent, other.Proc = true, o.Proc
	a := open(t, other)
	for name, try := range map[string]func() error{
		"plan": func() error {
			_, err := a.Plan(t.Context(), []v1alpha1.Accelerator{rfs(65536, "", "host-veth")})
			return err
		},
		"apply": func() error {
			_, err := a.Apply(t.Context(), []v1alpha1.Accelerator{rfs(65536, "", "host-veth")})
			return err
		},
	} {
		// 1.75 MiB are held, and three of the four veths have no tables yet.
		if err := try(); err == nil || !strings.Contains(err.Error(), "RFS needs 2.2 MiB of kernel memory; with it, the tables of RFS on this machine take 4.0 MiB") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if kept, err := s.Keep(t.Context(), view, nil); err != nil || kept.Reverted != 1+4+1 {
		t.Errorf("%+v, %v", kept, err)
	}
	_, err = a.Apply(t.Context(), []v1alpha1.Accelerator{rfs(65536, "", "overlay")})
	must(t, err)
	_, err = a.Revert(t.Context())
	must(t, err)
}
