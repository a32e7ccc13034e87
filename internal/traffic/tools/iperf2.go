package tools

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// iperf2 makes streams over TCP. Read also reads its results, in all its formats. Checked against 2.0.5 (text) and 2.1.8 (text,
// -e, -y C).
//
// Figures in the text have three digits. Those of -y C are exact.

var (
	// iperf2Other is a direction other than from the client to the server, of 2.0.14 and later: "[ *1] 0.0000-10.0100 sec …"
	// and "[FD1] 0.0000-…".
	iperf2Other = regexp.MustCompile(`^\[ *(\*|FD)\d+\] +[0-9.]+- *[0-9.]+ sec`)
	// iperf2Line matches "[  3]  0.0-10.0 sec  1.10 GBytes   941 Mbits/sec". A server's report for UDP continues with
	// "0.106 ms 24605/512674 (4.8%)", and -e adds more figures.
	iperf2Line = regexp.MustCompile(`^\[ *(\d+|SUM)\] +([0-9.]+)- *([0-9.]+) sec +([0-9.]+) ([KMGT]?)Bytes +([0-9.]+) ([KMGT]?)(bits|Bytes)/sec(?: +([0-9.]+) ms +(\d+)/ *(\d+) \(.*)?`)
	// iperf2Late is "[  3]  0.0-60.0 sec  1 datagrams received out-of-order".
	iperf2Late = regexp.MustCompile(`^\[ *\d+\] .* sec +(\d+) datagrams received out-of-order`)
	// iperf2Head is "Client connecting to 10.0.0.2, TCP port 5001".
	iperf2Head = regexp.MustCompile(`^Client connecting to (\S+), (TCP|UDP) port \d+`)
	// iperf2Listens is the beginning of a server's output.
	iperf2Listens = regexp.MustCompile(`^Server listening on (TCP|UDP) port \d+`)
	// iperf2Local is "[  3] local 10.0.0.1 port 40000 connected with 10.0.0.2 port 5001".
	iperf2Local = regexp.MustCompile(`^\[ *\d+\] local .* connected with `)
	// iperf2Sends matches "Sending 1470 byte datagrams, IPG target: 2243.04 us (kalman adjust)", with the time between
	// datagrams.
	iperf2Sends = regexp.MustCompile(`^Sending (\d+) byte datagrams(?:, IPG target: +([0-9.]+) us)?`)
	// iperf2Writes is "Write buffer size: 131072 Byte", of -e.
	iperf2Writes = regexp.MustCompile(`^Write buffer size: +(.*)$`)
	// iperf2Stray matches a line of a report, or of -y C.
	iperf2Stray = regexp.MustCompile(`(?m)^\[[^\]]*\] .* sec\b.*$|^[-+]?\d{4,}[^,\n]*(?:,[^,\n]*){6,}$`)
	// iperf2Identity matches the lines by which two runs differ. At line rate the reports of 2.0 are equal, but not the ports.
	iperf2Identity = regexp.MustCompile(iperf2Stray.String() + `|(?m)` + iperf2Local.String())
	// iperf2None matches lines of a report that are not used, such as a histogram.
	iperf2None = regexp.MustCompile(`-PDF[:(]|Sent \d+ datagrams`)
	// iperf2CSV matches the time, both addresses, the connection, and the interval. With -e, 2.1.9 and later begin with the
	// time zone, and 2.2.0 and later have two fields for the interval.
	iperf2CSV = regexp.MustCompile(`^([-+]\d{4}:)?\d{14}[^,]*,[^,]*,\d+,[^,]*,\d+,-?\d+,[0-9.]+[-,][0-9.]+,`)
)

type iperf2 struct{}

func (iperf2) Check(w spec.Workload) error {
	if w.Stream == nil || w.Stream.Protocol != "tcp" {
		return errors.New("iperf 2 makes streams over TCP only: over UDP its client does not report what arrived")
	}
	return nil
}

func (iperf2) ServerArgv(w spec.Workload, addr netip.Addr, port uint16) []string {
	argv := []string{
		"iperf", "--server", "--bind", addr.String(), "--port", strconv.Itoa(int(port)),
		"--len", strconv.Itoa(int(w.Stream.Size)),
	}
	return iperf2IP(argv, addr)
}

