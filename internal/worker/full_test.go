//go:build linux

package worker

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/testenv"
)

// TestJournalDiskFull checks that a worker that cannot journal changes nothing, and that its controller learns why.
func TestJournalDiskFull(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir() // the worker's threads have to see the disk, so it is mounted for all
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "nr_inodes=1"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	c, _ := connectTo(t, Options{JournalDir: dir})
	steering := place.Steering{Place: place.Place{Name: "node", Kind: place.Node}, Owner: "test",
		Accelerators: []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{"overlay"}, CPUs: "all"}}}}
	_, err := c.Apply(t.Context(), steering)
	if !errors.Is(err, place.ErrNoSpace) || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want that the disk of %s is full", err, dir)
	}
}
