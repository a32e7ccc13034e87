package cli

import (
	"strings"
	"testing"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
)

// TestPrintFastpath checks that the status tells what is accelerated, by kind.
func TestPrintFastpath(t *testing.T) {
	var w strings.Builder
	if err := printFastpath(&w, accel.Fastpath{
		Place: "node0", Holder: journal.Holder{Owner: "agent", PID: 7}, Hooks: []string{"eth0/decap_nic"},
		Connections: 5, Fast: 3, Kinds: map[string]int{"vxlan": 1, "routed": 0, "local": 2},
		Packets: map[string]uint64{"fast-out-vxlan": 10, "fast-in-local": 200, "nat": 30, "forged": 0},
	}); err != nil {
		t.Fatal(err)
	}
	const want = `fast path of node0, run by agent (process 7)
  connections: 5 known, 3 accelerated (2 local, 1 vxlan)
  programs: eth0/decap_nic
  PACKETS  REASON
  200      fast-in-local
  30       nat
  10       fast-out-vxlan
`
	if w.String() != want {
		t.Errorf("got\n%swant\n%s", w.String(), want)
	}
}
