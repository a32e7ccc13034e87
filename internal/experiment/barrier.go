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

// barrier holds the tasks of a trial until all are ready, and knows which ones are
// awaited. The lead is the time between the moment when the last task is ready and
// the start. It must suffice for the start time to reach all tasks.
type barrier struct {
	ctx  context.Context
	lead time.Duration
	open chan struct{}

	mu    sync.Mutex
	start time.Time
	// unready and running have the tasks by name, each with the function that
	// ends it.
	unready, running map[string]func(error)
}

func newBarrier(ctx context.Context, lead time.Duration) *barrier {
	return &barrier{ctx: ctx, lead: lead, open: make(chan struct{}), unready: make(map[string]func(error)), running: make(map[string]func(error))}
}

// expect adds a task, and the function that ends it. All tasks must be added before
// the first is ready.
func (b *barrier) expect(who string, end func(error)) { b.unready[who] = end }

// ready marks a task as ready, waits until all others are too or ctx ends, and
// returns the start time.
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

// arrived removes a task from those that are awaited, and starts all if it was the
// last.
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

// done marks a task as ended, so that nobody waits for it. A task that ends because
// the barrier's context has ended stays, so that awaited names it.
func (b *barrier) done(who string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() == nil {
		delete(b.running, who)
		b.arrived(who)
	}
}

// endUnready ends the tasks that are not ready.
func (b *barrier) endUnready(why string) { b.end(b.unready, why) }

// endRunning ends the tasks that were ready and have not ended.
func (b *barrier) endRunning(why string) { b.end(b.running, why) }

func (b *barrier) end(late map[string]func(error), why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for who, end := range late {
		end(fmt.Errorf("%s %s", who, why))
	}
}

// awaited names the tasks that keep the others waiting.
func (b *barrier) awaited() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.unready) > 0 {
		return "not ready: " + firstNames(b.unready)
	}
	return "still running: " + firstNames(b.running)
}

// firstNames lists the first few names, and counts the rest.
func firstNames[T any](all map[string]T) string {
	names := slices.Sorted(maps.Keys(all))
	shown := names[:min(4, len(names))]
	text := strings.Join(shown, ", ")
	if n := len(names) - len(shown); n > 0 {
		text += fmt.Sprintf(", and %d more", n)
	}
	return text
}
