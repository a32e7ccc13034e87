package tools

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Reading holds what the output of a tool says by itself, whoever ran the tool.
type Reading struct {
	// Format is the tool, a variant of it, or what else wrote the output. Version is that of the tool, if the output has it.
	Format, Version string
	// Workload has no name. It holds what the output says about the traffic, and zero values for the rest. If the output is
	// only about CPUs, there is no traffic.
	Workload spec.Workload
	// Conditions are further properties of the traffic, by name, such as its direction. Those that the output does not tell are
	// missing.
	Conditions map[string]string
	// Test distinguishes the readings of one output, such as "tcp_lat". It is empty if an output of the tool has only one test.
	Test string
	// Counted means that a run had a set number of messages instead of a duration. Late means that a run did not end after the
	// set duration but when the last data had arrived, which may be some seconds later.
	Counted, Late bool
	Runs          []Run
	// Copies is the number of duplicate runs, which are left out.
	Copies int
}

// Names of conditions.
const (
	Direction = "direction"
	RateLimit = "rate limit"
	TLS       = "TLS"
	HTTP      = "HTTP"
	// Client distinguishes clients that no experiment runs.
	Client = "client"
)

// Values of conditions.
const (
	Forward = "forward" // the client sends
	Reverse = "reverse" // the server sends
	NoLimit = "none"
	NoTLS   = "none"
	AnyTLS  = "of unknown version"
	HTTP1   = "1.1"
)

// Run is one run of a tool.
type Run struct {
	// ID is the same for two outputs of the same run, and different for all others. It is empty if the output has so few digits
	// that two runs may have the same.
	ID      string
	Started time.Time         // zero if unknown
	Pairs   []record.Endpoint // clients
	// CPUs are those of a node, as in a window of one second.
	CPUs []record.CPU
}

// Known holds what the user knows about an output.
type Known struct {
	// Window is the length of each run, for outputs that do not tell.
	Window time.Duration
	// Kind is the kind of the workload, or another text.
	Kind string
}

// format is a format of outputs that Read can read.
type format struct {
	name string
	is   func(output []byte) bool
	read func(output []byte, known Known) ([]Reading, error)
}

// formats lists all formats, in the order in which Read tries them.
var formats = []format{
	{runLog, isRunLog, one(readRunLog)},
	{spec.ToolIperf3, isIperf3, one(readIperf3)},
	{spec.ToolIperf2, isIperf2, readIperf2},
	{spec.ToolSockperf, isSockperf, each(sockperfHead, sockperfFigure, readSockperf)},
	{spec.ToolQperf, isQperf, readQperf},
	{spec.ToolAB, isAB, each(abHead, abAnyFigure, readAB)},
	{spec.ToolLatte, isLatte, each(latteProtocol, latteAnyFigure, readLatte)},
	{wrkFormat, isWrk, each(wrkHead, wrkFigure, readWrk)},
	{fortio, isFortio, one(readFortio)},
	{k6, isK6, one(readK6)},
	{mpstat, isMpstat, one(readMpstat)},
}

// Formats of tools that no experiment runs.
const (
	runLog = "run log"
	mpstat = "mpstat"
)

var errNoWindow = errors.New("it does not say how long it ran")

// NoWindow reports whether Read failed because it lacked a window.
func NoWindow(err error) bool { return errors.Is(err, errNoWindow) }

