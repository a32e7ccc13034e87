package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/record"
)

// Output of mpstat is only imported: internal/collect samples the CPUs of a run. Checked against 12.6.1; versions before 9 have
// other column names (%user).

// mpstatUsers are the names of a column that only the table of CPU times has.
var mpstatUsers = []string{"%usr", "%user"}

// mpstatHead splits the heading of a table of CPU times into its label, which is a time or the word for average in the
// machine's language, and the columns. A table of NUMA nodes has the same columns without CPU.
func mpstatHead(line []byte) (label string, columns []string) {
	fields := strings.Fields(string(line))
	i := slices.Index(fields, "CPU")
	if i < 1 || i+1 >= len(fields) || !slices.Contains(mpstatUsers, fields[i+1]) {
		return "", nil
	}
	return strings.Join(fields[:i], " "), fields[i:]
}

// mpstatJSON occurs only in the output of -o JSON.
var mpstatJSON = []byte(`"sysstat"`)

// isMpstat recognises a report by the heading of its columns, and the JSON of any table.
func isMpstat(output []byte) bool {
	for line := range bytes.Lines(output) {
		if _, columns := mpstatHead(line); columns != nil {
			return true
		}
	}
	return bytes.Contains(output, mpstatJSON)
}

func readMpstat(output []byte, _ Known) (Reading, error) {
	if bytes.Contains(output, mpstatJSON) {
		cpus, err := parseMpstatJSON(output)
		if err != nil {
			return Reading{}, err
		}
		return Reading{Runs: []Run{{CPUs: cpus}}}, nil
	}
	averages, err := parseMpstat(output)
	if err != nil {
		return Reading{}, err
	}
	var r Reading
	for _, cpus := range averages {
		r.Runs = append(r.Runs, Run{CPUs: cpus})
	}
	return r, nil
}

// mpstatCount matches the heading of a report: "Linux 6.1.0 (node1) 	11/23/26 	_x86_64_	(2 CPU)".
var mpstatCount = regexp.MustCompile(`^Linux .*\((\d+) CPU\)\s*$`)

// mpstatAverages collects the averages of an output.
type mpstatAverages struct {
	cpus    int      // according to the last heading, 0 without one
	label   string   // of averages
	columns []string // columns of the current table, from the CPU on; nil if it has no CPU times
	seen    int      // CPUs in the last average, including offline ones
	runs    [][]record.CPU
	// together means that there is an average of all CPUs without a heading, which mpstat prints without -P.
	together bool
}

// mpstatTogether is "Average:     all   18.09   29.65 …".
var mpstatTogether = regexp.MustCompile(`^\D+ all +[0-9]`)

// parseMpstat returns, for every run in an output, the averages of each CPU, as times in a window of one second. Waiting for
// I/O counts as idle.
func parseMpstat(output []byte) (averages [][]record.CPU, err error) {
	var a mpstatAverages
	number := 0
	for line := range bytes.Lines(output) {
		number++
		if err := a.line(line); err != nil {
			return nil, &lineError{number, err}
		}
	}
	if err := a.whole(); err != nil {
		return nil, err
	}
	if a.label == "" && !a.together {
		return nil, errors.New("it has no averages, which mpstat prints when it ends: give it an interval and a count, or stop it by Ctrl-C")
	}
	if a.label == "" || slices.ContainsFunc(a.runs, func(cpus []record.CPU) bool { return len(cpus) == 0 }) {
		return nil, errors.New("it has no line for each CPU: run mpstat with -P ALL")
	}
	return a.runs, nil
}

