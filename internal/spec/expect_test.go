package spec

import (
	"strings"
	"testing"
)

const expectExperiment = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  baseline: vxlan
  variants: [{name: vxlan}, {name: fastpath, accelerate: [{fastpath: {}}]}]
  workloads:
  - {name: stream, stream: {duration: 1s}}
  - {name: pingpong, pingpong: {duration: 1s}}
  expect:
  - `

func TestExpect(t *testing.T) {
	for text, want := range map[string]string{
		"{variant: fastpath, faster: vxlan, metric: throughput}":                     "fastpath is faster than vxlan in throughput",
		"{variant: fastpath, notSlower: vxlan}":                                      "fastpath is not slower than vxlan",
		"{variant: vxlan, same: fastpath, metric: latency_p99, workload: pingpong}":  "vxlan is the same as fastpath in latency_p99 of pingpong",
		"{variant: fastpth, faster: vxlan}":                                          `spec.expect[0].variant: no variant has the name "fastpth"; did you mean fastpath?`,
		"{variant: fastpath, faster: vxlam}":                                         `spec.expect[0].faster: no variant has the name "vxlam"; did you mean vxlan?`,
		"{variant: fastpath, faster: vxlan, metric: latency_p5}":                     `spec.expect[0].metric: there is no metric "latency_p5"; did you mean latency_p50?`,
		"{variant: fastpath, faster: vxlan, metric: throughput, workload: pingpong}": "spec.expect[0].metric: pingpong gives no throughput",
		"{variant: fastpath, faster: vxlan, metric: completion}":                     "spec.expect[0].metric: no workload gives completion",
		"{variant: fastpath, faster: vxlan, workload: ping}":                         `spec.expect[0].workload: no workload has the name "ping"; did you mean pingpong?`,
		"{variant: fastpath, same: vxlan, metric: interrupts_per_gb}":                "fastpath is the same as vxlan in interrupts_per_gb",
		"{variant: fastpath, same: vxlan, metric: receiver_sleeps_per_gb}":           "spec.expect[0].metric: receiver_sleeps_per_gb is compared with nothing: an end may never sleep, and there is no ratio to 0",
		"{variant: fastpath, same: vxlan, metric: retransmit_share}":                 `spec.expect[0].metric: there is no metric "retransmit_share"`,
		"{variant: fastpath}":                             "spec.expect[0]: must have one of faster, notSlower or same, has none",
		"{variant: fastpath, faster: vxlan, same: vxlan}": "spec.expect[0]: must have only one of",
		"{variant: fastpath, faster: fastpath}":           "spec.expect[0].faster: must be another variant than fastpath",
		"{faster: vxlan}":                                 "spec.expect[0].variant: is missing",
		"{variant: fastpath, quicker: vxlan}":             "spec.expect[0].quicker: unknown field",
	} {
		e, err := Parse("test.yaml", []byte(expectExperiment+text+"\n"), nil)
		if err != nil {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s:\n%v\nwant %q", text, err, want)
			}
			continue
		}
		if got := e.Spec.Expect[0].String(); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
		writtenAndRead(t, text, e)
	}
}
