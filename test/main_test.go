// Package test contains tests that need root, several namespaces and the built
// program: whole runs, started as a user does, and their behaviour when
// something dies. Everything else is tested in its own package.
package test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/record"
)

// program is the binary under test, built as make build does.
var program string

func TestMain(m *testing.M) {
	if socket := os.Getenv(azureSocket); socket != "" {
		os.Exit(standInForAzure(socket))
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "slipstream-test")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		program = filepath.Join(dir, "slipstream")
		build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "slipstream.dev/cmd/slipstream")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the program: %v\n%s", err, out)
			return 1
		}
		// A run would remove what a killed run has left, and its test would blame the
		// run for that change.
		if os.Geteuid() == 0 {
			ctx := context.Background()
			_, err := lab.Sweep(ctx, lab.DefaultDir)
			_, recoverErr := accel.Recover(ctx, accel.Options{JournalDir: "/run/slipstream/journal"})
			if err := errors.Join(err, recoverErr); err != nil {
				fmt.Fprintf(os.Stderr, "clean up after killed runs: %v\n", err)
				return 1
			}
		}
		return m.Run()
	}())
}

// process is a run of the program.
type process struct {
	*exec.Cmd
	stdout bytes.Buffer

	mu    sync.Mutex
	lines []string // of stderr
	more  chan struct{}
	ended chan struct{}
	err   error
}

// start runs the program. It adds extra to this process's environment.
func start(t testing.TB, extra []string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(program, args...), more: make(chan struct{}, 1), ended: make(chan struct{})}
	p.Env = append(os.Environ(), extra...)
	p.Stdout, p.Stderr = &p.stdout, lineWriter{p}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.err = p.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		select {
		case <-p.ended:
			return
		default:
		}
		_ = p.Process.Kill()
		<-p.ended
		// The test has failed. What the program has left would make the following
		// tests fail.
		_, err := lab.Sweep(context.Background(), lab.DefaultDir)
		_, recoverErr := accel.Recover(context.Background(), accel.Options{JournalDir: "/run/slipstream/journal"})
		if err := errors.Join(err, recoverErr); err != nil {
			t.Error(err)
		}
	})
	return p
}

// lineWriter keeps the lines of stderr and wakes whoever waits for them.
type lineWriter struct{ p *process }

func (w lineWriter) Write(b []byte) (int, error) {
	w.p.mu.Lock()
	w.p.lines = append(w.p.lines, strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")...)
	w.p.mu.Unlock()
	select {
	case w.p.more <- struct{}{}:
	default:
	}
	return len(b), nil
}

func (p *process) stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// await waits until n lines of stderr contain text, or the program ends. It
// reports whether the lines came.
func (p *process) await(t testing.TB, text string, n int) bool {
	t.Helper()
	limit := time.After(2 * time.Minute)
	for strings.Count(p.stderr(), text) < n {
		select {
		case <-p.more:
		case <-p.ended:
			return strings.Count(p.stderr(), text) >= n
		case <-limit:
			t.Fatalf("no %q within two minutes:\n%s", text, p.stderr())
		}
	}
	return true
}

// exit waits for the end and returns the exit code.
func (p *process) exit(t testing.TB) int {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(5 * time.Minute):
		t.Fatalf("still runs after five minutes:\n%s", p.stderr())
	}
	var exit *exec.ExitError
	if p.err != nil && !errors.As(p.err, &exit) {
		t.Fatal(p.err)
	}
	return p.ProcessState.ExitCode()
}

// finish runs the program until it ends.
func finish(t testing.TB, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	p := start(t, nil, args...)
	code = p.exit(t)
	return code, p.stdout.String(), p.stderr()
}

// ran runs an experiment that must succeed, and returns its results folder and its output.
func ran(t testing.TB, file string) (d *record.Dir, stdout, stderr string) {
	t.Helper()
	out := t.TempDir()
	code, stdout, stderr := finish(t, "run", file, "--out", out)
	if code != 0 {
		t.Fatalf("exit %d\n%s", code, stderr)
	}
	return results(t, out), stdout, stderr
}

