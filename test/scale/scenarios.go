//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"slipstream.dev/api/v1alpha1"
)

// Limits on times in seconds; docs/results/scale.md explains all limits.
var (
	appliedIn = 10.0 // p99
	backIn    = 60.0
)

// The other limits.
const (
	idleRate       = 0.02 // requests per second and agent
	writeRate      = 35.0 // writes per second of 1,000 agents while pods are created
	statusWrites   = 1.05 // status writes per agent, for a policy
	conflicts      = 10
	nodeEvents     = 10   // events per agent
	peakRate       = 200  // requests per second of all agents
	idleShare      = 0.03 // share of the API server's CPU time
	podShare       = 0.10 // share of the API server's CPU time while pods are created
	soloMillicores = 5.0  // of the real agent
	soloMiB        = 30.0 // mean memory of the real agent in a phase
	soloGrowth     = 1.0  // how much more MiB with the second half of the pods than with the first
)

// Names of the scenarios to compare.
const (
	idleWith      = "idle, 3 watches"
	podsWith      = "pods are created"
	withoutAgents = ", no agents"
)

// pace is the interval between nodes when something happens to all of them.
const pace = 100 * time.Millisecond

// scenarios returns the scenarios of a run, in order.
func scenarios(blocks int) []scenario {
	all := []scenario{
		{"start", start, nil},
		{"idle, 2 watches", idle, idleLimits(2)},
		{"policy for all", policyForAll, policyLimits},
		{"policy with pods", policyWithPods(1), nil},
	}
	with := []scenario{{idleWith, idle, idleLimits(3)}, {podsWith, createPods, podLimits}}
	without := []scenario{{idleWith + withoutAgents, idle, nil}, {podsWith + withoutAgents, createPods, nil}}
	// Every second block begins without agents, so that they start only once in two blocks.
	for b := range blocks {
		if b > 0 && b%2 == 0 {
			all = append(all, scenario{"the last counts are written", writeCounts, nil})
		}
		if b%2 == 0 {
			all = append(append(append(all, with...), scenario{"agents end", endAgents, nil}), without...)
		} else {
			all = append(append(append(all, without...), scenario{"agents start again", startAgents, nil}), with...)
		}
	}
	if blocks%2 == 1 {
		all = append(all, scenario{"agents start again", startAgents, nil})
	}
	return append(all,
		scenario{"agents are upgraded", upgrade, eventLimits},
		scenario{"nodes are relabelled", relabel, eventLimits},
		scenario{"API server killed", outage, outageLimits},
		scenario{"token revoked", revoke, policyLimits},
	)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// soloLimits checks the real agent while the cluster is idle and while pods are created. It ignores the burst of a policy for all
// nodes.
func soloLimits(p phase) []string {
	if p.Name != idleWith && p.Name != podsWith {
		return nil
	}
	return soloUse(p)
}

// soloUse checks the memory and the CPU time of the real agent.
func soloUse(p phase) (all []string) {
	if p.SoloMiB > soloMiB {
		all = append(all, fmt.Sprintf("the agent of %s has %.1f MiB, want at most %.0f", soloNode, p.SoloMiB, soloMiB))
	}
	if p.Seconds >= 60 && p.SoloMillicores > soloMillicores {
		all = append(all, fmt.Sprintf("the agent of %s takes %.1f millicores, want at most %.0f", soloNode, p.SoloMillicores, soloMillicores))
	}
	return all
}

// start starts all agents for the first time.
func start(ctx context.Context, f *fleet) ([]time.Duration, error) {
	if err := f.startSolo(); err != nil {
		return nil, err
	}
	return startAgents(ctx, f)
}

// startAgents starts the agents, one after another, and waits until they have marked the policies.
func startAgents(ctx context.Context, f *fleet) ([]time.Duration, error) {
	began := time.Now()
	for _, h := range f.agents {
		if err := h.start(ctx); err != nil {
			return nil, err
		}
		if err := pause(ctx, pace); err != nil {
			return nil, err
		}
	}
	if err := f.each(ctx, "agents to start", func(h *hollow) bool {
		heard, _ := h.stateAt()
		return heard.After(began)
	}); err != nil {
		return nil, err
	}
	return nil, pause(ctx, 30*time.Second)
}

// writeCounts waits until agents have written the changes from the creation of pods: an agent writes the changes of a minute
// within two more.
func writeCounts(ctx context.Context, _ *fleet) ([]time.Duration, error) {
	return nil, pause(ctx, 2*time.Minute)
}

// endAgents stops all agents except the real one, which is a process of its own.
func endAgents(ctx context.Context, f *fleet) ([]time.Duration, error) {
	f.end()
	return nil, pause(ctx, 10*time.Second) // the API server notices that their connections are gone
}

// each waits until holds returns true for all agents.
func (f *fleet) each(ctx context.Context, what string, holds func(*hollow) bool) error {
	return eventually(ctx, what, func() error {
		missing := 0
		for _, h := range f.agents {
			if !holds(h) {
				missing++
			}
		}
		if missing > 0 {
			return fmt.Errorf("%d of %d do not", missing, len(f.agents))
		}
		return nil
	})
}

func idle(ctx context.Context, f *fleet) ([]time.Duration, error) { return nil, pause(ctx, f.idle) }

func idleLimits(watches int) func(*fleet, phase) []string {
	return func(f *fleet, p phase) (all []string) {
		n := f.nodes + 1
		if p.Watches > watches*n {
			all = append(all, fmt.Sprintf("%d watches, want at most %d", p.Watches, watches*n))
		}
		if rate := p.MeanPerSecond / float64(n); rate > idleRate {
			all = append(all, fmt.Sprintf("%.3f requests/s of each agent, want at most %.2f", rate, idleRate))
		}
		return all
	}
}

// applied waits until each agent has applied a number of policies since a time, and one policy's status shows that.
func (f *fleet) applied(ctx context.Context, since time.Time, policies int, name string) (took []time.Duration, err error) {
	if err := f.each(ctx, "the policy to be applied", func(h *hollow) bool {
		heard, of := h.stateAt()
		return of == policies && heard.After(since)
	}); err != nil {
		return nil, err
	}
	for _, h := range f.agents {
		heard, _ := h.stateAt()
		took = append(took, heard.Sub(since))
	}
	return took, eventually(ctx, "the statuses", func() error {
		var all v1alpha1.NodeAccelerationList
		text, err := f.admin.Discovery().RESTClient().Get().AbsPath("/apis/slipstream.dev/v1alpha1/nodeaccelerations").Param("resourceVersion", "0").Do(ctx).Raw()
		if err == nil {
			err = json.Unmarshal(text, &all)
		}
		if err != nil {
			return err
		}
		n := 0
		for _, one := range all.Items {
			for _, o := range one.Status.Observed {
				if o.Policy == name && o.State == v1alpha1.StateApplied {
					n++
				}
			}
		}
		if n <= f.nodes {
			_ = pause(ctx, 2*time.Second) // listing a thousand objects loads the API server
			return fmt.Errorf("%d of %d say so", n, f.nodes+1)
		}
		return nil
	})
}

func policyForAll(ctx context.Context, f *fleet) ([]time.Duration, error) {
	began := time.Now()
	if err := f.policy(ctx, "all", "all: true"); err != nil {
		return nil, err
	}
	took, err := f.applied(ctx, began, 1, "all")
	if err != nil {
		return nil, err
	}
	return took, pause(ctx, 15*time.Second) // its rollout completes
}

func policyLimits(f *fleet, p phase) (all []string) {
	if most := int(statusWrites*float64(f.nodes+1) + 1); p.StatusWrites-p.Refused[http.StatusUnauthorized] > most {
		all = append(all, fmt.Sprintf("%d writes of statuses, want at most %d", p.StatusWrites, most))
	}
	all = append(all, conflictLimit(p)...)
	if p.Done[1] > appliedIn {
		all = append(all, fmt.Sprintf("p99 of nodes had it after %.1f s, want %.0f", p.Done[1], appliedIn))
	}
	return all
}

// policyWithPods creates a policy for pods, in addition to others.
func policyWithPods(others int) func(context.Context, *fleet) ([]time.Duration, error) {
	return func(ctx context.Context, f *fleet) ([]time.Duration, error) {
		began := time.Now()
		if err := f.policy(ctx, "pods", "all: true, pods: {matchLabels: {app: web}}"); err != nil {
			return nil, err
		}
		took, err := f.applied(ctx, began, others+1, "pods")
		if err != nil {
			return nil, err
		}
		return took, pause(ctx, 15*time.Second)
	}
}

// createPods creates the pods of half a block.
func createPods(ctx context.Context, f *fleet) ([]time.Duration, error) {
	return nil, f.addPods(ctx, f.pods/(2*f.blocks))
}

// addPods creates pods on all nodes in turn, as fast as the API server accepts them, but over at least f.step: an agent first
// writes its counts after 30 s.
func (f *fleet) addPods(ctx context.Context, count int) error {
	began := time.Now()
	indices := make([]int, count)
	for i := range indices {
		indices[i] = f.created + i
	}
	f.created += len(indices)
	if err := inParallel(indices, func(i int) error {
		if err := pause(ctx, time.Until(began.Add(f.step*time.Duration(i-indices[0])/time.Duration(len(indices))))); err != nil {
			return err
		}
		name, came := soloNode, func() {}
		if at := i % f.size(); at < len(f.agents) {
			name, came = f.agents[at].name, f.agents[at].podCame
		}
		pods := f.admin.CoreV1().Pods(metav1.NamespaceDefault)
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web-%d", i), Labels: map[string]string{"app": "web"}},
			Spec:       corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "web", Image: "web"}}},
		}
		pod, err := pods.Create(ctx, pod, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create a pod: %w", err)
		}
		ip := podIP(i)
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		if _, err := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("have a pod run: %w", err)
		}
		came()
		return nil
	}); err != nil {
		return err
	}
	return pause(ctx, time.Until(began.Add(f.step)))
}

