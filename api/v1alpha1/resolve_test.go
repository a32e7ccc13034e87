package v1alpha1

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVariantSettings(t *testing.T) {
	for name, c := range map[string]struct {
		variant Variant
		want    []string
	}{
		"path and baseline alone": {Variant{Path: &Path{Native: &Plain{}}, Versus: "vxlan"}, nil},
		"part of a NIC profile":   {Variant{NIC: &NIC{Offload: OffloadNone}}, []string{"NIC offload none"}},
		"accelerators on one side": {
			Variant{Accelerate: []Accelerator{{RPS: &RPS{Devices: []string{DeviceNIC}, CPUs: CPUsAll}}, {Fastpath: &Fastpath{}}}, On: SideServer},
			[]string{"RPS on nic over CPUs all, on the server's side only", "the eBPF fast path of VXLAN, on the server's side only"},
		},
		"everything, tools in the order of their workloads": {
			Variant{
				NIC:        &NIC{Offload: OffloadFull, MTU: 9000, Rate: "10G", Price: "1.50 USD"},
				Accelerate: []Accelerator{{RPS: &RPS{Devices: []string{DeviceNIC, DevicePod}, CPUs: CPUsAll}}, {Fastpath: &Fastpath{}}},
				Tools:      map[string]string{"stream": ToolIperf3, "pingpong": ToolQperf},
			},
			[]string{
				"NIC offload full, MTU 9000, 10G, 1.50 USD/h", "RPS on nic, pod over CPUs all", "the eBPF fast path of VXLAN",
				"pingpong measured with qperf", "stream measured with iperf3",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, c.variant.Settings()); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}
