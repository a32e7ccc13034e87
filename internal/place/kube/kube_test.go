package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	authnv1 "k8s.io/api/authentication/v1"
	authv1 "k8s.io/api/authentication/v1"
	authzv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/golden"
)

// node returns a node that accepts pods, unless change alters that.
func node(name string, change ...func(*corev1.Node)) corev1.Node {
	n := corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: "linux"}},
		Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{OSImage: "An OS", Architecture: "amd64"},
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeInternalIP, Address: "2001:db8::1"}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(&n)
	}
	return n
}

func down(n *corev1.Node) {
	n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "the runtime is down"}
}

func tainted(effect corev1.TaintEffect) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "gpu", Value: "yes", Effect: effect}} }
}

func labelled(key, value string) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Labels[key] = value }
}

// holding gives a node an image.
func holding(image string) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{image}})
	}
}

func windows(n *corev1.Node) { n.Labels[corev1.LabelOSStable] = "windows" }

// Clients and servers are on nodes in turn, chosen by the labels of each side.
func TestChooseAll(t *testing.T) {
	zoned := func(name, zone string, change ...func(*corev1.Node)) corev1.Node {
		n := node(name, change...)
		n.Labels = map[string]string{"zone": zone}
		return n
	}
	cluster := []corev1.Node{zoned("a", "1"), zoned("b", "1"), zoned("c", "2"), zoned("d", "2"), zoned("e", "2", tainted(corev1.TaintEffectNoSchedule))}
	one, two := map[string]string{"zone": "1"}, map[string]string{"zone": "2"}
	for _, c := range []struct {
		name string
		spec spec.Kubernetes
		mesh bool
		want string
		// pools are the labels by which variants choose their nodes.
		pools []spec.Ends
	}{
		{"two, as ever", spec.Kubernetes{}, false, "a b", nil},
		{"four", spec.Kubernetes{Nodes: 4}, false, "a b c d", nil},
		{"from zone to zone", spec.Kubernetes{Nodes: 4, ClientSelector: two, ServerSelector: one}, false, "c a d b", nil},
		{"two of them", spec.Kubernetes{ClientSelector: one, ServerSelector: two}, false, "a c", nil},
		{"a side that anybody may be on", spec.Kubernetes{Nodes: 4, ServerSelector: two}, false, "a c b d", nil},
		{"a mesh of all", spec.Kubernetes{}, true, "a b c d", nil},
		{"a mesh of three", spec.Kubernetes{Nodes: 3}, true, "a b c", nil},
		{"a mesh of two that are named", spec.Kubernetes{ClientNode: "d", ServerNode: "a"}, true, "d a", nil},
		{"a mesh of a zone", spec.Kubernetes{NodeSelector: one}, true, "a b", nil},
		{"named", spec.Kubernetes{NodeNames: []string{"d", "b", "a"}}, true, "d b a", nil},
		{"too few", spec.Kubernetes{Nodes: 6}, false, "pods can be scheduled to 2 for clients and 2 for servers\n  node e has the taint", nil},
		{"too few of a side", spec.Kubernetes{Nodes: 4, ClientSelector: one, ServerSelector: map[string]string{"zone": "3"}}, false, "no node has the labels zone=3 of serverSelector; nodes have zone=1, 2", nil},
		{"two pools", spec.Kubernetes{}, false, "c d a b", []spec.Ends{{Client: two, Server: two}, {Client: one, Server: one}}},
		{"a pool that asks for nothing chooses last", spec.Kubernetes{}, false, "c d a b", []spec.Ends{{}, {Client: one, Server: one}}},
		{"from zone to zone, twice", spec.Kubernetes{}, false, "a c d b", []spec.Ends{{Client: one, Server: two}, {Client: two, Server: one}}},
		{"pools of nodes with other labels too", spec.Kubernetes{NodeSelector: two}, false, "c d", []spec.Ends{{}}},
		{"pools that were chosen", spec.Kubernetes{NodeNames: []string{"d", "b", "a", "c"}}, false, "d b a c", []spec.Ends{{}, {Client: one}}},
		{"pools whose nodes are listed in another order", spec.Kubernetes{NodeNames: []string{"a", "b", "c", "d"}}, false, "nodeNames[0]: node a lacks the labels zone=2, by which a variant chooses it", []spec.Ends{{Client: two, Server: two}, {Client: one, Server: one}}},
		{"an end that makes way", spec.Kubernetes{}, false, "d a b c", []spec.Ends{{Server: one}, {Client: one, Server: two}}},
		{"a pool of one node", spec.Kubernetes{}, false, "no node is left with zone=1\n  node a is taken", []spec.Ends{{Client: two, Server: one}, {Client: one, Server: one}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var objects []runtime.Object
			for i := range cluster {
				objects = append(objects, &cluster[i])
			}
			got, err := (&Cluster{api: fakeAPI{Clientset: fake.NewClientset(objects...)}}).ChooseAll(t.Context(), Config{Spec: c.spec, Mesh: c.mesh, Pools: c.pools})
			if err != nil {
				got = []string{err.Error()}
			}
			if text := strings.Join(got, " "); text != c.want && (err == nil || !strings.Contains(text, c.want)) {
				t.Errorf("%s, want %s", text, c.want)
			}
		})
	}
}

// TestMeshTooLarge checks that a mesh of more nodes than a run can have is refused, not cut short.
func TestMeshTooLarge(t *testing.T) {
	var objects []runtime.Object
	for i := range 2*spec.MaxPairs + 1 {
		n := node(fmt.Sprintf("n%03d", i))
		objects = append(objects, &n)
	}
	c := &Cluster{api: fakeAPI{Clientset: fake.NewClientset(objects...)}}
	if got, err := c.ChooseAll(t.Context(), Config{Mesh: true}); err == nil || !strings.Contains(err.Error(), "129 nodes accept pods, and a mesh has at most 128") {
		t.Errorf("%d nodes, %v", len(got), err)
	}
	if got, err := c.ChooseAll(t.Context(), Config{Spec: spec.Kubernetes{Nodes: 128}, Mesh: true}); err != nil || len(got) != 128 {
		t.Errorf("%d nodes, %v", len(got), err)
	}
}

