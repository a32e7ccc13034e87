package tools

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// isIperf3 recognises reports of --json, and events of --json-stream.
func isIperf3(output []byte) bool {
	return bytes.Contains(output, []byte(`"start"`)) && bytes.Contains(output, []byte(`"intervals"`)) ||
		bytes.Contains(output, []byte(`"test_start"`)) && bytes.Contains(output, []byte(`"event"`))
}

// readIperf3 reads all reports of an output. Each is a run.
func readIperf3(output []byte, _ Known) (Reading, error) {
	reports, err := iperf3Reports(output)
	if err != nil {
		return Reading{}, err
	}
	var all Reading
	for i, found := range reports {
		r, err := found.read()
		if err == nil && i > 0 {
			err = all.add(r)
		}
		switch {
		case err != nil && len(reports) > 1:
			return Reading{}, fmt.Errorf("report %d, in line %d: %w", i+1, found.line, err)
		case err != nil:
			return Reading{}, err
		case i == 0:
			all = r
		}
	}
	return all, nil
}

// iperf3Found is a report in an output, with its line number.
type iperf3Found struct {
	line int
	text []byte
}

func (f iperf3Found) read() (Reading, error) {
	var r iperf3Report
	if err := json.Unmarshal(f.text, &r); err != nil {
		return Reading{}, fmt.Errorf("read its report: %w", err)
	}
	if r.Error != "" {
		return Reading{}, errors.New(r.Error)
	}
	if err := iperf3Twice(f.text); err != nil {
		return Reading{}, err
	}
	// It may contain the server's report (--get-server-output).
	if n := bytes.Count(f.text, []byte(`"sum_received"`)); n > 1 && !bytes.Contains(f.text, []byte(`"server_output_json"`)) {
		return Reading{}, fmt.Errorf("its report has %d sums of what was received: another report is in it", n)
	}
	t, err := r.traffic()
	if err != nil {
		return Reading{}, err
	}
	w := spec.Workload{Stream: &t}
	conditions, err := r.conditions()
	if err != nil {
		return Reading{}, err
	}
	e, err := r.endpoint(w, nil)
	if err != nil {
		return Reading{}, err
	}
	run := Run{ID: r.identity(f.text), Pairs: []record.Endpoint{e}}
	if at := r.Start.Timestamp.Seconds; at > 0 && at < 1<<40 {
		run.Started = time.Unix(int64(at), 0).UTC()
	}
	return Reading{
		Version: ParseVersion(spec.ToolIperf3, []byte(r.Start.Version)), Workload: w, Conditions: conditions, Runs: []Run{run},
	}, nil
}

// iperf3Cookie is the minimum length of a random cookie.
const iperf3Cookie = 16

// identity returns the cookie, which both ends report, or else a hash of everything about the start and the end. The time of a
// run cannot identify it, because the clocks of the two ends may differ.
func (r iperf3Report) identity(text []byte) string {
	if r.Start.Test.Duration > 0 && len(r.Start.Cookie) >= iperf3Cookie {
		return r.Start.Cookie
	}
	var report struct{ Start, End any }
	err := json.Unmarshal(text, &report)
	sorted, err2 := json.Marshal(report)
	if err != nil || err2 != nil { // impossible, because it was decoded before
		return ""
	}
	hash := sha256.Sum256(sorted)
	return hex.EncodeToString(hash[:])
}

func (r iperf3Report) traffic() (spec.Traffic, error) {
	of := r.Start.Test
	t := spec.Traffic{
		Tool: spec.ToolIperf3, Protocol: strings.ToLower(of.Protocol), Connections: int(of.Streams), Size: spec.Bytes(of.Size),
		Warmup: spec.Duration(of.Omit * 1e9), Duration: spec.Duration(of.Duration * 1e9),
	}
	if len(r.Start.Connected) > 0 {
		t.IP = ipVersion(r.Start.Connected[0].Host)
	}
	const day = 24 * 60 * 60
	switch n := len(r.Start.Connected); {
	case t.Protocol != "tcp" && t.Protocol != "udp":
		return t, fmt.Errorf("its report has the protocol %q, not TCP or UDP", of.Protocol)
	case r.bothWays():
		return t, errors.New("it sent in both directions at once (--bidir), and a stream has one: measure each direction on its own, with and without -R")
	case of.Duration == 0 && (of.Bytes > 0 || of.Blocks > 0):
		return t, errors.New("it sent a number of bytes (-n, -k), and ran for no set time: run iperf3 with -t")
	case of.Duration == 0:
		return t, errors.New("it ran until it was stopped (-t 0), for no set time: run iperf3 with -t and a time")
	case !(of.Duration > 0 && of.Duration <= day && of.Omit >= 0 && of.Omit <= day):
		return t, fmt.Errorf("it ran for %g s after a warm-up of %g s", of.Duration, of.Omit)
	case !(of.Streams >= 1 && of.Streams <= 1024 && of.Size >= 0 && of.Size <= 1<<20):
		return t, fmt.Errorf("%g connections with messages of %g bytes", of.Streams, of.Size)
	case n > 0 && n != t.Connections:
		return t, fmt.Errorf("it was to have %d connections, and lists %d", t.Connections, n)
	}
	return t, nil
}

