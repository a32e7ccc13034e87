package serverclock

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/testenv"
)

// TestStep: a step of this machine's wall clock does not move the clock.
func TestStep(t *testing.T) {
	var c Clock
	c.last.Store(&reading{time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC), time.Now()})
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		now := time.Now()
		if got := c.at(testenv.Stepped(now, step)); !got.Equal(c.at(now)) {
			t.Errorf("after a step of %s it is %s, want %s", step, got, c.at(now))
		}
	}
}

// TestClock: the clock is this machine's until a response says otherwise, and then the server's. A response without a valid
// date changes nothing.
func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		var date string
		next := roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{Header: http.Header{"Date": {date}}, Body: http.NoBody}, nil
		})
		for _, step := range []struct {
			date string
			want time.Duration // ahead of this machine
		}{
			{"", 0},
			{time.Now().UTC().Add(-5 * time.Minute).Format(http.TimeFormat), -5 * time.Minute},
			{"yesterday", -5 * time.Minute},
			{time.Now().UTC().Add(72 * time.Hour).Format(http.TimeFormat), 72 * time.Hour},
		} {
			date = step.date
			answer, err := c.Follow(next).RoundTrip(&http.Request{})
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			if got := time.Until(c.Now()); got != step.want {
				t.Errorf("after the date %q the clock is ahead by %s, want %s", step.date, got, step.want)
			}
		}
		then := c.Now()
		time.Sleep(time.Minute)
		if got := c.Since(then); got != time.Minute {
			t.Errorf("a minute took %s", got)
		}
		if now := c.Now(); c.Future(now.Add(time.Second)) || !c.Future(now.Add(time.Minute)) {
			t.Error("a second is the future, or a minute is not")
		}
	})
}
