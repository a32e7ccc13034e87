package experiment

import (
	"context"
	"fmt"
	"slices"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// A trial is judged before it counts, whatever made its traffic: its figures must be those of the path, not of an outage. One that
// is not valid has failed, and is repeated like any other. docs/explanation/method.md has the rules, and says why there is none
// about loss.

// Limits of a valid trial.
const (
	silentShare   = 0.5 // of the window
	silentLeast   = 250 * time.Millisecond
	fewestReplies = 3
	windowFactor  = 2 // by which a measured window may be longer or shorter than the planned one
)

// judge returns why pairs do not count, or nil if they do. silent is, for each of them, the longest time in which nothing arrived.
func judge(c Cell, pairs []record.Pair, silent []time.Duration) error {
	traffic := c.Workload.Traffic()
	planned := time.Duration(traffic.Duration)
	if traffic.Counted() { // the window ends when all is done
		planned = longestWindow(pairs)
	}
	// If one of several pairs gets nothing, the path was shared unfairly, which is a result.
	if least := slices.Min(silent); least > max(silentLeast, time.Duration(silentShare*float64(planned)), 3*pause(traffic)) {
		return record.StalledError(fmt.Sprintf("nothing arrived for %s of the window of %s: the network or a machine stood still, or it is too slow for so short a window (set a longer duration)",
			least.Round(time.Millisecond), planned.Round(time.Millisecond)))
	}
	if traffic.Counted() {
		return nil
	}
	if c.Workload.Stream == nil {
		got, due := replies(pairs), repliesDue(traffic, len(pairs))
		counts := got > 0 || traffic.Tool == spec.ToolNative // some tools report latencies alone
		if counts && got < min(fewestReplies, due) {
			return record.StalledError(fmt.Sprintf("%d replies arrived within the window of %s, and fewer than %d say nothing about latency: the network or a machine stood still, or it is too slow for so short a window (set a longer duration)",
				got, planned, fewestReplies))
		}
	}
	for _, p := range pairs {
		ends := []record.Endpoint{p.Client}
		if c.Workload.Stream != nil { // otherwise the server notices the edges of the window only with a message
			ends = append(ends, p.Server)
		}
		for _, e := range ends {
			if err := judgeWindow(e, planned); err != nil {
				return err
			}
		}
	}
	return nil
}

// judgeWindow returns an error if an end has measured for another time than the planned one. Some tools do not say for how long.
func judgeWindow(e record.Endpoint, planned time.Duration) error {
	measured := time.Duration(e.Seconds * float64(time.Second))
	far := measured > windowFactor*planned || measured > 0 && measured < planned/windowFactor
	if !far || (measured-planned).Abs() <= silentLeast {
		return nil
	}
	return record.StalledError(fmt.Sprintf("%s measured for %s in place of %s, so its figures are of other traffic: the machine stood still, or the tool ended too early or too late",
		e.Place, measured.Round(time.Millisecond), planned))
}

// judgeBeside returns why the workload beside does not count: without it, the figures are those of the other one alone.
func judgeBeside(c Cell, pairs []record.Pair) error {
	if c.Beside == nil {
		return nil
	}
	others, silent := make([]record.Pair, len(pairs)), make([]time.Duration, len(pairs))
	beside := Cell{Workload: *c.Beside}
	for i, p := range pairs {
		others[i] = record.Pair{Client: p.Beside.Client, Server: p.Beside.Server}
		silent[i] = time.Duration(receivingEnd(beside, &others[i]).Silent * float64(time.Second))
	}
	if err := judge(beside, others, silent); err != nil {
		return record.StalledError(fmt.Sprintf("beside it, %s: %v", c.Beside.Name, err))
	}
	return nil
}

// receivingEnd returns the end of a pair at which traffic arrives: the receiver of a stream, or the client that awaits replies.
// For a stream of another tool it is the client, which reports both.
func receivingEnd(c Cell, p *record.Pair) *record.Endpoint {
	if c.Workload.Stream == nil {
		return &p.Client
	}
	return p.Teller(c.Workload.Traffic().Tool == spec.ToolNative)
}

func longestWindow(pairs []record.Pair) (longest time.Duration) {
	for _, p := range pairs {
		longest = max(longest, time.Duration(p.Client.Seconds*float64(time.Second)))
	}
	return longest
}

func replies(pairs []record.Pair) (n uint64) {
	for _, p := range pairs {
		n += p.Client.Messages
	}
	return n
}

// pause returns how much time a set rate leaves between two messages of a pair.
func pause(t *spec.Traffic) time.Duration {
	if t.Rate == 0 {
		return 0
	}
	return time.Second / time.Duration(setRate(t))
}

// setRate returns how many messages a second are set for a pair; 0 if none are.
func setRate(t *spec.Traffic) int { return t.Rate * max(1, t.Connections) }

// repliesDue returns how many replies the set rate allows; many if there is none.
func repliesDue(t *spec.Traffic, pairs int) uint64 {
	if t.Rate == 0 {
		return fewestReplies
	}
	return uint64(float64(setRate(t)*pairs) * time.Duration(t.Duration).Seconds())
}

// judgeParts judges each pair of a mesh by itself, and makes its part fail if it does not count.
func (m *measurement) judgeParts(silent []time.Duration) {
	if m.cell.Round == 0 {
		return
	}
	for i := range m.out.PerPair {
		if context.Cause(m.parts[i].ctx) != nil {
			continue
		}
		if err := judge(m.cell, m.out.PerPair[i:i+1], silent[i:i+1]); err != nil {
			m.parts[i].cancel(err)
		}
	}
}

// silences returns for each pair the longest time in which nothing arrived. The traffic engine records it. For other tools it is
// derived from the NICs of the receiving node.
func (m *measurement) silences(pairs []pairEnds) []time.Duration {
	all := make([]time.Duration, len(pairs))
	ofNode := make(map[string]time.Duration) // pairs share nodes
	for i, p := range pairs {
		all[i] = time.Duration(receivingEnd(m.cell, &m.out.PerPair[i]).Silent * float64(time.Second))
		if all[i] > 0 || m.spec.Tool == spec.ToolNative {
			continue
		}
		node := p.client.place.Node
		if m.cell.Workload.Stream != nil {
			node = p.servers[0].place.Node
		}
		silent, known := ofNode[node]
		if !known {
			if s, err := record.DecodeSeries(m.out.Series[node]); err == nil { // without one, nothing is known
				silent = silentNICs(s)
			}
			ofNode[node] = silent
		}
		all[i] = silent
	}
	return all
}

// A NIC that receives less than quietShare of its usual rate counts as silent; it need not receive nothing, because other traffic
// of the machine continues. If its usual rate is below tellingRate, in bytes per µs, that other traffic may be all that it
// carried, so it shows nothing.
const (
	quietShare  = 0.01
	tellingRate = 0.01
)

// silentNICs returns the longest time in which the NICs of a node received next to nothing; 0 if they do not show it. The usual
// rate is the 90th percentile: the maximum may be a burst of another program, and the median may fall into the outage.
func silentNICs(s record.Series) time.Duration {
	var rates []float64 // in bytes per µs, of each interval
	for i := range max(0, len(s.At)-1) {
		var bytes uint64
		for _, n := range s.NICs {
			bytes += n.Rx[i]
		}
		rates = append(rates, ratio(float64(bytes), float64(s.At[i+1]-s.At[i])))
	}
	if len(rates) == 0 {
		return 0
	}
	usual := slices.Sorted(slices.Values(rates))[(len(rates)-1)*9/10]
	if usual < tellingRate {
		return 0
	}
	var longest, from int64
	for i, rate := range rates {
		if rate > quietShare*usual {
			from = s.At[i+1]
		}
		longest = max(longest, s.At[i+1]-from)
	}
	return time.Duration(longest) * time.Microsecond
}
