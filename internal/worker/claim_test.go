//go:build linux

package worker

import (
	"testing"
	"time"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// TestClaimForControl checks that a worker for control waits until its predecessor, of this run or of another one,
// has ended.
func TestClaimForControl(t *testing.T) {
	testenv.NeedRoot(t)
	t.Parallel()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	claim := func(run string, yield func()) (release func(), err error) {
		err = netns.Do(ns, func() (err error) {
			release, err = Claim(true, run, "somebody", yield)
			return err
		})
		return release, err
	}
	yielded := make(chan struct{}, 1000)
	release, err := claim("mine", func() { yielded <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range []string{"mine", "another"} {
		got := make(chan func(), 1)
		go func() {
			next, err := claim(run, func() { yielded <- struct{}{} })
			if err != nil {
				t.Error(err)
				next = func() {}
			}
			got <- next
		}()
		if run == "mine" {
			<-yielded
		}
		select {
		case <-got:
			t.Fatal("the claim is given before the predecessor has released it")
		case <-time.After(100 * time.Millisecond): // it tries every 20 ms
		}
		release()
		release = <-got
	}
	release()
}
