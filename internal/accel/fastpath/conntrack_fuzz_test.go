//go:build linux

package fastpath

import "testing"

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
