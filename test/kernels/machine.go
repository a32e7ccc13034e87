package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"slipstream.dev/test/kernels/report"
)

// architecture describes how QEMU runs a Debian architecture.
type architecture struct {
	program string
	machine []string
	console string
}

// The CPUs are emulated, so that the machines run on any host, and run the same on each. These
// CPU models are not slow to emulate. In QEMU 7.2 cmpxchg16b corrupts the processor's flags,
// and then Linux corrupts its memory: without cx16 Linux does not use it.
var architectures = map[string]architecture{
	"amd64": {"qemu-system-x86_64", []string{"-machine", "q35", "-cpu", "Nehalem,-cx16"}, "ttyS0"},
	"arm64": {"qemu-system-aarch64", []string{"-machine", "virt", "-cpu", "neoverse-n1"}, "ttyAMA0"},
}

// clock makes a machine's time advance by one nanosecond per instruction, and without waiting
// while it is idle. So the timing of tests does not depend on the load of this machine. A
// second CPU would only alternate with the first, and old kernels wait for it forever.
var clock = []string{"-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-rtc", "clock=vm"}

// boot runs a machine until it powers off, and returns its report. The console output goes to
// a file.
func (a architecture) boot(ctx context.Context, kernel, initramfs, options, console string, limit time.Duration) (r report.Report, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	argv := slices.Concat([]string{"-n", "10", a.program}, a.machine, clock)
	argv = append(argv, "-smp", "1", "-m", "1024", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio",
		"-kernel", kernel, "-initrd", initramfs, "-append", strings.TrimSpace("console="+a.console+" panic=-1 quiet "+options))
	log, err := os.Create(console)
	if err != nil {
		return r, err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, "nice", argv...)
	cmd.Stdout, cmd.Stderr = log, log
	err = cmd.Run()
	said, readErr := os.ReadFile(console)
	if readErr != nil {
		return r, readErr
	}
	if ctx.Err() != nil {
		return r, fmt.Errorf("the machine was still running after %s: see %s", limit, console)
	}
	if err != nil {
		return r, fmt.Errorf("%s: %w: %s", a.program, err, bytes.TrimSpace(said))
	}
	r, err = report.Find(said)
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		err = fmt.Errorf("%w: see %s", err, console)
	}
	return r, err
}

// findKernel finds the kernel among the files of its packages.
func findKernel(tree string) (string, error) {
	for _, pattern := range []string{"boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz"} {
		found, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil {
			return "", err
		}
		if len(found) > 0 {
			return found[0], nil
		}
	}
	return "", fmt.Errorf("there is no kernel in %s", tree)
}
