package cli

import (
	"bytes"
	"errors"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// slipstream runs the program with arguments, and returns its exit code and output.
func slipstream(t testing.TB, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var files [2]*os.File
	for i := range files {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	root := Process{Args: append([]string{"slipstream"}, args...), Version: "test", Hurry: make(chan struct{}), Stdin: os.Stdin, Stdout: files[0], Stderr: files[1]}
	code = execute(t.Context(), root)
	var said [2]string
	for i, f := range files {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		said[i] = string(data)
	}
	return code, said[0], said[1]
}

// succeed runs the program, which must succeed, and returns its output.
func succeed(t testing.TB, args ...string) (stdout, stderr string) {
	t.Helper()
	code, stdout, stderr := slipstream(t, args...)
	if code != exitGood {
		t.Fatalf("slipstream %s: exit code %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout, stderr
}

// resultYAML is an experiment whose variants get different verdicts.
const resultYAML = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: made}
spec:
  target: {lab: {nodes: 2}}
  path: {vxlan: {shape: flannel}}
  baseline: vxlan
  variants:
  - {name: native, path: {native: {}}}
  - {name: vxlan}
  - {name: fastpath, accelerate: [{fastpath: {}}]}
  - {name: rps+, accelerate: [{rps: {devices: [nic, pod], cpus: all}}]}
  - {name: rfs, accelerate: [{rfs: {devices: [nic]}}]}
  workloads:
  - {name: stream, stream: {duration: 1s}}
  - {name: pingpong, pingpong: {duration: 1s}}
  pairs: [1]
  runs: 6
`

// effects has the effect of each variant: its throughput, median and p99 latency, as
// multiples of the baseline's.
var effects = map[string][3]float64{
	"native": {2, 0.5, 0.5}, "vxlan": {1, 1, 1}, "fastpath": {1.5, 0.7, 1.4}, "rps+": {1.2, 1.42, 1}, "rfs": {1, 1, 1},
}

// result makes a results folder with the first blocks of the experiment's six.
func result(t testing.TB, yaml string, blocks int, seed uint64) string {
	t.Helper()
	exp, err := spec.Parse("made.yaml", []byte(yaml), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := spec.Marshal(exp)
	if err != nil {
		t.Fatal(err)
	}
	started := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	dir, err := record.Create(t.TempDir(), exp.Metadata.Name, started, text, record.Environment{
		Version: "test", Started: started, Command: "slipstream run made.yaml", Nodes: []record.Node{{Name: "node0", Kernel: "6.12.1"}, {Name: "node1", Kernel: "6.12.1"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	rng := rand.New(rand.NewPCG(seed, 1))
	order := 0
	for b := range blocks {
		for _, w := range exp.Spec.Workloads {
			for _, v := range exp.Spec.Variants {
				order++
				noise := func() float64 { return 1 + 0.01*rng.NormFloat64() }
				e := effects[v.Name]
				measured := map[string]float64{metrics.Throughput: 1e9 * e[0] * noise(), metrics.InterruptsPerGB: 1e5 + float64(b)}
				if w.PingPong != nil {
					measured = map[string]float64{metrics.Rate: 1e4 / e[1], metrics.LatencyP50: 1e-4 * e[1] * noise(), metrics.LatencyP99: 3e-4 * e[2] * noise()}
				}
				if err := dir.Append(record.Trial{
					Block: b + 1, Order: order, Variant: v.Name, Workload: w.Name, Pairs: 1, Attempt: 1, Status: record.StatusOK, Metrics: measured,
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return dir.Path
}

func has(t *testing.T, what, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q:\n%.2000s", what, w, text)
		}
	}
}

func TestPolicyKeepsWhatIsProved(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	code, stdout, stderr := slipstream(t, "policy", dir, "fastpath", "--host", "-o", file)
	if code != 0 || stdout != "" {
		t.Fatalf("exit %d, standard output %q\n%s", code, stdout, stderr)
	}
	has(t, "policy", stderr, "slipstream agent --policy "+file, "is worse in other metrics: pingpong p99 latency +4")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := spec.ParsePolicy(file, text) // the way an agent reads it
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Spec.Accelerate) != 1 || p.Spec.Accelerate[0].Fastpath == nil || p.Name != "fastpath" {
		t.Errorf("the policy is %s", text)
	}
	for name, want := range map[string]string{
		"result": filepath.Base(dir), "measured": "2026-01-02T15:04:05Z", "measured-in": "lab", "kernel": "6.12.1", "variant": "fastpath", "baseline": "vxlan",
		"workload": "stream", "pairs": "1", "metric": "throughput", "blocks": "6",
	} {
		if got := p.Annotations[annotation+name]; got != want {
			t.Errorf("annotation %s is %q, want %q", name, got, want)
		}
	}
	var ratio, low, high float64
	if _, err := fmt.Sscanf(p.Annotations[annotation+"ratio"]+" "+p.Annotations[annotation+"interval"], "%f %f-%f", &ratio, &low, &high); err != nil || low > 1.5 || ratio < low || ratio > high || high < 1.5 {
		t.Errorf("ratio %s, interval %s", p.Annotations[annotation+"ratio"], p.Annotations[annotation+"interval"])
	}
	has(t, "the proof", p.Annotations[annotation+"proof"], "stream throughput +", "pingpong median latency −", "(faster)")
}

func TestPolicyForAClusterSaysWhichNodes(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	for flags, want := range map[string]string{"--all": "  all: true\n", "--node-selector=pool=net,slipstream.dev/try=yes": `nodeSelector: {pool: net, slipstream.dev/try: "yes"}`} {
		code, stdout, stderr := slipstream(t, "policy", dir, "fastpath", flags)
		if code != 0 {
			t.Errorf("%s: exit %d\n%s", flags, code, stderr)
		}
		has(t, flags, stdout, want, "kind: AccelerationPolicy")
		has(t, flags, stderr, "measured in a lab", "slipstream run kubernetes")
	}
}

func TestPolicyRefuses(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	for name, c := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"slower in one of two cells": {[]string{"rps+", "--host"}, 3, []string{"rps+ is slower than vxlan: pingpong median latency +4", "--anyway"}},
		"not proven":                 {[]string{"rfs", "--host"}, 4, []string{"not proven: no comparison shows rfs to be faster than vxlan", "--anyway"}},
		"unknown variant":            {[]string{"fastpat", "--host"}, 2, []string{"no variant \"fastpat\"", "did you mean fastpath?"}},
		"nothing near":               {[]string{"xxxxxxxxxxxx", "--host"}, 2, []string{"native, vxlan, fastpath, rps+, rfs"}},
		"baseline":                   {[]string{"vxlan", "--host"}, 2, []string{"vxlan is a baseline", "nothing to apply"}},
		"another path":               {[]string{"native", "--host"}, 2, []string{"another path", "cannot change the path"}},
		"no nodes":                   {[]string{"fastpath"}, 2, []string{"--host", "--node-selector KEY=VALUE", "--all"}},
		"nodes twice":                {[]string{"fastpath", "--host", "--all"}, 2, []string{"by one of"}},
		"no label":                   {[]string{"fastpath", "--node-selector", "pool"}, 2, []string{"--node-selector: must be KEY=VALUE"}},
		"no value of a label":        {[]string{"fastpath", "--node-selector", "pool=a b"}, 2, []string{"--node-selector", "is no label"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := slipstream(t, append([]string{"policy", dir}, c.args...)...)
			if code != c.code || stdout != "" {
				t.Errorf("exit %d, want %d; standard output %q", code, c.code, stdout)
			}
			has(t, "the error", stderr, c.want...)
		})
	}
}

func TestPolicyOfAnUnfinishedRunSaysSo(t *testing.T) {
	stdout, stderr := succeed(t, "policy", result(t, resultYAML, 5, 1), "fastpath", "--host")
	has(t, "the note", stderr, "note: the run is unfinished: 50 of 60 trials are done")
	has(t, "the policy", stdout, "slipstream.dev/unfinished: \"50 of 60 trials are done")
}

// TestPolicyOfNothing: if every trial has failed, not even --anyway writes a policy.
func TestPolicyOfNothing(t *testing.T) {
	dir := result(t, resultYAML, 1, 1)
	trials := filepath.Join(dir, "trials.jsonl")
	text, err := os.ReadFile(trials)
	if err == nil {
		err = os.WriteFile(trials, bytes.ReplaceAll(text, []byte(`"status":"ok"`), []byte(`"status":"failed"`)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := slipstream(t, "policy", dir, "fastpath", "--host", "--anyway")
	if code != exitInconclusive || stdout != "" {
		t.Errorf("exit %d, standard output %q", code, stdout)
	}
	has(t, "the error", stderr, "has no finished trial of fastpath", "slipstream run --resume ")
}

func TestPolicyAnywaySaysWhy(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	for variant, want := range map[string]string{"rps+": "despite: \"rps+ is slower than vxlan", "rfs": "despite: \"not proven"} {
		code, stdout, stderr := slipstream(t, "policy", dir, variant, "--host", "--anyway")
		if code != 0 {
			t.Errorf("%s: exit %d\n%s", variant, code, stderr)
		}
		has(t, variant, stdout, want)
		if strings.Contains(stdout, "--anyway") {
			t.Errorf("the policy of %s gives advice to who wrote it:\n%s", variant, stdout)
		}
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// TestLastLines: a result ends with its conclusions and the command to run next.
func TestLastLines(t *testing.T) {
	withoutGain := strings.Replace(resultYAML, "  - {name: fastpath, accelerate: [{fastpath: {}}]}\n", "", 1)
	cluster := strings.NewReplacer("{lab: {nodes: 2}}", "{kubernetes: {}}", "path: {vxlan: {shape: flannel}}", "path: {pod: {}}").Replace(resultYAML)
	hosts := strings.NewReplacer(
		"{lab: {nodes: 2}}", "{hosts: [{name: a}, {name: b}]}", "{vxlan: {shape: flannel}}", "{native: {}}",
		"{fastpath: {}}", "{rps: {devices: [nic], cpus: all}}", "[nic, pod]", "[nic]",
	).Replace(resultYAML)
	for name, c := range map[string]struct {
		yaml   string
		blocks int
		want   []string
	}{
		"a gain":       {resultYAML, 6, []string{"Worse with rps+: pingpong median latency +4", "Report: DIR/report.html", "Next:   slipstream doctor ", "        slipstream run kubernetes --dry-run "}},
		"hosts":        {hosts, 6, []string{"Next:   slipstream policy DIR fastpath --host -o policy.yaml"}},
		"cluster":      {cluster, 6, []string{"Next:   slipstream policy DIR fastpath --node-selector KEY=VALUE | kubectl apply -f -"}},
		"no gain":      {withoutGain, 6, []string{"Compared with vxlan, rps+ gains the most: stream throughput +", "at the cost of pingpong median latency +4", "Next: slipstream run made.yaml --runs 20"}},
		"inconclusive": {resultYAML, 1, []string{"Inconclusive", "Next:   slipstream run --resume DIR"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := result(t, c.yaml, c.blocks, 1)
			stdout, _ := succeed(t, "report", dir)
			text := strings.Join(strings.Fields(lastLines(stdout, 10)), " ") // lines are wrapped
			for _, want := range c.want {
				if want = strings.Join(strings.Fields(strings.ReplaceAll(want, "DIR", dir)), " "); !strings.Contains(text, want) {
					t.Errorf("the last lines do not say %q:\n%s", want, lastLines(stdout, 10))
				}
			}
			if unfinished := strings.HasPrefix(stdout, "! This run is unfinished: "); unfinished != (c.blocks < 6) {
				t.Errorf("it begins:\n%s", strings.SplitAfterN(stdout, "\n", 3)[:2])
			}
		})
	}
}

// TestExpectations: the outcome of the expectations decides the exit code of a run, and
// every format shows it.
func TestExpectations(t *testing.T) {
	for expect, code := range map[string]int{
		"[{variant: fastpath, faster: vxlan}]":                                                    exitGood,
		"[{variant: rps+, faster: vxlan, metric: throughput}]":                                    exitGood,
		"[{variant: rps+, faster: vxlan}]":                                                        exitSlower,
		"[{variant: fastpath, faster: vxlan}, {variant: rfs, notSlower: fastpath}]":               exitSlower,
		"[{variant: fastpath, faster: vxlan}, {variant: rfs, faster: vxlan, metric: cpu_per_gb}]": exitInconclusive,
	} {
		dir := result(t, resultYAML+"  expect: "+expect+"\n", 6, 1)
		opened, err := record.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		m, err := loadReport(opened)
		if err != nil {
			t.Fatal(err)
		}
		got := exitGood
		if exit := new(exitError); errors.As(checkExpectations(m), exit) {
			got = exit.code
		}
		if got != code {
			t.Errorf("%s: exit code %d, want %d", expect, got, code)
		}
		for _, format := range []string{"text", "md", "html", "json", "junit"} {
			_, stdout, _ := slipstream(t, "report", dir, "--format", format)
			has(t, format, html.UnescapeString(strings.Join(strings.Fields(stdout), " ")), m.Expected[0].Claim)
			failed := strings.Contains(stdout, "failed; ") || strings.Contains(stdout, "<failure") || strings.Contains(stdout, "| failed |") ||
				strings.Contains(stdout, "<td>failed</td>") || strings.Contains(stdout, `"outcome": "failed"`)
			if failed != (code == exitSlower) && format != "junit" {
				t.Errorf("%s of %s says failed: %t", format, expect, failed)
			}
		}
	}
}