func (a *mpstatAverages) line(line []byte) error {
	if m := mpstatCount.FindSubmatch(line); m != nil {
		a.columns = nil
		var err error
		a.cpus, err = strconv.Atoi(string(m[1]))
		return err
	}
	if label, columns := mpstatHead(line); columns != nil {
		a.columns = nil
		if strings.ContainsAny(label, "0123456789") { // a time
			return nil
		}
		err := a.whole()
		a.label, a.columns, a.seen = label, columns, 0
		a.runs = append(a.runs, nil)
		return err
	}
	a.together = a.together || mpstatTogether.Match(line)
	rest, ok := a.average(string(line))
	if a.columns == nil || !ok {
		return nil
	}
	fields := strings.Fields(rest)
	switch {
	case fields[0] == "all":
		return nil
	case fields[0][0] < '0' || fields[0][0] > '9': // the heading of another table, such as that of interrupts
		a.columns = nil
		return nil
	}
	cpu, online, err := mpstatCPU(a.columns, fields)
	if err != nil {
		return err
	}
	if n := len(fields); line[len(line)-1] != '\n' && len(decimals(fields[n-1])) != len(decimals(fields[n-2])) {
		return fmt.Errorf("it has no line end, so its last number may be truncated: %.200q; if the file is complete, add a line end", line)
	}
	a.seen++
	if !online {
		return nil
	}
	last := &a.runs[len(a.runs)-1]
	if n := len(*last); n > 0 && (*last)[n-1].ID >= cpu.ID {
		return fmt.Errorf("CPU %d is listed twice", cpu.ID)
	}
	*last = append(*last, cpu)
	return nil
}

// average returns what follows the label of averages in a line.
func (a *mpstatAverages) average(line string) (rest string, ok bool) {
	fields := strings.Fields(line)
	n := len(strings.Fields(a.label))
	if a.label == "" || len(fields) <= n || strings.Join(fields[:n], " ") != a.label {
		return "", false
	}
	return strings.Join(fields[n:], " "), true
}

// decimals returns the digits after the decimal point, which is a comma in some languages.
func decimals(number string) string {
	if i := strings.IndexAny(number, ".,"); i >= 0 {
		return number[i+1:]
	}
	return ""
}

// whole returns an error if a CPU is missing in the last average.
func (a *mpstatAverages) whole() error {
	if a.label != "" && a.seen > 0 && a.seen < a.cpus {
		return fmt.Errorf("it has the averages of %d of %d CPUs: run mpstat with -P ALL, and give the whole output", a.seen, a.cpus)
	}
	return nil
}

// mpstatCPU parses a line of an average. All times of an offline CPU are 0.
func mpstatCPU(columns, fields []string) (cpu record.CPU, online bool, err error) {
	id, err := strconv.Atoi(fields[0])
	if err != nil || id < 0 || len(fields) != len(columns) {
		return record.CPU{}, false, fmt.Errorf("its output is not understood at %.100q", strings.Join(fields, " "))
	}
	percent := make(map[string]float64)
	for i, text := range fields[1:] {
		name, ok := strings.CutPrefix(columns[i+1], "%")
		if !ok { // such as intr/s
			continue
		}
		v, err := strconv.ParseFloat(strings.Replace(text, ",", ".", 1), 64) // as the locale writes it
		if err != nil {
			return record.CPU{}, false, fmt.Errorf("%s of %q of CPU %d", columns[i+1], text, id)
		}
		percent[name] = v
	}
	return mpstatTimes(id, percent, mpstatRounding(fields))
}

// mpstatRounding returns by how much the sum of a line's shares may differ from 1. mpstat --dec=0 rounds them to whole
// percentages.
func mpstatRounding(fields []string) float64 {
	digits := len(decimals(fields[len(fields)-1]))
	return max(0.02, 0.005*float64(len(fields))*math.Pow10(-digits))
}

// mpstatTimes converts percentages to CPU times.
func mpstatTimes(id int, percent map[string]float64, rounding float64) (cpu record.CPU, online bool, err error) {
	share, total := make(map[string]float64), 0.0
	for name, v := range percent {
		if !(v >= 0 && v <= 100) {
			return record.CPU{}, false, fmt.Errorf("%s of %g%% of CPU %d", name, v, id)
		}
		share[name] = v / 100
		total += v / 100
	}
	switch {
	case total == 0:
		return record.CPU{}, false, nil
	case math.Abs(total-1) > rounding+1e-9:
		return record.CPU{}, false, fmt.Errorf("CPU %d has shares of %.0f%% in all", id, 100*total)
	}
	cpu = record.CPU{
		ID: id, User: share["usr"] + share["user"] + share["nice"] + share["guest"] + share["gnice"],
		System: share["sys"] + share["system"], IRQ: share["irq"], Steal: share["steal"],
		Idle: share["idle"] + share["iowait"], Softirq: share["soft"], SoftirqTicks: share["soft"],
	}
	cpu.Busy = max(0, 1-cpu.Idle)
	return cpu, true, nil
}

