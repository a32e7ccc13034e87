package kernel

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// elsewhere runs fn in a network namespace of its own.
func elsewhere(t *testing.T, fn func() error) {
	t.Helper()
	testenv.NeedRoot(t)
	ns, err := netns.New()
	must(t, err)
	defer ns.Close()
	must(t, netns.Do(ns, fn))
}

// TestReadOnlySysfs checks that a write succeeds where a container runtime has made a namespace's
// whole sysfs read-only, and that the sysfs is read-only again afterwards.
func TestReadOnlySysfs(t *testing.T) {
	elsewhere(t, func() error {
		s, err := OpenSysfs("")
		must(t, err)
		defer s.Close()
		must(t, s.reconfigure("ro"))
		const mask = "class/net/lo/queues/rx-0/rps_cpus"
		refused := func() bool {
			f, err := s.OpenFile(mask, os.O_WRONLY, 0)
			if err == nil {
				f.Close()
			}
			return errors.Is(err, unix.EROFS)
		}
		if !refused() {
			t.Error("a sysfs that is read-only can be written to")
		}
		must(t, s.Write(mask, "1"))
		if got, err := s.Read(mask); err != nil || strings.TrimLeft(got, "0,") != "1" {
			t.Errorf("the mask reads %q, %v", got, err)
		}
		if !refused() {
			t.Error("it was left writable")
		}

		return nil
	})
}

func TestNames(t *testing.T) {
	elsewhere(t, func() error {
		must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "veth0"}, PeerName: "veth1"}))
		link, err := netlink.LinkByName("veth0")
		must(t, err)
		l, err := OpenLinks()
		must(t, err)
		defer l.Close()
		index := link.Attrs().Index
		names, err := l.Names([]int{1, index, 4096})
		if d := cmp.Diff(map[int]string{1: "lo", index: "veth0"}, names); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
		return nil
	})
}