// bothWays reports whether both ends sent. The flag exists since 3.13, and the sums of the other direction since 3.11. Before
// that, only the doubled number of connections shows it.
func (r iperf3Report) bothWays() bool {
	sends := make(map[bool]bool)
	for _, s := range r.End.Streams {
		if s.Sender.Sends != nil {
			sends[*s.Sender.Sends] = true
		}
	}
	n := float64(len(r.Start.Connected))
	return r.Start.Test.Bidir != 0 || r.End.SentBack != nil || r.End.ReceivedBack != nil || len(sends) > 1 ||
		n > 0 && n == 2*r.Start.Test.Streams
}

// conditions returns the direction and the rate limit, as far as the report tells.
func (r iperf3Report) conditions() (map[string]string, error) {
	found := make(map[string]string)
	server := r.Start.Accepted != nil
	if of := r.Start.Test; of.Reverse != nil {
		found[Direction] = iperf3Direction(*of.Reverse == 0)
	} else if s := r.End.Streams; len(s) > 0 && s[0].Sender.Sends != nil {
		found[Direction] = iperf3Direction(*s[0].Sender.Sends != server)
	}
	if rate := r.Start.Test.Rate; rate != nil {
		found[RateLimit] = NoLimit
		if *rate > 0 {
			found[RateLimit] = fmt.Sprintf("%g Mbit/s", *rate/1e6)
		}
	}
	if rate := r.Start.Test.PacketRate; rate > 0 {
		found[RateLimit] = fmt.Sprintf("%g Mbit/s by fair queueing", rate/1e6)
	}
	if received := r.End.Received; server && found[Direction] == Reverse && received != nil && received.Bytes == 0 {
		return nil, errors.New("it is a server's report of -R, which does not have what the client received: give the client's")
	}
	return found, nil
}

func iperf3Direction(forward bool) string {
	if forward {
		return Forward
	}
	return Reverse
}

// iperf3Twice returns an error if an object of a report has two sums with the same key, as with --bidir before 3.11. Other keys
// may occur twice, such as sock_bufsize.
func iperf3Twice(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	type object struct {
		keys map[string]bool // nil for an array
		key  string          // the key whose value is next; empty if a key is next
	}
	var in []object
	for {
		token, err := d.Token()
		if err != nil { // the end, because it was decoded before
			return nil
		}
		top := len(in) - 1
		key, isKey := token.(string)
		switch {
		case token == json.Delim('}') || token == json.Delim(']'):
			in = in[:top]
			continue
		case top >= 0 && in[top].keys != nil && in[top].key == "" && isKey:
			if in[top].keys[key] && strings.HasPrefix(key, "sum") {
				return fmt.Errorf("its report has %q twice, so it sent in both directions at once (--bidir), and a stream has one: measure each direction on its own, with and without -R", key)
			}
			in[top].keys[key], in[top].key = true, cmp.Or(key, "-")
			continue
		case top >= 0:
			in[top].key = ""
		}
		switch token {
		case json.Delim('{'):
			in = append(in, object{keys: make(map[string]bool)})
		case json.Delim('['):
			in = append(in, object{})
		}
	}
}

var (
	// iperf3Begins matches the beginning of a JSON text, which may be an array of reports.
	iperf3Begins = regexp.MustCompile(`^(\{|\[\s*[\[{])`)
	// iperf3Stray matches lines that may be part of a report, or of text with figures.
	iperf3Stray = regexp.MustCompile(`^\s*["}\]]|(bits|Bytes)/sec\b|^iperf3?: `)
	// iperf3NaN matches numbers that are invalid in JSON.
	iperf3NaN = regexp.MustCompile(`:\s*-?(nan|inf)\b|[0-9]e [0-9]`)
)

// iperf3Reports finds the reports in an output: concatenated, in arrays, or as events of --json-stream. There may be other text
// between them, but no figures.
func iperf3Reports(output []byte) ([]iperf3Found, error) {
	s := iperf3Scanner{output: output}
	for at := 0; at < len(output); {
		rest := output[at:]
		if trimmed := bytes.TrimLeft(rest, " \t\r\n,"); len(trimmed) < len(rest) {
			at += len(rest) - len(trimmed)
			continue
		}
		if iperf3Begins.Match(rest) {
			n, err := s.value(at)
			if err != nil {
				return nil, err
			}
			at += n
			continue
		}
		line := rest
		if i := bytes.IndexAny(rest, "\n{"); i >= 0 {
			line = rest[:i]
		}
		if iperf3Stray.Match(line) {
			return nil, fmt.Errorf("line %d belongs to no report: %.200q", lineOf(output, at), line)
		}
		at += max(1, len(line))
	}
	switch {
	case s.events != nil:
		return nil, fmt.Errorf("its output ends too early: the events of --json-stream that begin in line %d have no \"end\"", s.events.line)
	case len(s.found) == 0:
		return nil, errors.New("it has no report of iperf3 -J")
	}
	return s.found, nil
}

