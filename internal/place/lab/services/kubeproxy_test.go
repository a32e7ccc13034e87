//go:build linux

package services

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/golden"
)

// twoNodes returns the nodes of a lab with services, each with this many pods.
func twoNodes(pods int) []network.Node {
	nodes := make([]network.Node, 2)
	for i := range nodes {
		n := &nodes[i]
		n.Pods4, _ = new(Config).Prefixes(i)
		n.Pods6 = netip.MustParsePrefix(fmt.Sprintf("fd73:6c69:7001:%d::/64", i))
		for j := range pods {
			n.Pods = append(n.Pods, network.Pod{Place: place.Place{
				IPv4: network.Plus(n.Pods4.Addr(), j+2), IPv6: network.Plus(n.Pods6.Addr(), j+2),
			}})
		}
	}
	return nodes
}

// TestKubeProxyRules checks that the rules are literally those of kube-proxy.
func TestKubeProxyRules(t *testing.T) {
	c := Config{Backends: 3, Total: 2, Servers: []place.Position{{Node: 1}}, Transports: []place.Transport{
		{IP: 4, Protocol: "tcp"}, {IP: 4, Protocol: "udp"}, {IP: 6, Protocol: "tcp"}, {IP: 6, Protocol: "udp"},
	}}
	nodes := twoNodes(1)
	c.Assign(nodes)
	services := c.services(nodes)
	for _, mode := range []string{spec.ServiceIPTables, spec.ServiceNFTables} {
		for i, got := range kubeProxy(mode, services) {
			golden.Compare(t, fmt.Sprintf("testdata/%s%d.txt", mode, 4+2*i), string(got.Text))
		}
	}
	// Names from kube-proxy's tests (pkg/proxy/iptables/proxier_test.go and pkg/proxy/nftables/helpers_test.go), and from
	// comments in pkg/proxy/nftables/proxier.go.
	for got, want := range map[string]string{
		hash("ns1/svc1:p80", "tcp")[:16]:                    "XPGD46QRK7WJZT7O",
		hash("ns1/svc1:p80", "tcp", "10.180.0.1:80")[:16]:   "SXIVWICOYRO3J4NJ",
		nftablesName("ns1/svc1/tcp/p80"):                    "ULMVA6XW-ns1/svc1/tcp/p80",
		nftablesName("ns1/svc1/tcp/p80__10.180.0.1/80"):     "5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80",
		nftablesName("ns1/svc1/tcp/p80__fd00.10.180..1/80"): "ZVRFLKHO-ns1/svc1/tcp/p80__fd00.10.180..1/80",
	} {
		if got != want {
			t.Errorf("hash %s, want %s", got, want)
		}
	}
	c.Transports = c.Transports[:1]
	services = c.services(nodes)
	few := iptablesRules(services, services)
	c.Backends = largeCluster + 1
	many := c.services(nodes)
	if got := iptablesRules(many, many); bytes.Count(few, []byte("--comment")) < 15 || bytes.Count(got, []byte("--comment")) != 6 {
		t.Errorf("%d comments of few endpoints, %d of many", bytes.Count(few, []byte("--comment")), bytes.Count(got, []byte("--comment")))
	}
}