func TestChoose(t *testing.T) {
	cordoned := func(n *corev1.Node) { n.Spec.Unschedulable = true }
	silent := func(n *corev1.Node) { n.Status.Conditions = nil }
	pool := map[string]string{"pool": "net"}
	for _, tt := range []struct {
		name  string
		nodes []corev1.Node
		spec  spec.Kubernetes
		want  string // "client server", or the error's words
	}{
		{"the first two", []corev1.Node{node("c"), node("b"), node("a")}, spec.Kubernetes{}, "a b"},
		{"beside a named one", []corev1.Node{node("a"), node("b"), node("c")}, spec.Kubernetes{ServerNode: "a"}, "b a"},
		{"both named", []corev1.Node{node("a"), node("b"), node("c")}, spec.Kubernetes{ClientNode: "c", ServerNode: "a"}, "c a"},
		{"selector", []corev1.Node{node("a"), node("b", labelled("pool", "net")), node("c", labelled("pool", "net"))}, spec.Kubernetes{NodeSelector: pool}, "b c"},
		{"preference only", []corev1.Node{node("a", tainted(corev1.TaintEffectPreferNoSchedule)), node("b")}, spec.Kubernetes{}, "a b"},
		{"none", nil, spec.Kubernetes{}, "this cluster has no nodes"},
		{"one", []corev1.Node{node("a")}, spec.Kubernetes{}, "has only node a: add another, or run in a lab"},
		{"not ready", []corev1.Node{node("a"), node("b", down)}, spec.Kubernetes{}, "only node a\n  node b is not ready (the runtime is down): see kubectl describe node b"},
		{"never ready", []corev1.Node{node("a", silent), node("b")}, spec.Kubernetes{}, "node a is not ready (it has no Ready condition yet)"},
		{"taint", []corev1.Node{node("a"), node("b", tainted(corev1.TaintEffectNoSchedule))}, spec.Kubernetes{}, "node b has the taint gpu=yes:NoSchedule: pods of a run tolerate it on a node that is named, with --client-node b or --server-node b"},
		{"taint that evicts", []corev1.Node{node("a"), node("b", tainted(corev1.TaintEffectNoExecute))}, spec.Kubernetes{}, "gpu=yes:NoExecute"},
		{"cordoned", []corev1.Node{node("a"), node("b", cordoned)}, spec.Kubernetes{}, "kubectl uncordon b"},
		{"windows", []corev1.Node{node("a"), node("b", windows)}, spec.Kubernetes{}, "node b runs windows"},
		{"windows by label", []corev1.Node{node("a"), node("b", windows), node("c", windows)}, spec.Kubernetes{NodeSelector: map[string]string{corev1.LabelOSStable: "windows"}}, "b c"},
		{"windows by name", []corev1.Node{node("a"), node("b", windows)}, spec.Kubernetes{ServerNode: "b"}, "a b"},
		{"another system by name", []corev1.Node{node("a"), node("b", labelled(corev1.LabelOSStable, "plan9"))}, spec.Kubernetes{ServerNode: "b"}, "node b runs plan9"},
		{"selector of too few", []corev1.Node{node("a", labelled("pool", "net")), node("b")}, spec.Kubernetes{NodeSelector: pool}, "node b lacks the labels pool=net of the selector"},
		{"selector of none", []corev1.Node{node("a", labelled("pool", "net")), node("b", labelled("pool", "old"))}, spec.Kubernetes{NodeSelector: map[string]string{"pool": "nett"}}, "no node has the labels pool=nett of nodeSelector (--selector); nodes have pool=net, old"},
		{"selector of an unknown label", []corev1.Node{node("a"), node("b")}, spec.Kubernetes{NodeSelector: pool}, "no node has the labels pool=net of nodeSelector (--selector); no node has a label pool"},
		{"an unhealthy node", []corev1.Node{node("a"), node("b", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeDiskPressure, Effect: corev1.TaintEffectNoSchedule}}
		})}, spec.Kubernetes{}, "node b has the taint node.kubernetes.io/disk-pressure:NoSchedule, which Kubernetes sets on a node that is not healthy"},
		{"dotted names", []corev1.Node{node("a.example"), node("b.example")}, spec.Kubernetes{}, "a.example b.example"},
		{"one of three without the image", []corev1.Node{node("a"), node("b", holding("other")), node("c", holding("slipstream.dev/slipstream:devel")), node("d", holding("slipstream.dev/slipstream:devel"))}, spec.Kubernetes{}, "c d"},
		{"too few with the image", []corev1.Node{node("a"), node("b"), node("c", holding("slipstream.dev/slipstream:devel"))}, spec.Kubernetes{}, "c a"},
		{"named, not there", []corev1.Node{node("a"), node("b")}, spec.Kubernetes{ClientNode: "x"}, "node x does not exist; the nodes are a, b"},
		{"named, not ready", []corev1.Node{node("a", down), node("b")}, spec.Kubernetes{ClientNode: "a"}, "node a is not ready (the runtime is down): see kubectl describe node a, or name another with --client-node"},
		{"named, tainted", []corev1.Node{node("a"), node("b", tainted(corev1.TaintEffectNoSchedule))}, spec.Kubernetes{ClientNode: "a", ServerNode: "b"}, "a b"},
		{"named, without network", []corev1.Node{node("a"), node("b", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNetworkUnavailable, Effect: corev1.TaintEffectNoSchedule}}
		})}, spec.Kubernetes{ClientNode: "a", ServerNode: "b"}, "or name another with --server-node"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api := fake.NewClientset()
			for i := range tt.nodes {
				if err := api.Tracker().Add(&tt.nodes[i]); err != nil {
					t.Fatal(err)
				}
			}
			client, server, err := (&Cluster{api: fakeAPI{Clientset: api}}).Choose(t.Context(), Config{Spec: tt.spec})
			if got := client + " " + server; err == nil && got != tt.want || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

// TestChooseWithoutList: who may not list nodes can still name them.
func TestChooseWithoutList(t *testing.T) {
	a, b := node("a"), node("b")
	api := fake.NewClientset(&a, &b)
	api.PrependReactor("list", "nodes", refuse)
	client, server, err := (&Cluster{api: fakeAPI{Clientset: api}}).Choose(t.Context(), Config{Spec: spec.Kubernetes{ClientNode: "b", ServerNode: "a"}})
	if err != nil || client != "b" || server != "a" {
		t.Errorf("%q, %q, %v", client, server, err)
	}
	if _, _, err := (&Cluster{api: fakeAPI{Clientset: api}}).Choose(t.Context(), Config{}); !apierrors.IsForbidden(err) {
		t.Errorf("%v, want what is forbidden", err)
	}
}

func refuse(action clienttesting.Action) (bool, runtime.Object, error) {
	return true, nil, apierrors.NewForbidden(action.GetResource().GroupResource(), "", errors.New("not you"))
}

// deny answers that the user lacks all permissions for a resource.
func deny(resource string) clienttesting.ReactionFunc {
	return func(action clienttesting.Action) (bool, runtime.Object, error) {
		at := action.(clienttesting.CreateAction).GetObject().(*authzv1.SelfSubjectAccessReview).Spec.ResourceAttributes
		return true, &authzv1.SelfSubjectAccessReview{Status: authzv1.SubjectAccessReviewStatus{Allowed: at.Resource != resource}}, nil
	}
}

// TestSettling waits for the taint of a node that has just become ready.
func TestSettling(t *testing.T) {
	a, b := node("a"), node("b")
	b.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoExecute}}
	api := fake.NewClientset(&a, &b)
	asked := 0
	api.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		if asked++; asked == 2 {
			free := node("b")
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &free, ""); err != nil {
				t.Error(err)
			}
		}
		return false, nil, nil
	})
	if client, server, err := (&Cluster{api: fakeAPI{Clientset: api}}).Choose(t.Context(), Config{}); err != nil || client != "a" || server != "b" {
		t.Errorf("%q, %q, %v", client, server, err)
	}
}

// TestManifests compares everything that a run creates in a cluster with a golden file.
func TestManifests(t *testing.T) {
	r := &run{
		id: "test", namespace: "slipstream-test", nodes: "slipstream-test-nodes",
		spec: spec.Kubernetes{Resources: spec.Resources{CPU: "500m", Memory: "256Mi"}},
	}
	r.image, r.pull = imageOf(Config{Version: "v1"})
	var got strings.Builder
	now := metav1.NewMicroTime(time.Unix(1e9, 0).UTC())
	for _, o := range []any{
		r.namespaceObject(r.namespace, "restricted"), r.namespaceObject(r.nodes, "privileged"),
		r.lease("host, process 1", []string{"a", "b"}, 60, now),
		r.trafficPod("client-0-test", "a"), r.serverPod("server-0-test", "b", true), r.service("server-0-test"),
		r.backendService("server-0-test", 300), r.slice("server-0-300-test", "tcp", netip.MustParseAddrPort("198.51.100.7:10000")),
		r.hostPod("client-0-host-test", "a"), r.windowsPod("client-0-test", "c"), r.nodePod("client-node-test", "a"),
	} {
		text, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&got, "---\n%s", text)
	}
	golden.Compare(t, "testdata/objects.yaml", got.String())
}

