package experiment

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place/command"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// killed is the environment variable that makes TestSwitchKilled a controller, which stops
// at a step for its parent to kill it.
const killed = "SLIPSTREAM_TEST_KILLED_AT"

// script emulates a machine by a file. To stop at a step, it starts another process, as a shell does for the program
// of a command. That process opens a pipe to which nobody writes.
const script = `
stop() { if [ "$1" = "$` + killed + `" ]; then echo > stopped; sh -c 'read forever < pipe'; fi; }
case $1 in
is) grep -qx "$2" size ;;
*)
	stop "$1 begins"
	echo "$2" > size
	stop "$1 ends"
	;;
esac
`

// TestSwitchKilled kills the controller, by a signal that it cannot handle, at every step of a
// switch. The running command dies with it, and the next start restores the original state
// and continues.
func TestSwitchKilled(t *testing.T) {
	overrides := []string{
		"spec.variants=[{name: small}, {name: large, switch: {to: [sh, script, to, large], back: [sh, script, back, small], verify: [sh, script, is, large], settle: 1ms}}]",
		"spec.workloads=[{name: stream, stream: {warmup: 1ms, duration: 1ms}}]", "spec.pairs=[1]", "spec.runs=2", "spec.trialsPerPeriod=1",
	}
	exp := parseSwitching(t, overrides...)
	if step := os.Getenv(killed); step != "" {
		controller(t, exp, step)
		return
	}
	for _, step := range []string{"to is noted", "to begins", "to ends", "to is done", "settling", "trial", "back begins", "back ends", "back is done"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			for name, text := range map[string]string{"script": script, "size": "small\n"} {
				if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := syscall.Mkfifo(filepath.Join(folder, "pipe"), 0o600); err != nil {
				t.Fatal(err)
			}
			child := exec.Command(os.Args[0], "-test.run=^TestSwitchKilled$")
			child.Dir, child.Env = folder, append(os.Environ(), killed+"="+step)
			child.Stderr, child.Stdout = t.Output(), t.Output()
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(time.Minute)
			for {
				if _, err := os.Stat(filepath.Join(folder, "stopped")); err == nil {
					break
				}
				if time.Now().After(deadline) {
					t.Error("the controller does not come to the step")
					break
				}
				time.Sleep(time.Millisecond)
			}
			_ = child.Process.Kill()
			_ = child.Wait()
			nobodyReads(t, filepath.Join(folder, "pipe"))
			finish(t, exp, folder)
		})
	}
}

// controller runs the experiment in the current folder, and stops at a step.
func controller(t *testing.T, exp *spec.Experiment, step string) {
	dir, err := record.Create(".", "killed", time.Now(), []byte(switching), record.Environment{})
	if err != nil {
		t.Fatal(err)
	}
	stop := func(at string) {
		if at == step {
			_ = os.WriteFile("stopped", nil, 0o644)
			select {}
		}
	}
	f := newFake(2)
	f.run = func(ctx context.Context, argv []string) error {
		stop(argv[2] + " is noted")
		defer stop(argv[2] + " is done")
		return command.Run(ctx, argv)
	}
	r, err := Start(t.Context(), f.plan(exp), f, f.run, "test", nil, func(e Event) {
		switch {
		case e.Kind == Note && strings.HasSuffix(e.Text, "waiting 1ms"):
			stop("settling")
		case e.Kind == Begins && e.Trial.Variant == "large":
			stop("trial")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Measure(t.Context(), dir)
	t.Fatalf("the run came to its end, with %v", err)
}

// nobodyReads waits until no command reads from a pipe any more.
func nobodyReads(t *testing.T, pipe string) {
	t.Helper()
	var first *os.File // stays open: without a writer the reader would go on
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		f, err := os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		switch {
		case errors.Is(err, syscall.ENXIO):
			return
		case err != nil:
			t.Fatal(err)
		case first == nil:
			first = f
			defer first.Close()
		default:
			f.Close()
		}
	}
	t.Fatal("a command of the dead controller goes on")
}

// finish undoes the switch that a folder records, and runs the experiment to its end.
func finish(t *testing.T, exp *spec.Experiment, folder string) {
	left, err := record.LeftSwitched(folder)
	if err != nil || len(left) != 1 {
		t.Fatalf("what is switched is noted in %v, %v", left, err)
	}
	dir, err := record.Resume(left[0])
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	variant, err := dir.SwitchedVariant()
	if variant != "large" || err != nil {
		t.Fatalf("%q is noted, %v", variant, err)
	}
	run := func(ctx context.Context, argv []string) error {
		return command.Run(ctx, append([]string{"env", "-u", killed, "-C", folder}, argv...))
	}
	size := func() string {
		data, _ := os.ReadFile(filepath.Join(folder, "size"))
		return strings.TrimSpace(string(data))
	}
	if err := UndoSwitch(t.Context(), exp, variant, run, dir, func(string) {}); err != nil {
		t.Error(err)
	}
	if variant, err := dir.SwitchedVariant(); variant != "" || err != nil || size() != "small" {
		t.Errorf("%q is noted, %v; the machine is %s", variant, err, size())
	}
	done, err := dir.Trials()
	if err != nil {
		t.Fatal(err)
	}
	f := newFake(2)
	r, err := Start(t.Context(), f.plan(exp), f, run, "test", done, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	trials, err := r.Measure(t.Context(), dir)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Error(err)
	}
	var periods []int
	for _, tr := range trials {
		periods = append(periods, tr.Period)
	}
	if diff := cmp.Diff([]int{1, 2, 3, 4}, slices.Compact(slices.Sorted(slices.Values(periods)))); diff != "" || size() != "small" {
		t.Errorf("periods (-want +got):\n%s, and the machine is %s", diff, size())
	}
}
