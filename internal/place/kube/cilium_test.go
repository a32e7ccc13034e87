package kube

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/doctor"
)

// ciliumPod returns a pod of a DaemonSet in the network namespace of node a.
func ciliumPod(namespace, daemon, container, image string) *corev1.Pod {
	controls := true
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: daemon + "-x", OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: daemon, Controller: &controls}}},
		Spec:       corev1.PodSpec{NodeName: "a", HostNetwork: true, Containers: []corev1.Container{{Name: container, Image: image}}},
	}
}

func ciliumSettings(namespace string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "cilium-config"}, Data: map[string]string{"routing-mode": "native"}}
}

// TestCilium: pods of the agent tell of Cilium, and its ConfigMap of its settings. What the user may not read is left out, with the
// permission that it takes.
func TestCilium(t *testing.T) {
	agent := ciliumPod("kube-system", "cilium", "cilium-agent", "quay.io:443/cilium/cilium:v1.20.2@sha256:00")
	envoy := ciliumPod("kube-system", "cilium-envoy", "cilium-envoy", "quay.io/cilium/cilium-envoy:v1.38.3")
	leaving := agent.DeepCopy()
	leaving.DeletionTimestamp, leaving.Finalizers = &metav1.Time{}, []string{"x"}
	settings := map[string]string{"routing-mode": "native"}
	known := doctor.Cilium{DaemonSet: "kube-system/cilium", Version: "v1.20.2", ConfigMap: "kube-system/cilium-config", Settings: settings}
	with := func(change func(*doctor.Cilium)) *doctor.Cilium {
		c := known
		change(&c)
		return &c
	}
	for name, c := range map[string]struct {
		objects []runtime.Object
		refused []string // resources
		want    *doctor.Cilium
		unread  []string
	}{
		"chart": {objects: []runtime.Object{envoy, agent, ciliumSettings("kube-system")}, want: &known},
		"GKE": {objects: []runtime.Object{ciliumPod("kube-system", "anetd", "cilium-agent", "gke.gcr.io/cilium/cilium:v1.15.10-gke.9"), ciliumSettings("kube-system")},
			want: with(func(c *doctor.Cilium) { c.DaemonSet, c.Version = "kube-system/anetd", "v1.15.10-gke.9" })},
		"another namespace": {objects: []runtime.Object{ciliumPod("net", "cilium", "cilium-agent", "registry:5000/mirror@sha256:00"), ciliumSettings("net")},
			want: with(func(c *doctor.Cilium) { c.DaemonSet, c.Version, c.ConfigMap = "net/cilium", "", "net/cilium-config" })},
		"empty": {objects: []runtime.Object{agent, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "cilium-config"}}},
			want: with(func(c *doctor.Cilium) { c.Settings = map[string]string{} })},
		"no settings":                 {objects: []runtime.Object{agent}, want: with(func(c *doctor.Cilium) { c.Settings, c.Unread = nil, "there is no ConfigMap kube-system/cilium-config" })},
		"settings alone, left behind": {objects: []runtime.Object{ciliumSettings("kube-system")}},
		"its proxy alone":             {objects: []runtime.Object{envoy, ciliumSettings("kube-system")}},
		"an agent that ends":          {objects: []runtime.Object{leaving, ciliumSettings("kube-system")}},
		"a ConfigMap that is not readable": {objects: []runtime.Object{agent, ciliumSettings("kube-system")}, refused: []string{"configmaps"}, want: with(func(c *doctor.Cilium) {
			c.Settings, c.Unread = nil, "you may not get configmaps in namespace kube-system"
		})},
		"pods that are not readable": {objects: []runtime.Object{agent, ciliumSettings("kube-system")}, refused: []string{"pods"}, unread: []string{"list pods in all namespaces"},
			want: with(func(c *doctor.Cilium) { c.DaemonSet, c.Version = "", "" })},
		"neither":                          {objects: []runtime.Object{agent, ciliumSettings("kube-system")}, refused: []string{"pods", "configmaps"}, unread: []string{"list pods in all namespaces", "get configmaps in namespace kube-system"}},
		"pods not readable, and no Cilium": {refused: []string{"pods"}, unread: []string{"list pods in all namespaces"}},
	} {
		t.Run(name, func(t *testing.T) {
			a := node("a")
			api := fake.NewClientset(append(c.objects, &a)...)
			for _, resource := range c.refused {
				api.PrependReactor("*", resource, refuse)
			}
			got, err := (&Cluster{api: fakeAPI{Clientset: api}}).Facts(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got.Cilium); diff != "" {
				t.Errorf("Cilium (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.unread, got.Unread); diff != "" {
				t.Errorf("not read (-want +got):\n%s", diff)
			}
			if runs := c.want != nil && c.want.DaemonSet != ""; got.Nodes[0].Cilium != runs {
				t.Errorf("Cilium runs on node a: %v", got.Nodes[0].Cilium)
			}
		})
	}
	api := fake.NewClientset(agent)
	api.PrependReactor("get", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("broken") })
	if _, err := (&Cluster{api: fakeAPI{Clientset: api}}).Facts(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "get ConfigMap kube-system/cilium-config: ") {
		t.Errorf("an API server that fails: %v", err)
	}
}

// TestIsKubeProxy: pods of a DaemonSet and static pods are kube-proxies, unless they have ended.
func TestIsKubeProxy(t *testing.T) {
	for name, c := range map[string]struct {
		phase corev1.PodPhase
		want  bool
	}{"kube-proxy-x7k2p": {corev1.PodRunning, true}, "kube-proxy-gke-node-1": {corev1.PodPending, true}, "kube-proxy-old": {corev1.PodFailed, false}, "proxy-kube-proxy": {corev1.PodRunning, false}} {
		if got := isKubeProxy(corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PodStatus{Phase: c.phase}}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
