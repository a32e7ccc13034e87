package doctor

import (
	"encoding/binary"
	"testing"
)

// FuzzLegacyTable checks that a table of iptables can be read to its end, whatever is in it.
func FuzzLegacyTable(f *testing.F) {
	entry := make([]byte, ruleMinimum+8)
	binary.NativeEndian.PutUint16(entry[88:], ipEntrySize)
	binary.NativeEndian.PutUint16(entry[90:], uint16(len(entry)))
	f.Add(entry, 0)
	f.Fuzz(func(_ *testing.T, b []byte, at int) {
		t := legacyTable(b)
		_ = t.kubeChain()
		_ = t.opens(at, isCNI, make(map[int]bool))
	})
}

// FuzzPolicyCounter checks that messages about chains are parsed, whatever is in them.
func FuzzPolicyCounter(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0, 'f', 0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) { _, _, _ = policyCounter(b) })
}
