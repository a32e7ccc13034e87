package test

import (
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// A run with services carries every kind of traffic that services support, in every mode.
func TestServices(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	d, _, _ := ran(t, experiment(t,
		"baseline: vxlan", "baseline: iptables",
		"  - {name: vxlan}\n", "  - {name: iptables, path: {service: {mode: iptables, backends: 20}}}\n",
		"  - {name: native, path: {native: {}}}\n", "  - {name: nftables, path: {service: {mode: nftables, backends: 20}}}\n",
		"  - {name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}\n",
		"  - {name: ebpf, path: {service: {mode: ebpf, backends: 20}}}\n",
		"  - {name: stream, stream: {warmup: 50ms, duration: 200ms}}\n", `  - {name: http6, http: {ip: 6, warmup: 50ms, duration: 200ms}}
  - {name: stream-udp4, stream: {protocol: udp, warmup: 50ms, duration: 200ms}}
  - {name: stream-udp6, stream: {protocol: udp, ip: 6, warmup: 50ms, duration: 200ms}}
  - {name: pingpong-udp4, pingpong: {protocol: udp, connections: 3, warmup: 50ms, duration: 200ms}}
  - {name: pingpong-udp6, pingpong: {protocol: udp, ip: 6, connections: 3, warmup: 50ms, duration: 200ms}}
  - {name: underload-udp6, underload: {protocol: udp, ip: 6, rate: 1000, warmup: 50ms, duration: 200ms}}
`,
		"  - {name: pingpong, pingpong: {warmup: 50ms, duration: 200ms}, pairs: [1]}\n", "  - {name: connect6, connect: {ip: 6, warmup: 50ms, duration: 200ms}}\n",
		"  pairs: [1, 2]\n  runs: 2\n", "  pairs: [2]\n  runs: 1\n",
	))
	all := measured(t, d)
	if len(cells(all)) != 3*7 {
		t.Fatalf("%d cells, want 21", len(cells(all)))
	}
	for _, tr := range all {
		if tr.Status != record.StatusOK {
			t.Errorf("%s %s: %s", tr.Variant, tr.Workload, tr.Error)
		}
		for _, p := range tr.PerPair {
			if p.Client.Bytes == 0 || p.Server.Bytes == 0 {
				t.Errorf("%s %s: %d bytes at the client, %d at the server", tr.Variant, tr.Workload, p.Client.Bytes, p.Server.Bytes)
			}
		}
	}
}
