package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/agent"

	"k8s.io/apimachinery/pkg/types"

	"slipstream.dev/api/v1alpha1"
)

const rolledUID = "11111111-2222-3333-4444-555555555555"

// hurry is the pace of tests.
var hurry = pace{
	look: 20 * time.Millisecond, baseline: 100 * time.Millisecond, spread: 200 * time.Millisecond, lasting: 400 * time.Millisecond, silence: 3 * time.Second,
	burst: time.Millisecond, between: 20 * time.Millisecond, counts: 100 * time.Millisecond, retry: 100 * time.Millisecond,
	patience: 5 * time.Second, doubt: time.Second, tally: time.Second, unknown: time.Second, events: 10 * time.Millisecond,
}

// member is the agent of one node in a rollout.
type member struct {
	*Cluster
	api  *api
	name string
	stop func()

	mu     sync.Mutex
	has    agent.Desired
	losing uint64 // packets lost per thousand
	from   time.Time
	times  map[string]time.Time // when the node first had a version, by policy@generation
	// announced is what the node's NodeAcceleration said then that the node was about to get.
	announced map[string]string
}

func nodeNamed(name string, ready bool) object {
	status := map[bool]string{true: "True", false: "False"}[ready]
	return object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name, "uid": name, "labels": object{"zone": "a"}, "creationTimestamp": "1999-01-01T00:00:00Z"},
		"status": object{"conditions": []any{object{"type": "Ready", "status": status, "lastTransitionTime": time.Now().Add(2 * time.Second).UTC().Format(time.RFC3339)}}}}
}

func rolled(generation int, cpus string, spec object) object {
	o := policyObject("rolled", 1, generation, spec)
	o["metadata"].(object)["uid"] = rolledUID
	spec["accelerate"] = accelerate(cpus, "nic")
	if spec["rollout"] == nil {
		spec["rollout"] = object{"stepPercent": 50, "pauseSeconds": 1}
	}
	return o
}

// update changes a policy's spec as an API server does: its status stays.
func (s *api) update(path string, o object) {
	if was := s.get(path); was["status"] != nil {
		o["status"] = was["status"]
	}
	s.put(path, o)
}

// join starts the agent of a node.
func (s *api) join(t *testing.T, name string) *member {
	t.Helper()
	c, err := New(s.config(), Options{Node: name, DaemonSet: s.daemonSet, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	m := &member{Cluster: c, api: s, name: name, from: time.Now(), times: make(map[string]time.Time), announced: make(map[string]string)}
	c.pace, c.boot = hurry, "first boot"
	if boot := s.boots[name]; boot != "" {
		c.boot = boot
	}
	c.losses = func() losses {
		m.mu.Lock()
		defer m.mu.Unlock()
		n := uint64(time.Since(m.from).Microseconds())
		lost := n / 10_000 // one in ten thousand is always lost
		if m.losing > 0 {
			lost += m.losing * n / 1000
		}
		return losses{links: map[int]counts{1: {n, lost}}}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Run(ctx, m.set)
	}()
	m.stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(m.stop)
	return m
}

// set does the work of an agent: it publishes the results for the desired state.
func (m *member) set(d agent.Desired) {
	status := agent.Status{Ready: true}
	m.mu.Lock()
	m.has = d
	for _, p := range d.Policies {
		o := v1alpha1.ObservedPolicy{Policy: p.Name, Generation: p.Generation, State: v1alpha1.StateApplied, Reason: v1alpha1.ReasonApplied}
		if p.Invalid != nil || p.LaterInvalid != "" {
			o.State, o.Reason = v1alpha1.StateFailed, v1alpha1.ReasonInvalid
		} else if (p.Withheld == agent.Withheld{}) {
			if at := fmt.Sprintf("%s@%d", p.Name, p.Generation); m.times[at].IsZero() {
				m.times[at] = time.Now()
				status, _ := m.api.get(reportPath(m.name))["status"].(object)
				for _, o := range asList(status["observed"]) {
					m.announced[at] = fmt.Sprintf("%v in the %v", o["tried"], o["boot"])
				}
			}
		} else {
			o.State, o.Reason = v1alpha1.StatePending, p.Withheld.Reason
		}
		status.Policies = append(status.Policies, o)
	}
	m.mu.Unlock()
	m.Publish(status)
}

// on returns the generation of the policy that a node has: 0 for none, -1 if the node gave it up.
func (m *member) on() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.has.Policies {
		switch {
		case p.Invalid != nil:
			return 0
		case p.Withheld.Reason == v1alpha1.ReasonRolledBack:
			return -1
		case p.Withheld.Reason == "":
			return p.Generation
		}
	}
	return 0
}

// cpus returns the CPUs that the applied version of the policy names, or "" if none is applied.
func (m *member) cpus() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.has.Policies {
		if (p.Withheld == agent.Withheld{}) && p.Invalid == nil {
			return p.Accelerate[0].RPS.CPUs
		}
	}
	return ""
}

