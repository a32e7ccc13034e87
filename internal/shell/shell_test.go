package shell

import (
	"slices"
	"testing"
)

func TestJoin(t *testing.T) {
	for _, c := range []struct {
		argv []string
		want string
	}{
		{[]string{"ethtool", "-K", "eth0"}, "ethtool -K eth0"},
		{[]string{"sh", "-c", "id > x"}, "sh -c 'id > x'"},
		{[]string{"", "it's", `a\b`, "ü"}, `'' 'it'\''s' 'a\b' 'ü'`},
	} {
		if got := Join(c.argv); got != c.want {
			t.Errorf("%q is shown as %s, want %s", c.argv, got, c.want)
		}
		if got, err := Split(c.want); err != nil || !slices.Equal(got, c.argv) {
			t.Errorf("%s has the words %q, %v, want %q", c.want, got, err, c.argv)
		}
	}
	if words, err := Split("run 'a b"); err == nil {
		t.Errorf("a quote that does not end: %q", words)
	}
}
