package agent

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"slipstream.dev/internal/accel"
)

// MetricReference describes a metric of the agent.
type MetricReference struct {
	Name, Type, Help string
	Labels           []string
}

// description matches the text of a prometheus.Desc, which shows its fields in no other way.
var description = regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), help: ("(?:[^"\\]|\\.)*"), unit: "", constLabels: \{\}, variableLabels: \{(.*)\}\}$`)

// MetricsReference describes every metric of an agent, by name.
func MetricsReference() []MetricReference {
	var all []MetricReference
	add := func(d *prometheus.Desc, kind string) {
		part := description.FindStringSubmatch(d.String())
		if part == nil {
			panic(fmt.Sprintf("cannot read the description of a metric: %s", d))
		}
		m := MetricReference{Type: kind}
		m.Name, _ = strconv.Unquote(part[1]) // the expression matches only Go strings
		m.Help, _ = strconv.Unquote(part[2])
		if part[3] != "" {
			m.Labels = strings.Split(part[3], ",")
		}
		if strings.HasSuffix(m.Name, "_total") {
			m.Type = "counter"
		}
		all = append(all, m)
	}
	m := newMetrics(accel.Kinds())
	for _, c := range m.collectors() {
		kind := "gauge"
		switch c.(type) {
		case prometheus.Histogram, *prometheus.HistogramVec:
			kind = "histogram"
		}
		ch := make(chan *prometheus.Desc, 1)
		c.Describe(ch)
		add(<-ch, kind)
	}
	for _, d := range slices.AppendSeq(slices.Clone(described), maps.Values(m.accelerators)) {
		add(d, "gauge")
	}
	slices.SortFunc(all, func(a, b MetricReference) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
