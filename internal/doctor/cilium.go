package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Cilium is Cilium as a network plugin of a cluster: the only one, or chained behind another one.
type Cilium struct {
	// DaemonSet is that of its agents, as NAMESPACE/NAME, and Version the tag of their image. Both are empty if they are not known.
	DaemonSet, Version string
	// ConfigMap has its settings, and is named as NAMESPACE/NAME. Settings are nil if they were not read; Unread says why.
	ConfigMap string
	Settings  map[string]string
	Unread    string
}

// ciliumDefaults are the values of settings that a ConfigMap leaves out, where they are not "false" (daemon/cmd/daemon_main.go and
// pkg/defaults of Cilium; its chart always sets enable-ipv6).
var ciliumDefaults = map[string]string{
	"enable-ipv4": "true", "enable-ipv4-masquerade": "true", "enable-ipv6-masquerade": "true",
	"routing-mode": "tunnel", "tunnel-protocol": "vxlan", "cni-chaining-mode": "none", "ipam": "cluster-pool", "cluster-id": "0",
}

func (c *Cilium) value(setting string) string {
	if value, ok := c.Settings[setting]; ok {
		return value
	}
	return cmp.Or(ciliumDefaults[setting], "false")
}

func (c *Cilium) on(setting string) bool {
	on, err := strconv.ParseBool(c.value(setting))
	return err == nil && on
}

func (c *Cilium) set(setting string) bool {
	_, ok := c.Settings[setting]
	return ok
}

// read returns a setting as evidence.
func (c *Cilium) read(setting string) Evidence {
	e := evidence("ConfigMap "+c.ConfigMap+", "+setting, "%s", c.value(setting))
	if !c.set(setting) {
		e.Value = "not set, which means " + e.Value
	}
	return e
}

// tunnel returns the protocol in which packets of pods travel between nodes; "" if the network routes them.
func (c *Cilium) tunnel() string {
	if c.set("routing-mode") {
		if c.value("routing-mode") == "native" {
			return ""
		}
		return c.value("tunnel-protocol")
	}
	switch protocol := c.Settings["tunnel"]; protocol { // before 1.14
	case "disabled":
		return ""
	case "":
		return c.value("tunnel-protocol")
	default:
		return protocol
	}
}

// chained returns how Cilium is chained behind the plugin that connects the pods; "" if it connects them itself. With the mode
// portmap, another plugin is behind Cilium.
func (c *Cilium) chained() string {
	if mode := c.value("cni-chaining-mode"); mode != "none" && mode != "portmap" {
		return mode
	}
	return ""
}

func (c *Cilium) replacesProxy() bool {
	return c.on("kube-proxy-replacement") || c.value("kube-proxy-replacement") == "strict" // before 1.14
}

// socketLB reports whether a service's address is translated when a socket of a pod connects, and not in each packet.
func (c *Cilium) socketLB() bool {
	return (c.replacesProxy() || c.on("bpf-lb-sock")) && !c.on("bpf-lb-sock-hostns-only")
}

func (c *Cilium) iptablesMasquerade() bool {
	four := c.on("enable-ipv4") && c.on("enable-ipv4-masquerade")
	if c.set("masquerade") { // before 1.10
		four = c.on("enable-ipv4") && c.on("masquerade")
	}
	return !c.on("enable-bpf-masquerade") && (four || c.on("enable-ipv6") && c.on("enable-ipv6-masquerade"))
}

// legacyRouting reports whether packets of pods pass through the routing and netfilter of their node (the fallback of
// pkg/kpr/initializer of Cilium).
func (c *Cilium) legacyRouting() bool {
	return c.on("enable-host-legacy-routing") || c.iptablesMasquerade() || !c.replacesProxy()
}

func (c *Cilium) encrypts() bool {
	return c.on("enable-wireguard") || c.on("enable-ipsec") || c.on("enable-ztunnel")
}

// gke reports whether Google manages this Cilium. Whoever may not list pods does not know.
func (c Cluster) gke() bool {
	return strings.HasSuffix(c.Cilium.DaemonSet, "/anetd") || c.Cilium.DaemonSet == "" && c.onProvider("gce")
}

// aks reports whether Azure manages this Cilium.
func (c Cluster) aks() bool {
	return c.onProvider("azure") && c.Cilium.value("ipam") == "delegated-plugin"
}

func (c Cluster) onProvider(names ...string) bool {
	return slices.ContainsFunc(c.Nodes, func(n ClusterNode) bool { return slices.Contains(names, n.Provider) })
}

