//go:build linux

package worker

import (
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/testenv"
)

// TestChanged checks that Revert says what somebody else has changed, beside the settings, and that the worker goes on. The next
// worker says it of a dead one.
func TestChanged(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedCPUs(t, 2)
	t.Setenv("TMPDIR", t.TempDir()) // for the journal
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ns, err := netns.New()
	must(err)
	t.Cleanup(func() { ns.Close() })
	in := func(do func(kernel.Sysfs) error) {
		t.Helper()
		must(netns.Do(ns, func() error {
			sys, err := kernel.OpenSysfs("")
			if err != nil {
				return err
			}
			defer sys.Close()
			return do(sys)
		}))
	}
	in(func(kernel.Sysfs) error {
		nic := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", NumRxQueues: 2, NumTxQueues: 2}, PeerName: "far"}
		address, err := netlink.ParseAddr("192.0.2.1/24")
		return errors.Join(err, netlink.LinkAdd(nic), netlink.AddrAdd(nic, address))
	})
	const setting = "class/net/eth0/queues/rx-1/rps_cpus"
	start := func() (*Client, *exec.Cmd) {
		t.Helper()
		var process *exec.Cmd
		c, err := Spawn(t.Context(), func(cmd *exec.Cmd) error {
			process = cmd
			return netns.Do(ns, cmd.Start)
		}, io.Discard)
		must(err)
		t.Cleanup(func() { _ = c.Close() })
		return c, process
	}
	steering := place.Steering{Place: place.Place{Name: "node", Kind: place.Node}, Owner: "test",
		Accelerators: []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: []string{"nic"}, CPUs: "all"}}}}
	says := func(c *Client, want int) {
		t.Helper()
		settings, err := c.Revert(t.Context())
		changed, ok := errors.AsType[place.ChangedError](err)
		if !ok || !strings.Contains(string(changed), setting) || len(settings) != want {
			t.Errorf("revert: %v, %v, want %d settings and what was changed", settings, err, want)
		}
		in(func(sys kernel.Sysfs) error {
			now, err := sys.Read(setting)
			if strings.TrimLeft(now, "0,") != "1" {
				t.Errorf("somebody's value was overwritten with %s", now)
			}
			return err
		})
	}
	c, _ := start()
	for range 2 {
		_, err = c.Apply(t.Context(), steering)
		must(err)
		in(func(sys kernel.Sysfs) error { return sys.Write(setting, "1") })
		says(c, 2)
		in(func(sys kernel.Sysfs) error { return sys.Write(setting, "0") })
	}
	dead, process := start()
	_, err = dead.Apply(t.Context(), steering)
	must(err)
	in(func(sys kernel.Sysfs) error { return sys.Write(setting, "1") })
	must(process.Process.Kill())
	_ = dead.Close() // it was killed
	says(c, 0)
}
