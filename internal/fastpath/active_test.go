//go:build linux

package fastpath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"slipstream.dev/internal/fastpath/datapath"
)

// TestPods checks that a pod's link is watched while the pod has connections, keeps its programs
// for a while after that, and is watched again with the next connection.
func TestPods(t *testing.T) {
	const pod, other = 3, 4
	idle := time.Duration(idleAfter) * leaseRenewal
	p := activePods{links: make(map[int]podLink), requested: make(map[netip.Addr]bool)}
	n := node{veths: []int{other, pod}}
	want := func(what string, all, watched []int) {
		t.Helper()
		gotAll, gotWatched := p.update(n)
		if !slices.Equal(gotAll, all) || !slices.Equal(gotWatched, watched) {
			t.Errorf("%s: links %v have programs, %v are watched, want %v and %v", what, gotAll, gotWatched, all, watched)
		}
	}
	passes := func(d time.Duration) {
		for link, l := range p.links {
			l.used = l.used.Add(-d)
			if !l.idle.IsZero() {
				l.idle = l.idle.Add(-d)
			}
			p.links[link] = l
		}
	}
	uses := func(what string, anew bool) {
		t.Helper()
		if got := p.use(pod); got != anew {
			t.Errorf("%s: new %t, want %t", what, got, anew)
		}
	}
	want("at first", nil, nil)
	uses("at first", true)
	want("with a connection", []int{pod}, []int{pod})
	passes(idle - time.Second)
	want("shortly after the connection", []int{pod}, []int{pod})
	if p.anyIdle() {
		t.Error("rest reports an idle pod")
	}
	uses("another connection", false)
	passes(idle)
	if !p.anyIdle() {
		t.Error("rest reports no idle pod")
	}
	want("idle", []int{pod}, nil)
	uses("idle", true)
	want("with a connection again", []int{pod}, []int{pod})
	passes(idle + retryAfter)
	want("found idle only now", []int{pod}, nil)
	passes(retryAfter / 2)
	want("idle for a while", []int{pod}, nil)
	passes(retryAfter / 2)
	want("long idle", nil, nil)
	uses("long idle", true)
	n.veths = []int{other}
	want("deleted", nil, nil)
	uses("deleted", true)
}

// TestAttachRequests checks that an address without a pod is looked up once, and again only after it was forgotten. Other
// requests replace its request; requests for pods are kept as long as there is room.
func TestAttachRequests(t *testing.T) {
	const pod = 3
	p := activePods{links: make(map[int]podLink), requested: make(map[netip.Addr]bool)}
	want := func(what string, a netip.Addr, link int, anew bool) {
		t.Helper()
		if gotLink, gotAnew := p.linkOf(datapath.PodKeyOf(a)); gotLink != link || gotAnew != anew {
			t.Errorf("%s: link %d, new %t, want %d, %t", what, gotLink, gotAnew, link, anew)
		}
	}
	here, nowhere := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	six := netip.MustParseAddr("fd00::1")
	want("IPv6", six, 0, false)
	want("at first", here, 0, true)
	want("at first", nowhere, 0, true)
	want("again", nowhere, 0, false)
	if got := p.wanted(); len(got) != 2 {
		t.Errorf("requested are %v", got)
	}
	p.update(node{veths: []int{pod}, podLinks: map[netip.Addr]int{here: pod, six: pod}})
	want("a route to the pod", here, pod, false)
	want("IPv6 neighbour", six, pod, false)
	p.use(pod)
	p.forgetRequests()
	if got := p.wanted(); !slices.Equal(got, []netip.Addr{here}) {
		t.Errorf("still requested are %v", got)
	}
	want("forgotten", nowhere, 0, true)
	for a := nowhere; a != netip.MustParseAddr("10.0.8.0"); {
		a = a.Next()
		want("another", a, 0, true)
		if len(p.requested) > requestedMax {
			t.Fatalf("%d requests are kept", len(p.requested))
		}
	}
	want("after other requests", here, pod, false)
	if !slices.Contains(p.wanted(), here) {
		t.Errorf("%v, the address of a pod, was evicted", here)
	}
	want("the table is full", netip.MustParseAddr("10.1.0.0"), 0, true)
	if !slices.Contains(p.wanted(), netip.MustParseAddr("10.1.0.0")) {
		t.Error("the last request is missing")
	}
}
