package words

import "testing"

func TestWords(t *testing.T) {
	abc := []string{"a", "b", "c"}
	for _, c := range []struct{ got, want string }{
		{Count(0, "pair"), "0 pairs"},
		{Count(1, "pair"), "1 pair"},
		{Count(2, "pair"), "2 pairs"},
		{And(nil), ""},
		{And(abc[:1]), "a"},
		{And(abc[:2]), "a and b"},
		{And(abc), "a, b and c"},
		{Or(abc[:1]), "a"},
		{Or(abc), "a, b or c"},
		{First(nil, 2), ""},
		{First(abc, 3), "a, b, c"},
		{First(abc, 2), "a, b and 1 more"},
		{First(abc, 1), "a and 2 more"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
