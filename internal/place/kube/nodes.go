package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// ChooseAll returns the nodes that an experiment runs on, one for clients and one for servers in turn: those
// that it names, or else the first by name that accept pods, in a mesh all of them. For pools these are two nodes of
// each. It reads and changes nothing.
func (c *Cluster) ChooseAll(ctx context.Context, config Config) ([]string, error) {
	want, mesh := config.Spec, config.Mesh
	if len(want.NodeNames) > 0 {
		return want.NodeNames, c.checkPools(ctx, config)
	}
	n := cmp.Or(want.Nodes, 2)
	if want.ClientNode+want.ServerNode != "" || n == 2 && (!mesh || want.Nodes != 0) && want.ClientSelector == nil && want.ServerSelector == nil && len(config.Pools) == 0 {
		client, server, err := c.Choose(ctx, config)
		return []string{client, server}, err
	}
	list, err := c.listNodes(ctx)
	if err != nil {
		return nil, err
	}
	nodes := inOrder(list, config)
	if err := noneSelected(nodes, want); err != nil {
		return nil, err
	}
	if len(config.Pools) > 0 {
		return choosePools(nodes, config)
	}
	most := want.Nodes
	if most == 0 && !mesh {
		most = 2
	}
	return chooseAll(nodes, want, most)
}

// listNodes returns all nodes. Its error says which role allows that, because those of namespaces do not.
func (c *Cluster) listNodes(ctx context.Context) ([]corev1.Node, error) {
	list, err := c.api.Nodes().List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("list nodes: %w\n%s", err, c.nodeRole(ctx))
	}
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", explain(err))
	}
	return list.Items, nil
}

// inOrder returns nodes by name. Those that lack an image which is never pulled come last.
func inOrder(nodes []corev1.Node, config Config) []corev1.Node {
	image, pull := imageOf(config)
	lacks := func(n corev1.Node) int {
		if _, usable := imageOn(&n, image, pull); !usable {
			return 1
		}
		return 0
	}
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return cmp.Or(lacks(a)-lacks(b), cmp.Compare(a.Name, b.Name)) })
	return nodes
}

// noneSelected returns an error if no node at all has the labels of a selector, with the values that its labels have.
func noneSelected(nodes []corev1.Node, want spec.Kubernetes) error {
	for _, s := range []struct {
		field  string
		labels map[string]string
	}{{"nodeSelector (--selector)", want.NodeSelector}, {"clientSelector", want.ClientSelector}, {"serverSelector", want.ServerSelector}} {
		selector := labels.SelectorFromSet(s.labels)
		if len(nodes) == 0 || slices.ContainsFunc(nodes, func(n corev1.Node) bool { return selector.Matches(labels.Set(n.Labels)) }) {
			continue
		}
		text := fmt.Sprintf("no node has the labels %s of %s", labels.FormatLabels(s.labels), s.field)
		for _, key := range slices.Sorted(maps.Keys(s.labels)) {
			text += "; " + valuesOf(nodes, key)
		}
		return errors.New(text)
	}
	return nil
}

// valuesOf says which values a label has on nodes.
func valuesOf(nodes []corev1.Node, key string) string {
	const most = 8
	var values []string
	for _, n := range nodes {
		if value, ok := n.Labels[key]; ok && !slices.Contains(values, value) {
			values = append(values, value)
		}
	}
	if len(values) == 0 {
		return fmt.Sprintf("no node has a label %s", key)
	}
	slices.Sort(values)
	return fmt.Sprintf("nodes have %s=%s", key, words.First(values, most))
}

