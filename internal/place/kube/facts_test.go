package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/doctor"
)

// TestLook: what nodes have, by kubelet and network plugin, and which conditions of agents are not met.
func TestLook(t *testing.T) {
	a, b := node("a"), node("b", func(n *corev1.Node) { n.Status.NodeInfo.KernelVersion = "6.12" })
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
		plugin("b", "other:v1", func(p *corev1.Pod) { p.OwnerReferences[0].Name = "kube-proxy" }),
		plugin("a", "slipstream", func(p *corev1.Pod) { p.Namespace, p.OwnerReferences[0].Name = "system", "slipstream" }),
		plugin("b", "flannel:v2", func(p *corev1.Pod) { p.Spec.HostNetwork = false }))
	c := &Cluster{api: fakeAPI{Clientset: api, accelerations: []v1alpha1.NodeAcceleration{{
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Status: v1alpha1.NodeAccelerationStatus{Agent: "system/slipstream", Conditions: []metav1.Condition{
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
		return map[string]string{"architecture": "", "kernel": kernel, "kubelet": "", "container runtime": "", "network plugin": plugin}
	}
	want := doctor.Cluster{
		Nodes:  []doctor.ClusterNode{{Name: "a", Has: has("", "flannel:v1")}, {Name: "b", Has: has("6.12", "none of those that other nodes have")}},
		Agents: []doctor.AgentCondition{{Node: "a", Type: v1alpha1.ConditionReady, Reason: v1alpha1.ReasonConflict, Message: "policy x"}},
		Gone:   []doctor.AgentGone{{Node: "b", Agent: "system/slipstream"}, {Node: "w", Agent: "other/slipstream", Uninstalled: true}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestLookWithoutRights: what the user may not read is left out, and a cluster without agents has none.
func TestLookWithoutRights(t *testing.T) {
	a := node("a")
	api := fake.NewClientset(&a)
	api.PrependReactor("list", "*", refuse)
	if got, err := (&Cluster{api: fakeAPI{Clientset: api}}).Facts(t.Context()); err != nil || len(got.Nodes)+len(got.Agents) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
