package kube

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/spec"
)

// rejects is admission that rejects the pods that a function names.
func rejects(why string, which func(*corev1.Pod) bool) func(*corev1.Pod) error {
	return func(p *corev1.Pod) error {
		if !which(p) {
			return nil
		}
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, p.Name, errors.New(why))
	}
}

func any1(*corev1.Pod) bool        { return true }
func inHostNet(p *corev1.Pod) bool { return p.Spec.HostNetwork }

// TestAdmission: a dry run and a run ask the API server about each kind of pod before one is created, and pass on its sentence with a
// remedy.
func TestAdmission(t *testing.T) {
	const webhook = `admission webhook "validate.kyverno.svc-fail" denied the request: `
	unlimited := func(p *corev1.Pod) bool { return len(p.Spec.Containers[0].Resources.Limits) == 0 }
	for name, tt := range map[string]struct {
		namespace string
		react     func(*corev1.Pod) error
		change    func(*Config)
		// what a dry run says is missing, and what it and the run note; "" if nothing.
		lacks, note string
	}{
		"nothing":           {},
		"nothing, with -n":  {namespace: "mine"},
		"PodSecurity":       {"mine", rejects(`violates PodSecurity "baseline:latest": host namespaces`, inHostNet), nil, "leave out -n, so that the run creates its own namespaces", ""},
		"quota on limits":   {"mine", rejects("failed quota: q: must specify limits.cpu for: slipstream", unlimited), nil, "--set spec.target.kubernetes.resources='{cpu: \"1\", memory: 256Mi}'", ""},
		"quota with limits": {"mine", rejects("failed quota: q: must specify limits.cpu for: slipstream", unlimited), func(c *Config) { c.Spec.Resources = spec.Resources{CPU: "1", Memory: "256Mi"} }, "", ""},
		"quota exceeded":    {"mine", rejects("exceeded quota: q, requested: limits.cpu=1", any1), nil, "free some of the quota", ""},
		"range":             {"mine", rejects("maximum cpu usage per Container is 500m, but limit is 1", any1), nil, "what the namespace's LimitRange admits", ""},
		"digests":           {"", rejects(webhook+"image tags are not allowed, use a digest", any1), nil, "(…@sha256:…) (asked in namespace default", ""},
		"host network":      {"", rejects(webhook+"sharing the host's namespaces", inHostNet), nil, "ask whoever maintains it to exempt namespaces with the label app.kubernetes.io/name=slipstream, or leave out accelerators and the native path", ""},
		"policy of one":     {"mine", rejects(webhook+"sharing the host's namespaces", inHostNet), nil, "ask whoever maintains it to exempt namespace mine, or leave out", ""},
		"against default":   {"", rejects(webhook+"Using 'default' namespace is not allowed.", any1), nil, "", ""},
		"only of default":   {"", rejects("exceeded quota: q", any1), nil, "", ""},
		"another's answer":  {"", rejects(`User "jane" cannot create resource "pods" in API group "" in the namespace "default"`, any1), nil, "", ""},
		"samples alone":     {"mine", rejects("violates PodSecurity", inHostNet), func(c *Config) { c.Accelerate, c.Native = false, false }, "", "CPU use is not measured: the API server rejects pod mine/client-node-"},
		"no dry run": {"", func(p *corev1.Pod) error {
			return apierrors.NewBadRequest("admission webhook x does not support dry run")
		}, nil, "", ""},
		"LimitRange defaults": {"mine", func(p *corev1.Pod) error { return limited(p) }, nil, "", "to cpu=100m, which may throttle what is measured"},
		"sidecar": {"mine", func(p *corev1.Pod) error {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "istio-proxy"})
			return nil
		}, nil, "", "the containers istio-proxy, and what is measured may pass through them"},
		"mirror": {"mine", func(p *corev1.Pod) error { p.Spec.Containers[0].Image = "mirror.example/s:1"; return nil }, nil, "", "a webhook replaces the image of pod"},
		"scheduling gate": {"mine", func(p *corev1.Pod) error {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
			return nil
		}, nil, "", "back by the scheduling gate kueue.x-k8s.io/admission, until its controller removes that"},
		"nodes of others": {"mine", func(p *corev1.Pod) error {
			p.Spec.NodeSelector = map[string]string{"pool": "batch"}
			return nil
		}, nil, "namespace mine, or a webhook, lets its pods run only on nodes with the labels pool=batch, and node a lacks them: name nodes that have them", ""},
		"nodes of all": {"mine", func(p *corev1.Pod) error {
			p.Spec.NodeSelector = map[string]string{corev1.LabelOSStable: "linux"}
			return nil
		}, nil, "", ""},
		"nodes of default":             {"", func(p *corev1.Pod) error { p.Spec.NodeSelector = map[string]string{"pool": "batch"}; return nil }, nil, "", ""},
		"images pulled always":         {"mine", pullsAlways, func(c *Config) { c.Spec.Image = "" }, "no registry has slipstream.dev/slipstream:v1: push it to your registry", ""},
		"images pulled always, a name": {"mine", pullsAlways, nil, "", "admission makes every node pull the image of pod"},
		"OpenShift":                    {"mine", rejects("unable to validate against any security context constraint: [provider \"privileged\": Forbidden: not usable by user or serviceaccount]", inHostNet), nil, "(oc adm policy add-scc-to-user privileged USER), or leave out accelerators", ""},
		"Autopilot":                    {"mine", rejects(`admission webhook "warden-validating.common-webhooks.networking.gke.io" denied the request: GKE Warden rejected the request because it violates one or more constraints`, inHostNet), nil, "GKE Autopilot admits no such pods: leave out accelerators and the native path (unprivileged: true)", ""},
		"OpenShift, no privileges": {"mine", rejects("unable to validate against any security context constraint: [provider restricted-v2: .containers[0].runAsUser: Invalid value: 65532: must be in the ranges: [1000680000, 1000689999]]", any1),
			func(c *Config) { c.Accelerate, c.Native, c.Spec.Unprivileged = false, false, true }, "(oc adm policy add-scc-to-user nonroot-v2 USER)", ""},
		"sandbox": {"mine", func(p *corev1.Pod) error { p.Spec.RuntimeClassName = new("gvisor"); return nil }, nil, "", "the runtime class gvisor"},
	} {
		t.Run(name, func(t *testing.T) {
			api, c := fakeCluster(t, tt.react)
			c.namespace = tt.namespace
			if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}); err != nil {
				t.Fatal(err)
			}
			with := config(func(c *Config) {
				c.Accelerate, c.Native, c.Spec.Image = true, true, "registry.example/s:1"
				if tt.change != nil {
					tt.change(c)
				}
			})
			s, err := c.Survey(t.Context(), with)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(s.Missing, "\n"); (got == "") != (tt.lacks == "") || !strings.Contains(got, tt.lacks) {
				t.Errorf("a dry run lacks %q, want %q", got, tt.lacks)
			}
			if got := strings.Join(s.Notes, "\n"); (got == "") != (tt.note == "") || !strings.Contains(got, tt.note) {
				t.Errorf("a dry run notes %q, want %q", got, tt.note)
			}
			if all := left(t, api); !slices.Equal(all, []string{"mine"}) {
				t.Errorf("a dry run made %v", all)
			}
			if tt.namespace == "" {
				return // the namespaces of a run have other rules than the default one
			}
			created := 0
			api.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if !isDryRun(action) {
					created++
				}
				return false, nil, nil
			})
			var notes []string
			with.Note = func(text string) { notes = append(notes, text) }
			p, err := c.Up(t.Context(), with)
			if (err == nil) != (tt.lacks == "") || err != nil && (!strings.Contains(err.Error(), tt.lacks) || created > 0) {
				t.Errorf("a run: %v, %d pods were created; want %q", err, created, tt.lacks)
			}
			if got := strings.Join(notes, "\n"); !strings.Contains(got, tt.note) || err == nil && tt.note == "" && got != "" {
				t.Errorf("a run notes %q, want %q", got, tt.note)
			}
			if err == nil {
				if err := p.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// pullsAlways does what the admission plugin AlwaysPullImages does.
func pullsAlways(p *corev1.Pod) error {
	p.Spec.Containers[0].ImagePullPolicy = corev1.PullAlways
	return nil
}

// TestNamespaceDenied: where a policy forbids the namespaces of a run, the dry run and the run say so, and how to do without them.
func TestNamespaceDenied(t *testing.T) {
	const says = `admission webhook "validation.gatekeeper.sh" denied the request: [all-must-have-owner] you must provide labels: {"owner"}`
	for name, denial := range map[string]error{
		"403": apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, "slipstream-x", errors.New(says)), "400": apierrors.NewBadRequest(says),
	} {
		api, c := fakeCluster(t, nil)
		api.PrependReactor("create", "namespaces", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, denial })
		with := config(func(c *Config) { c.Spec.Image = "registry.example/s:1" })
		s, err := c.Survey(t.Context(), with)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Up(t.Context(), with)
		for who, got := range map[string]string{"dry run": strings.Join(s.Missing, "\n"), "run": fmt.Sprint(err)} {
			if !strings.Contains(got, says+": a policy of the cluster forbids it: name an existing namespace with -n") {
				t.Errorf("%s, %s: %s", name, who, got)
			}
		}
	}
}

