package agent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/testenv"
)

// chartCapabilities returns the capabilities that the chart gives an agent.
func chartCapabilities(t testing.TB) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "charts", "slipstream", "templates", "daemonset.yaml"))
	must(t, err)
	m := regexp.MustCompile(`(?m)^ +drop: \[ALL\]\n +add: \[(.*)\]$`).FindSubmatch(text)
	if m == nil {
		t.Fatal("the chart lists no capabilities")
	}
	return strings.Split(string(m[1]), ", ")
}

// contained returns a command that starts another one as in an unprivileged container: with these capabilities, and with
// /proc/sys and /sys read-only.
func contained(t testing.TB, capabilities ...string) []string {
	t.Helper()
	testenv.NeedProgram(t, "setpriv", "apt-get install util-linux")
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	return []string{"unshare", "--mount", "sh", "-ec", `exec 2>&1
		mount -o bind /proc/sys /proc/sys
		mount -o remount,bind,ro /proc/sys
		mount -t sysfs -o ro sysfs /sys
		exec setpriv --bounding-set "$0" "$@"`, set}
}

// processPod makes a pod whose network namespace is not pinned: only a process refers to it. With ofUser, a user namespace owns
// it.
func (p *testNode) processPod(name string, ofUser bool) {
	p.t.Helper()
	c := exec.Command("sleep", "1000")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	if ofUser {
		c.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: 100000, Size: 65536}}
		c.SysProcAttr.GidMappings = c.SysProcAttr.UidMappings
	}
	must(p.t, c.Start())
	p.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	space, err := netns.GetFromPid(c.Process.Pid)
	must(p.t, err)
	defer space.Close()
	must(p.t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "veth-" + name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(space)}))
}

// deny makes the kernel refuse some system calls to all threads of this process.
func deny(calls []uint32) error {
	if len(calls) == 0 {
		return nil
	}
	// struct seccomp_data begins with the number of the call.
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}}
	for _, n := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: n},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("deny system calls: %w", errno)
	}
	return nil
}

// says reads the agent's output up to a matching line, or to its end. The rest can still be read.
func (c *child) says(t testing.TB, want string) {
	t.Helper()
	pattern := regexp.MustCompile(want)
	late := time.AfterFunc(time.Minute, func() { _ = c.Process.Kill() })
	defer late.Stop()
	var said []string
	for c.out.Scan() {
		if said = append(said, c.out.Text()); pattern.MatchString(c.out.Text()) {
			return
		}
	}
	t.Errorf("the agent never said %s but\n%s", want, strings.Join(said, "\n"))
}

// TestContainerCapabilities checks that the chart's capabilities are enough for an unprivileged
// agent, and that none of them can be left out: the agent says which one is missing, and what to
// do.
func TestContainerCapabilities(t *testing.T) {
	t.Parallel()
	all := chartCapabilities(t)
	policy := v1alpha1.ForPolicy(rps("0", "nic", "host-veth", "pod"))
	const todo = ": run it as root and give it that"
	for name, tt := range map[string]struct{ without, want string }{
		"all": {"", `^7 7 Applied missing=0 `},
		// The agent mounts a sysfs and enters network namespaces.
		"mounts and namespaces": {"SYS_ADMIN", `^0 0 Error .*operation not permitted: this process lacks CAP_SYS_ADMIN` + todo},
		// The kernel requires it for writing a queue's CPUs, and for a large receive buffer.
		"queues": {"NET_ADMIN", `subscribe to link changes: operation not permitted: this process lacks CAP_NET_ADMIN` + todo},
		// The agent reads /proc/PID/ns/net of a pod without a pinned namespace.
		"processes of pods": {"SYS_PTRACE", `^6 6 Error missing=1 .*CAP_SYS_PTRACE`},
		// The files that the agent writes belong to the root of the pod's user namespace.
		"pods with user namespaces": {"DAC_OVERRIDE", `^6 6 Error .*permission denied: this process lacks CAP_DAC_OVERRIDE` + todo},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newTestNode(t)
			p.nic()
			p.pod("pinned")
			p.processPod("process", false)
			p.processPod("user", true)
			before := p.snapshot()
			set := slices.DeleteFunc(slices.Clone(all), func(c string) bool { return c == tt.without })
			if tt.without != "" && len(set) != len(all)-1 {
				t.Fatalf("the chart has no %s", tt.without)
			}
			c := p.childWith(childOptions{Verify: time.Hour, Accelerate: policy}, contained(t, set...)...)
			c.says(t, tt.want)
			if tt.without != "" {
				return
			}
			must(t, c.in.Close())
			for c.out.Scan() { // until it ends
			}
			p.childWith(childOptions{Verify: time.Hour}, contained(t, set...)...).says(t, `^0 0 `)
			if d := cmp.Diff(before, p.snapshot()); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestContainerFlowTable checks that the agent can write and restore the machine's flow table although /proc/sys is read-only.
func TestContainerFlowTable(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	run := func(want string, accelerate ...v1alpha1.Accelerator) {
		c := p.childWith(childOptions{Verify: time.Hour, Accelerate: v1alpha1.ForPolicy(accelerate...)}, contained(t, chartCapabilities(t)...)...)
		c.says(t, want)
		must(t, c.in.Close())
		for c.out.Scan() { // until it ends
		}
	}
	run(`^3 3 Applied`, v1alpha1.Accelerator{RFS: &v1alpha1.RFS{CPUs: "0", Entries: 4096, Devices: []string{"nic"}}})
	run(`^0 0 `)
	p.wantJournal(0)
}

// TestContainerFastpath checks that the capabilities are enough for the fast path too, and that the
// agent says why it cannot run without one of them.
func TestContainerFastpath(t *testing.T) {
	t.Parallel()
	all := chartCapabilities(t)
	for name, tt := range map[string]struct {
		without string
		deny    []uint32
		want    string
	}{
		"all":         {"", nil, `^0 0 Applied .*idle: `},
		"raw sockets": {"NET_RAW", nil, `try the fast path: .*operation not permitted: this process lacks CAP_NET_RAW`},
		"programs":    {"SYS_ADMIN", nil, `try the fast path: .*operation not permitted: this process lacks CAP_SYS_ADMIN`},
		"seccomp":     {"", []uint32{unix.SYS_BPF}, `try the fast path: .*operation not permitted.*: this process has the capabilities for it.*a seccomp filter is on it, which has to permit bpf`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newOverlay(t)
			set := slices.DeleteFunc(slices.Clone(all), func(c string) bool { return c == tt.without })
			p.childWith(childOptions{Verify: time.Hour, Accelerate: fastPolicy.Accelerate, Deny: tt.deny}, contained(t, set...)...).says(t, tt.want)
		})
	}
}
