package doctor

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// ciliumSettings returns settings from a file of testdata/cilium, without its suffix, and with some changes.
func ciliumSettings(t *testing.T, name string, changes map[string]string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata/cilium", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	settings := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		if setting, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && !strings.HasPrefix(line, "#") {
			settings[setting] = value
		}
	}
	maps.Copy(settings, changes)
	return settings
}

// ciliumCluster returns a cluster of three nodes in one subnet, whose Cilium has certain settings. Two of the nodes were not examined.
func ciliumCluster(settings map[string]string) *Cluster {
	c := &Cluster{Cilium: &Cilium{DaemonSet: "kube-system/cilium", Version: "v1.20.2", ConfigMap: "kube-system/cilium-config", Settings: settings}}
	for i := range 3 {
		c.Nodes = append(c.Nodes, ClusterNode{Name: fmt.Sprint("n", i), Has: map[string]string{"kernel": "6.12.1-amd64"}, Cilium: true, Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(10 + i)})})
	}
	pod := func(name string) Device {
		return Device{Link: record.Link{Name: name, Kind: "veth", MTU: 1500}, Up: true, Pod: &PodEnd{MTU: 1450, Device: "eth0"}}
	}
	c.See("n1", Facts{Devices: []Device{
		{Link: record.Link{Name: "eth0", Class: v1alpha1.DeviceNIC, MTU: 1500}, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("2001:db8::1/64"), netip.MustParsePrefix("10.0.0.11/24")}},
		{Link: record.Link{Name: ciliumHost, Kind: "veth", MTU: 1500}, Up: true}, {Link: record.Link{Name: "cilium_vxlan", Kind: "vxlan", MTU: 1500}, Up: true},
		pod("lxc0123456789ab"), pod("lxc_health"),
	}})
	return c
}

// bestCilium are settings that leave doctor nothing to find.
var bestCilium = map[string]string{"kube-proxy-replacement": "true", "enable-bpf-masquerade": "true", "routing-mode": "native", "auto-direct-node-routes": "true"}

