package spec

import (
	"strings"
	"testing"
)

// TestApplications: an application accepts the settings that its client supports, and
// no others.
func TestApplications(t *testing.T) {
	const file = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: applications}
spec:
  target: {lab: {nodes: 2}}
  path: {native: {}}
  baseline: native
  variants: [{name: native}]
  workloads:
  - {name: a, application: {SETTINGS, duration: 1500ms}}
`
	for _, tt := range []struct{ settings, want string }{
		{"tool: redis, operation: get, pipeline: 16", ""},
		{"tool: postgres, operation: tpcb, connections: 8", ""},
		{"tool: memcached, operation: set, connections: 64, size: 1KiB", ""},
		{"tool: grpc, operation: unary, pipeline: 8, size: 1KiB", ""},
		{"tool: postgres, operation: get", "operation: must be select or tpcb"},
		{"tool: redis, operation: tpcb", "operation: must be get or set"},
		{"tool: grpc, operation: get", "operation: must be unary"},
		{"tool: postgres, operation: select, size: 64", "size: is not for postgres"},
		{"tool: postgres, operation: select, pipeline: 2", "the client of postgres waits for each answer"},
		{"tool: memcached, operation: get, pipeline: 2", "the client of memcached waits for each answer"},
		{"tool: memcached, operation: get, ip: 6", "ip: must be 4, is 6"},
		{"tool: memcached, operation: get, connections: 64, size: 2KiB", "size: must be at most 1024 for 64 connections"},
	} {
		e, err := Parse("test.yaml", []byte(strings.Replace(file, "SETTINGS", tt.settings, 1)), nil)
		if tt.want != "" {
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %v, want %q", tt.settings, err, tt.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tt.settings, err)
			continue
		}
		of := *e.WorkloadFor(e.Spec.Variants[0], e.Spec.Workloads[0]).Application
		if whole := of.Tool == ToolPostgres || of.Tool == ToolMemcached; whole != (of.Duration == Duration(2e9)) {
			t.Errorf("%s lasts %d ns", tt.settings, of.Duration)
		}
		if (of.Size == 0) != (of.Tool == ToolPostgres) {
			t.Errorf("%s: a size of %d", tt.settings, of.Size)
		}
	}
}
