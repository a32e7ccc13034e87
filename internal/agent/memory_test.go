package agent

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadOnly(t *testing.T) {
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
	if err := shrink(); err != nil {
		t.Fatal(err)
	}
	if text != strings.Repeat("written", 1000) {
		t.Error("memory was lost")
	}
}
