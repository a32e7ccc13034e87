package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
)

// leftSwitched makes the results folder of a run that was killed while something was switched.
// The command back writes to a file.
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
	if err := dir.Switched("native"); err != nil {
		t.Fatal(err)
	}
	return folder, state
}

// TestCleanupSwitched: cleanup undoes the switch of a folder's run, once.
func TestCleanupSwitched(t *testing.T) {
	folder, state := leftSwitched(t, "echo found >> $1")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cleanup", "--dry-run", folder}, "would undo: " + folder + ": the switch of native\n"},
		{[]string{"cleanup", folder}, "undone: " + folder + ": the switch of native\n"},
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

// TestCleanupFolderInCluster: with a folder, cleanup refuses what it would do in a cluster alone, and puts
// nothing back.
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

// TestCleanupSwitchedFails: a switch that cannot be undone stays recorded.
func TestCleanupSwitchedFails(t *testing.T) {
	folder, _ := leftSwitched(t, "echo no quota >&2; exit 7")
	for range 2 {
		code, _, errs := slipstream(t, "cleanup", folder)
		if code != exitFailed || !strings.Contains(errs, "undo the switch of native: variant native: switch.back: ") || !strings.Contains(errs, "exit status 7: no quota") {
			t.Errorf("exit code %d, %q", code, errs)
		}
	}
}

// TestRunBesideSwitched: no run begins on a machine that another one has left switched.
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
