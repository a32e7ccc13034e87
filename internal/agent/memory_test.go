package agent

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// memoryGroup is a control group that limits the memory of its processes, including the kernel
// memory charged to them.
type memoryGroup struct{ dir, peak string }

func limitMemory(t testing.TB, bytes int) memoryGroup {
	t.Helper()
	root, limit, peak := "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil { // version 2
		root, limit, peak = "/sys/fs/cgroup", "memory.max", "memory.peak"
	}
	dir := filepath.Join(root, fmt.Sprintf("slipstream-test-%d", os.Getpid()))
	must(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		// Its last process may still be exiting.
		eventually(t, "remove the control group", func() string {
			if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err.Error()
			}
			return ""
		})
	})
	must(t, os.WriteFile(filepath.Join(dir, limit), []byte(strconv.Itoa(bytes)), 0))
	return memoryGroup{dir, filepath.Join(dir, peak)}
}

// command returns a command that starts another one in the group.
func (g memoryGroup) command() []string {
	return []string{"sh", "-ec", `echo $$ > "$0"/cgroup.procs; exec "$@"`, g.dir}
}

// killed counts the processes that the kernel killed for lack of memory.
func (g memoryGroup) killed(t testing.TB) string {
	t.Helper()
	for _, file := range []string{"memory.events", "memory.oom_control"} {
		if text, err := os.ReadFile(filepath.Join(g.dir, file)); err == nil {
			if m := regexp.MustCompile(`(?m)^oom_kill (\d+)$`).FindSubmatch(text); m != nil {
				return string(m[1])
			}
		}
	}
	t.Fatal("the control group does not count")
	return ""
}

// forge sends frames from this many made-up MAC addresses from a pod.
func (p *testNode) forge(pod string, senders int) {
	p.t.Helper()
	p.in(pod, func() {
		l, err := netlink.LinkByName("eth0")
		must(p.t, err)
		s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		must(p.t, err)
		defer unix.Close(s)
		frame := make([]byte, 60)
		copy(frame, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2})
		frame[12], frame[13] = 0x88, 0xb5 // reserved for experiments by IEEE 802
		for range senders {
			for i := 7; i < 12; i++ {
				frame[i] = byte(rand.Uint32())
			}
			for err = unix.ENOBUFS; errors.Is(err, unix.ENOBUFS); {
				err = unix.Sendto(s, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index})
			}
			must(p.t, err)
		}
	})
}

// TestMemoryLimit checks that an agent stays within the memory limit of the chart, with 10,000
// connections on the fast path, 8,000 idle ones at /metrics, and a flood from a pod.
func TestMemoryLimit(t *testing.T) {
	const limit, flows, idle, senders = 128 << 20, 10_000, 8000, 30_000
	values, err := os.ReadFile(filepath.Join("..", "..", "charts", "slipstream", "values.yaml"))
	must(t, err)
	if !strings.Contains(string(values), "limits: {memory: 128Mi}") {
		t.Error("the chart has another limit")
	}
	p := newOverlay(t)
	g := limitMemory(t, limit)
	must(t, netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}))
	c := p.childWith(childOptions{Verify: time.Second, Accelerate: fastPolicy.Accelerate, Metrics: metricsAt, Health: healthAt}, g.command()...)
	c.says(t, `^\d+ \d+ Applied`)
	go func() {
		for c.out.Scan() { // drain the output, or the agent would block
		}
	}()
	p.flows(flows, 200*time.Millisecond, flows/2)
	for range idle {
		s := connectTo(t, 9469)
		defer unix.Close(s)
	}
	p.forge("n0p0", senders)
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if code, _ := ask(t, healthAt, "/healthz"); code != http.StatusOK {
			t.Fatalf("healthz: %d", code)
		}
	}
	if code, _ := ask(t, metricsAt, "/metrics"); code != http.StatusOK {
		t.Errorf("a scrape: %d", code)
	}
	if n := g.killed(t); n != "0" {
		t.Errorf("%s processes were ended for want of memory", n)
	}
	peak, err := os.ReadFile(g.peak)
	must(t, err)
	bytes, err := strconv.Atoi(strings.TrimSpace(string(peak)))
	must(t, err)
	most, own := c.memory(t)
	t.Logf("the control group had %d MiB at most, with files; the agent %.0f MiB, %.0f of them its own now", bytes>>20, most, own)
}
