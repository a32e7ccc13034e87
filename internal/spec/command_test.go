package spec

import (
	"slices"
	"testing"
)

func TestCommandText(t *testing.T) {
	for _, c := range []struct {
		argv []string
		want string
	}{
		{[]string{"ethtool", "-K", "eth0"}, "ethtool -K eth0"},
		{[]string{"sh", "-c", "id > x"}, "sh -c 'id > x'"},
		{[]string{"", "it's", `a\b`, "ü"}, `'' 'it'\''s' 'a\b' 'ü'`},
	} {
		if got := CommandText(c.argv); got != c.want {
			t.Errorf("%q is shown as %s, want %s", c.argv, got, c.want)
		}
		if got, err := CommandWords(c.want); err != nil || !slices.Equal(got, c.argv) {
			t.Errorf("%s has the words %q, %v, want %q", c.want, got, err, c.argv)
		}
	}
	if words, err := CommandWords("run 'a b"); err == nil {
		t.Errorf("a quote that does not end: %q", words)
	}
}
