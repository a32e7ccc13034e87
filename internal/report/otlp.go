package report

import (
	"errors"
	"io"
	"strconv"
)

// OTLP writes the result as a request to /v1/metrics of an OpenTelemetry collector (OTLP/JSON, opentelemetry-proto's
// docs/specification.md). Its points have the time of the run, so a result can be sent later.
func OTLP(w io.Writer, m *Model) error {
	at := m.Environment.Started
	if at.IsZero() {
		return errors.New("report as otlp: its points have the time of the run, and this result does not say when it was measured")
	}
	var all []otlpMetric
	for _, f := range m.families() {
		out := otlpMetric{Name: f.name, Description: f.help}
		for _, g := range f.gauges {
			out.Gauge.Points = append(out.Gauge.Points, otlpPoint{otlpAttributes(g.labels), strconv.FormatInt(at.UnixNano(), 10), g.value})
		}
		all = append(all, out)
	}
	var request otlpRequest
	request.Resources = []otlpResource{{
		Resource: otlpEntity{otlpAttributes([]label{{"service.name", "slipstream"}, {"service.version", m.Environment.Version}})},
		Scopes:   []otlpScope{{Metrics: all}},
	}}
	request.Resources[0].Scopes[0].Scope.Name = "slipstream.dev/report"
	return writeJSON(w, request, "report")
}

// The parts of OTLP/JSON that gauges need. An integer of 64 bits is a string there, as in all of protobuf's JSON.
type (
	otlpRequest struct {
		Resources []otlpResource `json:"resourceMetrics"`
	}
	otlpResource struct {
		Resource otlpEntity  `json:"resource"`
		Scopes   []otlpScope `json:"scopeMetrics"`
	}
	otlpEntity struct {
		Attributes []otlpAttribute `json:"attributes"`
	}
	otlpScope struct {
		Scope struct {
			Name string `json:"name"`
		} `json:"scope"`
		Metrics []otlpMetric `json:"metrics"`
	}
	otlpMetric struct {
		Name        string `json:"name"`
		Description string `json:"description"`
		Gauge       struct {
			Points []otlpPoint `json:"dataPoints"`
		} `json:"gauge"`
	}
	otlpPoint struct {
		Attributes []otlpAttribute `json:"attributes"`
		Time       string          `json:"timeUnixNano"`
		Value      float64         `json:"asDouble"`
	}
	otlpAttribute struct {
		Key   string    `json:"key"`
		Value otlpValue `json:"value"`
	}
	otlpValue struct {
		Text string `json:"stringValue"`
	}
)

func otlpAttributes(labels []label) []otlpAttribute {
	var all []otlpAttribute
	for _, l := range labels {
		all = append(all, otlpAttribute{l.name, otlpValue{l.text()}})
	}
	return all
}