// TestBaseManifests compares the pods of a base image with a golden file.
func TestBaseManifests(t *testing.T) {
	c := Config{Spec: spec.Kubernetes{BaseImage: "registry.example/busybox:1"}}
	r := &run{id: "test", namespace: "slipstream-test", nodes: "slipstream-test-nodes", spec: c.Spec}
	r.image, r.pull = imageOf(c)
	var got strings.Builder
	for _, pod := range []*corev1.Pod{r.serverPod("server-0-test", "b", true), r.nodePod("client-node-test", "a")} {
		text, err := yaml.Marshal(pod)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&got, "---\n%s", text)
	}
	golden.Compare(t, "testdata/base.yaml", got.String())
}

func TestImageOf(t *testing.T) {
	for _, c := range []struct {
		named, repository, image string
		pull                     corev1.PullPolicy
	}{
		{"registry.example/slipstream:v1", "", "registry.example/slipstream:v1", corev1.PullIfNotPresent},
		{"registry.example/slipstream:v1", "registry.example/published", "registry.example/slipstream:v1", corev1.PullIfNotPresent},
		{"", "registry.example/published", "registry.example/published:v2", corev1.PullIfNotPresent},
		{"", "slipstream.dev/slipstream", "slipstream.dev/slipstream:v2", corev1.PullNever},
		{"", "", "slipstream.dev/slipstream:v2", corev1.PullNever},
	} {
		image, pull := imageOf(Config{Spec: spec.Kubernetes{Image: c.named}, Repository: c.repository, Version: "v2"})
		if image != c.image || pull != c.pull {
			t.Errorf("named %q, published at %q: %s, %s", c.named, c.repository, image, pull)
		}
	}
}

// fakeAPI implements api with client-go's fake.
type fakeAPI struct {
	*fake.Clientset
	accelerations []v1alpha1.NodeAcceleration
}

func (f fakeAPI) Accelerations(context.Context) (*v1alpha1.NodeAccelerationList, error) {
	if f.accelerations == nil {
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: "slipstream.dev", Resource: "nodeaccelerations"}, "")
	}
	return &v1alpha1.NodeAccelerationList{Items: f.accelerations}, nil
}

func (f fakeAPI) Policies(context.Context) (*v1alpha1.AccelerationPolicyList, error) {
	return new(v1alpha1.AccelerationPolicyList), nil
}

func (f fakeAPI) Events(namespace string) objects[*corev1.Event, *corev1.EventList] {
	return f.CoreV1().Events(namespace)
}

func (f fakeAPI) Nodes() objects[*corev1.Node, *corev1.NodeList] { return f.CoreV1().Nodes() }

func (f fakeAPI) Namespaces() objects[*corev1.Namespace, *corev1.NamespaceList] {
	return f.CoreV1().Namespaces()
}

func (f fakeAPI) ConfigMaps(namespace string) objects[*corev1.ConfigMap, *corev1.ConfigMapList] {
	return f.CoreV1().ConfigMaps(namespace)
}

func (f fakeAPI) Pods(namespace string) objects[*corev1.Pod, *corev1.PodList] {
	return f.CoreV1().Pods(namespace)
}

func (f fakeAPI) Services(namespace string) objects[*corev1.Service, *corev1.ServiceList] {
	return f.CoreV1().Services(namespace)
}

func (f fakeAPI) EndpointSlices(namespace string) objects[*discoveryv1.EndpointSlice, *discoveryv1.EndpointSliceList] {
	return f.DiscoveryV1().EndpointSlices(namespace)
}

func (f fakeAPI) Leases(namespace string) objects[*coordinationv1.Lease, *coordinationv1.LeaseList] {
	return f.CoordinationV1().Leases(namespace)
}

func (f fakeAPI) Quotas(namespace string) objects[*corev1.ResourceQuota, *corev1.ResourceQuotaList] {
	return f.CoreV1().ResourceQuotas(namespace)
}

func (f fakeAPI) NetworkPolicies(namespace string) objects[*networkingv1.NetworkPolicy, *networkingv1.NetworkPolicyList] {
	return f.NetworkingV1().NetworkPolicies(namespace)
}

func (f fakeAPI) Allowed(ctx context.Context, r *authzv1.SelfSubjectAccessReview) (*authzv1.SelfSubjectAccessReview, error) {
	return f.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, r, metav1.CreateOptions{})
}

func (f fakeAPI) Self(ctx context.Context) (*authv1.SelfSubjectReview, error) {
	return f.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authv1.SelfSubjectReview{}, metav1.CreateOptions{})
}

func (f fakeAPI) Exec(*corev1.Pod, *corev1.PodExecOptions) *url.URL { return nil }

// isDryRun reports whether an object is created with dryRun=All, which client-go's fake does not know.
func isDryRun(action clienttesting.Action) bool {
	return len(action.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0
}

// fakeCluster has two nodes with the image of version v1, runs pods as soon as they are created, and grants every permission. If react returns an error, the pod is
// refused.
func fakeCluster(t *testing.T, react func(*corev1.Pod) error) (*fake.Clientset, *Cluster) {
	t.Helper()
	a, b := node("a", holding("slipstream.dev/slipstream:v1")), node("b", holding("slipstream.dev/slipstream:v1"))
	api := fake.NewClientset(&a, &b)
	api.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authzv1.SelfSubjectAccessReview{Status: authzv1.SubjectAccessReviewStatus{Allowed: true}}, nil
	})
	api.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		pod := action.(clienttesting.CreateAction).GetObject().(*corev1.Pod)
		if isDryRun(action) {
			pod = pod.DeepCopy()
		}
		pod.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "198.51.100.7"}, {IP: "2001:db8::7"}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: container, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}},
		}
		if _, err := api.Tracker().Get(corev1.SchemeGroupVersion.WithResource("namespaces"), "", action.GetNamespace()); err != nil && action.GetNamespace() != existing {
			return true, nil, err
		}
		if react != nil {
			if err := react(pod); err != nil {
				return true, nil, err
			}
		}
		return isDryRun(action), pod, nil
	})
	api.PrependReactor("create", "namespaces", func(action clienttesting.Action) (bool, runtime.Object, error) {
		return isDryRun(action), action.(clienttesting.CreateAction).GetObject(), nil
	})
	// A namespace takes its objects along.
	api.PrependReactor("delete", "namespaces", func(action clienttesting.Action) (bool, runtime.Object, error) {
		name := action.(clienttesting.DeleteAction).GetName()
		leases := coordinationv1.SchemeGroupVersion.WithResource("leases")
		list, err := api.Tracker().List(leases, coordinationv1.SchemeGroupVersion.WithKind("Lease"), name)
		if err != nil {
			return true, nil, err
		}
		for _, l := range list.(*coordinationv1.LeaseList).Items {
			if err := api.Tracker().Delete(leases, name, l.Name); err != nil {
				return true, nil, err
			}
		}
		return false, nil, nil
	})
	return api, &Cluster{api: fakeAPI{Clientset: api}}
}

func config(change func(*Config)) Config {
	c := Config{Spec: spec.Kubernetes{ClientNode: "a", ServerNode: "b"}, Version: "v1", Pods: 2, Note: func(string) {}}
	if change != nil {
		change(&c)
	}
	return c
}

// left returns what is in the cluster apart from its nodes.
func left(t *testing.T, api *fake.Clientset) (all []string) {
	t.Helper()
	for _, resource := range []struct{ gvr, kind string }{{"namespaces", "Namespace"}, {"pods", "Pod"}, {"services", "Service"}, {"endpointslices", "EndpointSlice"}, {"leases", "Lease"}} {
		gv := corev1.SchemeGroupVersion
		switch resource.kind {
		case "Lease":
			gv = coordinationv1.SchemeGroupVersion
		case "EndpointSlice":
			gv = discoveryv1.SchemeGroupVersion
		}
		list, err := api.Tracker().List(gv.WithResource(resource.gvr), gv.WithKind(resource.kind), "")
		if err != nil {
			t.Fatal(err)
		}
		switch list := list.(type) {
		case *corev1.NamespaceList:
			for _, n := range list.Items {
				all = append(all, n.Name)
			}
		case *corev1.PodList:
			for _, p := range list.Items {
				all = append(all, p.Namespace+"/"+p.Name)
			}
		case *corev1.ServiceList:
			for _, s := range list.Items {
				all = append(all, s.Namespace+"/"+s.Name)
			}
		case *discoveryv1.EndpointSliceList:
			for _, s := range list.Items {
				all = append(all, s.Namespace+"/"+s.Name)
			}
		case *coordinationv1.LeaseList:
			for _, l := range list.Items {
				all = append(all, l.Namespace+"/"+l.Name)
			}
		}
	}
	return all
}

