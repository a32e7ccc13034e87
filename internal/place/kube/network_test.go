package kube

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/record"
)

// TestPluginAndMode: devices and annotations of nodes tell the plugin and its mode.
func TestPluginAndMode(t *testing.T) {
	for want, c := range map[string]struct {
		devices     string
		annotations map[string]string
	}{
		"flannel vxlan":     {"lo eth0 cni0 flannel.1 veth0", nil},
		"flannel host-gw":   {"lo eth0 cni0 veth0", map[string]string{flannelBackend: "host-gw"}},
		"flannel wireguard": {"eth0 flannel-wg", nil},
		"calico vxlan":      {"eth0 cali1 vxlan.calico", nil},
		"calico ipip":       {"eth0 cali1 tunl0", map[string]string{calicoIPIP: "192.0.2.7"}},
		"calico routed":     {"eth0 cali1 tunl0", nil},
		"cilium vxlan":      {"eth0 cilium_host cilium_net cilium_vxlan lxc1", nil},
		"cilium routed":     {"eth0 cilium_host cilium_net lxc1", nil},
		" ":                 {"eth0 cni0", nil},
	} {
		if plugin, mode := pluginAndMode(strings.Fields(c.devices), c.annotations); plugin+" "+mode != want {
			t.Errorf("%s: %s %s, want %s", c.devices, plugin, mode, want)
		}
	}
}

// TestNetwork describes the cluster of a run by what its API server and its nodes say.
func TestNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, nil)
		a := node("a", func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.35.1" })
		plugin := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "p", OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "calico-node"}}},
			Spec:       corev1.PodSpec{NodeName: "a", HostNetwork: true, Containers: []corev1.Container{{Image: "registry:5000/helper:v9"}, {Image: "registry:5000/calico/node:v3.30.1@sha256:00"}}},
		}
		if err := errors.Join(api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &a, ""), api.Tracker().Add(plugin)); err != nil {
			t.Fatal(err)
		}
		of := func() record.Cluster {
			p, err := c.Up(t.Context(), config(nil))
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := p.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}()
			found, err := p.Network(t.Context(), []record.Node{{Links: []record.Link{{Name: "vxlan.calico"}}}, {KubeProxy: "ipvs"}})
			if err != nil {
				t.Error(err)
			}
			return found
		}
		want := record.Cluster{Kubernetes: "v1.35.1", Plugin: "calico", PluginVersion: "v3.30.1", PluginMode: "vxlan", KubeProxy: "ipvs"}
		if diff := cmp.Diff(want, of()); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if got := of().Network(); got != "calico vxlan, kube-proxy ipvs" {
			t.Error(got)
		}
		// Whoever may not list pods of other namespaces does not learn the version.
		api.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if action.GetNamespace() == "" {
				return refuse(action)
			}
			return false, nil, nil
		})
		want.PluginVersion = ""
		if diff := cmp.Diff(want, of()); diff != "" {
			t.Errorf("without permission (-want +got):\n%s", diff)
		}
	})
}

// TestIdentity: a cluster is the UID of its namespace kube-system, or the address of its API server for whoever may not read that.
func TestIdentity(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.rest = &rest.Config{Host: "https://192.0.2.1"}
	if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-system", UID: "u1"}}); err != nil {
		t.Fatal(err)
	}
	if id, err := c.Identity(t.Context()); id != "u1" || err != nil {
		t.Errorf("%s, %v", id, err)
	}
	api.PrependReactor("get", "namespaces", refuse)
	if id, err := c.Identity(t.Context()); id != "https://192.0.2.1" || err != nil {
		t.Errorf("without permission: %s, %v", id, err)
	}
}
