package stats

import (
	"strings"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

const comparedYAML = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: one}
spec:
  target: {lab: {nodes: 2}}
  path: {vxlan: {shape: flannel}}
  baseline: vxlan
  variants: [{name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}]
  workloads:
  - {name: small, pingpong: {size: 64, duration: 1s}}
  - {name: bulk, stream: {duration: 1s}}
`

func resultOf(t *testing.T, name, yaml string) Result {
	t.Helper()
	exp, err := spec.Parse(name, []byte(yaml), nil)
	if err != nil {
		t.Fatal(err)
	}
	return Result{Name: name, Experiment: exp}
}

// TestCompareImportedTraffic: imported trials may differ in their numbers of requests or round trips, because a time
// limit may have set them.
func TestCompareImportedTraffic(t *testing.T) {
	const yaml = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: one}
spec:
  target: {imported: {interleaved: true}}
  baseline: off
  variants: [{name: off}, {name: on}]
  runs: 1
  workloads:
  - {name: pages, http: {tool: ab, protocol: tcp, connections: 8, requests: 30802, duration: 1s}}
  - {name: trips, pingpong: {tool: latte, protocol: tcp, connections: 1, iterations: 65000, duration: 1s}}
`
	before := resultOf(t, "before", yaml)
	for change, want := range map[string]string{
		"requests: 30802 -> requests: 29000":     "",
		"iterations: 65000 -> iterations: 64000": "",
		"connections: 8 -> connections: 9":       "connections 8 and 9",
	} {
		from, to, _ := strings.Cut(change, " -> ")
		c, err := Compare(before, resultOf(t, "after", strings.Replace(yaml, from, to, 1)), Only{})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(c.OtherTraffic, "; "); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("%s: %q, want %q", change, got, want)
		}
	}
}

// TestCompareImportedConditions: imports are compared only if their traffic had the same direction and rate limit, as far as both
// say so.
func TestCompareImportedConditions(t *testing.T) {
	imported := func(conditions map[string]string) Result {
		r := resultOf(t, "one", comparedYAML)
		r.Imported = &record.Imported{Conditions: map[string]map[string]string{"bulk": conditions}}
		return r
	}
	for _, c := range []struct {
		was, now map[string]string
		want     string
	}{
		{map[string]string{"direction": "forward"}, map[string]string{"direction": "forward", "rate limit": "none"}, ""},
		{map[string]string{"direction": "forward", "rate limit": "none"}, map[string]string{"direction": "reverse", "rate limit": "1000 Mbit/s"},
			"direction forward and reverse, rate limit none and 1000 Mbit/s"},
	} {
		got, err := Compare(imported(c.was), imported(c.now), Only{})
		if err != nil {
			t.Fatal(err)
		}
		if text := strings.Join(got.OtherTraffic, "; "); !strings.Contains(text, c.want) || (c.want == "") != (text == "") {
			t.Errorf("%q, want %q", text, c.want)
		}
	}
}

// TestCompareTraffic: workloads of one name are compared only if they are the same traffic.
func TestCompareTraffic(t *testing.T) {
	before := resultOf(t, "before", comparedYAML)
	for change, want := range map[string]string{
		"size: 64 -> size: 1M":                                              "small is other traffic in after than in before: size 64 and 1M",
		"small, pingpong: {size: 64, -> small, connect: {":                  "small is other traffic in after than in before: pingpong and connect",
		"bulk, stream: { -> bulk, stream: {connections: 4, ":                "connections 1 and 4",
		"bulk, stream: {duration: 1s -> bulk, stream: {ip: 6, duration: 9s": "ip 4 and 6",
		"size: 64, duration: 1s -> size: 64, duration: 3s":                  "",
		"name: small -> name: large":                                        "",
		"name: small, -> name: small, beside: bulk,":                        "beside unset and stream",
	} {
		from, to, _ := strings.Cut(change, " -> ")
		after := resultOf(t, "after", strings.Replace(comparedYAML, from, to, 1))
		c, err := Compare(before, after, Only{})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(c.OtherTraffic, "; "); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("%s: %q, want %q", change, got, want)
		}
		if c, err := Compare(before, after, Only{Workloads: []string{"none of them"}}); err != nil || len(c.OtherTraffic) > 0 {
			t.Errorf("%s: of other workloads only: %v, %v", change, c, err)
		}
	}
}
