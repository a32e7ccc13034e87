package tools

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Reading has what the output of a tool says by itself, whoever ran it.
type Reading struct {
	// Format is the tool, or what else wrote it. Version is the tool's, if the output tells.
	Format, Version string
	// Workload, without a name, has what the output says about it, and zero where it says
	// nothing. It has no traffic if the output is of CPUs alone.
	Workload spec.Workload
	// Counted means that a run lasted for a number of messages, not for a time.
	Counted bool
	Runs    []Run
}

// Run is one run of a tool.
type Run struct {
	Started time.Time         // zero if the output does not tell
	Pairs   []record.Endpoint // clients
	// CPUs of a node, as in a window of one second.
	CPUs []record.CPU
}

// formats has all formats that Read knows, in the order in which it tries them.
var formats = []struct {
	name string
	is   func(output []byte) bool
	read func(output []byte, window time.Duration) (Reading, error)
}{
	{"run log", isRunLog, readRunLog}, // has the averages of mpstat in it
	{spec.ToolIperf3, isIperf3, readIperf3},
	{spec.ToolIperf2, isIperf2, readIperf2},
	{spec.ToolSockperf, isSockperf, readSockperf},
	{spec.ToolQperf, isQperf, readQperf},
	{spec.ToolAB, isAB, readAB},
	{spec.ToolLatte, isLatte, readLatte},
	{"mpstat", isMpstat, readMpstat},
}

var errNoWindow = errors.New("it does not say how long it ran")

// NoWindow reports whether Read failed because it lacked a window.
func NoWindow(err error) bool { return errors.Is(err, errNoWindow) }

// Read recognises the format of an output by its content, and reads it. If the output does not
// say how long the run was, Read assumes that it was as long as window.
func Read(output []byte, window time.Duration) (Reading, error) {
	for _, f := range formats {
		if !f.is(output) {
			continue
		}
		r, err := f.read(output, window)
		if err != nil {
			return Reading{}, fmt.Errorf("%s: %w", f.name, err)
		}
		if r.Format = f.name; r.Version == "" {
			r.Version = ParseVersion(f.name, output)
		}
		return r, nil
	}
	if bytes.Contains(output, []byte("] local ")) && bytes.Contains(output, []byte("iperf Done.")) {
		return Reading{}, errors.New("it is iperf3's text, which slipstream does not read: run iperf3 with -J")
	}
	return Reading{}, errors.New("it is not the output of a known tool: iperf3 -J, iperf 2, sockperf, qperf, ab, latte, mpstat, or a log of runs")
}