// wantCPUs waits until the nodes have versions with these CPUs, in any order, and checks that no node is without any until then.
func wantCPUs(t *testing.T, all []*member, want ...string) {
	t.Helper()
	eventually(t, "CPUs", func() string {
		var got []string
		for _, m := range all {
			got = append(got, m.cpus())
		}
		slices.Sort(got)
		if got[0] == "" {
			t.Fatalf("the nodes have CPUs %q; none may be without the policy", got)
		}
		if !slices.Equal(got, want) {
			return fmt.Sprintf("they are %q, want %q", got, want)
		}
		return ""
	})
}

// halted reports whether the node's agent knows that a rollout halted.
func (m *member) halted() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.has.Policies, func(p agent.Policy) bool { return p.Halted })
}

func (m *member) tookAt(version string) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.times[version]
}

// group starts agents on n nodes whose positions are in both halves of the policy's order. The
// first node in that order is the first in the result.
func (s *api) group(t *testing.T, n int) []*member {
	t.Helper()
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("node%d", i))
	}
	slices.SortFunc(names, func(a, b string) int {
		return percentOf(rolledUID, a) - percentOf(rolledUID, b)
	})
	var all []*member
	for _, name := range names {
		s.put("/api/v1/nodes/"+name, nodeNamed(name, true))
		all = append(all, s.join(t, name))
	}
	return all
}

func versions(all []*member) []int64 {
	var out []int64
	for _, m := range all {
		out = append(out, m.on())
	}
	return out
}

func (s *api) rollout() (r object, condition string) {
	status, _ := s.get(policyPath + "rolled")["status"].(object)
	r, _ = status["rollout"].(object)
	conditions, _ := status["conditions"].([]any)
	for _, c := range conditions {
		if c := c.(object); c["type"] == v1alpha1.ConditionRolledOut {
			condition = fmt.Sprint(c["status"], " ", c["reason"], " ", c["message"])
		}
	}
	return r, condition
}

func (s *api) wantRollout(t *testing.T, all []*member, condition string, want ...int64) {
	t.Helper()
	eventually(t, "rollout", func() string {
		_, got := s.rollout()
		if !strings.Contains(got, condition) || !slices.Equal(versions(all), want) {
			return fmt.Sprintf("condition %q, versions %v; want %q, %v", got, versions(all), condition, want)
		}
		for _, m := range all {
			if halted := m.halted(); condition != "" && halted != strings.HasPrefix(condition, "False Halted") {
				return fmt.Sprintf("for the metrics of %s, halted is %t; want condition %q", m.name, halted, condition)
			}
		}
		return ""
	})
}

