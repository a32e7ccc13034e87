package accel

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/accel/kernel/kerneltest"
)

func TestProbeRPS(t *testing.T) {
	nothing := &kerneltest.Memory{}
	queues := &kerneltest.Memory{Values: map[string]string{kernel.Queue("lo", 0, "rps_cpus"): "0"}}
	table := &kerneltest.Memory{Values: map[string]string{kernel.FlowTable: "0"}}
	rps := func(queues, _ kernel.Store) error { return probeRPS(queues) }
	for _, c := range []struct {
		what            string
		queues, machine *kerneltest.Memory
		probe           func(queues, machine kernel.Store) error
		want            string
	}{
		{"RPS", queues, nothing, rps, ""},
		{"RFS", queues, table, probeRFS, ""},
		{"RPS, no CONFIG_RPS", nothing, table, rps, "this kernel lacks RPS (CONFIG_RPS)"},
		{"RFS, no CONFIG_RPS", nothing, table, probeRFS, "this kernel lacks RPS (CONFIG_RPS)"},
		{"RFS, no flow table", queues, nothing, probeRFS, kernel.FlowTable},
	} {
		err := c.probe(c.queues, c.machine)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.want)
		}
		if writes := slices.Concat(c.queues.Writes, c.machine.Writes); len(writes) > 0 {
			t.Errorf("%s: the probe wrote %q", c.what, writes)
		}
	}
}

func TestBrief(t *testing.T) {
	for text, want := range map[string]string{
		"try the fast path: start the fast path: this kernel lacks tcx (since Linux 6.6)": "this kernel lacks tcx (since Linux 6.6)",
		"try the fast path: make a node: no buffer space available":                       "try the fast path: make a node: no buffer space available",
	} {
		if got := brief(fmt.Errorf("%s", text)); got.Error() != want {
			t.Errorf("%s: %v, want %s", text, got, want)
		}
	}
}
