//go:build linux

package main

import (
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/test/cluster"
)

// TestPublished creates the objects of the largest published test on a few nodes, without agents: TestScale runs those.
func TestPublished(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	t.Chdir("../..")
	plane, err := cluster.StartPlane(t.Context(), dir, auditPolicy, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	defer plane.Stop()
	f, err := newFleet(t.Context(), plane, filepath.Join(dir, "token"), options{nodes: 3, step: time.Millisecond}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	test, err := publishedOf("services")
	if err != nil {
		t.Fatal(err)
	}
	test.policies = 20
	phases := test.scenarios()[2:]
	if len(phases) != 1+steps {
		t.Fatalf("%d phases, want policies and %d steps", len(phases), steps)
	}
	for _, s := range phases {
		if _, err := s.do(t.Context(), f); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
	}
	policies, err := f.admin.NetworkingV1().NetworkPolicies("").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(policies.Items) != 20 {
		t.Errorf("%d policies, %v", len(policies.Items), err)
	}
	services, err := f.admin.CoreV1().Services(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{LabelSelector: "component!=apiserver"})
	if err != nil || len(services.Items) != 4 {
		t.Errorf("%d services, %v", len(services.Items), err)
	}
	slices, err := f.admin.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(slices.Items) != 4 {
		t.Fatalf("%d slices, %v", len(slices.Items), err)
	}
	backends := make(map[string]bool)
	for _, s := range slices.Items {
		if len(s.Endpoints) != 60 {
			t.Errorf("%s has %d endpoints, want 60", s.Name, len(s.Endpoints))
		}
		for _, e := range s.Endpoints {
			backends[e.Addresses[0]] = true
		}
	}
	for i := range 240 {
		if !backends[podIP(i)] {
			t.Errorf("pod %d is no backend", i)
		}
	}
	if f.created != 240 || len(backends) != 240 {
		t.Errorf("%d pods and %d backends, want 240", f.created, len(backends))
	}
}

// TestDrawResults: each test has a curve of slipstream's agent, and one of Cilium's, at the numbers of pods that were published.
func TestDrawResults(t *testing.T) {
	dir := t.TempDir()
	var all []result
	var files []string
	for _, name := range []string{"pods", "services"} {
		r := result{Scenario: name, Nodes: 9, Phases: []phase{{Name: "start"}, {Pods: 100, SoloMillicores: 2, SoloMiB: 20}, {Pods: 200, SoloMillicores: 3, SoloMiB: 22}}}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, name+".json")
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		all, files = append(all, r), append(files, file)
	}
	got, err := linesOf(all, mib, func(p published) float64 { return p.mib })
	if err != nil {
		t.Fatal(err)
	}
	own := []draw.Mark{{X: 10, Y: 20, Filled: true}, {X: 20, Y: 22, Filled: true}}
	if diff := cmp.Diff([]draw.Curve{
		{Name: "pods", Marks: own}, {Name: "services", Marks: own},
		{Name: "Cilium, pods", Marks: []draw.Mark{{X: 20, Y: 500}, {X: 100, Y: 500}}}, {Name: "Cilium, services", Marks: []draw.Mark{{X: 60, Y: 1024}}},
	}, got.Curves, cmpopts.IgnoreFields(draw.Curve{}, "Style")); diff != "" {
		t.Errorf("curves (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]float64{10, 20, 60, 100}, got.Xs); diff != "" {
		t.Errorf("axis (-want +got):\n%s", diff)
	}
	if slope := all[0].slope(mib); slope < 0.199 || slope > 0.201 {
		t.Errorf("slope %g, want 0.2 MiB for each pod", slope)
	}
	if err := drawResults(filepath.Join(dir, "scale"), files); err != nil {
		t.Fatal(err)
	}
	for _, figure := range []string{"cpu", "memory"} {
		if svg, err := os.ReadFile(filepath.Join(dir, "scale-"+figure+".svg")); err != nil || !strings.Contains(string(svg), "Cilium, services") {
			t.Errorf("%s: %v", figure, err)
		}
	}
	all[0].Scenario = ""
	if _, err := linesOf(all, mib, func(p published) float64 { return p.mib }); err == nil || !strings.Contains(err.Error(), "must be one of pods, policies, services") {
		t.Errorf("a run of the limits: %v", err)
	}
}