func TestUp(t *testing.T) {
	api, c := fakeCluster(t, nil)
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Accelerate, c.Native = true, true }))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, place := range p.Places() {
		got = append(got, fmt.Sprint(place.Name, " ", place.Kind, " ", place.Node, " ", place.IPv4, " ", place.IPv6, " ", place.Unprivileged))
	}
	if diff := cmp.Diff([]string{
		"a node a 192.0.2.1 2001:db8::1 false", "b node b 192.0.2.1 2001:db8::1 false",
		"a/client-0 pod a 198.51.100.7 2001:db8::7 true", "a/client-1 pod a 198.51.100.7 2001:db8::7 true",
		"b/server-0 pod b 198.51.100.7 2001:db8::7 true", "b/server-1 pod b 198.51.100.7 2001:db8::7 true",
	}, got); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
	for _, word := range []string{"node a", "node b", p.namespace} {
		if !strings.Contains(p.Placement(), word) {
			t.Errorf("placement %q does not say %s", p.Placement(), word)
		}
	}
	if p.System("a") != "An OS" {
		t.Errorf("system %q", p.System("a"))
	}
	runs, foreign, err := c.Runs(t.Context())
	if err != nil || foreign != nil || len(runs) != 1 || !runs[0].Alive || runs[0].Pods != 10 || !slices.Equal(runs[0].Nodes, []string{"a", "b"}) || len(runs[0].Own) != 2 {
		t.Errorf("runs %+v, %v", runs, err)
	}
	// A second run on one of the nodes would measure the first.
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "is in progress on node") {
		t.Errorf("a second run: %v", err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
}

// TestUpOnManyNodes checks that a run on more than two nodes removes its pods.
func TestUpOnManyNodes(t *testing.T) {
	api, c := fakeCluster(t, nil)
	for _, name := range []string{"c", "d"} {
		n := node(name)
		if err := api.Tracker().Add(&n); err != nil {
			t.Fatal(err)
		}
	}
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Spec, c.Native = spec.Kubernetes{NodeNames: []string{"a", "b", "c", "d"}}, true }))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
}

// TestUpBesideAnother: two runs begin at once on the same nodes, and neither sees the other at first. The one with the
// later lease stops.
func TestUpBesideAnother(t *testing.T) {
	for name, since := range map[string]time.Time{"the same second": {}, "later": time.Now()} {
		api, c := fakeCluster(t, nil) // it gives objects no time of creation
		other := newRun("abcd2345")
		made := false
		api.PrependReactor("create", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
			if !made {
				made = true
				l := other.lease("another", []string{"b"}, 60, metav1.NowMicro())
				l.CreationTimestamp, l.ManagedFields = metav1.NewTime(since), []metav1.ManagedFieldsEntry{{Manager: manager}}
				if err := api.Tracker().Add(l); err != nil {
					t.Fatal(err)
				}
			}
			return false, nil, nil
		})
		p, err := c.Up(t.Context(), config(nil))
		if since.IsZero() != (err != nil && strings.Contains(err.Error(), "run abcd2345 of another is in progress on node b")) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestUpOnTaintedNode checks that the pods on a node which was named tolerate its taints, and those elsewhere do not.
func TestUpOnTaintedNode(t *testing.T) {
	tolerated := make(map[string]int)
	api, c := fakeCluster(t, func(p *corev1.Pod) error { tolerated[nodeOf(p)] += len(p.Spec.Tolerations); return nil })
	b := node("b", tainted(corev1.TaintEffectNoSchedule))
	b.Spec.Taints = append(b.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
	if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &b, ""); err != nil {
		t.Fatal(err)
	}
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Pods = 1 }))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if tolerated["a"] != 0 || tolerated["b"] == 0 {
		t.Errorf("tolerations by node: %v", tolerated)
	}
}

// TestCloseBesideADeadNode checks that pods which do not end, as those of a dead node, do not keep the run's namespaces
// and lease, and that an API server which hesitates is asked again.
func TestCloseBesideADeadNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, nil)
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		api.PrependReactor("delete", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
		refused := 0
		api.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			if refused++; refused <= 3 {
				return true, nil, apierrors.NewInternalError(errors.New("etcdserver: leader changed"))
			}
			return false, nil, nil
		})
		if err := p.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "pods are still terminating: ") || !strings.Contains(err.Error(), "slipstream cleanup") {
			t.Errorf("%v", err)
		}
		namespaces, err := api.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(namespaces.Items) > 0 {
			t.Errorf("namespaces are left: %v, %v", namespaces.Items, err)
		}
	})
}

// TestUpOnWindows checks that nodes which run Windows get host processes for traffic and no privileged pods, and that
// what needs Linux is refused before anything is made.
func TestUpOnWindows(t *testing.T) {
	windowsCluster := func() (*fake.Clientset, *Cluster) {
		api, c := fakeCluster(t, nil)
		b := node("b", windows)
		if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &b, ""); err != nil {
			t.Fatal(err)
		}
		return api, c
	}
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"accelerators", func(c *Config) { c.Accelerate = true }, "node b runs Windows, and accelerators need Linux: leave them out, or choose Linux nodes"},
		{"pods", func(c *Config) { c.Pod = true }, "give every variant the path native"},
		{"services", func(c *Config) { c.Service = true }, "give every variant the path native"},
		{"unprivileged", func(c *Config) { c.Spec.Unprivileged = true }, "leave out unprivileged"},
		{"server", func(c *Config) { c.LinuxServer = "http of workload page" }, "http of workload page needs Linux"},
		{"client", func(c *Config) { c.LinuxClient = "iperf3 of workload stream" }, ""}, // node a runs Linux
		{"Windows", func(c *Config) { c.Windows = "latte of workload rtt" }, "node a does not run Windows, and latte of workload rtt needs it"},
		{"client in a mesh", func(c *Config) { c.LinuxClient, c.Mesh = "iperf3 of workload stream", true }, "iperf3 of workload stream needs Linux"},
	} {
		api, c := windowsCluster()
		p, err := c.Up(t.Context(), config(func(c *Config) { c.Native = true; tt.change(c) }))
		if err == nil {
			err = p.Close(t.Context())
		}
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if all := left(t, api); all != nil {
			t.Errorf("%s: left %v", tt.name, all)
		}
	}

	_, c := windowsCluster()
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Native = true }))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	var got []string
	for _, pod := range []*corev1.Pod{p.traffic["a/client-0"], p.host["a/client-0"], p.control["a"], p.traffic["b/server-0"], p.host["b/server-0"], p.control["b"]} {
		if pod == nil {
			got = append(got, "none")
			continue
		}
		got = append(got, pod.Spec.Containers[0].Command[0])
	}
	if diff := cmp.Diff([]string{program, program, program, "none", windowsProgram, "none"}, got); diff != "" {
		t.Errorf("programs of the pods (-want +got):\n%s", diff)
	}
	for _, place := range p.Places() {
		if place.Node == "b" && !place.Unprivileged {
			t.Errorf("%s has a pod that samples", place.Name)
		}
	}
	if place := p.Places()[4]; place.Name != "b/server-0" || place.IPv4.String() != "198.51.100.7" {
		t.Errorf("place %+v", place)
	}
}

