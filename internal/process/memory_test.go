//go:build linux

package process

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

func TestShrink(t *testing.T) {
	const maps = `00400000-016a3000 r-xp 00000000 fe:00 1234 /slipstream
016a3000-03a00000 r--p 012a3000 fe:00 1234 /slipstream
03a00000-03b00000 rw-p 03600000 fe:00 1234 /slipstream
03d00000-03e00000 r--s 00000000 fe:00 1234 /slipstream
03b00000-03c00000 rw-p 00000000 00:00 0
7f0000000000-7f0000001000 r--p 00000000 fe:00 99 /usr/lib/other
7f0000001000-7f0000002000 r-xp 00000000 00:00 0 [vdso]
`
	got, err := mappings(strings.NewReader(maps), "/slipstream")
	want := []mapping{{0x400000, 0x16a3000, 0, false}, {0x16a3000, 0x3a00000, 0x12a3000, false}, {0x3a00000, 0x3b00000, 0x3600000, true}}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(mapping{})); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	if got, err := mappings(strings.NewReader("beef-dead r-xp 0 fe:00 1 /slipstream\nbeef-bad r-xp 0 fe:00 1 /slipstream\n"), "/slipstream"); err == nil {
		t.Errorf("addresses that make no sense: %v", got)
	}
	// What was given back is still usable: this very code, and data written before.
	text := strings.Repeat("written", 1000)
	before := mappedFiles(t)
	if err := Shrink(); err != nil {
		t.Fatal(err)
	}
	if after := mappedFiles(t); after > before*3/4 {
		t.Errorf("%d KiB of the program are resident, of %d before", after, before)
	}
	if text != strings.Repeat("written", 1000) {
		t.Error("memory was lost")
	}
}

// TestCollectAtRest: garbage is collected at rest if there is enough of it, and at any time if there is very
// much.
func TestCollectAtRest(t *testing.T) {
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(-1)
	defer func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	}()
	collections := func() uint32 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.NumGC
	}
	discard := func(mib int) {
		for range mib {
			garbage = make([]byte, 1<<20)
		}
	}
	rest := func() {
		if err := Rest(); err != nil {
			t.Fatal(err)
		}
	}
	discard(16)
	runtime.GC()
	CollectAtRest()
	before := collections()
	rest()
	discard(16)
	if n := collections() - before; n != 0 {
		t.Errorf("%d collections of little, or in the midst of things", n)
	}
	rest()
	rest()
	if n := collections() - before; n != 1 {
		t.Errorf("%d collections at rest, want 1", n)
	}
	discard(256)
	if n := collections() - before; n < 2 {
		t.Error("no collection of 256 MiB")
	}

	before = collections()
	end := Collecting()
	for made := 0; made < 64 && collections()-before < 2; made += 4 { // a busy machine collects late
		discard(4)
	}
	if n := collections() - before; n < 2 {
		t.Errorf("%d collections of what makes 64 MiB of garbage", n)
	}
	end()
	before = collections()
	rest()
	discard(16)
	if n := collections() - before; n != 0 {
		t.Errorf("%d collections at rest of what had been collected, or in the midst of things again", n)
	}
}

var garbage []byte

// TestGCRequests: requests may overlap in any order. A measurement has Go's own settings, and after the last
// request the settings at rest are back.
func TestGCRequests(t *testing.T) {
	rest, eager, usual := gcSettings{-1, restLimit}, gcSettings{collectAt, restLimit}, gcSettings{100, math.MaxInt64}
	before := rest.set()
	defer before.set()
	end := make(map[string]func())
	for _, step := range []struct {
		what string
		do   func()
		want gcSettings
	}{
		{"something eager", func() { end["eager"] = Collecting() }, eager},
		{"a measurement beside it", func() { end["first"] = CollectingAsUsual() }, usual},
		{"another", func() { end["second"] = CollectingAsUsual() }, usual},
		{"the end of the first", func() { end["first"]() }, usual},
		{"the end of the second", func() { end["second"]() }, eager},
		{"a third", func() { end["third"] = CollectingAsUsual() }, usual},
		{"the end of what is eager", func() { end["eager"]() }, usual},
		{"the end of the third", func() { end["third"]() }, rest},
	} {
		step.do()
		got := gcSettings{-1, -1}.set()
		if got.set(); got != step.want {
			t.Errorf("%s: garbage is collected by %v, want %v", step.what, got, step.want)
		}
	}
}

// TestKeepProgram: kept pages are not given back, not even pages that this process has not mapped yet.
func TestKeepProgram(t *testing.T) {
	testenv.NeedRoot(t)
	ranges, err := program()
	if err != nil || len(ranges) == 0 {
		t.Fatal(ranges, err)
	}
	if err := KeepProgram(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munlockall(); err != nil { // the other tests give pages back
			t.Error(err)
		}
	}()
	file, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	// Pages that are not on the disk yet would stay in the page cache, locked or not.
	if err := errors.Join(file.Sync(), unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	size := 0
	for _, r := range ranges {
		size += int(r.to-r.from) >> 10
		data, err := unix.Mmap(int(file.Fd()), r.offset, int(r.to-r.from), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		there := make([]byte, (len(data)+os.Getpagesize()-1)/os.Getpagesize())
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(data))), uintptr(len(data)), uintptr(unsafe.Pointer(unsafe.SliceData(there))))
		if errno != 0 {
			t.Fatal(errno)
		}
		if err := unix.Munmap(data); err != nil {
			t.Error(err)
		}
		if gone := bytes.Count(there, []byte{0}); gone > 0 {
			t.Errorf("%d of %d pages at %#x of the program are not in memory", gone, len(there), r.offset)
		}
	}
	if locked := status(t, "VmLck"); locked < size {
		t.Errorf("%d KiB are locked, of %d", locked, size)
	}
}

// mappedFiles returns how much of the files that this process maps is in its memory, in KiB.
func mappedFiles(t *testing.T) (kib int) {
	t.Helper()
	return status(t, "RssFile")
}

func status(t *testing.T, key string) (kib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(text), "\n"+key+":")
	if _, err := fmt.Sscanf(line, "%d kB", &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}
