//go:build linux

package collect

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"slipstream.dev/internal/record"
)

// tick is the unit of /proc/stat: USER_HZ is 100 on every architecture that Go supports.
const tick = 10 * time.Millisecond

// cpu holds the counters of one CPU. Those of softirqs and packets have 32 bits in the kernel, and wrap after little more than
// an hour at a million packets per second.
type cpu struct {
	id                                        int
	user, system, idle, irq, softirq, steal   uint64 // ticks
	netRx, netTx                              uint32
	processed, dropped, squeezed, receivedRPS uint32
	flowLimited                               uint32
}

// since returns the differences from b to c. Times may decrease: the kernel corrects iowait that it counted for the wrong CPU
// (proc_stat(5)).
func (c cpu) since(b cpu) record.CPU {
	ticks := func(after, before uint64) float64 {
		return max(0, float64(int64(after-before))*tick.Seconds())
	}
	return record.CPU{
		ID: c.id, User: ticks(c.user, b.user), System: ticks(c.system, b.system), IRQ: ticks(c.irq, b.irq),
		Steal: ticks(c.steal, b.steal), Idle: ticks(c.idle, b.idle), SoftirqTicks: ticks(c.softirq, b.softirq),
		NetRx: uint64(c.netRx - b.netRx), NetTx: uint64(c.netTx - b.netTx),
		Processed: uint64(c.processed - b.processed), Dropped: uint64(c.dropped - b.dropped),
		Squeezed: uint64(c.squeezed - b.squeezed), ReceivedRPS: uint64(c.receivedRPS - b.receivedRPS),
	}
}

// find returns the index of a CPU in a sorted list.
func find(cpus []cpu, id int) (int, bool) {
	return slices.BinarySearchFunc(cpus, id, func(c cpu, id int) int { return cmp.Compare(c.id, id) })
}

// parseStat parses /proc/stat. Each online CPU has a line: cpuN user nice system idle iowait irq softirq steal (proc_stat(5)),
// and two columns for guests, which user and nice include. The line ctxt has the number of context switches.
func (s *Snapshot) parseStat(b []byte) error {
	s.cpus = s.cpus[:0]
	for line := range bytes.Lines(b) {
		if text, ok := bytes.CutPrefix(line, []byte("ctxt ")); ok {
			switches, err := strconv.ParseUint(string(bytes.TrimSpace(text)), 10, 64)
			if err != nil {
				return fmt.Errorf("ctxt: %w", err)
			}
			s.switches = switches
			break
		}
		rest, ok := bytes.CutPrefix(line, []byte("cpu"))
		if !ok {
			continue
		}
		if len(rest) == 0 || rest[0] == ' ' {
			continue // the sum of all
		}
		v, err := numbers[[9]uint64](rest, 10, 64)
		if err != nil {
			return err
		}
		id := int(v[0])
		if n := len(s.cpus); id < 0 || n > 0 && id <= s.cpus[n-1].id {
			return fmt.Errorf("CPU %d is out of order or range", v[0])
		}
		s.cpus = append(s.cpus, cpu{
			id: id, user: v[1] + v[2], system: v[3], idle: v[4] + v[5], irq: v[6], softirq: v[7], steal: v[8],
		})
	}
	if len(s.cpus) == 0 {
		return errors.New("no CPU in it")
	}
	return nil
}

// columns returns, for each column of a heading "CPU0 CPU1 …", the index in s.cpus, or -1 for a CPU that is not online.
func (s *Snapshot) columns(heading []byte) (columns []int, err error) {
	for f := range bytes.FieldsSeq(heading) {
		id, err := strconv.ParseUint(string(bytes.TrimPrefix(f, []byte("CPU"))), 10, 31)
		if err != nil {
			return nil, fmt.Errorf("heading: %w", err)
		}
		i, ok := find(s.cpus, int(id))
		if !ok {
			i = -1
		}
		columns = append(columns, i)
	}
	return columns, nil
}

// parseInterrupts parses /proc/interrupts: a heading with the online CPUs, and a row for each interrupt with its number or
// name, a count for each CPU, and a description (show_interrupts in kernel/irq/proc.c). Rows with fewer counts, such as ERR and
// MIS, count errors. In a container the file may be empty.
func (s *Snapshot) parseInterrupts(b []byte) error {
	heading, rows, _ := bytes.Cut(b, []byte("\n"))
	columns, err := s.columns(heading)
	if err != nil {
		return err
	}
	s.interrupts = make(map[string][]uint32)
	for row := range bytes.Lines(rows) {
		name, text, _ := bytes.Cut(row, []byte(":"))
		counts := make([]uint32, len(s.cpus))
		i := 0
		for f := range bytes.FieldsSeq(text) {
			n, err := strconv.ParseUint(string(f), 10, 32)
			if i == len(columns) || err != nil {
				break
			}
			if columns[i] >= 0 {
				counts[columns[i]] = uint32(n)
			}
			i++
		}
		if i == len(columns) {
			s.interrupts[string(bytes.TrimSpace(name))] = counts
		}
	}
	return nil
}

