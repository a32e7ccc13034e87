package v1alpha1

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

func TestPolicyNodes(t *testing.T) {
	for _, tt := range []struct {
		spec    AccelerationPolicySpec
		a, b    bool
		problem string
	}{
		{AccelerationPolicySpec{NodeSelector: map[string]string{"zone": "a"}}, true, false, ""},
		{AccelerationPolicySpec{All: true}, true, true, ""},
		{AccelerationPolicySpec{}, false, false, "write nodeSelector with labels that they have, or all: true for every node"},
		{AccelerationPolicySpec{NodeSelector: map[string]string{}}, false, false, "does not say which nodes"},
		{AccelerationPolicySpec{NodeSelector: map[string]string{"zone": "a"}, All: true}, false, false, "both nodeSelector and all: true"},
	} {
		s, err := tt.spec.Nodes()
		if a, b := s.Matches(labels.Set{"zone": "a"}), s.Matches(labels.Set{"zone": "b"}); a != tt.a || b != tt.b {
			t.Errorf("%+v selects a: %v, b: %v", tt.spec, a, b)
		}
		if (err == nil) != (tt.problem == "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
			t.Errorf("%+v: %v, want %q", tt.spec, err, tt.problem)
		}
	}
}

func TestPolicySteps(t *testing.T) {
	for _, tt := range []struct {
		rollout *Rollout
		percent int
		pause   time.Duration
	}{
		{nil, 10, time.Minute},
		{&Rollout{StepPercent: 50}, 50, time.Minute},
		{&Rollout{PauseSeconds: 5}, 10, 5 * time.Second},
	} {
		s := AccelerationPolicySpec{Rollout: tt.rollout}
		if percent, pause := s.Steps(); percent != tt.percent || pause != tt.pause {
			t.Errorf("%+v: %d%%, %s", tt.rollout, percent, pause)
		}
	}
}
