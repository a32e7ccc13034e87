//go:build linux

package network

import (
	"net/netip"
	"testing"
)

func TestPlus(t *testing.T) {
	for _, tt := range []struct {
		address string
		n       int
		want    string
	}{
		{"198.18.0.0", 0, "198.18.0.0"},
		{"198.18.0.0", 254, "198.18.0.254"},
		{"10.128.0.255", 1, "10.128.1.0"},
		{"10.128.0.0", 3 << 19, "10.152.0.0"},
		{"fd73:6c69:7002::ffff", 1<<16 + 2, "fd73:6c69:7002::2:1"},
	} {
		if got := Plus(netip.MustParseAddr(tt.address), tt.n); got.String() != tt.want {
			t.Errorf("%s plus %d is %s, want %s", tt.address, tt.n, got, tt.want)
		}
	}
}
