//go:build linux

package services

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestCgroupRoot(t *testing.T) {
	for text, want := range map[string]string{
		"25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n":                                          "/sys/fs/cgroup",
		"30 29 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n39 29 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n": "/sys/fs/cgroup/unified",
		"30 29 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n":                                                              "",
		"":               "",
		" - cgroup2 x\n": "",
	} {
		file := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := cgroupRoot(file)
		if got != want || (want == "") != errors.Is(err, errNoCgroup) {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
}
