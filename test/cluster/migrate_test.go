//go:build linux

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
	"slipstream.dev/internal/azure/cli"
)

const (
	sizeWithAN    = "Standard_D4s_v5"
	sizeWithoutAN = "Standard_B2s"
	webNamespace  = "web"
	webPodCount   = 3
	webHealthy    = 2 // as their budget demands
)

// subscription joins a fake Azure subscription to a real cluster: creating a node pool starts kubelets, and deleting it stops
// them.
type subscription struct {
	*azuretest.Cloud
	t       *testing.T
	c       *Cluster
	joining sync.WaitGroup
	joined  func(*Node) error // called with each node that joins; may be nil
}

// newSubscription assigns nodes of the cluster to two pools: sys, and net, whose size lacks Accelerated Networking.
func newSubscription(t *testing.T, c *Cluster, sys, net []string) *subscription {
	t.Helper()
	s := &subscription{Cloud: azuretest.New(), t: t, c: c}
	t.Cleanup(s.joining.Wait)
	s.AddCluster("rg", "prod")
	s.AddPool("rg", "prod", "sys", sizeWithAN, armcontainerservice.AgentPoolModeSystem, len(sys))
	pool := s.AddPool("rg", "prod", "net", sizeWithoutAN, armcontainerservice.AgentPoolModeUser, len(net)).Properties
	pool.EnableAutoScaling, pool.MinCount, pool.MaxCount = to.Ptr(true), to.Ptr(int32(1)), to.Ptr(int32(5))
	for name, nodes := range map[string][]string{"sys": sys, "net": net} {
		for i, node := range nodes {
			if err := s.register(name, i, node); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				kubectl(t, c, nil, "label", "node", node, "kubernetes.azure.com/agentpool-", "team-")
			})
		}
	}
	s.OnPool = s.onPool
	return s
}

// register sets what Azure sets on a node: the provider ID and the labels of its pool.
func (s *subscription) register(pool string, i int, node string) error {
	team := "net"
	if pool == "sys" {
		team = "system"
	}
	patch := fmt.Sprintf(`{"spec": {"providerID": %q}, "metadata": {"labels": {"kubernetes.azure.com/agentpool": %q, "team": %q}}}`, azuretest.ProviderID(pool, i), pool, team)
	_, err := tryKubectl(s.c, nil, "patch", "node", node, "--patch="+patch)
	return err
}

func (s *subscription) onPool(name string, p *armcontainerservice.AgentPool) {
	if p == nil {
		s.joining.Wait()
		for i := 0; ; i++ {
			n := s.c.Node(fmt.Sprintf("%s-%d", name, i))
			if n == nil {
				return
			}
			if err := n.Leave(s.t.Context()); err != nil {
				s.t.Error(err)
				return
			}
		}
	}
	count := int(*p.Properties.Count)
	s.joining.Go(func() {
		for i := range count {
			n, err := s.c.Join(s.t.Context(), fmt.Sprintf("%s-%d", name, i))
			if err == nil && s.joined != nil {
				err = s.joined(n)
			}
			if err == nil {
				err = s.register(name, i, n.name)
			}
			if err != nil {
				s.t.Errorf("pool %s: %v", name, err)
				return
			}
		}
	})
}

// migrate runs slipstream azure migrate for pool net, and returns its exit code and output.
func (s *subscription) migrate(ctx context.Context, out io.Writer, dir string, args ...string) (code int, said string) {
	var printed bytes.Buffer
	w := io.MultiWriter(&lockedWriter{w: &printed}, out)
	code = cli.Main(ctx, cli.Process{
		Args: append([]string{"slipstream-azure", "migrate", "net", "--cluster", "rg/prod", "--size", sizeWithAN, "--yes", "--state", dir,
			"--kubeconfig", s.c.Kubeconfig(), "--subscription", azuretest.Subscription}, args...),
		Out: w, Err: w,
		Azure: func(azure.Options) (*azure.Cloud, error) {
			o := s.Options()
			o.Poll = 100 * time.Millisecond
			return azure.Open(o)
		},
	})
	azuretest.CheckSecrets(s.t, "the output", printed.String())
	return code, printed.String()
}

// interrupted repeats a command until a run meets no fault. That run must succeed. Each run meets faults of one kind, taken from
// faults in turn: they hit each request to Azure that has not been hit yet in the same step. The first drains are also
// interrupted while they evict pods. done checks the state after each run that succeeds.
func (s *subscription) interrupted(dir string, faults []azuretest.Fault, done func(), args ...string) (times int) {
	s.t.Helper()
	drains, met := 0, make(map[request]bool)
	for times < 200 {
		var step lastNote
		count := make(map[request]int)
		happened := s.Interrupt(faults[times%len(faults)], func(r *http.Request) bool {
			this := request{step: step.get(), method: r.Method, path: r.URL.Path}
			count[this]++
			this.n = count[this]
			known := met[this]
			met[this] = true
			return !known
		})
		ctx, cancel := context.WithCancel(s.t.Context())
		out := io.Writer(&step)
		if drains < webPodCount {
			out = io.MultiWriter(&step, &cancelAt{text: "evicting pod", cancel: cancel})
		}
		code, said := s.migrate(ctx, out, dir, args...)
		cut := ctx.Err() != nil
		if cut {
			drains++
			if strings.Contains(said, "timeout") {
				s.t.Errorf("an interrupted drain speaks of a timeout:\n%s", said)
			}
		}
		cancel()
		s.Fault = nil
		if code == 0 {
			done()
		}
		switch {
		case happened():
			times++
		case code == 0:
			if drains == 0 {
				s.t.Errorf("%v: no drain was interrupted", args)
			}
			return times
		case !cut:
			s.t.Fatalf("%v with no fault: exit %d:\n%s", args, code, said)
		}
	}
	s.t.Fatalf("%v does not end", args)
	return 0
}

