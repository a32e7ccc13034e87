//go:build linux

package collect

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

const uid = "6b9c1d7e-0a4f-4f0e-9d55-8a1c2b3d4e5f"

// podFiles returns the files of a pod's cgroups below a mount.
func podFiles(v2 bool, dir, cpu, memory string) map[string]string {
	if v2 {
		return map[string]string{
			"cgroup.controllers": "cpu memory\n", dir + "/cpu.stat": "usage_usec " + cpu + "\nuser_usec 1\n",
			dir + "/memory.current": memory + "\n", dir + "/memory.stat": "anon 1\nfile 9\ninactive_file 1000\n",
		}
	}
	return map[string]string{
		"cpuacct/" + dir + "/cpuacct.usage":        cpu + "000\n",
		"memory/" + dir + "/memory.usage_in_bytes": memory + "\n", "memory/" + dir + "/memory.stat": "inactive_file 5\ntotal_inactive_file 1000\n",
	}
}

// TestPodUsage checks the usage of pods whose cgroups have the names of either of kubelet's drivers, in cgroup v1 and v2.
func TestPodUsage(t *testing.T) {
	for name, c := range map[string]struct {
		v2  bool
		dir string
	}{
		"v2, systemd":           {true, "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"},
		"v2, systemd, in kind":  {true, "kubelet.slice/kubelet-kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"},
		"v2, cgroupfs":          {true, "kubepods/besteffort/pod" + uid},
		"v1, cgroupfs, below x": {false, "x/kubepods/pod" + uid},
	} {
		t.Run(name, func(t *testing.T) {
			mount := t.TempDir()
			write := func(cpu, memory string) {
				for path, content := range podFiles(c.v2, c.dir, cpu, memory) {
					testenv.WriteFile(t, filepath.Join(mount, path), content)
				}
			}
			write("2000000", "5000")
			cpuDir := filepath.Join(mount, c.dir)
			if !c.v2 {
				cpuDir = filepath.Join(mount, "cpuacct", c.dir)
			}
			mkdir := func(name string) {
				if err := os.Mkdir(filepath.Join(cpuDir, name), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			mkdir("container1")
			found := FindPods(mount, "another", uid)
			if got := slices.Collect(maps.Keys(found)); !slices.Equal(got, []string{uid}) {
				t.Fatalf("found %v", got)
			}
			usage := func() PodUsage {
				u, err := found[uid].Usage()
				if err != nil {
					t.Fatal(err)
				}
				return u
			}
			before := usage()
			write("2300000", "7000")
			after := usage()
			after.at = before.at + int64(2*time.Second)
			cpus, memory, err := before.Use(after)
			if err != nil || cpus != 0.15 || memory != 5000 {
				t.Errorf("%g CPUs, %g bytes, %v; want 0.15 and 5000", cpus, memory, err)
			}
			if _, err := found[uid].Usage("ntainer1"); err != nil {
				t.Errorf("a container that runs: %v", err)
			}
			if _, err := found[uid].Usage("ntainer1", "ntainer2"); !errors.Is(err, errRestarts) {
				t.Errorf("a container that does not run: %v", err)
			}
			mkdir("container2")
			if _, _, err := before.Use(usage()); err == nil || !strings.Contains(err.Error(), "a container of its pod started or ended") {
				t.Errorf("another container: %v", err)
			}
			if err := os.RemoveAll(cpuDir); err != nil {
				t.Fatal(err)
			}
			if _, err := found[uid].Usage(); !os.IsNotExist(err) {
				t.Errorf("without a group: %v", err)
			}
		})
	}
}

func FuzzPodValue(f *testing.F) {
	f.Add([]byte("usage_usec 12\nuser_usec 3\n"), "usage_usec")
	f.Add([]byte("12\n"), "")
	f.Add([]byte("usage_usecs 1\nusage_usec"), "usage_usec")
	f.Fuzz(func(t *testing.T, b []byte, key string) {
		n, err := parseValue(b, key)
		if err == nil && key != "" && !strings.Contains(string(b), key) {
			t.Fatalf("%d without %q", n, key)
		}
	})
}
