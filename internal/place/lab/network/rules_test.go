//go:build linux

package network

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestRestoreLock checks that the rules of a node do not wait until legacy iptables has loaded those of another one, or of the
// machine. Whether this kernel accepts its rules does not matter.
func TestRestoreLock(t *testing.T) {
	testenv.NeedRoot(t)
	program := testenv.NeedProgram(t, "iptables-legacy-restore", "iptables")
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := Adopt("of the test", h)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = Restore(program, []byte("*filter\nCOMMIT\n")).Run(t.Context(), ns)
	if err != nil && strings.Contains(err.Error(), "lock") {
		t.Error(err)
	}
}
