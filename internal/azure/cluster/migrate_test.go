package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
	"slipstream.dev/internal/azure/cluster"
)

const (
	can    = "Standard_D4s_v5"
	cannot = "Standard_B2s"
	group  = "v1"
)

// world joins a fake subscription to a fake cluster: creating a pool adds nodes, and deleting it removes them. An
// evicted pod is created again on the first node that accepts it, as a ReplicaSet and a scheduler would do.
type world struct {
	*azuretest.Cloud
	client *fake.Clientset
	pods   cluster.Pool
	dir    string

	mu       sync.Mutex
	made     int
	violated []string
	proof    azure.Proof
	proofs   int
	touched  string            // what changed in the old pool before the proof
	cpu      resource.Quantity // that each pod requests
	full     bool              // no node has room for a pod
}

const healthy = 5 // of six pods, as their budget demands

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Cloud: azuretest.New(), client: fake.NewClientset(), dir: t.TempDir(), proof: azure.Proof{Good: true, Text: "twice as fast"}}
	w.client.Resources = []*metav1.APIResourceList{{GroupVersion: group, APIResources: []metav1.APIResource{{Name: "pods/eviction", Kind: "Eviction", Group: "policy", Version: group}}},
		{GroupVersion: "policy/v1", APIResources: []metav1.APIResource{{Name: "poddisruptionbudgets"}}}}
	w.client.PrependReactor("list", "pods", w.listPods)
	w.client.PrependReactor("create", "pods", w.evict)
	w.pods = cluster.Pool{Cluster: cluster.New(w.client, func(context.Context) ([]byte, error) { return []byte(`{"items": []}`), nil }, time.Millisecond)}
	w.AddCluster("rg", "prod")
	w.OnPool = w.onPool
	w.onPool("sys", w.AddPool("rg", "prod", "sys", can, armcontainerservice.AgentPoolModeSystem, 2))
	net := w.AddPool("rg", "prod", "net", cannot, armcontainerservice.AgentPoolModeUser, 2)
	net.Properties.EnableAutoScaling, net.Properties.MinCount, net.Properties.MaxCount = to.Ptr(true), to.Ptr(int32(1)), to.Ptr(int32(5))
	w.onPool("net", net)
	for i := range 6 {
		w.addPod(fmt.Sprintf("web-%d", i), fmt.Sprintf("net-%d", i%2))
	}
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
		Status: policyv1.PodDisruptionBudgetStatus{DesiredHealthy: healthy, ExpectedPods: 6, DisruptionsAllowed: 1}}
	w.add(budget)
	return w
}

func (w *world) add(o runtime.Object) {
	if err := w.client.Tracker().Add(o); err != nil {
		panic(err)
	}
}

// onPool adds the nodes of a pool that is created, and removes those of a pool that is deleted.
func (w *world) onPool(name string, p *armcontainerservice.AgentPool) {
	if p == nil {
		for i := range 2 {
			_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", fmt.Sprintf("%s-%d", name, i))
		}
		return
	}
	for i := range int(*p.Properties.Count) {
		w.add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, i), Labels: map[string]string{cluster.PoolLabel: name, "team": "net"}},
			Spec: corev1.NodeSpec{ProviderID: azuretest.ProviderID(name, i)},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourcePods: resource.MustParse("60")}}})
	}
}

func (w *world) addPod(name, node string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": "web"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", Controller: to.Ptr(true)}}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: w.cpu}}}}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	if node == "" {
		pod.Status.Phase = corev1.PodPending
	}
	w.add(pod)
	return pod
}

func (w *world) allPods() []corev1.Pod {
	o, err := w.client.Tracker().List(corev1.SchemeGroupVersion.WithResource("pods"), corev1.SchemeGroupVersion.WithKind("Pod"), "")
	if err != nil {
		panic(err)
	}
	return o.(*corev1.PodList).Items
}

