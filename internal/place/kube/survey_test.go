package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
)

// TestSurvey: a dry run lists everything that a run would lack, and creates nothing.
func TestSurvey(t *testing.T) {
	const image, pulled = "slipstream.dev/slipstream:v1", "absent, would be pulled"
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
		programs  string
		images    []string
		base      string // that the run would use
		// what each begins with
		lacks, denied []string
	}{
		"nothing":       {a: with("x.example/y:1", image), b: with(image), images: []string{"present", "present"}},
		"an image":      {a: with(image), b: with("slipstream.dev/slipstream:v2"), images: []string{pulled, pulled}, base: DefaultBase},
		"it may be":     {a: with(image), b: with(fifty...), images: []string{pulled, pulled}, base: DefaultBase},
		"a base image":  {a: with("registry.example/b:1"), b: with(), spec: spec.Kubernetes{BaseImage: "registry.example/b:1"}, images: []string{"present", pulled}, base: "registry.example/b:1"},
		"programs":      {a: with(image), b: with(image), programs: "iperf3 of workload bulk", images: []string{"present", "present"}, lacks: []string{"iperf3 of workload bulk needs programs that the image slipstream.dev/slipstream:v1 does not have: build an image"}},
		"none at all":   {a: with(), b: with(), programs: "iperf3 of workload bulk", images: []string{pulled, pulled}, base: DefaultBase, lacks: []string{"iperf3 of workload bulk needs programs that the image docker.io/library/busybox:1.37 does not have"}},
		"tools":         {a: with(), b: with(), programs: "iperf3 of workload bulk", spec: spec.Kubernetes{BaseImage: "registry.example/tools"}, images: []string{pulled, pulled}, base: "registry.example/tools"},
		"Windows":       {a: with(image), b: windows, spec: spec.Kubernetes{ServerNode: "b"}, images: []string{"present", "absent"}, lacks: []string{"image slipstream.dev/slipstream:v1 on node b"}},
		"Windows, base": {a: with(), b: windows, spec: spec.Kubernetes{ServerNode: "b", BaseImage: "registry.example/b:1"}, images: []string{pulled, pulled}, base: "registry.example/b:1", lacks: []string{"node b runs Windows, and its pods need an image with slipstream.exe"}},
		"another CPU":   {a: with(), b: func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "arm64" }, images: []string{pulled, pulled}, base: DefaultBase, lacks: []string{"node b needs a build of this program for linux/arm64, and none was found: build one (make image leaves bin/image/arm64/slipstream) and name it with --host-binary, or name an image"}},
		"named, pulled": {a: with("registry.example/s:1"), b: with(), spec: spec.Kubernetes{Image: "registry.example/s:1"}, images: []string{"present", pulled}},
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
			s, err := cluster.Survey(t.Context(), Config{Spec: c.spec, Version: "v1", Native: true, Programs: c.programs, builds: []build.Build{{System: "linux", Arch: "amd64"}}})
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
			if note := "pods start from the image " + c.base + ", and slipstream copies itself into each of the "; slices.ContainsFunc(s.Notes, func(got string) bool { return strings.HasPrefix(got, note) }) != (c.base != "") {
				t.Errorf("notes %q, want the base image %q", s.Notes, c.base)
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
