package record

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// tinyDisk is a file system of 64 KiB, mounted in a namespace of the test's own
// thread: should the test die, the mount goes with it.
func tinyDisk(t *testing.T) string {
	t.Helper()
	testenv.PrivateMounts(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // runs on this thread too
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestAppendDiskFull(t *testing.T) {
	disk := tinyDisk(t)
	d := create(t, disk)
	appendTrials(t, d, 1, 2)

	big := trial(3)
	big.Latency = strings.Repeat("x", 100<<10)
	if err := d.Append(big); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Append to a full disk: %v, want no space left", err)
	}
	wantTrials(t, d, 1, 2)
	if text, err := os.ReadFile(filepath.Join(d.Path, trialsFile)); err != nil || text[len(text)-1] != '\n' {
		t.Errorf("trials.jsonl ends in a torn line, %v", err)
	}
	appendTrials(t, d, 3) // there is space again
	wantTrials(t, d, 1, 2, 3)
}

func TestCreateDiskFull(t *testing.T) {
	disk := tinyDisk(t)
	_, err := Create(disk, "demo", started, make([]byte, 100<<10), Environment{})
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Create on a full disk: %v, want no space left", err)
	}
	left, err := os.ReadDir(disk)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) > 0 {
		t.Errorf("Create leaves %v behind", left)
	}
}
