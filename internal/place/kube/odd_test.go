package kube

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/place"
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
		"quota of pods":                       {add: quota(corev1.ResourcePods, "5", "2"), lacks: "ResourceQuota q of namespace mine has room for 3 pods, and the run needs 6"},
		"quota of services":                   {add: quota(corev1.ResourceServices, "1", "0"), change: func(c *Config) { c.Service = true }, lacks: "ResourceQuota q of namespace mine has room for 1 services, and the run needs 2"},
		"quota of services, and none":         {add: quota("count/services", "0", "0")},
		"quota with room":                     {add: quota(corev1.ResourcePods, "8", "2")},
		"quota of CPUs":                       {add: quota(corev1.ResourceLimitsCPU, "4", "500m"), change: func(c *Config) { c.Spec.Resources = spec.Resources{CPU: "1"} }, lacks: "ResourceQuota q of namespace mine has room for 3500m of limits.cpu, and the run needs 6"},
		"quota of memory":                     {add: quota("memory", "1Gi", "0"), change: func(c *Config) { c.Spec.Resources = spec.Resources{Memory: "256Mi"} }, lacks: "room for 1Gi of memory, and the run needs 1536Mi"},
		"IPv6 only":                           {nodes: []func(*corev1.Node){six, six}, change: func(c *Config) { c.Need = map[int]string{4: "workload stream"} }, lacks: "node a has no IPv4 address, which workload stream needs: choose the other version (ip: 6)"},
		"IPv6 only, asked for":                {nodes: []func(*corev1.Node){six, six}, change: func(c *Config) { c.Need = map[int]string{6: "workload stream"} }},
		"IPv6 nodes, dual pods":               {nodes: []func(*corev1.Node){func(n *corev1.Node) { six(n); dual(n) }, func(n *corev1.Node) { six(n); dual(n) }}, change: func(c *Config) { c.Need = map[int]string{4: "workload stream"} }},
		"IPv6 nodes, dual pods, on the nodes": {nodes: []func(*corev1.Node){func(n *corev1.Node) { six(n); dual(n) }, func(n *corev1.Node) { six(n); dual(n) }}, change: func(c *Config) { c.Native, c.Need = true, map[int]string{4: "workload stream"} }, lacks: "node a has no IPv4 address, which workload stream needs on the path native"},
		"two architectures":                   {nodes: []func(*corev1.Node){func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "arm64" }, func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "amd64" }}, note: "the nodes have different CPU architectures (amd64: b; arm64: a): the image must be for each of them"},
		"one architecture":                    {nodes: []func(*corev1.Node){func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "arm64" }, func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "arm64" }}},
		"kubelets two versions apart":         {nodes: []func(*corev1.Node){func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.31.9" }, func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.33.1" }}},
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

