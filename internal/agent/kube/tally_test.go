package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/agent"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/api/v1alpha1"
)

// TestSummary checks that a node's policies fit into one line, which no failure is missing from, and that a count reads them back.
func TestSummary(t *testing.T) {
	all := []v1alpha1.ObservedPolicy{
		{Policy: "rps", State: v1alpha1.StateApplied, Reason: v1alpha1.ReasonApplied},
		{Policy: "rps.old", State: v1alpha1.StatePending, Reason: v1alpha1.ReasonWaiting},
		{Policy: "fast", State: v1alpha1.StateFailed, Reason: v1alpha1.ReasonConflict},
		{Policy: "back", State: v1alpha1.StateApplied, Reason: v1alpha1.ReasonApplied, RolledBack: 2}, // it has the version before
	}
	const want = "fast failed (Conflict), back failed (RolledBack), rps.old pending (Waiting), rps applied"
	if got := summaryOf(all); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for policy, want := range map[string]string{"fast": "failed Conflict true", "back": "failed RolledBack true", "rps": "applied  true", "rps.old": "pending Waiting true", "rp": "  false"} {
		state, reason, ok := inSummary(summaryOf(all[:4]), policy)
		if got := fmt.Sprint(state, " ", reason, " ", ok); got != want {
			t.Errorf("%s is %s, want %s", policy, got, want)
		}
	}
	for i := range 100 {
		all = append(all, v1alpha1.ObservedPolicy{Policy: fmt.Sprintf("another-policy-%d", i), State: v1alpha1.StateApplied})
	}
	if got := summaryOf(all); len(got) > 1010 || !strings.HasPrefix(got, want[:40]) {
		t.Errorf("with a hundred more: %d bytes, %s", len(got), got)
	}
}

// stateOfPolicy returns the condition Ready of a policy, its counts and the message.
func (f *fleet) stateOfPolicy(policy string) (state, message string) {
	status, _ := f.get(policyPath + policy)["status"].(object)
	for _, c := range asList(status["conditions"]) {
		if c["type"] == v1alpha1.ConditionReady {
			n, _ := status["nodes"].(object)
			return fmt.Sprint(c["status"], " ", c["reason"], " ", n["selected"], " ", n["ready"], " ", n["failed"]), fmt.Sprint(c["message"])
		}
	}
	return "none", ""
}

func asList(list any) (all []object) {
	items, _ := list.([]any)
	for _, o := range items {
		all = append(all, o.(object))
	}
	return all
}

// TestTally checks that a policy says whether it is applied on all its nodes: soon after a failure with the node's name, and again
// after its end.
func TestTally(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 9)
		defer f.stop()
		want := func(within time.Duration, state, message string) {
			t.Helper()
			time.Sleep(within)
			if got, text := f.stateOfPolicy("all"); got != state || !strings.Contains(text, message) {
				t.Errorf("the policy is %s: %s, want %s: %s", got, text, state, message)
			}
		}
		fails := func(node int, state v1alpha1.State, reason string) {
			f.agents[node].change(func(s *agent.Status) { s.Policies[0].State, s.Policies[0].Reason = state, reason })
		}
		f.put(policyPath+"all", everywhere("all", object{}))
		want(50*time.Second, "Unknown Progressing 9 9 0", "9 of 9 nodes have it, and its rollout continues")
		want(2*time.Minute, "True Applied 9 9 0", "9 nodes of 9 are as it wants them")
		fails(4, v1alpha1.StateFailed, v1alpha1.ReasonConflict)
		want(20*time.Second, "False Failed 9 8 1", "it failed on 1 of 9 nodes: node4 (Conflict)")
		fails(2, v1alpha1.StateFailed, v1alpha1.ReasonHeld)
		want(usualPace.tally+20*time.Second, "False Failed 9 7 2", "node2 (Held), node4 (Conflict)")
		fails(2, v1alpha1.StateApplied, v1alpha1.ReasonApplied)
		fails(4, v1alpha1.StatePending, v1alpha1.ReasonNoDevice)
		want(usualPace.tally+20*time.Second, "True Applied 9 9 0", "")

		// A second policy does not hide the first.
		fails(4, v1alpha1.StateFailed, v1alpha1.ReasonConflict)
		f.agents[4].change(func(s *agent.Status) {
			s.Policies = append([]v1alpha1.ObservedPolicy{{Policy: "another", State: v1alpha1.StateApplied}}, s.Policies...)
		})
		want(usualPace.tally+20*time.Second, "False Failed 9 8 1", "node4")
		if status := f.get("/apis/slipstream.dev/v1alpha1/nodeaccelerations/node4")["status"].(object); status["summary"] != "all failed (Conflict), another applied" {
			t.Errorf("the summary of the node is %s", status["summary"])
		}
	})
}