// listPods selects by field, which client-go's fake does not support.
func (w *world) listPods(a ktesting.Action) (bool, runtime.Object, error) {
	list := new(corev1.PodList)
	by := a.(ktesting.ListAction).GetListRestrictions().Fields
	for _, p := range w.allPods() {
		if by == nil || by.Matches(fields.Set{"spec.nodeName": p.Spec.NodeName}) {
			list.Items = append(list.Items, p)
		}
	}
	return true, list, nil
}

func (w *world) evict(a ktesting.Action) (bool, runtime.Object, error) {
	if a.GetSubresource() != "eviction" {
		return false, nil, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	name := a.(ktesting.CreateAction).GetObject().(*policyv1.Eviction).Name
	if running := w.running(); running-1 < healthy {
		w.violated = append(w.violated, fmt.Sprintf("%s with %d running", name, running))
	}
	if err := w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", name); err != nil {
		return true, nil, err
	}
	w.made++
	w.addPod(fmt.Sprintf("web-again-%d", w.made), w.schedule())
	return true, nil, nil
}

func (w *world) running() (n int) {
	for _, p := range w.allPods() {
		if p.Spec.NodeName != "" {
			n++
		}
	}
	return n
}

func (w *world) nodes() []corev1.Node {
	o, err := w.client.Tracker().List(corev1.SchemeGroupVersion.WithResource("nodes"), corev1.SchemeGroupVersion.WithKind("Node"), "")
	if err != nil {
		panic(err)
	}
	list := o.(*corev1.NodeList).Items
	slices.SortFunc(list, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	return list
}

func (w *world) schedule() string {
	for _, n := range w.nodes() {
		if !w.full && !n.Spec.Unschedulable && !strings.HasPrefix(n.Name, "sys") {
			return n.Name
		}
	}
	return ""
}

// state returns what backing out must restore: pools, autoscalers, cordons, and the pools that pods are on.
func (w *world) state() string {
	w.Lock()
	defer w.Unlock()
	var lines []string
	for name, p := range w.Pools {
		lines = append(lines, fmt.Sprint(name, " ", *p.Properties.VMSize, " ", *p.Properties.EnableAutoScaling))
	}
	for _, n := range w.nodes() {
		lines = append(lines, fmt.Sprint(n.Name, " ", n.Spec.Unschedulable))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\npods on " + w.podsOn()
}

func (w *world) podsOn() string {
	var pools []string
	for _, p := range w.allPods() {
		pool, _, _ := strings.Cut(p.Spec.NodeName, "-")
		pools = append(pools, pool)
	}
	slices.Sort(pools)
	return strings.Join(slices.Compact(pools), ", ")
}

func (w *world) migration() azure.Migration {
	return azure.Migration{Group: "rg", Cluster: "prod", Pool: "net", Size: can, Dir: w.dir, Nodes: w.pods, Timeout: 5 * time.Second, Note: func(string) {},
		Prove: func(context.Context, time.Time, []azure.Node, []azure.Node) (azure.Proof, error) {
			w.proofs++
			for _, n := range w.nodes() {
				if n.Spec.Unschedulable {
					w.touched = n.Name
				}
			}
			return w.proof, nil
		}}
}

func (w *world) plan(o azure.Migration) (*azure.Migrator, error) {
	c, err := azure.Open(w.Options())
	if err != nil {
		return nil, err
	}
	return c.PlanMigration(context.Background(), o)
}

func (w *world) run(o azure.Migration) error {
	m, err := w.plan(o)
	if err != nil {
		return err
	}
	return m.Run(context.Background())
}

func (w *world) backOut(o azure.Migration) error {
	m, err := w.plan(o)
	if err != nil {
		return err
	}
	return m.BackOut(context.Background())
}

// migrated checks that the old pool is empty and still exists.
func (w *world) migrated(t *testing.T, when string) {
	t.Helper()
	if got := w.podsOn(); got != "netan" || w.running() != 6 {
		t.Fatalf("%s: %d pods on %s", when, w.running(), got)
	}
	if len(w.violated) > 0 || w.touched != "" {
		t.Fatalf("%s: budget violated by %v; before the proof %q was cordoned", when, w.violated, w.touched)
	}
	old, fresh := w.Pools["rg/prod/net"], w.Pools["rg/prod/netan"]
	if old == nil || fresh == nil || *old.Properties.VMSize != cannot || !*fresh.Properties.EnableAutoScaling || *fresh.Properties.MaxCount != 5 {
		t.Fatalf("%s: %+v, %+v", when, old, fresh)
	}
}

// TestDrainSaysWhatIsLeft drains a node on which pods are created meanwhile, and one whose pods can no longer be listed.
func TestDrainSaysWhatIsLeft(t *testing.T) {
	w := newWorld(t)
	drain := func(want string) {
		t.Helper()
		if err := w.pods.Drain(t.Context(), "net-0", func(string) {}); err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
	}
	drain("drain net-0: 3 pods are left, or were created meanwhile")
	lists := 0
	w.client.PrependReactor("list", "pods", func(ktesting.Action) (bool, runtime.Object, error) {
		lists++
		return lists > 1, nil, errors.New("no answer")
	})
	drain("drain net-0: look for pods that are left: no answer")
}

func TestMigrateCopiesSettings(t *testing.T) {
	w := newWorld(t)
	if err := w.run(w.migration()); err != nil {
		t.Fatal(err)
	}
	w.migrated(t, "uninterrupted")
	p := w.Pools["rg/prod/netan"].Properties
	if *p.MaxPods != 60 || *p.AvailabilityZones[0] != "1" || *p.NodeTaints[0] != "net=yes:PreferNoSchedule" || *p.OrchestratorVersion != "1.33.2" || *p.Mode != armcontainerservice.AgentPoolModeUser || *p.Count != 2 || *p.MinCount != 1 {
		t.Errorf("%+v", p)
	}
	if len(p.NodeLabels) != 1 || *p.NodeLabels["team"] != "net" {
		t.Errorf("labels %v", p.NodeLabels)
	}
	journals, err := filepath.Glob(filepath.Join(w.dir, "*.json"))
	if err != nil || len(journals) != 1 {
		t.Fatalf("journals %v, %v", journals, err)
	}
	journal, err := os.ReadFile(journals[0])
	if err != nil {
		t.Fatal(err)
	}
	azuretest.CheckSecrets(t, "the journal", string(journal))
	o := w.migration()
	o.Delete = true
	if err := w.run(o); err != nil {
		t.Fatal(err)
	}
	if w.Pools["rg/prod/net"] != nil || w.podsOn() != "netan" || w.proofs != 1 {
		t.Errorf("deleted: %s, %d proofs", w.state(), w.proofs)
	}
}

// Whichever request a migration is interrupted at, and however, the same command completes it, and --back-out restores
// the original state. The budget of the pods holds throughout.
func TestMigrateGoesOnOrBackAfterEveryInterruption(t *testing.T) {
	for name, fault := range azuretest.Interruptions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for at := 1; ; at += azuretest.Stride() {
				on, back := newWorld(t), newWorld(t)
				before := back.state()
				forward := on.InterruptAt(at, fault)
				_ = on.run(on.migration())
				on.Fault = nil
				if err := on.run(on.migration()); err != nil {
					t.Fatalf("stopped at request %d, the second run: %v", at, err)
				}
				on.migrated(t, fmt.Sprintf("stopped at request %d", at))

				begun := back.InterruptAt(at, fault)
				_ = back.run(back.migration())
				backedOut := back.InterruptAt(at, fault)
				_ = back.backOut(back.migration())
				back.Fault = nil
				if err := back.backOut(back.migration()); err != nil {
					t.Fatalf("stopped at request %d, back: %v", at, err)
				}
				if got := back.state(); got != before {
					t.Fatalf("backed out of at request %d:\n%s\nnot\n%s", at, got, before)
				}
				if len(back.violated) > 0 {
					t.Fatalf("backed out of at request %d: budget violated by %v", at, back.violated)
				}
				if !forward() && !begun() && !backedOut() {
					return
				}
			}
		})
	}
}