// TestRolloutInSteps checks that one node gets a policy first, and the others step by step, a pause
// apart.
func TestRolloutInSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 6)
		s.put(policyPath+"rolled", rolled(1, "0", object{}))
		s.wantRollout(t, all, "True Complete", 1, 1, 1, 1, 1, 1)
		// A step reads all nodes.
		seen, err := all[0].peers(t.Context(), &v1alpha1.AccelerationPolicy{Spec: v1alpha1.AccelerationPolicySpec{All: true}})
		must(t, err)
		if len(seen) != len(all) {
			t.Errorf("of %d nodes a step looks at %d", len(all), len(seen))
		}
		r, _ := s.rollout()
		first := slices.IndexFunc(all, func(m *member) bool { return m.name == r["first"] })
		if first < 0 {
			t.Fatalf("first is %v", r["first"])
		}
		at := func(m *member) time.Time { return m.tookAt("rolled@1") }
		began := at(all[first])
		halves := map[bool]time.Time{}
		for i, m := range all {
			half := percentOf(rolledUID, m.name) < 50
			switch since := at(m).Sub(began); {
			case i == first:
			case half && since < time.Second:
				t.Errorf("%s got it %s after the first, want a pause of 1 s", m.name, since)
			case !half && since < 2*time.Second:
				t.Errorf("%s of the second half got it %s after the first, want two pauses", m.name, since)
			}
			if halves[half].IsZero() {
				halves[half] = at(m)
			}
		}
		for _, m := range all {
			if got := m.announced["rolled@1"]; got != "1 in the first boot" {
				t.Errorf("%s got it, and had announced %q", m.name, got)
			}
		}
		if len(halves) != 2 {
			t.Fatalf("all nodes are in one half: %v", versions(all))
		}

		// A node that joins later gets it at once.
		s.put("/api/v1/nodes/late", nodeNamed("late", true))
		late := s.join(t, "late")
		s.wantRollout(t, []*member{late}, "True Complete", 1)

		// A change is rolled out in steps again, and until its turn a node keeps what it has.
		s.update(policyPath+"rolled", rolled(2, "1", object{}))
		eventually(t, "a first node of the second generation", func() string {
			got := versions(all)
			slices.Sort(got)
			if !slices.Equal(got, []int64{1, 1, 1, 1, 1, 2}) {
				return fmt.Sprint(got)
			}
			return ""
		})
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2, 2, 2)
		s.remove(policyPath + "rolled")
		s.wantRollout(t, all, "", 0, 0, 0, 0, 0, 0)
	})
}

// TestRolloutAtOnce checks that there are no steps with stepPercent 100.
func TestRolloutAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 3)
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 100, "pauseSeconds": 3}}))
		s.wantRollout(t, all, "False Progressing all nodes", 1, 1, 1)
		s.wantRollout(t, all, "True Complete", 1, 1, 1)
		// The kernels of a policy's proof reach the metrics, although no generation changes.
		o := s.get(policyPath + "rolled")
		o["metadata"].(object)["annotations"] = object{v1alpha1.AnnotationKernel: "6.1.0, 6.12.0", "other": "text"}
		s.put(policyPath+"rolled", o)
		eventually(t, "kernels", func() string {
			all[0].mu.Lock()
			defer all[0].mu.Unlock()
			if got := all[0].has.Policies[0].Kernels; got != "6.1.0, 6.12.0" {
				return fmt.Sprintf("%q", got)
			}
			return ""
		})
	})
}

// TestRolloutHalts checks that a node that fails a health check reverts the policy, and that no
// further node gets it, whatever the problem.
func TestRolloutHalts(t *testing.T) {
	for name, tt := range map[string]struct {
		trouble func(*api, *member)
		says    string
	}{
		"not ready": {func(s *api, m *member) { s.put("/api/v1/nodes/"+m.name, nodeNamed(m.name, false)) }, "has not been Ready since it got the policy"},
		"losses": {func(_ *api, m *member) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.losing = 20
		}, "drops more packets since it got the policy"},
		"failure": {func(_ *api, m *member) {
			m.Publish(agent.Status{Policies: []v1alpha1.ObservedPolicy{{Policy: "rolled", Generation: 2, State: v1alpha1.StateFailed, Reason: v1alpha1.ReasonNotVerified, Message: "something else"}}})
		}, "could not apply it: something else"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPI()
				all := s.group(t, 3)
				at := object{"rollout": object{"stepPercent": 100, "pauseSeconds": 1}}
				s.put(policyPath+"rolled", rolled(1, "0", at))
				s.wantRollout(t, all, "True Complete", 1, 1, 1)
				s.update(policyPath+"rolled", rolled(2, "1", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 30}}))
				var first *member
				eventually(t, "a first node", func() string {
					for _, m := range all {
						if m.on() == 2 {
							first = m
							return ""
						}
					}
					return fmt.Sprint(versions(all))
				})
				tt.trouble(s, first)
				// The node has its previous version again; the others still have that.
				s.wantRollout(t, all, "False Halted node "+first.name+" "+tt.says, 1, 1, 1)
				if r, _ := s.rollout(); fmt.Sprint(r["failedNodes"]) != fmt.Sprint([]any{first.name}) {
					t.Errorf("failed nodes are %v", r["failedNodes"])
				}
				// An agent that restarts does not try again, and knows no previous version.
				first.stop()
				again := s.join(t, first.name)
				s.wantRollout(t, []*member{again}, "False Halted", -1)
				// A change of the policy makes it try again.
				s.put("/api/v1/nodes/"+first.name, nodeNamed(first.name, true))
				s.update(policyPath+"rolled", rolled(3, "0", at))
				all[slices.Index(all, first)] = again
				s.wantRollout(t, all, "True Complete", 3, 3, 3)
			})
		})
	}
}

