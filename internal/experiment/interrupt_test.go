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
