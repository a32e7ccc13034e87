//go:build linux && firstminute

package install

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestFirstMinute times what somebody does first with each kind of file of a release: install it, ask for the version, look for
// faults, and measure. It judges nothing. The system is a small one, so there is neither a compiler nor a tool that measures.
func TestFirstMinute(t *testing.T) {
	base, releases := need(t)
	archive := "slipstream_" + newer + "_linux_" + runtime.GOARCH
	for _, tt := range []struct {
		channel, install, program string
	}{
		{"deb", "dpkg --install " + deb(newer), "slipstream"},
		{"rpm", "rpm --install --nodeps " + rpm(newer), "slipstream"},
		{"archive", "tar -xzf /mnt/" + newer + "/" + archive + ".tar.gz -C /root", "/root/" + archive + "/slipstream"},
	} {
		t.Run(tt.channel, func(t *testing.T) {
			s := start(t, base, releases, "/usr/bin/sleep", "infinity")
			nic(s)
			watch := stopwatch(t)
			watch("install", func() error { _, err := s.try("bash", "-c", tt.install); return err })
			watch("version", func() error { _, err := s.try(tt.program, "version"); return err })
			watch("doctor", func() error {
				out, err := s.try(tt.program, "doctor")
				if err != nil && strings.Contains(err.Error(), "exit status 3") { // it has found something
					err = nil
				}
				t.Log(out)
				return err
			})
			watch("demo of one block", func() error {
				out, err := s.try("bash", "-c", "cd /root && "+tt.program+" run demo --runs 1 2>&1")
				t.Log(out)
				return err
			})
		})
	}
	t.Run("source", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "slipstream")
		checkout, err := filepath.Abs("../..")
		if err != nil {
			t.Fatal(err)
		}
		do := func(command string) error {
			cmd := exec.CommandContext(t.Context(), "bash", "-euc", command)
			cmd.Dir = filepath.Dir(dir)
			cmd.Env = append(os.Environ(), "GOCACHE="+filepath.Join(filepath.Dir(dir), "cache")) // modules stay, as their download depends on the network
			out, err := cmd.CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w:\n%s", err, out)
			}
			return nil
		}
		watch := stopwatch(t)
		watch("clone", func() error { return do("git clone --quiet file://" + checkout + " slipstream") })
		watch("make build, with an empty build cache", func() error { return do("make -C slipstream build") })
		watch("demo of one block", func() error { return do("cd slipstream && bin/slipstream run demo --runs 1") })
	})
}

// stopwatch returns a function that does a step, and says how long that step and all steps so far took.
func stopwatch(t *testing.T) func(step string, do func() error) {
	began := time.Now()
	return func(step string, do func() error) {
		t.Helper()
		before := time.Now()
		if err := do(); err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		t.Logf("%s: %.1f s, after %.1f s in all", step, time.Since(before).Seconds(), time.Since(began).Seconds())
	}
}
