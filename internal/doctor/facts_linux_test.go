package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestFaultsInANamespace checks that a network namespace with VXLAN over a veth has no findings, that each
// injected fault is found, alone, and that the remedy in the finding corrects it.
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
	for _, c := range []struct{ inject, want, heal string }{
		// The kernel refuses the larger MTU for the VXLAN device, and accepts the smaller one below it.
		{"ip link set dr0 mtu 1400", "serious mtu-too-large: The MTU of dr.vx is 100 bytes too large for dr0", ""},
		{"ip link set dr0 mtu 9000; ip link set dr1 mtu 9000", "note mtu-small: The MTU of dr.vx could be 7600 larger", ""},
		{"ethtool -K dr.vx gro off", "note offload-off: The offload rx-gro of dr.vx is off", "ethtool -K dr.vx gro on"}, // the remedy is an experiment
		{"ethtool -K dr.vx tx-checksum-ip-generic off", "note offload-off: The offload tx-checksum-ip-generic of dr.vx is off",
			"ethtool -K dr.vx tx-checksum-ip-generic on"},
	} {
		run(t, c.inject)
		found := look(t)
		if len(found) != 1 || !strings.HasPrefix(summary(found)[0], c.want) {
			t.Fatalf("after %s: found %q, want %q", c.inject, summary(found), c.want)
		}
		run(t, cmp.Or(c.heal, found[0].Do))
		none()
	}
}

// TestDropsInANamespace checks that only packets that a device drops within the window are found.
func TestDropsInANamespace(t *testing.T) {
	testenv.EnterNamespace(t)
	// A VXLAN device without a forwarding entry for the destination drops the packet.
	run(t, "ip link add dr0 type veth peer name dr1; ip addr add 10.9.0.1/24 dev dr0; ip link set dr0 up; ip link set dr1 up",
		"ip link add dr.vx type vxlan id 7 dev dr0 local 10.9.0.1 dstport 8472 nolearning; ip addr add 10.9.1.1/32 dev dr.vx; ip link set dr.vx up",
		"ip route add 10.9.2.0/24 dev dr.vx; ip neigh add 10.9.2.2 lladdr 02:00:00:00:00:02 dev dr.vx")
	conn, err := net.Dial("udp", "10.9.2.2:9") // the socket stays in this namespace, whichever thread writes
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
	testenv.Retry(t, 3, func() error {
		found := lookWhile(t, send)
		if len(found) != 1 || !strings.HasPrefix(summary(found)[0], "serious device-drops: dr.vx drops packets") {
			return fmt.Errorf("found %q", summary(found))
		}
		return nil
	})
}

// TestAWindowEndsWithItsContext checks that a user can stop a long look at once.
func TestAWindowEndsWithItsContext(t *testing.T) {
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	if err := sleep(ctx, time.Hour); !errors.Is(err, stopped) {
		t.Errorf("error %v", err)
	}
}

