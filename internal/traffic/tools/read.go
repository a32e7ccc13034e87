package tools

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
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
	// Test tells the readings of one output apart, as in "tcp_lat". It is empty if the tool has one test an output.
	Test string
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
	read func(output []byte, window time.Duration) ([]Reading, error)
}{
	{runLog, isRunLog, one(readRunLog)},
	{spec.ToolIperf3, isIperf3, one(readIperf3)},
	{spec.ToolIperf2, isIperf2, one(readIperf2)},
	{spec.ToolSockperf, isSockperf, each(sockperfHead, readSockperf)},
	{spec.ToolQperf, isQperf, readQperf},
	{spec.ToolAB, isAB, each(abHead, readAB)},
	{spec.ToolLatte, isLatte, each(latteProtocol, readLatte)},
	{mpstat, isMpstat, one(readMpstat)},
}

// Formats that no tool of an experiment has.
const (
	runLog = "run log"
	mpstat = "mpstat"
)

var errNoWindow = errors.New("it does not say how long it ran")

// NoWindow reports whether Read failed because it lacked a window.
func NoWindow(err error) bool { return errors.Is(err, errNoWindow) }

// Read recognises the format of an output by its content, and reads it. If the output does not
// say how long the run was, Read assumes that it was as long as window. Several readings are several tests.
func Read(output []byte, window time.Duration) ([]Reading, error) {
	var found []int
	for i, f := range formats {
		if f.is(output) {
			found = append(found, i)
		}
	}
	switch {
	case len(found) == 0:
		return nil, unknown(output)
	case formats[found[0]].name == runLog: // has the averages of mpstat in it
	case len(found) > 1:
		return nil, fmt.Errorf("it has the outputs of %s and %s: give a file for each", formats[found[0]].name, formats[found[1]].name)
	}
	f := formats[found[0]]
	readings, err := f.read(output, window)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	for i := range readings {
		if r := &readings[i]; r.Version == "" {
			r.Version = ParseVersion(f.name, output)
		}
		readings[i].Format = f.name
	}
	return readings, nil
}

// unknown says what an output is that Read cannot read, if it is a known tool's.
func unknown(output []byte) error {
	if bytes.Contains(output, []byte("] local ")) && bytes.Contains(output, []byte("iperf Done.")) {
		return errors.New("it is iperf3's text, which slipstream does not read: run iperf3 with -J")
	}
	first, _, _ := bytes.Cut(bytes.TrimSpace(output), []byte("\n"))
	return fmt.Errorf("it is not the output of a known tool: iperf3 -J, iperf 2, sockperf, qperf, ab, latte, mpstat, or a log of runs; it begins with %.100q", first)
}

// one makes a list of the only reading of an output.
func one(read func([]byte, time.Duration) (Reading, error)) func([]byte, time.Duration) ([]Reading, error) {
	return func(output []byte, window time.Duration) ([]Reading, error) {
		r, err := read(output, window)
		if err != nil {
			return nil, err
		}
		return []Reading{r}, nil
	}
}

// each reads the outputs of several runs that were written one after another, as a script with >> does. Each begins with
// a heading.
func each(heading *regexp.Regexp, read func([]byte, time.Duration) (Reading, error)) func([]byte, time.Duration) ([]Reading, error) {
	return one(func(output []byte, window time.Duration) (Reading, error) {
		starts := heading.FindAllIndex(output, -1)
		if len(starts) < 2 {
			return read(output, window)
		}
		var all Reading
		for i, start := range starts {
			end := len(output)
			if i+1 < len(starts) {
				end = starts[i+1][0]
			}
			line := lineOf(output, start[0])
			r, err := read(output[start[0]:end], window)
			if err == nil && i > 0 {
				err = all.add(r)
			}
			if err != nil {
				return Reading{}, fmt.Errorf("run %d, which begins in line %d: %w", i+1, line, err)
			}
			if i == 0 {
				all = r
			}
		}
		return all, nil
	})
}

// lineOf returns the number of the line that has the byte at an offset.
func lineOf(output []byte, at int) int { return 1 + bytes.Count(output[:at], []byte("\n")) }

// halfLine is the error for a last line without an end whose number may go on.
func halfLine(number int, line string) error {
	return fmt.Errorf("line %d has no line end, so its last number may be half of one: %.200q; if the file is whole, add a line end", number, line)
}

// add adds the runs of another reading, which must be of the same traffic.
func (r *Reading) add(other Reading) error {
	if differences := Merge(r.Workload, other); len(differences) > 0 {
		return fmt.Errorf("it has other traffic than run 1: %s; give a file for each", strings.Join(differences, ", "))
	}
	r.Runs = append(r.Runs, other.Runs...)
	return nil
}

// Merge makes the traffic of a workload and of a reading one, or says how they differ. A run for a number of messages may take
// any time, and the number differs if it was the time that was set.
func Merge(w spec.Workload, r Reading) (differences []string) {
	if r.Workload.Kind() != w.Kind() {
		return []string{fmt.Sprintf("%s, not %s", r.Workload.Kind(), w.Kind())}
	}
	all, own := w.Traffic(), *r.Workload.Traffic()
	if r.Counted {
		all.Duration = max(all.Duration, own.Duration)
		own.Duration = all.Duration
		if own.Requests != all.Requests || own.Iterations != all.Iterations { // one of the two ended by time
			own.Requests, all.Requests, own.Iterations, all.Iterations = 0, 0, 0, 0
		}
	}
	a, b := reflect.ValueOf(own), reflect.ValueOf(*all)
	for i := range a.NumField() {
		if !a.Field(i).Equal(b.Field(i)) {
			field, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			differences = append(differences, fmt.Sprintf("%s %v, not %v", field, a.Field(i), b.Field(i)))
		}
	}
	return differences
}
