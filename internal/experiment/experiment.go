// Package experiment runs a comparison: plan → trials → records → restored. It
// owns the interfaces that it needs from a target and its workers, and imports
// neither. It judges whether a trial counts; figures are for internal/stats.
package experiment

import (
	"context"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Target makes the networks of an experiment's topology.
type Target interface {
	Network(ctx context.Context, fabric int) (Network, error)
}

// Network is a set of nodes and pods. Close removes it, and leaves nothing behind.
type Network interface {
	Setup() place.Setup
	// Places returns the nodes, in order, and then the pods of each.
	Places() []place.Place
	// Pair returns where the ends of pair i of a variant's trials are, for traffic of an IP version.
	Pair(v spec.Variant, i, ip int) (place.Pair, error)
	// Worker starts a worker in a place, for a use of it. A place may have several.
	Worker(ctx context.Context, p place.Place, use place.Use) (Worker, error)
	Close(ctx context.Context) error
}

// Reconnector is a Network whose machines may become unreachable and come back, for example because they
// restart.
type Reconnector interface {
	// Await connects again to places that do not answer, so that an outage costs only the trial in which
	// it began. If patient is set, it waits some minutes for them; otherwise it tries once.
	Await(ctx context.Context, patient bool) error
}

// EndpointChanger is a Network that replaces endpoints of its services while trials of some variants run.
type EndpointChanger interface {
	// Change replaces endpoints at the rate that the variant asks for, and returns that rate, until stop
	// is called. stop returns how many endpoints were replaced.
	Change(ctx context.Context, v spec.Variant) (perSecond int, stop func() (made int, err error), err error)
}

// Clustered is a Network that is a cluster.
type Clustered interface {
	// Cluster reads what the cluster is now. Its nodes have the given facts.
	Cluster(ctx context.Context, nodes []record.Node) (record.Cluster, error)
}

// Slow is a Network whose connections to workers pass through a server.
type Slow interface {
	// Slow returns an error if the server answers slowly, or not at all.
	Slow(ctx context.Context) error
}

// Worker acts in one place. All methods except Close may be called concurrently.
type Worker interface {
	Describe(ctx context.Context, p place.Place) (record.Node, error)
	Serve(ctx context.Context, t place.Traffic, ready place.Ready) (record.Endpoint, error)
	Drive(ctx context.Context, t place.Traffic, ready place.Ready, progress func(bytes, messages uint64)) (record.Endpoint, error)
	// Sample reads counters at both edges of a window.
	Sample(ctx context.Context, s place.Sampling, ready place.Ready) (record.Sample, error)
	Apply(ctx context.Context, s place.Steering) ([]record.Setting, error)
	// Revert reverts Apply, or what a dead worker has applied. It returns the settings that were in force, also with a
	// place.ChangedError.
	Revert(ctx context.Context) ([]record.Setting, error)
	// Alive asks the worker for an answer. Gone reports, without asking, whether its stream has ended.
	Alive(ctx context.Context) error
	Gone() bool
	Close() error
}

// Results keeps trials, and the name of the variant that is switched on, "" for none. Both methods return once
// what they keep is safe on disk. Wanted returns what somebody wants the run to do.
type Results interface {
	Append(record.Trial) error
	Switched(variant string) error
	Wanted() (record.Wanted, error)
}

// RunCommand runs a command, a program and its arguments. The error of one that exited with a
// code has a method ExitCode.
type RunCommand func(ctx context.Context, argv []string) error

// Event reports the progress of a run: a trial begins, moves data or ends.
type Event struct {
	Kind EventKind
	// Trial as it begins or, for Ends, as it is recorded.
	Trial record.Trial
	// Done counts the trials that have ended, and Total all trials. Left is about the time that the rest
	// takes.
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
	// Begins, Moves and Ends concern a trial.
	Begins
	Moves
	Ends
)