// chooseAll chooses at most the given number of nodes, or all if that is 0, half of them for clients. A node that has the
// labels of both sides goes to the side that has fewer.
func chooseAll(nodes []corev1.Node, want spec.Kubernetes, most int) ([]string, error) {
	selected := func(n corev1.Node, selector map[string]string) bool {
		return labels.SelectorFromSet(selector).Matches(labels.Set(n.Labels))
	}
	var clients, servers, others []string
	for _, n := range nodes {
		why := unfit(n, want.NodeSelector, wantsWindows(want.NodeSelector, want.ClientSelector, want.ServerSelector), false)
		client, server := selected(n, want.ClientSelector), selected(n, want.ServerSelector)
		switch {
		case why != "":
			others = append(others, fmt.Sprintf("node %s %s", n.Name, why))
		case !client && !server:
			others = append(others, fmt.Sprintf("node %s has neither the labels of clients nor those of servers", n.Name))
		case client && (!server || len(clients) <= len(servers)):
			clients = append(clients, n.Name)
		default:
			servers = append(servers, n.Name)
		}
	}
	if most == 0 {
		most = len(clients) + len(servers)
		if largest := 2 * spec.MaxPairs; most > largest {
			return nil, fmt.Errorf("%d nodes accept pods, and a mesh has at most %d: choose some with nodeSelector, or the first by name with nodes: %d", most, largest, largest)
		}
	}
	var chosen []string
	for i := range max(len(clients), len(servers)) {
		for _, side := range [][]string{clients, servers} {
			if i < len(side) && len(chosen) < most {
				chosen = append(chosen, side[i])
			}
		}
	}
	balanced := min(len(clients), len(servers)) >= most/2
	if len(chosen) >= 2 && len(chosen) == most && balanced {
		return chosen, nil
	}
	text := fmt.Sprintf("the run needs %d nodes, half of them for clients; pods can be scheduled to %d for clients and %d for servers", max(most, 2), len(clients), len(servers))
	for _, o := range others {
		text += "\n  " + o
	}
	return nil, errors.New(text)
}

// poolSelectors returns the labels that the nodes of pools must have: of the clients and of the servers of each in turn.
func poolSelectors(config Config) (all []map[string]string) {
	for _, pool := range config.Pools {
		all = append(all, merged(config.Spec.NodeSelector, pool.Client), merged(config.Spec.NodeSelector, pool.Server))
	}
	return all
}

// choosePools chooses two nodes for each pool, of which no other pool has one. Pools that ask for more labels choose first, and give
// a node up to another pool if they can take another one.
func choosePools(nodes []corev1.Node, config Config) ([]string, error) {
	selectors := poolSelectors(config)
	m := matching{nodes: nodes, taken: make(map[string]int), fits: func(end int, n corev1.Node) string {
		return unfit(n, selectors[end], wantsWindows(selectors[end]), false)
	}}
	order := make([]int, len(selectors))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return labelsOf(config.Pools[b/2]) - labelsOf(config.Pools[a/2]) })
	for _, end := range order {
		if m.take(end, make(map[string]bool)) {
			continue
		}
		text := "each variant that chooses nodes by labels needs two of its own, and no node is left with " + labels.FormatLabels(selectors[end])
		for _, n := range nodes {
			text += fmt.Sprintf("\n  node %s %s", n.Name, cmp.Or(m.fits(end, n), "is taken by another end or variant"))
		}
		return nil, errors.New(text)
	}
	return m.chosen(len(selectors)), nil
}

// matching assigns nodes to ends, each node to one.
type matching struct {
	nodes []corev1.Node
	// fits says why a node does not suit an end, "" if it does.
	fits  func(end int, n corev1.Node) string
	taken map[string]int // ends by node
}

// take gives an end a node, and reports whether there is one. If all that fit are taken, another end has to take another node. tried
// are the nodes that this has been tried with.
func (m *matching) take(end int, tried map[string]bool) bool {
	var others []corev1.Node
	for _, n := range m.nodes {
		if m.fits(end, n) != "" {
			continue
		}
		if _, taken := m.taken[n.Name]; !taken {
			m.taken[n.Name] = end
			return true
		}
		others = append(others, n)
	}
	for _, n := range others {
		if tried[n.Name] {
			continue
		}
		tried[n.Name] = true
		if m.take(m.taken[n.Name], tried) {
			m.taken[n.Name] = end
			return true
		}
	}
	return false
}

// chosen returns the nodes of all ends.
func (m *matching) chosen(ends int) []string {
	all := make([]string, ends)
	for node, end := range m.taken {
		all[end] = node
	}
	return all
}

