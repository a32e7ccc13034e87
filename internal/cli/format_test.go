package cli

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/examples"
	"slipstream.dev/internal/experiment"
)

// jsonOf runs a command, and decodes what it prints.
func jsonOf(t *testing.T, wantCode int, to any, args ...string) {
	t.Helper()
	code, out, stderr := slipstream(t, args...)
	if code != wantCode || stderr != "" {
		t.Fatalf("%v: exit %d\n%s", args, code, stderr)
	}
	if err := json.Unmarshal([]byte(out), to); err != nil {
		t.Fatalf("%v: %v in\n%s", args, err, out)
	}
}

// TestJSON: programs get what people see.
func TestJSON(t *testing.T) {
	var version map[string]string
	if jsonOf(t, exitGood, &version, "version", "-o", "json"); version["version"] != "test" {
		t.Errorf("version %v", version)
	}
	var presets []listedPreset
	if jsonOf(t, exitGood, &presets, "run", "--list", "-o", "json"); len(presets) != len(examples.Names()) || presets[0].Description == "" || presets[0].Seconds == 0 {
		t.Errorf("presets %+v", presets)
	}
	var planned struct{ Plan experiment.Outline }
	jsonOf(t, exitGood, &planned, "run", "demo", "--dry-run", "--format", "json")
	if p := planned.Plan; p.Experiment != "demo" || p.Trials != 144 || len(p.Variants) != 6 || p.Variants[0].Versus != "vxlan" || p.Workloads[0].WindowSeconds != 1 {
		t.Errorf("plan %+v", p)
	}
	// A parameter without a value is not something that the target lacks. The exit code is that of the run.
	var lacking struct{ Unset, Missing []string }
	dry, out, _ := slipstream(t, "run", "an-vms", "--on", "lab", "--dry-run", "-o", "json")
	if err := json.Unmarshal([]byte(out), &lacking); err != nil || !slices.Equal(lacking.Unset, []string{"group"}) || lacking.Missing != nil {
		t.Errorf("%+v, %v", lacking, err)
	}
	if code, _, _ := slipstream(t, "run", "an-vms", "--on", "lab"); dry != exitUsage || code != exitUsage {
		t.Errorf("the dry run exits with %d, the run with %d", dry, code)
	}
}

// TestValidateJSON: each problem has its place.
func TestValidateJSON(t *testing.T) {
	file := t.TempDir() + "/a.yaml"
	if err := os.WriteFile(file, []byte(strings.Replace(resultYAML, "runs: 6", "runs: 0", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	var checked []validated
	jsonOf(t, exitFailed, &checked, "validate", "-o", "json", file, "demo", "nowhere.yaml")
	if len(checked) != 3 || checked[0].Valid || !checked[1].Valid || checked[2].Valid {
		t.Fatalf("checked %+v", checked)
	}
	if p := checked[0].Problems; len(p) != 1 || p[0].Line != 19 || p[0].Field != "spec.runs" || !strings.Contains(p[0].Message, "must be 1 to 100000") {
		t.Errorf("problems %+v", p)
	}
	if p := checked[2].Problems; len(p) != 1 || p[0].Line != 0 || !strings.Contains(p[0].Message, "no such file") {
		t.Errorf("problems %+v", p)
	}
}

// TestPresetIsValid: a preset is printed as run takes it, and validate reads it from standard input.
func TestPresetIsValid(t *testing.T) {
	code, text, stderr := slipstream(t, "preset", "demo")
	if want, _ := examples.Preset("demo"); code != exitGood || stderr != "" || strings.Contains(text, "$schema") || !strings.HasSuffix(string(want), "\n"+text) {
		t.Errorf("exit %d, %s, printed\n%s", code, stderr, text)
	}
	for _, c := range []struct {
		text, want string
		code       int
	}{
		{text, "-: valid", exitGood},
		{strings.Replace(text, "runs: 6", "runs: 0", 1), "standard input:", exitFailed},
	} {
		in := t.TempDir() + "/in"
		if err := os.WriteFile(in, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(in)
		if err != nil {
			t.Fatal(err)
		}
		was := os.Stdin
		os.Stdin = f
		code, out, stderr := slipstream(t, "validate", "-")
		os.Stdin = was
		f.Close()
		if code != c.code || !strings.Contains(out+stderr, c.want) {
			t.Errorf("exit %d, want %d and %q\n%s%s", code, c.code, c.want, out, stderr)
		}
	}
}
