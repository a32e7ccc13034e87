package spec

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
)

// everyField returns experiment files that together have every field.
func everyField(t *testing.T) map[string][]byte {
	t.Helper()
	files := make(map[string][]byte)
	for _, name := range []string{"fields-lab.yaml", "fields-balancer.yaml", "fields-kubernetes.yaml", "fields-imported.yaml", "fields-switch.yaml", "fields-hosts.yaml", "fields-mesh.yaml", "fields-clusters.yaml"} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = data
	}
	return files
}

// TestRules checks what the checks demand: always, in some places only, and of a list.
func TestRules(t *testing.T) {
	rules, err := Rules(everyField(t))
	if err != nil {
		t.Fatal(err)
	}
	for field, want := range map[string]Rule{
		"Experiment.kind":         {Required: true, Enum: []string{KindExperiment}},
		"Lab.nodes":               {Defaults: []string{"2"}, Low: 2, High: 16},
		"NIC.offload":             {Defaults: []string{"full"}, Enum: []string{OffloadFull, OffloadNone}},
		"Spec.margin":             {Defaults: []string{"0.02"}, Text: "above 0 and below 0.5", Below: 0.5},
		"Spec.path":               {Defaults: []string{"{native: {}}", "{pod: {}}", "{vxlan: {}}"}},
		"Spec.pairs":              {Defaults: []string{"[1]"}, Some: true},
		"Spec.pairs[]":            {Low: 1, High: 64},
		"Service.mode":            {Enum: []string{ServiceIPTables, ServiceNFTables, ServiceEBPF}}, // a cluster's has none
		"Traffic.duration":        {Required: true},
		"Traffic.size":            {Defaults: []string{"128KiB", "1400", "200k", "64"}, Low: 1, High: 1 << 20},
		"RPS.devices[]":           {Enum: []string{v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth, v1alpha1.DevicePod}},
		"Target":                  {OneOf: []string{"lab", "kubernetes", "hosts", "imported"}},
		"Resources.memory":        {Pattern: memAmount.String(), Text: "bytes, such as 256Mi"},
		"Kubernetes.nodeSelector": {},
	} {
		if diff := cmp.Diff(want, rules[field]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", field, diff)
		}
	}
}

// TestRulesNeedEveryField: without an error, the rules would silently lack every check
// that no file reaches.
func TestRulesNeedEveryField(t *testing.T) {
	_, err := Rules(map[string][]byte{"small.yaml": []byte(small)})
	const want = "learn the rules of experiment files: no file has the field Metadata.description"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