// TestVirtualNode: a run chooses no virtual node, and does not advise to name one.
func TestVirtualNode(t *testing.T) {
	tainted := func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "virtual-kubelet.io/provider", Value: "azure", Effect: corev1.TaintEffectNoSchedule}}
	}
	fargate := func(n *corev1.Node) {
		n.Labels["eks.amazonaws.com/compute-type"] = "fargate"
		n.Spec.Taints = []corev1.Taint{{Key: "eks.amazonaws.com/compute-type", Value: "fargate", Effect: corev1.TaintEffectNoSchedule}}
	}
	kwok := func(n *corev1.Node) {
		n.Annotations = map[string]string{"kwok.x-k8s.io/node": "fake"}
		n.Spec.Taints = []corev1.Taint{{Key: "kwok.x-k8s.io/node", Value: "fake", Effect: corev1.TaintEffectNoSchedule}}
	}
	for name, change := range map[string]func(*corev1.Node){"by its label": labelled("type", "virtual-kubelet"), "by its taint": tainted, "Fargate": fargate, "kwok": kwok} {
		a, b, c := node("a"), node("b", change), node("c")
		api := fake.NewClientset(&a, &b, &c)
		client, server, err := (&Cluster{api: fakeAPI{Clientset: api}}).Choose(t.Context(), Config{})
		if err != nil || client != "a" || server != "c" {
			t.Errorf("%s: %s and %s, %v, want a and c", name, client, server, err)
		}
		_, _, err = (&Cluster{api: fakeAPI{Clientset: fake.NewClientset(&a, &b)}}).Choose(t.Context(), Config{})
		if err == nil || !strings.Contains(err.Error(), "node b is a virtual node") || strings.Contains(err.Error(), "--server-node b") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestPassingNodes: a run avoids nodes that come or go, also if one is named, and its pods do not tolerate their taints.
func TestPassingNodes(t *testing.T) {
	taint := func(key string, effect corev1.TaintEffect) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: key, Effect: effect}} }
	}
	const goes, comes = "by which an autoscaler or a cloud marks a node that it is about to remove: choose one that stays", "which goes once the node is ready for pods: try again then"
	for name, tt := range map[string]struct {
		change func(*corev1.Node)
		want   string
	}{
		"Karpenter":          {taint("karpenter.sh/disrupted", corev1.TaintEffectNoSchedule), goes},
		"cluster autoscaler": {taint("ToBeDeletedByClusterAutoscaler", corev1.TaintEffectNoSchedule), goes},
		"a spot machine":     {taint("aws-node-termination-handler/spot-itn", corev1.TaintEffectNoSchedule), goes},
		"no cloud provider":  {taint("node.cloudprovider.kubernetes.io/uninitialized", corev1.TaintEffectNoSchedule), comes},
		"no Cilium yet":      {taint("node.cilium.io/agent-not-ready", corev1.TaintEffectNoExecute), comes},
		"being deleted":      {func(n *corev1.Node) { n.DeletionTimestamp = new(metav1.Now()) }, "is being deleted: choose one that stays"},
	} {
		a, b := node("a"), node("b", tt.change)
		for _, named := range []string{"", "b"} {
			_, _, err := choose([]corev1.Node{a, b}, spec.Kubernetes{ServerNode: named})
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "tolerate") {
				t.Errorf("%s, named %q: %v", name, named, err)
			}
		}
		if all := tolerations(&b); len(all) > 0 {
			t.Errorf("%s: pods tolerate %v", name, all)
		}
	}
}

// TestAmbient: a mesh that changes no pod is noted before a run and by it.
func TestAmbient(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine", Labels: map[string]string{"istio.io/dataplane-mode": "ambient"}}}); err != nil {
		t.Fatal(err)
	}
	var notes []string
	with := config(func(c *Config) {
		c.Spec.Image, c.Note = "registry.example/s:1", func(text string) { notes = append(notes, text) }
	})
	s, err := c.Survey(t.Context(), with)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Up(t.Context(), with)
	if err != nil {
		t.Fatal(err)
	}
	const want = "namespace mine is in Istio's ambient mesh (label istio.io/dataplane-mode=ambient), so what is measured passes through a proxy"
	for who, got := range map[string][]string{"dry run": s.Notes, "run": notes} {
		if len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("%s notes %q", who, got)
		}
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestFullNode: a node with as many pods as it takes is found before a run, and the run says so.
func TestFullNode(t *testing.T) {
	full := func(n *corev1.Node) { n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: parsed("3")} }
	for name, tt := range map[string]struct {
		phase corev1.PodPhase
		lacks string
	}{
		"running": {corev1.PodRunning, "node b takes 3 pods and has 2, and the run needs 3 there"},
		"ended":   {corev1.PodSucceeded, ""},
	} {
		api, c := fakeCluster(t, nil)
		b := node("b", full)
		if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &b, ""); err != nil {
			t.Fatal(err)
		}
		for _, pod := range []string{"x", "y"} {
			if err := api.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: pod}, Spec: corev1.PodSpec{NodeName: "b"}, Status: corev1.PodStatus{Phase: tt.phase}}); err != nil {
				t.Fatal(err)
			}
		}
		s, err := c.Survey(t.Context(), config(func(c *Config) { c.Spec.Image = "registry.example/s:1" }))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(s.Missing, "\n"); (got == "") != (tt.lacks == "") || !strings.Contains(got, tt.lacks) {
			t.Errorf("%s: missing is %q, want %q", name, got, tt.lacks)
		}
	}
}