func (iperf2) ServerReady(line []byte) bool {
	return bytes.HasPrefix(line, []byte("Server listening on "))
}

func (iperf2) ClientArgv(w spec.Workload, addr netip.Addr, port uint16, cc, _ string) []string {
	t := w.Stream
	// iperf 2 has no warm-up: Parse ignores the seconds of the warm-up.
	argv := []string{
		"iperf", "--client", addr.String(), "--port", strconv.Itoa(int(port)), "--reportstyle", "C", "--interval", "1",
		"--parallel", strconv.Itoa(t.Connections),
		"--len", strconv.Itoa(int(t.Size)),
		"--time", strconv.FormatInt(wholeSeconds(time.Duration(t.Warmup))+wholeSeconds(time.Duration(t.Duration)), 10),
	}
	if cc != "" {
		argv = append(argv, "-Z", cc)
	}
	return iperf2IP(argv, addr)
}

// iperf2IP adds the option for IPv6, which iperf 2 does not derive from the address.
func iperf2IP(argv []string, addr netip.Addr) []string {
	if addr.Is6() {
		return append(argv, "--ipv6_domain")
	}
	return argv
}

func (iperf2) Lead(w spec.Workload) time.Duration { return iperf3{}.Lead(w) }

// Parse adds up the seconds of the window as the sender counts them, which includes what is still in its socket buffer.
func (iperf2) Parse(w spec.Workload, output []byte) (record.Endpoint, error) {
	o := newIperf2Output()
	for line := range bytes.Lines(output) {
		if err := o.line(strings.TrimRight(string(line), "\r\n")); err != nil {
			return record.Endpoint{}, fmt.Errorf("iperf2: %w", err)
		}
	}
	from := float64(wholeSeconds(time.Duration(w.Stream.Warmup)))
	e := record.Endpoint{Seconds: float64(wholeSeconds(time.Duration(w.Stream.Duration)))}
	seconds := 0.0
	for id, sums := range o.sums {
		for _, s := range sums {
			if id != "SUM" && s.from >= from && s.to <= from+e.Seconds && s.bytes >= 0 && s.bytes < math.MaxInt64 {
				e.Bytes += uint64(s.bytes)
				seconds += s.to - s.from
			}
		}
	}
	if want := e.Seconds * float64(w.Stream.Connections); math.Abs(seconds-want) > 0.5 {
		return record.Endpoint{}, fmt.Errorf("iperf2: its report has %.0f of the window's %.0f seconds of connections; %s", seconds, want, cmp.Or(o.failed, "it ended too early"))
	}
	e.BitsPerSecond = float64(e.Bytes) * 8 / e.Seconds
	return e, plausible(e)
}

// iperf2Sum is the report for an interval, of one connection or of all together.
type iperf2Sum struct {
	from, to            float64 // s
	bytes, bits         float64 // bytes, and bytes per second
	jitter, lost, total float64 // of a server's report
	report              bool
}

// iperf2Output holds what was found in a client's output so far.
type iperf2Output struct {
	traffic    spec.Traffic
	conditions map[string]string
	// sums holds the reports by connection, in order, those of all connections under "SUM". reports are those of servers.
	sums    map[string][]iperf2Sum
	reports []iperf2Sum
	late    float64
	failed  string // the first line that reports an error
	// server means that a server listened in the same process. ends holds the addresses and ports of each connection of -y C.
	server bool
	ends   map[string][2]string
	ports  map[string]bool // the destinations of connections of -y C
	half   bool            // the line has no newline
}

func newIperf2Output() iperf2Output {
	return iperf2Output{sums: make(map[string][]iperf2Sum), ends: make(map[string][2]string), ports: make(map[string]bool)}
}

// errBothWays is for output in which the server sends too.
var errBothWays = errors.New("traffic from the server to the client too (-d, -r, --full-duplex, --reverse): a stream goes from the client to the server; run iperf without the option, and swap the ends for the other direction; if a server's output is in the file, too, leave it out")

func isIperf2(output []byte) bool {
	for line := range bytes.Lines(output) {
		if iperf2Head.Match(line) || iperf2CSV.Match(line) || iperf2Listens.Match(line) {
			return true
		}
	}
	return false
}