// TestCilium: what costs is found in settings as Cilium's chart, AKS, GKE and EKS have them, and nothing that is right there.
func TestCilium(t *testing.T) {
	const (
		routing, tunnel, proxy  = "note cilium-host-routing", "note cilium-tunnel", "note cilium-kube-proxy off"
		both, socket, tooLarge  = "note cilium-kube-proxy both", "note cilium-socket-lb", "n1: warning cilium-mtu too large"
		small                   = "n1: note cilium-mtu small"
		legacy, hostns, replace = "enable-host-legacy-routing", "bpf-lb-sock-hostns-only", "kube-proxy-replacement"
	)
	type settings = map[string]string
	with := func(more settings) settings {
		all := maps.Clone(bestCilium)
		maps.Copy(all, more)
		return all
	}
	for name, c := range map[string]struct {
		file   string // chart, if empty
		change settings
		inject func(*Cluster)
		want   []string
	}{
		"chart":                                   {want: []string{routing, proxy, tunnel}},
		"AKS":                                     {file: "aks", inject: onProvider("azure"), want: []string{routing}},
		"AKS, with host routing by eBPF":          {file: "aks", inject: onProvider("azure"), change: settings{legacy: "false", "enable-bpf-masquerade": "true", "enable-ip-masq-agent": "true", "enable-ipv4-masquerade": "true"}},
		"AKS, chained":                            {file: "aks", inject: onProvider("azure"), change: settings{"cni-chaining-mode": "generic-veth"}},
		"GKE":                                     {file: "gke", inject: func(c *Cluster) { onProvider("gce")(c); c.Cilium.DaemonSet = "kube-system/anetd" }},
		"GKE, to a user who may not list pods":    {file: "gke", inject: func(c *Cluster) { onProvider("gce")(c); c.Cilium.DaemonSet = "" }},
		"EKS, chained behind Amazon's plugin":     {file: "eks-chained", inject: onProvider("aws")},
		"flannel, chained":                        {file: "chart", change: settings{"cni-chaining-mode": "generic-veth", "routing-mode": "native", legacy: "true"}},
		"portmap behind Cilium":                   {change: with(settings{"cni-chaining-mode": "portmap", legacy: "true", "routing-mode": "tunnel"}), want: []string{tunnel}},
		"the best settings":                       {change: bestCilium},
		"before 1.14":                             {file: "gke", change: settings{"cni-chaining-mode": "none", hostns: "false"}},
		"before 1.14, without a replacement":      {file: "gke", change: settings{"cni-chaining-mode": "none", hostns: "false", replace: "disabled", "tunnel": "geneve"}, want: []string{routing, proxy, tunnel}},
		"nothing is set":                          {inject: func(c *Cluster) { c.Cilium.Settings = settings{} }, want: []string{routing, proxy, tunnel}},
		"masquerade by iptables":                  {change: with(settings{"enable-bpf-masquerade": "false"}), want: []string{routing}},
		"of IPv6, too":                            {change: with(settings{"enable-bpf-masquerade": "false", "enable-ipv6": "true"})},
		"to the route's source":                   {change: with(settings{"enable-bpf-masquerade": "false", "enable-masquerade-to-route-source": "true"})},
		"at named devices":                        {change: with(settings{"enable-bpf-masquerade": "false", "egress-masquerade-interfaces": "ens+"})},
		"one's own Cilium in GKE":                 {inject: onProvider("gce")},
		"no masquerade":                           {change: with(settings{"enable-bpf-masquerade": "false", "enable-ipv4-masquerade": "false"})},
		"legacy host routing":                     {change: with(settings{legacy: "true"}), want: []string{routing}},
		"the same for a service mesh":             {change: with(settings{legacy: "true", hostns: "true"}), want: []string{socket}},
		"the same for Talos":                      {change: with(settings{legacy: "true"}), inject: func(c *Cluster) { c.Nodes[2].System = "Talos (v1.9.1)" }},
		"the same with IPsec":                     {change: with(settings{legacy: "true", "enable-ipsec": "true"})},
		"an old kernel":                           {change: with(settings{legacy: "true"}), inject: kernel("4.18.0-553.el8")},
		"an odd kernel":                           {change: with(settings{legacy: "true"}), inject: kernel("custom"), want: []string{routing}},
		"services at sockets beside kube-proxy":   {change: with(settings{replace: "false", "bpf-lb-sock": "true"}), want: []string{routing}},
		"kube-proxy left behind":                  {change: bestCilium, inject: func(c *Cluster) { c.Nodes[0].KubeProxy = true }, want: []string{both}},
		"kube-proxy of a node without Cilium":     {change: bestCilium, inject: func(c *Cluster) { c.Nodes[0].KubeProxy, c.Nodes[0].Cilium = true, false }},
		"kube-proxy that is no pod":               {change: bestCilium, inject: func(c *Cluster) { c.Nodes[1].Machine.Node.KubeProxy = "iptables" }, want: []string{both}},
		"the same without Cilium":                 {change: bestCilium, inject: func(c *Cluster) { m := c.Nodes[1].Machine; m.Node.KubeProxy, m.Devices[1].Name = "iptables", "eth1" }},
		"services at each packet":                 {change: with(settings{hostns: "true"}), want: []string{socket}},
		"the same for Gateway API":                {change: with(settings{hostns: "true", "enable-gateway-api": "true"})},
		"a tunnel":                                {change: with(settings{"routing-mode": "tunnel"}), want: []string{tunnel}},
		"a tunnel, and no node examined":          {change: with(settings{"routing-mode": "tunnel"}), inject: func(c *Cluster) { c.Nodes[1].Machine = nil }},
		"a tunnel between subnets":                {change: with(settings{"routing-mode": "tunnel"}), inject: func(c *Cluster) { c.Nodes[2].Address = netip.MustParseAddr("10.0.1.12") }},
		"a tunnel to a node without an address":   {change: with(settings{"routing-mode": "tunnel"}), inject: func(c *Cluster) { c.Nodes[2].Address = netip.Addr{} }},
		"a tunnel between single addresses":       {change: with(settings{"routing-mode": "tunnel"}), inject: func(c *Cluster) { c.Nodes[1].Machine.Devices[0].Addresses[1] = netip.MustParsePrefix("10.0.0.11/32") }},
		"a tunnel in a cloud":                     {change: with(settings{"routing-mode": "tunnel"}), inject: onProvider("aws")},
		"a tunnel of machines like kind's":        {change: with(settings{"routing-mode": "tunnel"}), inject: onProvider("kind"), want: []string{tunnel}},
		"a tunnel that encrypts":                  {change: with(settings{"routing-mode": "tunnel", "enable-wireguard": "true"})},
		"a tunnel to other clusters":              {change: with(settings{"routing-mode": "tunnel", "cluster-id": "7"})},
		"a tunnel for addresses of several pools": {change: with(settings{"routing-mode": "tunnel", "ipam": "multi-pool"})},
		"a tunnel for IPv6":                       {change: with(settings{"routing-mode": "tunnel", "enable-ipv4": "false", "enable-ipv6": "true"})},
		"pods too large for the tunnel":           {change: with(settings{"routing-mode": "tunnel", "mtu": "1550"}), inject: podsMTU(1451), want: []string{tunnel, tooLarge}},
		"pods too large for the NIC":              {change: bestCilium, inject: podsMTU(1501), want: []string{tooLarge}},
		"pods too large for a tunnel over IPv6":   {change: with(settings{"routing-mode": "tunnel", "underlay-protocol": "ipv6"}), inject: podsMTU(1431), want: []string{tunnel, tooLarge}},
		"pods too large, without IPv4":            {change: with(settings{"routing-mode": "tunnel", "enable-ipv4": "false", "enable-ipv6": "true"}), inject: sixOnly(1431), want: []string{tooLarge}},
		"pods of a cluster without IPv4":          {change: with(settings{"routing-mode": "tunnel", "enable-ipv4": "false", "enable-ipv6": "true"}), inject: sixOnly(1430)},
		"nodes without IPv4, pods with it":        {change: with(settings{"routing-mode": "tunnel", "enable-ipv6": "true"}), inject: sixOnly(1430)},
		"pods as large as the NIC allows":         {change: bestCilium, inject: podsMTU(1500)},
		"large pods of the plugin before":         {file: "eks-chained", inject: podsMTU(9001)},
		"a tunnel of the plugin before":           {file: "eks-chained", change: settings{"routing-mode": "tunnel"}},
		"a tunnel of one node":                    {change: with(settings{"routing-mode": "tunnel"}), inject: func(c *Cluster) { c.Nodes = c.Nodes[1:2] }},
		"settings of AKS elsewhere":               {file: "aks", want: []string{routing}},
		"one's own Cilium in AKS":                 {inject: onProvider("azure"), want: []string{routing, proxy}},
		"pods much smaller than the NIC allows":   {change: bestCilium, inject: func(c *Cluster) { c.Nodes[1].Machine.Devices[0].MTU = 9000 }, want: []string{small}},
		"pods a little smaller":                   {change: bestCilium, inject: podsMTU(501)},
		"pods whose MTU is not known":             {change: bestCilium, inject: podsMTU(0)},
		"pods of another plugin": {change: bestCilium, inject: func(c *Cluster) {
			podsMTU(9000)(c)
			c.Nodes[1].Machine.Devices[3].Name, c.Nodes[1].Machine.Devices[4].Name = "cali1", "veth1"
		}},
		"settings that were not read": {inject: func(c *Cluster) { c.Cilium.Settings = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			if c.file == "" {
				c.file = "chart"
			}
			cluster := ciliumCluster(ciliumSettings(t, c.file, c.change))
			if c.inject != nil {
				c.inject(cluster)
			}
			var got []string
			for _, f := range ExamineCluster(*cluster) {
				line := strings.TrimSpace(fmt.Sprintf("%s %s %s", f.Severity, f.Rule, f.Fault))
				if f.Where != "" {
					line = f.Where + ": " + line
				}
				got = append(got, line)
				if f.What == "" || len(f.Evidence) == 0 || f.Cost == "" || f.Do == "" {
					t.Errorf("incomplete: %+v", f)
				}
				if managed := cluster.Nodes[0].Provider == "azure" && c.file == "aks"; managed != strings.HasPrefix(f.Do, "az aks ") {
					t.Errorf("do: %s", f.Do)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("found %q, want %q", got, c.want)
			}
		})
	}
}

func onProvider(name string) func(*Cluster) {
	return func(c *Cluster) {
		for i := range c.Nodes {
			c.Nodes[i].Provider = name
		}
	}
}

func kernel(version string) func(*Cluster) {
	return func(c *Cluster) {
		for _, n := range c.Nodes {
			n.Has["kernel"] = version
		}
	}
}

// sixOnly leaves the nodes only addresses of IPv6, in one subnet.
func sixOnly(mtu int) func(*Cluster) {
	return func(c *Cluster) {
		podsMTU(mtu)(c)
		for i := range c.Nodes {
			c.Nodes[i].Address = netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i))
		}
		c.Nodes[1].Machine.Devices[0].Addresses = c.Nodes[1].Machine.Devices[0].Addresses[:1]
	}
}

