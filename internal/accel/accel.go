// Package accel applies accelerators to the place it runs in, and takes them back: rps, rfs and
// fastpath, and for an agent vf. It finds the devices, works out the value that each receive queue
// should have, writes it through internal/accel/journal, which records the old value first, and
// reads it back. However the process ends, Recover restores the original settings.
//
// An accelerator is a Kind, in a file of its own (rps.go, rfs.go, fast.go, vf.go). All
// else, here and in the users of this package, handles them alike.
//
// An Applier applies for a time, all or nothing, and reverts: for an experiment, and for a person.
// A Keeper gets the wanted state again and again and establishes it: for an agent. Both belong to
// the network namespace of the thread that opens them, and can be used from any thread afterwards.
//
// The package measures nothing and judges nothing: internal/experiment finds
// out whether an accelerator helps. internal/worker runs it where an
// experiment's places are, internal/agent on a node, internal/cli on the
// machine itself.
package accel

import (
	"log/slog"
	"time"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/place"
)

// Options configures an Applier, a Keeper, Recover and Status.
type Options struct {
	// Place describes the place. Its kind decides the classes of the devices;
	// its CPUs and IRQCPUs, if set, are the node's.
	Place place.Place
	// Sys and Proc are the roots of a sysfs and a procfs. Sys is mounted
	// privately if empty, so that it shows this network namespace; Proc is
	// /proc if empty.
	Sys, Proc string
	// JournalDir is the folder of the journal. A machine has one.
	JournalDir string
	// Owner is the name under which the journal records the holder of the settings.
	Owner string
	// Persistent settings stay until a process with the same Owner reverts
	// them. Others belong to the process: once it has ended, Recover restores
	// them.
	Persistent bool
	// Kinds maps the fields of the API to the kinds of accelerators; Kinds() if nil.
	Kinds map[string]Kind
	// NICs reads the NICs of a node whose virtual functions are verified, at most twice in Verify. Notify receives events about
	// them. Only a Keeper needs these.
	NICs   func() nic.Snapshot
	Verify time.Duration
	Notify func(Event)
	// Log receives a record for each device that appears, changes its name or goes away later;
	// nothing is logged if nil.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Proc == "" {
		o.Proc = "/proc"
	}
	if o.Kinds == nil {
		o.Kinds = Kinds()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}