// interrupts returns how many interrupts a CPU took between two snapshots, in which it has the indexes b and a. It subtracts
// interrupt by interrupt, because the counts of a removed device disappear. Counts have 32 bits in the kernel, and may wrap:
// that of the timer does after a few months. But a count that seems to have risen by half of that range or more has fallen: the
// number now belongs to another device, which began at 0.
func interrupts(before, after Snapshot, b, a int) (n uint64) {
	for name, counts := range after.interrupts {
		count := counts[a]
		if was, ok := before.interrupts[name]; ok && count-was[b] <= math.MaxInt32 {
			count -= was[b]
		}
		n += uint64(count)
	}
	return n
}

// parseSoftirqs parses /proc/softirqs: a heading with all possible CPUs, and a row for each softirq.
func (s *Snapshot) parseSoftirqs(b []byte) error {
	heading, rows, _ := bytes.Cut(b, []byte("\n"))
	columns, err := s.columns(heading)
	if err != nil {
		return err
	}
	found := 0
	for row := range bytes.Lines(rows) {
		name, counts, _ := bytes.Cut(row, []byte(":"))
		var count func(*cpu) *uint32
		switch string(bytes.TrimSpace(name)) {
		case "NET_TX":
			count = func(c *cpu) *uint32 { return &c.netTx }
		case "NET_RX":
			count = func(c *cpu) *uint32 { return &c.netRx }
		default:
			continue
		}
		found++
		i := 0
		for f := range bytes.FieldsSeq(counts) {
			n, err := strconv.ParseUint(string(f), 10, 32)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if i < len(columns) && columns[i] >= 0 {
				*count(&s.cpus[columns[i]]) = uint32(n)
			}
			i++
		}
		if i != len(columns) {
			return fmt.Errorf("%s has %d counts for %d CPUs", name, i, len(columns))
		}
	}
	if found != 2 {
		return fmt.Errorf("%d rows of NET_TX and NET_RX", found)
	}
	return nil
}

// parseSoftnet parses /proc/net/softnet_stat. Each online CPU has a line of hexadecimal columns (softnet_seq_show in
// net/core/net-procfs.c): 0 processed, 1 dropped, 2 time_squeeze, 9 received_rps, 10 flow_limit_count and, since Linux 5.10, 12
// the CPU's number. Older kernels have no number, and list the CPUs in order.
func (s *Snapshot) parseSoftnet(b []byte) error {
	n := 0
	for line := range bytes.Lines(b) {
		v, err := numbers[[11]uint64](line, 16, 32)
		if err != nil {
			return err
		}
		i, ok := n, n < len(s.cpus)
		if v, err := numbers[[13]uint64](line, 16, 32); err == nil {
			i, ok = find(s.cpus, int(v[12]))
		}
		n++
		if !ok {
			continue // this CPU has just come online
		}
		c := &s.cpus[i]
		c.processed, c.dropped, c.squeezed = uint32(v[0]), uint32(v[1]), uint32(v[2])
		c.receivedRPS, c.flowLimited = uint32(v[9]), uint32(v[10])
	}
	if n == 0 {
		return errors.New("no CPU in it")
	}
	return nil
}

// parseDevices parses /proc/net/dev: two lines of heading, and a line for each device with its name, a colon, and eight columns
// for each direction (dev_seq_printf_stats in net/core/net-procfs.c). Receive drops are the sum of rx_dropped and
// rx_missed_errors. Netlink has the same figures, but listing links takes seven times as long (535 µs instead of 79 for 65
// devices), and RTM_GETSTATS has no names.
func (s *Snapshot) parseDevices(b []byte) error {
	last := s.devices // its names are reused
	s.devices = s.devices[:0]
	n := 0
	for line := range bytes.Lines(b) {
		if n++; n <= 2 {
			continue
		}
		// A name may contain a colon; the counters do not.
		colon := bytes.LastIndexByte(line, ':')
		if colon < 0 {
			return fmt.Errorf("no name in %q", line)
		}
		v, err := numbers[[12]uint64](line[colon+1:], 10, 64)
		if err != nil {
			return err
		}
		var name string
		text := bytes.TrimSpace(line[:colon])
		if i := len(s.devices); i < len(last) && last[i].Name == string(text) {
			name = last[i].Name
		} else {
			name = string(text)
		}
		s.devices = append(s.devices, record.Device{
			Name:    name,
			RxBytes: v[0], RxPackets: v[1], RxErrors: v[2], RxDropped: v[3],
			TxBytes: v[8], TxPackets: v[9], TxErrors: v[10], TxDropped: v[11],
		})
	}
	if n < 2 {
		return errors.New("no heading in it")
	}
	return nil
}

// numbers parses the first fields of a line, as many as A has.
func numbers[A [9]uint64 | [11]uint64 | [12]uint64 | [13]uint64](line []byte, base, bits int) (v A, err error) {
	i := 0
	for f := range bytes.FieldsSeq(line) {
		if i == len(v) {
			return v, nil
		}
		if v[i], err = strconv.ParseUint(string(f), base, bits); err != nil {
			return v, fmt.Errorf("%w in %q", err, line)
		}
		i++
	}
	if i < len(v) {
		return v, fmt.Errorf("%d of %d columns in %q", i, len(v), line)
	}
	return v, nil
}