// request identifies a request to Azure: the n-th of its kind in a step.
type request struct {
	step, method, path string
	n                  int
}

// lastNote keeps the last progress message of the program, such as " 12 s drain".
type lastNote struct{ text atomic.Value }

func (l *lastNote) Write(b []byte) (int, error) {
	if _, text, ok := strings.Cut(string(b), " s  "); ok {
		l.text.Store(strings.TrimSpace(text))
	}
	return len(b), nil
}

func (l *lastNote) get() string {
	text, _ := l.text.Load().(string)
	return text
}

// web runs the pods of a Deployment with a PodDisruptionBudget on the nodes of team net. Another process watches how many of
// them are Ready. stop ends the watch, and returns the smallest number.
func web(t *testing.T, c *Cluster) (stop func() int) {
	t.Helper()
	kubectl(t, c, nil, "create", "namespace", webNamespace)
	t.Cleanup(func() { kubectl(t, c, nil, "delete", "namespace", webNamespace) })
	kubectl(t, c, strings.NewReader(fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: %d
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      nodeSelector: {team: net}
      terminationGracePeriodSeconds: 1
      containers: [{name: pause, image: %q, imagePullPolicy: Never}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web}
spec: {minAvailable: %d, selector: {matchLabels: {app: web}}}
`, webPodCount, pauseImage, webHealthy)), "apply", "--namespace="+webNamespace, "--filename=-")
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--namespace="+webNamespace, "--timeout=60s")
	watch := exec.Command(filepath.Join(c.parts, "kubectl"), "--kubeconfig="+c.Kubeconfig(), "get", "pods", "--namespace="+webNamespace, "--watch", "--output-watch-events",
		`--output=jsonpath={.object.metadata.name} {.type}{.object.metadata.deletionTimestamp} {.object.status.conditions[?(@.type=="Ready")].status}{"\n"}`)
	lines, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	result := make(chan int, 1)
	go func() {
		ready, seen, fewest := make(map[string]bool), false, 0
		for scan := bufio.NewScanner(lines); scan.Scan(); {
			f := strings.Fields(scan.Text())
			delete(ready, f[0])
			if len(f) == 3 && f[2] == "True" && (f[1] == "ADDED" || f[1] == "MODIFIED") { // otherwise it is being deleted
				ready[f[0]] = true
			}
			if n := len(ready); !seen && n == webPodCount || seen && n < fewest {
				seen, fewest = true, n
			}
		}
		result <- fewest
	}()
	return func() int {
		_ = watch.Process.Kill()
		n := <-result
		_ = watch.Wait()
		return n
	}
}

// webNodes returns the nodes of web's pods, once all of them are Ready.
func webNodes(t *testing.T, c *Cluster) string {
	t.Helper()
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--namespace="+webNamespace, "--timeout=60s")
	return kubectl(t, c, nil, "get", "pods", "--namespace="+webNamespace, "--field-selector=status.phase=Running", "--output=jsonpath={.items[*].spec.nodeName}")
}

// poolNodes lists all nodes with their pools, and whether they are cordoned.
func poolNodes(t *testing.T, c *Cluster) string {
	t.Helper()
	return kubectl(t, c, nil, "get", "nodes", `--output=jsonpath={range .items[*]}{.metadata.name} {.metadata.labels.kubernetes\.azure\.com/agentpool} {.spec.unschedulable}{"\n"}{end}`)
}

// migrateAndBack migrates a node pool, interrupted at every request, and then backs out, interrupted in the same way. The budget
// of the pods holds throughout.
func migrateAndBack(t *testing.T, c *Cluster, faults ...azuretest.Fault) {
	t.Helper()
	s := newSubscription(t, c, []string{"node1"}, []string{"node0"})
	fewest := web(t, c)
	before, dir := poolNodes(t, c), t.TempDir()

	there := s.interrupted(dir, faults, func() {
		s.placed("netan-0", "netan-0 netan \nnode0 net true\nnode1 sys")
		old, fresh := s.Pools["rg/prod/net"], s.Pools["rg/prod/netan"]
		if old == nil || fresh == nil || *old.Properties.VMSize != sizeWithoutAN || *fresh.Properties.VMSize != sizeWithAN || !*fresh.Properties.EnableAutoScaling {
			t.Errorf("pools are %+v and %+v", old, fresh)
		}
	}, "--anyway") // a pool with one node cannot be measured
	back := s.interrupted(dir, faults, func() {
		s.placed("node0", before)
		if s.Pools["rg/prod/netan"] != nil || !*s.Pools["rg/prod/net"].Properties.EnableAutoScaling {
			t.Errorf("backed out: pools are %+v", s.Pools)
		}
	}, "--back-out")
	if n := fewest(); n < webHealthy {
		t.Errorf("at one time only %d pods were Ready, and the budget demands %d", n, webHealthy)
	}
	t.Logf("interrupted %d times on the way there, %d on the way back", there, back)
}

// placed fails the test unless all pods are on one node, and poolNodes lists the nodes as given.
func (s *subscription) placed(node, nodes string) {
	s.t.Helper()
	if got, want := webNodes(s.t, s.c), strings.TrimSpace(strings.Repeat(node+" ", webPodCount)); got != want {
		s.t.Errorf("the pods are on %s, want %s", got, want)
	}
	if got := poolNodes(s.t, s.c); got != nodes {
		s.t.Errorf("nodes are\n%s\nwant\n%s", got, nodes)
	}
}
