package experiment

import (
	"context"
	"sync"
	"time"
)

// lead is the time between the last one ready and the start, in which the start
// time reaches everyone.
const lead = 15 * time.Millisecond

// barrier holds everyone who takes part in a trial until all are ready.
type barrier struct {
	ctx     context.Context
	mu      sync.Mutex
	missing int
	open    chan struct{}
	start   time.Time
}

func newBarrier(ctx context.Context, parties int) *barrier {
	return &barrier{ctx: ctx, missing: parties, open: make(chan struct{})}
}

// ready says that one more is ready, waits for the rest, and returns the start.
func (b *barrier) ready() (time.Time, error) {
	b.mu.Lock()
	if b.missing--; b.missing == 0 {
		b.start = time.Now().Add(lead)
		close(b.open)
	}
	b.mu.Unlock()
	select {
	case <-b.open:
		return b.start, nil
	case <-b.ctx.Done():
		return time.Time{}, context.Cause(b.ctx)
	}
}
