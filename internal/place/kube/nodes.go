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
	"k8s.io/apimachinery/pkg/labels"

	"slipstream.dev/internal/spec"
)

// ChooseAll returns the nodes that an experiment runs on, one for clients and one for servers in turn: those
// that it names, or else the first by name that accept pods, in a mesh all of them. For pools these are two nodes of
// each. It reads and changes nothing.
func (c *Cluster) ChooseAll(ctx context.Context, config Config) ([]string, error) {
	want, mesh := config.Spec, config.Mesh
	if len(want.NodeNames) > 0 {
		return want.NodeNames, nil
	}
	n := cmp.Or(want.Nodes, 2)
	if want.ClientNode+want.ServerNode != "" || n == 2 && (!mesh || want.Nodes != 0) && want.ClientSelector == nil && want.ServerSelector == nil && len(config.Pools) == 0 {
		client, server, err := c.Choose(ctx, want)
		return []string{client, server}, err
	}
	list, err := c.api.Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", explain(err))
	}
	if len(config.Pools) > 0 {
		return choosePools(list.Items, want, config.Pools)
	}
	most := want.Nodes
	if most == 0 && !mesh {
		most = 2
	}
	return chooseAll(list.Items, want, most)
}

// chooseAll chooses at most the given number of nodes, or all if that is 0, half of them for clients. A node that has the
// labels of both sides goes to the side that has fewer.
func chooseAll(nodes []corev1.Node, want spec.Kubernetes, most int) ([]string, error) {
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
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

// choosePools chooses two nodes for each pool, of which no other pool has one. Pools that ask for more labels choose first.
func choosePools(nodes []corev1.Node, want spec.Kubernetes, pools []spec.Ends) ([]string, error) {
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	order := make([]int, len(pools))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return labelsOf(pools[b]) - labelsOf(pools[a]) })
	chosen := make([]string, 2*len(pools))
	for _, i := range order {
		for side, selector := range []map[string]string{pools[i].Client, pools[i].Server} {
			selector := merged(want.NodeSelector, selector)
			var others []string
			for _, n := range nodes {
				why := unfit(n, selector, wantsWindows(selector), false)
				if why == "" && slices.Contains(chosen, n.Name) {
					why = "is taken by another end or variant"
				}
				if why == "" {
					chosen[2*i+side] = n.Name
					break
				}
				others = append(others, fmt.Sprintf("\n  node %s %s", n.Name, why))
			}
			if chosen[2*i+side] == "" {
				return nil, fmt.Errorf("variants choose nodes by labels, each two of its own, and no node is left with %s%s", labels.FormatLabels(selector), strings.Join(others, ""))
			}
		}
	}
	return chosen, nil
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
func (c *Cluster) Choose(ctx context.Context, want spec.Kubernetes) (client, server string, err error) {
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
		list, err := c.api.Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", "", fmt.Errorf("list nodes: %w", explain(err))
		}
		client, server, err = choose(list.Items, want)
		if err == nil || !slices.ContainsFunc(list.Items, settling) || time.Now().After(settled) || pause(ctx) != nil {
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
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
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
// on one of them. Clients and servers are on the nodes in turn.
func (c *Cluster) readNodes(ctx context.Context, nodes []string, config Config) (windows map[string]bool, tolerated map[string][]corev1.Toleration, err error) {
	windows, tolerated = make(map[string]bool), make(map[string][]corev1.Toleration)
	for i, name := range nodes {
		node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, nil, fmt.Errorf("get node %s: %w", name, explain(err))
		}
		tolerated[name] = tolerations(node)
		if !runsWindows(*node) {
			if config.Windows != "" {
				return nil, nil, fmt.Errorf("node %s does not run Windows, and %s needs it: leave that out, or choose Windows nodes", name, config.Windows)
			}
			continue
		}
		windows[name] = true
		client, server := i%2 == 0 || config.Mesh, i%2 == 1 || config.Mesh
		why := ""
		switch {
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
			return nil, nil, fmt.Errorf("node %s runs Windows, and %s, or choose Linux nodes", name, why)
		}
	}
	return windows, tolerated, nil
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
	if len(selector) > 0 && !labels.SelectorFromSet(selector).Matches(labels.Set(n.Labels)) {
		return fmt.Sprintf("lacks the labels %s of the selector: label it", labels.FormatLabels(selector))
	}
	if why := notReady(n); why != "" {
		return why + ": see kubectl describe node " + n.Name
	}
	if n.Spec.Unschedulable {
		return "is cordoned: run kubectl uncordon " + n.Name
	}
	for _, t := range n.Spec.Taints {
		if keepsPodsOff(t) && !(named && tolerable(t)) {
			return fmt.Sprintf("has the taint %s: remove it with kubectl taint nodes %s %s:%s-", t.ToString(), n.Name, t.Key, t.Effect)
		}
	}
	return ""
}

func keepsPodsOff(t corev1.Taint) bool {
	return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
}

// tolerable distinguishes taints that an administrator sets from those by which Kubernetes marks a node as unhealthy.
func tolerable(t corev1.Taint) bool { return !strings.HasPrefix(t.Key, "node.kubernetes.io/") }

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
