package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"slipstream.dev/internal/testenv"
)

// TestUnreadRules checks that a failure to read rules is a fact, and that missing rights are none.
func TestUnreadRules(t *testing.T) {
	var f filters
	f.failed("nft ip f gone", nil)
	f.failed("nft ip f gone", fmt.Errorf("list: %w", fs.ErrPermission))
	f.failed("nft ip f gone", errors.New("no such file or directory"))
	known := Facts{Unread: f.unread}.Known()
	if n := slices.Index(known, Evidence{"rules of nft ip f gone were not read", "no such file or directory"}); n < 0 || len(f.unread) != 1 {
		t.Errorf("%+v", known)
	}
}

// TestATableThatIsMissing checks that doctor looks on if it cannot read a table of iptables.
func TestATableThatIsMissing(t *testing.T) {
	testenv.EnterNamespace(t)
	run(t, "nft 'add table ip f; add chain ip f fw { type filter hook forward priority 0; policy drop; }'")
	l := looker{proc: fstest.MapFS{own + "/net/ip_tables_names": &fstest.MapFile{Data: []byte("missing\n")}}}
	f := l.filters(isCNI)
	if len(f.chains) != 1 || len(f.unread) != 1 || !strings.Contains(f.unread[0].Value, "read table missing of iptables") {
		t.Errorf("%+v", f)
	}
}

// FuzzLegacyTable checks that a table of iptables can be read to its end, whatever is in it.
func FuzzLegacyTable(f *testing.F) {
	entry := make([]byte, ruleMinimum+8)
	binary.NativeEndian.PutUint16(entry[88:], ipEntrySize)
	binary.NativeEndian.PutUint16(entry[90:], uint16(len(entry)))
	f.Add(entry, 0)
	f.Fuzz(func(_ *testing.T, b []byte, at int) {
		t := legacyTable(b)
		_ = t.kubeChain()
		_, _ = t.opens(at, isCNI, make(map[int]bool))
	})
}

// FuzzPolicyCounter checks that messages about chains are parsed, whatever is in them.
func FuzzPolicyCounter(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0, 'f', 0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) { _, _, _ = policyCounter(b) })
}
