package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/testenv"

	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"

	"slipstream.dev/api/v1alpha1"
)

// These tests count the requests of the agents of a thousand nodes to an API server. They run in bubbles of testing/synctest, so
// an hour passes in seconds.

// TestMain keeps client-go from spacing its error messages by the time of the last one in the process: a bubble
// begins in the year 2000, so after another test it would sleep for decades, and the watch with it.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	os.Exit(m.Run())
}

// latency is the delay of a request, an answer or an event.
const latency = 25 * time.Millisecond

// wire is a transport to an api without sockets.
type wire struct {
	api http.Handler
	// down reports whether the API server cannot be reached.
	down func() bool
	// late returns the extra delay of events.
	late func() time.Duration
}

// delay waits for the latency, or until the request is cancelled: nobody waits for the requests of a client that has stopped, and a
// bubble fails if one is left.
func delay(ctx context.Context) error {
	select {
	case <-time.After(latency):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := delay(r.Context()); err != nil {
		return nil, err
	}
	if w.down != nil && w.down() {
		return nil, errors.New("connection refused")
	}
	if r.URL.Query().Get("watch") == "" {
		answer := httptest.NewRecorder()
		w.api.ServeHTTP(answer, r)
		if err := delay(r.Context()); err != nil {
			return nil, err
		}
		return answer.Result(), nil
	}
	ctx, cancel := context.WithCancel(r.Context())
	reader, writer := io.Pipe()
	e := events{writer, ctx, make(chan int, 1), w.late}
	go func() {
		w.api.ServeHTTP(e, r.WithContext(ctx))
		writer.Close()
	}()
	return &http.Response{StatusCode: <-e.code, Header: http.Header{"Content-Type": {"application/json"}}, Body: body{reader, cancel}, Request: r}, nil
}

// events is the response of a watch, whose events arrive with a delay.
type events struct {
	*io.PipeWriter
	ctx  context.Context
	code chan int
	late func() time.Duration
}

func (events) Header() http.Header { return http.Header{} }
func (events) Flush()              {}
func (e events) WriteHeader(code int) {
	e.code <- code
}
func (e events) Write(b []byte) (int, error) {
	if !pause(e.ctx, latency+e.late()) {
		return 0, e.ctx.Err()
	}
	return e.PipeWriter.Write(b)
}

type body struct {
	io.Reader
	cancel func()
}

func (b body) Close() error {
	b.cancel()
	return nil
}

// config returns how a client reaches the API server.
func (s *api) config() *rest.Config {
	down := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.dead
	}
	late := func() time.Duration {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.late
	}
	return &rest.Config{Host: "http://api", Transport: &wire{s, down, late}}
}

// fleet has the agents of a cluster. Each applies policies at once.
type fleet struct {
	*api
	agents []*hollow
	// tokenFile has the agents' token.
	tokenFile string
	stop      func()
}

type hollow struct {
	*Cluster
	mu     sync.Mutex
	status agent.Status
	// applied is when the node first had all its policies.
	applied time.Time
}

func (h *hollow) set(d agent.Desired) {
	h.change(func(s *agent.Status) {
		*s = agent.Status{Ready: true, Reason: v1alpha1.ReasonNoPolicy}
		all := len(d.Policies) > 0
		for _, p := range d.Policies {
			o := v1alpha1.ObservedPolicy{Policy: p.Name, Generation: p.Generation, State: v1alpha1.StateApplied, Reason: v1alpha1.ReasonApplied, Settings: 8, Verified: 8}
			if p.Withheld != (agent.Withheld{}) {
				o.State, o.Reason, all = v1alpha1.StatePending, p.Withheld.Reason, false
			}
			s.Policies, s.Reason = append(s.Policies, o), o.Reason
			s.Settings, s.Verified = s.Settings+8, s.Verified+8
		}
		if all && h.applied.IsZero() {
			h.applied = time.Now()
		}
	})
}

// change publishes another status, as an agent does when a pod comes.
func (h *hollow) change(by func(*agent.Status)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	by(&h.status)
	h.Publish(h.status)
}

// appliedAt returns when the node first had all its policies, or zero.
func (h *hollow) appliedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.applied
}

