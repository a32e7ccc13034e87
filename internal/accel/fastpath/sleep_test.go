//go:build linux

package fastpath_test

import (
	"fmt"
	"slices"
	"testing"

	"slipstream.dev/internal/accel/fastpath"
)

// programs are the kinds of programs that are attached on a node.
func (w *world) programs(node int) string {
	var kinds []string
	for _, h := range w.paths[node].Hooks() {
		kinds = append(kinds, h.Program)
	}
	slices.Sort(kinds)
	return fmt.Sprint(slices.Compact(kinds))
}

// While no connection is worth it there are only the programs that see when one is.
func TestSleep(t *testing.T) {
	defer fastpath.SleepAfter(fastpath.SleepAfter(8))
	const asleep, awake = "[arrive leave]", "[arrive deliver land leave tunnel wire]"
	w := newWorld(t, "flannel", "full")
	w.start()
	want := func(programs string) {
		t.Helper()
		w.eventually("programs "+programs, func() {}, func() bool { return w.programs(0) == programs && w.programs(1) == programs })
	}
	want(asleep)
	for range 3 {
		e := w.connect().back()
		if err := e.trip(patience); err != nil {
			t.Fatal(err)
		}
		e.Close()
		e.far.Close()
	}
	want(asleep)
	for range 2 {
		e := w.connect().back()
		w.warm(e)
		want(awake)
		// One that becomes known as they fall asleep does not stay without them.
		for _, f := range w.paths {
			f.Sleep()
		}
		want(asleep)
		w.warm(e)
		want(awake)
		e.Close()
		e.far.Close()
		want(asleep)
	}
}