type mpstatSample struct {
	Load []map[string]any `json:"cpu-load"`
}

// parseMpstatJSON returns the means over all samples of -o JSON, which has no averages.
func parseMpstatJSON(output []byte) ([]record.CPU, error) {
	var report struct {
		Sysstat struct {
			Hosts []struct {
				Count      int `json:"number-of-cpus"`
				Statistics []mpstatSample
			}
		}
	}
	if err := json.Unmarshal(output, &report); err != nil {
		return nil, fmt.Errorf("its JSON (-o JSON) is incomplete: %w; give mpstat a count, or stop it by Ctrl-C", err)
	}
	if n := len(report.Sysstat.Hosts); n != 1 {
		return nil, fmt.Errorf("its JSON (-o JSON) has %d reports, want one: give a file for each", n)
	}
	host := report.Sysstat.Hosts[0]
	if len(host.Statistics) == 0 {
		return nil, errors.New("its JSON (-o JSON) has no samples: give mpstat an interval and a count")
	}
	if !slices.ContainsFunc(host.Statistics, func(s mpstatSample) bool { return len(s.Load) > 0 }) {
		return nil, errors.New("its JSON (-o JSON) has no times of CPUs (cpu-load), but of nodes, devices or something else: run mpstat -P ALL -o JSON with an interval and a count")
	}
	sums, online := make(map[int]map[string]float64), make(map[int]int)
	for _, sample := range host.Statistics {
		for _, load := range sample.Load {
			id, percent, err := mpstatLoad(load)
			if err != nil {
				return nil, err
			}
			if id < 0 {
				continue
			}
			if sums[id] == nil {
				sums[id] = make(map[string]float64)
			}
			if _, on, err := mpstatTimes(id, percent, 0.02); err != nil {
				return nil, err
			} else if on {
				online[id]++
			}
			for name, v := range percent {
				sums[id][name] += v
			}
		}
	}
	if len(sums) == 0 || len(sums) < host.Count {
		return nil, fmt.Errorf("it has %d of %d CPUs: run mpstat with -P ALL", len(sums), host.Count)
	}
	return mpstatMeans(sums, online, len(host.Statistics))
}

// mpstatMeans divides the sums of CPUs by the number of samples. It ignores CPUs that were always offline.
func mpstatMeans(sums map[int]map[string]float64, online map[int]int, samples int) (cpus []record.CPU, err error) {
	for id, sum := range sums {
		switch online[id] {
		case 0:
			continue
		case samples:
		default:
			return nil, fmt.Errorf("CPU %d has times in %d of %d samples", id, online[id], samples)
		}
		for name := range sum {
			sum[name] = min(100, sum[name]/float64(samples)) // rounding may make it more
		}
		cpu, _, err := mpstatTimes(id, sum, 0.02)
		if err != nil {
			return nil, err
		}
		cpus = append(cpus, cpu)
	}
	slices.SortFunc(cpus, func(a, b record.CPU) int { return a.ID - b.ID })
	if len(cpus) == 0 {
		return nil, errors.New("all of its CPUs are offline")
	}
	return cpus, nil
}

// mpstatLoad parses {"cpu": "0", "usr": 5.00, …}. For all CPUs together it returns the number -1.
func mpstatLoad(load map[string]any) (id int, percent map[string]float64, err error) {
	percent = make(map[string]float64)
	id = -1
	for name, v := range load {
		switch v := v.(type) {
		case string:
			if name != "cpu" || v == "all" {
				continue
			}
			if id, err = strconv.Atoi(v); err != nil {
				return 0, nil, fmt.Errorf("the CPU %q", v)
			}
		case float64:
			percent[name] = v
		}
	}
	return id, percent, nil
}