// The same holds for each change of the cluster.
func TestMigrateGoesOnAfterEveryRefusalOfTheCluster(t *testing.T) {
	for at, hit := 1, true; hit; at += azuretest.Stride() {
		hit = false
		again := false
		w := newWorld(t)
		n := 0
		refuse := func(ktesting.Action) (bool, runtime.Object, error) {
			if n++; n == at && !again {
				hit = true
				return true, nil, errors.New("connection refused")
			}
			return false, nil, nil
		}
		w.client.PrependReactor("patch", "nodes", refuse)
		w.client.PrependReactor("create", "pods", refuse)
		if err := w.run(w.migration()); (err != nil) != hit {
			t.Fatalf("refused change %d: %v", at, err)
		}
		again = true
		if err := w.run(w.migration()); err != nil {
			t.Fatal(err)
		}
		w.migrated(t, fmt.Sprintf("change %d refused", at))
	}
}

func TestMigrateStopsBeforeTheCordonUnlessFaster(t *testing.T) {
	w := newWorld(t)
	before := w.podsOn()
	w.proof = azure.Proof{Text: "half as fast"}
	if err := w.run(w.migration()); err == nil || !strings.Contains(err.Error(), "not proven faster") {
		t.Fatalf("%v", err)
	}
	if w.podsOn() != before || slices.ContainsFunc(w.nodes(), func(n corev1.Node) bool { return n.Spec.Unschedulable }) || !*w.Pools["rg/prod/net"].Properties.EnableAutoScaling {
		t.Errorf("touched: %s", w.state())
	}
	o := w.migration()
	o.Anyway = true
	if err := w.run(o); err != nil {
		t.Fatal(err)
	}
	w.migrated(t, "anyway")
}

