package kube

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/agent"

	"slipstream.dev/api/v1alpha1"
)

// forge changes the rollout in the policy's status, as anybody with the token of one node's agent can, and waits until all agents
// know.
func (s *api) forge(t *testing.T, all []*member, change func(rollout object)) {
	t.Helper()
	o := s.get(policyPath + "rolled")
	status, _ := o["status"].(object)
	if status == nil {
		status = object{}
		o["status"] = status
	}
	r, _ := status["rollout"].(object)
	if r == nil {
		r = object{"generation": o["metadata"].(object)["generation"], "started": time.Now().UTC().Format(time.RFC3339), "first": "", "percent": 0, "complete": false}
	}
	change(r)
	status["rollout"] = r
	if len(r) == 0 {
		delete(status, "rollout")
	}
	s.put(policyPath+"rolled", o)
	version, _ := strconv.Atoi(s.get(policyPath + "rolled")["metadata"].(object)["resourceVersion"].(string))
	eventually(t, "all agents to see the forged status", func() string {
		for _, m := range all {
			for _, p := range m.policies() {
				if v, _ := strconv.Atoi(p.ResourceVersion); p.Name == "rolled" && v < version {
					return m.name + " does not"
				}
			}
		}
		return ""
	})
}

// forgeInVain forges the status, and fails if the version of any node changes. It waits long enough for agents to look for
// evidence several times.
func (s *api) forgeInVain(t *testing.T, all []*member, change func(rollout object)) {
	t.Helper()
	was := versions(all)
	s.forge(t, all, change)
	wantUnmoved(t, all, was)
}

func wantUnmoved(t *testing.T, all []*member, was []int64) {
	t.Helper()
	for end := time.Now().Add(4 * hurry.spread); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if is := versions(all); !slices.Equal(was, is) {
			t.Fatalf("after the status was forged the versions are %v, were %v (-1: rolled back)", is, was)
		}
	}
}

// slow returns a rollout that takes no step during a test.
func slow() object {
	return rolled(1, "0", object{"rollout": object{"stepPercent": 1, "pauseSeconds": 3600}})
}

// begun waits until the first node has the policy, and returns it.
func (s *api) begun(t *testing.T, all []*member) (first *member) {
	t.Helper()
	eventually(t, "the first node to have the policy", func() string {
		if i := slices.Index(versions(all), 1); i >= 0 {
			first = all[i]
			return ""
		}
		return fmt.Sprint(versions(all))
	})
	return first
}

// names returns the names of nodes, in the form of the status.
func names(all []*member) (out []any) {
	for _, m := range all {
		out = append(out, m.name)
	}
	return out
}

// TestForgedStatusRevertsNothing checks that anybody who writes the status of a policy with the token of one node reverts nothing
// on any other node.
func TestForgedStatusRevertsNothing(t *testing.T) {
	for name, change := range map[string]func(r object, all []*member){
		"failed nodes":       func(r object, all []*member) { r["failedNodes"] = names(all) },
		"failed and halted":  func(r object, all []*member) { r["failedNodes"], r["complete"] = names(all), false },
		"percent":            func(r object, _ []*member) { r["percent"], r["complete"], r["first"] = 0, false, "" },
		"another generation": func(r object, _ []*member) { r["generation"] = 0 },
		"no rollout":         func(r object, _ []*member) { clear(r) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPI()
				all := s.group(t, 4)
				s.put(policyPath+"rolled", rolled(1, "0", object{}))
				s.wantRollout(t, all, "True Complete", 1, 1, 1, 1)
				for range 3 {
					s.forgeInVain(t, all, func(r object) { change(r, all) })
				}
				// An agent that starts now does not remove it either.
				all[2].stop()
				all[2] = s.join(t, all[2].name)
				s.wantRollout(t, all, "", 1, 1, 1, 1)
				wantUnmoved(t, all, versions(all))
			})
		})
	}
}