// machine returns what a run must leave as it found it.
func machine(t testing.TB) []string {
	t.Helper()
	var b strings.Builder
	for _, pattern := range []string{
		"/proc/sys/net/core/rps_sock_flow_entries", "/proc/sys/net/ipv4/*", "/proc/sys/net/core/*",
		"/sys/class/net/*/queues/rx-*/rps_*",
	} {
		files, _ := filepath.Glob(pattern)
		for _, file := range files {
			if value, err := os.ReadFile(file); err == nil {
				fmt.Fprintf(&b, "%s %s\n", file, bytes.TrimSpace(value))
			}
		}
	}
	for _, dir := range []string{"/run/netns", "/run/slipstream/lab", "/run/slipstream/journal", "/sys/fs/bpf"} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), "lock") {
				fmt.Fprintln(&b, dir, e.Name())
			}
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		fmt.Fprintln(&b, l.Type(), l.Attrs().Name, l.Attrs().MTU)
	}
	return strings.Split(b.String(), "\n")
}

// unchanged checks at the end of a test that the machine is as it was, and that
// no process of the program is left.
func unchanged(t testing.TB) {
	t.Helper()
	before := machine(t)
	t.Cleanup(func() {
		if diff := cmp.Diff(before, machine(t)); diff != "" {
			t.Errorf("the machine is not as it was:\n%s", diff)
		}
		if left := workers(); len(left) > 0 {
			t.Errorf("processes are left: %v", left)
		}
	})
}

// workers returns the processes of this program that act in places.
func workers() (pids []int) {
	procs, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range procs {
		target, err := os.Readlink(exe)
		if err != nil || strings.TrimSuffix(target, " (deleted)") != program {
			continue
		}
		args, err := os.ReadFile(filepath.Join(filepath.Dir(exe), "cmdline"))
		var pid int
		if _, scan := fmt.Sscanf(exe, "/proc/%d/exe", &pid); err == nil && scan == nil && bytes.Contains(args, []byte("\x00worker")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// experiment writes an experiment file: a few quick trials, unless changed.
func experiment(t testing.TB, change ...string) string {
	t.Helper()
	text := `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: quick}
spec:
  target: {lab: {nodes: 2}}
  path: {vxlan: {shape: flannel}}
  baseline: vxlan
  variants:
  - {name: vxlan}
  - {name: native, path: {native: {}}}
  - {name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}
  workloads:
  - {name: stream, stream: {warmup: 50ms, duration: 200ms}}
  - {name: pingpong, pingpong: {warmup: 50ms, duration: 200ms}, pairs: [1]}
  pairs: [1, 2]
  runs: 2
`
	for i := 0; i < len(change); i += 2 {
		if !strings.Contains(text, change[i]) {
			t.Fatalf("the experiment has no %q", change[i])
		}
		text = strings.Replace(text, change[i], change[i+1], 1)
	}
	path := filepath.Join(t.TempDir(), "quick.yaml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// results opens the only results folder below dir.
func results(t testing.TB, dir string) *record.Dir {
	t.Helper()
	found, _ := filepath.Glob(filepath.Join(dir, "quick-*"))
	if len(found) != 1 {
		t.Fatalf("%d results folders in %s", len(found), dir)
	}
	d, err := record.Open(found[0])
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func trials(t testing.TB, d *record.Dir) []record.Trial {
	t.Helper()
	all, err := d.Trials()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// measured returns the trials without those that the run repeated because a connection stalled.
func measured(t testing.TB, d *record.Dir) []record.Trial {
	t.Helper()
	return slices.DeleteFunc(trials(t, d), func(tr record.Trial) bool { return tr.Stalled })
}

// cells counts the successful trials of each cell and block.
func cells(all []record.Trial) map[string]int {
	count := make(map[string]int)
	for _, t := range all {
		if t.Status == record.StatusOK {
			count[fmt.Sprint(t.Block, t.Variant, t.Workload, t.Pairs)]++
		}
	}
	return count
}

func decode(t testing.TB, file string, into any) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}