// TestRolloutHaltsAfterReboot checks that a node that boots again within a pause after it got a policy, whether it has reported that or
// not, does not get it again, and that the rollout halts. A restart of the agent alone does no harm, and a reboot after the pause
// neither.
func TestRolloutHaltsAfterReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 5)
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 4}}))
		restart := func(m *member, boot string) *member {
			m.stop()
			s.boots[m.name] = boot
			i := slices.Index(all, m)
			all[i] = s.join(t, m.name)
			return all[i]
		}
		first := s.begun(t, all)
		s.wantObserved(t, first.name, "state", "applied")
		first = restart(first, "first boot")
		s.wantRollout(t, []*member{first}, "False Progressing", 1)
		var crashes *member
		eventually(t, "a node of the first step", func() string {
			for _, m := range all {
				if m != first && m.on() == 1 {
					crashes = m
					return ""
				}
			}
			return fmt.Sprint(versions(all))
		})
		back := restart(crashes, "second boot")
		s.wantRollout(t, []*member{back}, "False Halted node "+back.name+" restarted before it had had the policy for a pause; it is rolled back on that node", -1)
		s.wantObserved(t, back.name, "rolledBack", "1")
		for i := range 3 {
			back = restart(back, fmt.Sprintf("boot %d", 3+i))
			s.wantRollout(t, []*member{back}, "False Halted", -1)
			if at := back.tookAt("rolled@1"); !at.IsZero() {
				t.Errorf("it got the policy again at %s", at)
			}
		}
		wantUnmoved(t, all, versions(all))

		// A change of the policy makes it try again, and then it may reboot.
		s.update(policyPath+"rolled", rolled(2, "0", object{}))
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2, 2)
		for _, m := range slices.Clone(all) {
			s.wantObserved(t, m.name, "passed", "true")
			restart(m, "last boot")
		}
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2, 2)
	})
}

// reported puts a policy that is being rolled out, and what an earlier agent of node0 has reported about its first generation.
func (s *api) reported(policy object, first, state, reason string) {
	policy["status"] = object{"rollout": object{
		"generation": policy["metadata"].(object)["generation"], "started": time.Now().UTC().Format(time.RFC3339), "first": first, "percent": 0, "complete": false, "failedNodes": nil, "passed": nil,
	}}
	s.put(policyPath+"rolled", policy)
	s.put(reportPath("node0"), object{
		"apiVersion": v1alpha1.APIVersion, "kind": v1alpha1.KindNodeAcceleration, "metadata": object{"name": "node0"},
		"status": object{"settings": 0, "verified": 0, "observed": []any{object{
			"policy": "rolled", "uid": rolledUID, "generation": 1, "state": state, "reason": reason, "settings": 0, "verified": 0,
		}}},
	})
}

