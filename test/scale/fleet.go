//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	authentication "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/agent/kube"
	"slipstream.dev/test/cluster"

	"slipstream.dev/api/v1alpha1"
)

const (
	namespace = "slipstream-system"
	account   = "slipstream"
	user      = "system:serviceaccount:" + namespace + ":" + account
)

// auditPolicy logs the requests of agents.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: ["` + user + `"]}
- {level: None}
`

// rights are those that the chart grants.
const rights = `
{apiVersion: v1, kind: Namespace, metadata: {name: slipstream-system}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: slipstream, namespace: slipstream-system}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: slipstream}
rules:
- {apiGroups: [""], resources: [nodes, pods], verbs: [list, watch]}
- {apiGroups: [slipstream.dev], resources: [accelerationpolicies], verbs: [list, watch]}
- {apiGroups: [slipstream.dev], resources: [accelerationpolicies/status, nodeaccelerations/status], verbs: [patch]}
- {apiGroups: [slipstream.dev], resources: [nodeaccelerations], verbs: [get, list, create, delete]}
- {apiGroups: [""], resources: [events], verbs: [create]}
- {apiGroups: [apps], resources: [daemonsets], verbs: [get]}
- {apiGroups: [""], resources: [namespaces], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: slipstream}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: slipstream}
subjects: [{kind: ServiceAccount, name: slipstream, namespace: slipstream-system}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: slipstream, namespace: slipstream-system}
spec:
  selector: {matchLabels: {app: slipstream}}
  template: {metadata: {labels: {app: slipstream}}, spec: {containers: [{name: agent, image: agent}]}}
`

var paths = map[string]string{
	"Namespace":                "/api/v1/namespaces",
	"ServiceAccount":           "/api/v1/namespaces/" + namespace + "/serviceaccounts",
	"ClusterRole":              "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":       "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"DaemonSet":                "/apis/apps/v1/namespaces/" + namespace + "/daemonsets",
	"CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
	"AccelerationPolicy":       "/apis/slipstream.dev/v1alpha1/accelerationpolicies",
}

// fleet is the cluster with its agents.
type fleet struct {
	options
	plane     *cluster.Plane
	log       *slog.Logger
	tokenFile string
	admin     kubernetes.Interface
	agents    []*hollow
	solo      *solo // nil until it starts
	own       int   // watches of the API server itself
	created   int   // number of pods so far
}

// newFleet creates the nodes, and policies that select none of them. No agent runs yet.
func newFleet(ctx context.Context, plane *cluster.Plane, tokenFile string, o options, log *slog.Logger) (*fleet, error) {
	f := &fleet{options: o, plane: plane, log: log, tokenFile: tokenFile}
	config, err := plane.Config("admin", "system:masters")
	if err != nil {
		return nil, err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	if f.admin, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	for _, document := range strings.Split(rights, "---\n") {
		if err := f.create(ctx, []byte(document)); err != nil {
			return nil, err
		}
	}
	if err := f.createCRDs(ctx); err != nil {
		return nil, err
	}
	if err := f.renewToken(ctx); err != nil {
		return nil, err
	}
	for i := range o.policies {
		if err := f.policy(ctx, fmt.Sprintf("other%d", i), "nodeSelector: {zone: none}"); err != nil {
			return nil, err
		}
	}
	names := []string{soloNode}
	for i := range o.nodes {
		names = append(names, fmt.Sprintf("node%d", i))
		f.agents = append(f.agents, &hollow{fleet: f, name: names[i+1]})
	}
	counts, err := f.counts(ctx)
	if err != nil {
		return nil, err
	}
	f.own = counts.watches
	return f, inParallel(names, func(name string) error {
		_, err := f.admin.CoreV1().Nodes().Create(ctx, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"zone": "a", "kubernetes.io/hostname": name}},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}},
		}, metav1.CreateOptions{})
		return err
	})
}

// size is the number of nodes: those of the synthetic agents, and that of the real one.
func (f *fleet) size() int { return len(f.agents) + 1 }

func (f *fleet) createCRDs(ctx context.Context) error {
	const dir = "charts/slipstream/crds"
	files, err := fs.Glob(os.DirFS(dir), "*.yaml")
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("no CRDs in %s; run it in the repository's folder", dir)
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return err
		}
		if err := f.create(ctx, bytes.TrimPrefix(text, []byte("---\n"))); err != nil {
			return err
		}
	}
	return eventually(ctx, "the CRDs to be served", func() error {
		return f.admin.Discovery().RESTClient().Get().AbsPath(paths["AccelerationPolicy"]).Do(ctx).Error()
	})
}

// create creates an object from YAML.
func (f *fleet) create(ctx context.Context, text []byte) error {
	body, err := yaml.YAMLToJSON(text)
	if err != nil {
		return fmt.Errorf("parse an object: %w", err)
	}
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(text, &kind); err != nil {
		return fmt.Errorf("parse an object: %w", err)
	}
	if err := f.admin.Discovery().RESTClient().Post().AbsPath(paths[kind.Kind]).SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error(); err != nil {
		return fmt.Errorf("create a %s: %w", kind.Kind, err)
	}
	return nil
}

// policy creates a policy that applies to all its nodes at once.
func (f *fleet) policy(ctx context.Context, name, nodes string) error {
	return f.create(ctx, fmt.Appendf(nil, `