// iperf3Scanner holds the reports that were found so far.
type iperf3Scanner struct {
	output []byte
	found  []iperf3Found
	events *iperf3Found // whose end is missing
	// lines is the number of line ends before the offset upTo, which only rises: counting from the start each time would be
	// slow.
	lines, upTo int
}

// line returns the line number of an offset, which must not be before the last one.
func (s *iperf3Scanner) line(at int) int {
	s.lines += bytes.Count(s.output[s.upTo:at], []byte("\n"))
	s.upTo = at
	return 1 + s.lines
}

// value reads the JSON text at an offset, and returns its length.
func (s *iperf3Scanner) value(at int) (n int, err error) {
	d := json.NewDecoder(bytes.NewReader(s.output[at:]))
	var text json.RawMessage
	if err := d.Decode(&text); err != nil {
		line := lineOf(s.output, at)
		var syntax *json.SyntaxError
		if !errors.As(err, &syntax) {
			return 0, fmt.Errorf("its output ends too early: the report that begins in line %d is incomplete", line)
		}
		wrong := lineOf(s.output, min(len(s.output), at+int(syntax.Offset)))
		if iperf3NaN.Match(s.output[at:]) {
			return 0, fmt.Errorf("line %d is not JSON, as in reports of iperf3 before 3.1.7, which may have nan and numbers such as 5e 09: %w; measure with a newer iperf3", wrong, err)
		}
		return 0, fmt.Errorf("line %d is not JSON: %w; the report begins in line %d", wrong, err, line)
	}
	return int(d.InputOffset()), s.add(text, s.line(at), 0)
}

// iperf3Deepest limits how deeply a report may be nested in lists and in an event.
const iperf3Deepest = 3

// add adds a JSON text: a report, an event, or a list of these.
func (s *iperf3Scanner) add(text json.RawMessage, line, depth int) error {
	if depth > iperf3Deepest {
		return fmt.Errorf("line %d has lists in lists: give the reports one after another", line)
	}
	if text[0] == '[' {
		return s.list(text, line, depth)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil {
		return fmt.Errorf("line %d has JSON that is no report of iperf3: %.100q", line, text)
	}
	_, isEvent := object["event"]
	_, started := object["start"]
	_, failed := object["error"]
	switch {
	case isEvent && object["data"] != nil:
		return s.event(object, line, depth)
	case started || failed:
		s.found = append(s.found, iperf3Found{line, text})
		return nil
	}
	for key, value := range object {
		if bytes.Contains(value, []byte(`"test_start"`)) {
			return fmt.Errorf("the report in line %d is not at the top, but in %q: give the report alone, as jq '.%s' prints it", line, key, key)
		}
	}
	return fmt.Errorf("line %d has JSON that is no report of iperf3: %.100q", line, text)
}

func (s *iperf3Scanner) list(text json.RawMessage, line, depth int) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if _, err := d.Token(); err != nil {
		return err
	}
	for at := 0; d.More(); {
		var one json.RawMessage
		if err := d.Decode(&one); err != nil {
			return err
		}
		begin := int(d.InputOffset()) - len(one)
		line, at = line+bytes.Count(text[at:begin], []byte("\n")), begin
		if err := s.add(one, line, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// event adds an event of --json-stream. A report consists of its start and end events.
func (s *iperf3Scanner) event(object map[string]json.RawMessage, line, depth int) error {
	var name string
	if err := json.Unmarshal(object["event"], &name); err != nil {
		return fmt.Errorf("line %d: %w", line, err)
	}
	data := object["data"]
	switch {
	case name == "start" && s.events != nil:
		return fmt.Errorf("another run starts in line %d, and the one that starts in line %d has no end", line, s.events.line)
	case name == "start":
		s.events = &iperf3Found{line, data}
	case name == "end" && s.events != nil:
		s.found = append(s.found, iperf3Found{s.events.line, fmt.Appendf(nil, `{"start":%s,"intervals":[],"end":%s}`, s.events.text, data)})
		s.events = nil
	case name == "end":
		return fmt.Errorf("a run ends in line %d that has no start", line)
	case name == "error":
		return fmt.Errorf("line %d: %.300s", line, data)
	case name == "full": // of --json-stream-full-output: the same run again
		return s.add(data, line, depth+1)
	case name == "interval" || strings.HasPrefix(name, "server_output"):
	default:
		return fmt.Errorf("line %d: the event %q of --json-stream is not read", line, name)
	}
	return nil
}