// newFleet starts the agents of n nodes as a DaemonSet does, some at once, and waits until they are
// idle.
func newFleet(t *testing.T, n int) *fleet {
	t.Helper()
	if n >= 100 {
		testenv.NeedTime(t)
	}
	s := newAPI()
	f := &fleet{api: s, tokenFile: filepath.Join(t.TempDir(), "token")}
	f.renewToken(t, "first")
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	f.stop = func() {
		cancel()
		running.Wait()
	}
	s.put(daemonPath, daemonSet())
	for i := range n {
		name := fmt.Sprintf("node%d", i)
		s.put("/api/v1/nodes/"+name, nodeNamed(name, true))
		f.agents = append(f.agents, f.start(t, &running, ctx, name))
		time.Sleep(20 * time.Millisecond)
	}
	time.Sleep(time.Minute)
	return f
}

func (f *fleet) start(t *testing.T, running *sync.WaitGroup, ctx context.Context, node string) *hollow { //nolint:revive // the context is the fleet's
	t.Helper()
	config := f.config()
	config.BearerTokenFile = f.tokenFile
	c, err := New(config, Options{Node: node, DaemonSet: "system/agent", Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	c.losses = func() losses { return losses{} }
	h := &hollow{Cluster: c}
	running.Go(func() { c.Run(ctx, h.set) })
	return h
}

// renewToken revokes the agents' token and gives them another.
func (f *fleet) renewToken(t *testing.T, token string) {
	t.Helper()
	must(t, os.WriteFile(f.tokenFile, []byte(token), 0o600))
	f.accept(token)
}

// accept makes a token the only one that the API server accepts.
func (f *fleet) accept(token string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.token = token
}

// during returns the requests during do, and the number of events that were sent to watches.
func (f *fleet) during(do func()) (asked map[string]int, sent int) {
	f.mu.Lock()
	clear(f.asked)
	f.sent = 0
	f.mu.Unlock()
	do()
	f.mu.Lock()
	defer f.mu.Unlock()
	asked = make(map[string]int)
	for what, n := range f.asked {
		asked[what] = n
	}
	return asked, f.sent
}

// atMost fails for requests of which there are more than allowed, and for unexpected ones.
func atMost(t *testing.T, asked, most map[string]int) {
	t.Helper()
	t.Log(asked)
	for what, n := range asked {
		if n > most[what] {
			t.Errorf("%d times %s, want at most %d", n, what, most[what])
		}
	}
}

// everywhere returns a policy for all nodes at once.
func everywhere(name string, spec object) object {
	spec["rollout"] = object{"stepPercent": 100, "pauseSeconds": 60}
	spec["accelerate"] = accelerate("0", "nic", "pod")
	o := policyObject(name, 1, 1, spec)
	o["metadata"].(object)["uid"] = name + rolledUID
	return o
}

// TestIdleAgents checks that an idle agent watches two resources, and renews each watch every 30 to 60 minutes.
func TestIdleAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 10)
		defer f.stop()
		asked, _ := f.during(func() { time.Sleep(time.Hour) })
		atMost(t, asked, map[string]int{"watch nodes": 20, "watch accelerationpolicies": 20})
		f.mu.Lock()
		defer f.mu.Unlock()
		if n := len(f.watchers); n != 20 {
			t.Errorf("10 agents have %d watches, want two each", n)
		}
	})
}

// TestPodsAreWatchedOnDemand checks that pods are watched only while a policy selects some of them.
func TestPodsAreWatchedOnDemand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 5)
		defer f.stop()
		pods := func() (n int) {
			f.mu.Lock()
			defer f.mu.Unlock()
			for _, wants := range f.watchers {
				if wants("/api/v1/namespaces/default/pods/any") {
					n++
				}
			}
			return n
		}
		want := func(n int) {
			t.Helper()
			if got := pods(); got != n {
				t.Errorf("%d watches of pods, want %d", got, n)
			}
		}
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(time.Minute)
		want(0)
		f.put(policyPath+"some", everywhere("some", object{"pods": object{"matchLabels": object{"app": "web"}}}))
		time.Sleep(time.Minute)
		want(5)
		if got := len(f.agents[0].status.Policies); got != 2 {
			t.Errorf("a node without pods has %d policies, want 2", got)
		}
		f.remove(policyPath + "some")
		time.Sleep(time.Minute)
		want(0)
	})
}

