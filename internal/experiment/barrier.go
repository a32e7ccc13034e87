package experiment

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// barrier holds everyone who takes part in a trial until all are ready, and knows
// who is awaited. The lead is the time between the last one ready and the start, in
// which the start time reaches everyone.
type barrier struct {
	ctx  context.Context
	lead time.Duration
	open chan struct{}

	mu    sync.Mutex
	start time.Time
	// unready and running are names of those who take part.
	unready, running map[string]bool
}

func newBarrier(ctx context.Context, lead time.Duration) *barrier {
	return &barrier{ctx: ctx, lead: lead, open: make(chan struct{}), unready: make(map[string]bool), running: make(map[string]bool)}
}

// expect adds one who takes part. All are there before the first is ready.
func (b *barrier) expect(who string) { b.unready[who] = true }

// ready says that one more is ready, waits for the rest, and returns the start.
func (b *barrier) ready(who string) (time.Time, error) {
	if b.ctx.Err() != nil {
		return time.Time{}, context.Cause(b.ctx)
	}
	b.mu.Lock()
	delete(b.unready, who)
	b.running[who] = true
	if len(b.unready) == 0 {
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

// done says that one has ended. Those whom the end of the context ends stay.
func (b *barrier) done(who string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() == nil {
		delete(b.running, who)
	}
}

// awaited says who has kept the others waiting.
func (b *barrier) awaited() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.unready) > 0 {
		return "not ready: " + some(b.unready)
	}
	return "still running: " + some(b.running)
}

// some names the first few, and counts the rest.
func some(all map[string]bool) string {
	names := slices.Sorted(maps.Keys(all))
	shown := names[:min(4, len(names))]
	text := strings.Join(shown, ", ")
	if n := len(names) - len(shown); n > 0 {
		text += fmt.Sprintf(", and %d more", n)
	}
	return text
}
