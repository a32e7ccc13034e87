package cli

import (
	"regexp"
	"strings"
	"testing"

	"slipstream.dev/examples"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// TestResumable: a run is not resumed by another program, on another kernel, or with another experiment, but how its trials are
// judged may change.
func TestResumable(t *testing.T) {
	parse := func(yaml string) *spec.Experiment {
		exp, err := spec.Parse("made.yaml", []byte(yaml), nil)
		if err != nil {
			t.Fatal(err)
		}
		return exp
	}
	was := record.Environment{Version: "v1", Experiment: measuredBy(parse(resultYAML)), Nodes: []record.Node{{Name: "a", Kernel: "6.12"}, {Name: "b", Kernel: "6.12"}}}
	dir, err := record.Create(t.TempDir(), "made", was.Started, []byte(resultYAML), was)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for name, c := range map[string]struct {
		now  record.Environment
		want string
	}{
		"the same":        {was, ""},
		"more blocks":     {record.Environment{Version: "v1", Experiment: measuredBy(parse(strings.Replace(resultYAML, "runs: 6", "runs: 9\n  margin: 0.1", 1)))}, ""},
		"longer trials":   {record.Environment{Version: "v1", Experiment: measuredBy(parse(strings.Replace(resultYAML, "duration: 1s", "duration: 2s", 1)))}, "experiment.yaml has changed since the run began"},
		"another version": {record.Environment{Version: "v2", Experiment: was.Experiment}, "begun by slipstream v1, and this is v2"},
		"another kernel":  {record.Environment{Version: "v1", Experiment: was.Experiment, Nodes: []record.Node{{Name: "b", Kernel: "6.18"}}}, "b had the kernel 6.12 when the run began, and has 6.18 now"},
	} {
		err := checkResumable(dir, c.now)
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestResultMeasuresTheSame: the experiment that a results folder gets measures what the file does that was run, for every preset.
// Otherwise no run of it could be resumed.
func TestResultMeasuresTheSame(t *testing.T) {
	for _, name := range examples.Names() {
		exp, err := runOptions{}.load([]string{name})
		if err != nil {
			t.Fatal(err)
		}
		exp.Spec.Seed = 7
		text, err := spec.Marshal(exp)
		if err != nil {
			t.Fatal(err)
		}
		again, err := spec.Parse(name, text, nil)
		if err != nil {
			t.Fatal(err)
		}
		if measuredBy(again) != measuredBy(exp) {
			t.Errorf("%s: another hash after it was written and read", name)
		}
	}
}

// TestResumeDryRun: the plan of a resumed run says how many trials it keeps.
func TestResumeDryRun(t *testing.T) {
	dir := result(t, resultYAML, 2, 1)
	_, plan, stderr := slipstream(t, "run", "--resume", dir, "--dry-run")
	if !regexp.MustCompile(`(?m)^done +20 trials$`).MatchString(plan) {
		t.Errorf("the plan does not say what is done:\n%s%s", plan, stderr)
	}
}
