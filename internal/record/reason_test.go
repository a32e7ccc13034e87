package record

import "testing"

// TestSplitReason checks which packets took the fast path, and of which kind they were.
func TestSplitReason(t *testing.T) {
	for reason, want := range map[string]struct {
		name, kind string
		fast       bool
	}{
		"fast-out-vxlan": {FastOut, "vxlan", true},
		"fast-in-local":  {FastIn, "local", true},
		"fast-out":       {FastOut, "", true}, // of an older result
		"no-flow":        {"no-flow", "", false},
		"":               {},
	} {
		if name, kind, fast := SplitReason(reason); name != want.name || kind != want.kind || fast != want.fast {
			t.Errorf("%q: %q %q %t", reason, name, kind, fast)
		}
	}
}
