//go:build linux

package hosts_test

import (
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// diagnose runs doctor on hosts. It returns the exit code, and a line for each finding in or between the hosts' network
// namespaces, but not for findings about the machine on which they run.
func (w *world) diagnose(t *testing.T, args ...string) (code int, found []string) {
	t.Helper()
	p := w.start(t, append([]string{"doctor", "--for", "100ms", "--format", "json"}, args...)...)
	text, err := p.end()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	var d struct {
		Facts    []struct{ Where, From, Value string }
		Findings []struct{ Where, Rule, Severity, What string }
	}
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatalf("exit code %d: %v\n%s", code, err, text)
	}
	for _, f := range d.Findings {
		if !slices.Contains([]string{"backlog-full", "flow-limit", "squeezed", "throttled"}, f.Rule) {
			found = append(found, f.Severity+" "+f.Rule+" "+f.Where+": "+f.What)
		}
	}
	return code, found
}

// TestDoctor checks that doctor finds nothing on and between two healthy hosts, finds each fault and nothing else, and leaves
// nothing behind.
func TestDoctor(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	both := "hosts:root@10.9.0.1,root@10.9.0.2"
	b := nodes[1]
	// doctor also examines the port of a VXLAN device, with a raw socket.
	b.in("ip", "link", "add", "vx", "mtu", "1300", "type", "vxlan", "id", "7", "dev", "eth0", "local", "10.9.0.2", "dstport", "8472")
	b.in("ip", "link", "set", "vx", "up")
	if _, found := w.diagnose(t, both, "--probe"); len(found) > 0 {
		t.Fatalf("without a fault: %q", found)
	}
	for _, c := range []struct {
		name, inject, mend string
		want               []string
	}{
		{
			"the port of an overlay", "iptables -A INPUT -p udp --dport 8472 -j DROP", "iptables -F",
			[]string{"serious vxlan-blocked 10.9.0.1 to 10.9.0.2: UDP port 8472"},
		},
		{
			"TCP", "iptables -A INPUT -p tcp --dport 30000: --syn -j REJECT", "iptables -F",
			[]string{"serious port-blocked 10.9.0.1 to 10.9.0.2: No traffic reaches 10.9.0.2 by tcp"},
		},
		{
			"datagrams", "iptables -A INPUT -p udp -j DROP", "iptables -F",
			[]string{"serious port-blocked 10.9.0.1 to 10.9.0.2: No traffic reaches 10.9.0.2 by udp", "serious port-blocked 10.9.0.2 to 10.9.0.1: No traffic reaches 10.9.0.1 by udp"},
		},
		{
			"the way's MTU", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500", // of 10.9.0.1's other end
			[]string{"serious path-mtu 10.9.0.1 to 10.9.0.2: Packets of more than 14"},
		},
	} {
		b.in("sh", "-ec", c.inject)
		code, found := w.diagnose(t, both)
		if len(found) != len(c.want) || code != 3 && strings.HasPrefix(c.want[0], "serious") {
			t.Errorf("%s: exit code %d, found %q, want %q", c.name, code, found, c.want)
		}
		for i := range min(len(found), len(c.want)) {
			if !strings.HasPrefix(found[i], c.want[i]) {
				t.Errorf("%s: found %q, want %q", c.name, found[i], c.want[i])
			}
		}
		b.in("sh", "-ec", c.mend)
	}
	// If one host cannot be examined, the other still is.
	b.stop()
	code, found := w.diagnose(t, both)
	if code != 3 || len(found) != 1 || !strings.HasPrefix(found[0], "serious host-unfit 10.9.0.2: ") {
		t.Errorf("a host that is down: exit code %d, found %q", code, found)
	}
	clean(t, nodes[:1])
}
