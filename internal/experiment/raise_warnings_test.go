package experiment

import (
	"strings"
	"testing"

	"slipstream.dev/internal/record"
)

func TestInterruptWarnings(t *testing.T) {
	n := &network{facts: []record.Node{{InterruptSeconds: 2e-6}, {}}}
	if got := n.interruptWarnings(); len(got) != 0 {
		t.Errorf("2 µs: %v", got)
	}
	n.facts[1].InterruptSeconds = 14e-6
	got := n.interruptWarnings()
	if len(got) != 1 || got[0].Code != record.WarnInterrupts || !strings.Contains(got[0].Message, " 14 µs") {
		t.Errorf("14 µs: %v", got)
	}
}

func TestHeldWarnings(t *testing.T) {
	n := &network{facts: []record.Node{{Name: "node0"}, {Name: "node1", Held: []string{"4 settings by agent"}}}}
	got := n.heldWarnings()
	if len(got) != 1 || got[0].Code != record.WarnHeld || !strings.HasPrefix(got[0].Message, "node1 is accelerated already (4 settings by agent): every variant") {
		t.Errorf("%v, want one of node1", got)
	}
}

func TestChangeWarnings(t *testing.T) {
	for _, c := range []struct {
		perSecond, made int
		seconds         float64
		warns           bool
	}{{0, 0, 2, false}, {10, 20, 2, false}, {10, 9, 2, false}, {10, 8, 2, true}, {1, 0, 1, false}, {1, 0, 3, true}} {
		got := changeWarnings(c.perSecond, c.made, c.seconds)
		if (len(got) > 0) != c.warns {
			t.Errorf("%d in %g s of %d a second: %v", c.made, c.seconds, c.perSecond, got)
		}
	}
}

// TestVFWarnings: a trial warns of a virtual function that disappeared, or that was up and
// carried nothing. It does not warn of one that carried everything, is absent, or belongs to a
// NIC without the trial's traffic.
func TestVFWarnings(t *testing.T) {
	use := func(change string, up bool, packets, vf uint64) record.VFUse {
		return record.VFUse{Place: "a", NIC: "eth0", VF: "eth1", RxPackets: packets, VFRxPackets: vf, Change: change, Up: up}
	}
	unknown := record.VFUse{Place: "a", NIC: "eth0", VF: "eth1", Change: record.VFInterrupted, Up: true, Unknown: "its counters were reset"}
	for name, c := range map[string]struct {
		nics []record.VFUse
		want string
	}{
		"all take it":       {[]record.VFUse{use("", true, 1000, 990)}, ""},
		"absent":            {[]record.VFUse{use("", false, 1000, 0)}, ""},
		"withdrawn":         {[]record.VFUse{use(record.VFWithdrawn, false, 1000, 400)}, "vf-withdrawn: the virtual function eth1 of eth0 on a was withdrawn: 40% of the packets took it"},
		"counters reset":    {[]record.VFUse{unknown}, "vf-withdrawn: the virtual function eth1 of eth0 on a was interrupted: how many packets took it is not known, as its counters were reset"},
		"idle":              {[]record.VFUse{use("", true, 1000, 3)}, "vf-idle: the virtual function eth1 of eth0 on a was up, but idle: 0.3% of the packets took it"},
		"without packets":   {[]record.VFUse{use("", true, 0, 0)}, ""},
		"another NIC's job": {[]record.VFUse{use("", true, 90, 0), use("", true, 1000, 1000)}, ""},
	} {
		var got []string
		for _, w := range vfWarnings(c.nics) {
			got = append(got, w.Code+": "+w.Message)
		}
		if text := strings.Join(got, "\n"); text != c.want {
			t.Errorf("%s: %q, want %q", name, text, c.want)
		}
	}
}