// TestCountsAreWrittenTogether checks when a status is written: 30 s, one, two and four minutes after changes if pods come all
// the time; after 30 s for one pod; and at once for a failure.
func TestCountsAreWrittenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 10)
		defer f.stop()
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(5 * time.Minute)
		asked, _ := f.during(func() {
			for range 10 * 60 {
				for _, h := range f.agents {
					h.change(func(s *agent.Status) { s.Settings, s.Verified = s.Settings+1, s.Verified+1 })
				}
				time.Sleep(time.Second)
			}
		})
		atMost(t, asked, map[string]int{"patch nodeaccelerations/status": 10 * 4, "watch nodes": 10, "watch accelerationpolicies": 10})
		if writes := asked["patch nodeaccelerations/status"]; writes < 10*4 {
			t.Errorf("%d writes of 10 agents in 10 minutes, want four each", writes)
		}
		time.Sleep(12 * time.Minute)
		h := f.agents[7]
		asked, _ = f.during(func() {
			h.change(func(s *agent.Status) { s.Settings++ })
			time.Sleep(usualPace.counts * 5 / 4)
		})
		if writes := asked["patch nodeaccelerations/status"]; writes != 1 {
			t.Errorf("%d writes of one pod that came after a pause, want 1", writes)
		}
		state := func() string {
			status, _ := f.get("/apis/slipstream.dev/v1alpha1/nodeaccelerations/node7")["status"].(object)
			conditions, _ := status["conditions"].([]any)
			return fmt.Sprint(conditions[0].(object)["status"], " ", conditions[0].(object)["reason"])
		}
		h.change(func(s *agent.Status) { s.Ready, s.Reason = false, v1alpha1.ReasonHeld })
		time.Sleep(usualPace.between + time.Second)
		if got := state(); got != "False Held" {
			t.Errorf("soon after the trouble, the condition is %s", got)
		}
		h.change(func(s *agent.Status) { s.Ready, s.Reason = true, v1alpha1.ReasonApplied })
		time.Sleep(usualPace.spread + usualPace.between + time.Second)
		if got := state(); got != "True Applied" {
			t.Errorf("soon after its end, the condition is %s", got)
		}
	})
}

// applyToAll creates a policy for all nodes at once. It fails if that takes more than one write of each agent and some for the
// policy itself, if more requests than given are refused for their token, or if a node gets the policy after more than 10 s.
func (f *fleet) applyToAll(t *testing.T, unauthorized int) {
	t.Helper()
	began := time.Now()
	asked, _ := f.during(func() {
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(3 * time.Minute)
	})
	delete(asked, "watch nodes")
	delete(asked, "watch accelerationpolicies")
	atMost(t, asked, map[string]int{
		"patch nodeaccelerations/status": len(f.agents) * 102 / 100, "patch accelerationpolicies/status": 3 + 10, "conflict": 10, "unauthorized": unauthorized,
		// The agent that completes the rollout has checked whether it reaches the API server, and listed the nodes.
		"get nodeaccelerations": 10, "list nodes": 10, "list pods": 10,
		// One agent counts the nodes once they have it, and one at the end.
		"list nodeaccelerations": 4,
	})
	for i, h := range f.agents {
		at := h.appliedAt()
		if took := at.Sub(began); at.IsZero() || took > 10*time.Second {
			t.Fatalf("node%d had it after %s", i, took)
		}
	}
}

// TestPolicyForAll checks that a policy for all nodes at once takes one write of each agent, and some for itself.
func TestPolicyForAll(t *testing.T) {
	const n = 100 // of a thousand, make scale
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, n)
		defer f.stop()
		f.applyToAll(t, 0)
	})
}

