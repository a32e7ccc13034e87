//go:build linux

package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/traffic/tools"
)

func application(tool string) spec.Workload {
	t := &spec.Traffic{
		Protocol: "tcp", IP: 4, Size: 64, Connections: 4, Tool: tool,
		Warmup: spec.Duration(time.Second), Duration: spec.Duration(time.Second),
	}
	if tool == spec.ToolNginx {
		return spec.Workload{Name: tool, HTTP: t}
	}
	t.Operation, t.Pipeline = map[string]string{
		spec.ToolPostgres: spec.OperationTPCB, spec.ToolGRPC: spec.OperationUnary,
	}[tool], 1
	if t.Operation == "" {
		t.Operation = spec.OperationGet
	}
	return spec.Workload{Name: tool, Application: t}
}

// needApplication skips a test if a program is missing, and puts temporary files into a folder of its
// own.
func needApplication(t *testing.T, tool string) (tmp string) {
	t.Helper()
	testenv.NeedMachine(t)
	for _, program := range tools.Programs()[tool] {
		if tools.Find(os.Getenv("PATH"), program) == "" {
			t.Skipf("%s is not installed", program)
		}
	}
	tmp, err := os.MkdirTemp("", "apps") // the user nobody cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(tmp) })
	if err := os.Chmod(tmp, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	return tmp
}

// workingIn returns the processes whose working directory is below dir: an application's server and
// what it forks.
func workingIn(t *testing.T, dir string) (pids []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if cwd, err := os.Readlink(file); err == nil && strings.HasPrefix(cwd, dir) {
			pids = append(pids, file)
		}
	}
	return pids
}

// TestApplications checks that each application yields a rate and latencies, and leaves nothing behind.
func TestApplications(t *testing.T) {
	for _, tool := range []string{spec.ToolRedis, spec.ToolNginx, spec.ToolPostgres, spec.ToolMemcached} {
		t.Run(tool, func(t *testing.T) {
			tmp := needApplication(t, tool)
			server, _ := connect(t)
			driver, _ := connect(t)
			var ends [2]record.Endpoint
			testenv.Retry(t, 5, func() error { // a tool that waits for a CPU all through its warm-up does not know how much to ask for
				var errs [2]error
				ends, errs = run(t, server, driver, application(tool), func() {
					if len(workingIn(t, tmp)) == 0 {
						t.Error("no server runs in a folder of its own")
					}
				})
				if errs[1] != nil || ends[1].Place == "" { // the server failed before there was a client
					return errors.Join(append(errs[:], errors.New("no figures"))...)
				}
				latency, longest := latencies(t, ends[1])
				if e := ends[1]; e.Messages < 100 || e.Seconds < 0.2 || latency <= 0 || longest < latency {
					return fmt.Errorf("%+v", e)
				}
				return nil
			})
			e := ends[1]
			if programs := tools.Programs()[tool]; !strings.HasPrefix(ends[0].Command, programs[0]+" ") || !strings.HasPrefix(e.Command, programs[len(programs)-1]+" ") {
				t.Errorf("commands %q and %q, want those of %q", ends[0].Command, e.Command, programs)
			}
			if e.Errors != nil {
				t.Errorf("errors %v", e.Errors)
			}
			if e.CongestionControl == "" || ends[0].CongestionControl != e.CongestionControl {
				t.Errorf("congestion control of the client %q, of the server %q", e.CongestionControl, ends[0].CongestionControl)
			}
			testenv.Eventually(t, 10*time.Second, "an end without remnants", func() string {
				left, _ := filepath.Glob(filepath.Join(tmp, homePrefix+"*"))
				return strings.Join(append(left, workingIn(t, tmp)...), " ")
			})
		})
	}
}

// latencies returns a typical and a long latency of an end, as its tool reports them.
func latencies(t *testing.T, e record.Endpoint) (usual, long float64) {
	t.Helper()
	if e.Latency == "" {
		p := e.Percentiles
		return cmp.Or(p[metrics.LatencyP50], p[metrics.LatencyMean]), cmp.Or(p[metrics.LatencyP99], p[metrics.LatencyMax])
	}
	h, err := record.DecodeHistogram(e.Latency)
	if err != nil {
		t.Fatal(err)
	}
	return float64(h.ValueAtQuantile(50)), float64(h.ValueAtQuantile(99))
}

