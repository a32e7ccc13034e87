//go:build linux

package lab

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
)

// TestLayoutIsUnique checks that in the largest lab, names and addresses are unique, and names fit the kernel's limit.
func TestLayoutIsUnique(t *testing.T) {
	for _, shape := range overlay.Shapes() {
		c := config(strings.Repeat("x", 20))
		c.Nodes, c.Pods, c.Shape = 16, 64, shape
		seen := make(map[string]string)
		once := func(kind string, value any, whose string) {
			key := kind + " " + fmt.Sprint(value)
			if other, ok := seen[key]; ok {
				t.Errorf("%s is of %s and of %s", key, other, whose)
			}
			seen[key] = whose
		}
		for _, n := range layout(c) {
			name := n.Place.Name
			once("namespace", n.NS, name)
			once("address", n.Place.IPv4, name)
			once("address", n.Place.IPv6, name)
			once("address", n.Pods4.Addr(), name)
			once("address", n.Pods6.Addr(), name)
			once("address", network.Plus(n.Pods4.Addr(), 1), name)
			once("address", network.Plus(n.Pods6.Addr(), 1), name)
			once("mac", n.MAC, name)
			once("mac", n.VTEP4, name)
			once("mac", n.VTEP6, name)
			for _, p := range n.Pods {
				once("namespace", p.NS, p.Place.Name)
				once("address", p.Place.IPv4, p.Place.Name)
				once("address", p.Place.IPv6, p.Place.Name)
				once("mac", p.MAC, p.Place.Name)
				once("veth on "+name, p.Veth, p.Place.Name)
				if len(p.Veth) > 15 {
					t.Errorf("device name %s is longer than 15", p.Veth)
				}
				if !n.Pods4.Contains(p.Place.IPv4) || !n.Pods6.Contains(p.Place.IPv6) {
					t.Errorf("%s is at %s and %s, outside of %s and %s", p.Place.Name, p.Place.IPv4, p.Place.IPv6, n.Pods4, n.Pods6)
				}
			}
		}
	}
}

func TestPlaces(t *testing.T) {
	c := config("x")
	c.Pods = 1
	l := &Lab{state: &state{Config: c, CPUs: divide(coresOf(1, 0, 1, 2, 3), 2)}}
	a := netip.MustParseAddr
	want := []place.Place{
		{Name: "node0", Kind: place.Node, Node: "node0", IPv4: a("198.18.0.1"), IPv6: a("fd73:6c69:7000::1"), CPUs: "0-1", IRQCPUs: "1", Cores: []int{0, 1}},
		{Name: "node1", Kind: place.Node, Node: "node1", IPv4: a("198.18.0.2"), IPv6: a("fd73:6c69:7000::2"), CPUs: "2-3", IRQCPUs: "3", Cores: []int{2, 3}},
		{Name: "node0/pod0", Kind: place.Pod, Node: "node0", IPv4: a("10.244.0.2"), IPv6: a("fd73:6c69:7001::2"), CPUs: "0-1", IRQCPUs: "1"},
		{Name: "node1/pod0", Kind: place.Pod, Node: "node1", IPv4: a("10.244.1.2"), IPv6: a("fd73:6c69:7001:1::2"), CPUs: "2-3", IRQCPUs: "3"},
	}
	if diff := cmp.Diff(want, l.Places(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
	if got, want := l.Placement(), "Each node has its own CPUs (node0 has 0-1, node1 has 2-3); the last one receives the NIC's packets, by RPS in place of an interrupt."; got != want {
		t.Errorf("placement is %q, want %q", got, want)
	}
	l.state.CPUs = divide(coresOf(1, 0, 1), 2)
	if got := l.Places()[3]; got.CPUs != "0-1" || got.IRQCPUs != "" {
		t.Errorf("where nodes share CPUs, a pod has %q, interrupts %q", got.CPUs, got.IRQCPUs)
	}
	if got := l.Places()[0]; !got.Shared || len(got.Cores) != 2 || got.Affinity != "" {
		t.Errorf("where nodes share CPUs, one is %+v", got)
	}
	if got, want := l.Placement(), "The nodes share CPUs 0-1, "; !strings.HasPrefix(got, want) {
		t.Errorf("placement is %q, want it to begin %q", got, want)
	}
	l.state.CPUs = divide(coresOf(1, 3), 2)
	if got, want := l.Placement(), "The nodes share CPU 3, so both ends of a pair run on it."; got != want {
		t.Errorf("placement is %q, want %q", got, want)
	}
	l.state.CPUs = divide(coresOf(4, 0, 1, 2, 3), 2)
	if got, want := l.Placement(), " Some nodes have threads of the same core, "; !strings.Contains(got, want) {
		t.Errorf("placement is %q, want it to contain %q", got, want)
	}
}

func TestValidate(t *testing.T) {
	for what, change := range map[string]func(*Config){
		"no name":       func(c *Config) { c.Name = "" },
		"long name":     func(c *Config) { c.Name = strings.Repeat("x", 21) },
		"path":          func(c *Config) { c.Name = "../x" },
		"one node":      func(c *Config) { c.Nodes = 1 },
		"17 nodes":      func(c *Config) { c.Nodes = 17 },
		"65 pods":       func(c *Config) { c.Pods = 65 },
		"negative pods": func(c *Config) { c.Pods = -1 },
		"shape":         func(c *Config) { c.Shape = "cilium" },
		"offload":       func(c *Config) { c.NIC.Offload = "some" },
		"small MTU":     func(c *Config) { c.NIC.MTU = 1349 },
		"large MTU":     func(c *Config) { c.NIC.MTU = 9001 },
		"rate":          func(c *Config) { c.NIC.Rate = "fast" },
	} {
		c := config("x")
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&c)
		if err := c.Validate(); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}

// TestAbandoned: a list says which labs a process has left behind, as after kill -9.
func TestAbandoned(t *testing.T) {
	dir := t.TempDir()
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]state{
		"left": {PID: ended.Process.Pid}, "kept": {PID: ended.Process.Pid, Keep: true}, "used": {PID: os.Getpid()},
	} {
		s.Config = config(name)
		s.Up, s.CPUs = true, make([]nodeCPUs, s.Config.Nodes)
		if err := s.write(dir); err != nil {
			t.Fatal(err)
		}
	}
	all, err := List(dir)
	if err != nil || len(all) != 3 {
		t.Fatalf("%+v, %v", all, err)
	}
	for _, l := range all {
		if l.Abandoned != (l.Name == "left") {
			t.Errorf("%s is abandoned: %t", l.Name, l.Abandoned)
		}
	}
}
