package journal

import (
	"errors"
	"fmt"
	"io"
	"testing"
)

// TestOnlyChanged checks that OnlyChanged is false if an error contains any other error beside
// ErrChanged.
func TestOnlyChanged(t *testing.T) {
	changed := fmt.Errorf("restore x: %w", fmt.Errorf("%w: it reads 1", ErrChanged))
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{changed, true},
		{errors.Join(changed, changed), true},
		{fmt.Errorf("recover: %w", errors.Join(changed, nil)), true},
		{io.EOF, false},
		{errors.Join(changed, io.EOF), false},
		{fmt.Errorf("%w: %w", changed, io.EOF), false},
		{fmt.Errorf("recover: %w", errors.Join(errors.Join(io.EOF), changed)), false},
	} {
		if got := OnlyChanged(tt.err); got != tt.want {
			t.Errorf("%v: %t", tt.err, got)
		}
	}
}
