package experiment

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

func meshOf(t *testing.T, nodes int) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("test.yaml", fmt.Appendf(nil, `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {lab: {nodes: %d}}
  baseline: nodes
  mesh: {}
  variants:
  - {name: nodes, path: {native: {}}}
  - {name: pods}
  workloads:
  - {name: stream, stream: {warmup: 1ms, duration: 1s}}
  runs: 2
  seed: 7
`, nodes), nil)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// links counts the pairs of trials, such as "node0 → node1": good has those with
// figures, bad those without.
func links(trials []record.Trial) (good, bad map[string]int) {
	good, bad = make(map[string]int), make(map[string]int)
	for _, tr := range trials {
		for _, p := range tr.PerPair {
			client, _, _ := strings.Cut(p.Client.Place, "/")
			server, _, _ := strings.Cut(p.Server.Place, "/")
			if of := client + " → " + server; p.Error == "" {
				good[of]++
			} else {
				bad[of]++
			}
		}
	}
	return good, bad
}

// TestMeshAwaits checks that a mesh connects again to machines that have dropped off, but does not wait for them.
func TestMeshAwaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, awaited := newFake(3), 0
		f.await = func(_ context.Context, patient bool) error {
			if awaited++; patient {
				t.Error("it is patient")
			}
			return errors.New("host c is away")
		}
		trials, err := measure(t, t.Context(), f, meshOf(t, 3), new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		if good, _ := links(trials); len(good) != 3*2 || awaited != len(trials) {
			t.Errorf("%d links, awaited %d times in %d trials", len(good), awaited, len(trials))
		}
	})
}

func TestMeshMeasuresEveryLinkOfEveryBlockOnce(t *testing.T) {
	f, out := newFake(5), new(memory)
	trials, err := measure(t, t.Context(), f, meshOf(t, 5), out, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := 2 * 2 * 10; len(trials) != want { // blocks, variants, rounds
		t.Errorf("%d trials, want %d", len(trials), want)
	}
	good, bad := links(trials)
	if len(good) != 5*4 || len(bad) != 0 {
		t.Errorf("%d links good and %d bad, want 20 and 0", len(good), len(bad))
	}
	for link, n := range good {
		if n != 4 {
			t.Errorf("%s: %d times, want 4", link, n)
		}
	}
	company := make(map[string]map[int]bool) // of links, by the blocks in which they run together
	for _, tr := range trials {
		together, _ := links([]record.Trial{tr})
		key := fmt.Sprint(tr.Variant, slices.Sorted(maps.Keys(together)))
		if company[key] == nil {
			company[key] = make(map[int]bool)
		}
		company[key][tr.Block] = true
	}
	if len(company) < 30 { // of 40; 20 if the blocks were alike
		t.Errorf("in two blocks there are %d rounds that differ", len(company))
	}
	// A node has a worker for control, one as client and one as server, and its pod has one.
	if want := 5 * 4; f.started != want {
		t.Errorf("%d workers were started, want %d", f.started, want)
	}
	// The two trials of a round, one for each variant, follow one another.
	for i := 0; i < len(trials); i += 2 {
		if trials[i].Round != trials[i+1].Round || trials[i].Variant == trials[i+1].Variant {
			t.Errorf("trials %d and %d: rounds %d and %d of %s and %s", i+1, i+2, trials[i].Round, trials[i+1].Round, trials[i].Variant, trials[i+1].Variant)
		}
	}
	// A resumed run makes the missing rounds.
	f, resumed := newFake(5), &memory{trials: slices.Clone(trials[:13])}
	if trials, err = measure(t, t.Context(), f, meshOf(t, 5), resumed, nil); err != nil || len(trials) != 40 {
		t.Errorf("%d trials after a resumption, want 40: %v", len(trials), err)
	}
}

// readyTime does not limit traffic: pairs may run for longer than that.
func TestMeshOfLongTrials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, exp := newFake(3), meshOf(t, 3)
		f.takes = 3 * readyTime
		exp.Spec.Workloads[0].Stream.Duration = spec.Duration(f.takes)
		trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		if good, bad := links(trials); len(good) != 3*2 || len(bad) > 0 {
			t.Errorf("good %v, bad %v", good, bad)
		}
	})
}