// podIP returns the address of the i-th pod.
func podIP(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255) }

func podLimits(f *fleet, p phase) []string {
	if rate, most := float64(p.StatusWrites)/p.Seconds, writeRate*float64(f.nodes+1)/1000; p.Seconds >= 60 && rate > most {
		return []string{fmt.Sprintf("%.1f writes/s, want at most %.1f", rate, most)}
	}
	return nil
}

// upgrade restarts the agents, one after another, while their DaemonSet counts them.
func upgrade(ctx context.Context, f *fleet) ([]time.Duration, error) {
	began := time.Now()
	for i, h := range f.agents {
		h.end()
		if err := h.start(ctx); err != nil {
			return nil, err
		}
		for _, ready := range []int{i, i + 1} {
			patch := fmt.Appendf(nil, `{"status":{"numberReady":%d,"currentNumberScheduled":%d,"desiredNumberScheduled":%d,"numberMisscheduled":0}}`, ready, f.nodes, f.nodes)
			if _, err := f.admin.AppsV1().DaemonSets(namespace).Patch(ctx, account, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
				return nil, fmt.Errorf("count agents: %w", err)
			}
		}
		if err := pause(ctx, pace); err != nil {
			return nil, err
		}
	}
	if err := f.each(ctx, "agents to start again", func(h *hollow) bool {
		heard, of := h.stateAt()
		return heard.After(began) && of == 2
	}); err != nil {
		return nil, err
	}
	return nil, pause(ctx, 10*time.Second)
}