// readIperf2 reads all runs of an output. In the text, a run begins with its heading. In -y C, it begins where the ends of a
// connection change, or its time starts over.
func readIperf2(output []byte, known Known) ([]Reading, error) {
	starts := iperf2Starts(output)
	if len(starts) == 0 {
		starts = []int{0}
	}
	return one(func(output []byte, known Known) (Reading, error) {
		if at := iperf2Stray.FindIndex(output[:starts[0]]); at != nil {
			return Reading{}, fmt.Errorf("line %d belongs to no run, because it precedes the heading in line %d: %.200q",
				lineOf(output, at[0]), lineOf(output, starts[0]), lineAt(output, at[0]))
		}
		return sections(output, starts, iperf2Identity, known, readIperf2Run)
	})(output, known)
}

// iperf2Starts returns the offset of each run. The lines of a server in the client's process (-d, -r), and of other threads,
// may be printed before the heading of their run.
func iperf2Starts(output []byte) (starts []int) {
	var csv iperf2Ends
	early, at := -1, 0 // the first line that may belong to the next run
	for line := range bytes.Lines(output) {
		switch {
		case iperf2Head.Match(line):
			if early < 0 {
				early = at
			}
			starts, early, csv = append(starts, early), -1, nil
		case iperf2CSV.Match(line):
			if early = -1; csv.begins(string(bytes.TrimSpace(line))) {
				starts = append(starts, at)
			}
		case iperf2Stray.Match(line):
			early = -1
		case early < 0 && (bytes.HasPrefix(line, []byte("Server listening on")) || iperf2Local.Match(line)):
			early = at
		}
		at += len(line)
	}
	if early >= 0 && len(starts) == 0 {
		starts = []int{early}
	}
	return starts
}

// iperf2Ends holds what was read of each connection of a run of -y C, by its number.
type iperf2Ends map[string]*iperf2Connection

type iperf2Connection struct {
	from, to string  // address and port
	until    float64 // end of the last interval, s
	at       string  // time of the last line
	lines    int
	// intervals means that intervals after the first were read, whole that the whole run was read after those.
	intervals, whole bool
}

// begins records a line of -y C, and reports whether a run begins with it.
func (e *iperf2Ends) begins(line string) bool {
	f, err := iperf2Fields(line)
	if err != nil { // refused when it is read
		return *e == nil
	}
	begin, end, _ := strings.Cut(f[6], "-")
	var since, until float64
	if err := numbers(map[*float64]string{&since: begin, &until: end}); err != nil {
		return *e == nil
	}
	from, to := f[1]+":"+f[2], f[3]+":"+f[4]
	c := (*e)[f[5]]
	switch {
	case c != nil && portOf(from) != "0" && portOf(from) == portOf(c.to): // a server's report, or the other direction
		return false
	case c != nil && from == c.from && to == c.to && !c.again(f[0], since, until):
		return false
	case c != nil || *e == nil:
		*e = iperf2Ends{f[5]: {from: from, to: to, until: until, at: f[0], lines: 1}}
		return true
	}
	(*e)[f[5]] = &iperf2Connection{from: from, to: to, until: until, at: f[0], lines: 1}
	return false
}

// again reports whether an interval belongs to another run: the previous one is complete, and the time starts over.
func (c *iperf2Connection) again(at string, since, until float64) bool {
	if since == 0 {
		whole := until >= c.until-0.05 && !c.whole && (c.intervals || until > c.until+0.05 || c.lines == 1 && at == c.at)
		if !whole {
			return true
		}
		c.whole = true
	}
	c.intervals = c.intervals || since > 0
	c.until, c.at, c.lines = max(c.until, until), at, c.lines+1
	return false
}

