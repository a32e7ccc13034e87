//go:build linux

// Command programtime compares how long the eBPF programs of two builds run per packet. The kernel measures
// that while the sysctl kernel.bpf_stats_enabled is 1. The times include the cost of the measurement.
//
//	programtime record FILE BUILD PID    append the run times of the programs of a process
//	programtime report FILE OLD NEW      compare two builds by the run times in a file
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"slipstream.dev/internal/stats"
)

// build is a line of the file: how often and how long the programs of a build ran on one node in a period.
type build struct {
	Name     string             `json:"build"`
	Programs map[string]program `json:"programs"`
}

type program struct {
	Runs uint64  `json:"runs"`
	Time float64 `json:"time"` // ns, summed over all runs
}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "programtime:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	switch {
	case len(args) == 4 && args[0] == "record":
		return record(args[1], args[2], args[3])
	case len(args) == 4 && args[0] == "report":
		f, err := os.Open(args[1])
		if err != nil {
			return err
		}
		defer f.Close()
		builds, err := read(f)
		if err != nil {
			return fmt.Errorf("%s: %w", args[1], err)
		}
		return report(out, builds, args[2], args[3])
	}
	return errors.New("usage: programtime record FILE BUILD PID | report FILE OLD NEW")
}

func record(file, name, pid string) error {
	b := build{Name: name, Programs: make(map[string]program)}
	ids, err := programs(pid)
	if err != nil {
		return err
	}
	for _, id := range ids {
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			return fmt.Errorf("open program %d: %w", id, err)
		}
		info, err := p.Info()
		if err != nil {
			return errors.Join(err, p.Close())
		}
		took, err := p.Stats()
		if err := errors.Join(err, p.Close()); err != nil {
			return err
		}
		if took.RunCount > 0 {
			b.Programs[info.Name] = program{took.RunCount, float64(took.Runtime.Nanoseconds())}
		}
	}
	if len(b.Programs) == 0 {
		return fmt.Errorf("process %s: none of its programs ran: is kernel.bpf_stats_enabled 1?", pid)
	}
	line, err := json.Marshal(b)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// programs returns the IDs of the eBPF programs that a process has open.
func programs(pid string) (ids []ebpf.ProgramID, err error) {
	infos, err := filepath.Glob("/proc/" + pid + "/fdinfo/*")
	if err != nil {
		return nil, err
	}
	for _, path := range infos {
		info, err := os.ReadFile(path)
		if err != nil {
			continue // closed meanwhile
		}
		for line := range strings.Lines(string(info)) {
			number, ok := strings.CutPrefix(line, "prog_id:")
			if !ok {
				continue
			}
			id, err := strconv.ParseUint(strings.TrimSpace(number), 10, 32)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			ids = append(ids, ebpf.ProgramID(id))
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func read(r io.Reader) (builds []build, err error) {
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		var b build
		if err := json.Unmarshal(lines.Bytes(), &b); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		builds = append(builds, b)
	}
	return builds, lines.Err()
}

// perPacket returns the run time of one program, or of all if name is empty, in ns per packet. It takes the
// number of packets from the program that ran most often, because that one runs once for each packet of the
// fast path.
func (b build) perPacket(name string) float64 {
	var packets uint64
	var time float64
	for is, p := range b.Programs {
		packets = max(packets, p.Runs)
		if name == "" || name == is {
			time += p.Time
		}
	}
	return time / float64(packets)
}

// report compares the builds. A period has two lines, one for the build on each node. In the next period the
// builds swap nodes, so that the mean over both does not depend on the node.
func report(out io.Writer, lines []build, was, is string) error {
	if len(lines) < 8 || len(lines)%4 != 0 {
		return fmt.Errorf("%d lines, want four for each pair of periods, and two pairs at least", len(lines))
	}
	taken := make(map[string][]build)
	var differences []float64
	for four := range slices.Chunk(lines, 4) {
		difference := 0.0
		for _, b := range four {
			taken[b.Name] = append(taken[b.Name], b)
			if b.Name == was {
				difference -= b.perPacket("") / 2
			} else {
				difference += b.perPacket("") / 2
			}
		}
		differences = append(differences, difference)
	}
	if len(taken) != 2 || len(taken[was]) == 0 || len(taken[was]) != len(taken[is]) {
		return fmt.Errorf("want as many lines of %s as of %s, and no others", was, is)
	}
	for _, name := range []string{was, is} {
		fmt.Fprintf(out, "%s: %.0f ns per packet\n", name, mean(taken[name], ""))
		all := make(map[string]bool)
		for _, b := range taken[name] {
			for p := range b.Programs {
				all[p] = true
			}
		}
		for _, p := range slices.Sorted(maps.Keys(all)) {
			fmt.Fprintf(out, "  %-18s %6.1f\n", p, mean(taken[name], p))
		}
	}
	m, ci := stats.Mean(differences)
	_, err := fmt.Fprintf(out, "%s - %s: %.0f (%.0f to %.0f) ns per packet, n = %d\n", is, was, m, ci[0], ci[1], len(differences))
	return err
}

func mean(builds []build, program string) float64 {
	sum := 0.0
	for _, b := range builds {
		sum += b.perPacket(program)
	}
	return sum / float64(len(builds))
}