// TestPolicyInSteps checks that a rollout in steps takes four writes of each agent, two reads of other nodes' reports, and some
// writes and lists of one agent for each step.
func TestPolicyInSteps(t *testing.T) {
	const n, steps = 100, 10
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, n)
		defer f.stop()
		policy := everywhere("rolled", object{})
		policy["spec"].(object)["rollout"] = object{"stepPercent": 100 / steps, "pauseSeconds": 60}
		began := time.Now()
		asked, sent := f.during(func() {
			f.put(policyPath+"rolled", policy)
			time.Sleep(20 * time.Minute)
		})
		f.wantComplete(t)
		delete(asked, "watch nodes")
		delete(asked, "watch accelerationpolicies")
		atMost(t, asked, map[string]int{
			// Each agent writes Waiting, that its node is about to get the policy, that the node has it, and that it passed.
			"patch nodeaccelerations/status": 4 * n * 105 / 100, "patch accelerationpolicies/status": 20, "conflict": 10,
			// Each agent asks two nodes, and whether it reaches the API server; the agent that makes a step asks up to eight.
			"get nodeaccelerations": 3*n + 8*2*(steps+1), "list nodes": 3 * (steps + 1), "list pods": 3,
			// The nodes are counted when the policy has reached their agents, and at the end.
			"list nodeaccelerations": 4,
		})
		if most := 2 * (steps + 4) * n; sent > most {
			t.Errorf("%d events, want at most %d", sent, most)
		}
		last := began
		for i, h := range f.agents {
			at := h.appliedAt()
			if at.IsZero() {
				t.Errorf("node%d does not have it", i)
			}
			if at.After(last) {
				last = at
			}
		}
		t.Logf("the last node had it after %s; %d events", last.Sub(began).Round(time.Second), sent)
	})
}

// TestLateEvents checks that while events come late, and an agent does not know that it or others have written, it writes at most
// once from the same version of a policy: a second write would be refused.
func TestLateEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 20
		f := newFleet(t, n)
		defer f.stop()
		f.mu.Lock()
		f.late = 20 * time.Second
		f.mu.Unlock()
		asked, _ := f.during(func() {
			f.put(policyPath+"rolled", everywhere("rolled", object{}))
			time.Sleep(5 * time.Minute)
		})
		// Agents write from five versions: that of the new policy, one with the condition Selected, one with the rollout
		// begun, one with it complete, and one with a count.
		if writes := asked["patch accelerationpolicies/status"]; writes > 5*n {
			t.Errorf("%d writes of %d agents, want at most five of each", writes, n)
		}
		if lists := asked["list nodes"]; lists > n {
			t.Errorf("%d lists of nodes, want at most one of each agent", lists)
		}
		f.wantComplete(t)
	})
}

// TestRefusedForAnotherReason checks that a rollout continues after a write was refused for another reason than an old version: a
// webhook may refuse it, or etcd was restored and versions repeat.
func TestRefusedForAnotherReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 2)
		defer f.stop()
		f.setRefuse(func(verb, path string) int {
			if verb == "patch" && strings.HasPrefix(path, policyPath) {
				return http.StatusConflict
			}
			return 0
		})
		f.put(policyPath+"rolled", everywhere("rolled", object{}))
		time.Sleep(3 * time.Minute)
		f.setRefuse(nil)
		time.Sleep(5 * time.Minute)
		f.wantComplete(t)
	})
}

// TestTriesWithOldCRD checks agents with a CRD that does not know rollouts, so that none sees a rollout begin. Each tries again
// from time to time, if no other has written meanwhile, and the rollout continues once the CRD is replaced.
func TestTriesWithOldCRD(t *testing.T) {
	const n = 20
	for step, most := range map[int]int{
		50:  20,    // the condition names the node, so all agents see that one has tried
		100: 6 * n, // the condition names no node, so further tries change nothing and no agent sees them
	} {
		t.Run(fmt.Sprintf("%d percent", step), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t, n)
				defer f.stop()
				f.setPrune(withoutRollout)
				policy := everywhere("rolled", object{})
				policy["spec"].(object)["rollout"].(object)["stepPercent"] = step
				asked, _ := f.during(func() {
					f.put(policyPath+"rolled", policy)
					time.Sleep(30 * time.Minute)
				})
				if writes := asked["patch accelerationpolicies/status"]; writes > most {
					t.Errorf("%d writes of %d agents in half an hour, want at most %d", writes, n, most)
				}
				f.setPrune(nil)
				time.Sleep(15 * time.Minute)
				f.wantComplete(t)
			})
		})
	}
}

// wantComplete fails if the rollout of the policy is not complete, or nodes have failed.
func (f *fleet) wantComplete(t *testing.T) {
	t.Helper()
	r, condition := f.rollout()
	if complete, _ := r["complete"].(bool); !complete || r["failedNodes"] != nil {
		t.Errorf("the rollout is %v (%s), want a complete one without failed nodes", r, condition)
	}
}

