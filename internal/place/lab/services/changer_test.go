//go:build linux

package services

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// TestBatchesOfNFTables checks that a batch of nftables flushes and deletes only existing chains, and keeps those of all
// backends. Services have fewer backends than a batch has changes, so a backend may come and go within a batch.
func TestBatchesOfNFTables(t *testing.T) {
	config := Config{Mode: spec.ServiceNFTables, Backends: 2, Total: 5, OtherBackends: 2, Servers: []place.Position{{Node: 1}}, Transports: []place.Transport{
		{IP: 4, Protocol: "tcp"}, {IP: 4, Protocol: "udp"}, {IP: 6, Protocol: "tcp"},
	}}
	nodes := twoNodes(1)
	config.Assign(nodes)
	c := config.Changer(nodes)
	chains := make(map[string]bool) // whether the chain was last flushed, by family and name
	run := func(text []byte) {
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if f[1] != "chain" {
				continue
			}
			name := f[2] + " " + f[4]
			if _, ok := chains[name]; !ok && f[0] != "add" {
				t.Fatalf("there is no such chain: %s", line)
			}
			switch f[0] {
			case "add":
				chains[name] = false
			case "flush":
				chains[name] = true
			case "delete":
				delete(chains, name)
			}
		}
		// Flushed chains get their rules back in the same transaction.
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); f[1] == "rule" {
				chains[f[2]+" "+f[4]] = false
			}
		}
	}
	for _, r := range kubeProxy(config.Mode, config.services(nodes)) {
		run(r.Text)
	}
	for _, n := range []int{1, 10, 100, 3, 44, 45, 46, 1, 1} {
		before, err := c.replaceNext(n)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range c.rules(before) {
			run(r.Text)
		}
		want := make(map[string]bool)
		for _, s := range c.services {
			for _, b := range s.backends {
				want[versions[s.transport.IP].ip+" "+s.nftablesEndpoint(b)] = true
			}
		}
		for ip, names := range c.stale {
			for _, name := range names {
				want[versions[ip].ip+" "+name] = false
			}
		}
		got := make(map[string]bool)
		for name, flushed := range chains {
			if strings.Contains(name, " endpoint-") {
				got[name] = !flushed
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("chains, and whether they have rules, after a batch of %d (-want +got):\n%s", n, diff)
		}
	}
}
