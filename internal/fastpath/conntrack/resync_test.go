//go:build linux

package conntrack

import (
	"testing"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/testenv"
)

// TestResyncAfterFailure checks that a failure to attach drop_resync, here because another one is attached, is not taken for a lack
// of support: the next attempt succeeds.
func TestResyncAfterFailure(t *testing.T) {
	testenv.EnterNamespace(t)
	var r resyncs
	for _, when := range []string{"at first", "later"} {
		other, err := datapath.DropResync()
		if err != nil {
			t.Skip("the kernel has no eBPF for netfilter: ", err)
		}
		if err := r.try(); err == nil {
			t.Fatalf("%s: two programs are attached", when)
		}
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
		if err := r.try(); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if err := r.close(); err != nil {
			t.Fatal(err)
		}
	}
}
