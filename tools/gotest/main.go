// Command gotest runs go test, and takes a skipped test for a failed one where
// the environment variable CI is set: there the machine has all that any test
// needs, so one that skips has gone unnoticed. It prints what go test does
// without -v, the tests that took longest, the names of those that failed, and in one line how many were skipped, and why.
//
//	gotest [go test's arguments]
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

func main() {
	cmd := exec.Command("go", append([]string{"test", "-json"}, os.Args[1:]...)...)
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err != nil {
		fatal(1, err)
	}
	if err := cmd.Start(); err != nil {
		fatal(1, err)
	}
	skips, failed, times, readErr := report(os.Stdout, events)
	for _, name := range slowest(times) {
		fmt.Printf("%6.1f s  %s\n", times[name], name)
	}
	if len(failed) > 0 {
		fmt.Println("failed:", strings.Join(failed, ", "))
	}
	if err := errors.Join(readErr, cmd.Wait()); err != nil {
		fatal(1, err)
	}
	if len(skips) > 0 {
		fmt.Println("left out:", reasons(skips))
	}
	if len(skips) > 0 && os.Getenv("CI") != "" {
		names := make([]string, len(skips))
		for i, s := range skips {
			names[i] = s.name
		}
		fatal(1, fmt.Errorf("%d tests skipped that must not where CI is set:\n\t%s", len(skips), strings.Join(names, "\n\t")))
	}
}

// skip is a test that was skipped, as PACKAGE.TEST, and what it says of that.
type skip struct{ name, reason string }

// reasons are how many tests were skipped for each reason, the most frequent first.
func reasons(skips []skip) string {
	counts := make(map[string]int)
	for _, s := range skips {
		counts[s.reason]++
	}
	all := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(counts[b]-counts[a], strings.Compare(a, b))
	})
	for i, reason := range all {
		all[i] = fmt.Sprintf("%d (%s)", counts[reason], reason)
	}
	return strings.Join(all, ", ")
}

func fatal(status int, err error) {
	fmt.Fprintln(os.Stderr, "gotest:", err)
	os.Exit(status)
}

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// report shows the events as go test would, and returns the tests that were skipped, those that failed
// or never ended, and how many seconds each took. A test that skips ends its surrounding test with a pass,
// so each counts for itself. The time of a subtest is its parent's.
func report(w io.Writer, events io.Reader) (skips []skip, failed []string, times map[string]float64, err error) {
	times = make(map[string]float64)
	// What a test prints is shown if it fails.
	held := make(map[string][]string)
	lines := json.NewDecoder(events)
	for {
		var e event
		if err := lines.Decode(&e); errors.Is(err, io.EOF) {
			return skips, failed, times, nil
		} else if err != nil {
			return skips, failed, times, fmt.Errorf("read the events of go test: %w", err)
		}
		name := e.Package + "." + e.Test
		if e.Elapsed > 0 && e.Test != "" && !strings.Contains(e.Test, "/") {
			times[name] = e.Elapsed
		}
		switch {
		case e.Output != "" && e.Test != "":
			held[name] = append(held[name], e.Output)
		case e.Output != "" && e.Output != "PASS\n": // of a package, or of its build
			fmt.Fprint(w, e.Output)
		case e.Action == "fail":
			// A program that panics, or runs out of time, ends its tests without an event. The trace is in what one of them printed.
			ended := []string{name}
			if e.Test == "" {
				ended = slices.DeleteFunc(slices.Sorted(maps.Keys(held)), func(test string) bool { return !strings.HasPrefix(test, name) })
			}
			for _, test := range ended {
				for _, line := range held[test] {
					if !strings.HasPrefix(line, "=== ") {
						fmt.Fprint(w, line)
					}
				}
				delete(held, test)
			}
			failed = append(failed, ended...)
		case e.Test == "": // a package began, or ended well
		case e.Action == "pass":
			delete(held, name)
		case e.Action == "skip":
			skips = append(skips, skip{name, reason(held[name])})
			delete(held, name)
		}
	}
}

// slowest returns the ten tests that took longest, of those that took more than 5 s.
func slowest(times map[string]float64) []string {
	names := slices.SortedFunc(maps.Keys(times), func(a, b string) int {
		return cmp.Or(cmp.Compare(times[b], times[a]), strings.Compare(a, b))
	})
	names = slices.DeleteFunc(names, func(name string) bool { return times[name] <= 5 })
	return names[:min(len(names), 10)]
}

var place = regexp.MustCompile(`^\s+\w+\.go:\d+: `)

// reason is what a test that was skipped says last, without the place.
func reason(said []string) string {
	for _, line := range slices.Backward(said) {
		if place.MatchString(line) {
			return strings.TrimSpace(place.ReplaceAllString(line, ""))
		}
	}
	return "it does not say why"
}
