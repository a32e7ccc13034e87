//go:build linux && soak

package cluster

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/azure/azuretest"
	"slipstream.dev/internal/place/lab/network"
)

// Each kind of fault interrupts a migration, and backing out, at every request to Azure.
func TestSoakMigrateInterrupted(t *testing.T) {
	c := own(t, Config{})
	for name, fault := range azuretest.Interruptions {
		t.Run(name, func(t *testing.T) { migrateAndBack(t, c, fault) })
	}
}

// The measurement before the first cordon stops a migration to nodes whose NICs have half the rate. It lets a migration
// continue to nodes whose NICs have twice the rate.
func TestSoakMigrateProof(t *testing.T) {
	t.Setenv("PATH", filepath.Dir(program)+":"+os.Getenv("PATH"))
	const mega = 1_000_000
	for name, tt := range map[string]struct {
		old, fresh uint64 // bit/s
		code       int
		says       string
	}{
		"half the rate":  {old: 400 * mega, fresh: 200 * mega, code: 1, says: "netan is not proven faster than net, which is unchanged"},
		"twice the rate": {old: 200 * mega, fresh: 400 * mega, says: "evicting pod"},
	} {
		t.Run(name, func(t *testing.T) {
			c := own(t, Config{Nodes: 3})
			s := newSubscription(t, c, []string{"node2"}, []string{"node0", "node1"})
			s.joined = func(n *Node) error { return limit(n, tt.fresh) }
			for _, node := range []string{"node0", "node1"} {
				if err := limit(c.Node(node), tt.old); err != nil {
					t.Fatal(err)
				}
			}
			fewest := web(t, c)
			before, on := poolNodes(t, c), webNodes(t, c)

			dir := t.TempDir()
			code, said := s.migrate(t.Context(), io.Discard, dir, "--blocks=4")
			if code != tt.code || !strings.Contains(said, tt.says) {
				t.Fatalf("exit %d:\n%s", code, said)
			}
			if strings.Contains(said, "run the same command again") { // repeating the command would fail again
				t.Errorf("it says:\n%s", said)
			}
			if tt.code != 0 {
				if got := webNodes(t, c); got != on {
					t.Errorf("stopped: the pods are on %s, were on %s", got, on)
				}
				if got, want := poolNodes(t, c), "netan-0 netan \nnetan-1 netan \n"+before; got != want {
					t.Errorf("stopped: nodes are\n%s\nwant\n%s", got, want)
				}
			} else if got := webNodes(t, c); strings.Contains(got, "node") {
				t.Errorf("the pods are on %s", got)
			}
			if code, said := s.migrate(t.Context(), io.Discard, dir, "--back-out"); code != 0 {
				t.Fatalf("back out: exit %d:\n%s", code, said)
			}
			if got := poolNodes(t, c); got != before {
				t.Errorf("backed out: nodes are\n%s\nnot\n%s", got, before)
			}
			if n := fewest(); n < webHealthy {
				t.Errorf("at one time only %d pods were Ready, and the budget demands %d", n, webHealthy)
			}
		})
	}
}

// limit limits what a node's NIC sends, in bit/s.
func limit(n *Node, rate uint64) error {
	return onNetns(n.Netns(), func() error {
		nic, err := netlink.LinkByName(nicName)
		if err != nil {
			return fmt.Errorf("find the NIC of %s: %w", n.name, err)
		}
		attrs := netlink.QdiscAttrs{LinkIndex: nic.Attrs().Index, Handle: netlink.MakeHandle(2, 0), Parent: netlink.HANDLE_ROOT} // 1: belongs to the replaced qdisc
		return netlink.QdiscReplace(network.TBF(attrs, rate/8))
	})
}
