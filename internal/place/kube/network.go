package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/record"
)

// Identity returns what tells a cluster from others, however it is reached: the UID of its namespace kube-system. Whoever may not read
// that gets the address of the API server.
func (c *Cluster) Identity(ctx context.Context) (string, error) {
	n, err := c.api.Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsNotFound(err):
		return c.rest.Host, nil
	case err != nil:
		return "", fmt.Errorf("get namespace %s: %w", metav1.NamespaceSystem, explain(err))
	}
	return string(n.UID), nil
}

// Permit returns an error that names what a run lacks: permissions, programs in its image, or what it needs of its nodes.
func (c *Cluster) Permit(ctx context.Context, config Config) error {
	if err := lacksPrograms(config); err != nil {
		return err
	}
	if err := c.check(ctx, c.permissions(config)); err != nil {
		return err
	}
	_, err := newPods(c, config).readNodes(ctx, nodesOf(config.Spec))
	return err
}

// pluginPod returns the pod of the network plugin on a node; nil if there is none, or if the user may not list pods.
func (c *Cluster) pluginPod(ctx context.Context, node string) (*corev1.Pod, error) {
	list, err := c.api.Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if apierrors.IsForbidden(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", node, explain(err))
	}
	i := slices.IndexFunc(list.Items, func(p corev1.Pod) bool {
		return p.Spec.NodeName == node && p.Spec.HostNetwork && networkPlugin(p) != ""
	})
	if i < 0 {
		return nil, nil
	}
	return &list.Items[i], nil
}

// Network reads what the cluster of the run is now. The nodes have the given facts.
func (p *Pods) Network(ctx context.Context, nodes []record.Node) (record.Cluster, error) {
	var found record.Cluster
	var devices []string
	for _, n := range nodes {
		found.KubeProxy = cmp.Or(found.KubeProxy, n.KubeProxy)
		for _, l := range n.Links {
			devices = append(devices, l.Name)
		}
	}
	name := nodesOf(p.spec)[0]
	node, err := p.cluster.api.Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return found, fmt.Errorf("get node %s: %w", name, explain(err))
	}
	found.Kubernetes = node.Status.NodeInfo.KubeletVersion
	found.Plugin, found.PluginMode = pluginAndMode(devices, node.Annotations)
	plugin, err := p.cluster.pluginPod(ctx, name)
	if plugin != nil {
		found.Plugin, found.PluginVersion = networkPlugin(*plugin), pluginVersion(plugin)
	}
	return found, err
}

// Annotations by which plugins tell each other, on nodes, how to reach the pods there.
const (
	flannelBackend = "flannel.alpha.coreos.com/backend-type"
	calicoIPIP     = "projectcalico.org/IPv4IPIPTunnelAddr"
)

// shapes tell a plugin and its mode from the beginning of a device's name. Plugins that are chained behind another one come last.
var shapes = []struct{ device, plugin, mode string }{
	{"cilium_vxlan", "cilium", "vxlan"}, {"cilium_geneve", "cilium", "geneve"},
	{"flannel-wg", "flannel", "wireguard"}, {"flannel.", "flannel", "vxlan"},
	{"vxlan.calico", "calico", "vxlan"}, {"wireguard.cali", "calico", "wireguard"}, {"cali", "calico", "routed"},
	{"cilium_host", "cilium", "routed"},
}

// pluginAndMode tells the network plugin of nodes and how it connects them, each "" if that is not known.
func pluginAndMode(devices []string, annotations map[string]string) (plugin, mode string) {
	if backend := annotations[flannelBackend]; backend != "" {
		return "flannel", strings.ToLower(backend)
	}
	for _, s := range shapes {
		if !slices.ContainsFunc(devices, func(d string) bool { return strings.HasPrefix(d, s.device) }) {
			continue
		}
		if s.mode == "routed" && annotations[calicoIPIP] != "" {
			return s.plugin, "ipip"
		}
		return s.plugin, s.mode
	}
	return "", ""
}

// pluginVersion returns the tag of the image that has the plugin's name in its own.
func pluginVersion(p *corev1.Pod) string {
	word, _, _ := strings.Cut(networkPlugin(*p), "-")
	for _, c := range p.Spec.Containers {
		if tag := tagOf(c.Image, word); tag != "" {
			return tag
		}
	}
	return ""
}

// tagOf returns the tag of an image that has a word in its name; "" if there is none.
func tagOf(image, word string) string {
	image, _, _ = strings.Cut(image, "@")
	slash := strings.LastIndex(image, "/") // a registry may have a port
	_, tag, _ := strings.Cut(image[slash+1:], ":")
	if !strings.Contains(strings.TrimSuffix(image, tag), word) {
		return ""
	}
	return tag
}
