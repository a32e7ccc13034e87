//go:build linux

// Command guest is the init process of a virtual machine that package main of test/kernels
// boots. It loads the modules of its image, tries the fast path, runs the tests if that works,
// prints the result on the console, and powers the machine off.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/test/kernels/report"
)

// tests are the test programs in the image, by their name in the report.
var tests = []struct {
	name string
	argv []string
}{
	{"grammar", []string{"/tests/datapath", "-test.run=^(TestGrammar|TestExplain)$", "-packets=6000"}},
	{"differential", []string{"/tests/fastpath", "-test.run=^TestDifferential$", "-packets=1600"}},
	{"local", []string{"/tests/fastpath", "-test.run=^(TestLocal|TestLocalDrop|TestClose)$/" + localTests, "-streamed=1"}},
	{"routed", []string{"/tests/fastpath", "-test.run=^(TestFastPath|TestCrossSubnet|TestClose|TestProbe)$/^routed(_full|_none)?$", "-streamed=1"}},
	{"lower", []string{"/tests/fastpath", "-test.run=^(TestLowerDevices|TestBridgeVLANFiltering)$"}},
	{"flowtable", []string{"/tests/fastpath", "-test.run=^(TestFlowtableAtDevices|TestConnectionInFlowtable|TestFlowtableOfCalico)$", "-flowtables"}},
	{"metadata", []string{"/tests/fastpath", "-test.run=^(TestMetadata|TestClassOfQueue)$/^nothing"}},
	{"policy", []string{"/tests/fastpath", "-test.run=^(TestPolicy|TestPolicyEngines|TestNFQueue)$", "-changes=56"}},
}

// localTests selects connections between pods on a bridge and between pods that the node routes, rules that drop their packets, and
// the end of the agent.
const localTests = "^(flannel|calico|a_rule,_(bridged|routed)|local)$/^(IPv6_direct|IPv4_Service)_to_the_larger_address$"

// prepared marks that this program was executed again after /proc was mounted: eBPF packages
// read /proc before main runs.
const prepared = "prepared"

func main() {
	r, err := run()
	if err != nil {
		r.Error = err.Error()
	}
	line, err := json.Marshal(r)
	if err != nil {
		line = fmt.Appendf(nil, `{"error": %q}`, err)
	}
	fmt.Printf("\n%s%s\n", report.Mark, line)
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("power off:", err)
	}
}

func run() (r report.Report, err error) {
	if len(os.Args) < 2 || os.Args[1] != prepared {
		if err = mount(); err == nil {
			err = unix.Exec("/proc/self/exe", []string{os.Args[0], prepared}, os.Environ())
		}
		return r, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return r, fmt.Errorf("ask for the kernel's version: %w", err)
	}
	r.Release = unix.ByteSliceToString(name.Release[:])
	if err := load(); err != nil {
		return r, err
	}
	if err := fastpath.Probe(context.Background()); err != nil {
		r.Unsupported = err.Error()
		return r, nil
	}
	for _, t := range tests {
		fmt.Println("==", t.name)
		begin := time.Now()
		cmd := exec.Command(t.argv[0], append(t.argv[1:], "-test.v", "-test.failfast", "-test.timeout=20m")...)
		var printed bytes.Buffer
		cmd.Stdout, cmd.Stderr, cmd.Dir = io.MultiWriter(os.Stdout, &printed), os.Stderr, "/tmp"
		cmd.Env = append(os.Environ(), "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp")
		result := report.Test{Name: t.name}
		if err := cmd.Run(); err != nil {
			result.Error = err.Error()
		}
		result.Passed = bytes.Count(printed.Bytes(), []byte("--- PASS: "))
		result.Seconds = int(time.Since(begin).Seconds())
		r.Tests = append(r.Tests, result)
	}
	return r, nil
}

// mount mounts the file systems that programs expect.
func mount() error {
	for _, m := range []struct{ what, where string }{
		{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
		{"securityfs", "/sys/kernel/security"}, {"tracefs", "/sys/kernel/tracing"}, {"bpf", "/sys/fs/bpf"},
	} {
		if err := os.MkdirAll(m.where, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.what, m.where, m.what, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s at %s: %w", m.what, m.where, err)
		}
	}
	return nil
}

// load loads the modules of the image, in the order of the file that lists them.
func load() error {
	names, err := os.ReadFile("/modules/order")
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(names)) {
		f, err := os.Open(filepath.Join("/modules", name))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil {
			fmt.Printf("load module %s: %v\n", name, err) // a test that needs the module will report that
		}
	}
	return nil
}
