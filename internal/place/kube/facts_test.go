package kube

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/doctor"
)

// TestLook: what nodes have, by kubelet and network plugin, and which conditions of agents are not met.
func TestLook(t *testing.T) {
	a, b := node("a"), node("b", func(n *corev1.Node) {
		n.Status.NodeInfo.KernelVersion, n.Spec.ProviderID = "6.12", "azure:///subscriptions/b"
	})
	windows := node("w", labelled(corev1.LabelOSStable, "windows"))
	plugin := func(node, image string, change ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "plugin-" + image, OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "kube-flannel-ds"}}},
			Spec:       corev1.PodSpec{NodeName: node, HostNetwork: true, Containers: []corev1.Container{{Image: image}}},
		}
		for _, c := range change {
			c(p)
		}
		return p
	}
	api := fake.NewClientset(&a, &b, &windows, plugin("a", "flannel:v1"),
		plugin("b", "other:v1", func(p *corev1.Pod) { p.OwnerReferences[0].Name, p.Name = "kube-proxy", "kube-proxy-b" }),
		plugin("a", "slipstream", func(p *corev1.Pod) { p.Namespace, p.OwnerReferences[0].Name = "system", "slipstream" }),
		plugin("b", "flannel:v2", func(p *corev1.Pod) { p.Spec.HostNetwork = false }))
	c := &Cluster{api: fakeAPI{Clientset: api, accelerations: []v1alpha1.NodeAcceleration{{
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Status: v1alpha1.NodeAccelerationStatus{Agent: "system/slipstream", Observed: []v1alpha1.ObservedPolicy{{Policy: "rps", Settings: 2}, {Policy: "x"}}, Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonConflict, Message: "policy x"},
			{Type: v1alpha1.ConditionFastpath, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAttached},
			{Type: v1alpha1.ConditionVF, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonVFPresent},
		}},
	}, {
		ObjectMeta: metav1.ObjectMeta{Name: "b"}, Status: v1alpha1.NodeAccelerationStatus{Agent: "system/slipstream"},
	}, {
		ObjectMeta: metav1.ObjectMeta{Name: "w"}, Status: v1alpha1.NodeAccelerationStatus{Agent: "other/slipstream"},
	}}}}
	got, err := c.Facts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	has := func(kernel, plugin string) map[string]string {
		return map[string]string{"architecture": "amd64", "kernel": kernel, "kubelet": "", "container runtime": "", "network plugin": plugin}
	}
	address := netip.MustParseAddr("192.0.2.1")
	want := doctor.Cluster{
		Nodes: []doctor.ClusterNode{{Name: "a", Has: has("", "flannel:v1"), Address: address, System: "An OS"},
			{Name: "b", Has: has("6.12", "none of those that other nodes have"), Address: address, Provider: "azure", System: "An OS", KubeProxy: true}},
		Agents:      []doctor.AgentCondition{{Node: "a", Type: v1alpha1.ConditionReady, Reason: v1alpha1.ReasonConflict, Message: "policy x"}},
		Accelerated: []doctor.Accelerated{{Node: "a", Policies: []string{"rps"}}},
		Gone:        []doctor.AgentGone{{Node: "b", Agent: "system/slipstream"}, {Node: "w", Agent: "other/slipstream", Uninstalled: true}},
	}
	if diff := cmp.Diff(want, got, addresses); diff != "" {
		t.Error(diff)
	}
}

// addresses lets cmp compare them.
var addresses = cmpopts.EquateComparable(netip.Addr{})

// TestLookWithoutRights: what the user may not read is left out, with the permission that it takes, and a cluster without agents has none.
func TestLookWithoutRights(t *testing.T) {
	a := node("a")
	api := fake.NewClientset(&a)
	api.PrependReactor("list", "*", refuse)
	api.PrependReactor("get", "configmaps", refuse)
	got, err := (&Cluster{api: fakeAPI{Clientset: api}}).Facts(t.Context())
	want := doctor.Cluster{Unread: []string{"list nodes", "list pods in all namespaces", "get configmaps in namespace kube-system"}}
	if diff := cmp.Diff(want, got, addresses); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

// TestInternalAddress: a node's address is of IPv4 if it has one, wherever it is in the list.
func TestInternalAddress(t *testing.T) {
	at := func(address string) corev1.NodeAddress {
		return corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: address}
	}
	name := corev1.NodeAddress{Type: corev1.NodeHostName, Address: "192.0.2.9"}
	for _, c := range []struct {
		addresses []corev1.NodeAddress
		want      string
	}{
		{[]corev1.NodeAddress{name, at("2001:db8::1"), at("192.0.2.1"), at("192.0.2.2")}, "192.0.2.1"},
		{[]corev1.NodeAddress{name, at("2001:db8::1"), at("2001:db8::2")}, "2001:db8::1"},
		{[]corev1.NodeAddress{name}, "invalid IP"},
	} {
		if got := internalAddress(corev1.Node{Status: corev1.NodeStatus{Addresses: c.addresses}}).String(); got != c.want {
			t.Errorf("of %v: %s, want %s", c.addresses, got, c.want)
		}
	}
}
