package v1alpha1

// Metrics are the names of all that results can be compared by, as summary.json has them.
func Metrics() []string {
	return []string{
		"throughput", "rate", "latency_mean", "latency_p50", "latency_p99", "latency_p999", "latency_max", "completion", "jitter",
		"cpu_per_gb", "softirq_per_gb", "cpu_per_message", "interrupts_per_message", "context_switches_per_message",
	}
}

// MetricsOf are those that a workload can give.
func MetricsOf(w Workload) []string {
	t := w.Traffic()
	switch {
	case w.Stream != nil && t.Protocol == "udp":
		return []string{"throughput", "rate", "jitter", "cpu_per_gb", "softirq_per_gb"}
	case w.Stream != nil:
		return []string{"throughput", "cpu_per_gb", "softirq_per_gb"}
	}
	answered := []string{
		"rate", "latency_mean", "latency_p50", "latency_p99", "latency_p999", "latency_max",
		"cpu_per_message", "interrupts_per_message", "context_switches_per_message",
	}
	if w.HTTP != nil && t.Requests > 0 {
		answered = append(answered, "completion")
	}
	return answered
}
