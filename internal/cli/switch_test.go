package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
)

// leftSwitched makes the results folder of a run that was killed while a switch was in force. Its command back
// writes to a file.
func leftSwitched(t *testing.T, back string) (folder, state string) {
	t.Helper()
	state = filepath.Join(t.TempDir(), "state")
	yaml := strings.Replace(resultYAML, "- {name: native, path: {native: {}}}",
		"- {name: native, path: {native: {}}, switch: {to: [\"true\"], back: [sh, -c, '"+back+"', back, "+state+"]}}", 1)
	folder = result(t, yaml, 0, 1)
	dir, err := record.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := dir.Switched("native"); err != nil {
		t.Fatal(err)
	}
	return folder, state
}

// TestCleanupSwitched: cleanup shows the command that undoes the switch of a folder's run, and runs it once.
func TestCleanupSwitched(t *testing.T) {
	folder, state := leftSwitched(t, "echo found >> $1")
	shown := folder + ": the commands that undo the switch of native:\n  back: sh -c 'echo found >> $1' back " + state + "\n"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cleanup", "--dry-run", folder}, shown + "would undo: " + folder + ": the switch of native\n"},
		{[]string{"cleanup", folder}, shown + "undone: " + folder + ": the switch of native\n"},
		{[]string{"cleanup", folder}, folder + ": nothing is switched\n"},
	} {
		if code, out, errs := slipstream(t, c.args...); code != exitGood || out != c.want {
			t.Errorf("%v: exit code %d, %q, %q; want %q", c.args, code, out, errs, c.want)
		}
	}
	if data, err := os.ReadFile(state); string(data) != "found\n" {
		t.Errorf("the command left %q, %v", data, err)
	}
}

// TestDryRunWritesNothing: a dry run does not change a folder, even one with a torn trial, and works without the
// right to write.
func TestDryRunWritesNothing(t *testing.T) {
	folder, _ := leftSwitched(t, "echo found >> $1")
	trials := filepath.Join(folder, "trials.jsonl")
	const torn = `{"block":1,"order":1`
	if err := os.WriteFile(trials, []byte(torn), 0o400); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"cleanup", "--dry-run", folder}, {"run", "--resume", folder, "--dry-run"}} {
		if code, out, errs := slipstream(t, args...); code != exitGood || !strings.Contains(out, "back: sh -c 'echo found >> $1' back") {
			t.Errorf("%v: exit code %d, %q, %q", args, code, out, errs)
		}
		if text, err := os.ReadFile(trials); string(text) != torn {
			t.Errorf("%v: trials.jsonl has %q, %v", args, text, err)
		}
	}
	other := filepath.Join(t.TempDir(), "another's")
	if err := errors.Join(os.Rename(trials, other), os.Symlink(other, trials)); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"cleanup", folder}, {"run", "--resume", folder}, {"cleanup", "--dry-run", folder}, {"run", "--resume", folder, "--dry-run"}, {"report", folder}} {
		if code, _, errs := slipstream(t, args...); code == exitGood || !strings.Contains(errs, trials+" is a symbolic link to "+other) {
			t.Errorf("%v: exit code %d, %q", args, code, errs)
		}
		if text, err := os.ReadFile(other); string(text) != torn {
			t.Errorf("%v: the file that the link leads to has %q, %v", args, text, err)
		}
	}
}

// TestForeignCommands: the commands in somebody else's folder run only with --yes, and are shown before.
func TestForeignCommands(t *testing.T) {
	folder, state := leftSwitched(t, "echo found >> $1; exit 1")
	if err := os.Chmod(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	const command = "back: sh -c 'echo found >> $1; exit 1' back "
	for _, args := range [][]string{{"cleanup", "--dry-run", folder}, {"cleanup", folder}, {"run", "--resume", folder}} {
		code, out, errs := slipstream(t, args...)
		if code == exitGood || !strings.Contains(out+errs, command+state) || !strings.Contains(errs, "can write to "+folder) || !strings.Contains(errs, "add --yes") {
			t.Errorf("%v: exit code %d, %q, %q", args, code, out, errs)
		}
		if _, err := os.Stat(state); err == nil {
			t.Fatalf("%v ran the command", args)
		}
	}
	if code, _, errs := slipstream(t, "run", "demo", "--out", filepath.Dir(folder)); code == exitGood || !strings.Contains(errs, "can write to "+folder) {
		t.Errorf("run beside it: exit code %d, %q", code, errs)
	}
	for i, args := range [][]string{{"cleanup", "--yes", folder}, {"run", "--yes", "--resume", folder}} {
		slipstream(t, args...) // the command fails, so nothing else is run
		if text, err := os.ReadFile(state); string(text) != strings.Repeat("found\n", i+1) {
			t.Errorf("%v: the commands left %q, %v", args, text, err)
		}
	}
	for _, args := range [][]string{{"cleanup", "--yes"}, {"run", "demo", "--yes"}} {
		if code, _, errs := slipstream(t, args...); code != exitUsage || !strings.Contains(errs, "--yes is for") {
			t.Errorf("%v: exit code %d, %q", args, code, errs)
		}
	}
}

// TestCleanupFolderInCluster: with a folder, cleanup refuses the flags for a cluster, and undoes no switch.
func TestCleanupFolderInCluster(t *testing.T) {
	folder, state := leftSwitched(t, "echo found >> $1")
	for flag, name := range map[string]string{
		"--all": "--all", "-n=default": "--namespace", "--context=test": "--context", "--kubeconfig=/dev/null": "--kubeconfig",
	} {
		code, _, errs := slipstream(t, "cleanup", flag, folder)
		if want := name + " is for cleaning up a cluster"; code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%s: exit code %d, %q, want %q", flag, code, errs, want)
		}
	}
	if data, err := os.ReadFile(state); err == nil {
		t.Errorf("the command left %q", data)
	}
}

// TestCleanupSwitchedFails: if a switch cannot be undone, the folder still records it.
func TestCleanupSwitchedFails(t *testing.T) {
	folder, _ := leftSwitched(t, "echo no quota >&2; exit 7")
	for range 2 {
		code, _, errs := slipstream(t, "cleanup", folder)
		if code != exitFailed || !strings.Contains(errs, "undo the switch of native: variant native: switch.back: ") || !strings.Contains(errs, "exit status 7: no quota") {
			t.Errorf("exit code %d, %q", code, errs)
		}
	}
}

// TestRunBesideSwitched: no run begins on a machine whose switch another run has not undone.
func TestRunBesideSwitched(t *testing.T) {
	folder, state := leftSwitched(t, "echo found >> $1")
	code, _, errs := slipstream(t, "run", "demo", "--out", filepath.Dir(folder))
	if want := "undo the switch with slipstream cleanup " + folder; code != exitFailed || !strings.Contains(errs, want) {
		t.Errorf("exit code %d, %q, want %q", code, errs, want)
	}
	if _, err := os.Stat(state); err == nil {
		t.Error("it ran a command of another folder's experiment")
	}
}
