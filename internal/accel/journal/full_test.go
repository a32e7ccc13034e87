package journal

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"slipstream.dev/internal/accel/kernel/kerneltest"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestDiskFull checks that on a full disk, no setting is changed that cannot be journalled, that the settings in the journal
// can still be restored, and that everything works again once there is space.
func TestDiskFull(t *testing.T) {
	disk := testenv.Disk(t, "64k")
	s := &kerneltest.Memory{Values: map[string]string{queue0: "0", queue1: "1"}}
	j, err := Open(disk, kerneltest.Proc(t, map[string]string{"7": kerneltest.Stat("S", "42")}))
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := j.Lock()
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	h := Holder{"run", 7, 42}
	set := func(b *Book, path, was string) error {
		_, err := Set(h, Changes{b, []Change{{path, 2, was, "3"}}})
		return err
	}
	if err := set(reopen(t, j, s), queue0, "0"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(disk, ledgerFile(netns.ID{Cookie: 9}))
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	free := testenv.Fill(t, disk, 0)
	b := reopen(t, j, s)
	for range 2 { // a second try writes nothing either
		if err := set(b, queue1, "1"); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), file) {
			t.Errorf("Set on a full disk: %v, want no space left, and the journal", err)
		}
		if s.Values[queue1] != "1" {
			t.Errorf("%s reads %s, and nobody can restore it", queue1, s.Values[queue1])
		}
	}
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("the journal was\n%s\nand is\n%s, %v", before, after, err)
	}
	if _, err := os.Stat(filepath.Join(disk, unfinished)); err == nil {
		t.Error("half a journal is left")
	}
	if _, err := reopen(t, j, s).ReleaseHolder(h); err != nil || s.Values[queue0] != "0" {
		t.Errorf("%s is restored to %s, %v", queue0, s.Values[queue0], err)
	}
	free()
	if err := set(b, queue1, "1"); err != nil || s.Values[queue1] != "3" {
		t.Errorf("with space again: %s reads %s, %v", queue1, s.Values[queue1], err)
	}
}