func podsMTU(mtu int) func(*Cluster) {
	return func(c *Cluster) {
		for _, d := range c.Nodes[1].Machine.Devices {
			if d.Pod != nil {
				d.Pod.MTU = mtu
			}
		}
	}
}

// TestCiliumEvidence: a finding shows the settings that it judged, those too that are only defaults, and changes those and no others.
func TestCiliumEvidence(t *testing.T) {
	const config = "ConfigMap kube-system/cilium-config, "
	for name, c := range map[string]struct {
		change map[string]string
		inject func(*Cluster)
		rule   string
		want   []Evidence
		do     string
	}{
		"defaults": {rule: "cilium-host-routing", do: "helm upgrade cilium cilium/cilium --namespace kube-system --version 1.20.2 --reuse-values --set kubeProxyReplacement=true,k8sServiceHost=API_SERVER,k8sServicePort=PORT,bpf.masquerade=true   # ",
			want: []Evidence{{config + "kube-proxy-replacement", "false"}, {config + "enable-bpf-masquerade", "not set, which means false"}}},
		"chosen": {change: map[string]string{"enable-host-legacy-routing": "true", "kube-proxy-replacement": "true", "enable-bpf-masquerade": "true"}, rule: "cilium-host-routing", do: "bpf.hostLegacyRouting=false   # ",
			want: []Evidence{{config + "enable-host-legacy-routing", "true"}}},
		"both": {change: bestCilium, rule: "cilium-kube-proxy", do: "kubectl -n kube-system delete daemonset,configmap kube-proxy",
			inject: func(c *Cluster) {
				c.Nodes[0].KubeProxy, c.Nodes[2].KubeProxy, c.Nodes[1].Machine.Node.KubeProxy = true, true, "ipvs"
			},
			want: []Evidence{{config + "kube-proxy-replacement", "true"}, {"pods", "kube-proxy beside Cilium's agent on n0, n2"}, {"http://127.0.0.1:10249/proxyMode of n1", "ipvs"}}},
		"tunnel": {rule: "cilium-tunnel", do: "--set routingMode=native,autoDirectNodeRoutes=true,", want: []Evidence{{config + "routing-mode", "tunnel"}, {"ip addr, on n1", "10.0.0.0/24 has the addresses of all 3 nodes"}}},
		"tunnel, before 1.14": {inject: func(c *Cluster) { c.Cilium.Settings = map[string]string{"tunnel": "geneve"} }, rule: "cilium-tunnel",
			want: []Evidence{{config + "tunnel", "geneve"}, {"ip addr, on n1", "10.0.0.0/24 has the addresses of all 3 nodes"}}},
		"tunnel, by default": {inject: func(c *Cluster) { c.Cilium.Settings = map[string]string{} }, rule: "cilium-tunnel",
			want: []Evidence{{config + "routing-mode", "not set, which means tunnel"}, {"ip addr, on n1", "10.0.0.0/24 has the addresses of all 3 nodes"}}},
		"MTU": {change: map[string]string{"mtu": "1550"}, inject: podsMTU(1500), rule: "cilium-mtu", do: "--set MTU=0   # ",
			want: []Evidence{{"MTU of the default route of the pod behind lxc0123456789ab (eth0)", "1500"}, {"MTU of the default route of the pod behind lxc_health (eth0)", "1500"}, {"/sys/class/net/eth0/mtu", "1500"},
				{"/sys/class/net/cilium_vxlan/mtu", "1500, and vxlan adds 50 bytes"}, {config + "mtu", "1550"}}},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := ciliumCluster(ciliumSettings(t, "chart", c.change))
			if c.inject != nil {
				c.inject(cluster)
			}
			found := ExamineCluster(*cluster)
			i := slices.IndexFunc(found, func(f Finding) bool { return f.Rule == c.rule })
			if i < 0 {
				t.Fatalf("found %q", summary(found))
			}
			if !slices.Equal(found[i].Evidence, c.want) {
				t.Errorf("evidence %q, want %q", found[i].Evidence, c.want)
			}
			if !strings.Contains(found[i].Do, c.do) {
				t.Errorf("do %q, want %q", found[i].Do, c.do)
			}
		})
	}
}

