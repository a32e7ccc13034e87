package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/testenv/golden"
)

// small is the shortest valid experiment.
const small = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: small}
spec:
  baseline: base
  variants:
  - name: base
  workloads:
  - {name: bulk, stream: {duration: 10s}}
`

// full has two variants and a workload of each kind.
const full = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: full}
spec:
  target: {lab: {nodes: 3, nic: {offload: none, mtu: 9000, rate: 10Gbit}, congestionControl: bbr}}
  path: {vxlan: {shape: calico}}
  baseline: base
  variants:
  - {name: base}
  - {name: rps.1, accelerate: [{rps: {devices: [nic, pod], cpus: 0-3}}]}
  - {name: rfs, accelerate: [{rfs: {devices: [nic]}}]}
  - {name: native, path: {native: {}}, nic: {mtu: 1500}, tools: {bulk: iperf3}}
  workloads:
  - {name: bulk, stream: {size: 64KiB, duration: 10s}}
  - {name: udp, stream: {protocol: udp, ip: 6, duration: 10s}, pairs: [1]}
  - {name: pp, pingpong: {duration: 5s}}
  - {name: ul, underload: {rate: 1000, duration: 5s}}
  pairs: [1, 4]
  runs: 20
  seed: 18446744073709551615
`

func parse(t *testing.T, text string, overrides ...string) *Experiment {
	t.Helper()
	e, err := Parse("experiment.yaml", []byte(text), overrides)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestDefaults(t *testing.T) {
	want := &Experiment{
		APIVersion: v1alpha1.APIVersion, Kind: KindExperiment, Metadata: Metadata{Name: "small"},
		Spec: Spec{
			Target:   Target{Lab: &Lab{Nodes: 2, NIC: NIC{Offload: OffloadFull, MTU: 1500}, CongestionControl: "cubic"}},
			Path:     Path{VXLAN: &VXLAN{Shape: ShapeFlannel}},
			Baseline: "base",
			Variants: []Variant{{Name: "base"}},
			Workloads: []Workload{{Name: "bulk", Stream: &Traffic{
				Protocol: "tcp", IP: 4, Size: 128 << 10, Connections: 1, IO: IOBlocking,
				Warmup: Duration(time.Second), Duration: Duration(10 * time.Second), Tool: ToolNative,
			}}},
			Pairs:  []int{1},
			Runs:   Runs{Auto: true, Max: 40, Width: 0.02},
			Margin: 0.02,
		},
	}
	if diff := cmp.Diff(want, parse(t, small)); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}

	e := parse(t, full)
	for _, c := range []struct{ name, got, want string }{
		{"stream over UDP", text(e.Spec.Workloads[1].Stream), `{"protocol":"udp","ip":6,"size":1400,"connections":1,"io":"blocking","warmup":"1s","duration":"10s","tool":"native"}`},
		{"pingpong", text(e.Spec.Workloads[2].PingPong), `{"protocol":"tcp","ip":4,"size":64,"connections":1,"io":"blocking","warmup":"500ms","duration":"5s","tool":"native"}`},
		{"underload", text(e.Spec.Workloads[3].UnderLoad), `{"protocol":"tcp","ip":4,"size":64,"connections":1,"rate":1000,"io":"blocking","warmup":"500ms","duration":"5s","tool":"native"}`},
		{"rfs", text(e.Spec.Variants[2].Accelerate), `[{"rfs":{"devices":["nic"],"entries":32768}}]`},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, c.got, c.want)
		}
	}
}

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// writtenAndRead checks that an experiment is the same after Marshal and Parse.
func writtenAndRead(t *testing.T, what string, e *Experiment) {
	t.Helper()
	again, err := Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	back, err := Parse("test.yaml", again, nil)
	if err != nil {
		t.Fatalf("%s, written and read: %v", what, err)
	}
	if diff := cmp.Diff(e, back); diff != "" {
		t.Errorf("%s, written and read (-want +got):\n%s", what, diff)
	}
}