// TestNamespace: in a namespace that the user names, objects are removed one by one, and the namespace stays.
func TestNamespace(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "namespace mine does not exist") {
		t.Errorf("no namespace: %v", err)
	}
	for _, o := range []runtime.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", Name: "theirs"}},
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", Name: "theirs"}},
	} {
		if err := api.Tracker().Add(o); err != nil {
			t.Fatal(err)
		}
	}
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Accelerate = true }))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"mine", "mine/theirs", "mine/theirs"}, left(t, api)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// TestBackends: a service with many backends has a slice for each port of its server, and then one for the probe. All of
// them are removed, but not the slices of others.
func TestBackends(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}); err != nil {
		t.Fatal(err)
	}
	api.PrependReactor("create", "services", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s := action.(clienttesting.CreateAction).GetObject().(*corev1.Service)
		if s.Spec.ClusterIPs = []string{"192.0.2.7"}; s.Spec.Selector == nil { // the server's are dual-stack
			s.Spec.ClusterIPs = []string{"192.0.2.8", "2001:db8::8"}
		}
		return false, nil, nil
	})
	byService := make(map[string][]string)
	var mu sync.Mutex
	api.PrependReactor("create", "endpointslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		s := action.(clienttesting.CreateAction).GetObject().(*discoveryv1.EndpointSlice)
		service := s.Labels[discoveryv1.LabelServiceName]
		byService[service] = append(byService[service], fmt.Sprintf("%s %s %d", *s.Ports[0].Name, s.Endpoints[0].Addresses[0], *s.Ports[0].Port))
		return false, nil, nil
	})
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Service, c.Backends = true, []int{3, 2} }))
	if err != nil {
		t.Fatal(err)
	}
	got := byService["server-1-2-"+p.id]
	if len(byService) != 4 || len(got) != 6 {
		t.Fatalf("slices %v", byService)
	}
	if diff := cmp.Diff([]string{"probe 198.51.100.7 7466", "probe 2001:db8::7 7466"}, got[4:]); diff != "" {
		t.Errorf("the last slices (-want +got):\n%s", diff)
	}
	slices.Sort(got)
	if diff := cmp.Diff([]string{"tcp 198.51.100.7 10000", "tcp 198.51.100.7 10001", "tcp 2001:db8::7 10000", "tcp 2001:db8::7 10001"}, got[2:]); diff != "" {
		t.Errorf("slices (-want +got):\n%s", diff)
	}
	for _, at := range p.Places() {
		want := map[int]place.Service(nil)
		if at.Kind == place.Pod && at.Node == "b" {
			front := place.Service{IPv4: netip.MustParseAddr("192.0.2.8"), IPv6: netip.MustParseAddr("2001:db8::8"), Port: endpointPort}
			want = map[int]place.Service{2: front, 3: front}
			for n := range want {
				front.Ports = n
				want[n] = front
			}
		}
		if diff := cmp.Diff(want, at.Services, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("services of %s (-want +got):\n%s", at.Name, diff)
		}
	}
	theirs := p.slice("server-0-3-"+p.id, "tcp", netip.MustParseAddrPort("198.51.100.7:80"))
	theirs.Name = "theirs"
	make1(t, c.api.EndpointSlices("mine"), theirs)
	runs, foreign, err := c.Runs(t.Context())
	if err != nil || len(runs) != 1 || foreign != nil || runs[0].More != 2*(2+3)*endpointTime {
		t.Errorf("runs %+v, foreign %v, %v", runs, foreign, err)
	}
	// Without the right to list slices, their services stay, by which a later cleanup knows of them.
	forbidden := true
	api.PrependReactor("list", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return forbidden, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "endpointslices"}, "", errors.New("no"))
	})
	if err := c.Remove(t.Context(), runs[0]); err == nil || !strings.Contains(err.Error(), "list endpointslices of mine") {
		t.Errorf("removed without the right to list slices: %v", err)
	}
	forbidden = false
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"mine", "mine/theirs"}, left(t, api)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// TestPermissions: the error names all missing permissions at once.
func TestPermissions(t *testing.T) {
	api, c := fakeCluster(t, nil)
	api.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		at := action.(clienttesting.CreateAction).GetObject().(*authzv1.SelfSubjectAccessReview).Spec.ResourceAttributes
		refused := at.Subresource == "exec" || at.Resource == "namespaces" && at.Verb == "create" || at.Resource == "leases" && at.Verb == "patch" || at.Resource == "endpointslices" && at.Verb == "create"
		return true, &authzv1.SelfSubjectAccessReview{Status: authzv1.SubjectAccessReviewStatus{Allowed: !refused}}, nil
	})
	api.PrependReactor("create", "selfsubjectreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authnv1.SelfSubjectReview{Status: authnv1.SelfSubjectReviewStatus{UserInfo: authnv1.UserInfo{Username: "jane"}}}, nil
	})
	_, err := c.Up(t.Context(), config(func(c *Config) { c.Service, c.Backends = true, []int{2} }))
	missing := new(MissingError)
	if !errors.As(err, &missing) {
		t.Fatalf("%v, want what is missing", err)
	}
	const where = " in all namespaces"
	if diff := cmp.Diff(&MissingError{User: "jane", Needs: []string{"create namespaces", "create pods/exec" + where, "patch leases.coordination.k8s.io" + where, "create endpointslices.discovery.k8s.io" + where}}, missing); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(err.Error(), "jane lacks permissions that a run needs:\n  create namespaces\n") {
		t.Error(err)
	}
	if strings.Count(err.Error(), "with -n") != 1 {
		t.Errorf("it does not say once how to do with one namespace: %v", err)
	}
	if one := OneNamespace([]string{"create namespaces", "create pods in namespace mine"}); one != "" {
		t.Errorf("nothing is needed in all namespaces: %s", one)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
}

// TestRefused: a run continues without pods that only sample, but not without pods that apply accelerators.
func TestRefused(t *testing.T) {
	psa := func(p *corev1.Pod) error {
		if sc := p.Spec.Containers[0].SecurityContext; sc != nil && sc.Privileged != nil && *sc.Privileged {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, p.Name, errors.New(`violates PodSecurity "restricted:latest": privileged`))
		}
		return nil
	}
	api, c := fakeCluster(t, psa)
	if _, err := c.Up(t.Context(), config(func(c *Config) { c.Accelerate = true })); err == nil || !strings.Contains(err.Error(), "violates PodSecurity") || !strings.Contains(err.Error(), "leave out accelerators") {
		t.Errorf("accelerators: %v", err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left: %v", all)
	}
	var notes []string
	p, err := c.Up(t.Context(), config(func(c *Config) { c.Note = func(s string) { notes = append(notes, s) } }))
	if err != nil {
		t.Fatal(err)
	}
	if len(notes) != 1 || !strings.HasPrefix(notes[0], "CPU use is not measured: the API server rejects pod") {
		t.Errorf("notes %q", notes)
	}
	if node := p.Places()[0]; !node.Unprivileged {
		t.Errorf("node without a pod: %+v", node)
	}
	if _, err := p.Open(p.Places()[0], place.ForControl); err == nil {
		t.Error("there is a worker for control")
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// waiting makes the container of a pod wait for a reason, after it has ended with an error.
func waiting(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status = corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
			Name: container, Image: p.Spec.Containers[0].Image, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Error", ExitCode: 2, Message: "unknown command\n"}},
		}}}
	}
}

