// Package accel applies accelerators to the place it runs in, and takes them
// back: rps, rfs and fastpath, and for an agent vf. It finds the devices, works out
// what each receive queue should read, has internal/accel/journal write that down and
// then to the kernel, and reads it back. However the process ends, Recover restores the
// original settings.
//
// An accelerator is a Kind, in a file of its own (rps.go, rfs.go, fast.go, vf.go). All
// else, here and in the users of this package, handles them alike.
//
// An Applier applies for a time, all or nothing, and reverts: for an experiment, and
// for a person. A Keeper is told again and again what is wanted, and makes it so: for
// an agent. Both belong to the network namespace of the thread that opens them, and
// can be used from any thread afterwards.
//
// It measures nothing and judges nothing; whether an accelerator helps is for
// internal/experiment to find out. internal/worker runs it where an experiment's
// places are, internal/agent on a node, internal/cli on the machine itself.
package accel

import (
	"log/slog"
	"time"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/target"
)

// Options of an Applier, of a Keeper, of Recover and of Status.
type Options struct {
	// Place is what it is. Its kind tells which classes the devices
	// are of; its CPUs and IRQCPUs, where set, are the node's.
	Place target.Place
	// Sys and Proc are roots. Sys is mounted privately if empty, so that it shows
	// this network namespace; Proc is /proc if empty.
	Sys, Proc string
	// JournalDir keeps what was changed; one for the whole machine.
	JournalDir string
	// Owner says in the journal who holds the settings.
	Owner string
	// Persistent settings are held by the owner until one of the same owner
	// reverts them; others end, for Recover, with the process.
	Persistent bool
	// Kinds are the accelerators that there are, by their fields in the API; Kinds() if nil.
	Kinds map[string]Kind
	// NICs reads the NICs of a node whose virtual functions are verified, at most twice in Verify. Notify gets what
	// happens to them. Only a Keeper needs these.
	NICs   func() nic.Snapshot
	Verify time.Duration
	Notify func(Event)
	// Log gets what happens to devices that appear later; nothing if nil.
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