// checkPools returns an error if named nodes lack the labels by which variants choose them: what one pool measures would be reported as
// another's. Two nodes in turn belong to each pool.
func (c *Cluster) checkPools(ctx context.Context, config Config) error {
	names, selectors := config.Spec.NodeNames, poolSelectors(config)
	if len(selectors) == 0 {
		return nil
	}
	has := make(map[string]labels.Set)
	for _, name := range names {
		n, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get node %s: %w", name, explain(err))
		}
		has[name] = n.Labels
	}
	for i, selector := range selectors {
		if i < len(names) && !labels.SelectorFromSet(selector).Matches(has[names[i]]) {
			return fmt.Errorf("spec.target.kubernetes.nodeNames[%d]: node %s lacks the labels %s, by which a variant chooses it: "+
				"list two nodes for each selection of labels, in the order of the variants, or leave nodeNames out", i, names[i], labels.FormatLabels(selector))
		}
	}
	return nil
}

func labelsOf(n spec.Ends) int { return len(n.Client) + len(n.Server) }

func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, b)
	return all
}

// nodesOf returns the nodes of a run, one for clients and one for servers in turn.
func nodesOf(want spec.Kubernetes) []string {
	if len(want.NodeNames) > 0 {
		return want.NodeNames
	}
	return []string{want.ClientNode, want.ServerNode}
}

// Choose returns two nodes that an experiment runs on: those that it names, or else the first by name
// that accept pods. It reads and changes nothing.
func (c *Cluster) Choose(ctx context.Context, config Config) (client, server string, err error) {
	want := config.Spec
	if want.ClientNode != "" && want.ServerNode != "" {
		// Whoever may not list nodes can still name two.
		var pair []corev1.Node
		for _, name := range []string{want.ClientNode, want.ServerNode} {
			node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
			if err == nil {
				pair = append(pair, *node)
			} else if !apierrors.IsNotFound(err) {
				return "", "", fmt.Errorf("get node %s: %w", name, explain(err))
			}
		}
		if len(pair) == 2 {
			return choose(pair, want)
		}
	}
	settled := time.Now().Add(settleTime)
	for {
		nodes, err := c.listNodes(ctx)
		if err != nil {
			return "", "", err
		}
		client, server, err = choose(inOrder(nodes, config), want)
		if err == nil || !slices.ContainsFunc(nodes, settling) || time.Now().After(settled) || pause(ctx) != nil {
			return client, server, err
		}
	}
}

// settleTime bounds how long a node that has become ready may keep its not-ready taint.
const settleTime = 10 * time.Second

func settling(n corev1.Node) bool {
	return notReady(n) == "" && slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady })
}

func choose(nodes []corev1.Node, want spec.Kubernetes) (client, server string, err error) {
	if want.ClientNode == "" || want.ServerNode == "" {
		if err := noneSelected(nodes, spec.Kubernetes{NodeSelector: want.NodeSelector}); err != nil {
			return "", "", err
		}
	}
	for _, named := range []struct{ name, flag string }{{want.ClientNode, "--client-node"}, {want.ServerNode, "--server-node"}} {
		if named.name == "" {
			continue
		}
		i := slices.IndexFunc(nodes, func(n corev1.Node) bool { return n.Name == named.name })
		if i < 0 {
			return "", "", fmt.Errorf("node %s does not exist; the nodes are %s", named.name, names(nodes))
		}
		if why := unfit(nodes[i], nil, true, true); why != "" {
			return "", "", fmt.Errorf("node %s %s, or name another with %s", named.name, why, named.flag)
		}
	}
	client, server = want.ClientNode, want.ServerNode
	var others []string
	for _, n := range nodes {
		if n.Name == want.ClientNode || n.Name == want.ServerNode {
			continue
		}
		why := unfit(n, want.NodeSelector, wantsWindows(want.NodeSelector), false)
		switch {
		case why != "":
			others = append(others, fmt.Sprintf("node %s %s", n.Name, why))
		case client == "":
			client = n.Name
		case server == "":
			server = n.Name
		}
	}
	if client != "" && server != "" {
		return client, server, nil
	}
	text := "a run needs two nodes, one for clients and one for servers, because traffic within a node does not use the overlay; "
	switch {
	case len(nodes) == 0:
		text += "this cluster has no nodes"
	case len(nodes) == 1 && len(others) == 0:
		text += fmt.Sprintf("this cluster has only node %s: add another, or run in a lab (slipstream run demo)", nodes[0].Name)
	default:
		can := "no node of this cluster"
		if one := client + server; one != "" {
			can = "only node " + one
		}
		text += "pods can be scheduled to " + can
		for _, o := range others {
			text += "\n  " + o
		}
	}
	return "", "", errors.New(text)
}