// Read recognises the format of an output by its content, and reads it. It returns a reading for each test.
func Read(output []byte, known Known) ([]Reading, error) {
	var found []format
	for _, f := range formats {
		if f.is(output) {
			found = append(found, f)
		}
	}
	switch {
	case len(found) == 0:
		return nil, unknown(output)
	case found[0].name == runLog: // contains averages of mpstat
	case len(found) > 1:
		return nil, fmt.Errorf("it has the outputs of %s and %s: give a file for each", found[0].name, found[1].name)
	}
	f := found[0]
	if err := foreign(output); err != nil && f.name != runLog {
		return nil, err
	}
	readings, err := f.read(output, known)
	if err != nil {
		if _, other := f.read(quoted.ReplaceAll(output, nil), known); other == nil {
			err = errQuoted
		}
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	for i := range readings {
		if r := &readings[i]; r.Version == "" {
			r.Version = ParseVersion(f.name, output)
		}
		readings[i].Format = cmp.Or(readings[i].Format, f.name)
		if err := readings[i].consistent(); err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		readings[i].unique(output)
	}
	return readings, nil
}

// latencies are the percentiles in ascending order, each with the largest multiple of the mean that it can be: half of all
// round trips take at least the median, so the median is at most twice the mean (Markov's inequality).
var latencies = []struct {
	name  string
	times float64
}{{metrics.LatencyP50, 2}, {metrics.LatencyP99, 100}, {metrics.LatencyP999, 1000}}

// consistent returns an error if a percentile of a run contradicts the mean or a higher percentile, as in an edited output. ab
// rounds percentiles to milliseconds. fortio interpolates percentiles, which may contradict each other.
func (r *Reading) consistent() error {
	slack := map[string]float64{spec.ToolAB: 1e-3, wrkFormat: 0, wrk2: 0, spec.ToolSockperf: 0}
	rounding, ok := slack[r.Format]
	if !ok {
		return nil
	}
	for _, run := range r.Runs {
		for _, pair := range run.Pairs {
			least := 0.0
			for _, l := range latencies {
				v, has := pair.Percentiles[l.name]
				mean, known := pair.Percentiles[metrics.LatencyMean]
				if has && (1.01*v+rounding < least || known && v > l.times*1.01*mean+rounding) {
					return fmt.Errorf("its latencies contradict each other: the percentile %s of %g s, the one before it of %g s and the mean of %g s; give the output as it was printed", l.name, v, least, mean)
				}
				least = max(least, v)
			}
		}
	}
	return nil
}

// unique leaves out duplicate runs. If there is only one run, and it has no ID, it gets that of the output.
func (r *Reading) unique(output []byte) {
	if f := r.Format; len(r.Runs) == 1 && r.Runs[0].ID == "" && f != spec.ToolQperf {
		r.Runs[0].ID = identity(output, anyFigure)
	}
	seen := make(map[string]bool)
	n := len(r.Runs)
	r.Runs = slices.DeleteFunc(r.Runs, func(run Run) bool {
		again := run.ID != "" && seen[run.ID]
		seen[run.ID] = true
		return again
	})
	r.Copies = n - len(r.Runs)
}

// anyFigure matches a line with a number.
var anyFigure = regexp.MustCompile(`[0-9]`)

// one adapts a function that reads a single reading.
func one(read func([]byte, Known) (Reading, error)) func([]byte, Known) ([]Reading, error) {
	return func(output []byte, known Known) ([]Reading, error) {
		r, err := read(output, known)
		if err != nil {
			return nil, err
		}
		return []Reading{r}, nil
	}
}

// each reads the concatenated outputs of several runs, as a script with >> writes them. Each begins with a heading. A figure
// before the first heading is an error. read reads one run.
func each(heading, figure *regexp.Regexp, read func([]byte, Known) (Reading, error)) func([]byte, Known) ([]Reading, error) {
	return one(func(output []byte, known Known) (Reading, error) {
		var starts []int
		for _, at := range heading.FindAllIndex(output, -1) {
			starts = append(starts, at[0])
		}
		if len(starts) == 0 {
			return read(output, known)
		}
		if at := figure.FindIndex(output[:starts[0]]); at != nil {
			return Reading{}, fmt.Errorf("line %d belongs to no run, because it precedes the heading in line %d: %.200q",
				lineOf(output, at[0]), lineOf(output, starts[0]), lineAt(output, at[0]))
		}
		return sections(output, starts, figure, known, read)
	})
}

// sections reads the runs that begin at starts. differing matches the lines by which two runs differ.
func sections(output []byte, starts []int, differing *regexp.Regexp, known Known, read func([]byte, Known) (Reading, error)) (Reading, error) {
	var all Reading
	for i, start := range starts {
		end := len(output)
		if i+1 < len(starts) {
			end = starts[i+1]
		}
		r, err := read(output[start:end], known)
		if err == nil {
			r.Runs[0].ID = identity(output[start:end], differing)
			if i > 0 {
				err = all.add(r)
			}
		}
		if at := new(lineError); errors.As(err, &at) {
			at.line += lineOf(output, start) - 1
		}
		switch {
		case err != nil && len(starts) > 1:
			return Reading{}, fmt.Errorf("run %d, which begins in line %d: %w", i+1, lineOf(output, start), err)
		case err != nil:
			return Reading{}, err
		case i == 0:
			all = r
		}
	}
	return all, nil
}

// identity returns a hash of the lines by which two runs differ.
func identity(output []byte, differing *regexp.Regexp) string {
	hash := sha256.New()
	for line := range bytes.Lines(output) {
		if differing.Match(line) {
			hash.Write(append(bytes.TrimSpace(line), '\n'))
		}
	}
	return hex.EncodeToString(hash.Sum(nil))
}

func lineOf(output []byte, at int) int { return 1 + bytes.Count(output[:at], []byte("\n")) }

// lineAt returns the rest of the line from an offset.
func lineAt(output []byte, at int) string {
	line, _, _ := bytes.Cut(output[at:], []byte("\n"))
	return strings.TrimSpace(string(line))
}

type lineError struct {
	line int
	err  error
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.err) }
func (e *lineError) Unwrap() error { return e.err }