// TestMarshalLimit: an experiment that Parse would refuse once it has all its defaults is refused before it is measured.
func TestMarshalLimit(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: slipstream.dev/v1alpha1\nkind: Experiment\nmetadata: {name: large}\nspec:\n  baseline: v\n  variants: [{name: v}]\n  workloads:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - {name: w%d, stream: {duration: 1s}}\n", i)
	}
	e, err := Parse("large.yaml", []byte(b.String()), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Marshal(e); err == nil || !strings.Contains(err.Error(), "must have at most 64 KiB") {
		t.Errorf("error %v", err)
	}
}

func TestMarshal(t *testing.T) {
	e := parse(t, full)
	e.Spec.Workloads[2].Name = "on" // a boolean to other readers
	e.Metadata.Description = "Two lines:\n \"quoted\", # no comment\u2028\u0001 "
	got, err := Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "testdata/marshal.yaml", string(got))
	if diff := cmp.Diff(e, parse(t, string(got))); diff != "" {
		t.Errorf("Parse(Marshal(e)) (-want +got):\n%s", diff)
	}
	var fromJSON Experiment
	if err := json.Unmarshal([]byte(text(e)), &fromJSON); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*e, fromJSON); diff != "" {
		t.Errorf("through JSON (-want +got):\n%s", diff)
	}
}

