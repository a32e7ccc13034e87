//go:build linux

package fastpath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"slipstream.dev/bpf"
)

// A pod is watched while it has connections, has its programs for a while after that, and is
// watched anew when it has one again.
func TestPods(t *testing.T) {
	const pod, other = 3, 4
	idle := time.Duration(idleAfter) * leaseRenewal
	p := pods{used: make(map[int]time.Time), requested: make(map[netip.Addr]bool)}
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
	if p.anyIdle() {
		t.Error("it rests")
	}
	uses("it has had one", false)
	passes(idle)
	if !p.anyIdle() {
		t.Error("it does not rest")
	}
	want("it rests", []int{pod}, nil)
	uses("it rests", true)
	want("it has one again", []int{pod}, []int{pod})
	passes(idle + retryAfter)
	want("it has none", nil, nil)
	uses("it has none", true)
	n.veths = []int{other}
	want("it has gone", nil, nil)
	uses("it has gone", true)
}

// An address that leads nowhere is asked for once, and anew only after it was forgotten. Others that
// are asked for take its place, and of those that lead to pods no more than they have to.
func TestAsked(t *testing.T) {
	const pod = 3
	p := pods{used: make(map[int]time.Time), requested: make(map[netip.Addr]bool)}
	want := func(what string, a netip.Addr, link int, anew bool) {
		t.Helper()
		if gotLink, gotAnew := p.linkOf(bpf.PodKeyOf(a)); gotLink != link || gotAnew != anew {
			t.Errorf("%s: link %d, anew %t, want %d, %t", what, gotLink, gotAnew, link, anew)
		}
	}
	here, nowhere := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	six := netip.MustParseAddr("fd00::1")
	want("IPv6", six, 0, false)
	want("at first", here, 0, true)
	want("at first", nowhere, 0, true)
	want("again", nowhere, 0, false)
	if got := p.wanted(); len(got) != 2 {
		t.Errorf("%v are wanted", got)
	}
	p.follow(node{veths: []int{pod}, behind: map[netip.Addr]int{here: pod, six: pod}})
	want("a route leads there", here, pod, false)
	want("IPv6 of a neighbour", six, pod, false)
	p.use(pod)
	p.forgetRequests()
	if got := p.wanted(); !slices.Equal(got, []netip.Addr{here}) {
		t.Errorf("%v are wanted still", got)
	}
	want("forgotten", nowhere, 0, true)
	for a := nowhere; a != netip.MustParseAddr("10.0.8.0"); {
		a = a.Next()
		want("another", a, 0, true)
		if len(p.requested) > requestedMax {
			t.Fatalf("%d are asked for", len(p.requested))
		}
	}
	want("others were asked for", here, pod, false)
	if !slices.Contains(p.wanted(), here) {
		t.Errorf("%v, which leads to a pod, made room", here)
	}
	want("many were asked for", netip.MustParseAddr("10.1.0.0"), 0, true)
	if !slices.Contains(p.wanted(), netip.MustParseAddr("10.1.0.0")) {
		t.Error("the last is not wanted")
	}
}
