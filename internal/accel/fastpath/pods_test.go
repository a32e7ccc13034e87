//go:build linux

package fastpath

import (
	"slices"
	"testing"
	"time"
)

// A pod is watched while it has connections, has its programs for a while after that, and is
// watched anew when it has one again.
func TestPods(t *testing.T) {
	const pod, other = 3, 4
	idle := time.Duration(sleepAfter) * beat
	p := pods{used: make(map[int]time.Time)}
	n := node{veths: []int{other, pod}}
	want := func(what string, all, watched []int) {
		t.Helper()
		gotAll, gotWatched := p.follow(n)
		if !slices.Equal(gotAll, all) || !slices.Equal(gotWatched, watched) {
			t.Errorf("%s: %v have programs, %v are watched, want %v and %v", what, gotAll, gotWatched, all, watched)
		}
	}
	passes := func(d time.Duration) {
		for link, at := range p.used {
			p.used[link] = at.Add(-d)
		}
	}
	uses := func(what string, anew bool) {
		t.Helper()
		if got := p.use(pod); got != anew {
			t.Errorf("%s: anew %t, want %t", what, got, anew)
		}
	}
	want("at first", nil, nil)
	uses("at first", true)
	want("it has a connection", []int{pod}, []int{pod})
	passes(idle - time.Second)
	want("it had one", []int{pod}, []int{pod})
	if p.rest() {
		t.Error("it rests")
	}
	uses("it has had one", false)
	passes(idle)
	if !p.rest() {
		t.Error("it does not rest")
	}
	want("it rests", []int{pod}, nil)
	uses("it rests", true)
	want("it has one again", []int{pod}, []int{pod})
	passes(idle + doubt)
	want("it has none", nil, nil)
	uses("it has none", true)
	n.veths = []int{other}
	want("it has gone", nil, nil)
	uses("it has gone", true)
}