// Known returns facts that no rule judges.
func (c Cluster) Known() (known []Evidence) {
	if c.Cilium != nil {
		known = append(known, evidence("Cilium", "%s", strings.Join(c.describe(), "; ")),
			evidence("fast path", "does nothing on nodes with Cilium, whose programs already handle the packets of pods"))
	}
	if len(c.Unread) > 0 {
		known = append(known, evidence("not read", "you may not %s", strings.Join(c.Unread, ", ")))
	}
	return known
}

// describe says what Cilium is and does.
func (c Cluster) describe() []string {
	k := c.Cilium
	all := []string{cmp.Or(k.Version, "version unknown")}
	if k.DaemonSet != "" {
		all[0] += ", DaemonSet " + k.DaemonSet
	}
	if c.gke() {
		all[0] += ", managed by GKE (Dataplane V2)"
	}
	if k.Settings == nil {
		return append(all, "its settings were not read: "+k.Unread)
	}
	if c.aks() {
		all[0] += ", managed by AKS (Azure CNI powered by Cilium)"
	}
	say := func(is bool, yes, no string) {
		if is {
			all = append(all, yes)
		} else if no != "" {
			all = append(all, no)
		}
	}
	if k.chained() == "" {
		say(k.tunnel() == "", "native routing", "tunnel ("+k.tunnel()+")")
	} else {
		all = append(all, "chained ("+k.chained()+") behind the plugin that connects the pods and routes their packets")
	}
	say(k.replacesProxy(), "replaces kube-proxy", "leaves services to kube-proxy (kube-proxy-replacement: "+k.value("kube-proxy-replacement")+")")
	say(k.socketLB(), "services translated when a socket connects", "")
	switch {
	case k.chained() != "":
	case k.legacyRouting() || c.oldKernel():
		all = append(all, "host routing by the node's stack (legacy)")
	case k.set("routing-mode") && !k.on("enable-ipsec"): // a Cilium before 1.14, and before 1.19 with IPsec, falls back for further reasons
		all = append(all, "host routing by eBPF")
	}
	say(k.on("enable-bpf-masquerade"), "masquerade by eBPF", "")
	say(slices.Contains([]string{"native", "best-effort"}, k.value("bpf-lb-acceleration")), "services from outside by XDP", "")
	say(strings.HasPrefix(k.value("datapath-mode"), "netkit"), "pods behind netkit devices", "")
	say(k.encrypts(), "encrypts", "")
	return all
}

// oldKernel reports whether the kernel of a node is older than 5.10, which has the helpers for host routing by eBPF. Cilium asks the
// kernel for these helpers, and the API server only has its version.
func (c Cluster) oldKernel() bool {
	return slices.ContainsFunc(c.Nodes, func(n ClusterNode) bool {
		var major, minor int
		_, err := fmt.Sscanf(n.Has["kernel"], "%d.%d", &major, &minor)
		return err == nil && (major < 5 || major == 5 && minor < 10)
	})
}

// judged returns Cilium if its settings are known, and somebody other than Google can change them.
func (c Cluster) judged() (*Cilium, bool) {
	return c.Cilium, c.Cilium != nil && c.Cilium.Settings != nil && !c.gke()
}

// helm returns the command that changes values of Cilium's chart, for Helm's own installations.
func (c *Cilium) helm(values string) string {
	namespace, _, _ := strings.Cut(c.ConfigMap, "/")
	return fmt.Sprintf("helm upgrade cilium cilium/cilium --namespace %s --version %s --reuse-values --set %s", namespace, cmp.Or(strings.TrimPrefix(c.Version, "v"), "VERSION"), values)
}

// needsStack reports whether packets of pods have to pass through the node's stack, as far as doctor can tell. The reasons are
// another plugin, an old kernel, IPsec (before some fixes of the kernel), iptables rules of Talos or Google Cloud, masquerading
// that eBPF cannot do or only as a beta (IPv6), and a service mesh, if services are also kept off the pods' sockets.
func (c Cluster) needsStack() bool {
	k := c.Cilium
	six := k.on("enable-ipv6") && k.on("enable-ipv6-masquerade")
	special := k.on("enable-masquerade-to-route-source") || k.Settings["egress-masquerade-interfaces"] != ""
	talos := slices.ContainsFunc(c.Nodes, func(n ClusterNode) bool { return strings.HasPrefix(n.System, "Talos") })
	return k.value("cni-chaining-mode") != "none" || c.oldKernel() || k.on("enable-ipsec") || c.onProvider("gce") ||
		k.iptablesMasquerade() && (six || special) ||
		k.on("enable-host-legacy-routing") && (talos || k.on("bpf-lb-sock-hostns-only"))
}