func TestMigrateRefuses(t *testing.T) {
	for want, change := range map[string]func(*world, *azure.Migration){
		"the only system pool":                    func(_ *world, o *azure.Migration) { o.Pool = "sys" },
		"does not support Accelerated Networking": func(_ *world, o *azure.Migration) { o.Size = "" },
		"has no size":                             func(_ *world, o *azure.Migration) { o.Size = "Standard_X" },
		"has 7 vCPUs left, and 2 nodes of Standard_D4s_v5 need 8": func(w *world, _ *azure.Migration) { w.Limit, w.InUse = 100, 93 },
		"there is a node pool sys already":                        func(_ *world, o *azure.Migration) { o.New = "sys" },
		"is not a valid name of a node pool":                      func(_ *world, o *azure.Migration) { o.New = "Net-2" },
		"has no node pool none":                                   func(_ *world, o *azure.Migration) { o.Pool = "none" },
		"of type VirtualMachines": func(w *world, _ *azure.Migration) {
			w.Pools["rg/prod/net"].Properties.Type = to.Ptr(armcontainerservice.AgentPoolType("VirtualMachines"))
		},
		"--until x: there is no such step": func(_ *world, o *azure.Migration) { o.Until = "x" },
	} {
		w := newWorld(t)
		o := w.migration()
		before := w.state()
		change(w, &o)
		if err := w.run(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
		if w.state() != before {
			t.Errorf("%s: changed", want)
		}
	}
}

// Each pod that cannot move is named, with the reason.
func TestMigrateNamesBlockers(t *testing.T) {
	for want, change := range map[string]func(*world, *corev1.Pod){
		"no controller would create it again": func(_ *world, p *corev1.Pod) { p.OwnerReferences = nil },
		"volume cache is on the node": func(_ *world, p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "cache", VolumeSource: corev1.VolumeSource{EmptyDir: new(corev1.EmptyDirVolumeSource)}}}
		},
		"no new node matches its node selector": func(_ *world, p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"kubernetes.azure.com/agentpool": "net"}
		},
		"PodDisruptionBudget strict never allows": func(w *world, p *corev1.Pod) {
			p.Labels["strict"] = "yes"
			w.add(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "strict"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"strict": "yes"}}},
				Status: policyv1.PodDisruptionBudgetStatus{DesiredHealthy: 1, ExpectedPods: 1}})
		},
		"evicts no pod with several PodDisruptionBudgets (all, web)": func(w *world, _ *corev1.Pod) {
			w.add(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "all"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: new(metav1.LabelSelector)},
				Status: policyv1.PodDisruptionBudgetStatus{DesiredHealthy: healthy, ExpectedPods: 6, DisruptionsAllowed: 1}})
		},
	} {
		w := newWorld(t)
		pod := w.allPods()[0]
		change(w, &pod)
		if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), &pod, "default"); err != nil {
			t.Fatal(err)
		}
		err := w.run(w.migration())
		if err == nil || !strings.Contains(err.Error(), "pod default/"+pod.Name) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
		if strings.Contains(w.podsOn(), "netan") {
			t.Errorf("%s: a pod was moved", want)
		}
	}
}