// TestTallyAfterTheServersClockIsSetBack checks that nodes are counted although the last count is of the future by now.
func TestTallyAfterTheServersClockIsSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 3)
		defer f.stop()
		f.mu.Lock()
		f.ahead = time.Hour
		f.mu.Unlock()
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(3 * time.Minute)
		f.mu.Lock()
		f.ahead = -time.Second // about the time of the agents; 0 would tell them nothing
		f.mu.Unlock()
		for _, h := range f.agents {
			h.Notify(agent.Event{Reason: "Repaired", Message: "a request whose answer has the time"})
		}
		time.Sleep(usualPace.events)
		f.agents[1].change(func(s *agent.Status) {
			s.Policies[0].State, s.Policies[0].Reason = v1alpha1.StateFailed, v1alpha1.ReasonConflict
		})
		time.Sleep(usualPace.tally + 20*time.Second)
		if got, text := f.stateOfPolicy("all"); got != "False Failed 3 2 1" {
			t.Errorf("the policy is %s: %s, want that one of 3 nodes failed", got, text)
		}
	})
}

// TestTallyWithOldRoles checks that agents that may not list NodeAccelerations rarely try, and work otherwise.
func TestTallyWithOldRoles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 5)
		defer f.stop()
		f.setRefuse(func(verb, path string) int {
			if verb == "list" && strings.HasSuffix(path, "/nodeaccelerations") {
				return 403
			}
			return 0
		})
		asked, _ := f.during(func() {
			f.put(policyPath+"all", everywhere("all", object{}))
			time.Sleep(20 * time.Minute)
		})
		if n := asked["list nodeaccelerations"]; n == 0 || n > 5*5 {
			t.Errorf("%d lists in 20 minutes", n)
		}
	})
}

// TestTallyAfterAFailure checks that agents count soon after the API server could not answer, and do not ask it all the time meanwhile.
func TestTallyAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 5
		f := newFleet(t, n)
		defer f.stop()
		f.put(policyPath+"all", everywhere("all", object{}))
		time.Sleep(10 * time.Minute)
		fails := func(node int) {
			f.agents[node].change(func(s *agent.Status) {
				s.Policies = slices.Clone(s.Policies)
				s.Policies[0].State, s.Policies[0].Reason = v1alpha1.StateFailed, v1alpha1.ReasonConflict
			})
		}
		lists := func(during time.Duration) int {
			asked, _ := f.during(func() { time.Sleep(during) })
			return asked["list nodeaccelerations"]
		}
		fails(2)
		time.Sleep(2*usualPace.spread + 2*time.Second) // it is counted, so that the next count is due in a minute
		f.setRefuse(func(verb, path string) int {
			if verb == "list" && strings.HasSuffix(path, "/nodeaccelerations") {
				return 500
			}
			return 0
		})
		fails(1)
		for lists(time.Second) == 0 {
		}
		if n := lists(usualPace.retry); n > 0 {
			t.Errorf("%d lists within 10 s of one that failed", n)
		}
		if n := lists(2 * time.Minute); n < 2 || n > 10 {
			t.Errorf("%d lists in two minutes, want one every 15 to 30 s", n)
		}
		f.setRefuse(nil)
		time.Sleep(2*usualPace.retry + 2*usualPace.spread + time.Second)
		if got, text := f.stateOfPolicy("all"); got != "False Failed 5 3 2" {
			t.Errorf("the policy is %s: %s, want that two of 5 nodes failed", got, text)
		}
	})
}

// TestTallyWithOldCRD checks that agents do not count where the CRD has dropped the summaries.
func TestTallyWithOldCRD(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 5)
		defer f.stop()
		f.setPrune(func(o object) {
			if status, ok := o["status"].(object); ok {
				delete(status, "summary")
			}
		})
		asked, _ := f.during(func() {
			f.put(policyPath+"all", everywhere("all", object{}))
			time.Sleep(20 * time.Minute)
		})
		if n := asked["list nodeaccelerations"]; n > 0 {
			t.Errorf("%d lists", n)
		}
	})
}

