package experiment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
)

// In a mesh every trial has traffic on every node, so one bad node would fail every trial. Therefore such a
// trial consists of parts that fail separately: one for each pair, and one for the sampler of each node.

// part is a part of a trial that fails as a whole. ends are those of its workers.
type part struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	ends   []end
}

// newPart returns the part for the next pair or sampler. Without a mesh, that is the whole trial.
func (m *measurement) newPart() *part {
	if m.cell.Round == 0 {
		return m.whole
	}
	p := new(part)
	p.ctx, p.cancel = context.WithCancelCause(m.whole.ctx)
	m.parts = append(m.parts, p)
	return p
}

// Limits for a pair of a mesh: how long it may take to get ready, in addition to Cell.preparation, and to end after its traffic.
const (
	readyTime = 10 * time.Second
	endTime   = 5 * time.Second
)

// hurry ends the pairs that keep the others waiting. It does so until stop is called.
func (m *measurement) hurry() (stop func()) {
	ready := readyTime + m.cell.preparation()
	start := time.AfterFunc(ready, func() { m.gate.endUnready(fmt.Sprintf("was not ready after %s", ready)) })
	end := time.AfterFunc(ready+endTime+m.cell.time(), func() { m.gate.endRunning(fmt.Sprintf("had not ended %s after its traffic", endTime)) })
	return func() { start.Stop(); end.Stop() }
}

// noteFailures records which parts of a mesh's trial failed, and why. It is an error if no pair is left.
func (m *measurement) noteFailures(pairs []pairEnds) error {
	lost := 0
	var last error
	for i, p := range m.parts {
		err := context.Cause(p.ctx)
		if err == nil {
			continue
		}
		if i >= len(pairs) {
			m.out.Warnings = append(m.out.Warnings, record.Warnf(record.WarnFailedPairs, "a node was not sampled: %v", err))
			continue
		}
		client, server := pairs[i].client.place, pairs[i].servers[0].place
		m.out.PerPair[i] = record.Pair{Client: record.Endpoint{Place: client.Name}, Server: record.Endpoint{Place: server.Name}, Error: err.Error()}
		m.out.Warnings = append(m.out.Warnings, record.Warnf(record.WarnFailedPairs, "the pair %s → %s failed: %v", client.Node, server.Node, err))
		if errors.Is(err, place.ErrLost) {
			lost++
		}
		last = err
	}
	if slices.ContainsFunc(m.out.PerPair, func(p record.Pair) bool { return p.Error == "" }) {
		return nil
	}
	if _, stalled := errors.AsType[record.StalledError](last); lost < len(pairs) && !stalled { // otherwise the target itself is lost
		last = errors.New(last.Error())
	}
	return fmt.Errorf("every pair failed, the last one: %w", last)
}
