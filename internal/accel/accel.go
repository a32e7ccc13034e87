// Package accel applies accelerators to the place in which it runs, and reverts them: rps, rfs and fastpath, and for an agent
// vf. It finds the devices, computes the value for each receive queue, writes it through internal/accel/journal, which records
// the old value first, and reads it back. However the process ends, Recover restores the original settings.
//
// Each accelerator is a Kind, in a file of its own (rps.go, rfs.go, fast.go, vf.go). Everything else, here and in the users of
// this package, treats them alike.
//
// An Applier applies accelerators for a limited time, all or nothing, and reverts them: for an experiment or a person. A Keeper
// is told the wanted state again and again and establishes it: for an agent. Both belong to the network namespace of the thread
// that opens them, and can then be used from any thread.
//
// The package measures nothing: internal/experiment finds out whether an accelerator helps. internal/worker uses it in the
// places of an experiment, internal/agent on a node, and internal/cli on the local machine.
package accel

import (
	"log/slog"
	"time"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/place"
)

// Options configures an Applier, a Keeper, Recover and Status.
type Options struct {
	// Place describes the place. Its kind determines the classes of the devices. Its CPUs and IRQCPUs, if set, are those of the
	// node.
	Place place.Place
	// Sys and Proc are the roots of a sysfs and a procfs. If Sys is empty, a private sysfs of this network namespace is
	// mounted. If Proc is empty, it is /proc.
	Sys, Proc string
	// JournalDir is the folder of the journal. A machine has one.
	JournalDir string
	// Owner is the name of the holder of the settings in the journal.
	Owner string
	// Persistent settings stay until a process with the same Owner reverts them. Others belong to this process: once it has
	// ended, Recover restores them.
	Persistent bool
	// Kinds maps the fields of the API to the kinds of accelerators; Kinds() if nil.
	Kinds map[string]Kind
	// NICs reads the NICs of the node, whose virtual functions are verified; it is called at most twice per Verify. Notify
	// receives events about them. Only a Keeper needs these.
	NICs   func() nic.Snapshot
	Verify time.Duration
	Notify func(Event)
	// Log may be nil.
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
