package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/testenv"
)

// leaving is a /proc in which process 7 changes its network namespace when one of its files is read.
type leaving struct {
	fstest.MapFS
	at string
}

func (f leaving) ReadFile(name string) ([]byte, error) {
	if name == f.at {
		f.MapFS["7/ns/net"] = &fstest.MapFile{Data: []byte("net:[1]"), Mode: fs.ModeSymlink}
	}
	return f.MapFS.ReadFile(name)
}

// TestPodOfAPassingProcess checks that counters are not taken for those of a pod if the process by which doctor found the pod
// is in another network namespace by then, or changes it meanwhile.
func TestPodOfAPassingProcess(t *testing.T) {
	for _, c := range []struct {
		in, leaves string
		counts     int
	}{{"net:[2]", "", 1}, {"net:[1]", "", 0}, {"net:[2]", "7/net/snmp", 0}, {"net:[2]", "7/net/stat/nf_conntrack", 0}} {
		l := looker{proc: leaving{fstest.MapFS{
			"7/ns/net":   &fstest.MapFile{Data: []byte(c.in), Mode: fs.ModeSymlink},
			"7/net/snmp": &fstest.MapFile{Data: []byte("Udp: RcvbufErrors\nUdp: 14649982\n")},
		}, c.leaves}}
		if got := l.podStack(pod{process: "7", ns: "net:[2]"}); len(got) != c.counts {
			t.Errorf("in %s, leaves at %q: %v", c.in, c.leaves, got)
		}
	}
}

// TestQdiscsOfQueues checks that doctor reports the queue of a NIC that drops, and not the mq above it, which counts the same
// packets again. Both have the handle 0 if the kernel attached them.
func TestQdiscsOfQueues(t *testing.T) {
	at := func(drops uint32) (all []netlink.Qdisc) {
		counts := func(sent, dropped uint32) *netlink.QdiscStatistics {
			return &netlink.QdiscStatistics{Basic: &netlink.GnetStatsBasic{Packets: sent}, Queue: &netlink.GnetStatsQueue{Drops: dropped}}
		}
		return append(all,
			&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: 2, Parent: netlink.HANDLE_ROOT, Statistics: counts(100*drops, drops)}, QdiscType: "mq"},
			&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: 2, Parent: 1, Statistics: counts(50*drops, drops)}, QdiscType: "fq_codel"},
			&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: 2, Parent: 2, Statistics: counts(50*drops, 0)}, QdiscType: "fq_codel"})
	}
	if got := qdiscsSince(2, at(1), at(21)); len(got) != 1 || got[0].Kind != "fq_codel" || got[0].Dropped != 20 {
		t.Errorf("%+v", got)
	}
}

// TestEmulates tells netem from other queueing disciplines, and from those of other devices.
func TestEmulates(t *testing.T) {
	all := []netlink.Qdisc{netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: 2}, netlink.NetemQdiscAttrs{}), &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: 3}}}
	for device, want := range map[int]bool{1: false, 2: true, 3: false} {
		if got := emulates(device, all); got != want {
			t.Errorf("device %d: %v", device, got)
		}
	}
}

// TestNotForwarding checks that only the forwarding of a family counts that the device uses, and that of IPv4 if none is known.
func TestNotForwarding(t *testing.T) {
	off := &fstest.MapFile{Data: []byte("0\n")}
	l := looker{proc: fstest.MapFS{"sys/net/ipv4/conf/cni0/forwarding": off, "sys/net/ipv6/conf/cni0/forwarding": off}}
	const four, six = "/proc/sys/net/ipv4/conf/cni0/forwarding", "/proc/sys/net/ipv6/conf/cni0/forwarding"
	for _, c := range []struct {
		uses families
		want []string
	}{
		{families{}, []string{four}}, {families{four: true}, []string{four}}, {families{six: true}, []string{six}},
		{families{}.with(netip.MustParseAddr("10.0.0.1")).with(netip.MustParseAddr("fd00::1")), []string{four, six}},
	} {
		if got := l.notForwarding("cni0", c.uses); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.uses, got, c.want)
		}
	}
}

// TestStillUnresolved checks that a neighbour which is being asked for a moment, at one of two readings, counts as known.
func TestStillUnresolved(t *testing.T) {
	a, b, c := netip.MustParseAddr("10.244.2.0"), netip.MustParseAddr("10.244.3.0"), netip.MustParseAddr("10.244.4.0")
	first := tables{unresolved: map[int][]netip.Addr{1: {a, b}, 2: {a}}}
	first.stillUnresolved(tables{unresolved: map[int][]netip.Addr{1: {b, c}}})
	if !slices.Equal(first.unresolved[1], []netip.Addr{b}) || len(first.unresolved[2]) > 0 {
		t.Errorf("%v", first.unresolved)
	}
}

