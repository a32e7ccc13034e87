package worker

import (
	"context"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/place"
)

// TestAwaitRoom checks when conntrack has room for the connections of a trial, on simulated time.
func TestAwaitRoom(t *testing.T) {
	for name, tt := range map[string]struct {
		connections uint64
		limit, used string
		// later is the number of entries in use after a minute.
		later string
		wait  time.Duration
		want  string
	}{
		"room":                  {connections: 50_000, limit: "262144", used: "10000"},
		"unknown number":        {limit: "1000", used: "1000"},
		"no conntrack":          {connections: 50_000},
		"entries that end":      {connections: 50_000, limit: "131072", used: "100000", later: "70000", wait: time.Minute},
		"entries that stay":     {connections: 50_000, limit: "131072", used: "100000", wait: place.RoomWait, want: "100000 of 131072 entries are in use"},
		"a table that is small": {connections: 50_000, limit: "32768", want: "set fewer requests, or raise the limit on the nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				root := fstest.MapFS{}
				if tt.limit != "" {
					root["nf_conntrack_max"] = &fstest.MapFile{Data: []byte(tt.limit)}
					root["nf_conntrack_count"] = &fstest.MapFile{Data: []byte(tt.used)}
				}
				if tt.later != "" {
					time.AfterFunc(time.Minute, func() { root["nf_conntrack_count"] = &fstest.MapFile{Data: []byte(tt.later)} })
				}
				began := time.Now()
				err := awaitRoom(context.Background(), root, tt.connections)
				if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
					t.Errorf("error %v, want %q", err, tt.want)
				}
				if took := time.Since(began); took < tt.wait || took > tt.wait+roomEvery {
					t.Errorf("waited for %s, want %s", took, tt.wait)
				}
			})
		})
	}
}
