//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/pprof/profile"
)

// work is the API server's CPU time in a phase, by kind of work, in samples of its profile.
type work struct {
	// Patches are PATCH requests, by which agents write; Others are all other requests.
	Patches int64 `json:"patches"`
	Others  int64 `json:"others"`
	// Watches is the work of sending events. Filters are the steps that every request passes: authentication, priority, audit.
	Watches int64 `json:"watches"`
	Filters int64 `json:"filters"`
	// Connections is HTTP/2 and TLS. Rest belongs to no request: garbage collection, caches, the client of etcd.
	Connections int64 `json:"connections"`
	Rest        int64 `json:"rest"`
}

// count adds a sample to the most specific kind of work in its stack.
func (w *work) count(s *profile.Sample) {
	kinds := []struct {
		functions []string
		samples   *int64
	}{
		{[]string{"handlers.(*WatchServer).", "cacher.(*cacheWatcher).", "cacher.(*Cacher).dispatchEvent"}, &w.Watches},
		{[]string{"handlers.PatchResource", "handlers.(*patcher)."}, &w.Patches},
		{[]string{"apiserver/pkg/endpoints/handlers."}, &w.Others},
		{[]string{"http2.(*serverConn).runHandler", "net/http.HandlerFunc.ServeHTTP"}, &w.Filters},
		{[]string{"http2.(*serverConn)."}, &w.Connections},
	}
	for _, k := range kinds {
		for _, f := range k.functions {
			if names(s, f) {
				*k.samples += s.Value[0]
				return
			}
		}
	}
	w.Rest += s.Value[0]
}

// names reports whether the stack of a sample contains a function whose name contains text.
func names(s *profile.Sample, text string) bool {
	for _, l := range s.Location {
		for _, line := range l.Line {
			if strings.Contains(line.Function.Name, text) {
				return true
			}
		}
	}
	return false
}

// framesPerRequest is the number of HTTP/2 frames of a request: headers and data in each direction. An event of a watch
// is one frame.
const framesPerRequest = 4

// agentsShare returns the share of the work that the agents' traffic causes. It leaves out Rest, and so attributes it
// in the same proportion.
func (w work) agentsShare(agents, all traffic) float64 {
	frames := ratio(framesPerRequest*agents.Requests+agents.Events, framesPerRequest*all.Requests+all.Events)
	theirs := ratio(agents.Patches, all.Patches)*float64(w.Patches) + ratio(agents.Requests, all.Requests)*float64(w.Filters) +
		ratio(agents.Events, all.Events)*float64(w.Watches) + frames*float64(w.Connections)
	return theirs / float64(w.Patches+w.Others+w.Filters+w.Watches+w.Connections)
}

func ratio(part, whole int) float64 { return float64(part) / float64(max(whole, 1)) }

// profile profiles the API server for most of a phase, if that is one of the compared phases. result waits until the
// profile is complete.
func (f *fleet) profile(ctx context.Context, phase string) (result func() (*work, error)) {
	if name := strings.TrimSuffix(phase, withoutAgents); name != idleWith && name != podsWith {
		return func() (*work, error) { return nil, nil }
	}
	done := make(chan struct{})
	var w work
	var err error
	go func() {
		defer close(done)
		w, err = f.profileFor(ctx, min(f.idle, f.step, time.Minute)*4/5) // the API server must answer within a minute
	}()
	return func() (*work, error) { <-done; return &w, err }
}

func (f *fleet) profileFor(ctx context.Context, d time.Duration) (w work, err error) {
	seconds := strconv.Itoa(int(d / time.Second))
	raw, err := f.admin.Discovery().RESTClient().Get().AbsPath("/debug/pprof/profile").Param("seconds", seconds).Do(ctx).Raw()
	if err != nil {
		return w, fmt.Errorf("profile the API server: %w", err)
	}
	p, err := profile.Parse(bytes.NewReader(raw))
	if err != nil {
		return w, fmt.Errorf("read the API server's profile: %w", err)
	}
	for _, s := range p.Sample {
		w.count(s)
	}
	return w, nil
}
