package process

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLoading: a refusal to load programs is not blamed on a limit that does not exist. Other errors keep their words.
func TestLoading(t *testing.T) {
	explain := Loading()
	refused := explain(fmt.Errorf("map create: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", unix.EPERM))
	if !errors.Is(refused, unix.EPERM) || strings.Contains(refused.Error(), "rlimit") {
		t.Errorf("refused: %v", refused)
	}
	if err := explain(unix.E2BIG); !errors.Is(err, unix.E2BIG) {
		t.Errorf("another error: %v", err)
	}
	if err := explain(nil); err != nil {
		t.Errorf("no error: %v", err)
	}
}
