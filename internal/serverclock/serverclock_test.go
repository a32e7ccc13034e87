package serverclock

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

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
	})
}
