package command

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

func TestRun(t *testing.T) {
	for _, c := range []struct {
		argv []string
		want string // of the error; empty for none
		code int
	}{
		{[]string{"true"}, "", 0},
		{[]string{"false"}, "false: exit status 1", 1},
		{[]string{"sh", "-c", "echo out; echo err >&2; exit 3"}, "sh -c echo out; echo err >&2; exit 3: exit status 3: out\nerr", 3},
		{[]string{"sh", "-c", "exit $1", "", "$(exit 0) 4"}, "exit status 2", 2}, // no shell reads the arguments
		{[]string{"sh", "-c", "read line"}, "exit status 1", 1},                  // there is no input
		{[]string{"sh", "-c", "sleep 3 &"}, "", 0},                               // what it leaves running is not waited for
	} {
		err := Run(t.Context(), c.argv)
		var exit *exec.ExitError
		switch {
		case c.want == "" && err == nil:
		case c.want == "", err == nil, !strings.Contains(err.Error(), c.want):
			t.Errorf("%q: got %v, want %s", c.argv, err, c.want)
		case !errors.As(err, &exit) || exit.ExitCode() != c.code:
			t.Errorf("%q: %v is no exit with %d", c.argv, err, c.code)
		}
	}
	if err := Run(t.Context(), []string{"slipstream-no-such-program"}); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("no such program: %v", err)
	}
	long := Run(t.Context(), []string{"sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x; echo the end; exit 1"})
	if text := long.Error(); len(text) > 4000 || !strings.HasSuffix(text, "xthe end") {
		t.Errorf("%d bytes of an error, which ends with %q", len(text), text[len(text)-10:])
	}
}

// TestRunEnds: when the context ends, everything that a command started is killed.
func TestRunEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := filepath.Join(t.TempDir(), "started")
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = os.ReadFile(started) // ends once the command has written
		cancel()
	}()
	began := time.Now()
	err := Run(ctx, []string{"sh", "-c", `sleep 61 & echo $!; echo >"$1"; wait`, "sh", started})
	if err == nil || !strings.Contains(err.Error(), "signal: killed: ") {
		t.Fatalf("got %v", err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %s", took)
	}
	_, pid, _ := strings.Cut(err.Error(), "signal: killed: ")
	// It is empty for a zombie.
	testenv.Await(t, 10*time.Second, "process "+pid+" is dead", func() bool {
		argv, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		return len(argv) == 0
	})
}

// TestInterrupt checks that a program may end by itself when the context ends, and that one which does not is killed with
// what it started.
func TestInterrupt(t *testing.T) {
	interrupt := func(grace time.Duration, script string) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		started := filepath.Join(t.TempDir(), "started")
		go func() {
			defer cancel()
			for t.Context().Err() == nil {
				if _, err := os.Stat(started); err == nil {
					return
				}
				time.Sleep(time.Millisecond) // a poll of a file
			}
		}()
		return Interrupt(ctx, grace, []string{"bash", "-c", script, "bash", started})
	}
	if err := interrupt(time.Minute, `trap 'echo tidied; exit 7' INT; touch "$1"; while :; do sleep 0.01; done`); err == nil || !strings.Contains(err.Error(), "exit status 7: tidied") {
		t.Errorf("a program that tidies up: %v", err)
	}
	err := interrupt(50*time.Millisecond, `trap '' INT; sleep 61 & echo $!; touch "$1"; wait; wait`)
	if err == nil {
		t.Fatal("a program that ignores the interrupt ended by itself")
	}
	pid := err.Error()[strings.LastIndexAny(err.Error(), ": ")+1:]
	testenv.Await(t, 10*time.Second, "process "+pid+" is dead", func() bool {
		argv, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		return len(argv) == 0
	})
}