// A node that fails, or hangs, fails its own pairs only.
func TestMeshWithABadNode(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(f *fakeTarget)
	}{
		{"fails", func(f *fakeTarget) {
			f.fail = func(call, at string) error {
				if strings.HasPrefix(at, "node2") {
					return errors.New("no " + call)
				}
				return nil
			}
		}},
		{"hangs", func(f *fakeTarget) {
			f.hangAt = func(_, at string) bool { return strings.HasPrefix(at, "node2") }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, out := newFake(4), new(memory)
				c.set(f)
				trials, err := measure(t, t.Context(), f, meshOf(t, 4), out, nil)
				if err != nil {
					t.Fatal(err)
				}
				good, bad := links(trials)
				for link := range good {
					if strings.Contains(link, "node2") {
						t.Errorf("%s gave numbers", link)
					}
				}
				if len(good) != 3*2 || len(bad) != 3*2 {
					t.Errorf("%d links good and %d bad, want 6 and 6", len(good), len(bad))
				}
				for _, tr := range trials {
					hangs := slices.ContainsFunc(tr.PerPair, func(p record.Pair) bool { return strings.HasPrefix(p.Server.Place, "node2") })
					if hangs && tr.Took > 12 { // the others begin once the 10 s are over
						t.Errorf("trial %d took %.1f s", tr.Order, tr.Took)
					}
					if tr.Status != record.StatusOK || tr.Metrics[metrics.Throughput] != 8e9 {
						t.Errorf("trial %d is %s, has %v: want the one pair that is left", tr.Order, tr.Status, tr.Metrics)
					}
					if !slices.ContainsFunc(tr.Warnings, func(w record.Warning) bool {
						return w.Code == record.WarnFailedPairs && strings.Contains(w.Message, "node2")
					}) {
						t.Errorf("trial %d does not warn of node2: %v", tr.Order, tr.Warnings)
					}
				}
			})
		})
	}
}

// A lost node can neither be accelerated nor restored. That, too, fails its own
// pairs only.
func TestAcceleratedMeshLosesANode(t *testing.T) {
	f, exp := newFake(4), meshOf(t, 4)
	exp.Spec.Variants[1].Accelerate = []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{v1alpha1.DeviceNIC}, CPUs: "all"}}}
	f.fail = func(call, at string) error {
		if strings.HasPrefix(at, "node2") && (call == "apply" || call == "revert") {
			return &place.LostError{Why: errors.New("node node2 is not ready")}
		}
		return nil
	}
	trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range trials {
		good, bad := links([]record.Trial{tr})
		if tr.Status != record.StatusOK || len(bad) != map[string]int{"nodes": 0, "pods": 1}[tr.Variant] || len(good)+len(bad) != 2 {
			t.Errorf("trial %d of %s: %s %s, good %v, bad %v", tr.Order, tr.Variant, tr.Status, tr.Error, good, bad)
		}
		for link := range bad {
			if !strings.Contains(link, "node2") {
				t.Errorf("%s is bad", link)
			}
		}
	}
}

