// Package serverclock tells the time of the server that a program talks to. Programs on several machines whose clocks differ
// compare times by it. It knows neither the server nor what the times are for.
package serverclock

import (
	"net/http"
	"sync/atomic"
	"time"
)

// Clock is a server's clock, to about a second. Before the first response it is this machine's. After a response it continues
// with this machine's monotonic clock: a step of the wall clock does not move it.
type Clock struct{ last atomic.Pointer[reading] }

// reading holds the time that a response had, and when it came.
type reading struct{ server, came time.Time }

// Now returns the server's time.
func (c *Clock) Now() time.Time { return c.at(time.Now()) }

// at returns the server's time at a time of this machine.
func (c *Clock) at(now time.Time) time.Time {
	last := c.last.Load()
	if last == nil {
		return now
	}
	return last.server.Add(now.Sub(last.came))
}

// Since returns the time since t by the server's clock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Future reports whether a time that the server wrote is more than two seconds ahead, which means that its clock has been set
// back since.
func (c *Clock) Future(t time.Time) bool { return c.Since(t) < -2*time.Second }

// Follow reads the time from the Date header of each response.
func (c *Clock) Follow(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		answer, err := next.RoundTrip(r)
		if err == nil {
			if at, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
				c.last.Store(&reading{at, time.Now()})
			}
		}
		return answer, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
