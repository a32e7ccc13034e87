package number

import (
	"math"
	"testing"
)

func TestFormats(t *testing.T) {
	all := Interval{math.Inf(-1), math.Inf(1)}
	for got, want := range map[string]string{
		Format(0.861, Interval{0.84, 0.88}, 2).String():          "0.86 (0.84–0.88)",
		Format(0.861, all, 2).String():                           "0.86",
		Format(0.861, Of([2]float64{0.84, 0.88}, 1), 2).String(): "0.86",
		Format(-4.2, Interval{-6, 3}, 0).String():                "−4 (−6 to +3)",
		Percent(0.41, Interval{0.39, 0.43}).With("%"):            "41% (39–43)",
		Format(1.234, all, 1).With("Gb/s"):                       "1.2 Gb/s",
		Share(0.5):                                               "50%",
		Percent(0.9965, Interval{0.994, 0.999}).String():         "99.7 (99.4–99.9)",
		Format(2, Interval{0.25, 0.5}.Inverse(), 0).String():     "2 (2–4)",
		Fixed(-0.001, 2):                                         "0.00",
		Fixed(math.NaN(), 2):                                     "–",
		Significant(0.012345):                                    "0.0123",
		Significant(1234.5):                                      "1234",
		PValue(0.0004):                                           "< 0.001",
		PValue(0.0456):                                           "0.046",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
