package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// TestWarnings checks that no warning of a trial gets lost, and that none that the summary already
// has is repeated.
func TestWarnings(t *testing.T) {
	f, s := eventful(t)
	f.trials[0].Warnings = []record.Warning{
		{Code: record.WarnSharedCPUs, Message: "a trial's own words"},
		{Code: record.WarnSteal, Message: "4% of the CPU time was stolen"},
	}
	got := New(f.exp, s, f.trials, f.env).Warnings
	warning := func(code string, s record.Severity, message, where string) Warning {
		w := newWarning(code)
		w.Severity, w.Entries = s, []Entry{{message, where}}
		return w
	}
	failed := warning(record.WarnFailedTrials, record.Caution, "1 of 7 attempts failed; 6 blocks have a trial that succeeded", "rps+ stream 1 pair")
	failed.Entries = append(failed.Entries, Entry{"12 of 12 attempts failed; 0 blocks have a trial that succeeded", "rfs+ pingpong 4 pairs"})
	want := []Warning{
		failed,
		warning(record.WarnRetransmits, record.Caution, "1.2% of the segments were sent again, up to 2.1% in block 3", "rfs stream 4 pairs"),
		warning(record.WarnSteal, record.Caution, "4% of the CPU time was stolen", "native stream 1 pair"),
		warning(record.WarnSharedCPUs, record.Note, "node0 and node1 share CPUs 0-1", "everywhere"),
	}
	want[3].Everywhere = true
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

// TestUnreadableLatencies: trials whose latencies cannot be read make one warning. It names each of
// them, and comes before less severe warnings.
func TestUnreadableLatencies(t *testing.T) {
	f, s := eventful(t)
	for i, tr := range f.trials {
		if tr.Block <= 2 && tr.Variant == "vxlan" && tr.Workload == "pingpong" && tr.Pairs == 4 {
			f.trials[i].Latency = "not a histogram"
		}
	}
	m := New(f.exp, s, f.trials, f.env)
	var codes, messages []string
	for _, w := range m.Warnings {
		codes = append(codes, w.Code)
		if w.Code != record.WarnLatencyUnreadable {
			continue
		}
		for _, e := range w.Entries {
			block, _, _ := strings.Cut(e.Message, ":")
			messages = append(messages, block+" of "+e.Where)
		}
	}
	want := []string{record.WarnFailedTrials, record.WarnRetransmits, record.WarnLatencyUnreadable, record.WarnSharedCPUs}
	if diff := cmp.Diff(want, codes); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	want = []string{"block 1 of vxlan pingpong 4 pairs", "block 2 of vxlan pingpong 4 pairs"}
	if diff := cmp.Diff(want, messages); diff != "" {
		t.Errorf("trials that cannot be read (-want +got):\n%s", diff)
	}
	if n := strings.Count(render(t, HTML, m), `id="warning-latency-unreadable"`); n != 1 {
		t.Errorf("%d elements have the warning's anchor, want 1", n)
	}
}

// TestWarningsStandWhereTheyMatter: serious warnings come before the first table, those about every
// row at the head of the comparison, and those about CPU time at its figures.
func TestWarningsStandWhereTheyMatter(t *testing.T) {
	f := demo(t)
	s := f.summary()
	warn(s, record.Warning{Code: record.WarnHeld, Message: "node0 is accelerated"}, func(r stats.Row) bool { return r.Variant == "rps" })
	warn(s, record.Warning{Code: record.WarnSteal, Message: "2% was stolen"}, func(stats.Row) bool { return true })
	warn(s, record.Warning{Code: record.WarnNoEBPF, Message: "no eBPF"}, func(stats.Row) bool { return true })
	page := render(t, HTML, New(f.exp, s, f.trials, f.env))
	var at []int
	for _, text := range []string{"<h1>", "gains are understated", `id="comparison"`, "took CPU time", "<table class=\"stack bars comparison", `title="The baseline was accelerated too`, `id="cpu"`, "Softirq time is approximate", `id="warnings"`} {
		at = append(at, strings.Index(page, text))
	}
	if !slices.IsSorted(at) || at[0] < 0 {
		t.Errorf("they stand at %v, which is not their order", at)
	}
}
