// Package serverclock tells the time of the server that a program talks to. Programs on several machines whose clocks differ
// compare times by it. It knows neither the server nor what the times are for.
package serverclock

import (
	"net/http"
	"sync/atomic"
	"time"
)

// Clock is a server's clock, to about a second. Before the first response it is this machine's.
type Clock struct{ ahead atomic.Int64 }

// Now returns the server's time.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Since returns the time since t by the server's clock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Follow reads the time from the Date header of each response.
func (c *Clock) Follow(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		answer, err := next.RoundTrip(r)
		if err == nil {
			if at, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
				c.ahead.Store(int64(time.Until(at)))
			}
		}
		return answer, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
