//go:build linux

package fastpath

import (
	"testing"
	"time"
)

// TestTimeoutOfIdleConnection checks that the timeout which an idle connection has left is exact to half a
// second: conntrack rounds down what it tells.
func TestTimeoutOfIdleConnection(t *testing.T) {
	for _, tt := range []struct {
		begun uint32
		idle  time.Duration
		want  uint32
	}{
		{432_000, 1400 * time.Millisecond, 431_999}, {432_000, 1600 * time.Millisecond, 431_998}, {431_999, 1600 * time.Millisecond, 431_998},
		{300, 10 * time.Second, 290}, {300, time.Hour, 0},
	} {
		if got := (&ctEntry{timeout: tt.begun}).timeoutAfter(tt.idle, 432_000); got != tt.want {
			t.Errorf("%d s after %v idle are %d s, want %d", tt.begun, tt.idle, got, tt.want)
		}
	}
}

// FuzzParseCTEntry checks that any netlink message is parsed as a conntrack entry or rejected.
func FuzzParseCTEntry(f *testing.F) {
	nested := func(kind byte, inner ...byte) []byte {
		return append([]byte{byte(len(inner) + 4), 0, kind, 0x80}, inner...)
	}
	tuple := func(kind byte) []byte {
		return nested(kind, append(nested(ctaTupleIP, 8, 0, ctaIPv4Src, 0, 10, 0, 0, 1), nested(ctaTupleProto, 6, 0, ctaProtoSrcPort, 0, 1, 2, 0, 0)...)...)
	}
	whole := append([]byte{2, 0, 0, 0}, tuple(ctaTupleOrig)...)
	whole = append(whole, tuple(ctaTupleReply)...)
	whole = append(whole, nested(ctaProtoInfo, nested(ctaProtoInfoTCP, 5, 0, ctaTCPState, 0, 3, 0, 0, 0, 6, 0, ctaTCPFlagsOriginal, 0, 0x23, 0, 0, 0)...)...)
	f.Add(whole)
	f.Add(whole[:9])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		is, err := parseCTEntry(b)
		if (is == nil) == (err == nil) {
			t.Errorf("%x is %v, error %v", b, is, err)
		}
		if len(b) < 4 && err == nil {
			t.Errorf("%x is %v", b, is)
		}
	})
}
