//go:build linux

package network

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// TestPropagate checks that `ip netns add` need not make the folder a mount again after us: that would cover
// the names in it.
func TestPropagate(t *testing.T) {
	testenv.PrivateMounts(t)
	dir := t.TempDir()
	for range 2 {
		if err := propagate(dir); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		t.Errorf("ip netns would mount the folder: %v", err)
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(mounts), " "+dir+" "); n != 1 {
		t.Errorf("the folder is mounted %d times", n)
	}
}