// TestOddStarts: pods that do not start, each for a reason with a remedy of its own.
func TestOddStarts(t *testing.T) {
	ended := func(reason string, code int32, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			waiting("CrashLoopBackOff", "back-off")(p)
			p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{Reason: reason, ExitCode: code, Message: message}
		}
	}
	const architecture = "The image is for another CPU architecture than the node: name one that has both with --image, or choose nodes of one architecture"
	for name, tt := range map[string]struct {
		status func(*corev1.Pod)
		want   string
		not    string
	}{
		"amd64 image on an arm64 node": {ended("Error", 255, "exec /slipstream: exec format error"), architecture, "must have this version"},
		"the same, as containerd says": {waiting("RunContainerError", `exec: "/slipstream": exec format error`), architecture, "must have slipstream"},
		"a manifest without arm64":     {waiting("ErrImagePull", "no match for platform in manifest: not found"), architecture, "Name another"},
		"a registry with a rate limit": {waiting("ImagePullBackOff", "failed to pull: 429 Too Many Requests - Server message: toomanyrequests: You have reached your unauthenticated pull rate limit"),
			"The registry limits how often it is asked: try again later, or push the image to another registry (slipstream image push REGISTRY/NAME)", "Name another"},
		"a registry that wants credentials": {waiting("ErrImagePull", "failed to pull and unpack image: failed to authorize: failed to fetch anonymous token: 401 Unauthorized"),
			"or name with -n a namespace whose default service account has the credentials (imagePullSecrets)", "Name another"},
		"a registry whose certificate is unknown": {waiting("ErrImagePull", "failed to do request: tls: failed to verify certificate: x509: certificate signed by unknown authority"),
			"The node does not trust the certificate of the registry: make it trust that, or push", "Name another"},
		"a node whose clock is off": {waiting("ErrImagePull", "tls: failed to verify certificate: x509: certificate has expired or is not yet valid: current time 2020-01-01T00:00:00Z is before 2026-01-01T00:00:00Z"),
			"The certificate of the registry has expired or is not valid yet, by the node's clock: correct that clock, have the certificate renewed, or push", "does not trust"},
		"a registry without TLS": {waiting("ErrImagePull", "http: server gave HTTP response to HTTPS client"), "does not speak TLS, and the node insists on it: permit that", "Name another"},
		"nodes of others": {func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"pool": "batch"}
			unscheduled(corev1.PodReasonUnschedulable, "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")(p)
		}, "lets it run only on nodes with the labels pool=batch: name such nodes", "request fewer"},
		"a scheduling gate": {func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
			unscheduled(corev1.PodReasonSchedulingGated, "Scheduling is blocked due to non-empty scheduling gates")(p)
		}, "is held back by the scheduling gate kueue.x-k8s.io/admission: ask whoever maintains the controller that set it", "has not started yet"},
		"out of memory":            {ended("OOMKilled", 137, ""), "OOMKilled: exit code 137: set more memory in spec.target.kubernetes.resources", "must have this version"},
		"no pods left on the node": {unscheduled(corev1.PodReasonUnschedulable, "0/2 nodes are available: 1 Too many pods, 1 node(s) didn't match Pod's node affinity/selector"), "end some pods of the node, or name another node", "request fewer"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api, c := fakeCluster(t, func(p *corev1.Pod) error {
					if strings.HasPrefix(p.Name, "server-1-") {
						tt.status(p)
					}
					return nil
				})
				_, err := c.Up(t.Context(), config(func(c *Config) { c.Spec.Image = "registry.example/s:1" }))
				if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), tt.not) {
					t.Errorf("%v, want %q without %q", err, tt.want, tt.not)
				}
				if all := left(t, api); all != nil {
					t.Errorf("left: %v", all)
				}
			})
		})
	}
}

func unscheduled(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: reason, Message: message,
		}}}
	}
}