// limited does what a LimitRange with a default does.
func limited(p *corev1.Pod) error {
	if c := &p.Spec.Containers[0]; c.Resources.Limits == nil {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}
	}
	return nil
}

// TestAccelerated: nodes that an agent accelerates are refused for a run that applies accelerators, before it creates anything, with the
// policies. A run that applies none notes them. A switch may be what turns the policy on.
func TestAccelerated(t *testing.T) {
	observed := func(node, policy string, settings int) v1alpha1.NodeAcceleration {
		return v1alpha1.NodeAcceleration{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: v1alpha1.NodeAccelerationStatus{
			Observed: []v1alpha1.ObservedPolicy{{Policy: policy, Settings: settings}, {Policy: "verify"}},
		}}
	}
	const found = "node b is accelerated already, by policy rps"
	for name, tt := range map[string]struct {
		agents     []v1alpha1.NodeAcceleration
		change     func(*Config)
		lack, note string
	}{
		"no agents":      {},
		"idle agents":    {agents: []v1alpha1.NodeAcceleration{observed("a", "rps", 0), observed("b", "vf", 0)}},
		"others' nodes":  {agents: []v1alpha1.NodeAcceleration{observed("c", "rps", 3)}},
		"one of the two": {agents: []v1alpha1.NodeAcceleration{observed("a", "rps", 0), observed("b", "rps", 3)}, lack: found + ": every variant would be measured with that"},
		"no variant":     {agents: []v1alpha1.NodeAcceleration{observed("b", "rps", 3)}, change: func(c *Config) { c.Accelerate = false }, note: found + ": what is measured includes that"},
		"a switch":       {agents: []v1alpha1.NodeAcceleration{observed("b", "rps", 3)}, change: func(c *Config) { c.Switch = true }},
	} {
		t.Run(name, func(t *testing.T) {
			api, c := fakeCluster(t, nil)
			c.api = fakeAPI{Clientset: api, accelerations: tt.agents}
			var notes []string
			with := config(func(c *Config) {
				c.Accelerate, c.Spec.Image = true, "registry.example/s:1"
				c.Note = func(text string) { notes = append(notes, text) }
				if tt.change != nil {
					tt.change(c)
				}
			})
			s, err := c.Survey(t.Context(), with)
			if err != nil {
				t.Fatal(err)
			}
			p, err := c.Up(t.Context(), with)
			if err == nil {
				defer func() {
					if err := p.Close(t.Context()); err != nil {
						t.Error(err)
					}
				}()
			} else {
				notes = append(notes, err.Error())
				if all := left(t, api); all != nil {
					t.Errorf("a refused run left %v", all)
				}
			}
			if (err == nil) != (tt.lack == "") {
				t.Errorf("a run: %v", err)
			}
			for who, got := range map[string][]string{"a dry run": slices.Concat(s.Missing, s.Notes), "a run": notes} {
				want := tt.lack + tt.note
				if text := strings.Join(got, "\n"); (text == "") != (want == "") || !strings.HasPrefix(text, want) {
					t.Errorf("%s says %q, want %q", who, text, want)
				}
			}
			if (len(s.Missing) > 0) != (tt.lack != "") {
				t.Errorf("missing %q", s.Missing)
			}
		})
	}
}