// A kubeconfig of another cluster, whose pool may have the same name, is refused before anything changes, forward or
// back.
func TestMigrateRefusesAnotherCluster(t *testing.T) {
	for want, change := range map[string]func(*corev1.Node) bool{
		"its node net-0 is no machine of that cluster": func(n *corev1.Node) bool {
			n.Spec.ProviderID = strings.Replace(n.Spec.ProviderID, "/mc/", "/mc-staging/", 1)
			return true
		},
		"it has no node of pool net, and Azure has 2": func(n *corev1.Node) bool { n.Labels = nil; return true },
	} {
		w := newWorld(t)
		o := w.migration()
		o.Until = "drain"
		if err := w.run(o); err != nil {
			t.Fatal(err)
		}
		for _, n := range w.nodes() {
			if strings.HasPrefix(n.Name, "net-") && change(&n) {
				if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
					t.Fatal(err)
				}
			}
		}
		before := w.state()
		for name, do := range map[string]func(azure.Migration) error{"run": w.run, "back out": w.backOut} {
			if err := do(w.migration()); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--context") {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
		if w.state() != before {
			t.Errorf("changed: %s", w.state())
		}
	}
}

// The new nodes must have room for the pods, before the first eviction and while the pods move.
func TestMigrateNeedsRoom(t *testing.T) {
	w := newWorld(t)
	for _, p := range w.allPods() {
		p.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("1500m")
		if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), &p, "default"); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.run(w.migration()); err == nil || !strings.Contains(err.Error(), "netan has 8 cpu left, and they need 9; scale it first") || strings.Contains(w.podsOn(), "netan") {
		t.Errorf("%v; pods on %s", err, w.podsOn())
	}

	w = newWorld(t)
	w.full = true
	o := w.migration()
	o.Timeout = 20 * time.Millisecond
	if err := w.run(o); err == nil || !strings.Contains(err.Error(), "after the drain of net-0: waited 20ms for evicted pods to get a node; without a node: default/web-again-1") {
		t.Errorf("%v", err)
	}
	if !strings.Contains(w.podsOn(), "net") {
		t.Error("the second node was drained though the pods of the first had no room")
	}
}

