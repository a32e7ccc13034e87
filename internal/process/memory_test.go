//go:build linux

package process

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestShrink(t *testing.T) {
	const maps = `00400000-016a3000 r-xp 00000000 fe:00 1234 /slipstream
016a3000-03a00000 r--p 012a3000 fe:00 1234 /slipstream
03a00000-03b00000 rw-p 03600000 fe:00 1234 /slipstream
03b00000-03c00000 rw-p 00000000 00:00 0
7f0000000000-7f0000001000 r--p 00000000 fe:00 99 /usr/lib/other
7f0000001000-7f0000002000 r-xp 00000000 00:00 0 [vdso]
`
	got, err := readOnly(strings.NewReader(maps), "/slipstream")
	if d := cmp.Diff([]addresses{{0x400000, 0x16a3000}, {0x16a3000, 0x3a00000}}, got, cmp.AllowUnexported(addresses{})); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	if got, err := readOnly(strings.NewReader("beef-dead r-xp 0 fe:00 1 /slipstream\nbeef-bad r-xp 0 fe:00 1 /slipstream\n"), "/slipstream"); err == nil {
		t.Errorf("addresses that make no sense: %v", got)
	}
	// What was given back comes back: this very code, and what was written before.
	text := strings.Repeat("written", 1000)
	before := resident(t)
	if err := Shrink(); err != nil {
		t.Fatal(err)
	}
	if after := resident(t); after > before*3/4 {
		t.Errorf("%d KiB of the program are resident, of %d before", after, before)
	}
	if text != strings.Repeat("written", 1000) {
		t.Error("memory was lost")
	}
}

// resident is how much of the files that this process maps is in its memory, KiB.
func resident(t *testing.T) (kib int) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(status), "\nRssFile:")
	if _, err := fmt.Sscanf(line, "%d kB", &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}
