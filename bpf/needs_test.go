//go:build linux

package bpf

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestExplain checks that explain names no missing kernel feature where the fast path works.
func TestExplain(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	loadForTest(t, nil)
	other := errors.New("for another reason")
	if got := explain(other); got != other {
		t.Errorf("explain says %q, but this kernel lacks nothing", got)
	}
	if got := explain(fmt.Errorf("load: %w", unix.EPERM)).Error(); !strings.Contains(got, "NET_ADMIN") {
		t.Errorf("%q does not say which capabilities are missing", got)
	}
}