apiVersion: slipstream.dev/v1alpha1
kind: AccelerationPolicy
metadata: {name: %s}
spec: {%s, rollout: {stepPercent: 100, pauseSeconds: 5}, accelerate: [{rps: {devices: [nic, pod], cpus: all}}]}`, name, nodes))
}

// renewToken gives the agents a token, as a kubelet does.
func (f *fleet) renewToken(ctx context.Context) error {
	token, err := f.admin.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authentication.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make a token: %w", err)
	}
	return os.WriteFile(f.tokenFile, []byte(token.Status.Token), 0o600)
}

// agentConfig returns the configuration of an agent's pod.
func (f *fleet) agentConfig() (*rest.Config, error) {
	config, err := f.plane.Config("nobody")
	if err != nil {
		return nil, err
	}
	config = rest.AnonymousClientConfig(config)
	config.QPS = 0
	config.BearerTokenFile = f.tokenFile
	return config, nil
}

// hollow is the agent of one node. It reports at once that everything desired is applied.
type hollow struct {
	*fleet
	name   string
	cancel func()
	ended  chan struct{}

	mu      sync.Mutex
	cluster *kube.Cluster
	status  agent.Status
	// heard is when the agent last learned what is desired, and of is the number of applied policies.
	heard time.Time
	of    int
}

func (h *hollow) start(ctx context.Context) error {
	config, err := h.agentConfig()
	if err != nil {
		return err
	}
	config.Dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext // one connection for each agent
	c, err := kube.New(config, kube.Options{Node: h.name, DaemonSet: namespace + "/" + account, Log: h.log})
	if err != nil {
		return err
	}
	ctx, h.cancel = context.WithCancel(ctx)
	h.ended = make(chan struct{})
	h.mu.Lock()
	h.cluster = c
	h.mu.Unlock()
	go func() {
		defer close(h.ended)
		c.Run(ctx, h.set)
	}()
	return nil
}

func (h *hollow) end() {
	if h.cancel != nil {
		h.cancel()
		<-h.ended
	}
}

func (h *hollow) set(d agent.Desired) {
	h.change(func(s *agent.Status) {
		h.heard, h.of = time.Now(), 0
		pods := s.Pods
		*s = agent.Status{Ready: true, Reason: v1alpha1.ReasonNoPolicy, Pods: pods}
		for _, p := range d.Policies {
			o := v1alpha1.ObservedPolicy{Policy: p.Name, Generation: p.Generation, State: v1alpha1.StatePending, Reason: p.Withheld.Reason}
			if o.Reason == "" {
				o.State, o.Reason, o.Settings, o.Verified = v1alpha1.StateApplied, v1alpha1.ReasonApplied, 8+pods, 8+pods
				h.of++
			}
			s.Policies, s.Reason = append(s.Policies, o), o.Reason
			s.Settings, s.Verified = s.Settings+o.Settings, s.Verified+o.Verified
		}
	})
}

// change publishes a changed status.
func (h *hollow) change(by func(*agent.Status)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	by(&h.status)
	s := h.status
	s.Policies = append([]v1alpha1.ObservedPolicy(nil), s.Policies...)
	if h.cluster != nil {
		h.cluster.Publish(s)
	}
}

// podCame reacts like an agent to a new veth: it reports more settings.
func (h *hollow) podCame() {
	h.change(func(s *agent.Status) {
		s.Pods++
		for i := range s.Policies {
			if s.Policies[i].State == v1alpha1.StateApplied {
				s.Policies[i].Settings++
				s.Policies[i].Verified++
				s.Settings++
				s.Verified++
			}
		}
	})
}

func (h *hollow) stateAt() (heard time.Time, applied int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.heard, h.of
}

// end stops the agents.
func (f *fleet) end() {
	var all sync.WaitGroup
	for _, h := range f.agents {
		all.Go(h.end)
	}
	all.Wait()
}

func (f *fleet) stop() {
	f.end()
	if f.solo != nil {
		f.solo.stop()
	}
}

// inParallel calls do for each element, a few at a time.
func inParallel[T any](all []T, do func(T) error) error {
	work := make(chan T)
	errs := make(chan error, 16)
	for range cap(errs) {
		go func() {
			var first error
			for one := range work {
				if first == nil {
					first = do(one)
				}
			}
			errs <- first
		}()
	}
	for _, one := range all {
		work <- one
	}
	close(work)
	var first error
	for range cap(errs) {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}

// eventually retries until try succeeds.
func eventually(ctx context.Context, what string, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, err)
		}
	}
}