// TestStates: if a pod can never run, the start ends at once and leaves nothing behind.
func TestStates(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status func(*corev1.Pod)
		want   string
	}{
		{"image not there", waiting("ErrImageNeverPull", ""), "slipstream.dev/slipstream:v1 is not on the node"},
		{"image not to be had", waiting("ErrImagePull", "no such host"), "cannot be pulled: ErrImagePull: no such host. Name another with --image"},
		{"image without the program", waiting("RunContainerError", `exec: "/slipstream": no such file`), "The image must have slipstream at /slipstream"},
		{"image of another version", waiting("CrashLoopBackOff", "back-off"), "exits as soon as it starts: Error: unknown command. The image"},
		{"too large", func(p *corev1.Pod) {
			p.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes: Insufficient cpu",
			}}}
		}, "cannot be scheduled: 0/2 nodes: Insufficient cpu; request fewer resources"},
		{"sidecar first", func(p *corev1.Pod) {
			sidecar := corev1.ContainerStatus{Name: "istio-proxy", State: corev1.ContainerState{Running: new(corev1.ContainerStateRunning)}}
			waiting("CrashLoopBackOff", "back-off")(p)
			p.Status.ContainerStatuses = append([]corev1.ContainerStatus{sidecar}, p.Status.ContainerStatuses...)
			p.Status.PodIPs = []corev1.PodIP{{IP: "198.51.100.7"}}
		}, "exits as soon as it starts"},
		{"evicted", func(p *corev1.Pod) {
			p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "low on memory"}
		}, "has ended: Evicted: low on memory"},
		{"ended", func(p *corev1.Pod) {
			p.Status.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}
		}, "ended: exited: exit code 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api, c := fakeCluster(t, func(p *corev1.Pod) error {
				if strings.HasPrefix(p.Name, "server-1-") {
					tt.status(p)
				}
				return nil
			})
			_, err := c.Up(t.Context(), config(nil))
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "on node b") {
				t.Errorf("%v, want %q on node b", err, tt.want)
			}
			if all := left(t, api); all != nil {
				t.Errorf("left: %v", all)
			}
		})
	}
	t.Run("slow", func(t *testing.T) {
		api, c := fakeCluster(t, func(p *corev1.Pod) error {
			waiting("ContainerCreating", "")(p)
			return nil
		})
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(2*pollTime, func() { cancel(errors.New("interrupted")) })
		if _, err := c.Up(ctx, config(nil)); err == nil || !strings.Contains(err.Error(), "interrupted") || !strings.Contains(err.Error(), "ContainerCreating") {
			t.Errorf("%v, want what it waits for", err)
		}
		if all := left(t, api); all != nil {
			t.Errorf("left: %v", all)
		}
	})
}

// TestPreempted: a pod that makes room for one of a higher priority says so.
func TestPreempted(t *testing.T) {
	p := new(corev1.Pod)
	p.DeletionTimestamp = new(metav1.Now())
	for want, why := range map[string]*corev1.PodCondition{
		"is being deleted: by somebody other than this run": {},
		"is being deleted: PreemptionByScheduler: for a pod of a higher priority": {
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: corev1.PodReasonPreemptionByScheduler, Message: "for a pod of a higher priority",
		},
	} {
		p.Status.Conditions = []corev1.PodCondition{*why}
		if got := stateOf(p); got.text != want || !got.final {
			t.Errorf("%+v, want %s", got, want)
		}
	}
}

// A mesh starts without a node whose pods do not start, as long as two others are left, or one
// if there is a time for the rest, which begins when half of the pods run.
func TestMeshWithoutNode(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status func(*corev1.Pod)
		nodes  []string // whose pods do not start
		rest   time.Duration
		note   string
		refuse string
	}{
		{"image missing", waiting("ErrImageNeverPull", ""), []string{"c"}, 0, "the mesh goes on without node c: pod ", ""},
		{"registry unreachable", waiting("ErrImagePull", "i/o timeout"), []string{"c"}, 0, "the mesh goes on without node c: pod ", ""},
		{"no network", waiting("ContainerCreating", ""), []string{"c"}, 0, "the mesh goes on without node c: not running after 3m0s: pod ", ""},
		{"no network, with a time for the rest", waiting("ContainerCreating", ""), []string{"c"}, 20 * time.Second, "the mesh goes on without node c: not running 20s after half of the pods: pod ", ""},
		{"two of three nodes, with a time for the rest", waiting("ErrImageNeverPull", ""), []string{"b", "c"}, 20 * time.Second, "the mesh goes on without node b: pod ", ""},
		{"two of three nodes", waiting("ErrImageNeverPull", ""), []string{"b", "c"}, 0, "the mesh goes on without node ", "is not on the node"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api, c := fakeCluster(t, func(p *corev1.Pod) error {
					if slices.Contains(tt.nodes, nodeOf(p)) {
						tt.status(p)
					}
					return nil
				})
				third := node("c")
				if err := api.Tracker().Add(&third); err != nil {
					t.Fatal(err)
				}
				var notes []string
				began := time.Now()
				p, err := c.Up(t.Context(), config(func(c *Config) {
					c.Mesh, c.Rest, c.Spec = true, tt.rest, spec.Kubernetes{NodeNames: []string{"a", "b", "c"}}
					c.Note = func(s string) { notes = append(notes, s) }
				}))
				if len(notes) != 1 && tt.refuse != "" || tt.refuse == "" && len(notes) != len(tt.nodes) || !strings.HasPrefix(notes[0], tt.note) {
					t.Errorf("notes %q, want one: %s…", notes, tt.note)
				}
				if tt.refuse != "" {
					if err == nil || !strings.Contains(err.Error(), tt.refuse) {
						t.Errorf("%v, want %s", err, tt.refuse)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); tt.rest > 0 && took > 4*tt.rest {
					t.Errorf("took %s", took)
				}
				for _, place := range p.Places() {
					if !place.IPv4.IsValid() {
						t.Errorf("%s has no address, which would end the run", place.Name)
					}
					if lost := p.isLostNode(place.Node) != nil; lost != slices.Contains(tt.nodes, place.Node) {
						t.Errorf("%s is lost: %t", place.Name, lost)
					}
				}
				if err := p.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestDiagnose distinguishes the end of a worker from that of its pod, its node and the API server.
func TestDiagnose(t *testing.T) {
	cut := errors.New("connection reset")
	for _, tt := range []struct {
		name   string
		change func(*testing.T, *fake.Clientset, *corev1.Pod)
		want   string
		lost   bool
	}{
		{"nothing", func(*testing.T, *fake.Clientset, *corev1.Pod) {}, "broke, but the pod is running: connection reset", false},
		{"node", func(t *testing.T, api *fake.Clientset, _ *corev1.Pod) {
			n := node("a", down)
			if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
				t.Fatal(err)
			}
		}, "node a is not ready (the runtime is down)", true},
		{"pod gone", func(t *testing.T, api *fake.Clientset, p *corev1.Pod) {
			if err := api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), p.Namespace, p.Name); err != nil {
				t.Fatal(err)
			}
		}, "is gone: somebody deleted it", true},
		{"pod evicted", func(_ *testing.T, api *fake.Clientset, p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason = corev1.PodFailed, "Evicted"
		}, "has ended: Evicted", true},
		{"container restarted", func(_ *testing.T, api *fake.Clientset, p *corev1.Pod) {
			s := &p.Status.ContainerStatuses[0]
			s.RestartCount, s.LastTerminationState.Terminated = 1, &corev1.ContainerStateTerminated{Reason: "OOMKilled", ExitCode: 137}
		}, "restarted: OOMKilled: exit code 137", false},
		{"forbidden", func(_ *testing.T, api *fake.Clientset, _ *corev1.Pod) {
			api.PrependReactor("get", "pods", refuse)
		}, "not you", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api, c := fakeCluster(t, func(p *corev1.Pod) error { p.Spec.NodeName = nodeOf(p); return nil })
			p, err := c.Up(t.Context(), config(nil))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close(context.Background()) })
			was := p.traffic["a/client-0"]
			pod, err := api.CoreV1().Pods(was.Namespace).Get(t.Context(), was.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			tt.change(t, api, pod)
			_ = api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), pod, pod.Namespace) // unless it is gone
			if tt.name == "pod gone" {
				_ = api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), pod.Namespace, pod.Name)
			}
			got := p.diagnose(t.Context(), was, cut)
			if !strings.Contains(got.Error(), tt.want) || errors.Is(got, place.ErrLost) != tt.lost {
				t.Errorf("%v, want %q, lost %t", got, tt.want, tt.lost)
			}
			if !tt.lost {
				return
			}
			if _, err := p.Open(p.Places()[2], place.ForTraffic); !errors.Is(err, place.ErrLost) {
				t.Errorf("a worker is started in what is lost: %v", err)
			}
		})
	}
}