// TestGRPC checks that both ends count the calls within the window, and that these have latencies. The number of calls in
// progress is constant, so the latencies add up to that many windows.
func TestGRPC(t *testing.T) {
	server, _ := connect(t)
	driver, _ := connect(t)
	w := application(spec.ToolGRPC)
	const window = 200 * time.Millisecond // and the warm-up, whose calls would count twice over
	w.Application.Warmup, w.Application.Duration, w.Application.Pipeline = spec.Duration(window), spec.Duration(window), 3
	w.Application.Size = 1000
	testenv.Retry(t, 5, func() error {
		ends, errs := run(t, server, driver, w, func() {})
		if err := errors.Join(errs[:]...); err != nil {
			return err
		}
		e := ends[1]
		if usual, long := latencies(t, e); usual <= 0 || long < usual {
			return fmt.Errorf("latencies of %g and %g ns", usual, long)
		}
		if e.Messages < 100 || e.Bytes != 1000*e.Messages || e.Seconds != window.Seconds() {
			return fmt.Errorf("%+v", e)
		}
		h, err := record.DecodeHistogram(e.Latency)
		if err != nil {
			return err
		}
		want := float64(w.Application.Connections * w.Application.Pipeline)
		if calls := float64(e.Messages) * h.Mean() / float64(window); calls < want/2 || calls > want*1.5 {
			return fmt.Errorf("%g calls under way, want %g", calls, want)
		}
		served := ends[0] // in a window that a busy machine ends late
		share := float64(served.Messages) / served.Seconds * e.Seconds / float64(e.Messages)
		if share < 0.7 || share > 1.5 || served.Seconds > 1.5*e.Seconds || served.Bytes != 1000*served.Messages {
			return fmt.Errorf("the server counted %+v, the client %d calls", served, e.Messages)
		}
		return nil
	})
}

// TestApplicationKilled checks that the processes of an application's server, and those that it forked, end with a killed
// worker, and that the next server removes the folder.
func TestApplicationKilled(t *testing.T) {
	testenv.NeedRoot(t) // for a PID namespace
	tmp := needApplication(t, spec.ToolNginx)
	w := application(spec.ToolNginx)
	var process *os.Process
	c, err := Spawn(t.Context(), func(cmd *exec.Cmd) error {
		err := cmd.Start()
		process = cmd.Process
		return err
	}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Serve(t.Context(), place.Traffic{Workload: w, Address: netip.AddrPortFrom(loopback, 0)}, func(uint16) (time.Time, error) {
		if n := len(workingIn(t, tmp)); n < 2 {
			t.Errorf("%d processes serve, want a master and workers", n)
		}
		return time.Time{}, errors.Join(process.Signal(syscall.SIGKILL), context.Canceled)
	})
	if err == nil {
		t.Error("a killed worker serves")
	}
	testenv.Eventually(t, 10*time.Second, "an end of the server", func() string { return strings.Join(workingIn(t, tmp), " ") })
	left, _ := filepath.Glob(filepath.Join(tmp, homePrefix+"*"))
	if len(left) != 1 {
		t.Fatalf("folders %q, want one that is left", left)
	}
	if h, err := newHome(tmp, nil); err != nil {
		t.Error(err)
	} else if h.remove(); !exists(left[0]) {
		t.Error("a young folder is removed, whose owner may not have its lock yet")
	}
	old := time.Now().Add(-2 * homeYoung)
	if err := os.Chtimes(left[0], old, old); err != nil {
		t.Fatal(err)
	}
	h, err := newHome(tmp, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.remove()
	if exists(left[0]) {
		t.Error("the folder of a killed worker is left")
	}
	if err := os.Chtimes(h.root, old, old); err != nil {
		t.Fatal(err)
	}
	if sweepHomes(tmp); !exists(h.path()) {
		t.Error("the folder of a worker that lives is removed")
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestApplicationMissing checks that the error names a missing program and its Debian package.
func TestApplicationMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	server, _ := connect(t)
	driver, _ := connect(t)
	_, errs := run(t, server, driver, application(spec.ToolRedis), func() {})
	if err := errors.Join(errs[:]...); err == nil || !strings.Contains(err.Error(), "redis-server is not installed: install it (Debian's package redis-server)") {
		t.Errorf("got %v", err)
	}
}

// TestHomeNotWritable checks that newHome returns the error of a file that it cannot write, and leaves no folder behind.
func TestHomeNotWritable(t *testing.T) {
	dir := t.TempDir()
	if _, err := newHome(dir, map[string][]byte{"missing/file": nil}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want that the folder of the file does not exist", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}