// TestManagers checks which devices doctor takes for managed, by the files of NetworkManager and systemd-networkd. Only a
// program in the same network namespace counts: indexes mean nothing in another.
func TestManagers(t *testing.T) {
	link := func(to string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }
	text := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	l := looker{proc: fstest.MapFS{
		"thread-self/ns/net": link("net:[1]"),
		"7/comm":             text("NetworkManager\n"), "7/ns/net": link("net:[1]"),
		"7/root/run/NetworkManager/devices/3": text("[device]\nmanaged=true\nconnection-uuid=1\n"),
		"7/root/run/NetworkManager/devices/4": text("[device]\nmanaged=false\n"),
		"8/comm":                              text("systemd-network\n"), "8/ns/net": link("net:[1]"),
		"8/root/run/systemd/netif/links/5": text("# This is private data.\nADMIN_STATE=configured\nNETWORK_FILE=/etc/systemd/network/all.network\n"),
		"8/root/run/systemd/netif/links/6": text("ADMIN_STATE=unmanaged\n"),
		"9/comm":                           text("NetworkManager\n"), "9/ns/net": link("net:[2]"),
		"9/root/run/NetworkManager/devices/9": text("[device]\nmanaged=true\n"),
	}}
	all := l.managers()
	if len(all) != 2 {
		t.Fatalf("found %+v", all)
	}
	got := make(map[int]string)
	for _, m := range all {
		for index := range 10 {
			if file := l.manages(m, index); file != "" {
				got[index] = m.name + " " + file
			}
		}
	}
	if len(got) != 2 || got[3] != "NetworkManager /run/NetworkManager/devices/3" || got[5] != "systemd-networkd /run/systemd/netif/links/5" {
		t.Errorf("managed: %v", got)
	}
}

// TestVRFOf checks whose routes the packets of a device take: those of the VRF of a NIC, or of the bridge or bond that has the NIC.
func TestVRFOf(t *testing.T) {
	links := make(map[string]netlink.Link)
	for _, l := range []netlink.Link{
		&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2}},
		&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth1", Index: 3, MasterIndex: 5}},
		&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth2", Index: 4, MasterIndex: 6}},
		&netlink.Vrf{LinkAttrs: netlink.LinkAttrs{Name: "blue", Index: 5}},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", Index: 6, MasterIndex: 5}},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br1", Index: 7}},
		&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth3", Index: 8, MasterIndex: 7}},
	} {
		links[l.Attrs().Name] = l
	}
	for device, want := range map[int]int{2: 0, 3: 5, 4: 5, 5: 5, 6: 5, 7: 0, 8: 0, 9: 0} {
		if got := vrfOf(device, links); got != want {
			t.Errorf("device %d: %d, want %d", device, got, want)
		}
	}
}

// noStat is a /proc of a kernel without CONFIG_NF_CONNTRACK_PROCFS.
type noStat struct{ fs.FS }

func (f noStat) ReadFile(name string) ([]byte, error) {
	if strings.HasSuffix(name, "stat/nf_conntrack") {
		return nil, fs.ErrNotExist
	}
	return fs.ReadFile(f.FS, name)
}

// TestConntrackWithoutAFile checks that the counters of conntrack are read where no file shows them, in the network namespace of this
// thread and in that of another process, and that they are those of the file.
func TestConntrackWithoutAFile(t *testing.T) {
	n := newNode(t)
	const track = "nft 'add table ip f; add chain ip f p { type filter hook prerouting priority 0; }; add rule ip f p ct state new counter'"
	n.sh(track + "; in_other " + track)
	bad := append([]byte{0x9c, 0x40, 0x21, 0x18, 0, 108, 0x12, 0x34}, make([]byte, 100)...) // a UDP checksum
	here := n.raw("udp", bad)
	there, err := net.Dial("ip4:udp", "10.77.0.2")
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	for range 7 {
		here()
	}
	for range 9 {
		if _, err := there.Write(bad); err != nil {
			t.Fatal(err)
		}
	}
	proc := os.DirFS(procDir)
	for process, want := range map[string]uint64{own: 7, strconv.Itoa(n.other): 9} {
		testenv.Retry(t, 3, func() error {
			file, asked := make(map[string]uint64), make(map[string]uint64)
			if err := errors.Join(looker{proc: proc}.conntrack(process, file), looker{proc: noStat{proc}}.conntrack(process, asked)); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"invalid", "insert_failed", "drop", "early_drop"} {
				name = "nf_conntrack." + name
				if _, known := asked[name]; !known || asked[name] != file[name] {
					return fmt.Errorf("%s of %s: %d, and %d in the file", name, process, asked[name], file[name])
				}
			}
			if got := asked["nf_conntrack.invalid"]; got != want {
				return fmt.Errorf("%d invalid packets of %s, want %d", got, process, want)
			}
			return nil
		})
	}
}
