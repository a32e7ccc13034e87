//go:build linux

package worker

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"slipstream.dev/internal/traffic/tools"
)

// TestLongLogs: of logs that are too long to keep, what is kept is from all of their time, and in whole lines.
func TestLongLogs(t *testing.T) {
	h, err := newHome(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.remove()
	for lines, every := range map[int]int{1000: 1, 1 << 20: 3} {
		for _, name := range []string{"a", "b"} {
			var b bytes.Buffer
			for i := range lines {
				fmt.Fprintf(&b, "%015d\n", i)
			}
			if err := os.WriteFile(filepath.Join(h.path(), tools.LogPrefix+name), b.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		end := &toolEnd{home: h, output: new(capture), argv: []string{"client"}}
		fmt.Fprintln(end.output, "its output")
		if err := end.readLogs(); err != nil {
			t.Fatal(err)
		}
		var want bytes.Buffer
		fmt.Fprintln(&want, "its output")
		for range 2 {
			for i := 0; i < lines; i += every {
				fmt.Fprintf(&want, "%015d\n", i)
			}
		}
		if got := end.output.Bytes(); !bytes.Equal(got, want.Bytes()) {
			t.Errorf("of %d lines each it keeps %d bytes, %.20q to %.20q, want %d", lines, len(got), got, got[len(got)-16:], want.Len())
		}
	}
}