// TestRestartsOfAgents checks that agents that are upgraded write nothing, and that no agent watches the upgrade.
func TestRestartsOfAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 10)
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(5 * time.Minute)
		f.stop()
		time.Sleep(time.Minute)
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		asked, sent := f.during(func() {
			for i := range 10 {
				// The DaemonSet's status changes with each of them.
				f.put(daemonPath, daemonSet())
				f.start(t, &running, ctx, fmt.Sprintf("node%d", i))
				time.Sleep(time.Second)
			}
			time.Sleep(time.Minute)
		})
		atMost(t, asked, map[string]int{"list nodes": 10, "watch nodes": 10, "list accelerationpolicies": 10, "watch accelerationpolicies": 10, "get nodeaccelerations": 10})
		if sent > 0 {
			t.Errorf("%d events", sent)
		}
	})
}

// TestSelectedWhileNodesAreRelabelled checks that when nodes are relabelled one after another, the condition Selected is put to
// the test only from time to time, not for each node.
func TestSelectedWhileNodesAreRelabelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 30
		f := newFleet(t, n)
		defer f.stop()
		f.put(policyPath+"zone", everywhere("zone", object{"nodeSelector": object{"zone": "a"}}))
		time.Sleep(10 * time.Minute)
		relabelled := func(i int) object {
			o := nodeNamed(fmt.Sprintf("node%d", i), true)
			o["metadata"].(object)["labels"] = object{"zone": "b"}
			return o
		}
		asked, sent := f.during(func() {
			for i := range n {
				f.put(fmt.Sprintf("/api/v1/nodes/node%d", i), relabelled(i))
				time.Sleep(20 * time.Second)
			}
		})
		// Two tests with two writes each in ten minutes, and two counts, besides one write of each node.
		atMost(t, asked, map[string]int{"patch nodeaccelerations/status": n * 105 / 100, "patch accelerationpolicies/status": 10, "list nodeaccelerations": 4, "conflict": 5, "watch nodes": 3 * n, "watch accelerationpolicies": 3 * n})
		if sent > 10*n {
			t.Errorf("%d events for %d nodes, want at most 10 for each", sent, n)
		}
		time.Sleep(10 * time.Minute)
		status := f.get(policyPath + "zone")["status"].(object)
		for _, c := range status["conditions"].([]any) {
			if c := c.(object); c["type"] == v1alpha1.ConditionSelected && c["reason"] != v1alpha1.ReasonNoNode {
				t.Errorf("after the last node has left, the condition is %v", c)
			}
		}
	})
}

// TestWriteDelay checks that any number of agents, even thousands, make few writes where one is needed.
func TestWriteDelay(t *testing.T) {
	nodes := []int{1, 10, 1000, 10_000}
	if testing.Short() {
		nodes = nodes[:3]
	}
	for _, n := range nodes {
		sum, worst := 0, 0
		const policies = 100
		for p := range policies {
			uid := types.UID(fmt.Sprint("policy", p))
			delays := make([]time.Duration, n)
			first := usualPace.spread
			for i := range delays {
				c := &Cluster{options: Options{Node: fmt.Sprintf("node%d", i)}, pace: usualPace}
				delays[i] = c.writeDelay(uid)
				first = min(first, delays[i])
				if delays[i] < 0 || delays[i] > usualPace.spread {
					t.Fatalf("a delay is %s", delays[i])
				}
			}
			same := -1
			for _, s := range delays {
				if s < first+100*time.Millisecond {
					same++
				}
			}
			sum, worst = sum+same, max(worst, same)
		}
		t.Logf("%d nodes: %.2f others act within 100 ms of the first, %d at most", n, float64(sum)/policies, worst)
		if mean := float64(sum) / policies; mean > 1 || worst > 10 {
			t.Errorf("%d nodes: %.2f others act within 100 ms of the first, %d at most", n, mean, worst)
		}
	}
}

