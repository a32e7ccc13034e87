package doctor

import (
	"slices"
	"strconv"
	"strings"
)

// Stack holds what the network stack of one network namespace counted in the window.
type Stack struct {
	// Pod names the pod of the namespace by the veth that leads to it. It is empty for doctor's own namespace.
	Pod string
	// Counts are the counters that grew, and by how much: "Udp.InCsumErrors" in /proc/net/snmp, "TcpExt.ListenDrops"
	// in netstat, "Udp6InErrors" in snmp6, "XfrmInError" in xfrm_stat; "nf_conntrack.drop" as conntrack -S shows it.
	Counts map[string]uint64
}

// sum adds up counters.
func (s Stack) sum(names ...string) (n uint64) {
	for _, name := range names {
		n += s.Counts[name]
	}
	return n
}

// count returns the growth of counters in the window, in the stack of doctor's own network namespace.
func (f Facts) count(names ...string) (n uint64) {
	for _, s := range f.Stacks {
		if s.Pod == "" {
			n += s.sum(names...)
		}
	}
	return n
}

// grown returns the counters that grew between two readings, and by how much.
func grown(before, after map[string]uint64) map[string]uint64 {
	grew := make(map[string]uint64)
	for name, now := range after {
		if was, known := before[name]; known && now > was {
			grew[name] = now - was
		}
	}
	return grew
}

// sourceOf returns the file, or the command, that shows a counter, and the counter's name there.
func sourceOf(counter string) (source, name string) {
	group, name, grouped := strings.Cut(counter, ".")
	switch {
	case !grouped && strings.HasPrefix(counter, "Xfrm"):
		return "/proc/net/xfrm_stat", counter
	case !grouped:
		return "/proc/net/snmp6", counter
	case group == "nf_conntrack":
		return "conntrack -S", name // not every kernel has a file
	case strings.HasSuffix(group, "Ext"):
		return "/proc/net/netstat", group + " " + name
	}
	return "/proc/net/snmp", group + " " + name
}

// parseGroups reads /proc/net/snmp or /proc/net/netstat, which have a line of names and a line of values for each
// group, into counters by group and name. It omits values below 0, which are settings.
func parseGroups(text string, into map[string]uint64) {
	var names []string
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		if len(columns) == 0 {
			continue
		}
		if len(names) == 0 || names[0] != columns[0] {
			names = columns
			continue
		}
		for i := 1; i < min(len(names), len(columns)); i++ {
			if n, err := strconv.ParseUint(columns[i], 10, 64); err == nil {
				into[strings.TrimSuffix(names[0], ":")+"."+names[i]] = n
			}
		}
		names = nil
	}
}

// parseNamed reads /proc/net/snmp6 or /proc/net/xfrm_stat, which have a name and a value in each line.
func parseNamed(text string, into map[string]uint64) {
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		if len(columns) != 2 {
			continue
		}
		if n, err := strconv.ParseUint(columns[1], 10, 64); err == nil {
			into[columns[0]] = n
		}
	}
}

// parsePerCPU reads a file of /proc/net/stat, which has a line of names and a line of hexadecimal values for each CPU, into
// the sums over the CPUs. Its values have 32 bits.
func parsePerCPU(text, group string, into map[string]uint64) {
	var names []string
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		if names == nil {
			names = columns
			continue
		}
		for i := range min(len(names), len(columns)) {
			if n, err := strconv.ParseUint(columns[i], 16, 32); err == nil {
				into[group+"."+names[i]] += n
			}
		}
	}
}

// worse returns the worse of two severities.
func worse(a, b Severity) Severity {
	if slices.Index(severities, a) <= slices.Index(severities, b) {
		return a
	}
	return b
}