// TestNoAddressLeft: what keeps the kubelet from starting a pod is in its events alone.
func TestNoAddressLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, waitsForever)
		at := time.Now()
		api.PrependReactor("list", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, &corev1.EventList{Items: []corev1.Event{
				{Type: corev1.EventTypeWarning, Reason: "FailedCreatePodSandBox", Message: "plugin type=\"aws-cni\" failed (add): failed to assign an IP address to container", LastTimestamp: metav1.NewTime(at)},
				{Type: corev1.EventTypeWarning, Reason: "FailedMount", Message: "not yet", LastTimestamp: metav1.NewTime(at.Add(-time.Minute))},
				{Type: corev1.EventTypeNormal, Reason: "Scheduled", LastTimestamp: metav1.NewTime(at.Add(time.Minute))},
			}}, nil
		})
		_, err := c.Up(t.Context(), config(nil))
		if err == nil || !strings.Contains(err.Error(), "has not started yet: ContainerCreating; its last event is FailedCreatePodSandBox: plugin type=\"aws-cni\" failed (add): failed to assign an IP address to container") {
			t.Errorf("%v", err)
		}
		if all := left(t, api); all != nil {
			t.Errorf("left: %v", all)
		}
	})
}

func waitsForever(p *corev1.Pod) error {
	waiting("ContainerCreating", "")(p)
	return nil
}

// TestOddEnds: what ends a pod in mid-run, and is said about it.
func TestOddEnds(t *testing.T) {
	failed := func(reason, message string) func(*testing.T, *fake.Clientset, *corev1.Pod) {
		return func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, reason, message
			update(t, api, p)
		}
	}
	for name, tt := range map[string]struct {
		happens func(*testing.T, *fake.Clientset, *corev1.Pod)
		want    string
		lost    bool
	}{
		"preempted by the kubelet": {failed("Preempting", "Preempted in order to admit critical pod"), "has ended: Preempting: Preempted in order to admit critical pod", true},
		"preempted by the scheduler, and gone": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			api.PrependReactor("list", "events", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if of := action.(clienttesting.ListAction).GetListRestrictions().Fields.String(); of != "involvedObject.name="+p.Name {
					t.Errorf("asks for events of %q", of)
				}
				return true, &corev1.EventList{Items: []corev1.Event{{Reason: "Pulled"}, {Reason: "Preempted", Message: "Preempted by pod 7d on node a"}}}, nil
			})
			remove(t, api, p)
		}, "is gone: Preempted: Preempted by pod 7d on node a", true},
		"evicted by disk pressure": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			n := node("a", func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeDiskPressure, Effect: corev1.TaintEffectNoSchedule}}
				n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue})
			})
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
				t.Fatal(err)
			}
			failed("Evicted", "The node was low on resource: ephemeral-storage.")(t, api, p)
		}, "has ended: Evicted: The node was low on resource: ephemeral-storage.", true},
		"out of memory": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			s := &p.Status.ContainerStatuses[0]
			s.RestartCount, s.LastTerminationState.Terminated = 1, &corev1.ContainerStateTerminated{Reason: "OOMKilled", ExitCode: 137}
			update(t, api, p)
		}, "restarted: OOMKilled: exit code 137: set more memory in spec.target.kubernetes.resources", false},
		"a node that an autoscaler drains": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			n := node("a", func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: "karpenter.sh/disrupted", Effect: corev1.TaintEffectNoSchedule}}
			})
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
				t.Fatal(err)
			}
			p.DeletionTimestamp = new(metav1.Now())
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "EvictionByEvictionAPI", Message: "Eviction API: evicting"}}
			update(t, api, p)
		}, "node a loses its pods, as it has the taint karpenter.sh/disrupted:NoSchedule: somebody other than this run drains it, such as an autoscaler: name nodes that stay", true},
		"a node that somebody drained": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			n := node("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
				t.Fatal(err)
			}
			remove(t, api, p)
		}, "node a loses its pods, as it is cordoned: somebody other than this run", true},
		"a node that is cordoned, with its pods": {func(t *testing.T, api *fake.Clientset, _ *corev1.Pod) {
			n := node("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
				t.Fatal(err)
			}
		}, "broke, but the pod is running: connection reset", false},
		"a node that is removed": {func(t *testing.T, api *fake.Clientset, _ *corev1.Pod) {
			if err := api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", "a"); err != nil {
				t.Fatal(err)
			}
		}, "node a is gone: somebody has removed it, such as an autoscaler", true},
		"a node that is removed with its pods": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			if err := api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", "a"); err != nil {
				t.Fatal(err)
			}
			remove(t, api, p)
		}, "node a is gone: somebody has removed it", true},
		"a namespace that a controller deletes": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			p.DeletionTimestamp = new(metav1.Now())
			update(t, api, p)
			n, err := api.CoreV1().Namespaces().Get(t.Context(), p.Namespace, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			n.DeletionTimestamp = new(metav1.Now())
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("namespaces"), n, ""); err != nil {
				t.Fatal(err)
			}
		}, deletedNamespace, true},
		"a namespace that a controller has deleted": {func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			remove(t, api, p)
			if err := api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("namespaces"), "", p.Namespace); err != nil {
				t.Fatal(err)
			}
		}, deletedNamespace, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api, c := fakeCluster(t, func(p *corev1.Pod) error { p.Spec.NodeName = nodeOf(p); return nil })
				p, err := c.Up(t.Context(), config(nil))
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = p.Close(context.Background()) }()
				was := p.traffic["a/client-0"]
				pod, err := api.CoreV1().Pods(was.Namespace).Get(t.Context(), was.Name, metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				tt.happens(t, api, pod.DeepCopy())
				got := p.diagnose(t.Context(), was, errors.New("connection reset"))
				if !strings.Contains(got.Error(), tt.want) || errors.Is(got, place.ErrLost) != tt.lost {
					t.Errorf("%v, want %q, lost %t", got, tt.want, tt.lost)
				}
			})
		})
	}
}