// TestOutage checks that agents come back evenly within one period after the API server was away, however long that was.
func TestOutage(t *testing.T) {
	testenv.NeedTime(t)
	for _, away := range []time.Duration{3 * time.Second, time.Minute, 2 * time.Hour} {
		t.Run(away.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 1000
				began := time.Now()
				down := func() bool { return time.Since(began) < away }
				var mu sync.Mutex
				perSecond := make(map[int]int)
				var all sync.WaitGroup
				for range n {
					g := newGate(&wire{down: down, api: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
						mu.Lock()
						defer mu.Unlock()
						perSecond[int(time.Since(began).Seconds())]++
					})}, slog.New(slog.DiscardHandler))
					for range 2 {
						all.Go(func() {
							time.Sleep(rand.N(50 * time.Millisecond))
							r, _ := http.NewRequestWithContext(t.Context(), "GET", "http://api/", nil)
							if _, err := g.RoundTrip(r); err != nil {
								t.Error(err)
							}
						})
					}
				}
				all.Wait()
				if took := time.Since(began) - away; took > usualPace.outage+2*time.Second {
					t.Errorf("the last came back after %s", took)
				}
				for second, requests := range perSecond {
					if mean := 2 * n / usualPace.outage.Seconds(); float64(requests) > mean+6*math.Sqrt(2*mean) {
						t.Errorf("in second %d there were %d requests, want some %.0f", second, requests, mean)
					}
				}
			})
		})
	}
}

// TestBackAfterOutage checks that an agent that comes back after an outage lists what it watches, and then watches it: it does
// not ask a restarted API server to resume an old watch.
func TestBackAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 20
		f := newFleet(t, n)
		defer f.stop()
		asked, _ := f.during(func() {
			f.kill()
			time.Sleep(20 * time.Second)
			f.api.start()
			time.Sleep(time.Minute)
		})
		atMost(t, asked, map[string]int{"list nodes": n, "watch nodes": n, "list accelerationpolicies": n, "watch accelerationpolicies": n})
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(10 * time.Second)
		for i, h := range f.agents {
			if h.appliedAt().IsZero() {
				t.Errorf("node%d does not have a policy that came after the outage", i)
			}
		}
	})
}

// TestStatusesAfterOutage checks that the writes that all agents have to make after an outage come as the agents come back, not
// all within some seconds.
func TestStatusesAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 200
		f := newFleet(t, n)
		defer f.stop()
		f.kill()
		for _, h := range f.agents {
			h.change(func(s *agent.Status) { s.Ready, s.Reason = false, v1alpha1.ReasonHeld })
		}
		time.Sleep(20 * time.Second)
		f.api.start()
		written, worst := 0, 0
		for range 60 {
			asked, _ := f.during(func() { time.Sleep(time.Second) })
			writes := asked["patch nodeaccelerations/status"]
			written, worst = written+writes, max(worst, writes)
		}
		if written != n {
			t.Errorf("within a minute %d of %d agents have written their status", written, n)
		}
		if worst > 15 {
			t.Errorf("%d writes in the worst second, want some 4", worst)
		}
	})
}

// TestRolloutAfterOutage checks that an agent that is back makes the step of a rollout that is due after an outage, and not every
// agent that does not know yet whether another one has made it.
func TestRolloutAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 20)
		defer f.stop()
		f.put(policyPath+"rolled", everywhere("rolled", object{}))
		time.Sleep(20 * time.Second)
		f.kill()
		time.Sleep(time.Minute) // the next step is due
		asked, _ := f.during(func() {
			f.api.start()
			time.Sleep(time.Minute)
		})
		if writes := asked["patch accelerationpolicies/status"]; writes < 1 || writes > 3 {
			t.Errorf("%d writes of a step, want one and at most two that come too late", writes)
		}
		f.wantComplete(t)
	})
}

// TestFirstNodeIsLastBack checks that if the first node of a rollout is the last one back after an outage, the others wait for it
// and do not halt the rollout.
func TestFirstNodeIsLastBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 10)
		defer f.stop()
		policy := everywhere("rolled", object{})
		policy["spec"].(object)["rollout"] = object{"stepPercent": 50, "pauseSeconds": 1}
		f.put(policyPath+"rolled", policy)
		first := ""
		for first == "" {
			time.Sleep(100 * time.Millisecond)
			r, _ := f.rollout()
			first, _ = r["first"].(string)
		}
		f.kill()
		for _, h := range f.agents {
			back := time.Now().Add(20*time.Second + rand.N(time.Second))
			if h.options.Node == first {
				back = back.Add(usualPace.outage)
			}
			h.gate.mu.Lock()
			h.gate.until = back
			h.gate.mu.Unlock()
		}
		time.Sleep(20 * time.Second)
		f.api.start()
		time.Sleep(10 * time.Minute)
		f.wantComplete(t)
	})
}

