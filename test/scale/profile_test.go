//go:build linux

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/pprof/profile"
)

func sampleOf(n int64, functions ...string) *profile.Sample {
	s := &profile.Sample{Value: []int64{n, 0}}
	for _, f := range functions {
		s.Location = append(s.Location, &profile.Location{Line: []profile.Line{{Function: &profile.Function{Name: f}}}})
	}
	return s
}

// TestWork checks that a sample counts for the most specific function in its stack, wherever that is.
func TestWork(t *testing.T) {
	const (
		request = "golang.org/x/net/http2.(*serverConn).runHandler"
		patch   = "k8s.io/apiserver/pkg/endpoints/handlers.PatchResource.func1"
		update  = "k8s.io/apiserver/pkg/endpoints/handlers.UpdateResource.func1"
		watch   = "k8s.io/apiserver/pkg/endpoints/handlers.(*WatchServer).HandleHTTP"
	)
	var w work
	for _, s := range []*profile.Sample{
		sampleOf(1, "runtime.mallocgc", patch, request),
		sampleOf(2, "syscall.Syscall", update, request),
		sampleOf(4, watch, request),
		sampleOf(8, "k8s.io/apiserver/pkg/storage/cacher.(*cacheWatcher).process"),
		sampleOf(16, "k8s.io/apiserver/pkg/endpoints/filters.withAuthentication.func1", request),
		sampleOf(32, "crypto/tls.(*Conn).Write", "golang.org/x/net/http2.(*serverConn).writeFrameAsync"),
		sampleOf(64, "runtime.gcDrain", "runtime.gcBgMarkWorker"),
	} {
		w.count(s)
	}
	if d := cmp.Diff(work{Patches: 1, Others: 2, Watches: 12, Filters: 16, Connections: 32, Rest: 64}, w); d != "" {
		t.Error(d)
	}
}

// TestAgentsShare checks that each kind of work is divided by the traffic that causes it, and that the rest is left
// out.
func TestAgentsShare(t *testing.T) {
	w := work{Patches: 10, Others: 90, Watches: 20, Filters: 40, Connections: 60, Rest: 1000}
	// A tenth of the requests, four fifths of the patches, half of the events: 10*4+50 of 100*4+100 frames.
	got := w.agentsShare(traffic{10, 8, 50}, traffic{100, 10, 100})
	if want := (10*0.8 + 40*0.1 + 20*0.5 + 60*90.0/500) / 220; got != want {
		t.Errorf("got %g, want %g", got, want)
	}
	if got := w.agentsShare(traffic{}, traffic{}); got != 0 {
		t.Errorf("without traffic %g", got)
	}
}
