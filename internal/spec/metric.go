package spec

import "slipstream.dev/internal/metrics"

// Gives reports whether a trial of the workload can have a metric.
func (w Workload) Gives(metric string) bool {
	m := metrics.Get(metric)
	if w.Beside != "" {
		return m.Of&(w.kinds()|metrics.Accompanied) != 0 && !m.Alone
	}
	return m.Of&w.kinds() != 0
}

// kinds returns the kinds of the workload's traffic.
func (w Workload) kinds() metrics.Traffic {
	t := w.Traffic()
	udp := t.Protocol == "udp"
	switch {
	case w.Stream != nil && udp:
		return metrics.Streams | metrics.DatagramStreams
	case w.Stream != nil && t.Messages():
		return metrics.Streams | metrics.MessageStreams
	case w.Stream != nil:
		return metrics.Streams
	case w.HTTP != nil && t.Requests > 0:
		return metrics.Answered | metrics.HTTP | metrics.CountedRequests
	case w.HTTP != nil:
		return metrics.Answered | metrics.HTTP
	case t.Tool == ToolLatte:
		return metrics.Answered | metrics.ClientMachine
	case udp && t.CountsLost():
		return metrics.Answered | metrics.AnsweredDatagrams
	}
	return metrics.Answered
}