// ciliumHostRouting finds packets of pods that pass through the node's stack although eBPF could route them.
func ciliumHostRouting(c Cluster) []Finding {
	k, ok := c.judged()
	if !ok || !k.legacyRouting() || c.needsStack() {
		return nil
	}
	f := Finding{
		Severity: Note,
		What:     "Packets of pods pass through the routing and netfilter of their nodes, which Cilium's host routing by eBPF would bypass.",
		Cost: "In a lab, a stream of one pair had 0.80 (0.74–0.86) of the native throughput when the stack routed it, and 0.97 (0.94–0.99) when eBPF did (docs/results/paths.md); it was not measured with Cilium. " +
			"The setting is right if something on the nodes needs netfilter to see the packets of pods, such as Istio or your own iptables rules.",
	}
	var change []string
	add := func(setting, value string) {
		f.Evidence, change = append(f.Evidence, k.read(setting)), append(change, value)
	}
	if !k.replacesProxy() {
		add("kube-proxy-replacement", "kubeProxyReplacement=true,k8sServiceHost=API_SERVER,k8sServicePort=PORT")
	}
	if k.iptablesMasquerade() {
		add("enable-bpf-masquerade", "bpf.masquerade=true")
	}
	if k.on("enable-host-legacy-routing") {
		add("enable-host-legacy-routing", "bpf.hostLegacyRouting=false")
	}
	f.Do = k.helm(strings.Join(change, ",")) + "   # connections through services break when kube-proxy is replaced: try it on a cluster without traffic, with slipstream run kubernetes before and after; then slipstream compare BEFORE AFTER"
	if c.aks() {
		f.Do = "az aks update --resource-group GROUP --name CLUSTER --enable-acns --acns-datapath-acceleration-mode BpfVeth   # billed; needs Kubernetes 1.33, and nodes of Azure Linux 3 or Ubuntu 24.04; disrupts connections: slipstream run kubernetes before and after, then slipstream compare BEFORE AFTER"
	}
	return []Finding{f}
}

// kubeProxies returns evidence of kube-proxy on nodes with an agent of Cilium. Other nodes, such as those with Windows, need it.
func (c Cluster) kubeProxies() (found []Evidence) {
	var with []string
	for _, n := range c.Nodes {
		if n.Cilium && n.KubeProxy {
			with = append(with, n.Name)
		}
	}
	if len(with) > 0 {
		found = append(found, evidence("pods", "kube-proxy beside Cilium's agent on %s", some(with)))
	}
	const most = 3
	for _, n := range c.Nodes {
		if n.Machine == nil || n.Machine.Node.KubeProxy == "" || len(found) > most {
			continue
		}
		if _, ok := n.Machine.device(ciliumHost); ok {
			found = append(found, evidence("http://127.0.0.1:10249/proxyMode of "+n.Name, "%s", n.Machine.Node.KubeProxy))
		}
	}
	return found
}

// ciliumHost is the device that Cilium makes on each node.
const ciliumHost = "cilium_host"

// removeProxy is the command that removes kube-proxy.
const removeProxy = "kubectl -n kube-system delete daemonset,configmap kube-proxy   # if it is a DaemonSet; in K3s and RKE2: disable-kube-proxy: true; a provider may put it back: switch it off there. Open connections through services break. "

// ciliumKubeProxy finds kube-proxy where Cilium could do its work, or does it too. GKE keeps it.
func ciliumKubeProxy(c Cluster) []Finding {
	k, ok := c.judged()
	if !ok || c.onProvider("gce") {
		return nil
	}
	running := c.kubeProxies()
	f := Finding{Severity: Note, Evidence: append([]Evidence{k.read("kube-proxy-replacement")}, running...)}
	switch {
	case k.replacesProxy() && len(running) > 0:
		f.Fault = "both"
		f.What = "kube-proxy runs beside Cilium, which replaces it."
		f.Cost = "Both follow every service and endpoint of the cluster, and take CPU time and memory for that; packets that Cilium leaves to the node's stack pass kube-proxy's rules as well. It was not measured. " +
			"While a cluster moves to Cilium's replacement, both are right."
		f.Do = removeProxy + "Before, k8sServiceHost and k8sServicePort of Cilium's chart have to name the API server itself; then, on each node: iptables-save | grep -v KUBE | iptables-restore"
	case slices.Contains([]string{"false", "disabled"}, k.value("kube-proxy-replacement")) && !k.on("bpf-lb-sock") && k.chained() == "":
		f.Fault = "off"
		f.What = "Cilium leaves services to kube-proxy."
		f.Evidence = append(f.Evidence, k.read("bpf-lb-sock"))
		f.Cost = "kube-proxy translates the first packet of each connection by rules of netfilter, and all later ones by conntrack, which also keeps Cilium from routing past the node's stack. In test clusters, a request to a Service of 16,000 backends took 5.65 times (5.43–5.88) the time of one with 1 backend with kube-proxy in iptables mode, " +
			"1.04 times (0.99–1.09) in nftables mode, and 1.05 times (1.00–1.10) with Cilium in its place (docs/results/cilium.md)."
		f.Do = k.helm("kubeProxyReplacement=true,k8sServiceHost=API_SERVER,k8sServicePort=PORT") + "; " + removeProxy + "Try it on a cluster without traffic; slipstream run service-routing-kubernetes before and after shows what it changes"
	default:
		return nil
	}
	return []Finding{f}
}

