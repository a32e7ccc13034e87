package cli

import (
	"context"
	"fmt"
	"time"

	"slipstream.dev/internal/doctor"
)

// lookHere looks at this machine.
func lookHere(ctx context.Context, window time.Duration, probe bool) (doctor.Facts, error) {
	f, err := doctor.Look(ctx, window, probe)
	if err != nil {
		return f, fmt.Errorf("look at this machine: %w", err)
	}
	return f, nil
}