// TestAgentsDifferAboutValidity checks an agent that follows one of another version, which took a policy for invalid that is valid, or
// the opposite: its node does not have the policy.
func TestAgentsDifferAboutValidity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.reported(slow(), "other", "failed", v1alpha1.ReasonInvalid)
		all := s.group(t, 1)
		s.wantObserved(t, "node0", "reason", v1alpha1.ReasonWaiting)
		wantUnmoved(t, all, []int64{0})
	})
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		invalid := slow()
		invalid["spec"].(object)["accelerate"] = accelerate("0", "nic", "nic")
		s.reported(invalid, "other", "applied", v1alpha1.ReasonApplied)
		all := s.group(t, 1)
		s.wantObserved(t, "node0", "reason", v1alpha1.ReasonInvalid)
		valid := slow()
		valid["metadata"].(object)["generation"] = 2
		s.reported(valid, "other", "failed", v1alpha1.ReasonInvalid)
		s.wantObserved(t, "node0", "reason", v1alpha1.ReasonWaiting)
		wantUnmoved(t, all, []int64{0})
	})
}

// TestReportWithoutBoot checks that an agent that follows one of an earlier version, which reported no boot, keeps the policy that
// its node has, and reports the boot.
func TestReportWithoutBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.reported(slow(), "node0", "applied", v1alpha1.ReasonApplied)
		all := s.group(t, 1)
		s.wantObserved(t, "node0", "boot", "first boot")
		s.wantObserved(t, "node0", "tried", "1")
		wantUnmoved(t, all, []int64{1})
	})
}

// TestRolloutOfNodesThatFallSilent checks a node that cannot reach the API server, so that its
// agent cannot report a problem: the node that makes the next step notices that it is not Ready,
// and halts the rollout.
func TestRolloutOfNodesThatFallSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 3)
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 100, "pauseSeconds": 3}}))
		eventually(t, "on", func() string {
			if got := versions(all); !slices.Equal(got, []int64{1, 1, 1}) {
				return fmt.Sprint(got)
			}
			return ""
		})
		silent := all[1]
		silent.stop() // as if its messages were lost
		s.put("/api/v1/nodes/"+silent.name, nodeNamed(silent.name, false))
		s.wantRollout(t, nil, "False Halted node "+silent.name+" has not been Ready since it got the policy")
	})
}

// TestRolloutNamesNodesWithoutAgent checks that a complete rollout names the nodes on which no
// agent runs, whose reports are out of date.
func TestRolloutNamesNodesWithoutAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.daemonSet = "system/agent"
		all := s.group(t, 2)
		s.put("/api/v1/namespaces/system/pods/agent-x", object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": "agent-x", "namespace": "system"}, "spec": object{"nodeName": all[0].name}})
		s.put("/api/v1/nodes/zombie", nodeNamed("zombie", true))
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 100, "pauseSeconds": 1}}))
		s.wantRollout(t, all, "; no agent runs on "+all[1].name+", zombie: what their", 1, 1)
	})
}

// TestRolloutWithoutProgress checks that a rollout halts if nothing more is heard from the agent of
// the first node.
func TestRolloutWithoutProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 2)
		s.put(policyPath+"rolled", rolled(1, "0", object{}))
		var first string
		eventually(t, "a first node", func() string {
			r, _ := s.rollout()
			if first, _ = r["first"].(string); first == "" {
				return "none"
			}
			return ""
		})
		i := slices.IndexFunc(all, func(m *member) bool { return m.name == first })
		all[i].stop()
		s.wantRollout(t, []*member{all[1-i]}, "False Halted the rollout has made no progress", 0)
		if r, _ := s.rollout(); fmt.Sprint(r["failedNodes"]) != "["+first+"]" {
			t.Errorf("failed nodes are %v", r["failedNodes"])
		}
	})
}

// TestRolloutOutOfReach checks that an agent that can no longer reach the API server once its node
// has the policy gives the policy up, and that any answer of the API server means that it can.
func TestRolloutOutOfReach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 1)
		s.put(policyPath+"rolled", rolled(1, "0", object{}))
		eventually(t, "on", func() string {
			if all[0].on() != 1 {
				return "off"
			}
			return ""
		})
		s.kill()
		eventually(t, "given up", func() string {
			if got := all[0].on(); got != -1 {
				return fmt.Sprint(got)
			}
			return ""
		})
		s.start()
		time.Sleep(2 * usualPace.outage) // until the agent watches again
		s.wantRollout(t, all, "False Halted node node0 cannot reach the API server since it got the policy", -1)
	})
	for _, code := range []int{http.StatusInternalServerError, http.StatusTooManyRequests, http.StatusForbidden} {
		t.Run(http.StatusText(code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPI()
				all := s.group(t, 3)
				s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 2}}))
				s.begun(t, all)
				s.setRefuse(func(string, string) int { return code })
				was := versions(all)
				for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
					if is := versions(all); !slices.Equal(was, is) {
						t.Fatalf("the versions are %v, were %v (-1: rolled back)", is, was)
					}
				}
				s.setRefuse(nil)
				s.wantRollout(t, all, "True Complete", 1, 1, 1)
			})
		})
	}
}

