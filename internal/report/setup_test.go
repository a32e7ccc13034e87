package report

import (
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestWorkloadParts: a report tells how much traffic a workload made, on which port and by which program.
func TestWorkloadParts(t *testing.T) {
	of := func(t spec.Traffic) *spec.Traffic {
		t.Protocol, t.Duration = "tcp", spec.Duration(time.Minute)
		return &t
	}
	for _, c := range []struct {
		workload spec.Workload
		want     string
	}{
		{spec.Workload{PingPong: of(spec.Traffic{Iterations: 65100, Tool: spec.ToolLatte})}, "ping-pong, TCP, 65100 round trips per connection, 1m, measured with latte"},
		{spec.Workload{Stream: of(spec.Traffic{Port: 4000, Tool: spec.ToolQperf})}, "stream, TCP, 1m, port 4000, measured with qperf"},
		{spec.Workload{HTTP: of(spec.Traffic{Requests: 50000, Tool: spec.ToolAB})}, "HTTP, TCP, 50000 requests, a connection per request, 1m, measured with ab"},
	} {
		if got := strings.Join(workloadParts(c.workload), ", "); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// TestFastText: a report tells how many packets took the fast path, and of which kinds. Older results have no kinds.
func TestFastText(t *testing.T) {
	trial := func(variant string, status record.Status, packets map[string]uint64) record.Trial {
		return record.Trial{Variant: variant, Status: status, Fastpath: []record.Fastpath{{Place: "node0", Packets: packets}}}
	}
	trials := []record.Trial{
		trial("fast", record.StatusOK, map[string]uint64{"fast-out-vxlan": 500, "fast-in-vxlan": 300, "fast-out-local": 100, "nat": 50}),
		trial("fast", record.StatusOK, map[string]uint64{"fast-in-local": 20, "no-flow": 30}),
		trial("fast", record.StatusFailed, map[string]uint64{"nat": 1000}),
		trial("old", record.StatusOK, map[string]uint64{"fast-out": 3, "fast-in": 3, "nat": 2}),
		trial("idle", record.StatusOK, nil),
	}
	for variant, want := range map[string]string{
		"fast": "92.0% of packets took the fast path (local 12.0%, vxlan 80.0%)",
		"old":  "75.0% of packets took the fast path", "idle": "", "other": "",
	} {
		if got := fastText(trials, variant); got != want {
			t.Errorf("%s: %q, want %q", variant, got, want)
		}
	}
}

// TestPathOfService: the name of a cluster's service with many endpoints says how few pods they belong to.
func TestPathOfService(t *testing.T) {
	for want, s := range map[string]spec.Service{
		"ClusterIP": {Backends: 1}, "ClusterIP with 300 endpoints of 1 pod, at 300 ports": {Backends: 300},
	} {
		if got := pathName(spec.Path{Service: &s}); got != want {
			t.Errorf("%+v: %s, want %s", s, got, want)
		}
	}
	if got := pathName(spec.Path{Service: &spec.Service{Mode: spec.ServiceEBPF, Backends: 300}}); got != "ClusterIP" {
		t.Errorf("in a lab: %s", got)
	}
}
