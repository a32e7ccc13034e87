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

// TestHomes checks when the address of a pod counts as moved: once, when its last link has gone and another has it.
func TestHomes(t *testing.T) {
	address := netip.MustParseAddr("10.0.0.2")
	scanned := func(link int, links ...int) node {
		n := node{names: make(map[int]string), podLinks: make(map[netip.Addr]int)}
		for _, l := range links {
			n.names[l] = "veth"
		}
		if link != 0 {
			n.podLinks[address] = link
			n.podLinks[netip.MustParseAddr("ff02::16")] = links[len(links)-1]
		}
		return n
	}
	h := make(homes)
	for i, step := range []struct {
		node
		moved bool
	}{
		{scanned(1, 1, 2), false}, {scanned(1, 1), false}, // the multicast address stays with another pod
		{scanned(2, 1, 2), false}, // another pod takes the address
		{scanned(0, 1), false}, {scanned(0, 1, 3), false}, {scanned(3, 1, 3), true}, {scanned(3, 1, 3), false},
		{scanned(0, 1), false}, {scanned(3, 1, 3), false}, // the node knows it again
		{scanned(4, 4), true},
	} {
		if is := h.moved(step.node); is != step.moved {
			t.Errorf("step %d: moved %v", i, is)
		}
	}
	flow := datapath.Flow{Pod: netip.AddrPortFrom(address, 1), Peer: netip.MustParseAddrPort("10.0.1.2:80")}
	h.prune(scanned(0), map[datapath.Flow]datapath.Activity{flow: {}})
	h.prune(scanned(0), map[datapath.Flow]datapath.Activity{{}: {Link: 4}})
	h.prune(scanned(4, 4), nil)
	if len(h) != 1 {
		t.Error("an address that is needed is forgotten")
	}
	if h.prune(scanned(0), nil); len(h) != 0 {
		t.Error("an address without a pod and flows is kept")
	}
}
