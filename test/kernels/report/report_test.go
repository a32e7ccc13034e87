package report

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFind(t *testing.T) {
	said := []byte("[    1.2] Linux\r\n" + Mark + `{"release":"6.1","unsupported":"it lacks \"x\""}` + "\r\n[    9.9] Power down\r\n")
	got, err := Find(said)
	if want := (Report{Release: "6.1", Unsupported: `it lacks "x"`}); err != nil || !cmp.Equal(got, want) {
		t.Errorf("found %+v, %v, want %+v", got, err, want)
	}
	for _, said := range []string{"", "no report", Mark + `{"release":"6.1"}`, Mark + `{"release":"6.1"`, Mark + "{\n"} {
		if got, err := Find([]byte(said)); err == nil {
			t.Errorf("%q: found %+v, want an error", said, got)
		}
	}
}

func FuzzFind(f *testing.F) {
	f.Add([]byte(Mark + `{"release":"6.1","tests":[{"name":"x"}]}` + "\n"))
	f.Fuzz(func(_ *testing.T, said []byte) { _, _ = Find(said) })
}
