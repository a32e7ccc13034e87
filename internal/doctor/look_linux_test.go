package doctor

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/testenv"
)

// TestFaultsInANamespace: in a network namespace with VXLAN over a veth nothing is found; each fault that
// is injected is found, alone, and what the finding says to do mends it.
func TestFaultsInANamespace(t *testing.T) {
	testenv.EnterNamespace(t)
	run(t, "ip link add dr0 type veth peer name dr1; ip addr add 10.9.0.1/24 dev dr0; ip link set dr0 up; ip link set dr1 up",
		"ip link add dr.vx type vxlan id 7 dev dr0 local 10.9.0.1 dstport 8472 nolearning; ip addr add 10.9.1.1/32 dev dr.vx; ip link set dr.vx up",
		"ip route add 10.9.2.0/24 dev dr.vx")
	none := func() {
		t.Helper()
		if found := look(t); len(found) > 0 {
			t.Fatalf("without a fault: %q", summary(found))
		}
	}
	none()
	for _, c := range []struct{ inject, want string }{
		// The kernel refuses the larger MTU for the VXLAN device, and accepts the smaller one below it.
		{"ip link set dr0 mtu 1400", "serious mtu-too-large: The MTU of dr.vx is too large by 100 for dr0"},
		{"ip link set dr0 mtu 9000; ip link set dr1 mtu 9000", "note mtu-small: The MTU of dr.vx could be 7600 larger"},
		{"ethtool -K dr.vx gro off", "warning offload-off: The offload rx-gro of dr.vx is off"},
		{"ethtool -K dr.vx tx-checksum-ip-generic off", "warning offload-off: The offload tx-checksum-ip-generic of dr.vx is off"},
	} {
		run(t, c.inject)
		found := look(t)
		if len(found) != 1 || !strings.HasPrefix(summary(found)[0], c.want) {
			t.Fatalf("after %s: found %q, want %q", c.inject, summary(found), c.want)
		}
		run(t, found[0].Do)
		none()
	}
}

// TestDropsInANamespace: packets that a device drops in the window are found, and those before it are not.
func TestDropsInANamespace(t *testing.T) {
	testenv.EnterNamespace(t)
	// A VXLAN device without an entry for the address drops what is sent by it.
	run(t, "ip link add dr0 type veth peer name dr1; ip addr add 10.9.0.1/24 dev dr0; ip link set dr0 up; ip link set dr1 up",
		"ip link add dr.vx type vxlan id 7 dev dr0 local 10.9.0.1 dstport 8472 nolearning; ip addr add 10.9.1.1/32 dev dr.vx; ip link set dr.vx up",
		"ip route add 10.9.2.0/24 dev dr.vx; ip neigh add 10.9.2.2 lladdr 02:00:00:00:00:02 dev dr.vx")
	conn, err := net.Dial("udp", "10.9.2.2:9") // a socket of the namespace, whichever thread writes
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	send := func() {
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Error(err)
		}
	}
	for range 50 {
		send()
	}
	if found := look(t); len(found) > 0 {
		t.Fatalf("after the drops: %q", summary(found))
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		each := time.NewTicker(time.Millisecond)
		defer each.Stop()
		for {
			select {
			case <-stop:
				return
			case <-each.C:
				send()
			}
		}
	}()
	found := look(t)
	close(stop)
	<-done
	if len(found) != 1 || !strings.HasPrefix(summary(found)[0], "serious device-drops: dr.vx drops packets") {
		t.Errorf("found %q", summary(found))
	}
}

// TestAWindowEndsWithItsContext: a user who stops a long look is not kept waiting.
func TestAWindowEndsWithItsContext(t *testing.T) {
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	if err := sleep(ctx, time.Hour); !errors.Is(err, stopped) {
		t.Errorf("error %v", err)
	}
}

// look looks for what a namespace can show: what the machine itself does meanwhile is another matter.
func look(t *testing.T) (found []Finding) {
	t.Helper()
	f, err := Look(t.Context(), 200*time.Millisecond, false)
	if err != nil {
		t.Fatal(err)
	}
	f.CPUs, f.Throttled = nil, nil
	return Examine(f)
}

// run runs commands in the network namespace of the test's thread.
func run(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		if out, err := exec.Command("sh", "-ec", c).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", c, err, out)
		}
	}
}

// TestEncapsulation: what each kind of device adds, and which device it is bound to.
func TestEncapsulation(t *testing.T) {
	nic := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2}}
	links := map[string]netlink.Link{"eth0": nic}
	for name, c := range map[string]struct {
		link     netlink.Link
		under    string
		overhead int
	}{
		"VXLAN":            {&netlink.Vxlan{VtepDevIndex: 2, SrcAddr: net.IPv4(10, 9, 0, 1)}, "eth0", 50},
		"VXLAN over IPv6":  {&netlink.Vxlan{VtepDevIndex: 2, SrcAddr: net.ParseIP("fd00::1")}, "eth0", 70},
		"external VXLAN":   {&netlink.Vxlan{VtepDevIndex: 2, FlowBased: true}, "", 0},
		"VXLAN by route":   {&netlink.Vxlan{SrcAddr: net.IPv4(10, 9, 0, 1)}, "", 0},
		"VXLAN of another": {&netlink.Vxlan{VtepDevIndex: 9}, "", 0}, // in another network namespace
		"IPIP":             {&netlink.Iptun{Link: 2}, "eth0", 20},
		"gretap":           {&netlink.Gretap{Link: 2}, "eth0", 38},
		"NIC":              {nic, "", 0},
	} {
		if under, overhead := encapsulation(c.link, links); under != c.under || overhead != c.overhead {
			t.Errorf("%s: %d bytes over %q, want %d over %q", name, overhead, under, c.overhead, c.under)
		}
	}
}

func TestInstalledTools(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	for file, mode := range map[string]os.FileMode{a + "/iperf3": 0o755, b + "/ab": 0o755, b + "/sockperf": 0o644} {
		if err := os.WriteFile(file, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	there, missing := installed(a + ":" + b)
	if strings.Join(there, " ") != "ab iperf3" || !slices.Contains(missing, "sockperf") {
		t.Errorf("finds %q, and not %q", there, missing)
	}
}