// The run continues if a node of a mesh cannot say which programs it has.
func TestMeshOfApplicationsWithABadNode(t *testing.T) {
	exp := meshOf(t, 4)
	exp.Spec.Workloads = []spec.Workload{cache()}
	f := newFake(4)
	f.tools = map[string]string{spec.ToolMemcached: "1.6"}
	f.fail = func(call, at string) error {
		if call == "describe" && at == "node2" {
			return errors.New("it does not answer")
		}
		return nil
	}
	r, err := Start(t.Context(), f.plan(exp), f, nil, "test", nil, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// If nothing works, the run ends, as any other does.
func TestMeshWithoutAGoodNode(t *testing.T) {
	f, out := newFake(4), new(memory)
	f.fail = failing("drive", "broken")
	r, err := Start(context.Background(), f.plan(meshOf(t, 4)), f, nil, "test", nil, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Measure(t.Context(), out); err == nil || !strings.Contains(err.Error(), "every pair failed") {
		t.Errorf("the run ends with %v", err)
	}
}

// requests is a workload of http whose connections are known beforehand.
func requests() spec.Workload {
	return spec.Workload{Name: "requests", HTTP: &spec.Traffic{
		Tool: spec.ToolNative, Protocol: "tcp", IP: 4, Connections: 1, Requests: 10, Duration: spec.Duration(time.Minute), Warmup: 1e6,
	}}
}

// In a mesh, conntrack of a node needs room for the connections of one pair, and samplers may wait for it.
func TestMeshWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, exp := newFake(4), meshOf(t, 4)
		exp.Spec.Workloads = []spec.Workload{requests()}
		f.prepares = func(call string) time.Duration {
			if call == "sample" {
				return place.RoomWait - time.Second
			}
			return 0
		}
		for _, c := range f.plan(exp).Cells {
			if n := c.connections(); n != 10 {
				t.Fatalf("room for %d connections, want those of one pair", n)
			}
		}
		trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tr := range trials {
			if len(tr.Hosts) != 1 || len(tr.Warnings) > 0 {
				t.Fatalf("%d hosts, warnings %v", len(tr.Hosts), tr.Warnings)
			}
		}
	})
}

// TestMeshOfPreparedApplications: a server that is prepared for minutes is not late.
func TestMeshOfPreparedApplications(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, exp := newFake(3), meshOf(t, 3)
		postgres := cache()
		postgres.Application.Tool = spec.ToolPostgres
		exp.Spec.Workloads = []spec.Workload{postgres}
		f.tools = map[string]string{spec.ToolPostgres: "15"}
		f.prepares = func(call string) time.Duration {
			if call == "serve" {
				return place.PrepareWait - time.Second
			}
			return 0
		}
		trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		if good, bad := links(trials); len(good) != 3*2 || len(bad) > 0 {
			t.Errorf("good %v, bad %v", good, bad)
		}
	})
}

// TestMeshEndsEarly: the window of a number of requests ends with the last client, also if one could not begin.
func TestMeshEndsEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, exp := newFake(4), meshOf(t, 4)
		exp.Spec.Workloads = []spec.Workload{requests()}
		f.waits, f.takes = true, time.Second
		f.refuses = func(at string, use place.Use) bool { return use == place.ForTraffic && strings.HasPrefix(at, "node2") }
		trials, err := measure(t, t.Context(), f, exp, new(memory), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tr := range trials {
			if tr.Took > 30 {
				t.Errorf("trial %d took %.0f s, as long as it may", tr.Order, tr.Took)
			}
		}
	})
}

// TestMeshWithAnUnsampledNode: without what a machine's CPUs did, a trial has no CPU time per gigabyte, unless the machine had no
// traffic.
func TestMeshWithAnUnsampledNode(t *testing.T) {
	for name, fails := range map[string]string{"no sample": "sample", "no traffic either": ""} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(4)
				f.apart = true
				f.fail = func(call, at string) error {
					if strings.HasPrefix(at, "node2") && call != "describe" && (fails == "" || call == fails) {
						return errors.New("no " + call)
					}
					return nil
				}
				trials, err := measure(t, t.Context(), f, meshOf(t, 4), new(memory), nil)
				if err != nil {
					t.Fatal(err)
				}
				for _, tr := range trials {
					_, bad := links([]record.Trial{tr})
					_, known := tr.Metrics[metrics.CPUPerGB]
					if known != (fails == "") || tr.Metrics[metrics.Throughput] == 0 || len(tr.Hosts) != 3 || len(bad) > 0 != (fails == "") {
						t.Errorf("trial %d: %v, with %d hosts, bad %v", tr.Order, tr.Metrics, len(tr.Hosts), bad)
					}
				}
			})
		})
	}
}