func readIperf2Run(output []byte, _ Known) (Reading, error) {
	o := newIperf2Output()
	number := 0
	for raw := range bytes.Lines(output) {
		number++
		line := strings.TrimRight(string(raw), "\r\n")
		o.half = len(line) == len(raw)
		if err := o.line(line); err != nil {
			return Reading{}, &lineError{number, err}
		}
	}
	if o.traffic.Protocol == "" {
		return Reading{}, errors.New("it is a server's output, which may be of several runs: give the client's")
	}
	e, err := o.endpoint()
	if err != nil {
		return Reading{}, err
	}
	if math.Round(e.Seconds) == 0 {
		return Reading{}, fmt.Errorf("a window of %g s", e.Seconds)
	}
	o.traffic.Tool, o.traffic.Duration = spec.ToolIperf2, spec.Duration(iperf2Duration(e.Seconds)*1e9)
	return Reading{Workload: spec.Workload{Stream: &o.traffic}, Conditions: o.conditions, Late: true, Runs: []Run{{Pairs: []record.Endpoint{e}}}}, nil
}

// iperf2Duration returns the set duration, in whole seconds. A run ends when all data is sent: sometimes up to 0.1 s early, and
// late if the network is slow.
func iperf2Duration(seconds float64) float64 { return max(1, math.Floor(seconds+0.1)) }

func (o *iperf2Output) line(line string) error {
	if m := iperf2Line.FindStringSubmatch(line); m != nil {
		s := iperf2Sum{report: m[9] != ""}
		err := numbers(map[*float64]string{&s.from: m[2], &s.to: m[3], &s.bytes: m[4], &s.bits: m[6]})
		if s.report && err == nil {
			err = numbers(map[*float64]string{&s.jitter: m[9], &s.lost: m[10], &s.total: m[11]})
		}
		// Units of bytes are powers of 1024, units of bits powers of 1000 (byte_snprintf in stdio.c).
		s.bytes *= math.Pow(1024, iperf2Power(m[5]))
		if m[8] == "bits" {
			s.bits *= math.Pow(1000, iperf2Power(m[7]))
		} else {
			s.bits *= 8 * math.Pow(1024, iperf2Power(m[7]))
		}
		o.add(m[1], s)
		return err
	}
	switch m, late := iperf2Head.FindStringSubmatch(line), iperf2Late.FindStringSubmatch(line); {
	case m != nil && o.traffic.Protocol != "":
		return errors.New("another run begins")
	case m != nil && o.server, iperf2Other.MatchString(line):
		return errBothWays
	case strings.HasPrefix(line, "Server listening on"):
		if o.server = true; o.traffic.Protocol != "" {
			return errBothWays
		}
	case m != nil:
		o.traffic.Protocol, o.traffic.IP = strings.ToLower(m[2]), ipVersion(m[1])
	case late != nil:
		n, err := strconv.ParseFloat(late[1], 64)
		o.late += n
		return err
	case iperf2Local.MatchString(line):
		o.traffic.Connections++
	case iperf2CSV.MatchString(line):
		return o.csv(line)
	case o.half && len(o.ends) > 0: // between lines of -y C
		return fmt.Errorf("it has no line end, and may be half a line of -y C: %.200q; if the file is complete, remove it", line)
	case strings.HasPrefix(line, "time,srcaddress,") && !strings.Contains(line, ",tcpretry,"):
		return fmt.Errorf("the columns of -y C are not those of TCP: %.200q", line)
	case iperf2Sends.MatchString(line):
		return o.sends(iperf2Sends.FindStringSubmatch(line))
	case iperf2Writes.MatchString(line):
		o.condition("write size", iperf2Writes.FindStringSubmatch(line)[1])
	case strings.Contains(line, "ounce-back") || strings.Contains(line, "BB cnt="):
		return errors.New("it is a test of --bounceback, which is not read: measure round trips with sockperf pp")
	case iperf2Stray.MatchString(line) && !iperf2None.MatchString(line):
		if o.half {
			return fmt.Errorf("it has no line end, and is incomplete: %.200q", line)
		}
		if strings.Contains(line, "nan ") {
			return fmt.Errorf("the server reports no measurement: %.200q", line)
		}
		return fmt.Errorf("it is not understood: %.200q; give the output as iperf printed it, or run it again", line)
	case o.failed == "" && (strings.Contains(line, "failed") || strings.Contains(line, "WARNING")):
		o.failed = line
	}
	return nil
}