// TestInvalidChange checks that a change that the schema admits although it is invalid reverts nothing: each node keeps what it has
// until it is its turn for a valid version, and says that the change is invalid.
func TestInvalidChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 4)
		invalid := func(generation int) object {
			o := rolled(generation, "1", object{})
			o["spec"].(object)["accelerate"] = accelerate("1", "nic", "nic")
			return o
		}
		s.put("/api/v1/namespaces/default/pods/web", object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": "web", "namespace": "default"}, "status": object{"podIPs": []any{object{"ip": "10.1.0.1"}}}})
		s.put(policyPath+"rolled", invalid(1))
		for _, m := range all {
			s.wantObserved(t, m.name, "reason", v1alpha1.ReasonInvalid)
		}
		s.wantRollout(t, all, "", 0, 0, 0, 0)
		s.update(policyPath+"rolled", rolled(2, "0", object{"pods": object{"matchLabels": object{"app": "web"}}}))
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2)

		s.update(policyPath+"rolled", invalid(3))
		for _, m := range all {
			s.wantObserved(t, m.name, "reason", v1alpha1.ReasonInvalid)
			s.wantObserved(t, m.name, "generation", "2")
			s.wantObserved(t, m.name, "uid", rolledUID)
		}
		wantUnmoved(t, all, []int64{2, 2, 2, 2})
		for _, m := range all {
			m.mu.Lock()
			p := m.has.Policies[0]
			if p.Pods == nil || len(m.has.Pods) != 1 || !strings.Contains(p.LaterInvalid, "generation 3 is invalid, so the node keeps the version that it has: spec.accelerate[0].rps.devices") {
				t.Errorf("%s has %+v", m.name, p)
			}
			m.mu.Unlock()
		}
		// An agent that restarts knows no earlier version, and does not take the invalid one for one that the node has.
		for range 2 {
			all[3].stop()
			all[3] = s.join(t, all[3].name)
			s.wantRollout(t, all, "", 2, 2, 2, 0)
			s.wantObserved(t, all[3].name, "generation", "3")
		}

		s.update(policyPath+"rolled", rolled(4, "1", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 4}}))
		eventually(t, "a first node", func() string {
			is := versions(all)
			switch {
			case slices.Equal(is[:3], []int64{2, 2, 2}) && is[3] == 0:
				return fmt.Sprint(is)
			case len(is)-len(slices.DeleteFunc(is, func(v int64) bool { return v == 4 })) != 1:
				t.Fatalf("the versions are %v, want one node with the fourth", versions(all))
			}
			return ""
		})
		s.wantRollout(t, all, "True Complete", 4, 4, 4, 4)
	})
}

// TestRolloutAfterRestore checks that agents roll out an earlier version of a policy that comes back with a backup of etcd, and then a
// later one whose generation they have seen before, although it was another version. Meanwhile each node keeps what it has.
func TestRolloutAfterRestore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 4)
		s.put(policyPath+"rolled", rolled(1, "0", object{}))
		s.wantRollout(t, all, "True Complete", 1, 1, 1, 1)
		backup := s.get(policyPath + "rolled")
		s.update(policyPath+"rolled", rolled(2, "1", object{}))
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2)
		for _, m := range all {
			s.wantObserved(t, m.name, "passed", "true")
		}
		all[2].stop()
		all[2] = s.join(t, all[2].name) // it does not know the first version
		s.wantRollout(t, all, "True Complete", 2, 2, 2, 2)

		s.put(policyPath+"rolled", backup)
		eventually(t, "a node that keeps what it has", func() string {
			for _, m := range all {
				if m.cpus() == "1" && m.on() == 0 {
					return "" // the number of the version that it has may be used again
				}
			}
			return fmt.Sprint(versions(all))
		})
		wantCPUs(t, all, "0", "0", "0", "0")
		s.wantRollout(t, all, "True Complete", 1, 1, 1, 1)
		s.update(policyPath+"rolled", rolled(2, "2", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 4}}))
		wantCPUs(t, all, "0", "0", "0", "2")
		never(t, func() bool {
			has := 0
			for _, m := range all {
				if m.cpus() == "2" {
					has++
				}
			}
			return has > 1 // before the pause is over
		})
		wantCPUs(t, all, "2", "2", "2", "2")
	})
}

