package kube

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/spec"
)

// TestOddClusters: what a dry run says in clusters that are odd, and a run before it creates a pod. Each case has one thing in it.
func TestOddClusters(t *testing.T) {
	policy := func(change func(*networkingv1.NetworkPolicy)) *networkingv1.NetworkPolicy {
		n := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", Name: "default-deny"}}
		n.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if change != nil {
			change(n)
		}
		return n
	}
	quota := func(resource corev1.ResourceName, hard, used string) *corev1.ResourceQuota {
		return &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", Name: "q"}, Status: corev1.ResourceQuotaStatus{
			Hard: corev1.ResourceList{resource: parsed(hard)}, Used: corev1.ResourceList{resource: parsed(used)},
		}}
	}
	six := func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "2001:db8::1"}}
	}
	dual := func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"2001:db8:1::/64", "198.51.100.0/24"} }
	const denied = "NetworkPolicy default-deny of namespace mine"
	for name, tt := range map[string]struct {
		add    runtime.Object
		nodes  []func(*corev1.Node)
		change func(*Config)
		// what the dry run says is missing, and what it notes.
		lacks, note string
	}{
		"nothing odd":          {},
		"default deny":         {add: policy(nil), note: denied + " admits no traffic between the pods of a run"},
		"default deny, egress": {add: policy(func(n *networkingv1.NetworkPolicy) { n.Spec.PolicyTypes[0] = networkingv1.PolicyTypeEgress }), note: denied},
		"a policy for others":  {add: policy(func(n *networkingv1.NetworkPolicy) { n.Spec.PodSelector.MatchLabels = map[string]string{"app": "web"} })},
		"a policy that admits": {add: policy(func(n *networkingv1.NetworkPolicy) { n.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{}} })},
		"a policy that admits the run": {add: policy(func(n *networkingv1.NetworkPolicy) {
			n.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{labelName: appName}}}}}}
		})},
		"a policy that admits others": {add: policy(func(n *networkingv1.NetworkPolicy) {
			n.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}}}
		}), note: denied},
		"quota of pods":         {add: quota(corev1.ResourcePods, "5", "2"), lacks: "ResourceQuota q of namespace mine has room for 3 pods, and the run needs 6"},
		"quota with room":       {add: quota(corev1.ResourcePods, "8", "2")},
		"quota of CPUs":         {add: quota(corev1.ResourceLimitsCPU, "4", "500m"), change: func(c *Config) { c.Spec.Resources = spec.Resources{CPU: "1"} }, lacks: "ResourceQuota q of namespace mine has room for 3500m of limits.cpu, and the run needs 6"},
		"quota of memory":       {add: quota("memory", "1Gi", "0"), change: func(c *Config) { c.Spec.Resources = spec.Resources{Memory: "256Mi"} }, lacks: "room for 1Gi of memory, and the run needs 1536Mi"},
		"IPv6 only":             {nodes: []func(*corev1.Node){six, six}, change: func(c *Config) { c.Need = map[int]string{4: "workload stream"} }, lacks: "node a has no IPv4 address, which workload stream needs: choose the other version (ip: 6)"},
		"IPv6 only, asked for":  {nodes: []func(*corev1.Node){six, six}, change: func(c *Config) { c.Need = map[int]string{6: "workload stream"} }},
		"IPv6 nodes, dual pods": {nodes: []func(*corev1.Node){func(n *corev1.Node) { six(n); dual(n) }, func(n *corev1.Node) { six(n); dual(n) }}, change: func(c *Config) { c.Need = map[int]string{4: "workload stream"} }},
	} {
		t.Run(name, func(t *testing.T) {
			api, c := fakeCluster(t, nil)
			c.namespace = "mine"
			for _, o := range []runtime.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}, tt.add} {
				if o == nil {
					continue
				}
				if err := api.Tracker().Add(o); err != nil {
					t.Fatal(err)
				}
			}
			for i, change := range tt.nodes {
				n := node([]string{"a", "b"}[i], change)
				if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
					t.Fatal(err)
				}
			}
			var notes []string
			with := config(func(c *Config) {
				c.Accelerate, c.Pod, c.Spec.Image = true, true, "registry.example/s:1"
				c.Note = func(text string) { notes = append(notes, text) }
				if tt.change != nil {
					tt.change(c)
				}
			})
			s, err := c.Survey(t.Context(), with)
			if err != nil {
				t.Fatal(err)
			}
			says := func(who string, got []string, want string) {
				t.Helper()
				if text := strings.Join(got, "\n"); (text == "") != (want == "") || !strings.Contains(text, want) {
					t.Errorf("%s says %q, want %q", who, text, want)
				}
			}
			says("what is missing", s.Missing, tt.lacks)
			says("a note", s.Notes, tt.note)
			created := podsCreated(api)
			p, err := c.Up(t.Context(), with)
			if err != nil {
				says("the run's error", []string{err.Error()}, tt.lacks)
				if *created > 0 {
					t.Errorf("%d pods were created", *created)
				}
				return
			}
			if tt.lacks != "" {
				t.Error("the run does not refuse it")
			}
			says("a note of the run", notes, tt.note)
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func parsed(amount string) resource.Quantity { return resource.MustParse(amount) }

// podsCreated counts the pods that are created from now on.
func podsCreated(api *fake.Clientset) *int {
	n := new(int)
	api.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if !rehearsed(action) {
			*n++
		}
		return false, nil, nil
	})
	return n
}

// TestDottedNodeNames: nodes are often named by their domain names.
func TestDottedNodeNames(t *testing.T) {
	api, c := fakeCluster(t, nil)
	names := []string{"ip-10-0-0-1.eu.example", "ip-10-0-0-2.eu.example"}
	for _, name := range names {
		n := node(name)
		if err := api.Tracker().Add(&n); err != nil {
			t.Fatal(err)
		}
	}
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Spec.ClientNode, c.Spec.ServerNode, c.Native = names[0], names[1], true }))
	if err != nil {
		t.Fatal(err)
	}
	runs, _, err := c.Runs(t.Context())
	if err != nil || len(runs) != 1 || !slices.Equal(runs[0].Nodes, names) || p.Places()[0].Name != names[0] {
		t.Errorf("runs %+v, places %v, %v", runs, p.Places(), err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
}

// TestStripped: a controller that reverts what it does not know may take the labels off a pod.
func TestStripped(t *testing.T) {
	api, c := fakeCluster(t, nil)
	api.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if !rehearsed(action) {
			delete(action.(clienttesting.CreateAction).GetObject().(*corev1.Pod).Labels, labelRun)
		}
		return false, nil, nil
	})
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "somebody deleted it, or took its label slipstream.dev/run away") {
		t.Errorf("%v", err)
	}
}
