//go:build linux

package ethtool

import (
	"maps"
	"runtime"
	"testing"
	"unsafe"
)

// TestCallerStackIsFull calls the library from goroutines whose stacks become full
// at different places in it.
func TestCallerStackIsFull(t *testing.T) {
	tool, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer tool.Close()
	all, err := tool.Features("lo")
	if err != nil || len(all) == 0 {
		t.Fatalf("%d offloads of lo: %v", len(all), err)
	}
	step := 1
	if testing.Short() {
		step = 20
	}
	for depth := 0; depth < 2000; depth += step {
		done := make(chan map[string]FeatureState)
		go below(depth, func() {
			got, err := tool.Features("lo")
			if err != nil {
				t.Error(err)
			}
			done <- got
		})
		if got := <-done; !maps.Equal(got, all) {
			t.Errorf("%d calls deep: %d offloads, want %d", depth, len(got), len(all))
		}
	}
}

// below calls f from depth further calls down the stack.
//
//go:noinline
func below(depth int, f func()) {
	if depth == 0 {
		f()
		return
	}
	below(depth-1, f)
}

func TestStackDoesNotMove(t *testing.T) {
	onSteadyStack(func() {
		var local int
		before := uintptr(unsafe.Pointer(&local))
		use36K()
		if now := uintptr(unsafe.Pointer(&local)); now != before {
			t.Errorf("it grew: %#x, then %#x", before, now)
		}
		before = uintptr(unsafe.Pointer(&local))
		runtime.GC()
		if now := uintptr(unsafe.Pointer(&local)); now != before {
			t.Errorf("it shrank: %#x, then %#x", before, now)
		}
	})
}

//go:noinline
func use36K() {
	var room [36 << 10]byte
	runtime.KeepAlive(&room)
}