// TestHaltBehindGate checks that a node that fails halts the rollout although its agent has lost a connection and does not know
// what others do.
func TestHaltBehindGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 10)
		defer f.stop()
		f.put(policyPath+"rolled", everywhere("rolled", object{}))
		time.Sleep(20 * time.Second)
		failing := f.agents[3]
		failing.gate.shut(errors.New("refused"))
		failing.change(func(s *agent.Status) {
			s.Policies = slices.Clone(s.Policies)
			s.Policies[0].State, s.Policies[0].Reason, s.Policies[0].Message = v1alpha1.StateFailed, v1alpha1.ReasonError, "no such device"
		})
		time.Sleep(usualPace.lasting + usualPace.spread + 5*time.Second)
		r, _ := f.rollout()
		if got := fmt.Sprint(r["failedNodes"]); got != "[node3]" {
			t.Errorf("failed nodes are %s, want node3", got)
		}
	})
}

// TestGateIsPaced checks that the lists and watches of one agent do not come all at once, in particular after an outage.
func TestGateIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := false
		var sent []time.Time
		g := newGate(roundTripper(func(*http.Request) (*http.Response, error) {
			if refuse {
				refuse = false
				return nil, syscall.ECONNREFUSED
			}
			sent = append(sent, time.Now())
			return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
		}), slog.New(slog.DiscardHandler))
		want := func(apart time.Duration) {
			t.Helper()
			sent = nil
			for range 8 {
				r, _ := http.NewRequestWithContext(t.Context(), "GET", "http://api/", nil)
				if _, err := g.RoundTrip(r); err != nil {
					t.Error(err)
				}
			}
			if got := sent[7].Sub(sent[0]).Round(time.Millisecond); got != apart {
				t.Errorf("eight requests in %s, want %s", got, apart)
			}
		}
		want(3 * time.Second) // two at once, then two a second
		time.Sleep(time.Minute)
		refuse = true
		want(7 * time.Second)
	})
}

// TestGateTriesOnce checks that while the API server refuses connections, a gate tries once in each period, however many requests
// wait.
func TestGateTriesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tries atomic.Int32
		g := newGate(roundTripper(func(*http.Request) (*http.Response, error) {
			tries.Add(1)
			return nil, syscall.ECONNREFUSED
		}), slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		for range 3 {
			go func() {
				r, _ := http.NewRequestWithContext(ctx, "GET", "http://api/", nil)
				if _, err := g.RoundTrip(r); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}()
		}
		time.Sleep(usualPace.outage + 1500*time.Millisecond) // two may have been sent before the first was refused
		tries.Store(0)
		time.Sleep(10 * usualPace.outage)
		if n := tries.Load(); n != 10 {
			t.Errorf("%d tries in 10 periods", n)
		}
		cancel()
		synctest.Wait()
	})
}

// TestTokenIsReplaced checks that if the agents' token is replaced early, a policy for all nodes takes no more writes and no more
// time than with a token that stays valid.
func TestTokenIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		f := newFleet(t, n)
		defer f.stop()
		// An agent that has just written would use the same token again.
		for _, h := range f.agents {
			h.change(func(s *agent.Status) { s.Settings++ })
		}
		time.Sleep(usualPace.counts * 5 / 4)
		f.renewToken(t, "second")
		f.applyToAll(t, n*11/10)
	})
}

// TestGateGivesUp checks that a gate fails a waiting request when the gate is closed, or when the request's context ends.
func TestGateGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(&wire{down: func() bool { return true }}, slog.New(slog.DiscardHandler))
		g.period = time.Hour
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, _ := http.NewRequestWithContext(ctx, "GET", "http://api/", nil)
		if _, err := g.RoundTrip(r); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want that the time is over", err)
		}
		time.AfterFunc(time.Second, g.close)
		r, _ = http.NewRequestWithContext(t.Context(), "GET", "http://api/", nil)
		if _, err := g.RoundTrip(r); err == nil || !strings.Contains(err.Error(), "the agent is stopping") {
			t.Errorf("%v, want that the agent stops", err)
		}
	})
}