func TestOverrides(t *testing.T) {
	for _, c := range []struct {
		set  string
		read func(*Experiment) any
		want any
	}{
		{"spec.runs=5", func(e *Experiment) any { return e.Spec.Runs }, Runs{N: 5}},
		{"spec.runs=auto", func(e *Experiment) any { return e.Spec.Runs }, Runs{Auto: true, Max: 40, Width: 0.02}},
		{"spec.runs={auto: {max: 12}}", func(e *Experiment) any { return e.Spec.Runs }, Runs{Auto: true, Max: 12, Width: 0.02}},
		{"spec.pairs=[1,4,16]", func(e *Experiment) any { return e.Spec.Pairs }, []int{1, 4, 16}},
		{"spec.pairs[1]=8", func(e *Experiment) any { return e.Spec.Pairs }, []int{1, 8}},
		{"spec.workloads.bulk.stream.duration=3s", func(e *Experiment) any { return e.Spec.Workloads[0].Stream.Duration }, Duration(3 * time.Second)},
		{"spec.workloads.0.stream.size=1k", func(e *Experiment) any { return e.Spec.Workloads[0].Stream.Size }, Bytes(1000)},
		{"spec.variants.rps.1.accelerate.0.rps.cpus=3", func(e *Experiment) any { return e.Spec.Variants[1].Accelerate[0].RPS.CPUs }, "3"},
		{"spec.variants.base.nic.mtu=1400", func(e *Experiment) any { return e.Spec.Variants[0].NIC.MTU }, 1400},
		{"spec.target.lab.nic.rate=", func(e *Experiment) any { return e.Spec.Target.Lab.NIC.Rate }, BitRate("")},
		{"spec.path={native: {}}", func(e *Experiment) any { return e.PathOf(e.Spec.Variants[0]).String() }, "native"},
	} {
		t.Run(c.set, func(t *testing.T) {
			var before string
			if strings.HasPrefix(c.set, "spec.path") {
				before = "spec.variants[1].accelerate[0].rps.devices=[nic]" // the path has no pod end
			} else {
				before = "metadata.name=other"
			}
			e := parse(t, full, before, c.set)
			if diff := cmp.Diff(c.want, c.read(e)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestStep(t *testing.T) {
	for _, c := range []struct{ key, name, rest string }{
		{"rps.1.nic.mtu", "rps.1", "nic.mtu"},
		{"rps.nic.mtu", "rps", "nic.mtu"},
		{"rps", "rps", ""},
		{"rps.1", "rps.1", ""},
		{"rpsx.y.z", "rpsx", "y.z"},
	} {
		if name, rest := step(c.key, []string{"rps.1", "rps"}); name != c.name || rest != c.rest {
			t.Errorf("step(%q) = %q, %q, want %q, %q", c.key, name, rest, c.name, c.rest)
		}
	}
}

// TestErrors compares the messages for one change each of the full experiment.
func TestErrors(t *testing.T) {
	var got strings.Builder
	for _, c := range []struct {
		name     string
		old, new string
		set      []string
	}{
		{name: "unknown field", old: "duration: 5s}}\n  - {name: ul", new: "duratoin: 5s}}\n  - {name: ul"},
		{name: "unknown field, none near", old: "seed:", new: "colour: red\n  seed:"},
		{name: "unknown kind of workload", old: "pp, pingpong", new: "pp, flood"},
		{name: "several", old: "pairs: [1, 4]\n  runs: 20", new: "pairs: [1, 4, 0]\n  runs: 0\n  margin: 0"},
		{name: "duplicate key", old: "  runs: 20", new: "  runs: 20\n  runs: 21"},
		{name: "not YAML", old: "[nic, pod]", new: "[nic, pod"},
		{name: "alias", old: "[nic, pod]", new: "*devices"},
		{name: "tag", old: "runs: 20", new: "runs: !!int 20"},
		{name: "merge key", old: "  runs: 20", new: "  <<: {runs: 20}"},
		{name: "two documents", old: "kind: Experiment", new: "---\nkind: Experiment"},
		{name: "list for a mapping", old: "metadata: {name: full}", new: "metadata: [full]"},
		{name: "text for a number", old: "nodes: 3", new: "nodes: three"},
		{name: "quoted number", old: "nodes: 3", new: `nodes: "3"`},
		{name: "empty element", old: "pairs: [1, 4]", new: "pairs: [1, ~]"},
		{name: "version and kind", old: "apiVersion: slipstream.dev/v1alpha1\nkind: Experiment", new: "apiVersion: v1"},
		{name: "experiment's name", old: "name: full", new: "name: Full_1"},
		{name: "nodes", old: "nodes: 3", new: "nodes: 17"},
		{name: "no target", old: "target: {lab: {nodes: 3, nic: {offload: none, mtu: 9000, rate: 10Gbit}, congestionControl: bbr}}", new: "target: {}"},
		{name: "nic", old: "offload: none, mtu: 9000, rate: 10Gbit", new: "offload: some, mtu: 9001, rate: 10Gb"},
		{name: "rate of nothing", old: "10Gbit", new: "0bit"},
		{name: "congestion control", old: "bbr", new: "bbr v3"},
		{name: "two paths", old: "path: {vxlan: {shape: calico}}", new: "path: {vxlan: {}, native: {}}"},
		{name: "shape", old: "shape: calico", new: "shape: cilium"},
		{name: "baseline", old: "baseline: base", new: "baseline: vase"},
		{name: "no baseline", old: "  baseline: base\n", new: ""},
		{name: "variant's name", old: "{name: base}", new: "{name: Base line}"},
		{name: "variant twice", old: "{name: rfs,", new: "{name: base,"},
		{name: "versus nothing", old: "{name: rfs,", new: "{name: rfs, versus: nativ,"},
		{name: "versus itself", old: "{name: rfs,", new: "{name: rfs, versus: rfs,"},
		{name: "versus of the baseline", old: "{name: base}", new: "{name: base, versus: rfs}"},
		{name: "versus chain", old: "{name: rfs,", new: "{name: x, versus: rfs}\n  - {name: rfs, versus: native,"},
		{name: "no accelerator", old: "[{rfs: {devices: [nic]}}]", new: "[{}]"},
		{name: "accelerator of a policy", old: "[{rfs: {devices: [nic]}}]", new: "[{vf: {}}]"},
		{name: "device", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {devices: [eth0]}}]"},
		{name: "device twice", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {devices: [nic, nic]}}]"},
		{name: "no device", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {}}, {rps: {devices: [], cpus: all}}]"},
		{name: "cpus", old: "cpus: 0-3", new: "cpus: 3-0"},
		{name: "no cpus", old: ", cpus: 0-3", new: ""},
		{name: "entries", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {devices: [nic], entries: 0}}, {rfs: {devices: [pod], entries: 1000}}]"},
		{name: "two masks", old: "[{rfs: {devices: [nic]}}]", new: "[{rps: {devices: [nic], cpus: all}}, {rfs: {devices: [pod, nic], cpus: all}}]"},
		{name: "two masks, RFS first", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {devices: [nic], cpus: all}}, {rps: {devices: [nic], cpus: all}}]"},
		{name: "two tables", old: "[{rfs: {devices: [nic]}}]", new: "[{rfs: {devices: [nic], entries: 1024}}, {rfs: {devices: [pod], entries: 2048}}]"},
		{name: "native has nic only", old: "path: {native: {}}", new: "path: {native: {}}, accelerate: [{rps: {devices: [nic, pod], cpus: all}}]"},
		{name: "a side", old: "accelerate: [{rfs: {devices: [nic]}}]", new: "accelerate: [{rfs: {devices: [nic]}}], on: servers"},
		{name: "a side of nothing", old: "{name: base}", new: "{name: base, on: server}"},
		{name: "tool of a variant", old: "{bulk: iperf3}", new: "{bulk: sockperf, pp: iperf3, bluk: native}"},
		{name: "no workloads", old: full[strings.Index(full, "  workloads:"):], new: "  workloads: []\n"},
		{name: "two kinds", old: "pingpong: {duration: 5s}", new: "pingpong: {duration: 5s}, stream: {duration: 5s}"},
		{name: "protocol and ip", old: "protocol: udp, ip: 6", new: "protocol: sctp, ip: 5"},
		{name: "connections over udp", old: "pingpong: {duration: 5s}", new: "connect: {protocol: udp, duration: 5s}"},
		{name: "http over udp", old: "pingpong: {duration: 5s}", new: "http: {protocol: udp, duration: 5s}"},
		{name: "http's own", old: "pingpong: {duration: 5s}", new: "pingpong: {keepAlive: true, requests: 5, page: true, image: 5, duration: 5s}"},
		{name: "no requests", old: "pingpong: {duration: 5s}", new: "http: {requests: 0, rate: 5, duration: 5s}"},
		{name: "iterations of connections", old: "pingpong: {duration: 5s}", new: "connect: {iterations: 5, duration: 5s}"},
		{name: "no iterations", old: "pingpong: {duration: 5s}", new: "pingpong: {iterations: 0, io: epoll, duration: 5s}"},
		{name: "iterations by qperf", old: "pingpong: {duration: 5s}", new: "pingpong: {iterations: 5, tool: qperf, duration: 5s}"},
		{name: "a port that leaves none for pairs", old: "pingpong: {duration: 5s}", new: "pingpong: {port: 65535, duration: 5s}"},
		{name: "page without users", old: "pingpong: {duration: 5s}", new: "http: {page: true, duration: 5s}"},
		{name: "page with requests", old: "pingpong: {duration: 5s}", new: "http: {page: true, rate: 5, requests: 5, connections: 2, keepAlive: false, duration: 5s}"},
		{name: "image without a page", old: "pingpong: {duration: 5s}", new: "http: {image: 2MiB, duration: 5s}"},
		{name: "page by ab", old: "pingpong: {duration: 5s}", new: "http: {page: true, rate: 5, tool: ab, duration: 5s}"},
		{name: "latte in a lab", old: "pingpong: {duration: 5s}", new: "pingpong: {tool: latte, duration: 5s}"},
		{name: "too small for when it was due", old: "underload: {rate", new: "underload: {size: 7, rate"},
		{name: "tool", old: "pingpong: {duration: 5s}", new: "pingpong: {tool: iperf3, duration: 5s}"},
		{name: "size unit", old: "64KiB", new: "64KB"},
		{name: "size of a datagram", old: "udp, ip: 6", new: "udp, ip: 6, size: 65500"},
		{name: "size for sockperf", old: "pingpong: {duration: 5s}", new: "pingpong: {tool: sockperf, size: 13, duration: 5s}"},
		{name: "no size", old: "size: 64KiB", new: "size: 0"},
		{name: "connections", old: "size: 64KiB", new: "connections: 0"},
		{name: "rate of a stream", old: "size: 64KiB", new: "rate: 5"},
		{name: "negative rate", old: "rate: 1000", new: "rate: -1"},
		{name: "durations", old: "size: 64KiB, duration: 10s", new: "warmup: 0s, duration: 10"},
		{name: "negative duration", old: "size: 64KiB, duration: 10s", new: "duration: -1s"},
		{name: "no duration", old: "size: 64KiB, duration: 10s", new: ""},
		{name: "pairs", old: "pairs: [1, 4]", new: "pairs: [65, 4, 4]"},
		{name: "no pairs", old: "pairs: [1, 4]", new: "pairs: []"},
		{name: "runs", old: "runs: 20", new: "runs: ten"},
		{name: "runs auto", old: "runs: 20", new: "runs: {auto: {max: 7, width: 0.5}}"},
		{name: "runs auto, unknown", old: "runs: 20", new: "runs: {auto: {maks: 7}}"},
		{name: "runs, no auto", old: "runs: 20", new: "runs: {}"},
		{name: "seed", old: "18446744073709551615", new: "-1"},
		{name: "empty file", old: full},
		{name: "a list", old: full, new: "- 1\n"},
		{name: "not text", old: full, new: "a: \xff"},
		{name: "too long", old: full, new: strings.Repeat("# \n", 30000)},
		{name: "fast path of what is none", old: "name: rps.1,", new: "name: fast, path: {native: {}}, accelerate: [{fastpath: {}}, {fastpath: {}}]}\n  - {name: rps.1,"},
		{name: "steering what a bridge has not", old: "name: rps.1,", new: "name: rps.1, path: {bridge: {}},"},
		{name: "steering what pods of one node do not pass", old: "name: rps.1,", new: "name: over, path: {vxlan: {shape: calico}, local: true}, accelerate: [{rps: {devices: [overlay], cpus: all}}]}\n  - {name: rps.1,"},
		{name: "busy at no rate", old: "rate: 1000,", new: "busy: true,"},
		{name: "busy stream", old: "size: 64KiB,", new: "busy: true,"},
		{name: "io of no kind", old: "size: 64KiB,", new: "io: uring,"},
		{name: "io of another tool", old: "size: 64KiB,", new: "io: epoll, tool: iperf3,"},
		{name: "datagrams without room for a number", old: "protocol: udp, ip: 6,", new: "protocol: udp, size: 15,"},
		{name: "override: no value", set: []string{"spec.runs"}},
		{name: "override: unknown field", set: []string{"spec.rnus=5"}},
		{name: "override: wrong value", set: []string{"spec.runs=0", "spec.pairs=[1,0]"}},
		{name: "override: no such element", set: []string{"spec.workloads.bilk.stream.duration=3s"}},
		{name: "override: through a scalar", set: []string{"spec.runs.auto.max=9"}},
		{name: "override: not YAML", set: []string{"spec.pairs=[1"}},
		{name: "override: breaks another field", set: []string{"spec.variants.base.name=x"}},
	} {
		text := full
		if c.old != "" {
			if text = strings.Replace(full, c.old, c.new, 1); text == full {
				t.Fatalf("%s: the experiment has no %q", c.name, c.old)
			}
		}
		_, err := Parse("experiment.yaml", []byte(text), c.set)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		var one *Error
		if !errors.As(err, &one) {
			t.Errorf("%s: %T is no *Error", c.name, err)
		}
		got.WriteString("# " + c.name + "\n" + err.Error() + "\n")
	}
	golden.Compare(t, "testdata/errors.txt", got.String())
}