// halfLine returns the error for a last line without a newline, whose number may be incomplete.
func halfLine(number int, line string) error {
	return &lineError{number, fmt.Errorf("it has no line end, so its last number may be truncated: %.200q; if the file is complete, add a line end", line)}
}

// add adds the runs of another reading of the same traffic.
func (r *Reading) add(other Reading) error {
	if differences := r.Merge(other); len(differences) > 0 {
		return fmt.Errorf("it has other traffic than run 1: %s; give a file for each", strings.Join(differences, ", "))
	}
	r.Runs = append(r.Runs, other.Runs...)
	return nil
}

// Merge merges the traffic of another reading into r, or returns how they differ. With a set number of messages, durations may
// differ; with a set duration, numbers may. A condition that one reading lacks is no difference.
func (r *Reading) Merge(other Reading) (differences []string) {
	if r.Workload.Kind() != other.Workload.Kind() {
		return []string{fmt.Sprintf("%s, not %s", other.Workload.Kind(), r.Workload.Kind())}
	}
	all, own := r.Workload.Traffic(), *other.Workload.Traffic()
	if other.Counted {
		all.Duration = max(all.Duration, own.Duration)
		own.Duration = all.Duration
		if own.Requests != all.Requests || own.Iterations != all.Iterations { // one of the two had a set duration
			own.Requests, all.Requests, own.Iterations, all.Iterations = 0, 0, 0, 0
		}
	}
	if shorter, longer := min(all.Duration, own.Duration), max(all.Duration, own.Duration); r.Late && other.Late && longer-shorter <= shorter/10 {
		all.Duration, own.Duration = shorter, shorter
	}
	a, b := reflect.ValueOf(own), reflect.ValueOf(*all)
	for i := range a.NumField() {
		if !a.Field(i).Equal(b.Field(i)) {
			field, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			differences = append(differences, fmt.Sprintf("%s %v, not %v", field, orUnknown(a.Field(i)), orUnknown(b.Field(i))))
		}
	}
	return append(differences, r.mergeConditions(other.Conditions)...)
}

// orUnknown returns a value for an error message.
func orUnknown(v reflect.Value) any {
	if v.IsZero() && v.Kind() != reflect.Bool {
		return "unknown"
	}
	return v
}

func (r *Reading) mergeConditions(others map[string]string) (differences []string) {
	merged := maps.Clone(r.Conditions)
	for _, name := range slices.Sorted(maps.Keys(others)) {
		own, ok := merged[name]
		switch {
		case !ok && merged == nil:
			merged = map[string]string{name: others[name]}
		case !ok:
			merged[name] = others[name]
		case own != others[name]:
			differences = append(differences, fmt.Sprintf("%s %s, not %s", name, others[name], own))
		}
	}
	r.Conditions = merged
	return differences
}
