package place

import (
	"strings"
	"testing"
)

func TestTail(t *testing.T) {
	var tail Tail
	_, _ = tail.Write([]byte(strings.Repeat("x", 3*tailBytes) + "the end\n"))
	if last := tail.Last(); !strings.HasSuffix(last, "the end") || len(last) > tailBytes+2 {
		t.Errorf("tail of %d bytes: %q", len(last), last[len(last)-10:])
	}
	// The cut goes through a letter of two bytes.
	_, _ = tail.Write([]byte("µ" + strings.Repeat("x", tailBytes-1)))
	if last := tail.Last(); last != ": "+strings.Repeat("x", tailBytes-1) {
		t.Errorf("after a cut letter: %q", last[:10])
	}
}
