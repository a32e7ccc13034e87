//go:build linux

package main

import (
	"fmt"
	"strings"
	"testing"
)

// TestReport checks that the difference between the builds is exact even if the nodes differ by more.
func TestReport(t *testing.T) {
	var file strings.Builder
	line := func(build string, each float64) {
		fmt.Fprintf(&file, `{"build":%q,"programs":{"redirect_pod":{"runs":100,"time":%g},"seldom":{"runs":10,"time":%g}}}`+"\n", build, 90*each, 10*each)
	}
	for i := range 3 {
		slow := float64(i * 100)
		line("old", 1000+slow)
		line("new", 510+slow)
		line("new", 1010+slow)
		line("old", 500+slow)
	}
	builds, err := read(strings.NewReader(file.String()))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := report(&out, builds, "old", "new"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"old: 850 ns per packet\n", "new: 860 ns per packet\n", "seldom", "new - old: 10 (10 to 10) ns per packet, n = 3\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if err := report(&out, builds[:10], "old", "new"); err == nil {
		t.Error("half a pair of periods is taken")
	}
	if err := report(&out, builds, "old", "newer"); err == nil {
		t.Error("a build that is not there is taken")
	}
}
