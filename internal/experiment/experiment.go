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

// Topology says on what networks a target runs the variants of an experiment.
type Topology interface {
	// Fabrics are those networks, in order of first use.
	Fabrics() []target.Fabric
	// FabricOf is the index of the one that a variant runs on.
	FabricOf(v v1alpha1.Variant) int
}

// Target makes the networks of a topology.
type Target interface {
	Network(ctx context.Context, fabric int) (Network, error)
}

// Network is nodes and pods. It goes, and leaves nothing, with Close.
type Network interface {
	Setup() target.Setup
	// Places are the nodes first, in order, then the pods of each.
	Places() []target.Place
	// Pair says where the ends of pair i of a variant's trials are, for traffic of a version of IP.
	Pair(v v1alpha1.Variant, i, ip int) (target.Pair, error)
	// Worker starts a worker in a place, for a use of it. A place may have several.
	Worker(ctx context.Context, p target.Place, use target.Use) (Worker, error)
	Close(ctx context.Context) error
}

// Returning is a network with places that may drop off and come back, as machines do that restart.
type Returning interface {
	// Await connects again to places that do not answer, so that one that was away costs the trial that it
	// dropped off in, and no other. If it is patient, it waits some minutes until they are back, and else tries once.
	Await(ctx context.Context, patient bool) error
}

// Changing is a network whose services change while trials of some variants run.
type Changing interface {
	// Change replaces so many endpoints a second as the variant asks for, until stop, which returns how many were.
	Change(ctx context.Context, v v1alpha1.Variant) (perSecond int, stop func() (made int, err error), err error)
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
	// Alive asks the worker for an answer. Gone reports, without asking, whether its stream has ended.
	Alive(ctx context.Context) error
	Gone() bool
	Close() error
}

// Results keeps trials, and the name of the variant whose switch is made, "" for none.
// Both methods return once what they keep is safe.
type Results interface {
	Append(record.Trial) error
	Switched(variant string) error
}

// Commands runs a command, a program and its arguments. The error of one that exited with a
// code has a method ExitCode.
type Commands func(ctx context.Context, argv []string) error

// Event is progress: a trial that begins, moves or ends.
type Event struct {
	Kind EventKind
	// Trial as it begins; for Ends, as it is recorded.
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
