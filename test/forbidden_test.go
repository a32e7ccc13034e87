package test

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"slipstream.dev/internal/testenv"
)

// TestForbidden applies accelerators without one of the capabilities that they need. The
// error names what is missing and what to do.
func TestForbidden(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		space.Close()
		if err := netns.Set(home); err != nil {
			t.Error(err) // the thread stays locked, so that it ends
			return
		}
		home.Close()
		runtime.UnlockOSThread()
	}()
	// The device with an address counts as the NIC.
	nic := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "wire"}
	if err := netlink.LinkAdd(nic); err != nil {
		t.Fatal(err)
	}
	address, err := netlink.ParseAddr("192.0.2.1/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(nic, address); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ capabilities, want string }{
		{"+all,-net_admin", "operation not permitted: this process lacks CAP_NET_ADMIN: run it as root and give it that"},
		{"+all,-sys_admin", "this process lacks CAP_SYS_ADMIN: run it as root and give it that"},
		{"+all", "class/net/eth0/queues/rx-0/rps_cpus"},
	} {
		// It has its own journal.
		out, err := exec.Command("unshare", "--mount", "sh", "-ec", `mount -t tmpfs none /run
			exec setpriv --bounding-set "$0" "$@" accel apply demo rps`, tt.capabilities, program).CombinedOutput()
		if (err == nil) != (tt.capabilities == "+all") || !strings.Contains(string(out), tt.want) {
			t.Errorf("with %s: %v, want %q in\n%s", tt.capabilities, err, tt.want, out)
		}
	}
}
