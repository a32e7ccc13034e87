package cli

import (
	"strings"
	"testing"
	"unicode/utf8"

	"slipstream.dev/internal/doctor"
)

// TestDiagnosisFitsTerminal: facts and findings break between words on a terminal. The command to copy does not break, and
// nothing does elsewhere.
func TestDiagnosisFitsTerminal(t *testing.T) {
	long := strings.TrimSpace(strings.Repeat("eight letters ", 12))
	d := diagnosis{WindowSeconds: 1, Facts: []fact{{Evidence: doctor.Evidence{From: "not installed", Value: long}}}, Findings: []doctor.Finding{{
		Where: "a", Rule: "mtu-too-large", Severity: doctor.Serious, What: long, Cost: long, Do: "slipstream " + long,
		Evidence: []doctor.Evidence{{From: "/sys/class/net/eth0/mtu", Value: long}},
	}}}
	for _, columns := range []int{0, 60, 80} {
		var text strings.Builder
		if err := writeDiagnosis(&text, d, columns); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text.String()) {
			line = strings.TrimSuffix(line, "\n")
			if n := utf8.RuneCountInString(line); columns > 0 && n > columns && line != "  do     slipstream "+long {
				t.Errorf("%d columns of %d: %s", n, columns, line)
			}
		}
		whole := strings.Join(strings.Fields(text.String()), " ")
		for _, want := range []string{"not installed " + long, "SERIOUS: a: " + long + " (mtu-too-large)", "/sys/class/net/eth0/mtu: " + long, "costs " + long, "do slipstream " + long} {
			if !strings.Contains(whole, want) {
				t.Errorf("%d columns: it lacks %q:\n%s", columns, want, text.String())
			}
		}
		if columns == 0 && strings.Count(text.String(), "\n") != 6 {
			t.Errorf("where the width is unknown, lines are broken:\n%s", text.String())
		}
	}
}

// TestPodMTUs checks that a path to a pod gets the MTU of that pod, also from a node, and a path to a node none.
func TestPodMTUs(t *testing.T) {
	node, a, b := &machine{name: "node"}, &machine{name: "pod a", pod: true}, &machine{name: "pod b", pod: true}
	ends := [][2]*machine{{node, node}, {a, b}, {b, a}, {node, a}}
	paths := []doctor.Path{{Sent: doctor.Sent{DeviceMTU: 1500}}, {Sent: doctor.Sent{DeviceMTU: 1450}}, {Sent: doctor.Sent{DeviceMTU: 1400}}, {Sent: doctor.Sent{DeviceMTU: 1500}}}
	addPodMTUs(ends, paths)
	for i, want := range []int{0, 1400, 1450, 1450} {
		if paths[i].PodMTU != want {
			t.Errorf("path %d: %d, want %d", i, paths[i].PodMTU, want)
		}
	}
}