const deletedNamespace = "was deleted by somebody other than this run, such as a controller that removes what it does not know: exempt namespaces with the label app.kubernetes.io/name=slipstream from it, or name an existing one with -n"

func update(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
	t.Helper()
	if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, p.Namespace); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
	t.Helper()
	if err := api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), p.Namespace, p.Name); err != nil {
		t.Fatal(err)
	}
}

// TestDeletedNamespaceHasNoLease: if the lease goes because its namespace does, that is the reason.
func TestDeletedNamespaceHasNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, c := fakeCluster(t, nil)
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.api.Namespaces().Delete(t.Context(), p.namespace, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * renewTime)
		if err := p.isLost(nil); err == nil || !strings.Contains(err.Error(), deletedNamespace) {
			t.Errorf("%v, want %q", err, deletedNamespace)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestStuckNamespace: if a namespace of a run does not go, cleanup says what it waits for.
func TestStuckNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, nil)
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		const why = "Some content in the namespace has finalizers remaining: example.com/hold in 1 resource instances"
		api.PrependReactor("delete", "namespaces", func(action clienttesting.Action) (bool, runtime.Object, error) {
			namespaces := corev1.SchemeGroupVersion.WithResource("namespaces")
			o, err := api.Tracker().Get(namespaces, "", action.(clienttesting.DeleteAction).GetName())
			if err != nil {
				return true, nil, err
			}
			n := o.(*corev1.Namespace)
			n.DeletionTimestamp = new(metav1.Now())
			n.Status.Conditions = []corev1.NamespaceCondition{
				{Type: corev1.NamespaceDeletionContentFailure, Status: corev1.ConditionFalse, Message: "All content successfully deleted"},
				{Type: corev1.NamespaceFinalizersRemaining, Status: corev1.ConditionTrue, Message: why},
			}
			return true, nil, api.Tracker().Update(namespaces, n, "")
		})
		err = p.Close(t.Context())
		if err == nil || !strings.Contains(err.Error(), "is still being deleted: "+why) || strings.Contains(err.Error(), "successfully") {
			t.Errorf("%v, want %q", err, why)
		}
		runs, _, err := c.Runs(t.Context())
		if err != nil || len(runs) != 1 {
			t.Errorf("runs %v, %v, want the one that is left", runs, err)
		}
	})
}

func parsed(amount string) resource.Quantity { return resource.MustParse(amount) }

// podsCreated counts the pods that are created from now on.
func podsCreated(api *fake.Clientset) *int {
	n := new(int)
	api.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if !isDryRun(action) {
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
		if !isDryRun(action) {
			delete(action.(clienttesting.CreateAction).GetObject().(*corev1.Pod).Labels, labelRun)
		}
		return false, nil, nil
	})
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "somebody deleted it, or took its label slipstream.dev/run away") {
		t.Errorf("%v", err)
	}
}
