package test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"slipstream.dev/internal/testenv"
)

const action = "../packaging/action"

// compared is the outcome of the action's script: its exit code, what it printed, its summary and its outputs.
type compared struct {
	code             int
	printed, summary string
	outputs          map[string]string
}

// compareCommits runs the action's script in a repository whose first commit has the files of base, and the second those of head.
func compareCommits(t *testing.T, base, head map[string]string, env ...string) compared {
	t.Helper()
	testenv.NeedProgram(t, "git", "apt-get install git")
	repository, out := t.TempDir(), t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		c := exec.Command("git", append([]string{"-c", "user.name=x", "-c", "user.email=x@example.test", "-c", "init.defaultBranch=main"}, args...)...)
		c.Dir = repository
		text, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("git %s: %v: %s", strings.Join(args, " "), err, text)
		}
		return string(text)
	}
	git("init", "--quiet")
	for _, files := range []map[string]string{base, head} {
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(repository, name), []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		git("add", "--all")
		git("commit", "--quiet", "--allow-empty", "--message", "x")
	}
	script, err := filepath.Abs(filepath.Join(action, "compare.sh"))
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string) string { return filepath.Join(out, name) }
	c := exec.Command(script)
	c.Dir = repository
	c.Env = append(os.Environ(), "EXPERIMENT=bench.yaml", "BASE=HEAD~1", "OUT="+file("results"), "GITHUB_OUTPUT="+file("outputs"), "GITHUB_STEP_SUMMARY="+file("summary"))
	c.Env = append(c.Env, env...)
	text, err := c.CombinedOutput()
	got := compared{printed: string(text), outputs: make(map[string]string)}
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		got.code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if summary, err := os.ReadFile(file("summary")); err == nil {
		got.summary = string(summary)
	}
	outputs, _ := os.ReadFile(file("outputs")) // there is none if the script ended before
	for _, line := range strings.Fields(string(outputs)) {
		name, value, _ := strings.Cut(line, "=")
		got.outputs[name] = value
	}
	if trees := git("worktree", "list"); strings.Count(trees, "\n") != 1 {
		t.Errorf("it leaves a worktree behind: %s", trees)
	}
	return got
}

// TestAction compares two commits in a lab: the second has half the rate.
func TestAction(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedProgram(t, "tc", "apt-get install iproute2")
	unchanged(t)
	set := program + ` lab exec run-1 node0 -- tc qdisc replace dev eth0 root handle 1: tbf burst 128k latency 20ms rate `
	experiment := fmt.Sprintf(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: commits}
spec:
  target: {lab: {nic: {rate: 400Mbit}}}
  path: {native: {}}
  baseline: base
  variants:
  - {name: base, switch: {to: [sh, -c, '%[1]s$(cat "$BASE_DIR/built")'], back: [sh, -c, '%[1]s400mbit']}}
  - {name: head, switch: {to: [sh, -c, '%[1]s$(cat "$HEAD_DIR/built")'], back: [sh, -c, '%[1]s400mbit']}}
  workloads:
  - {name: stream, stream: {warmup: 200ms, duration: 300ms}}
  runs: 4
  trialsPerPeriod: 2
`, set)
	got := compareCommits(t, map[string]string{"bench.yaml": experiment, "rate": "400mbit"}, map[string]string{"rate": "200mbit"},
		"PROGRAM="+program, "PREPARE=cp rate built", "GATE=slower", "RUNS=4")
	if got.code != 3 || got.outputs["outcome"] != "slower" || !strings.Contains(got.printed, "::error") {
		t.Fatalf("exit code %d, outputs %v\n%s", got.code, got.outputs, got.printed)
	}
	for _, want := range []string{"head is not slower than base", "failed", "| head |"} {
		if !strings.Contains(got.summary, want) {
			t.Errorf("the summary lacks %q:\n%s", want, got.summary)
		}
	}
	if code, stdout, stderr := finish(t, "verify", got.outputs["bundle"]); code != 0 || !strings.Contains(stdout, "16 trials") {
		t.Errorf("the bundle: exit code %d\n%s%s", code, stdout, stderr)
	}
}

// TestActionExitCodes: a program that only exits stands in for runs.
func TestActionExitCodes(t *testing.T) {
	const standIn = "#!/bin/sh\necho \"$@\" >>\"$CALLS\"\n[ \"$1\" = report ] || exit $CODE\n[ \"$3\" = --bundle ] || echo table of results\n"
	for _, tt := range []struct {
		run     int
		gate    string
		want    int
		outcome string
	}{
		{0, "slower", 0, "met"}, {3, "slower", 3, "slower"}, {4, "slower", 0, "inconclusive"}, {4, "strict", 4, "inconclusive"}, {1, "slower", 1, "error"}, {2, "strict", 2, "error"},
	} {
		calls := filepath.Join(t.TempDir(), "calls")
		program := filepath.Join(t.TempDir(), "slipstream")
		if err := os.WriteFile(program, []byte(standIn), 0o755); err != nil {
			t.Fatal(err)
		}
		got := compareCommits(t, map[string]string{"bench.yaml": ""}, nil, "PROGRAM="+program, "CALLS="+calls, fmt.Sprintf("CODE=%d", tt.run), "GATE="+tt.gate)
		if got.code != tt.want || got.outputs["outcome"] != tt.outcome || got.summary != "table of results\n" {
			t.Errorf("exit code %d of the run, gate %s: exit code %d, %v, want %d, %s\n%s", tt.run, tt.gate, got.code, got.outputs, tt.want, tt.outcome, got.printed)
		}
		text, err := os.ReadFile(calls)
		if err != nil || !strings.Contains(string(text), "--set spec.expect=[{variant: head, notSlower: base}]\n") {
			t.Errorf("called: %s, %v", text, err)
		}
	}
	if got := compareCommits(t, nil, nil, "GATE=loose"); got.code != 2 || !strings.Contains(got.printed, "must be slower or strict") {
		t.Errorf("exit code %d: %s", got.code, got.printed)
	}
}

// TestActionInputs: the action passes each input to its script, under the name that the script reads.
func TestActionInputs(t *testing.T) {
	var a struct {
		Inputs  map[string]struct{ Description string }
		Outputs map[string]struct{ Description, Value string }
		Runs    struct {
			Steps []struct {
				Run string
				Env map[string]string
			}
		}
	}
	readYAML(t, action+"/action.yml", &a)
	script, err := os.ReadFile(action + "/compare.sh")
	if err != nil {
		t.Fatal(err)
	}
	step := a.Runs.Steps[0]
	for name, input := range a.Inputs {
		variable := strings.ToUpper(name)
		if input.Description == "" || step.Env[variable] != "${{ inputs."+name+" }}" || !regexp.MustCompile(`\$\{?`+variable+`\b`).Match(script) {
			t.Errorf("the input %s has no description, or does not reach the script", name)
		}
	}
	for name, output := range a.Outputs {
		if output.Value != "${{ steps.compare.outputs."+name+" }}" || !strings.Contains(string(script), "output "+name+" ") {
			t.Errorf("the script does not set the output %s", name)
		}
	}
	if len(a.Inputs) != len(step.Env) {
		t.Errorf("%d inputs, and %d variables", len(a.Inputs), len(step.Env))
	}
}
