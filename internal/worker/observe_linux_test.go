package worker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/worker/pb"
)

// cgroups is a tree of cgroups of four pods: steady, restarts, waits and ends.
type cgroups struct{ dir string }

func newCgroups(t *testing.T) cgroups {
	c := cgroups{t.TempDir()}
	c.write(t, "cgroup.controllers", "cpu memory\n")
	for _, pod := range []string{"podsteady", "podrestarts", "podwaits", "podends"} {
		c.write(t, pod+"/cpu.stat", "usage_usec 1000\n")
		c.write(t, pod+"/memory.current", "4096\n")
		c.write(t, pod+"/memory.stat", "inactive_file 96\n")
	}
	return c
}

func (c cgroups) write(t *testing.T, name, text string) {
	t.Helper()
	testenv.WriteFile(t, filepath.Join(c.dir, name), text)
}

// TestUseOfPods checks that a pod that restarts or ends within the window has no values, and that the others have theirs.
func TestUseOfPods(t *testing.T) {
	c := newCgroups(t)
	uids := []string{"restarts", "waits", "nowhere", "steady", "ends"}
	read := func(pods []pod) (all []podUsage) {
		for _, p := range pods {
			all = append(all, p.usage())
		}
		return all
	}
	observed := make([]*pb.ObservedPod, len(uids))
	for i, uid := range uids {
		observed[i] = &pb.ObservedPod{Uid: uid}
	}
	observed[1].Containers = []string{"id"} // which runs at neither edge
	pods := findPods(c.dir, observed)
	before := read(pods)
	c.write(t, "podsteady/cpu.stat", "usage_usec 21000\n")
	c.write(t, "podrestarts/container/cpu.stat", "usage_usec 1\n")
	if err := os.RemoveAll(filepath.Join(c.dir, "podends")); err != nil {
		t.Fatal(err)
	}
	got := used(before, read(pods))
	for i, want := range []string{"a container of its pod started or ended", "a container of its pod started or ended", "no control group of its pod nowhere", "", "its pod ended"} {
		d := got[i]
		if want == "" && (d.Error != "" || d.CPUs <= 0 || d.Memory != 4000) || want != "" && (!strings.Contains(d.Error, want) || d.CPUs+d.Memory != 0) {
			t.Errorf("%s: %+v, want %q", uids[i], d, want)
		}
	}
}

func TestSampleDaemonSets(t *testing.T) {
	client, _ := connectTo(t, Options{cgroups: newCgroups(t).dir})
	q := place.Sampling{Place: "here", Duration: 20 * time.Millisecond, Observe: []place.Observed{{DaemonSet: "ns/x", UID: "x"}, {DaemonSet: "ns/steady", UID: "steady"}}}
	s, err := client.Sample(t.Context(), q, func(uint16) (time.Time, error) { return time.Now(), nil })
	if err != nil {
		t.Fatal(err)
	}
	want := []record.DaemonSet{{Name: "ns/x", Node: "here", Error: "the node has no control group of its pod x"}, {Name: "ns/steady", Node: "here", Memory: 4000}}
	if diff := cmp.Diff(want, s.DaemonSets); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