// TestUnreachable: a run waits for an API server that is unreachable for a moment, but not for one that stays unreachable.
func TestUnreachable(t *testing.T) {
	if unreachable(nil) || unreachable(apierrors.NewNotFound(schema.GroupResource{}, "x")) || !unreachable(&http.MaxBytesError{}) ||
		!unreachable(apierrors.NewServiceUnavailable("x")) {
		t.Error("answers and none are not told apart")
	}
	api, c := fakeCluster(t, nil)
	p, err := c.Up(t.Context(), config(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	away := 2
	api.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if away--; away >= 0 {
			return true, nil, errors.New("connection refused")
		}
		return false, nil, nil
	})
	if err := p.diagnose(t.Context(), p.traffic["a/client-0"], errors.New("cut")); errors.Is(err, place.ErrLost) || away >= 0 {
		t.Errorf("away for a moment: %v", err)
	}
}

const aliveID, deadID = "alive222", "dead2345"

// leave creates a run's objects in the cluster, as the run would.
func leave(t *testing.T, c *Cluster, id string, renewed time.Time) *run {
	t.Helper()
	r := newRun(id)
	for _, n := range []*corev1.Namespace{r.namespaceObject(r.namespace, "restricted"), r.namespaceObject(r.nodes, "privileged")} {
		n.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
		make1(t, c.api.Namespaces(), n)
	}
	make1(t, c.api.Pods(r.nodes), r.nodePod(r.name("client", "node"), "a"))
	make1(t, c.api.Leases(r.namespace), r.lease(id, []string{"a", "b"}, 60, metav1.NewMicroTime(renewed)))
	return r
}

// make1 creates an object as a run does, or as another program does.
func make1[T, L any](t *testing.T, all objects[T, L], object T, writer ...string) {
	t.Helper()
	options := creation
	if len(writer) > 0 {
		options.FieldManager = writer[0]
	}
	if _, err := all.Create(t.Context(), object, options); err != nil {
		t.Fatal(err)
	}
}

// TestCleanup leaves live runs and the objects of others alone.
func TestCleanup(t *testing.T) {
	api, c := fakeCluster(t, nil)
	leave(t, c, aliveID, time.Now())
	leave(t, c, deadID, time.Now().Add(-time.Hour))
	make1(t, c.api.Namespaces(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "slipstream-other"}})
	runs, foreign, err := c.Runs(t.Context())
	if err != nil || foreign != nil {
		t.Fatal(err, foreign)
	}
	want := []Run{
		{ID: aliveID, Own: []string{"slipstream-alive222", "slipstream-alive222-nodes"}, Pods: 1, Holder: aliveID, Nodes: []string{"a", "b"}, Alive: true},
		{ID: deadID, Own: []string{"slipstream-dead2345", "slipstream-dead2345-nodes"}, Pods: 1, Holder: deadID, Nodes: []string{"a", "b"}},
	}
	if diff := cmp.Diff(want, runs); diff != "" {
		t.Fatalf("runs (-want +got):\n%s", diff)
	}
	if err := c.Remove(t.Context(), runs[1]); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"slipstream-alive222", "slipstream-alive222-nodes", "slipstream-other", "slipstream-alive222-nodes/client-node-alive222", "slipstream-alive222/run-alive222"}, left(t, api)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	for _, id := range []string{"", "system", "../pods"} {
		if err := c.Remove(t.Context(), Run{ID: id, Own: []string{"slipstream-other"}}); err == nil {
			t.Errorf("a run called %q is removed", id)
		}
	}
}