func TestResolve(t *testing.T) {
	e := parse(t, strings.Replace(full, "  - {name: native,", `  - {name: other}
  - {name: bare, versus: base}
  - {name: vs-bare, versus: bare}
  - {name: vs-other, versus: other}
  - {name: native,`, 1))
	byName := map[string]Variant{}
	for _, v := range e.Spec.Variants {
		byName[v.Name] = v
	}
	for name, want := range map[string]string{"base": "", "rfs": "base", "other": "", "bare": "base", "vs-bare": "bare", "vs-other": "other"} {
		if got := e.BaselineOf(byName[name]); got != want {
			t.Errorf("BaselineOf(%s) = %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]string{"base": "vxlan/calico", "native": "native"} {
		if got := e.PathOf(byName[name]).String(); got != want {
			t.Errorf("PathOf(%s) = %q, want %q", name, got, want)
		}
	}
	if got, want := e.NICOf(byName["native"]), (NIC{Offload: OffloadNone, MTU: 1500, Rate: "10Gbit"}); got != want {
		t.Errorf("NICOf(native) = %+v, want %+v", got, want)
	}
	bulk, udp := e.Spec.Workloads[0], e.Spec.Workloads[1]
	if diff := cmp.Diff([][]int{{1, 4}, {1}}, [][]int{e.PairsOf(bulk), e.PairsOf(udp)}); diff != "" {
		t.Errorf("PairsOf (-want +got):\n%s", diff)
	}
	got := e.WorkloadFor(byName["native"], bulk)
	if got.Traffic().Tool != ToolIperf3 || e.WorkloadFor(byName["native"], udp).Traffic().Tool != ToolNative {
		t.Error("WorkloadFor does not take the variant's tools for the workloads it names alone")
	}
	if bulk.Stream.Tool != ToolNative {
		t.Error("WorkloadFor changed the experiment")
	}
	var kinds []string
	for _, w := range e.Spec.Workloads {
		kinds = append(kinds, w.Kind())
	}
	if diff := cmp.Diff([]string{"stream", "stream", "pingpong", "underload"}, kinds); diff != "" {
		t.Errorf("Kind (-want +got):\n%s", diff)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(small), "spec.runs=5")
	f.Add([]byte(full), "spec.workloads.bulk.stream.size=1MiB")
	f.Add([]byte(strings.Replace(full, "20", "auto", 1)), "metadata.description=a: b")
	f.Add([]byte(seriesExperiment+"[{name: i, axis: backends, of: [i/1, i/9]}, {name: e, axis: backends, of: [e/1], versus: i}]\n"), "spec.variants=[{name: e/1}]")
	f.Add([]byte(seriesExperiment+"[{name: i, axis: price, of: [i/1, i/9]}]\n"), "spec.target={hosts: [{name: a}, {name: b}]}")
	f.Fuzz(func(t *testing.T, data []byte, set string) {
		e, err := Parse("experiment.yaml", data, []string{set})
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a message")
			}
			return
		}
		text, err := Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("again.yaml", text, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if diff := cmp.Diff(e, again); diff != "" {
			t.Errorf("Parse(Marshal(e)) (-want +got):\n%s\n%s", diff, text)
		}
	})
}

// TestByteOrderMark: editors on Windows write one.
func TestByteOrderMark(t *testing.T) {
	const text = "\ufeff" + `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  baseline: native
  variants: [{name: native, path: {native: {}}}]
  workloads: [{name: stream, stream: {duration: 1s}}]
`
	if _, err := Parse("bom.yaml", []byte(text), nil); err != nil {
		t.Error(err)
	}
}

// TestNoYAML: the error for a file that is not YAML quotes only its beginning.
func TestNoYAML(t *testing.T) {
	_, err := Parse("passwd", []byte(strings.Repeat("root:x:0:0:root:/root:/bin/bash\n", 50)), nil)
	if err == nil || !strings.Contains(err.Error(), `must be a mapping, is "root:x:0:0`) || len(err.Error()) > 200 {
		t.Error(err)
	}
}