// TestReadiness: a halted rollout and one that goes on are not ready, whatever the counts are.
func TestReadiness(t *testing.T) {
	for name, tt := range map[string]struct {
		rollout []metav1.Condition
		n       v1alpha1.NodeCounts
		waiting int
		want    string
	}{
		"no rollout":     {nil, v1alpha1.NodeCounts{Selected: 2, Ready: 2}, 0, "Unknown Progressing"},
		"halted":         {[]metav1.Condition{{Reason: v1alpha1.ReasonHalted, ObservedGeneration: 3}}, v1alpha1.NodeCounts{Selected: 2, Ready: 2}, 0, "False Halted"},
		"halted earlier": {[]metav1.Condition{{Reason: v1alpha1.ReasonHalted, ObservedGeneration: 2}}, v1alpha1.NodeCounts{Selected: 2, Ready: 2}, 0, "Unknown Progressing"},
		"waiting":        {[]metav1.Condition{{Status: metav1.ConditionTrue, ObservedGeneration: 3}}, v1alpha1.NodeCounts{Selected: 2, Ready: 1}, 1, "Unknown Progressing"},
		"complete":       {[]metav1.Condition{{Status: metav1.ConditionTrue, ObservedGeneration: 3}}, v1alpha1.NodeCounts{Selected: 2, Ready: 2}, 0, "True Applied"},
		"no node":        {[]metav1.Condition{{Status: metav1.ConditionTrue, ObservedGeneration: 3}}, v1alpha1.NodeCounts{}, 0, "Unknown NoNode"},
		"failed":         {[]metav1.Condition{{Reason: v1alpha1.ReasonHalted, ObservedGeneration: 3}}, v1alpha1.NodeCounts{Selected: 2, Failed: 1}, 0, "False Failed"},
	} {
		p := &v1alpha1.AccelerationPolicy{ObjectMeta: metav1.ObjectMeta{Generation: 3}}
		for _, c := range tt.rollout {
			c.Type = v1alpha1.ConditionRolledOut
			p.Status.Conditions = append(p.Status.Conditions, c)
		}
		if is := readiness(p, tt.n, []string{"x (Held)"}, tt.waiting); fmt.Sprint(is.Status, " ", is.Reason) != tt.want || is.ObservedGeneration != 3 {
			t.Errorf("%s: %+v, want %s", name, is, tt.want)
		}
	}
}

// TestSelectedUntilKnown checks that agents deny that a node is selected only if the API server says so: nobody has the labels, or no
// agent runs where they are. While agents that run there are silent, it is unknown.
func TestSelectedUntilKnown(t *testing.T) {
	condition := func(f *fleet, policy string) (is, message string) {
		status, _ := f.get(policyPath + policy)["status"].(object)
		for _, c := range asList(status["conditions"]) {
			if c["type"] == v1alpha1.ConditionSelected {
				return fmt.Sprint(c["status"], " ", c["reason"]), fmt.Sprint(c["message"])
			}
		}
		return "", ""
	}
	for name, tt := range map[string]struct {
		node, agent   bool
		want, message string
	}{
		"no node":           {false, false, "False NoNode", "no node has the labels"},
		"no agent":          {true, false, "False NoNode", "no agent runs on the nodes with the labels: lone"},
		"a silent agent":    {true, true, "Unknown NoReport", "the labels are on lone, and no agent there has said yet"},
		"an agent, no node": {false, true, "False NoNode", "no node has the labels"},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t, 5)
			defer f.stop()
			if tt.node {
				o := nodeNamed("lone", true)
				o["metadata"].(object)["labels"] = object{"zone": "z"}
				f.put("/api/v1/nodes/lone", o)
			}
			if tt.agent {
				f.put("/api/v1/namespaces/system/pods/agent-1", object{"kind": "Pod", "metadata": object{"name": "agent-1"}, "spec": object{"nodeName": "lone"}})
			}
			f.put(policyPath+"p", everywhere("p", object{"nodeSelector": object{"zone": "z"}}))
			asked, _ := f.during(func() { time.Sleep(2 * time.Minute) })
			if got, message := condition(f, "p"); got != tt.want || !strings.Contains(message, tt.message) {
				t.Errorf("%s: it is %s: %s, want %s: %s", name, got, message, tt.want, tt.message)
			}
			if writes, lists := asked["patch accelerationpolicies/status"], asked["list nodes"]; writes != 1 || lists > 3 {
				t.Errorf("%s: %d writes, %d lists of nodes", name, writes, lists)
			}
		})
	}
	// One agent says of many policies that they select its node, which takes longer than the others wait.
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 5)
		defer f.stop()
		o := nodeNamed("node0", true)
		o["metadata"].(object)["labels"] = object{"zone": "a"}
		f.put("/api/v1/nodes/node0", o)
		f.put("/api/v1/namespaces/system/pods/agent-0", object{"kind": "Pod", "metadata": object{"name": "agent-0"}, "spec": object{"nodeName": "node0"}})
		const n = 33
		for i := range n {
			name := fmt.Sprintf("p%d", i)
			f.put(policyPath+name, everywhere(name, object{"nodeSelector": object{"zone": "a"}}))
		}
		for second := range 90 {
			time.Sleep(time.Second)
			for i := range n {
				if got, _ := condition(f, fmt.Sprintf("p%d", i)); strings.HasPrefix(got, "False") {
					t.Fatalf("after %d s, p%d is %s, and node0 is selected", second, i, got)
				}
			}
		}
		for i := range n {
			if got, _ := condition(f, fmt.Sprintf("p%d", i)); got != "True Nodes" {
				t.Errorf("p%d is %q", i, got)
			}
		}
	})
}
