package tools

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/record"
)

// mpstat is read, not run: internal/collect samples the CPUs of a run. Checked against
// 12.6.1.

// isMpstat recognises a report of mpstat by the heading of its columns.
func isMpstat(output []byte) bool {
	for line := range bytes.Lines(output) {
		f := bytes.Fields(line)
		if i := slices.IndexFunc(f, func(name []byte) bool { return string(name) == "CPU" }); i > 0 && i < len(f)-1 && string(f[i+1]) == "%usr" {
			return true
		}
	}
	return false
}

func readMpstat(output []byte, _ time.Duration) (Reading, error) {
	averages, err := parseMpstat(output)
	if err != nil {
		return Reading{}, err
	}
	if len(averages) != 1 {
		return Reading{}, fmt.Errorf("it has averages of %d runs, want one in a file", len(averages))
	}
	return Reading{Runs: []Run{{CPUs: averages[0]}}}, nil
}

// parseMpstat returns the averages of every run in an output, of each CPU, as in a
// window of one second. A CPU that waits for I/O is idle.
func parseMpstat(output []byte) (averages [][]record.CPU, err error) {
	var columns []string // of the average, from the CPU on
	ended := false
	for line := range bytes.Lines(output) {
		rest, ok := strings.CutPrefix(string(line), "Average:")
		if !ok || !strings.HasSuffix(rest, "\n") {
			continue // half a line may end in half a number
		}
		ended = true
		fields := strings.Fields(rest)
		switch {
		case len(fields) == 0:
		case fields[0] == "CPU":
			columns = nil // of another report, such as that of interrupts
			if slices.Contains(fields, "%usr") {
				columns = fields
				averages = append(averages, nil)
			}
		case columns == nil || fields[0] == "all":
		default:
			cpu, err := mpstatCPU(columns, fields)
			if err != nil {
				return nil, err
			}
			last := &averages[len(averages)-1]
			if n := len(*last); n > 0 && (*last)[n-1].ID >= cpu.ID {
				return nil, fmt.Errorf("CPU %d is listed twice", cpu.ID)
			}
			*last = append(*last, cpu)
		}
	}
	if !ended {
		return nil, errors.New("it has no averages, which mpstat prints when it ends: give it an interval and a count, or stop it by Ctrl-C")
	}
	if len(averages) == 0 || slices.ContainsFunc(averages, func(cpus []record.CPU) bool { return len(cpus) == 0 }) {
		return nil, errors.New("it has no line for each CPU: run mpstat with -P ALL")
	}
	return averages, nil
}

// mpstatCPU is a line of an average.
func mpstatCPU(columns, fields []string) (record.CPU, error) {
	id, err := strconv.Atoi(fields[0])
	if err != nil || id < 0 || len(fields) != len(columns) {
		return record.CPU{}, fmt.Errorf("its output is not understood at %.100q", strings.Join(fields, " "))
	}
	share, total := make(map[string]float64), 0.0
	for i, text := range fields[1:] {
		percent, err := strconv.ParseFloat(strings.Replace(text, ",", ".", 1), 64) // as the locale writes it
		if err != nil || !(percent >= 0 && percent <= 100) {
			return record.CPU{}, fmt.Errorf("%s of %q of CPU %d", columns[i+1], text, id)
		}
		share[columns[i+1]] = percent / 100
		total += percent / 100
	}
	if total < 0.98 || total > 1.02 {
		return record.CPU{}, fmt.Errorf("CPU %d has shares of %.0f %% in all", id, 100*total)
	}
	cpu := record.CPU{
		ID: id, User: share["%usr"] + share["%nice"] + share["%guest"] + share["%gnice"],
		System: share["%sys"], IRQ: share["%irq"], Steal: share["%steal"],
		Idle: share["%idle"] + share["%iowait"], Softirq: share["%soft"], SoftirqTicks: share["%soft"],
	}
	cpu.Busy = max(0, 1-cpu.Idle)
	return cpu, nil
}
