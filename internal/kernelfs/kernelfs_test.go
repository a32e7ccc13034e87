package kernelfs

import (
	"testing"
	"testing/fstest"
)

func TestRead(t *testing.T) {
	root := fstest.MapFS{
		"state": {Data: []byte("up\n")},
		"mtu":   {Data: []byte("1450\n")},
		"speed": {Data: []byte("-1\n")},
	}
	for name, want := range map[string]string{"state": "up", "mtu": "1450", "speed": "-1", "absent": ""} {
		if got := Text(root, name); got != want {
			t.Errorf("%s has %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]uint64{"state": 0, "mtu": 1450, "speed": 0, "absent": 0} {
		if got := Number(root, name); got != want {
			t.Errorf("%s has %d, want %d", name, got, want)
		}
	}
}