// TestEventsAreDamped checks that events that all nodes have are not written at one moment, and that an agent with too many
// events holds some back.
func TestEventsAreDamped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 40)
		defer f.stop()
		told := func(e agent.Event) {
			for _, h := range f.agents {
				h.Notify(e)
			}
		}
		asked, _ := f.during(func() {
			told(agent.Event{Warning: true, Reason: v1alpha1.ReasonImpossible, Message: "no"})
			time.Sleep(usualPace.events / 4)
		})
		if n := asked["create events"]; n < 1 || n > 25 {
			t.Errorf("of 40 events %d are written in the first quarter of the time, want some 10", n)
		}
		time.Sleep(usualPace.events)
		asked, _ = f.during(func() {
			for i := range 600 {
				told(agent.Event{Reason: "Repaired", Message: fmt.Sprint("drift ", i)})
				time.Sleep(time.Second)
			}
		})
		if n := asked["create events"]; n < 40*10 || n > 40*21 {
			t.Errorf("%d events of 40 nodes in ten minutes, want at most 10 and one a minute of each", n)
		}
	})
}

// TestThrottled checks that agents do not ask an API server that throttles them more often because of that, and that everything
// is written once it stops.
func TestThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 20
		f := newFleet(t, n)
		defer f.stop()
		f.setRefuse(func(string, string) int { return http.StatusTooManyRequests })
		asked, _ := f.during(func() {
			for _, h := range f.agents {
				h.change(func(s *agent.Status) { s.Ready, s.Reason = false, v1alpha1.ReasonHeld })
			}
			f.put(policyPath+"all", everywhere("all", object{}))
			time.Sleep(time.Minute)
		})
		// Each agent tries to write its node's own status again after the second that the server asks for, several times. It
		// tries writes that any agent may make a few times a minute.
		atMost(t, asked, map[string]int{"get nodeaccelerations": 30 * n, "patch nodeaccelerations/status": 30 * n, "patch accelerationpolicies/status": 8 * n, "watch nodes": n, "watch accelerationpolicies": n})
		f.setRefuse(nil)
		time.Sleep(time.Minute)
		for i := range n {
			status, _ := f.get(fmt.Sprintf("/apis/slipstream.dev/v1alpha1/nodeaccelerations/node%d", i))["status"].(object)
			if observed, _ := status["observed"].([]any); len(observed) != 1 || observed[0].(object)["state"] != "applied" {
				t.Errorf("a minute later the status of node%d is %v", i, status)
			}
		}
	})
}

// TestTokenExpires checks that an expired token is read again from its file.
func TestTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 1)
		defer f.stop()
		agent0 := f.agents[0]
		settings := func() string {
			status, _ := f.get(statePath)["status"].(object)
			return fmt.Sprint(status["settings"])
		}
		agent0.change(func(s *agent.Status) { *s = agent.Status{Reason: v1alpha1.ReasonHeld, Settings: 1} })
		time.Sleep(time.Minute)
		if got := settings(); got != "1" {
			t.Fatalf("settings are %s, want 1", got)
		}
		f.accept("second")
		asked, _ := f.during(func() {
			agent0.change(func(s *agent.Status) { *s = agent.Status{Ready: true, Reason: v1alpha1.ReasonApplied, Settings: 2} })
			time.Sleep(5 * time.Minute)
		})
		if got, refused := settings(), asked["unauthorized"]; got != "1" || refused == 0 || refused > 2*5*60/10*2 {
			t.Errorf("with an expired token settings are %s, and %d requests were refused, want some", got, refused)
		}
		f.renewToken(t, "second")
		time.Sleep(time.Minute)
		if got := settings(); got != "2" {
			t.Errorf("with the new token settings are %s, want 2", got)
		}
		// Watches with the old token end, and others begin.
		asked, _ = f.during(func() { time.Sleep(70 * time.Minute) })
		if asked["watch accelerationpolicies"] == 0 {
			t.Error("no watch has begun again")
		}
		f.put(policyPath+"late", everywhere("late", object{}))
		time.Sleep(time.Minute)
		if p := agent0.policies(); len(p) != 1 {
			t.Errorf("%d policies are known, want 1", len(p))
		}
	})
}