// sends records the size and the rate of datagrams.
func (o *iperf2Output) sends(m []string) error {
	n, err := strconv.Atoi(m[1])
	o.traffic.Size = spec.Bytes(n)
	if err != nil || m[2] == "" {
		return err
	}
	micros, err := strconv.ParseFloat(m[2], 64)
	if err == nil && micros > 0 {
		o.condition(RateLimit, fmt.Sprintf("%.4g Mbit/s", 8*float64(n)/micros))
	}
	return err
}

func (o *iperf2Output) condition(name, value string) {
	if o.conditions == nil {
		o.conditions = make(map[string]string)
	}
	o.conditions[name] = value
}

// csv parses a line of -y C: time, addresses and ports, connection, interval, bytes, bits per second, and for UDP jitter in ms,
// lost, total, per cent, out of order (reportCSV_bw_jitter_loss_format in Locale.c). The connection -1 is the sum.
func (o *iperf2Output) csv(line string) error {
	f, err := iperf2Fields(line)
	if err != nil {
		return err
	}
	// 2.0.5 writes what a client has sent over UDP with the fields of TCP.
	measured := len(f) == 14
	protocol := "tcp"
	if measured || o.traffic.Protocol == "udp" {
		protocol = "udp"
	}
	o.traffic.Protocol, o.traffic.IP = protocol, ipVersion(f[3])
	from, to, _ := strings.Cut(f[6], "-")
	var s iperf2Sum
	if err := numbers(map[*float64]string{&s.from: from, &s.to: to, &s.bytes: f[7], &s.bits: f[8]}); err != nil {
		return fmt.Errorf("%w: give the lines as iperf -y C printed them", err)
	}
	if err := o.between(f[5], f[1]+":"+f[2], f[3]+":"+f[4], protocol); err != nil {
		return err
	}
	// The last number is complete if it agrees with the bytes.
	if agrees := math.Abs(s.bits*(s.to-s.from)-8*s.bytes) <= 4*s.bytes; o.half && (measured || !agrees) {
		return fmt.Errorf("it has no line end, so its last number may be truncated: %.200q; if the file is complete, add a line end", line)
	}
	if measured {
		var late float64
		if err := numbers(map[*float64]string{&s.jitter: f[9], &s.lost: f[10], &s.total: f[11], &late: f[13]}); err != nil {
			return err
		}
		// Without a server's report the client prints zeros here.
		if s.report = s.total > 0; s.report {
			o.late += late
		}
	}
	id := f[5]
	if id == "-1" {
		id = "SUM"
	}
	o.add(id, s)
	return nil
}

// iperf2Fields splits a line of -y C. The interval is one field.
func iperf2Fields(line string) ([]string, error) {
	f := strings.Split(line, ",")
	enhanced := line[0] == '+' || line[0] == '-'
	switch n := len(f); {
	case !enhanced && (n == 9 || n == 14), enhanced && n == 15:
	case enhanced && n == 17:
		f = append(append(slices.Clone(f[:6]), f[6]+"-"+f[7]), f[8:]...)
	default:
		return nil, fmt.Errorf("a line of -y C with %d fields, want 9, or 14 of UDP; with -e 15 or 17", n)
	}
	return f, nil
}

// between records the ends of a connection. They differ in another run, and are swapped in a server's report for UDP and in the
// other direction.
func (o *iperf2Output) between(id, from, to, protocol string) error {
	was, ok := o.ends[id]
	if !ok {
		was = [2]string{from, to}
		o.ends[id] = was
		if port := portOf(to); port != "0" {
			o.ports[port] = true
		}
	}
	switch exchanged := was == [2]string{to, from}; {
	case protocol == "tcp" && o.ports[portOf(from)]:
		return errBothWays
	case protocol == "tcp" && serverSends(from, to):
		return fmt.Errorf("a connection from %s to %s, as a server reports it, or iperf with traffic from the server (-r, --full-duplex, --reverse): give the client's output, of iperf without these options", from, to)
	case was != [2]string{from, to} && !(exchanged && protocol == "udp"):
		return fmt.Errorf("another run begins: connection %s is from %s to %s, and was from %s to %s", id, from, to, was[0], was[1])
	}
	return nil
}

// firstEphemeral is the first port that Linux chooses for clients.
const firstEphemeral = 32768

