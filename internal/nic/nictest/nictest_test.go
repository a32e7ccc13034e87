package nictest

import (
	"testing"

	"slipstream.dev/internal/nic"
)

// FuzzParse: any fixture that can be parsed gives facts, and no share above 1.
func FuzzParse(f *testing.F) {
	for _, name := range Names(f) {
		text, err := fixtures.ReadFile("testdata/" + name + ".yaml")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, uint64(3))
	}
	f.Fuzz(func(t *testing.T, text []byte, more uint64) {
		m, err := Parse(text)
		if err != nil {
			return
		}
		before := m.Source().Read()
		for name, n := range nic.Facts(before) {
			if n.String() == "" || name == "" {
				t.Errorf("nothing is said of %q", name)
			}
		}
		for _, a := range m.Ethtool {
			for name := range a.Counters {
				a.Counters[name] += more
			}
		}
		for _, u := range nic.CountUse(before, m.Source().ReadAgain(before)) {
			if u.VFRxPackets > u.RxPackets || u.VFTxPackets > u.TxPackets {
				t.Errorf("%+v: more packets took the VF than there were", u)
			}
		}
		again, err := nic.Capture(m.Source()).YAML()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(again); err != nil {
			t.Errorf("what was captured cannot be read: %v\n%s", err, again)
		}
	})
}
