// Package experiment runs a comparison: plan → trials → records → restored. It
// owns the interfaces that it needs from a target and its workers, imports
// neither, and judges nothing (see internal/stats).
package experiment

import (
	"context"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/target"
)

// Target makes the networks that variants run on.
type Target interface {
	// Network makes nodes joined by NICs of a profile, with pods behind an
	// overlay of a shape, so many on each node, and the fabric's services in front of
	// those that are served.
	Network(ctx context.Context, f Fabric, pods int, served target.Served) (Network, error)
}

// Network is nodes and pods. It goes, and leaves nothing, with Close.
type Network interface {
	// Places are the nodes first, in order, then the pods of each.
	Places() []target.Place
	// Placement says in a sentence where the nodes' work runs.
	Placement() string
	// Worker starts a worker in a place, for a use of it. A place may have several.
	Worker(ctx context.Context, p target.Place, use target.Use) (Worker, error)
	Close(ctx context.Context) error
}

// Worker acts in one place. Its methods but Close may be called side by side.
type Worker interface {
	Describe(ctx context.Context, p target.Place) (record.Node, error)
	Serve(ctx context.Context, t target.Traffic, ready target.Ready) (record.Endpoint, error)
	Drive(ctx context.Context, t target.Traffic, ready target.Ready, progress func(bytes, messages uint64)) (record.Endpoint, error)
	// Sample takes counters at both edges of a window, which ends with duration or, if
	// that comes first, when early is closed; it may be nil.
	Sample(ctx context.Context, place string, cpus bool, warmup, duration time.Duration, early <-chan struct{}, ready target.Ready) (record.Sample, error)
	Apply(ctx context.Context, s target.Steering) ([]record.Setting, error)
	Revert(ctx context.Context) ([]record.Setting, error)
	// Gone tells whether the worker has died.
	Gone() bool
	Close() error
}

// Results keeps trials. Append returns once the trial is safe.
type Results interface {
	Append(record.Trial) error
}

// Fabric is what tells one network of a target from another. A cluster has one
// network, and the zero Fabric is its.
type Fabric struct {
	Shape string
	NIC   v1alpha1.NIC
	// Nodes that a lab has.
	Nodes int
	// Service is of no mode where there are none.
	Service v1alpha1.Service
	// Balancer has no backends where there is none; so many Pairs use it at a time.
	Balancer v1alpha1.Balancer
	Pairs    int
}

// Event is progress: a trial that begins, moves or ends.
type Event struct {
	Kind EventKind
	// Trial as far as it is known.
	Trial record.Trial
	// Done trials and how many there are to be, and the time left.
	Done, Total int
	Left        time.Duration
	// Bytes and Messages moved so far in this trial, over all pairs.
	Bytes, Messages uint64
	// Text of a Note.
	Text string
}

// EventKind says what an Event is about.
type EventKind int

const (
	// Note is a line for a person: Text.
	Note EventKind = iota
	// Begins, Moves and Ends are a trial's.
	Begins
	Moves
	Ends
)
