package spec

import (
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
)

const beside = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {lab: {nodes: 2}}
  path: {vxlan: {}}
  baseline: a
  variants:
  - {name: a}
  workloads:
  - {name: bulk, stream: {duration: 3s, port: 7000}}
  - {name: short, connect: {warmup: 1s, duration: 2s}, beside: bulk}
  - {name: counted, pingpong: {duration: 1s, iterations: 5}}
  - {name: tool, stream: {duration: 1s, tool: iperf3}}
  pairs: [1, 4]
  runs: 1
`

// TestWorkloadBeside: a workload may name another one of the experiment that can share its pairs and its window.
func TestWorkloadBeside(t *testing.T) {
	e, err := Parse("experiment.yaml", []byte(beside), nil)
	if err != nil {
		t.Fatal(err)
	}
	short := e.Spec.Workloads[1]
	other := e.BesideOf(e.Spec.Variants[0], short)
	if other == nil || other.Name != "bulk" || time.Duration(other.Stream.Warmup) != time.Second || time.Duration(other.Stream.Duration) != 2*time.Second {
		t.Fatalf("beside: %+v, want bulk with the times of short", other)
	}
	if time.Duration(e.Spec.Workloads[0].Stream.Duration) != 3*time.Second || e.BesideOf(e.Spec.Variants[0], e.Spec.Workloads[0]) != nil {
		t.Error("bulk alone has changed")
	}
	if !short.Gives(metrics.BesideThroughput) || short.Gives(metrics.CPUPerMessage) || e.Spec.Workloads[0].Gives(metrics.BesideThroughput) || !e.Spec.Workloads[0].Gives(metrics.CPUPerGB) {
		t.Error("a workload with another beside it gives that one's throughput, and no CPU time")
	}
	for change, want := range map[string]string{
		"beside: bulk|beside: bulky":                          `spec.workloads[1].beside: no workload has the name "bulky"; did you mean bulk`,
		"beside: bulk|beside: short":                          "must be another workload than short",
		"beside: bulk|beside: counted":                        "needs a window of a fixed duration",
		"stream: {duration: 3s|stream: {ip: 6, duration: 3s":  "short has IPv4 and bulk IPv6",
		"beside: bulk|beside: tool":                           "tool is made by iperf3, and only the tool native",
		"iterations: 5}|iterations: 5}, beside: short":        "short has a workload beside it itself; name bulk",
		"connect: {|connect: {port: 7003, ":                   "the servers of short and bulk would listen on the same ports: leave 4 apart",
		"path: {vxlan: {}}|path: {service: {mode: iptables}}": "is not for the paths service and balancer",
	} {
		old, changed, _ := strings.Cut(change, "|")
		_, err := Parse("experiment.yaml", []byte(strings.Replace(beside, old, changed, 1)), nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", change, err, want)
		}
	}
}