func eventLimits(f *fleet, p phase) []string {
	// In every phase the API server sends each agent the node status that the kubelet renews.
	usual := int(float64(f.nodes+1) * p.Seconds / statusTime.Seconds())
	if most := nodeEvents * (f.nodes + 1); p.Events-usual > most {
		return []string{fmt.Sprintf("%d events, of which %d are heartbeats; want at most %d others", p.Events, usual, most)}
	}
	return nil
}

// relabel changes the label by which a policy selects all nodes, so that it selects none.
func relabel(ctx context.Context, f *fleet) ([]time.Duration, error) {
	began := time.Now()
	if err := f.policy(ctx, "zone", "nodeSelector: {zone: a}"); err != nil {
		return nil, err
	}
	if _, err := f.applied(ctx, began, 3, "zone"); err != nil {
		return nil, err
	}
	began = time.Now()
	for _, h := range f.agents {
		if _, err := f.admin.CoreV1().Nodes().Patch(ctx, h.name, types.MergePatchType, []byte(`{"metadata":{"labels":{"zone":"b"}}}`), metav1.PatchOptions{}); err != nil {
			return nil, fmt.Errorf("label a node: %w", err)
		}
		if err := pause(ctx, pace); err != nil {
			return nil, err
		}
	}
	return nil, f.each(ctx, "the policy to be taken off", func(h *hollow) bool {
		heard, of := h.stateAt()
		return of == 2 && heard.After(began)
	})
}

