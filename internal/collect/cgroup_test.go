//go:build linux

package collect

import (
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

func TestThrottled(t *testing.T) {
	const unlimited = "usage_usec 5\nuser_usec 5\nsystem_usec 0\n"
	for _, test := range []struct {
		name string
		// own is /proc/self/cgroup, files are below the mount.
		own           string
		before, after map[string]string
		want          []string
	}{
		{
			// The pod's limit throttles its container; the root has no
			// limit.
			name:   "version 2",
			own:    "0::/pod/app\n",
			before: map[string]string{"pod/app/cpu.stat": "nr_throttled 0\nthrottled_usec 0\n", "pod/cpu.stat": "nr_throttled 5\nthrottled_usec 7\n", "cpu.stat": unlimited},
			after:  map[string]string{"pod/cpu.stat": "nr_periods 20\nnr_throttled 17\nthrottled_usec 530007\n"},
			want:   []string{"the CPU limit of cgroup /pod throttled it 12 times, its threads for 0.53 s in total"},
		},
		{
			name:   "version 1 beside 2",
			own:    "5:memory:/m\n1:cpu,cpuacct:/a\n0::/u\n",
			before: map[string]string{"cpu,cpuacct/a/cpu.stat": "nr_throttled 1\nthrottled_time 1000000\n", "unified/u/cpu.stat": unlimited},
			after:  map[string]string{"cpu,cpuacct/a/cpu.stat": "nr_throttled 2\nthrottled_time 31000000\n"},
			want:   []string{"the CPU limit of cgroup /a throttled it 1 times, its threads for 0.03 s in total"},
		},
		{
			name:   "version 2 beside 1",
			own:    "1:name=systemd:/\n0::/u\n",
			before: map[string]string{"unified/u/cpu.stat": "nr_throttled 0\nthrottled_usec 0\n"},
			after:  map[string]string{"unified/u/cpu.stat": "nr_throttled 2\nthrottled_usec 20000\n"},
			want:   []string{"the CPU limit of cgroup /u throttled it 2 times, its threads for 0.02 s in total"},
		},
		{
			// The cgroups above a container's namespace are not mounted
			// there.
			name:   "outside of the namespace",
			own:    "0::/../../x\n",
			before: map[string]string{"cpu.stat": "nr_throttled 3\nthrottled_usec 0\n"},
			after:  map[string]string{"cpu.stat": "nr_throttled 4\nthrottled_usec 1000\n"},
			want:   []string{"the CPU limit of cgroup / throttled it 1 times, its threads for 0.001 s in total"},
		},
		{name: "no limit", own: "0::/\n", before: map[string]string{"cpu.stat": unlimited}},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc, mount := t.TempDir(), t.TempDir()
			for path, content := range map[string]string{
				"self/cgroup": test.own, "net/dev": "\n\n", "stat": "cpu0 1 2 3 4 5 6 7 8\n",
				"softirqs": "CPU0\nNET_TX: 1\nNET_RX: 1\n", "net/softnet_stat": "0 0 0 0 0 0 0 0 0 0 0\n", bootID: "x\n",
			} {
				testenv.WriteFile(t, filepath.Join(proc, path), content)
			}
			for path, content := range test.before {
				testenv.WriteFile(t, filepath.Join(mount, path), content)
			}
			c := newTestCollector(t, Options{Proc: proc, Cgroup: mount, CPUs: true})
			before := snapshot(t, c)
			for path, content := range test.after {
				testenv.WriteFile(t, filepath.Join(mount, path), content)
			}
			var got []string
			for _, w := range c.Host(before, snapshot(t, c)).Warnings {
				if w.Code == record.WarnThrottled {
					got = append(got, w.Message)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestThrottledOfTheMachine checks that all throttled cgroups are found, in v2 and
// in v1, where other hierarchies count no throttling.
func TestThrottledOfTheMachine(t *testing.T) {
	for name, c := range map[string]struct{ at, unit string }{
		"v2": {"", "throttled_usec 5000"}, "v1": {"cpu,cpuacct", "throttled_time 5000000"}, "v2 beside v1": {"unified", "throttled_usec 5000"},
	} {
		root := t.TempDir()
		write := func(file, text string) {
			t.Helper()
			testenv.WriteFile(t, filepath.Join(root, c.at, file), text)
		}
		write("cgroup.controllers", "cpu")
		write("cpu.stat", "usage_usec 1\n")
		write("a/cpu.stat", "nr_periods 9\nnr_throttled 0\n")
		write("a/b/cpu.stat", "nr_periods 9\nnr_throttled 3\n"+c.unit+"\n")
		write("a/c/cpu.stat", "nr_throttled many\n")
		want := map[string]Throttling{"/a/b": {3, 5 * time.Millisecond}}
		if got := Throttled(root); !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