// look keeps the findings about a namespace. Those about the machine depend on its other load.
func look(t *testing.T) (found []Finding) {
	t.Helper()
	f, err := ReadFacts(t.Context(), 200*time.Millisecond, false)
	if err != nil {
		t.Fatal(err)
	}
	f.CPUs, f.Throttled, f.NeighbourFulls = nil, nil, nil
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

// TestEncapsulation checks how many bytes each kind of device adds, and which device sends its packets: the one that it is
// bound to, or else the one by which packets to its other end leave.
func TestEncapsulation(t *testing.T) {
	nic := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2}}
	links := map[string]netlink.Link{"eth0": nic, "eth1": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth1", Index: 3}}}
	remote := net.IPv4(10, 9, 0, 2)
	for name, c := range map[string]struct {
		link      netlink.Link
		under     string
		overhead  int
		tunnelled bool
	}{
		"VXLAN":                  {&netlink.Vxlan{VtepDevIndex: 2, SrcAddr: net.IPv4(10, 9, 0, 1)}, "eth0", 50, true},
		"VXLAN over IPv6":        {&netlink.Vxlan{VtepDevIndex: 2, SrcAddr: net.ParseIP("fd00::1")}, "eth0", 70, true},
		"external VXLAN":         {&netlink.Vxlan{VtepDevIndex: 2, FlowBased: true}, "", 0, true},
		"VXLAN by route":         {&netlink.Vxlan{SrcAddr: net.IPv4(10, 9, 0, 1), Group: remote}, "eth1", 50, true},
		"VXLAN of another":       {&netlink.Vxlan{VtepDevIndex: 9}, "", 0, true}, // in another network namespace
		"VXLAN to nowhere":       {&netlink.Vxlan{}, "", 0, true},
		"IPIP":                   {&netlink.Iptun{Link: 2}, "eth0", 20, true},
		"IPIP by route":          {&netlink.Iptun{Remote: remote}, "eth1", 20, true},
		"tunl0 of every machine": {&netlink.Iptun{LinkAttrs: netlink.LinkAttrs{Name: "tunl0"}, Remote: remote}, "", 0, false},
		"Geneve":                 {&netlink.Geneve{Remote: remote}, "eth1", 50, true},
		"Geneve over IPv6":       {&netlink.Geneve{Remote: net.ParseIP("fd00::2")}, "", 0, true}, // no route
		"gretap":                 {&netlink.Gretap{Link: 2}, "eth0", 38, true},
		"GRE":                    {&netlink.Gretun{Link: 2}, "eth0", 24, true},
		"6in4":                   {&netlink.Sittun{Link: 2}, "eth0", 20, true},
		"IP in IPv6":             {&netlink.Ip6tnl{Link: 2}, "eth0", 40, true},
		"WireGuard":              {&netlink.Wireguard{}, "eth1", 60, true}, // by the default route: its peers are not known
		"NIC":                    {nic, "", 0, false},
	} {
		via := func(to []net.IP) int {
			if len(to) == 0 || slices.ContainsFunc(to, remote.Equal) { // or the default route
				return 3
			}
			return 0
		}
		if under, overhead, tunnelled := encapsulation(c.link, links, via); under != c.under || overhead != c.overhead || tunnelled != c.tunnelled {
			t.Errorf("%s: %d bytes over %q, %v, want %d over %q, %v", name, overhead, under, tunnelled, c.overhead, c.under, c.tunnelled)
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
	there = slices.DeleteFunc(there, func(tool string) bool { return tool == "postgres" }) // is in a folder of its own, if it is installed
	if strings.Join(there, " ") != "ab iperf3" || !slices.Contains(missing, "sockperf") {
		t.Errorf("finds %q, and not %q", there, missing)
	}
}

// TestReversePathFilter checks that doctor finds packets that a strict filter drops because no route leads back
// to their address, and that the remedy in the finding is enough.
func TestReversePathFilter(t *testing.T) {
	testenv.EnterNamespace(t)
	other, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	run(t, "ip link add dr0 type veth peer name dr1; ip addr add 10.9.0.1/24 dev dr0; ip link set dr0 address 02:00:00:00:00:01 up",
		"sysctl -qw net.ipv4.conf.all.rp_filter=1")
	peer, err := netlink.LinkByName("dr1")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetNsFd(peer, int(other)); err != nil {
		t.Fatal(err)
	}
	var conn net.Conn
	if err := netns.Do(other, func() (err error) {
		out, err := exec.Command("sh", "-ec", `ip addr add 203.0.113.9/32 dev dr1; ip link set dr1 up; ip route add 10.9.0.0/24 dev dr1
			ip neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev dr1`).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		conn, err = net.Dial("udp", "10.9.0.1:9")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var found []Finding
	testenv.Retry(t, 3, func() error {
		found = lookWhile(t, func() { _, _ = conn.Write([]byte("x")) })
		if len(found) != 1 || !strings.HasPrefix(summary(found)[0], "serious rp-filter: Strict reverse path filtering drops packets") && !strings.HasPrefix(summary(found)[0], "warning rp-filter: ") {
			return fmt.Errorf("found %q", summary(found))
		}
		return nil
	})
	run(t, found[0].Do, "ip route add 203.0.113.0/24 dev lo") // a loose filter accepts any route
	if found := lookWhile(t, func() { _, _ = conn.Write([]byte("x")) }); len(found) > 0 {
		t.Errorf("after %s: %q", found[0].Do, summary(found))
	}
}

// lookWhile looks while it calls do every millisecond.
func lookWhile(t *testing.T, do func()) []Finding {
	t.Helper()
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
				do()
			}
		}
	}()
	defer func() {
		close(stop)
		<-done
	}()
	return look(t)
}

// TestThrottledCgroup checks that doctor finds any cgroup of the machine whose CPU limit throttles it.
func TestThrottledCgroup(t *testing.T) {
	testenv.NeedRoot(t)
	group, limit := "/sys/fs/cgroup/cpu/slipstream-doctor-test", "echo 5000 > cpu.cfs_quota_us"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		group, limit = "/sys/fs/cgroup/slipstream-doctor-test", "echo +cpu > ../cgroup.subtree_control; echo '5000 100000' > cpu.max"
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skipf("no cgroup for CPUs can be made: %v", err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, 5*time.Second, "the end of the cgroup", func() string {
			if err := os.Remove(group); err != nil {
				return err.Error()
			}
			return ""
		})
	})
	busy := exec.Command("sh", "-ec", "cd "+group+"; "+limit+"; echo $$ > cgroup.procs; echo; while :; do :; done")
	out, err := busy.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := busy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = busy.Process.Kill()
		_ = busy.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the limit is not in force: %v", err)
	}
	testenv.Retry(t, 3, func() error { // the group may not get its share of a busy machine
		f, err := ReadFacts(t.Context(), 500*time.Millisecond, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range throttled(f) {
			for _, e := range found.Evidence {
				if strings.Contains(e.From, "/slipstream-doctor-test") {
					return nil
				}
			}
		}
		return fmt.Errorf("found %+v of %+v", throttled(f), f.Throttled)
	})
}

// TestParent checks that doctor knows the device below a macvlan, and takes neither the peer of a veth nor the device below a
// VXLAN device for one.
func TestParent(t *testing.T) {
	testenv.EnterNamespace(t)
	run(t, "ip link add dr0 type veth peer name dr1; ip link add link dr0 name dr.mv type macvlan mode bridge; ip link add dr.vx type vxlan id 7 dev dr0 dstport 8472")
	f, err := ReadFacts(t.Context(), time.Millisecond, false)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"dr0": "", "dr1": "", "dr.mv": "dr0", "dr.vx": ""} {
		if d, ok := f.device(name); !ok || d.Parent != want {
			t.Errorf("%s: parent %q, want %q", name, d.Parent, want)
		}
	}
}
