package experiment

import (
	"context"
	"sync"
	"time"
)

// The lead is the time between the last one ready and the start, in which the
// start time reaches everyone. In a cluster it goes through the API server, the
// kubelet and the container runtime.
const (
	leadInLab     = 15 * time.Millisecond
	leadInCluster = 100 * time.Millisecond
)

// barrier holds everyone who takes part in a trial until all are ready.
type barrier struct {
	ctx     context.Context
	lead    time.Duration
	mu      sync.Mutex
	missing int
	open    chan struct{}
	start   time.Time
}

func newBarrier(ctx context.Context, parties int, lead time.Duration) *barrier {
	return &barrier{ctx: ctx, lead: lead, missing: parties, open: make(chan struct{})}
}

// ready says that one more is ready, waits for the rest, and returns the start.
func (b *barrier) ready() (time.Time, error) {
	b.mu.Lock()
	if b.missing--; b.missing == 0 {
		b.start = time.Now().Add(b.lead)
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