// runsWindows reports whether a node runs Windows, as its kubelet says in a label.
func runsWindows(n corev1.Node) bool { return n.Labels[corev1.LabelOSStable] == string(corev1.Windows) }

// readNodes reads which of the run's nodes run Windows, and what its pods must tolerate. It fails if the run needs Linux
// on one of them. The note says what else about them bears on the run. Clients and servers are on the nodes in turn.
func (p *Pods) readNodes(ctx context.Context, nodes []string) (note string, err error) {
	config := p.config
	p.windows, p.tolerations = make(map[string]bool), make(map[string][]corev1.Toleration)
	p.fitting, p.unfit = make(map[string]build.Build), make(map[string]error)
	kinds := make(map[string][]string) // names by architecture
	for i, name := range nodes {
		node, err := p.cluster.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", fmt.Errorf("get node %s: %w", name, explain(err))
		}
		if err := hasAddresses(node, config); err != nil {
			return "", err
		}
		p.tolerations[name] = tolerations(node)
		if arch := node.Status.NodeInfo.Architecture; arch != "" {
			kinds[arch] = append(kinds[arch], name)
		}
		if !runsWindows(*node) {
			if config.Windows != "" {
				return "", fmt.Errorf("node %s does not run Windows, and %s needs it: leave that out, or choose Windows nodes", name, config.Windows)
			}
			if err := p.fitNode(node); err != nil {
				return "", err
			}
			continue
		}
		p.windows[name] = true
		client, server := i%2 == 0 || config.Mesh, i%2 == 1 || config.Mesh
		why := ""
		switch {
		case config.Spec.BaseImage != "":
			why = "its pods need an image with slipstream.exe: name one with --image, not --base-image"
		case config.Accelerate:
			why = "accelerators need Linux: leave them out"
		case len(config.Spec.Observe) > 0:
			why = "DaemonSets are observed on Linux nodes only: leave out observe"
		case config.Pod || config.Service:
			why = "its pods for traffic are host processes, which have the node's own network: give every variant the path native"
		case config.Spec.Unprivileged:
			why = "its pods for traffic are host processes, which are privileged: leave out unprivileged"
		case client && config.LinuxClient != "":
			why = config.LinuxClient + " needs Linux: leave that out"
		case server && config.LinuxServer != "":
			why = config.LinuxServer + " needs Linux: leave that out"
		}
		if why != "" {
			return "", fmt.Errorf("node %s runs Windows, and %s, or choose Linux nodes", name, why)
		}
	}
	return mixed(kinds), p.enough(nodes)
}

// mixed returns a note if the nodes have more than one CPU architecture; "" if not. kinds are their names by architecture.
func mixed(kinds map[string][]string) string {
	if len(kinds) < 2 {
		return ""
	}
	var all []string
	for _, arch := range slices.Sorted(maps.Keys(kinds)) {
		const most = 3
		all = append(all, fmt.Sprintf("%s: %s", arch, words.First(kinds[arch], most)))
	}
	return fmt.Sprintf("the nodes have different CPU architectures (%s): the image must be for each of them, as make image builds it, and what is measured between two of them depends on both", strings.Join(all, "; "))
}