// TestForgedStatusAppliesNothing checks that a forged status gives no node the policy before its turn.
func TestForgedStatusAppliesNothing(t *testing.T) {
	for name, change := range map[string]func(r object, all []*member){
		"percent":              func(r object, _ []*member) { r["percent"] = 100 },
		"complete":             func(r object, _ []*member) { r["percent"], r["complete"] = 100, true },
		"without a first node": func(r object, _ []*member) { r["percent"], r["complete"], r["first"] = 100, true, "" },
		"nodes that passed":    func(r object, all []*member) { r["percent"], r["passed"] = 100, names(all) },
		"nodes without a name": func(r object, _ []*member) { r["percent"], r["passed"] = 100, []any{"../x", "", "none"} },
		"long ago":             func(r object, _ []*member) { r["percent"], r["started"] = 100, "1999-01-01T00:00:00Z" },
		"another generation":   func(r object, _ []*member) { r["generation"], r["percent"] = 0, 100 },
		"no rollout":           func(r object, _ []*member) { clear(r) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPI()
				all := s.group(t, 6)
				s.put(policyPath+"rolled", slow())
				s.begun(t, all)
				for range 3 {
					s.forgeInVain(t, all, func(r object) { change(r, all) })
				}
			})
		})
	}
	t.Run("each node the first", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newAPI()
			all := s.group(t, 6)
			s.put(policyPath+"rolled", slow())
			s.begun(t, all)
			for _, m := range all {
				s.forgeInVain(t, all, func(r object) { r["first"] = m.name })
			}
		})
	})
	t.Run("before the rollout begins", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newAPI()
			all := s.group(t, 6)
			s.put(policyPath+"rolled", slow())
			s.forge(t, all, func(r object) { r["percent"], r["complete"] = 100, true })
			s.begun(t, all)
			has := 0
			for _, version := range versions(all) {
				has += int(version)
			}
			if has != 1 {
				t.Errorf("%d nodes have the policy, want the first only", has)
			}
			for range 3 {
				s.forgeInVain(t, all, func(r object) { r["percent"], r["complete"], r["first"] = 100, true, "" })
			}
		})
	})
}

// TestOneLiarIsNotEnough checks that an agent that lies in its own NodeAcceleration convinces no other node that the nodes before
// it passed.
func TestOneLiarIsNotEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 6)
		liar := all[0]
		liar.stop() // somebody else uses its token now
		honest := all[1:]
		s.put(policyPath+"rolled", slow())
		s.begun(t, honest)
		s.put(reportPath(liar.name), object{
			"apiVersion": v1alpha1.APIVersion, "kind": v1alpha1.KindNodeAcceleration, "metadata": object{"name": liar.name},
			"status": object{"settings": 0, "verified": 0, "observed": []any{object{
				"policy": "rolled", "uid": rolledUID, "generation": 1, "state": "applied", "reason": "Applied", "settings": 0, "verified": 0, "step": 100, "passed": true,
			}}},
		})
		for range 3 {
			s.forgeInVain(t, honest, func(r object) {
				r["percent"], r["complete"], r["passed"] = 100, true, []any{liar.name, liar.name, honest[0].name}
			})
		}
	})
}

// TestFailedNodeIsTakenOutOfTheStatus checks that a node that failed stays without the policy, and the rollout stays halted, if
// its name is removed from the status, even if its agent restarts.
func TestFailedNodeIsTakenOutOfTheStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 4)
		s.put(policyPath+"rolled", slow())
		first := s.begun(t, all)
		first.Publish(agent.Status{Policies: []v1alpha1.ObservedPolicy{{Policy: "rolled", Generation: 1, State: v1alpha1.StateFailed, Reason: v1alpha1.ReasonError, Message: "no such device"}}})
		s.wantRollout(t, []*member{first}, "False Halted", -1)
		s.wantObserved(t, first.name, "rolledBack", "1")
		for i := range 3 {
			s.forgeInVain(t, all, func(r object) { r["failedNodes"], r["percent"], r["complete"] = nil, 100, i == 2 })
		}
		first.stop()
		again := s.join(t, first.name)
		s.wantRollout(t, []*member{again}, "", -1)
		all[slices.Index(all, first)] = again
		wantUnmoved(t, all, versions(all))
	})
}

