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
