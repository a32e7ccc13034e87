package worker

import (
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// TestPipeDeadline checks that a pipe is closed at its deadline, but not at one that was cleared.
func TestPipeDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		p := newPipe(r, w)
		for _, at := range []time.Time{time.Now().Add(time.Minute), {}} {
			if err := p.SetDeadline(at); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Hour)
		if p.closed() {
			t.Error("it is closed without a deadline")
		}
		if err := p.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Second)
		if p.closed() {
			t.Error("it is closed before the deadline")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if !p.closed() {
			t.Error("it is not closed at the deadline")
		}
	})
}

// TestReadyOnce checks that a worker's second report that it is ready is refused.
func TestReadyOnce(t *testing.T) {
	calls := 0
	worker := readiness{ready: func(uint16) (time.Time, error) {
		calls++
		return time.Time{}, nil
	}}
	if _, err := worker.pass(1); err != nil {
		t.Error(err)
	}
	if _, err := worker.pass(1); err == nil {
		t.Error("the second call has no error")
	}
	if calls != 1 {
		t.Errorf("%d calls came through", calls)
	}
}