// outage kills the API server, and restarts it after 10 s. An agent is back when it has learned of a policy that is created then.
func outage(ctx context.Context, f *fleet) ([]time.Duration, error) {
	if err := f.plane.KillServer(); err != nil {
		return nil, err
	}
	if err := pause(ctx, 10*time.Second); err != nil {
		return nil, err
	}
	if err := f.plane.StartServer(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := f.policy(ctx, "back", "all: true"); err != nil {
		return nil, err
	}
	if err := f.each(ctx, "agents to come back", func(h *hollow) bool {
		heard, _ := h.stateAt()
		return heard.After(began)
	}); err != nil {
		return nil, err
	}
	back := time.Since(began)
	_, err := f.applied(ctx, began, 3, "back")
	return []time.Duration{back}, err
}

func outageLimits(f *fleet, p phase) (all []string) {
	if p.Done[2] > backIn {
		all = append(all, fmt.Sprintf("all agents were back after %.0f s, want %.0f", p.Done[2], backIn))
	}
	// An agent returns within 55 s, and sends seven requests over some seconds, at most two of them in the same second. How many
	// agents return in the same second is chance. With few agents, chance exceeds four standard deviations once in some hundred runs,
	// so the limit allows two more agents.
	mean := 7.0 / 55 * float64(f.nodes+1)
	if most := min(peakRate, int(mean+4*math.Sqrt(2*mean))+2*7); p.WorstSecond > most {
		all = append(all, fmt.Sprintf("%d requests in the worst second, want at most %d", p.WorstSecond, most))
	}
	return append(all, conflictLimit(p)...)
}

func conflictLimit(p phase) []string {
	if n := p.Refused[http.StatusConflict]; n > conflicts {
		return []string{fmt.Sprintf("%d conflicts, want at most %d", n, conflicts)}
	}
	return nil
}

// revoke revokes the agents' token, which has the same effect as its expiry, and writes another one.
func revoke(ctx context.Context, f *fleet) ([]time.Duration, error) {
	if err := f.admin.CoreV1().ServiceAccounts(namespace).Delete(ctx, account, metav1.DeleteOptions{}); err != nil {
		return nil, fmt.Errorf("revoke the token: %w", err)
	}
	if err := f.create(ctx, []byte(`{apiVersion: v1, kind: ServiceAccount, metadata: {name: slipstream, namespace: slipstream-system}}`)); err != nil {
		return nil, err
	}
	if err := pause(ctx, 12*time.Second); err != nil { // the API server caches the token's validity for 10 s
		return nil, err
	}
	if err := f.renewToken(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := f.policy(ctx, "token", "all: true"); err != nil {
		return nil, err
	}
	return f.applied(ctx, began, 4, "token")
}
