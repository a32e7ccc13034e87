//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// TestExplain checks that explain names no missing kernel feature where the fast path works.
func TestExplain(t *testing.T) {
	testenv.NeedRoot(t)
	loadForTest(t, nil)
	other := errors.New("for another reason")
	if got := explain(other); got != other {
		t.Errorf("explain says %q, but this kernel lacks nothing", got)
	}
	if got := explain(fmt.Errorf("load: %w", unix.EPERM)).Error(); !strings.Contains(got, "NET_ADMIN") {
		t.Errorf("%q does not say which capabilities are missing", got)
	}
}
