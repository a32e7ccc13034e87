package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
)

const policyText = `apiVersion: slipstream.dev/v1alpha1
kind: AccelerationPolicy
metadata: {name: host}
spec: {accelerate: [{rps: {devices: [nic, host-veth, pod], cpus: "0"}}]}
`

// follow makes an agent follow a file until the test ends.
func (r *running) follow(file string) chan os.Signal {
	r.t.Helper()
	p, err := r.OpenPolicy(file)
	must(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	reload, ended := make(chan os.Signal), make(chan struct{})
	go func() {
		p.Follow(ctx, reload)
		close(ended)
	}()
	r.t.Cleanup(func() {
		cancel()
		<-ended
	})
	return reload
}

func TestPolicyFile(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	file := filepath.Join(t.TempDir(), "policy.yaml")
	save := func(text string) { must(t, os.WriteFile(file, []byte(text), 0o644)) }
	a := p.start(p.options())

	if _, err := a.OpenPolicy(file); err == nil || !strings.Contains(err.Error(), "no such file") || !strings.Contains(err.Error(), "--revert") {
		t.Errorf("no file: %v, want what to do", err)
	}
	save(strings.Replace(policyText, "rps", "rsp", 1))
	if _, err := a.OpenPolicy(file); err == nil || !strings.Contains(err.Error(), "policy.yaml:4:22: spec.accelerate[0].rsp: unknown field; did you mean rps?") {
		t.Errorf("a wrong file: %v, want where and what", err)
	}
	save(policyText)
	reload := a.follow(file)
	want := map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"}
	p.wantMasks("read", want)

	// Overwrite the file, as an editor does; replace it, as a deployment does.
	save(strings.Replace(policyText, ", pod", "", 1))
	delete(want, "a/eth0")
	p.wantMasks("written over", want)
	must(t, os.WriteFile(file+".new", []byte(policyText), 0o644))
	must(t, os.Rename(file+".new", file))
	want["a/eth0"] = "1"
	p.wantMasks("replaced", want)

	// An invalid file changes nothing, and is reported.
	save("kind: [")
	select {
	case e := <-a.events:
		if e.Reason != v1alpha1.ReasonInvalid || !strings.Contains(e.Message, "policy.yaml:1:") {
			t.Errorf("%+v", e)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no event of a wrong file")
	}
	p.wantMasks("wrong", want)
	// Reload by hand.
	reload <- syscall.SIGHUP
	p.wantMasks("reloaded", want)

	must(t, os.Remove(file))
	p.wantMasks("removed", map[string]string{})
	save(policyText)
	p.wantMasks("there again", want)
}

// TestPolicyFolder checks that the agent reads the file at its path after another folder has taken the place of the one that it
// watches: at once if the folder was moved, otherwise when it verifies settings.
func TestPolicyFolder(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	p.pod("a")
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	save := func(folder, text string) {
		t.Helper()
		must(t, errors.Join(os.MkdirAll(path(folder), 0o755), os.WriteFile(filepath.Join(path(folder), "policy.yaml"), []byte(text), 0o644)))
	}
	all := map[string]string{"/eth0": "1", "/veth-a": "1", "a/eth0": "1"}
	fewer, less := map[string]string{"/eth0": "1", "/veth-a": "1"}, strings.Replace(policyText, ", pod", "", 1)
	save("one", policyText)
	must(t, os.Symlink("one", path("link")))
	follow := func(verify time.Duration) *running {
		o := p.options()
		o.Verify = verify
		a := p.start(o)
		a.follow(path("link/policy.yaml"))
		p.wantMasks("read", all)
		return a
	}

	a := follow(time.Hour)
	save("new", less)
	must(t, errors.Join(os.Rename(path("one"), path("old")), os.Rename(path("new"), path("one"))))
	p.wantMasks("the folder was replaced", fewer)
	save("one", policyText)
	p.wantMasks("the file in the new folder changed", all)
	a.stop()

	follow(50 * time.Millisecond)
	save("two", less)
	must(t, errors.Join(os.Symlink("two", path("new")), os.Rename(path("new"), path("link"))))
	p.wantMasks("the link has another target", fewer)
	must(t, os.RemoveAll(path("two")))
	p.wantMasks("the folder was removed", map[string]string{})
	save("two", policyText)
	p.wantMasks("there is a folder again", all)
}

// TestPolicyMetrics: an agent tells whether the proof of a policy was measured on its kernel, and whether a rollout halted.
func TestPolicyMetrics(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	must(t, err)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	proven := func(kernels string) {
		annotations := ""
		if kernels != "" {
			annotations = fmt.Sprintf(", annotations: {%s: %q}", v1alpha1.AnnotationKernel, kernels)
		}
		text := regexp.MustCompile(`metadata: \{name: \w+`).ReplaceAllString(policyText, "metadata: {name: proven"+annotations)
		must(t, os.WriteFile(file, []byte(text), 0o644))
	}
	proven("0.1.2, " + strings.TrimSpace(string(kernel)))
	a := p.start(p.options())
	a.follow(file)
	is := func(metric string, want float64) {
		t.Helper()
		eventually(t, metric, func() string {
			if got := a.metric(metric); got != want {
				return fmt.Sprintf("%g, want %g", got, want)
			}
			return ""
		})
	}
	const current, halted = `slipstream_policy_proof_current{policy="proven"}`, `slipstream_policy_rollout_halted{policy="proven"}`
	is(current, 1)
	is(halted, 0)
	proven("0.1.2")
	is(current, 0)
	proven("")
	is(current, -1)
	a.Set(one(Policy{Name: "proven", Generation: 7, Halted: true}))
	is(halted, 1)
}

func TestOneAgentAMachine(t *testing.T) {
	p := newTestNode(t)
	p.start(p.options())
	a, err := New(p.options())
	if err == nil {
		a.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "another agent is running on this machine: stop it first") {
		t.Errorf("a second agent: %v, want it refused", err)
	}
}

func TestSystemd(t *testing.T) {
	p := newTestNode(t)
	a := p.start(p.options())
	if err := a.Systemd(t.Context()); err != nil {
		t.Errorf("without a service manager: %v", err)
	}
	socket := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	must(t, err)
	defer c.Close()
	t.Setenv("NOTIFY_SOCKET", socket)
	t.Setenv("WATCHDOG_USEC", "20000")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	must(t, a.Systemd(ctx))
	must(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	says := func() string {
		b := make([]byte, 100)
		n, err := c.Read(b)
		must(t, err)
		return string(b[:n])
	}
	for _, want := range []string{"READY=1", "WATCHDOG=1", "WATCHDOG=1"} {
		if got := says(); got != want {
			t.Errorf("it says %s, want %s", got, want)
		}
	}
	cancel()
	for said := ""; said != "STOPPING=1"; {
		said = says() // or until the deadline
	}
}

// TestHealth checks the health of an agent whose loop hangs, for example on a journal lock that is never released, and of one
// that receives no notifications.
func TestHealth(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	a := p.start(p.options())
	get := func(h http.Handler, path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		b, err := io.ReadAll(w.Body)
		must(t, err)
		return w.Code, string(b)
	}
	if code, text := get(a.Health(), "/healthz"); code != 200 {
		t.Errorf("healthz: %d %s", code, text)
	}
	p.pod("a")
	a.Set(one(plus))
	p.wantMasks("policy on", map[string]string{"/veth-a": "1", "a/eth0": "1"})
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	_, text := get(a.Metrics(), "/metrics")
	for _, want := range []string{
		`slipstream_policy_settings{policy="plus"} 2`, `slipstream_policy_settings_verified{policy="plus"} 2`,
		`slipstream_policy_state{policy="plus",state="applied"} 1`, `slipstream_policy_state{policy="plus",state="failed"} 0`,
		`slipstream_devices{class="host-veth"} 1`, "slipstream_pods 1", "slipstream_settings_set_total 2", "slipstream_pod_latency_seconds_count 1",
		"process_resident_memory_bytes",
	} {
		if !strings.Contains(text, want+"\n") && !strings.Contains(text, want+" ") {
			t.Errorf("metrics lack %s", want)
		}
	}
	a.stop()

	a.mu.Lock()
	a.beat = time.Now().Add(-24 * time.Hour)
	a.mu.Unlock()
	if code, text := get(a.Health(), "/healthz"); code != 503 || !strings.Contains(text, "the agent's last check was") {
		t.Errorf("a stuck loop: %d %s", code, text)
	}
}

// TestRest checks that the CPU time of a verification determines, within limits, the time to the next one, and when an agent
// counts as unhealthy.
func TestRest(t *testing.T) {
	const verify = 30 * time.Second
	a := &Agent{options: Options{Verify: verify}}
	for _, tt := range []struct{ spent, want time.Duration }{
		{0, verify}, {verify / restFor, verify}, {2 * verify / restFor, 2 * verify}, {time.Hour, restAtMost * verify},
	} {
		var shortest, longest time.Duration = math.MaxInt64, 0
		for range 1000 {
			d := a.rest(tt.spent)
			shortest, longest = min(shortest, d), max(longest, d)
		}
		if shortest < tt.want*8/10 || shortest > tt.want*85/100 || longest < tt.want*115/100 || longest > tt.want*12/10 {
			t.Errorf("after %s the next one is in %s to %s, want four to six fifths of %s", tt.spent, shortest, longest, tt.want)
		}
		for silent, want := range map[time.Duration]bool{2 * tt.want: true, 4*tt.want + verify: false} {
			a.beat = time.Now().Add(-silent)
			if err := a.Healthy(); (err == nil) != want {
				t.Errorf("silent for %s where the next verification is in %s: %v", silent, tt.want, err)
			}
		}
	}
	busy := cpuTime()
	for began := time.Now(); time.Since(began) < 50*time.Millisecond; {
		_ = cpuTime()
	}
	if used := cpuTime() - busy; used <= 0 || used > 10*time.Second {
		t.Errorf("a loop of 50 ms used %s", used)
	}
}

// TestMissingNotifications checks that the agent notices when notifications stop without an error: it finds devices that none
// announced.
func TestMissingNotifications(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	o := p.options()
	o.Verify = 20 * time.Millisecond
	a, err := New(o)
	must(t, err)
	defer a.Close()
	a.Set(one(plus))
	a.take()
	pass := func() { must(t, a.pass(t.Context(), true)) }
	pass()
	for i, name := range []string{"a", "b"} {
		p.pod(name) // nobody reads the kernel's notification
		pass()
		pass()
		if err := a.Healthy(); a.silentPasses != i+1 || (err != nil) != (i > 0) {
			t.Errorf("pod %d: silent %d times, health %v", i, a.silentPasses, err)
		}
	}
	a.note(<-a.watch.changes)
	if err := a.Healthy(); err != nil {
		t.Errorf("health once messages come again: %v", err)
	}
	p.wantMasks("found all the same", map[string]string{"/veth-a": "1", "a/eth0": "1", "/veth-b": "1", "b/eth0": "1"})
}