// A migration can be backed out after Azure refuses the delete. Before the next delete, the measurement and the pods
// are checked again.
func TestMigrateBackOutAfterARefusedDelete(t *testing.T) {
	w := newWorld(t)
	before := w.state()
	o := w.migration()
	o.Delete = true
	w.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if r.Method == http.MethodDelete {
			return azuretest.Conflict
		}
		return azuretest.None
	}
	if err := w.run(o); err == nil || !strings.Contains(err.Error(), "delete") {
		t.Fatalf("%v", err)
	}
	w.Fault = nil
	late := w.addPod("late", "net-0")
	owners := late.OwnerReferences
	for _, late.OwnerReferences = range [][]metav1.OwnerReference{nil, owners} {
		if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), late, "default"); err != nil {
			t.Fatal(err)
		}
		if err := w.run(o); (err == nil) != (late.OwnerReferences != nil) || err != nil && !strings.Contains(err.Error(), "no controller would create it again") {
			t.Fatalf("a pod that came meanwhile: %v", err)
		}
	}
	if got := w.podsOn(); got != "netan" || w.Pools["rg/prod/net"] != nil {
		t.Errorf("after the delete that succeeded, pods are on %s: %s", got, w.state())
	}

	w = newWorld(t)
	w.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if r.Method == http.MethodDelete {
			return azuretest.Conflict
		}
		return azuretest.None
	}
	o.Dir, o.Nodes, o.Prove = w.dir, w.pods, w.migration().Prove
	_ = w.run(o)
	w.Fault = nil
	if err := w.backOut(w.migration()); err != nil {
		t.Fatal(err)
	}
	if got := w.state(); got != before {
		t.Errorf("backed out:\n%s\nnot\n%s", got, before)
	}
}

// The new pool's autoscaler may remove nodes before the old pool is deleted.
func TestMigrateDeletesAfterTheNewPoolWasScaled(t *testing.T) {
	w := newWorld(t)
	if err := w.run(w.migration()); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", "netan-1"); err != nil {
		t.Fatal(err)
	}
	w.Pools["rg/prod/netan"].Properties.Count = to.Ptr(int32(1))
	o := w.migration()
	o.Delete, o.Timeout = true, 20*time.Millisecond
	if err := w.run(o); err != nil || w.Pools["rg/prod/net"] != nil {
		t.Errorf("%v: %s", err, w.state())
	}
}

// Two processes do not migrate at once. A process does not continue with a state that it read before the other began.
func TestMigrateAlone(t *testing.T) {
	w := newWorld(t)
	first, err := w.plan(w.migration())
	if err != nil {
		t.Fatal(err)
	}
	second, err := w.plan(w.migration())
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	w.OnPool = func(name string, p *armcontainerservice.AgentPool) {
		if !inside {
			inside = true
			if err := second.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "another process is at work on this") {
				t.Errorf("beside another: %v", err)
			}
		}
		w.onPool(name, p)
	}
	if err := first.Run(context.Background()); err != nil || !inside {
		t.Fatalf("%v, inside %t", err, inside)
	}
	if err := second.BackOut(context.Background()); err == nil || !strings.Contains(err.Error(), "another process has continued this migration") {
		t.Errorf("after another: %v", err)
	}
	w.migrated(t, "after two processes")
}

// Backing out waits until a pool that is being created has its nodes.
func TestMigrateBackOutWaitsForTheNewPool(t *testing.T) {
	w := newWorld(t)
	before := w.state()
	o := w.migration()
	o.Until = "create"
	if err := w.run(o); err != nil {
		t.Fatal(err)
	}
	w.Pools["rg/prod/netan"].Properties.ProvisioningState = to.Ptr("Creating")
	reads := 0
	w.Fault = func(_ int, r *http.Request) azuretest.Fault {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/netan") {
			if reads++; reads == 3 {
				w.Pools["rg/prod/netan"].Properties.ProvisioningState = to.Ptr("Failed")
			}
		}
		if r.Method == http.MethodDelete && reads < 3 {
			t.Error("deleted while it was being created")
		}
		return azuretest.None
	}
	if err := w.backOut(w.migration()); err != nil || w.state() != before {
		t.Errorf("%v: %s", err, w.state())
	}
}
