package kube

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
	"slipstream.dev/internal/testenv"
)

// TestSetConditions checks that a state that cannot be determined is Unknown, and that an
// accelerator that no policy wants has no condition.
func TestSetConditions(t *testing.T) {
	state := func(condition, status, reason string) []accel.State {
		return []accel.State{{Condition: condition, Status: status, Reason: reason}}
	}
	var all []metav1.Condition
	for _, c := range []struct {
		status agent.Status
		want   []string
	}{
		{agent.Status{Ready: true, Reason: "Applied", Accelerators: state("VF", "Unknown", "VFPresent")}, []string{"Ready True Applied", "VF Unknown VFPresent"}},
		{agent.Status{Ready: true, Reason: "Applied", Accelerators: state("VF", "True", "VFUsed")}, []string{"Ready True Applied", "VF True VFUsed"}},
		{agent.Status{Reason: "VFIdle", Accelerators: state("VF", "False", "VFIdle")}, []string{"Ready False VFIdle", "VF False VFIdle"}},
		{agent.Status{Reason: "VFAbsent", Accelerators: state("VF", "False", "VFAbsent")}, []string{"Ready False VFAbsent", "VF False VFAbsent"}},
		{agent.Status{Reason: "VFWithdrawn", Accelerators: state("VF", "False", "VFWithdrawn")}, []string{"Ready False VFWithdrawn", "VF False VFWithdrawn"}},
		{agent.Status{Ready: true, Reason: "NoDevice", Accelerators: state("VF", "Unknown", "NoDevice")}, []string{"Ready True NoDevice", "VF Unknown NoDevice"}},
		{agent.Status{Ready: true, Reason: "Applied", Accelerators: state("Fastpath", "True", "Attached")}, []string{"Ready True Applied", "Fastpath True Attached"}},
		{agent.Status{Ready: true, Reason: "Applied", Accelerators: state("Toy", "True", "Playing")}, []string{"Ready True Applied", "Toy True Playing"}},
		{agent.Status{Ready: true, Reason: "NoPolicy"}, []string{"Ready True NoPolicy"}},
	} {
		setConditions(&all, c.status, metav1.Now())
		var got []string
		for _, condition := range all {
			got = append(got, fmt.Sprint(condition.Type, " ", condition.Status, " ", condition.Reason))
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%+v: %s", c.status, diff)
		}
	}
}

// TestVF checks that an agent writes the verified state of its node's VF to the NodeAcceleration.
func TestVF(t *testing.T) {
	testenv.NeedRoot(t)
	var mu sync.Mutex
	m, share := nictest.Load(t, "netvsc-mlx5"), 0
	change := func(fn func()) {
		mu.Lock()
		defer mu.Unlock()
		fn()
	}
	nics := func() (s nic.Snapshot) {
		change(func() {
			m.Packets(t, 50_000, 50_000, share*50_000, share*50_000) // since the last snapshot
			s = m.Source().Read()
		})
		return s
	}

	s := newAPI()
	s.put(nodePath, nodeObject(object{"zone": "a"}))
	s.put(daemonPath, daemonSet())
	s.put(policyPath+"vf", policyObject("vf", 1, 1, object{"accelerate": []any{object{"vf": object{}}}, "rollout": object{"stepPercent": 100}}))
	c, desired := s.connect(t)
	testenv.EnterNamespace(t) // of the agent; the API server is outside
	dir := t.TempDir()
	a, err := agent.New(agent.Options{Node: "node0", JournalDir: filepath.Join(dir, "journal"), NetnsDirs: []string{dir},
		Verify: 50 * time.Millisecond, NICs: nics, Publish: c.Publish, Notify: c.Notify})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		all.Wait()
		a.Close()
	})
	all.Go(func() {
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	all.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case d := <-desired:
				a.Set(d)
			}
		}
	})

	want := func(vf, policy, ready string) {
		t.Helper()
		eventually(t, "condition VF is "+vf, func() string {
			status, _ := s.get(statePath)["status"].(object)
			conditions, _ := status["conditions"].([]any)
			is := map[string]string{}
			for _, o := range conditions {
				o := o.(object)
				is[fmt.Sprint(o["type"])] = fmt.Sprint(o["status"], " ", o["reason"])
			}
			observed, _ := status["observed"].([]any)
			if len(observed) == 1 {
				o := observed[0].(object)
				is["vf"] = fmt.Sprint(o["state"], " ", o["reason"], " ", o["settings"])
			}
			if is["VF"] != vf || is["vf"] != policy || is["Ready"] != ready {
				return fmt.Sprintf("%v", status)
			}
			return ""
		})
	}
	want("False VFIdle", "failed VFIdle 0", "False VFIdle")
	change(func() { share = 1 })
	want("True VFUsed", "applied Applied 0", "True Applied")
	change(func() { m.Withdraw("eth1") })
	want("False VFWithdrawn", "failed VFWithdrawn 0", "False VFWithdrawn")
	s.remove(policyPath + "vf")
	want("", "", "True NoPolicy")
}