// TestForgedStepsAreNoFaster checks that if the status says that it is the turn of all nodes, they still get the policy step by
// step, as the nodes before them report that they passed.
func TestForgedStepsAreNoFaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 6)
		s.put(policyPath+"rolled", rolled(1, "0", object{"rollout": object{"stepPercent": 50, "pauseSeconds": 2}}))
		first := s.begun(t, all)
		began := first.tookAt("rolled@1")
		s.forge(t, all, func(r object) { r["percent"] = 100 })
		s.wantRollout(t, all, "", 1, 1, 1, 1, 1, 1)
		for _, m := range all {
			since, half := m.tookAt("rolled@1").Sub(began), percentOf(rolledUID, m.name) < 50
			if m != first && since < 2*time.Second || m != first && !half && since < 4*time.Second {
				t.Errorf("%s (first half: %v) got it %s after the first, want a pause of 2 s for each step", m.name, half, since)
			}
		}
	})
}

// TestRolloutBeginsAgain checks that a rollout begins again if no node is left that has the policy, as in a pool that was empty
// for a while.
func TestRolloutBeginsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		policy := rolled(1, "0", object{})
		policy["status"] = object{"rollout": object{
			"generation": 1, "started": "1999-01-01T00:00:00Z", "first": "gone", "percent": 100, "complete": true, "failedNodes": nil, "passed": []any{"gone", "left"},
		}}
		s.put(policyPath+"rolled", policy)
		all := s.group(t, 4)
		s.wantRollout(t, all, "True Complete", 1, 1, 1, 1)
		r, _ := s.rollout()
		first := slices.IndexFunc(all, func(m *member) bool { return m.name == r["first"] })
		if first < 0 {
			t.Fatalf("the first node is %v", r["first"])
		}
		for i, m := range all {
			if since := m.tookAt("rolled@1").Sub(all[first].tookAt("rolled@1")); i != first && since < time.Second {
				t.Errorf("%s got it %s after the first, want a pause of 1 s", m.name, since)
			}
		}
	})
}

// TestJoinAfterWitnessesLeft checks that a node that joins gets the policy although the first node and the nodes that the status
// names have left.
func TestJoinAfterWitnessesLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		all := s.group(t, 5)
		s.put(policyPath+"rolled", rolled(1, "0", object{}))
		s.wantRollout(t, all, "True Complete", 1, 1, 1, 1, 1)
		// Nodes report that they passed within a pause, including those of the last step.
		for _, m := range all {
			s.wantObserved(t, m.name, "passed", "true")
		}
		r, _ := s.rollout()
		gone := append([]any{r["first"]}, r["passed"].([]any)...)
		for _, m := range all {
			if slices.Contains(gone, any(m.name)) {
				m.stop()
				s.remove("/api/v1/nodes/" + m.name)
				s.remove(reportPath(m.name))
			}
		}
		s.put("/api/v1/nodes/late", nodeNamed("late", true))
		late := s.join(t, "late")
		s.wantRollout(t, []*member{late}, "True Complete", 1)
		if now, _ := s.rollout(); now["first"] != r["first"] {
			t.Errorf("%v began the rollout again, although other nodes have the policy", now["first"])
		}
	})
}

// reportPath is the path of a node's NodeAcceleration.
func reportPath(node string) string { return "/apis/slipstream.dev/v1alpha1/nodeaccelerations/" + node }

// wantObserved waits until an entry of a node's NodeAcceleration has a value.
func (s *api) wantObserved(t *testing.T, node, field, want string) {
	t.Helper()
	eventually(t, node+" to report "+field, func() string {
		status, _ := s.get(reportPath(node))["status"].(object)
		for _, o := range asList(status["observed"]) {
			if fmt.Sprint(o[field]) == want {
				return ""
			}
		}
		return fmt.Sprint(status)
	})
}
