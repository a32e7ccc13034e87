package agent

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
)

// metrics holds the agent's metrics. Their names follow Prometheus' conventions: a base unit at the end, and _total for
// counters.
type metrics struct {
	set, repaired, reverted, errors prometheus.Counter
	messages, overruns, missed      prometheus.Counter
	verified                        prometheus.Gauge
	latency                         prometheus.Histogram
	passes                          *prometheus.HistogramVec
	accelerators                    map[*accel.Metric]*prometheus.Desc
}

func newMetrics(kinds map[string]accel.Kind) *metrics {
	accelerators := make(map[*accel.Metric]*prometheus.Desc)
	for _, m := range accel.Metrics(kinds) {
		accelerators[m] = prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "slipstream_" + name + "_total", Help: help})
	}
	return &metrics{
		accelerators: accelerators,
		set:          counter("settings_set", "Settings that were written because a policy wants them."),
		repaired:     counter("settings_repaired", "Settings that something else had changed, and that the agent wrote again."),
		reverted:     counter("settings_reverted", "Settings that the agent restored to their original values."),
		errors:       counter("errors", "Failed passes over the node, and failed changes in pods."),
		messages:     counter("link_messages", "Netlink messages about the node's links."),
		overruns:     counter("link_overruns", "Times that netlink messages were lost, and the agent listed all links again."),
		missed:       counter("links_missed", "Links that the agent found by listing all links and that no netlink message had announced."),
		verified: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "slipstream_last_verified_timestamp_seconds", Help: "When the settings of the node's own devices were last verified."}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "slipstream_pod_latency_seconds", Help: "Time from the first netlink message about a pod's veth until its interface is accelerated.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5, 30}}),
		passes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "slipstream_pass_duration_seconds", Help: "Duration of a pass, over the whole node or over new devices and pods only.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1}}, []string{"kind"}),
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.set, m.repaired, m.reverted, m.errors, m.messages, m.overruns, m.missed, m.verified, m.latency, m.passes}
}

// described lists the metrics that have only a description here: their values come from the agent's status.
var described []*prometheus.Desc

func newDesc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	described = append(described, d)
	return d
}

var (
	policySettings = newDesc("slipstream_policy_settings", "Settings that a policy wants.", "policy")
	policyVerified = newDesc("slipstream_policy_settings_verified", "Settings of a policy that have the value that the agent wrote.", "policy")
	policyState    = newDesc("slipstream_policy_state", "1 for the current state of a policy on this node, 0 for the others.", "policy", "state")
	policyHalted   = newDesc("slipstream_policy_rollout_halted", "1 if the rollout of a policy halted because a node failed a check, 0 if not.", "policy")
	policyProven   = newDesc("slipstream_policy_proof_current", "1 if the proof of a policy was measured on the kernel that the node runs, 0 if on others only; absent without a proof.", "policy")
	nodeDevices    = newDesc("slipstream_devices", "Devices of the node by class.", "class")
	nodePods       = newDesc("slipstream_pods", "Pods whose network namespaces the agent knows.")
	podsMissing    = newDesc("slipstream_pods_missing", "Pods whose network namespaces the agent could not find.")
)

// Describe implements prometheus.Collector.
func (a *Agent) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(a, ch) }

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	m := a.metrics
	for _, c := range m.collectors() {
		c.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	s := a.Status()
	for class, n := range s.Devices {
		gauge(nodeDevices, float64(n), class)
	}
	gauge(nodePods, float64(s.Pods))
	gauge(podsMissing, float64(s.Missing))
	a.host.Samples(s.Accelerators, func(x accel.Sample) {
		switch d := m.accelerators[x.Metric]; {
		case x.Err != nil:
			ch <- prometheus.NewInvalidMetric(d, x.Err)
		case strings.HasSuffix(x.Name, "_total"):
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, x.Value, x.Values...)
		default:
			gauge(d, x.Value, x.Values...)
		}
	})
	for _, p := range s.Policies {
		gauge(policySettings, float64(p.Settings), p.Policy)
		gauge(policyVerified, float64(p.Verified), p.Policy)
		for _, state := range []v1alpha1.State{v1alpha1.StateApplied, v1alpha1.StatePending, v1alpha1.StateFailed} {
			gauge(policyState, accel.Flag(p.State == state), p.Policy, string(state))
		}
	}
	for _, p := range a.selecting() {
		gauge(policyHalted, accel.Flag(p.Halted), p.Name)
		if p.Kernels != "" && a.kernel != "" {
			gauge(policyProven, accel.Flag(slices.Contains(strings.Split(p.Kernels, v1alpha1.KernelSeparator), a.kernel)), p.Name)
		}
	}
}

// selecting returns the policies that select the node, including those that are not applied.
func (a *Agent) selecting() []Policy {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.desired == nil {
		return nil
	}
	return a.desired.Policies
}

// maxScrapes limits the number of concurrent scrapes. cacheTime is how long gathered metrics are reused, so that a client that
// scrapes in a loop does not make the agent gather them each time.
const (
	maxScrapes = 2
	cacheTime  = 100 * time.Millisecond
)

// Metrics serves /metrics.
func (a *Agent) Metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(&cachedGatherer{from: registry}, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes}))
	return mux
}

// Health serves /healthz, which fails if a restart may help.
func (a *Agent) Health() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := a.Healthy(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// cachedGatherer gathers at most once per cacheTime.
type cachedGatherer struct {
	from prometheus.Gatherer

	mu   sync.Mutex
	at   time.Time
	last []*dto.MetricFamily
	err  error
}

// Gather implements prometheus.Gatherer.
func (l *cachedGatherer) Gather() ([]*dto.MetricFamily, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.IsZero() || time.Since(l.at) >= cacheTime {
		l.last, l.err = l.from.Gather()
		l.at = time.Now()
	}
	return l.last, l.err
}