// TestCiliumIsNamed: one line says what Cilium is and does, another one what that means for the fast path.
func TestCiliumIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		file   string
		change map[string]string
		inject func(*Cluster)
		want   string
	}{
		"chart": {file: "chart", want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (vxlan); leaves services to kube-proxy (kube-proxy-replacement: false); host routing by the node's stack (legacy)"},
		"best":  {file: "chart", change: bestCilium, want: "v1.20.2, DaemonSet kube-system/cilium; native routing; replaces kube-proxy; services translated when a socket connects; host routing by eBPF; masquerade by eBPF"},
		"more": {file: "chart", change: map[string]string{"tunnel-protocol": "geneve", "bpf-lb-acceleration": "best-effort", "datapath-mode": "netkit-l2", "enable-wireguard": "true", "bpf-lb-sock": "true"},
			want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (geneve); leaves services to kube-proxy (kube-proxy-replacement: false); services translated when a socket connects; host routing by the node's stack (legacy); services from outside by XDP; pods behind netkit devices; encrypts"},
		"IPsec, with which an earlier Cilium has no host routing by eBPF": {file: "chart", change: map[string]string{"kube-proxy-replacement": "true", "enable-bpf-masquerade": "true", "enable-ipsec": "true"},
			want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (vxlan); replaces kube-proxy; services translated when a socket connects; masquerade by eBPF; encrypts"},
		"nothing is set": {file: "chart", inject: func(c *Cluster) { c.Cilium.Settings = map[string]string{} },
			want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (vxlan); leaves services to kube-proxy (kube-proxy-replacement: false); host routing by the node's stack (legacy)"},
		"before 1.14": {file: "gke", change: map[string]string{"tunnel": "geneve", "cni-chaining-mode": "none"}, want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (geneve); replaces kube-proxy"},
		"masquerade of IPv6 by iptables": {file: "chart", change: map[string]string{"kube-proxy-replacement": "true", "enable-ipv4-masquerade": "false", "enable-ipv6": "true"},
			want: "v1.20.2, DaemonSet kube-system/cilium; tunnel (vxlan); replaces kube-proxy; services translated when a socket connects; host routing by the node's stack (legacy)"},
		"an old kernel": {file: "chart", change: bestCilium, inject: kernel("5.4.0"), want: "v1.20.2, DaemonSet kube-system/cilium; native routing; replaces kube-proxy; services translated when a socket connects; host routing by the node's stack (legacy); masquerade by eBPF"},
		"AKS":           {file: "aks", inject: onProvider("azure"), want: "v1.20.2, DaemonSet kube-system/cilium, managed by AKS (Azure CNI powered by Cilium); native routing; replaces kube-proxy; services translated when a socket connects; host routing by the node's stack (legacy)"},
		"GKE":           {file: "gke", inject: func(c *Cluster) { c.Cilium.DaemonSet = "kube-system/anetd" }, want: "v1.20.2, DaemonSet kube-system/anetd, managed by GKE (Dataplane V2); chained (generic-veth) behind the plugin that connects the pods and routes their packets; replaces kube-proxy"},
		"EKS":           {file: "eks-chained", want: "v1.20.2, DaemonSet kube-system/cilium; chained (aws-cni) behind the plugin that connects the pods and routes their packets; leaves services to kube-proxy (kube-proxy-replacement: false)"},
		"not read": {file: "chart", inject: func(c *Cluster) {
			c.Cilium.Settings, c.Cilium.Unread, c.Cilium.Version = nil, "you may not get configmaps in namespace kube-system", ""
		}, want: "version unknown, DaemonSet kube-system/cilium; its settings were not read: you may not get configmaps in namespace kube-system"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := ciliumCluster(ciliumSettings(t, c.file, c.change))
			if c.inject != nil {
				c.inject(cluster)
			}
			want := []Evidence{{"Cilium", c.want}, {"fast path", "does nothing on nodes with Cilium, whose programs already handle the packets of pods"}}
			if got := cluster.Known(); !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
	if got := (Cluster{Unread: []string{"list nodes", "list pods in all namespaces"}}).Known(); !slices.Equal(got, []Evidence{{"not read", "you may not list nodes, list pods in all namespaces"}}) {
		t.Errorf("without Cilium: %q", got)
	}
}
