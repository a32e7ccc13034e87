package draw

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAxes: an axis over several orders of magnitude is logarithmic, and has a tick at both ends.
func TestAxes(t *testing.T) {
	var got []string
	for _, r := range []axis{linearAxis(1.3), logAxis(3, 90).thin(), logAxis(4.1, 970000).thin()} {
		text := ""
		for _, v := range r.ticks {
			text += fmt.Sprintf(" %s@%.2f", r.text(v), r.share(v))
		}
		got = append(got, text)
	}
	if diff := cmp.Diff([]string{
		" 0.0@0.00 0.2@0.14 0.4@0.29 0.6@0.43 0.8@0.57 1.0@0.71 1.2@0.86 1.4@1.00",
		" 2@0.00 5@0.23 10@0.41 20@0.59 50@0.82 100@1.00",
		" 10@0.12 100@0.30 1000@0.47 10000@0.65 100000@0.82 1000000@1.00",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNice(t *testing.T) {
	if got, want := fmt.Sprint(niceAbove(3), niceBelow(3), niceBelow(5), niceAbove(0.7)), "5 2 5 1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
