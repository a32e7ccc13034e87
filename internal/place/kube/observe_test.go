package kube

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authzv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// daemon returns a running pod of a DaemonSet in kube-system on node a, whose UID is its name.
func daemon(set, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: set}}},
		Spec:       corev1.PodSpec{NodeName: "a"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

func TestObserve(t *testing.T) {
	api, c := fakeCluster(t, nil)
	starting, ending, alone := daemon("cilium", "starting"), daemon("cilium", "ending"), daemon("", "alone")
	starting.Status.Phase = corev1.PodPending
	ending.DeletionTimestamp = new(metav1.Now())
	alone.OwnerReferences = nil
	crashing := daemon("cilium", "crashing")
	crashing.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: new(corev1.ContainerStateWaiting)}}}
	running := daemon("cilium", "cilium-1")
	running.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "containerd://0123", State: corev1.ContainerState{Running: new(corev1.ContainerStateRunning)}}}
	running.Status.InitContainerStatuses = []corev1.ContainerStatus{
		{ContainerID: "containerd://4567", State: corev1.ContainerState{Running: new(corev1.ContainerStateRunning)}},
		{ContainerID: "containerd://89ab", State: corev1.ContainerState{Terminated: new(corev1.ContainerStateTerminated)}},
	}
	for _, p := range []*corev1.Pod{running, starting, ending, alone, crashing, daemon("proxy", "proxy-1"), daemon("twice", "old"), daemon("twice", "new")} {
		if err := api.Tracker().Add(p); err != nil {
			t.Fatal(err)
		}
	}
	p := &Pods{cluster: c, run: run{spec: spec.Kubernetes{Observe: []string{"kube-system/cilium", "kube-system/cilum", "kube-system/twice", "other/cilium"}}}}
	if diff := cmp.Diff([]place.Observed{
		{DaemonSet: "kube-system/cilium", UID: "cilium-1", Containers: []string{"4567", "0123"}},
		{DaemonSet: "kube-system/cilum", Missing: "DaemonSet kube-system/cilum has no running pod on node a; the DaemonSets of its namespace that have one there: cilium, proxy, twice"},
		{DaemonSet: "kube-system/twice", Missing: "DaemonSet kube-system/twice has 2 running pods on node a"},
		{DaemonSet: "other/cilium", Missing: "DaemonSet other/cilium has no running pod on node a; the DaemonSets of its namespace that have one there: none"},
	}, p.Observe(t.Context(), "a")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// A trial goes on, and says why it has no values.
	api.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("gone away") })
	for _, o := range p.Observe(t.Context(), "a") {
		if o.UID != "" || o.DaemonSet == "" || !strings.Contains(o.Missing, "gone away") {
			t.Errorf("%+v", o)
		}
	}
}

// TestUpObserves: a run that cannot observe what it is asked to does not begin.
func TestUpObserves(t *testing.T) {
	observing := config(func(c *Config) { c.Spec.Observe = []string{"kube-system/cilium"} })
	api, c := fakeCluster(t, nil)
	if _, err := c.Up(t.Context(), observing); err == nil || !strings.HasPrefix(err.Error(), "spec.target.kubernetes.observe: DaemonSet kube-system/cilium has no running pod on node a") {
		t.Errorf("no pod: %v", err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
	api, c = fakeCluster(t, func(p *corev1.Pod) error {
		if sc := p.Spec.Containers[0].SecurityContext; sc != nil && sc.Privileged != nil && *sc.Privileged {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, p.Name, errors.New("privileged"))
		}
		return nil
	})
	// The API server lists the pods of the asked node only; the fake does not.
	api.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		node, asked := action.(clienttesting.ListAction).GetListRestrictions().Fields.RequiresExactMatch("spec.nodeName")
		return asked, &corev1.PodList{Items: []corev1.Pod{*daemon("cilium", "cilium-"+node)}}, nil
	})
	if _, err := c.Up(t.Context(), observing); err == nil || !strings.Contains(err.Error(), "privileged") {
		t.Errorf("no privileged pods: %v", err)
	}
}

// TestObservePermission: with -n, a run asks whether it may list the pods of the DaemonSet's namespace.
func TestObservePermission(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	api.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		at := action.(clienttesting.CreateAction).GetObject().(*authzv1.SelfSubjectAccessReview).Spec.ResourceAttributes
		return true, &authzv1.SelfSubjectAccessReview{Status: authzv1.SubjectAccessReviewStatus{Allowed: at.Namespace == "mine" || at.Resource == "nodes"}}, nil
	})
	_, err := c.Up(t.Context(), config(func(c *Config) { c.Spec.Observe = []string{"kube-system/cilium", "kube-system/proxy"} }))
	missing := new(MissingError)
	if !errors.As(err, &missing) {
		t.Fatalf("%v, want what is missing", err)
	}
	if diff := cmp.Diff([]string{"list pods in namespace kube-system"}, missing.Needs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