// hasAddresses returns an error if a needed IP version is missing: for native traffic, from the node's addresses; otherwise,
// from those of the node and of its pods.
func hasAddresses(n *corev1.Node, config Config) error {
	var all []string
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			all = append(all, a.Address)
		}
	}
	if err := lacksVersion(n.Name, all, config.Need, " on the path native"); config.Native && err != nil {
		return err
	}
	for _, block := range n.Spec.PodCIDRs {
		address, _, _ := strings.Cut(block, "/")
		all = append(all, address)
	}
	return lacksVersion(n.Name, all, config.Need, "")
}

// lacksVersion returns an error if none of a node's addresses has an IP version that is needed. where is the end of its
// sentence. A node without addresses is not judged.
func lacksVersion(node string, addresses []string, need map[int]string, where string) error {
	v4, v6 := ips(addresses)
	for version, has := range map[int]bool{4: v4.IsValid(), 6: v6.IsValid()} {
		if what := need[version]; what != "" && !has && len(addresses) > 0 {
			return fmt.Errorf("node %s has no IPv%d address, which %s needs%s: choose the other version (ip: %d)", node, version, what, where, 10-version)
		}
	}
	return nil
}

// hasPodRoom returns an error if a node does not take as many pods as a run has there. It is for a dry run: before a run, the scheduler says
// so.
func (c *Cluster) hasPodRoom(ctx context.Context, pods []*corev1.Pod) error {
	need := make(map[string]int64)
	for _, pod := range pods {
		need[nodeOf(pod)]++
	}
	for _, name := range slices.Sorted(maps.Keys(need)) {
		node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get node %s: %w", name, explain(err))
		}
		takes, ok := node.Status.Allocatable[corev1.ResourcePods]
		if !ok {
			continue
		}
		list, err := c.api.Pods("").List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", name).String()})
		if apierrors.IsForbidden(err) { // a run needs no such permission
			return nil
		}
		if err != nil {
			return fmt.Errorf("list pods of node %s: %w", name, explain(err))
		}
		has := int64(len(slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
			return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		})))
		if has+need[name] > takes.Value() {
			return fmt.Errorf("node %s takes %d pods and has %d, and the run needs %d there: end some of them, name another node, or take fewer pairs (spec.pairs)", name, takes.Value(), has, need[name])
		}
	}
	return nil
}

// wantsWindows reports whether the labels that nodes must have are those of Windows nodes. Otherwise a run chooses no
// Windows nodes, because they have only one path.
func wantsWindows(selectors ...map[string]string) bool {
	return slices.ContainsFunc(selectors, func(s map[string]string) bool { return s[corev1.LabelOSStable] == string(corev1.Windows) })
}

// unfit says why a node accepts no pods and what to do about it; "" if it does. The pods of a run tolerate the taints that
// an administrator has set on a node which the user names.
func unfit(n corev1.Node, selector map[string]string, windows, named bool) string {
	if os := n.Labels[corev1.LabelOSStable]; os != "" && os != string(corev1.Linux) && !(windows && runsWindows(n)) {
		return fmt.Sprintf("runs %s: name a Linux node", os)
	}
	if kind := virtual(n); kind != "" {
		return fmt.Sprintf("is a virtual node (%s), which takes no pods of a run or runs them elsewhere: choose one that is a machine", kind)
	}
	if len(selector) > 0 && !labels.SelectorFromSet(selector).Matches(labels.Set(n.Labels)) {
		return fmt.Sprintf("lacks the labels %s of the selector", labels.FormatLabels(selector))
	}
	if why := notReady(n); why != "" {
		return why + ": see kubectl describe node " + n.Name
	}
	if n.DeletionTimestamp != nil {
		return "is being deleted: choose one that stays"
	}
	if n.Spec.Unschedulable {
		return "is cordoned, so somebody keeps pods off it: when that is over, kubectl uncordon " + n.Name
	}
	for _, t := range n.Spec.Taints {
		switch {
		case !keepsPodsOff(t) || named && tolerable(t):
		case tolerable(t):
			return fmt.Sprintf("has the taint %s: pods of a run tolerate it on a node that is named, with --client-node %s or --server-node %[2]s", t.ToString(), n.Name)
		case passing(t) != "":
			return fmt.Sprintf("has the taint %s, %s", t.ToString(), passing(t))
		default:
			return fmt.Sprintf("has the taint %s, which Kubernetes sets on a node that is not healthy: see kubectl describe node %s", t.ToString(), n.Name)
		}
	}
	return ""
}

