package cli

import (
	"context"
	"errors"
	"strings"
	"testing"

	"slipstream.dev/api/v1alpha1"
)

// TestRunLeavesOut: a run on a machine that lacks the fast path says so and measures the rest, unless a
// flag names what lacks.
func TestRunLeavesOut(t *testing.T) {
	at := &site{probe: func(context.Context) func(v1alpha1.Accelerator) error {
		return func(a v1alpha1.Accelerator) error {
			if a.Fastpath != nil {
				return errors.New("this kernel lacks tcx (since Linux 6.6)")
			}
			return nil
		}
	}}
	for set, want := range map[string]string{
		"":                                    "",
		"spec.pairs=[1]":                      "",
		"spec.variants.rps.nic.mtu=9000":      "",
		"spec.variants.fastpath.nic.mtu=9000": "--set spec.variants.fastpath.nic.mtu=9000 names variant fastpath",
		"spec.variants=[{name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}, {name: fastpath, accelerate: [{fastpath: {}}]}]": "names variant fastpath",
	} {
		var o runOptions
		if set != "" {
			o.set = []string{set}
		}
		exp, err := o.load([]string{"demo"})
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		out, err := leaveOut(t.Context(), at, exp, o.set, func(text string) { said = append(said, text) })
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("--set %s: error %v, want %q", set, err, want)
			}
			continue
		}
		if err != nil || len(out) != 1 || strings.Join(said, "\n") != "left out here: fastpath: this kernel lacks tcx (since Linux 6.6)" {
			t.Errorf("--set %s: left out %v, said %q, error %v", set, out, said, err)
		}
	}
	exp, err := runOptions{}.load([]string{"demo"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // as by Ctrl-C during the probe, which then fails
	if _, err := leaveOut(ctx, at, exp, nil, func(text string) { t.Errorf("says %q of a run that was stopped", text) }); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: error %v", err)
	}
}
