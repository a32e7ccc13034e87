package draw

import "testing"

// TestInks: InlineSVG finds the colours by value.
func TestInks(t *testing.T) {
	seen := map[string]bool{"#000000": true} // vgsvg leaves black out
	for _, i := range inks() {
		if seen[i.light] {
			t.Errorf("colour %s of %s is taken", i.light, i.name)
		}
		seen[i.light] = true
	}
}