// virtual returns what provides a node that is no machine, by the labels, annotations and taints that it gives them; "" for a machine.
func virtual(n corev1.Node) string {
	switch {
	case n.Labels["type"] == "virtual-kubelet", slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "virtual-kubelet.io/provider" }):
		return "virtual-kubelet"
	case n.Labels["eks.amazonaws.com/compute-type"] == "fargate":
		return "Fargate"
	case n.Annotations["kwok.x-k8s.io/node"] != "":
		return "kwok"
	}
	return ""
}

func keepsPodsOff(t corev1.Taint) bool {
	return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
}

// tolerable distinguishes taints that an administrator sets from those by which Kubernetes marks a node as unhealthy, and those of a
// node that comes or goes.
func tolerable(t corev1.Taint) bool {
	return !strings.HasPrefix(t.Key, "node.kubernetes.io/") && passing(t) == ""
}

// Taints of autoscalers and clouds for nodes that they are about to remove, and of clouds and network plugins for nodes that are not
// ready for pods yet. Those that end in a slash are prefixes.
var (
	leaving = []string{
		"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption", "node.cloudprovider.kubernetes.io/shutdown",
		"aws-node-termination-handler/", "cloud.google.com/impending-node-termination",
	}
	coming = []string{"node.cloudprovider.kubernetes.io/uninitialized", "karpenter.sh/unregistered", "node.cilium.io/agent-not-ready"}
)

// passing says what a taint of a node that comes or goes means, and what to do; "" for other taints.
func passing(t corev1.Taint) string {
	switch {
	case among(leaving, t):
		return "by which an autoscaler or a cloud marks a node that it is about to remove: choose one that stays"
	case among(coming, t):
		return "which goes once the node is ready for pods: try again then, or choose one that is"
	}
	return ""
}

func among(keys []string, t corev1.Taint) bool {
	return slices.ContainsFunc(keys, func(key string) bool {
		return t.Key == key || strings.HasSuffix(key, "/") && strings.HasPrefix(t.Key, key)
	})
}

// leaves says why a node does not stay in the cluster, or not with its pods; "" if it does.
func leaves(n *corev1.Node) string {
	if n.DeletionTimestamp != nil {
		return "it is being deleted"
	}
	for _, t := range n.Spec.Taints {
		if among(leaving, t) {
			return "it has the taint " + t.ToString()
		}
	}
	if n.Spec.Unschedulable {
		return "it is cordoned"
	}
	return ""
}

// tolerations let pods on a node in spite of its taints.
func tolerations(n *corev1.Node) (all []corev1.Toleration) {
	for _, t := range n.Spec.Taints {
		if keepsPodsOff(t) && tolerable(t) {
			all = append(all, corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpEqual, Value: t.Value, Effect: t.Effect})
		}
	}
	return all
}

func notReady(n corev1.Node) string {
	for _, c := range n.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		if c.Status == corev1.ConditionTrue {
			return ""
		}
		return fmt.Sprintf("is not ready (%s)", cmp.Or(c.Message, c.Reason, "no reason given"))
	}
	return "is not ready (it has no Ready condition yet)"
}

func names(nodes []corev1.Node) string {
	var all []string
	for _, n := range nodes {
		all = append(all, n.Name)
	}
	return cmp.Or(strings.Join(all, ", "), "none")
}

// ips returns the first IPv4 and the first IPv6 address.
func ips(addresses []string) (v4, v6 netip.Addr) {
	for _, a := range addresses {
		ip, err := netip.ParseAddr(a)
		switch {
		case err != nil: // "None", or a name
		case ip.Is4() && !v4.IsValid():
			v4 = ip
		case ip.Is6() && !v6.IsValid():
			v6 = ip
		}
	}
	return v4, v6
}
