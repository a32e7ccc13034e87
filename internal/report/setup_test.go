package report

import (
	"strings"
	"testing"
	"time"

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

// TestPathOfService: a service of a cluster with many endpoints says how few pods they are of.
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