// TestRolloutWaitsForReady checks that a node that is not Ready waits during a rollout. That it was
// not Ready before the policy does not count as a failure.
func TestRolloutWaitsForReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 2)
		down := nodeNamed(all[0].name, false)
		down["status"].(object)["conditions"].([]any)[0].(object)["lastTransitionTime"] = "1999-01-01T00:00:00Z"
		s.put("/api/v1/nodes/"+all[0].name, down)
		eventually(t, "its agent to know", func() string {
			if ready(all[0].node()) {
				return "it does not"
			}
			return ""
		})
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 100, "pauseSeconds": 3}}))
		s.wantRollout(t, all, "False Progressing", 0, 1)
		never(t, func() bool { return all[0].on() != 0 })
		s.put("/api/v1/nodes/"+all[0].name, nodeNamed(all[0].name, true))
		s.wantRollout(t, all, "True Complete", 1, 1)
	})
}

// TestDownSince: a rollout halts at nodes that have not been Ready since it began, but not at those that were not Ready before,
// also if a kubelet's clock is ahead.
func TestDownSince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		c, err := New(s.config(), Options{Node: "node0", Log: slog.New(slog.DiscardHandler)})
		must(t, err)
		began := time.Now().Add(-10 * time.Minute)
		for name, tt := range map[string]struct {
			created, transition, heartbeat time.Duration // from now
			want                           bool
		}{
			"since":                                 {-time.Hour, -5 * time.Minute, -5 * time.Minute, true},
			"since, silent":                         {-time.Hour, -5 * time.Minute, -6 * time.Minute, true},
			"since, by a clock two hours ahead":     {-time.Hour, 115 * time.Minute, 116 * time.Minute, true},
			"before":                                {-2 * time.Hour, -time.Hour, -time.Minute, false},
			"before, by a clock two hours ahead":    {-2 * time.Hour, time.Hour, 119 * time.Minute, false},
			"a node that has joined, and never was": {-5 * time.Minute, -5 * time.Minute, -time.Minute, false},
		} {
			at := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }
			o := nodeNamed("node1", false)
			o["metadata"].(object)["creationTimestamp"] = at(tt.created)
			ready := o["status"].(object)["conditions"].([]any)[0].(object)
			ready["lastTransitionTime"], ready["lastHeartbeatTime"] = at(tt.transition), at(tt.heartbeat)
			s.put("/api/v1/nodes/node1", o)
			down, err := c.downSince(t.Context(), []string{"node1"}, began)
			if err != nil || (len(down) > 0) != tt.want {
				t.Errorf("%s: down are %v, %v, want it: %t", name, down, err, tt.want)
			}
		}
	})
}

// never fails the test if the condition becomes true within a while.
func never(t *testing.T, is func() bool) {
	t.Helper()
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if is() {
			t.Fatal("it has happened")
		}
	}
}

// TestPolicyWithoutSelector checks that a policy that does not say which nodes it selects selects
// none, and says so.
func TestPolicyWithoutSelector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 1)
		neither := rolled(1, "0", object{})
		delete(neither["spec"].(object), "all")
		s.put(policyPath+"rolled", neither)
		selected := func() string {
			status, _ := s.get(policyPath + "rolled")["status"].(object)
			conditions, _ := status["conditions"].([]any)
			for _, c := range conditions {
				if c := c.(object); c["type"] == v1alpha1.ConditionSelected {
					return fmt.Sprint(c["status"], " ", c["reason"], " ", c["message"])
				}
			}
			return ""
		}
		eventually(t, "condition", func() string {
			if got := selected(); got != "False NoSelector spec does not say which nodes: write nodeSelector with labels that they have, or all: true for every node" {
				return "it is " + got
			}
			return ""
		})
		if got := all[0].on(); got != 0 {
			t.Errorf("it is on: %d", got)
		}
		s.update(policyPath+"rolled", rolled(2, "0", object{"nodeSelector": object{"zone": "a"}, "all": true}))
		eventually(t, "condition", func() string {
			if got := selected(); got != "False NoSelector spec has both nodeSelector and all: true; take one of them out" {
				return "it is " + got
			}
			return ""
		})
	})
}

