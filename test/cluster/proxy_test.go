//go:build linux

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"slipstream.dev/internal/testenv"
)

// told holds lists of API objects, by their path: the services whose rules a lab loads
// (internal/place/lab/services/testdata). The other tests' clusters only have IPv4, so a fake
// API serves these.
var told = map[string]string{
	"/api/v1/nodes": `
apiVersion: v1
kind: NodeList
metadata: {resourceVersion: "1"}
items:
- metadata: {name: node0}
  status: {addresses: [{type: InternalIP, address: 198.18.0.1}, {type: InternalIP, address: "fd73:6c69:7000::1"}]}
`,
	"/apis/networking.k8s.io/v1/servicecidrs": `
apiVersion: networking.k8s.io/v1
kind: ServiceCIDRList
metadata: {resourceVersion: "1"}
items:
- metadata: {name: kubernetes}
  spec: {cidrs: [10.96.0.0/12, "fd73:6c69:7002::/108"]}
`,
	"/api/v1/services": `
apiVersion: v1
kind: ServiceList
metadata: {resourceVersion: "1"}
items:
- metadata: {name: server-0, namespace: slipstream}
  spec:
    type: ClusterIP
    clusterIP: 10.96.1.0
    clusterIPs: [10.96.1.0, "fd73:6c69:7002::100"]
    ipFamilies: [IPv4, IPv6]
    ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
- metadata: {name: other-1, namespace: slipstream}
  spec:
    type: ClusterIP
    clusterIP: 10.96.1.1
    clusterIPs: [10.96.1.1, "fd73:6c69:7002::101"]
    ipFamilies: [IPv4, IPv6]
    ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
`,
	"/apis/discovery.k8s.io/v1/endpointslices": `
apiVersion: discovery.k8s.io/v1
kind: EndpointSliceList
metadata: {resourceVersion: "1"}
items:
- metadata: {name: server-0-4, namespace: slipstream, labels: {kubernetes.io/service-name: server-0}}
  addressType: IPv4
  ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
  endpoints: [{addresses: [10.136.1.0]}, {addresses: [10.136.1.1]}, {addresses: [10.136.1.2]}]
- metadata: {name: server-0-6, namespace: slipstream, labels: {kubernetes.io/service-name: server-0}}
  addressType: IPv6
  ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
  endpoints:
  - addresses: ["fd73:6c69:7001:1::100"]
  - addresses: ["fd73:6c69:7001:1::101"]
  - addresses: ["fd73:6c69:7001:1::102"]
- metadata: {name: other-1-4, namespace: slipstream, labels: {kubernetes.io/service-name: other-1}}
  addressType: IPv4
  ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
  endpoints: [{addresses: [10.136.1.0]}]
- metadata: {name: other-1-6, namespace: slipstream, labels: {kubernetes.io/service-name: other-1}}
  addressType: IPv6
  ports: [{name: tcp, protocol: TCP, port: 7465}, {name: udp, protocol: UDP, port: 7465}]
  endpoints: [{addresses: ["fd73:6c69:7001:1::100"]}]
`,
}

// tell serves the part of the API that kube-proxy requests: lists that never change.
func tell(w http.ResponseWriter, r *http.Request) {
	list, ok := told[r.URL.Path]
	switch query := r.URL.Query(); {
	case r.Method != http.MethodGet || !ok || query.Has("sendInitialEvents"): // kube-proxy lists instead
		w.WriteHeader(http.StatusNotFound)
	case query.Has("watch"):
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	default:
		text, err := yaml.YAMLToJSON([]byte(list))
		if err != nil {
			panic(err)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // kube-proxy asks again
	}
}

// kube-proxy writes the rules of services for both IP versions and both protocols. A lab's rules
// are the same, as the kernel shows them: each chain that a lab has is compared rule by rule.
func TestProxy(t *testing.T) {
	testenv.NeedRoot(t)
	parts, err := Parts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{IPTables, NFTables} {
		t.Run(mode, func(t *testing.T) {
			runtime.LockOSThread() // never unlocked: the thread ends with its namespace
			startProxy(t, filepath.Join(parts, "kube-proxy"), mode)
			for _, version := range []string{"4", "6"} {
				loads, shows := "nft -f -", "nft list table ip kube-proxy"
				if mode == IPTables {
					loads, shows = "iptables-restore --noflush", "iptables-save --table=nat"
				}
				if version == "6" {
					loads = strings.Replace(loads, "iptables", "ip6tables", 1)
					shows = strings.NewReplacer("iptables", "ip6tables", " ip ", " ip6 ").Replace(shows)
				}
				compareRules(t, filepath.Join("../../internal/place/lab/services/testdata", mode+version+".txt"), loads, shows)
			}
		})
	}
}

// startProxy moves the thread into a new network namespace, and starts kube-proxy there.
func startProxy(t *testing.T, program, mode string) {
	t.Helper()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	api := &httptest.Server{Listener: listener, Config: &http.Server{Handler: http.HandlerFunc(tell)}}
	api.Start()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: %q}}]
contexts: [{name: it, context: {cluster: it}}]
current-context: it
`, api.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, program, "--kubeconfig="+kubeconfig, "--hostname-override=node0", "--proxy-mode="+mode,
		"--cluster-cidr=10.128.0.0/9,fd73:6c69:7001::/48",
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		_ = cmd.Wait() // it was killed
		api.CloseClientConnections()
		api.Close()
		if t.Failed() {
			t.Logf("kube-proxy said:\n%s", said.String())
		}
	})
}

// compareRules waits until the rules here are the same as in a namespace where the lab's rules
// are loaded.
func compareRules(t *testing.T, file, loads, shows string) {
	t.Helper()
	rules, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer rules.Close()
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", loads+" && "+shows)
	cmd.Stdin = rules
	lab, err := output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	want := chainsOf(lab)
	testenv.Eventually(t, time.Minute, "kube-proxy's rules as those of "+file, func() string {
		// At first kube-proxy has not created its table, and the output lacks it.
		shown, err := output(exec.CommandContext(t.Context(), "sh", "-c", shows))
		if err != nil {
			return err.Error()
		}
		all := chainsOf(shown)
		var differ []string
		for chain, rules := range want {
			got := all[chain]
			if chain == "KUBE-SERVICES" || strings.HasPrefix(chain, "map ") || strings.HasPrefix(chain, "set ") {
				// The rules of services come in any order, and those of node ports contain the node's
				// address.
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
	if len(want) < 12 {
		t.Errorf("only %d chains are compared:\n%s", len(want), lab)
	}
}

// chainsOf returns the rules of each chain, map and set in the output of iptables-save or nft.
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
			// The first elements of a map are on the line that opens the list.
			for element := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(line, "elements = { "), " }"), ",") {
				if element = strings.TrimSpace(element); element != "" {
					chains[block] = append(chains[block], element)
				}
			}
		}
	}
	return chains
}
