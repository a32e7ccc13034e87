// Command gotest runs go test, and takes a skipped test for a failed one where
// the environment variable CI is set: there the machine has all that any test
// needs, so one that skips has gone unnoticed. It prints what go test does
// without -v, and in one line how many tests were skipped, and why.
//
//	gotest [-allow-skip REGEXP] [go test's arguments]
//
// The expression is matched against PACKAGE.TEST.
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
	args := os.Args[1:]
	allowed := regexp.MustCompile(`^$`)
	if len(args) > 1 && args[0] == "-allow-skip" {
		var err error
		if allowed, err = regexp.Compile(args[1]); err != nil {
			fatal(2, err)
		}
		args = args[2:]
	}
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err != nil {
		fatal(1, err)
	}
	if err := cmd.Start(); err != nil {
		fatal(1, err)
	}
	skips, readErr := report(os.Stdout, events)
	if err := errors.Join(readErr, cmd.Wait()); err != nil {
		fatal(1, err)
	}
	if len(skips) > 0 {
		fmt.Println("left out:", reasons(skips))
	}
	skips = slices.DeleteFunc(skips, func(s skip) bool { return allowed.MatchString(s.name) })
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
}

// report shows the events as go test would, and returns the tests that were skipped. A test that
// skips ends its surrounding test with a pass, so each counts for itself.
func report(w io.Writer, events io.Reader) (skips []skip, err error) {
	// What a test prints is shown if it fails.
	held := make(map[string][]string)
	lines := json.NewDecoder(events)
	for {
		var e event
		if err := lines.Decode(&e); errors.Is(err, io.EOF) {
			return skips, nil
		} else if err != nil {
			return skips, fmt.Errorf("read the events of go test: %w", err)
		}
		name := e.Package + "." + e.Test
		switch {
		case e.Output != "" && e.Test != "":
			held[name] = append(held[name], e.Output)
		case e.Output != "" && e.Output != "PASS\n": // of a package, or of its build
			fmt.Fprint(w, e.Output)
		case e.Test == "": // the end of a package
		case e.Action == "pass":
			delete(held, name)
		case e.Action == "fail":
			for _, line := range held[name] {
				if !strings.HasPrefix(line, "=== ") {
					fmt.Fprint(w, line)
				}
			}
			delete(held, name)
		case e.Action == "skip":
			skips = append(skips, skip{name, reason(held[name])})
			delete(held, name)
		}
	}
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
