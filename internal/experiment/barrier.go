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
	// unready and running are those who take part, by name, each with what ends it.
	unready, running map[string]func(error)
}

func newBarrier(ctx context.Context, lead time.Duration) *barrier {
	return &barrier{ctx: ctx, lead: lead, open: make(chan struct{}), unready: make(map[string]func(error)), running: make(map[string]func(error))}
}

// expect adds one who takes part, and what ends it. All are there before the first is ready.
func (b *barrier) expect(who string, end func(error)) { b.unready[who] = end }

// ready says that one more is ready, waits for the rest until ctx ends, and returns the start.
func (b *barrier) ready(ctx context.Context, who string) (time.Time, error) {
	if ctx.Err() != nil {
		return time.Time{}, context.Cause(ctx)
	}
	b.mu.Lock()
	b.running[who] = b.unready[who]
	b.arrived(who)
	b.mu.Unlock()
	select {
	case <-b.open:
		return b.start, nil
	case <-ctx.Done():
		return time.Time{}, context.Cause(ctx)
	}
}

// arrived takes one from those who are awaited, and starts the others if it was the last.
func (b *barrier) arrived(who string) {
	if _, awaited := b.unready[who]; !awaited {
		return
	}
	delete(b.unready, who)
	if len(b.unready) == 0 {
		b.start = time.Now().Add(b.lead)
		close(b.open)
	}
}

// done says that one has ended, so nobody waits for it. Those whom the end of the context ends stay.
func (b *barrier) done(who string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() == nil {
		delete(b.running, who)
		b.arrived(who)
	}
}

// endUnready ends those who are not ready.
func (b *barrier) endUnready(why string) { b.end(b.unready, why) }

// endRunning ends those who are ready and have not ended.
func (b *barrier) endRunning(why string) { b.end(b.running, why) }

func (b *barrier) end(late map[string]func(error), why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for who, end := range late {
		end(fmt.Errorf("%s %s", who, why))
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
func some[T any](all map[string]T) string {
	names := slices.Sorted(maps.Keys(all))
	shown := names[:min(4, len(names))]
	text := strings.Join(shown, ", ")
	if n := len(names) - len(shown); n > 0 {
		text += fmt.Sprintf(", and %d more", n)
	}
	return text
}