// ciliumSocketLB finds services whose addresses are translated in each packet of a pod. With Gateway API, Cilium's chart wants that.
func ciliumSocketLB(c Cluster) []Finding {
	k, ok := c.judged()
	if !ok || !k.replacesProxy() || k.socketLB() || k.on("enable-gateway-api") {
		return nil
	}
	return []Finding{{
		Severity: Note,
		What:     "Cilium translates the address of a service in each packet of a pod, and not once when its socket connects.",
		Evidence: []Evidence{k.read("bpf-lb-sock-hostns-only"), k.read("kube-proxy-replacement")},
		Cost: "Each packet to and from a service takes a lookup and a translation at the pod's device. It was not measured alone: in a test cluster that translates at the socket, a round trip by ClusterIP took no longer than one by the pod's address (docs/results/cilium.md). " +
			"The setting is right if pods have sidecars of a service mesh such as Istio, or kernels of their own (KubeVirt, Kata Containers, gVisor).",
		Do: k.helm("socketLB.hostNamespaceOnly=false") + "   # only without such pods. slipstream run kubernetes before and after, then slipstream compare BEFORE AFTER",
	}}
}

// onPremises are providers whose networks carry packets with addresses of pods between nodes of one subnet. Networks of clouds drop
// them unless they know the addresses.
var onPremises = []string{"", "kind", "k3s", "rke2", "metal3"}

// subnet returns a network in which all nodes have addresses, and the node where it was read; the zero Prefix if there is none.
func (c Cluster) subnet() (netip.Prefix, string) {
	for _, n := range c.Nodes {
		if !slices.Contains(onPremises, n.Provider) {
			return netip.Prefix{}, ""
		}
	}
	for _, n := range c.Nodes {
		nic, prefix := n.nic()
		if nic.Name != "" && !slices.ContainsFunc(c.Nodes, func(other ClusterNode) bool { return !prefix.Contains(other.Address) }) {
			return prefix.Masked(), n.Name
		}
	}
	return netip.Prefix{}, ""
}

// nic returns the device with the node's address, and that address with its network; a zero Device if the node was not examined.
func (n ClusterNode) nic() (Device, netip.Prefix) {
	if n.Machine == nil {
		return Device{}, netip.Prefix{}
	}
	for _, d := range n.Machine.Devices {
		for _, p := range d.Addresses {
			if p.Addr() == n.Address {
				return d, p
			}
		}
	}
	return Device{}, netip.Prefix{}
}

// ciliumTunnel finds a tunnel between nodes of one subnet. It leaves out what the tunnel may be there for: other clusters, encryption,
// and addresses of pods that are not of one range for each node.
func ciliumTunnel(c Cluster) []Finding {
	k, ok := c.judged()
	if !ok || len(c.Nodes) < 2 || k.tunnel() == "" || k.chained() != "" || !k.on("enable-ipv4") || k.encrypts() || k.value("cluster-id") != "0" ||
		!slices.Contains([]string{"cluster-pool", "kubernetes"}, k.value("ipam")) {
		return nil
	}
	subnet, node := c.subnet()
	if !subnet.Addr().Is4() {
		return nil
	}
	mode := "routing-mode"
	if k.set("tunnel") {
		mode = "tunnel"
	}
	return []Finding{{
		Severity: Note,
		What:     fmt.Sprintf("Cilium encapsulates packets of pods (%s), and all nodes are in one subnet, where it could route them.", k.tunnel()),
		Evidence: []Evidence{k.read(mode), evidence("ip addr, on "+node, "%s has the addresses of all %d nodes", subnet, len(c.Nodes))},
		Cost: "In test clusters with Cilium, a round trip between pods took 0.64 (0.57–0.73) of the time with flannel's VXLAN if Cilium routed, and 0.89 (0.78–1.02) if it encapsulated; a stream had 1.18 (1.10–1.26) and 1.02 (0.99–1.05) of the throughput (docs/results/cilium.md). " +
			"The tunnel is right if the network between the nodes is not one Ethernet, or drops packets with addresses of pods, as those of clouds do and switches with port security may.",
		Do: k.helm("routingMode=native,autoDirectNodeRoutes=true,ipv4NativeRoutingCIDR=PODS") + "   # on a cluster without traffic: until all agents have restarted, pods of different nodes do not reach each other. slipstream run kubernetes before and after, then slipstream compare BEFORE AFTER",
	}}
}

