package spec

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
)

func TestVariantSettings(t *testing.T) {
	for name, c := range map[string]struct {
		variant Variant
		want    []string
	}{
		"path and baseline alone": {Variant{Path: &Path{Native: &Plain{}}, Versus: "vxlan"}, nil},
		"part of a NIC profile":   {Variant{NIC: &NIC{Offload: OffloadNone}}, []string{"NIC offload none"}},
		"accelerators on one side": {
			Variant{Accelerate: []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{v1alpha1.DeviceNIC}, CPUs: v1alpha1.CPUsAll}}, {Fastpath: &v1alpha1.Fastpath{}}}, On: SideServer},
			[]string{"RPS on nic over CPUs all, on the server's side only", "the eBPF fast path, on the server's side only"},
		},
		"everything, tools in the order of their workloads": {
			Variant{
				NIC:        &NIC{Offload: OffloadFull, MTU: 9000, Rate: "10G", Price: "1.50 USD"},
				Accelerate: []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{v1alpha1.DeviceNIC, v1alpha1.DevicePod}, CPUs: v1alpha1.CPUsAll}}, {Fastpath: &v1alpha1.Fastpath{}}},
				Tools:      map[string]string{"stream": ToolIperf3, "pingpong": ToolQperf},
			},
			[]string{
				"NIC offload full, MTU 9000, 10G, 1.50 USD/h", "RPS on nic, pod over CPUs all", "the eBPF fast path",
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