// TestRolloutUnknownToTheCluster checks that agents report a CRD that does not know rollouts, with
// which they would wait for ever.
func TestRolloutUnknownToTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 1)
		o := rolled(1, "0", object{})
		s.put(policyPath+"rolled", o)
		s.setPrune(withoutRollout)
		var p v1alpha1.AccelerationPolicy
		must(t, all[0].clients.shared.Get().Resource("accelerationpolicies").Name("rolled").Do(t.Context()).Into(&p))
		eventually(t, "an error", func() string {
			err := all[0].begin(t.Context(), &p, 10)
			if err == nil || !strings.Contains(err.Error(), "apply the files in charts/slipstream/crds") {
				_ = all[0].clients.shared.Get().Resource("accelerationpolicies").Name("rolled").Do(t.Context()).Into(&p)
				return fmt.Sprint(err)
			}
			return ""
		})
	})
}

// TestPosition checks that the order differs from policy to policy, and spreads nodes evenly.
func TestPosition(t *testing.T) {
	first := make(map[string]bool)
	var tenths [10]int
	for policy := range 50 {
		uid := types.UID(fmt.Sprint("policy", policy))
		best := "node0"
		for n := range 100 {
			name := fmt.Sprint("node", n)
			if position(uid, name) < position(uid, best) {
				best = name
			}
			tenths[percentOf(uid, name)/10]++
		}
		first[best] = true
	}
	if len(first) < 30 {
		t.Errorf("of 50 policies %d nodes are first", len(first))
	}
	for i, n := range tenths {
		if n < 400 || n > 600 {
			t.Errorf("of 5000 nodes %d are in tenth %d", n, i)
		}
	}
}

func TestLossesRisen(t *testing.T) {
	for _, tt := range []struct {
		before, after counts
		want          bool
	}{
		{counts{}, counts{1000, 99}, false},
		{counts{10_000, 0}, counts{100_000, 100}, false},
		{counts{10_000, 0}, counts{100_000, 101}, true},
		{counts{10_000, 100}, counts{100_000, 2000}, false},
		{counts{10_000, 100}, counts{100_000, 2200}, true},
		{counts{}, counts{0, 200}, true},
	} {
		if got := risen(tt.before, tt.after); got != tt.want {
			t.Errorf("%v, then %v: risen is %v", tt.before, tt.after, got)
		}
	}
	before := losses{links: map[int]counts{1: {100, 1}, 2: {50, 0}, 4: {7, 7}}, backlog: 3}
	after := losses{links: map[int]counts{1: {300, 2}, 3: {900, 90}, 4: {1, 1}}, backlog: 5}
	if got, want := after.since(before), (counts{200, 3}); got != want {
		t.Errorf("since: %v, want %v: devices that came, went or began anew do not count", got, want)
	}
}

func FuzzBacklogDrops(f *testing.F) {
	f.Add([]byte("00000001 00000002 0\n0000000a 0000000b 0\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		n, err := backlogDrops(text)
		if err != nil && errors.Unwrap(err) == nil && !strings.Contains(err.Error(), "columns") {
			t.Error(err)
		}
		if string(text) == "00000001 00000002 0\n0000000a 0000000b 0\n" && (n != 13 || err != nil) {
			t.Errorf("%d, %v", n, err)
		}
	})
}

// TestReadLosses checks the counters of the machine that runs the tests.
func TestReadLosses(t *testing.T) {
	l, err := readLosses("/proc")
	must(t, err)
	if len(l.links) == 0 {
		t.Error("no devices")
	}
}
