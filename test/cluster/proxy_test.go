//go:build linux

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// proxied are the services of the rules that a lab is tested to load
// (internal/target/lab/testdata), as kube-proxy is told of them. The cluster has IPv4
// alone.
const proxied = `
apiVersion: v1
kind: Service
metadata: {name: server-0}
spec: {clusterIP: 10.96.1.0, ports: [{name: tcp, port: 7465}, {name: udp, protocol: UDP, port: 7465}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: server-0, labels: {kubernetes.io/service-name: server-0}}
addressType: IPv4
ports: [{name: tcp, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
endpoints: [{addresses: [10.136.1.0]}, {addresses: [10.136.1.1]}, {addresses: [10.136.1.2]}]
---
apiVersion: v1
kind: Service
metadata: {name: other-1}
spec: {clusterIP: 10.96.1.1, ports: [{name: tcp, port: 7465}, {name: udp, protocol: UDP, port: 7465}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: other-1, labels: {kubernetes.io/service-name: other-1}}
addressType: IPv4
ports: [{name: tcp, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
endpoints: [{addresses: [10.136.0.2]}]
`

// testProxy has kube-proxy write the rules of two services, and wants a lab's to be the
// same, as the kernel shows both: each chain that a lab has, rule by rule.
func testProxy(t *testing.T, c *Cluster) {
	t.Helper()
	namespace := "slipstream" // it is in the chains' names
	kubectl(t, c, nil, "create", "namespace", namespace)
	t.Cleanup(func() { kubectl(t, c, nil, "delete", "namespace", namespace) })
	kubectl(t, c, strings.NewReader(proxied), "apply", "--namespace="+namespace, "--filename=-")

	loads, shows := "iptables-restore --noflush", []string{"iptables-save", "--table=nat"}
	if c.config.Proxy == NFTables {
		loads, shows = "nft -f -", []string{"nft", "list", "table", "ip", "kube-proxy"}
	}
	rules, err := os.ReadFile(filepath.Join("../../internal/target/lab/testdata", c.config.Proxy+"4.txt"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", loads+" && "+strings.Join(shows, " "))
	cmd.Stdin = strings.NewReader(strings.NewReplacer("10.128.0.0/9", podNetwork, "10.96.0.0/12", serviceNetwork).Replace(string(rules)))
	lab, err := output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	want := chainsOf(lab)
	until(t, "kube-proxy's rules as a lab's", func() string {
		shown, err := output(c.Node("node0").Command(t.Context(), shows[0], shows[1:]...))
		if err != nil {
			t.Fatal(err)
		}
		all := chainsOf(shown)
		var differ []string
		for chain, rules := range want {
			got := all[chain]
			if slices.Contains([]string{"PREROUTING", "OUTPUT", "POSTROUTING", "KUBE-SERVICES"}, chain) || strings.HasPrefix(chain, "map ") || strings.HasPrefix(chain, "set ") {
				// Those of others are there too, and those of services in any order.
				got = slices.DeleteFunc(slices.Clone(got), func(rule string) bool { return !slices.Contains(rules, rule) })
				rules = slices.Sorted(slices.Values(rules))
				slices.Sort(got)
			}
			if diff := cmp.Diff(rules, got); diff != "" {
				differ = append(differ, fmt.Sprintf("%s (-lab +kube-proxy):\n%s", chain, diff))
			}
		}
		return strings.Join(differ, "\n")
	})
	if len(want) < 8 {
		t.Errorf("only %d chains are compared:\n%s", len(want), lab)
	}
}

// chainsOf are the rules of each chain, map and set as iptables-save or nft show them.
func chainsOf(shown string) map[string][]string {
	chains := make(map[string][]string)
	block := ""
	for line := range strings.Lines(shown) {
		line = strings.TrimSpace(line)
		if rule, ok := strings.CutPrefix(line, "-A "); ok {
			chain, rule, _ := strings.Cut(rule, " ")
			chains[chain] = append(chains[chain], rule)
			continue
		}
		kind, _, _ := strings.Cut(line, " ")
		switch name, opens := strings.CutSuffix(line, " {"); {
		case opens && slices.Contains([]string{"chain", "map", "set"}, kind):
			block = name
		case line == "}":
			block = ""
		case block != "":
			// The elements of a map begin in the line that opens it.
			for element := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(line, "elements = { "), " }"), ",") {
				if element = strings.TrimSpace(element); element != "" {
					chains[block] = append(chains[block], element)
				}
			}
		}
	}
	return chains
}