// overhead returns the minimum number of bytes that Cilium adds to a packet from a node to another one.
func (c *Cilium) overhead(n ClusterNode) int {
	switch {
	case c.tunnel() == "":
		return 0
	case c.value("underlay-protocol") == "ipv6" || n.Address.Is6():
		return 70
	}
	return 50 // VXLAN, or Geneve without options, over IPv4
}

// ciliumMTU finds pods whose packets are larger than what the NIC carries, or much smaller. The rules for other overlays do not judge
// Cilium's: its tunnel device leaves the MTU to the routes.
func ciliumMTU(c Cluster) (found []Finding) {
	k, ok := c.judged()
	if !ok || k.chained() != "" {
		return nil
	}
	for _, n := range c.Nodes {
		nic, _ := n.nic()
		if nic.Name == "" {
			continue
		}
		most := nic.MTU - k.overhead(n)
		var large, small []Device
		for _, d := range n.Machine.Devices {
			switch {
			case d.Pod == nil || d.Pod.MTU == 0 || !strings.HasPrefix(d.Name, "lxc"):
			case d.Pod.MTU > most:
				large = append(large, d)
			case d.Pod.MTU+muchSmaller <= most:
				small = append(small, d)
			}
		}
		if len(large) > 0 {
			found = append(found, k.mtu(n, nic, large, Finding{
				Severity: Warning, Fault: "too large",
				What: fmt.Sprintf("Pods send packets that are too large for %s by up to %d bytes: %s.", nic.Name, maxMTU(large)-most, some(names(large))),
				Cost: tooLarge(most),
				Do:   k.helm("MTU=0") + "   # Cilium then takes the smallest MTU of the NICs. If the NIC's MTU changed: kubectl -n kube-system rollout restart daemonset cilium; then create the pods again",
			}))
		}
		if len(small) > 0 {
			found = append(found, k.mtu(n, nic, small, Finding{
				Severity: Note, Fault: "small",
				What: fmt.Sprintf("The MTU of pods could be up to %d: %s sends packets of up to %d bytes.", most, nic.Name, nic.MTU),
				Cost: "More packets for the same data, each with its own cost. Change it only if the NIC of every node, and every switch between them, has the larger MTU.",
				Do:   k.helm("MTU=0") + "   # Cilium then takes the smallest MTU of the NICs; create the pods again. slipstream run kubernetes before and after, then slipstream compare BEFORE AFTER",
			}))
		}
	}
	return found
}

func maxMTU(pods []Device) (most int) {
	for _, d := range pods {
		most = max(most, d.Pod.MTU)
	}
	return most
}

// mtu completes a finding about the MTU of pods on a node.
func (c *Cilium) mtu(n ClusterNode, nic Device, pods []Device, f Finding) Finding {
	f.Where = n.Name
	for _, d := range pods[:min(len(pods), 3)] {
		f.Evidence = append(f.Evidence, evidence("MTU of the default route of the pod behind "+d.Name+" ("+d.Pod.Device+")", "%d", d.Pod.MTU))
	}
	f.Evidence = append(f.Evidence, evidence("/sys/class/net/"+nic.Name+"/mtu", "%d", nic.MTU))
	if tunnel, ok := n.Machine.device("cilium_" + c.tunnel()); ok {
		f.Evidence = append(f.Evidence, evidence("/sys/class/net/"+tunnel.Name+"/mtu", "%d, and %s adds %d bytes", tunnel.MTU, c.tunnel(), c.overhead(n)))
	}
	if c.set("mtu") {
		f.Evidence = append(f.Evidence, c.read("mtu"))
	}
	return f
}