// serverSends reports whether a connection comes from a server, as with -R: its port was set, and the kernel chose the other.
func serverSends(from, to string) bool {
	a, err1 := strconv.Atoi(portOf(from))
	b, err2 := strconv.Atoi(portOf(to))
	return err1 == nil && err2 == nil && a > 0 && a < firstEphemeral && b >= firstEphemeral
}

// portOf returns the port of an address with a port, which is 0 in a sum.
func portOf(end string) string { return end[strings.LastIndex(end, ":")+1:] }

func (o *iperf2Output) add(id string, s iperf2Sum) {
	if s.report {
		o.reports = append(o.reports, s)
		return
	}
	o.sums[id] = append(o.sums[id], s)
}

// endpoint adds up the connections: over TCP as the sender counts them, over UDP as the servers report.
func (o *iperf2Output) endpoint() (record.Endpoint, error) {
	ids := slices.Sorted(maps.Keys(o.sums))
	connections := len(ids)
	if slices.Contains(ids, "SUM") {
		connections--
		if o.traffic.Protocol == "tcp" {
			ids = []string{"SUM"}
		}
	}
	o.traffic.Connections = max(o.traffic.Connections, connections)
	var all []iperf2Sum
	for _, id := range ids {
		whole, ok := whole(o.sums[id])
		if !ok {
			return record.Endpoint{}, errors.New("its output ends too early: there are intervals, but no summary line; give the whole output of a client that was not killed")
		}
		all = append(all, whole)
	}
	if o.traffic.Protocol == "udp" {
		if all = o.reports; len(all) == 0 || len(all) != o.traffic.Connections {
			return record.Endpoint{}, fmt.Errorf("it has %d reports of the server for %d connections, want one each: over UDP only these say what arrived; give the client's output, without the server's", len(all), o.traffic.Connections)
		}
	}
	if len(all) == 0 {
		if o.failed != "" {
			return record.Endpoint{}, fmt.Errorf("%.200s", o.failed)
		}
		return record.Endpoint{}, errors.New("its output ends too early: there is no summary line")
	}
	if o.traffic.Protocol == "tcp" && ids[0] != "SUM" && connections < o.traffic.Connections {
		return record.Endpoint{}, fmt.Errorf("its output ends too early: %d of %d connections have a summary line", connections, o.traffic.Connections)
	}
	var e record.Endpoint
	var size, lost, arrived, jitter float64
	for _, s := range all {
		e.Seconds = max(e.Seconds, s.to)
		e.BitsPerSecond += s.bits
		size, lost, arrived = size+s.bytes, lost+s.lost, arrived+s.total-s.lost
		jitter += s.jitter / 1e3 / float64(len(all))
	}
	for _, n := range []float64{size, lost, arrived, o.late} {
		if !(n >= 0 && n < math.MaxInt64) {
			return record.Endpoint{}, fmt.Errorf("a count of %g", n)
		}
	}
	e.Bytes = uint64(size)
	if o.traffic.Protocol == "udp" {
		e.Messages, e.Lost, e.Reordered, e.Jitter = uint64(arrived), uint64(lost), uint64(o.late), jitter
	}
	return e, plausible(e)
}

// whole returns the report of the whole run among those of its intervals. The last interval ends with the run, except for a
// small difference of their clocks.
func whole(sums []iperf2Sum) (of iperf2Sum, ok bool) {
	end := 0.0
	for _, s := range sums {
		end = max(end, s.to)
		if s.from == 0 && s.to >= of.to {
			of = s
		}
	}
	return of, of.to > 0 && of.to >= end-0.05
}

// numbers parses texts into variables.
func numbers(texts map[*float64]string) error {
	for to, text := range texts {
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		*to = v
	}
	return nil
}

// iperf2Power returns the power of a unit: 0 for none, 1 for K.
func iperf2Power(unit string) float64 { return float64(strings.Index(" KMGT", cmp.Or(unit, " "))) }

// ipVersion returns the IP version of an address, or 0 for a name.
func ipVersion(addr string) int {
	a, err := netip.ParseAddr(addr)
	switch {
	case err != nil:
		return 0
	case a.Is4():
		return 4
	}
	return 6
}
