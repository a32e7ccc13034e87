package cli

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
)

// TestCapture: the output of capture reads back as the facts of this machine.
func TestCapture(t *testing.T) {
	out, _ := succeed(t, "capture")
	m, err := nictest.Parse([]byte(out))
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got := map[string]string{}
	for name, n := range nic.Facts(m.Source().Read()) {
		got[name] = n.String()
	}
	if diff := cmp.Diff(m.Facts, got); diff != "" {
		t.Errorf("facts (-printed +read):\n%s", diff)
	}
}
