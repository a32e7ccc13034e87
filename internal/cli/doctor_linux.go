package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/report"
)

// diagnosis is what doctor prints.
type diagnosis struct {
	WindowSeconds float64           `json:"window_seconds"`
	Facts         []doctor.Evidence `json:"facts"`
	Findings      []doctor.Finding  `json:"findings"`
}

// minWindow is ten of the ticks by which CPU time is counted.
const minWindow = 100 * time.Millisecond

func doctorCommand(p Process) *cobra.Command {
	var window time.Duration
	var format string
	var probe bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what makes the container network of this machine slow or lossy",
		Long: `Check what makes the network of containers slow or lossy on this machine, in the
network namespace that doctor runs in: receive steering, MTUs, drops, offloads,
conntrack, virtual functions, CPU limits, and what slipstream itself needs. Each finding
has its evidence, what it costs, and the command that corrects it, or the experiment
that tells whether correcting it helps.

doctor changes nothing, and sends no packets. It reads counters twice, and sees only
what happens in between: run it under load, with a longer --for.

Findings are serious (packets are lost, or soon will be), warning (something works
less well than it could) or note (worth an experiment; it may be right as it is).
The exit code is 3 if there is a serious finding, and 0 otherwise.`,
		Example: `  sudo slipstream doctor
  sudo slipstream doctor --for 1m              while the applications run
  sudo slipstream doctor --probe               whether the fast path runs here, too
  slipstream doctor --format json | jq '.findings[].what'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if window < minWindow {
				return usage(fmt.Errorf("--for %s: must be at least %s", window, minWindow))
			}
			write, ok := map[string]func(io.Writer, diagnosis) error{"text": writeDiagnosis, "json": writeDiagnosisJSON}[format]
			if !ok {
				return usage(fmt.Errorf("--format %s: there is no such format; choose text or json", format))
			}
			facts, err := doctor.Look(c.Context(), window)
			if err != nil {
				return fmt.Errorf("look at this machine: %w", err)
			}
			if probe {
				facts.FastPath = accel.Probe(c.Context())(v1alpha1.Accelerator{Fastpath: &v1alpha1.Fastpath{}})
			}
			d := diagnosis{facts.Window.Seconds(), facts.Known(), doctor.Examine(facts)}
			if err := write(p.Out, d); err != nil {
				return err
			}
			if slices.ContainsFunc(d.Findings, doctor.IsSerious) {
				return exitError{code: exitSlower}
			}
			return nil
		},
	}
	f := c.Flags()
	f.DurationVar(&window, "for", time.Second, "time between the two readings of counters")
	f.StringVar(&format, "format", "text", "text or json")
	f.BoolVar(&probe, "probe", false, "try the fast path, in network namespaces of its own that it removes at once (root)")
	return c
}

func writeDiagnosisJSON(w io.Writer, d diagnosis) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}

// writeDiagnosis writes the facts as a table, and each finding as a paragraph.
func writeDiagnosis(w io.Writer, d diagnosis) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range d.Facts {
		fmt.Fprintf(tw, "%s\t%s\n", f.From, report.PlainLine(f.Value))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(d.Findings) == 0 {
		_, err := fmt.Fprintf(w, "\nNothing found. Counters were read twice, %.1f s apart.\n", d.WindowSeconds)
		return err
	}
	var b strings.Builder
	for _, f := range d.Findings {
		fmt.Fprintf(&b, "\n%s: %s (%s)\n", strings.ToUpper(string(f.Severity)), f.What, f.Rule)
		for _, e := range f.Evidence {
			fmt.Fprintf(&b, "  read   %s: %s\n", e.From, report.PlainLine(e.Value))
		}
		fmt.Fprintf(&b, "  costs  %s\n  do     %s\n", f.Cost, f.Do)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
