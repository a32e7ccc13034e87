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

// work is the API server's CPU time in a phase, in samples of its profile, by what it was spent on.
type work struct {
	// Patches are requests of that kind, by which agents write; Others are all other requests.
	Patches int64 `json:"patches"`
	Others  int64 `json:"others"`
	// Watches is sending events, Filters what every request passes: authentication, priority, audit.
	Watches int64 `json:"watches"`
	Filters int64 `json:"filters"`
	// Connections is HTTP/2 and TLS, Rest what belongs to no request: garbage collection, caches, the client of etcd.
	Connections int64 `json:"connections"`
	Rest        int64 `json:"rest"`
}

// count adds a sample to the most specific work that its stack names.
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

// names reports whether a function whose name contains text is in the stack of a sample.
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

// framesPerRequest in HTTP/2: headers and data, there and back. An event of a watch is one.
const framesPerRequest = 4

// agentsShare is the part of the work that the agents' traffic causes. Rest counts for agents in the same proportion.
func (w work) agentsShare(agents, all traffic) float64 {
	frames := ratio(framesPerRequest*agents.Requests+agents.Events, framesPerRequest*all.Requests+all.Events)
	theirs := ratio(agents.Patches, all.Patches)*float64(w.Patches) + ratio(agents.Requests, all.Requests)*float64(w.Filters) +
		ratio(agents.Events, all.Events)*float64(w.Watches) + frames*float64(w.Connections)
	return theirs / float64(w.Patches+w.Others+w.Filters+w.Watches+w.Connections)
}

func ratio(part, whole int) float64 { return float64(part) / float64(max(whole, 1)) }

// profile profiles the API server for most of a phase, if the phase is one of those that are compared. result waits for the end.
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