// TestClocksThatDiffer: the clock of this machine is five minutes ahead of the API server's, or behind it. A live run on another
// machine is still alive, a dead one is dead, and this machine's leases have the server's time.
func TestClocksThatDiffer(t *testing.T) {
	for _, ahead := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		date := func() time.Time { return time.Now().Add(-ahead) }
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Date", date().UTC().Format(http.TimeFormat))
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"NamespaceList","apiVersion":"v1"}`)
		}))
		defer server.Close()
		c, err := Open(Access{Kubeconfig: kubeconfig(t, server.URL, "current-context: prod", "{}")})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.api.Namespaces().List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		api, other := fakeCluster(t, nil)
		c.api = other.api
		leave(t, c, aliveID, date())
		leave(t, c, deadID, date().Add(-2*leaseTime))
		made := newRun("made2345").namespaceObject("slipstream-made2345", "restricted")
		made.CreationTimestamp = metav1.NewTime(date())
		make1(t, c.api.Namespaces(), made)
		runs, _, err := c.Runs(t.Context())
		if err != nil || len(runs) != 3 || !runs[0].Alive || runs[1].Alive || !runs[2].Alive {
			t.Errorf("ahead by %s: %+v, %v", ahead, runs, err)
		}
		if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "run "+aliveID) {
			t.Errorf("ahead by %s: beside a live run: %v", ahead, err)
		}
		if err := c.Remove(t.Context(), runs[0]); err != nil {
			t.Fatal(err)
		}
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		lease, err := api.CoordinationV1().Leases(p.namespace).Get(t.Context(), p.name("run"), metav1.GetOptions{})
		if err != nil || date().Sub(lease.Spec.RenewTime.Time).Abs() > leaseTime {
			t.Errorf("ahead by %s: the lease says %v at %s, %v", ahead, lease.Spec.RenewTime, date(), err)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestCleanupOfWhatOnlyHasTheLabels: somebody gives their own objects all the labels and annotations of a dead run's. None
// is removed, and each is named.
func TestCleanupOfWhatOnlyHasTheLabels(t *testing.T) {
	api, c := fakeCluster(t, nil)
	dead := leave(t, c, deadID, time.Now().Add(-time.Hour))
	system := newRun("system")
	namespace := func(r *run, name string) *corev1.Namespace { return r.namespaceObject(name, "restricted") }
	pod := func(r *run, namespace, name string, change func(*corev1.Pod)) *corev1.Pod {
		p := r.pod(namespace, name, "a")
		change(p)
		return p
	}
	as := func(p *corev1.Pod) {}
	service := func(name string, selector map[string]string) *corev1.Service {
		s := dead.service(name)
		s.Namespace, s.Spec.Selector = "shop", selector
		return s
	}
	lease := dead.lease("x", []string{"a", "b"}, 60, metav1.NowMicro())
	lease.Namespace, lease.Name = "shop", "leader"

	make1(t, c.api.Namespaces(), namespace(dead, "shop"), "kubectl-create")
	make1(t, c.api.Namespaces(), namespace(dead, "slipstream-dead2345-more"), manager)
	make1(t, c.api.Namespaces(), namespace(system, "slipstream-system"), "helm")
	make1(t, c.api.Namespaces(), namespace(newRun("bbbbbbbb"), "slipstream-bbbbbbbb"), "kubectl-create")
	// Pods: of another name, of another program, written by another, of another run.
	make1(t, c.api.Pods("shop"), pod(dead, "shop", "web-0", as))
	make1(t, c.api.Pods("shop"), pod(dead, "shop", "client-0-dead2345", func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"/nginx"} }))
	make1(t, c.api.Pods("shop"), pod(dead, "shop", "client-1-dead2345", as), "kubectl-create")
	make1(t, c.api.Pods("shop"), pod(dead, "shop", "client-0-cccccccc", as))
	make1(t, c.api.Services("shop"), service("web", map[string]string{"app": "web"}))
	make1(t, c.api.Services("shop"), service("server-0-dead2345", map[string]string{"app": "web"}))
	make1(t, c.api.Leases("shop"), lease)

	runs, foreign, err := c.Runs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(runs) != 1 || runs[0].ID != deadID || runs[0].Within != nil || runs[0].Alive {
		t.Errorf("runs %+v", runs)
	}
	var names []string
	for _, f := range foreign {
		names = append(names, f.Kind+" "+f.Name)
	}
	slices.Sort(names)
	if diff := cmp.Diff([]string{
		"lease shop/leader", "namespace shop", "namespace slipstream-bbbbbbbb", "namespace slipstream-dead2345-more", "namespace slipstream-system",
		"pod shop/client-0-cccccccc", "pod shop/client-0-dead2345", "pod shop/client-1-dead2345", "pod shop/web-0",
		"service shop/server-0-dead2345", "service shop/web",
	}, names); diff != "" {
		t.Errorf("foreign (-want +got):\n%s", diff)
	}
	before := left(t, api)
	// Not even if a caller passes these namespaces.
	for _, r := range []Run{
		{ID: deadID, Own: []string{"shop"}}, {ID: deadID, Own: []string{"slipstream-system"}}, {ID: deadID, Own: []string{"slipstream-dead2345-more"}}, {ID: "bbbbbbbb", Own: []string{"slipstream-bbbbbbbb"}},
	} {
		if err := c.Remove(t.Context(), r); err == nil || !strings.Contains(err.Error(), "and is not deleted") {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if err := c.Remove(t.Context(), Run{ID: deadID, Within: []string{"shop"}}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, left(t, api)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if err := c.Remove(t.Context(), runs[0]); err != nil {
		t.Error(err)
	}
	for _, name := range left(t, api) {
		if strings.HasPrefix(name, "slipstream-dead2345/") || name == "slipstream-dead2345" || name == "slipstream-dead2345-nodes" {
			t.Errorf("%s is left", name)
		}
	}
}

// TestCleanupOfANamespaceWithOthersPods: removing a run's namespace would also remove what somebody else has put there.
func TestCleanupOfANamespaceWithOthersPods(t *testing.T) {
	api, c := fakeCluster(t, nil)
	dead := leave(t, c, deadID, time.Now().Add(-time.Hour))
	make1(t, c.api.Pods(dead.namespace), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: dead.namespace, Name: "web"}}, "kubectl-create")
	runs, _, err := c.Runs(t.Context())
	if err != nil || len(runs) != 1 {
		t.Fatal(runs, err)
	}
	if err := c.Remove(t.Context(), runs[0]); err == nil || !strings.Contains(err.Error(), "namespace slipstream-dead2345 is not deleted, because it has pods that no run created: web (") {
		t.Errorf("%v", err)
	}
	if diff := cmp.Diff([]string{"slipstream-dead2345", "slipstream-dead2345-nodes", "slipstream-dead2345/web", "slipstream-dead2345/run-dead2345"}, left(t, api)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// TestDeletionNamesTheObject: an object that has taken the name of the one that was checked is not deleted.
func TestDeletionNamesTheObject(t *testing.T) {
	api, c := fakeCluster(t, nil)
	leave(t, c, deadID, time.Now().Add(-time.Hour))
	runs, _, err := c.Runs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	deletions := 0
	api.PrependReactor("delete", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		deletions++
		o := action.(clienttesting.DeleteActionImpl).DeleteOptions
		if o.Preconditions == nil || o.Preconditions.UID == nil {
			t.Errorf("%s %s is deleted by its name alone", action.GetResource().Resource, action.(clienttesting.DeleteAction).GetName())
		}
		return false, nil, nil
	})
	if err := c.Remove(t.Context(), runs[0]); err != nil || deletions != 3 {
		t.Errorf("%d deletions, %v", deletions, err)
	}
}

// TestInbox: a reader gets everything and then the end. A writer continues after its reader has left.
func TestInbox(t *testing.T) {
	s := new(Stream)
	s.out.init(func() {})
	go func() {
		_, _ = s.out.Write([]byte("one"))
		_, _ = s.out.Write([]byte("two"))
		s.out.end()
	}()
	var got []byte
	buf := make([]byte, 2)
	for {
		n, err := s.out.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			break
		}
	}
	if string(got) != "onetwo" {
		t.Errorf("read %q", got)
	}
	s.out.close()
	if n, err := s.out.Write([]byte("three")); n != 5 || err != nil {
		t.Errorf("write after close: %d, %v", n, err)
	}
	if _, err := s.out.Read(buf); err == nil {
		t.Error("read after close")
	}
}

// TestInboxFlood: what a program in a pod sends and nobody reads takes a bounded amount of memory, and its exec ends.
func TestInboxFlood(t *testing.T) {
	s, ended := &Stream{pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "evil"}}}, 0
	s.out.init(func() { ended++ })
	part, sent := make([]byte, 1<<20), 0
	var err error
	for err == nil && sent < 2*maxInbox {
		if _, err = s.out.Write(part); err == nil {
			sent += len(part)
		}
	}
	if !errors.Is(err, errNotWorker) || sent > maxInbox || ended != 1 || s.out.buf.Cap() > 0 {
		t.Errorf("%d bytes were taken, %d are kept, the exec was ended %d times, %v", sent, s.out.buf.Cap(), ended, err)
	}
	if _, err := s.out.Read(part); err != io.EOF {
		t.Errorf("the reader gets %v", err)
	}
	if why := s.Why(); !errors.Is(why, errNotWorker) || !strings.Contains(why.Error(), "pod ns/evil") {
		t.Errorf("why it ended: %v", why)
	}
}

// In a mesh, losing a node loses only its pods. What concerns all nodes loses the run.
func TestLostNodeOfAMesh(t *testing.T) {
	for _, mesh := range []bool{false, true} {
		p := &Pods{config: Config{Mesh: mesh}, lost: make(map[string]error), run: *newRun("x")}
		a, b := p.trafficPod("a", "node-a"), p.trafficPod("b", "node-b")
		if err := p.lose(a, errors.New("gone")); !errors.Is(err, place.ErrLost) {
			t.Errorf("mesh %t: %v", mesh, err)
		}
		if p.isLost(a) == nil || (p.isLost(b) == nil) != mesh || (p.isLost(nil) == nil) != mesh {
			t.Errorf("mesh %t: lost are %v, %v, all %v", mesh, p.isLost(a), p.isLost(b), p.isLost(nil))
		}
		if _ = p.lose(nil, errors.New("no lease")); p.isLost(b) == nil {
			t.Errorf("mesh %t: the run is not lost", mesh)
		}
	}
}

// TestNightlyRights: the account of the chart's CronJob may do what its run needs, and nothing is missing from its roles.
func TestNightlyRights(t *testing.T) {
	chart, err := os.ReadFile("../../../test/testdata/chart-nightly.yaml")
	if err != nil {
		t.Fatal(err)
	}
	granted := make(map[permission]bool)
	for doc := range strings.SplitSeq(string(chart), "\n---\n") {
		var role rbacv1.Role // a ClusterRole has the same rules
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		for _, r := range role.Rules {
			for _, verb := range r.Verbs {
				resource, subresource, _ := strings.Cut(r.Resources[0], "/")
				granted[permission{verb, r.APIGroups[0], resource, subresource, role.Namespace}] = true
			}
		}
	}
	c := &Cluster{namespace: "net"}
	needed := c.permissions(Config{Mesh: true, Pod: true, Native: true})
	for _, p := range needed {
		if !granted[p] {
			t.Errorf("it may not %s", p)
		}
	}
	if len(needed) < 10 {
		t.Errorf("a run needs only %d permissions", len(needed))
	}
}
