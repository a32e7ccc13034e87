package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"slipstream.dev/internal/spec"
)

// TestSurvey: a dry run lists everything that a run would lack, and creates nothing.
func TestSurvey(t *testing.T) {
	const image = "slipstream.dev/slipstream:v1"
	with := func(names ...string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			for _, name := range names {
				n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{name + "@sha256:0", name}})
			}
		}
	}
	var fifty []string
	for i := range imagesListed {
		fifty = append(fifty, fmt.Sprintf("registry.example/other:%d", i))
	}
	for name, c := range map[string]struct {
		a, b      func(*corev1.Node)
		spec      spec.Kubernetes
		namespace string
		refused   string // a resource
		images    []string
		// what each begins with
		lacks, denied []string
	}{
		"nothing":       {a: with("x.example/y:1", image), b: with(image), images: []string{"present", "present"}},
		"an image":      {a: with(image), b: with("slipstream.dev/slipstream:v2"), images: []string{"present", "absent"}, lacks: []string{"image slipstream.dev/slipstream:v1 on node b"}},
		"it may be":     {a: with(image), b: with(fifty...), images: []string{"present", "not among the 50 images that the node reports, may be present"}},
		"named, pulled": {a: with("registry.example/s:1"), b: with(), spec: spec.Kubernetes{Image: "registry.example/s:1"}, images: []string{"present", "absent, would be pulled"}},
		"a permission":  {a: with(image), b: with(image), refused: "leases", images: []string{"present", "present"}, denied: []string{"list leases", "create leases", "patch leases", "delete leases"}},
		"a node":        {a: with(image), b: down, lacks: []string{"nodes: a run needs two nodes"}},
		"a DaemonSet":   {a: with(image), b: with(image), spec: spec.Kubernetes{Observe: []string{"kube-system/cilium"}}, images: []string{"present", "present"}, lacks: []string{"spec.target.kubernetes.observe: DaemonSet kube-system/cilium has no running pod on node a; the DaemonSets of its namespace that have one there: none"}},
		"a namespace":   {a: with(image), b: with(image), namespace: "mine", images: []string{"present", "present"}, lacks: []string{"namespace mine does not exist"}},
	} {
		t.Run(name, func(t *testing.T) {
			api, cluster := fakeCluster(t, nil)
			cluster.namespace = c.namespace
			for node, n := range map[string]corev1.Node{"a": node("a", c.a), "b": node("b", c.b)} {
				if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
					t.Fatalf("%s: %v", node, err)
				}
			}
			api.PrependReactor("create", "selfsubjectaccessreviews", deny(c.refused))
			s, err := cluster.Survey(t.Context(), Config{Spec: c.spec, Version: "v1"})
			if err != nil {
				t.Fatal(err)
			}
			var images []string
			for _, i := range s.Images {
				images = append(images, i.State)
			}
			if diff := cmp.Diff(c.images, images); diff != "" {
				t.Errorf("images (-want +got):\n%s", diff)
			}
			for _, is := range []struct{ got, want []string }{{s.Missing, c.lacks}, {s.Denied, c.denied}} {
				if !slices.EqualFunc(is.got, is.want, strings.HasPrefix) {
					t.Errorf("missing: %q, want %q", is.got, is.want)
				}
			}
			if !slices.ContainsFunc(s.Permissions, func(p Permission) bool { return p.Resource == "pods/exec" && p.Allowed }) {
				t.Errorf("permissions %v", s.Permissions)
			}
			if all := left(t, api); all != nil {
				t.Errorf("a survey made %v", all)
			}
		})
	}
}

// TestSurveyOfABusyNode: the survey reports another run on a node, and nothing as missing.
func TestSurveyOfABusyNode(t *testing.T) {
	_, c := fakeCluster(t, nil)
	p, err := c.Up(t.Context(), config(nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	s, err := c.Survey(t.Context(), Config{Spec: spec.Kubernetes{Image: "registry.example/s:1"}})
	if err != nil || len(s.Missing) != 0 || !strings.Contains(s.Busy, "is in progress on node a") {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestFullName(t *testing.T) {
	for name, want := range map[string]string{
		"slipstream": "docker.io/library/slipstream:latest", "me/slipstream:v1": "docker.io/me/slipstream:v1",
		"registry.example:5000/slipstream": "registry.example:5000/slipstream:latest", "localhost/slipstream:v1": "localhost/slipstream:v1",
		"registry.example/slipstream@sha256:0": "registry.example/slipstream@sha256:0",
	} {
		if got := fullName(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}
