//go:build linux

package policies

import (
	"fmt"
	"net/netip"
	"testing"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/golden"
)

// TestRules compares the rules for two policies with golden files.
func TestRules(t *testing.T) {
	nodes := make([]network.Node, 2)
	for i := range nodes {
		nodes[i].Pods = []network.Pod{{Place: place.Place{
			IPv4: netip.AddrFrom4([4]byte{10, 244, byte(i), 2}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd73:6c69:7001:%d::2", i)),
		}}}
	}
	nodes[1].Pods[0].Backends = map[int]netip.Prefix{4: netip.MustParsePrefix("10.136.1.0/24")}
	for _, mode := range []string{spec.PolicyIPTables, spec.PolicyIPSet, spec.PolicyNFTables} {
		c := Config{Mode: mode, Count: 2}
		for i, got := range c.rules(nodes, 1) {
			golden.Compare(t, fmt.Sprintf("testdata/%s%d.txt", mode, 4+2*i), string(got.Text))
		}
	}
}
