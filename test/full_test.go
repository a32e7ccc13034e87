package test

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// TestRunDiskFull fills the disk of the results during a run. The run ends and restores the machine, and its
// recorded data is intact. Once there is space again, the run can be resumed.
func TestRunDiskFull(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	if err := unix.Mount("tmpfs", out, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(out, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	free := testenv.Fill(t, out, 48<<10)
	code, _, stderr := finish(t, "run", experiment(t), "--out", out)
	d := results(t, out)
	if code != 1 || !strings.Contains(stderr, d.Path+"/trials.jsonl: no space left on device") || !strings.Contains(stderr, "once there is space: slipstream run --resume "+d.Path) {
		t.Errorf("on a full disk: exit code %d\n%s", code, stderr)
	}
	before := trials(t, d)
	if len(before) == 0 {
		t.Errorf("no trial was recorded\n%s", stderr)
	}
	free()
	if code, _, stderr := finish(t, "run", "--resume", d.Path); code != 0 {
		t.Fatalf("with space again: exit code %d\n%s", code, stderr)
	}
	if after := cells(trials(t, d)); len(after) != 18 {
		t.Errorf("%d cells have a good trial, want 18: %v", len(after), after)
	}
}
