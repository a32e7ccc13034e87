package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/azure"
)

type switchOptions struct {
	subscriptions   subscriptionFlag
	want            bool
	yes, undo, live bool
	state           string
}

func switchCommand(p Process, verb string, want bool) *cobra.Command {
	o := switchOptions{want: want}
	c := &cobra.Command{
		Use:   verb + " TARGET",
		Short: "Turn Accelerated Networking of a virtual machine or scale set " + map[bool]string{true: "on", false: "off"}[want],
		Long: `Print the plan, or with --yes carry it out: deallocate the machine, change each of its
NICs, and start it if it ran. For a scale set, change the model, and then one instance
after the other. TARGET is GROUP/NAME or a resource ID.

The command records the current state before it changes anything. After an interruption,
run it again to continue, or with --undo to restore the original state.`,
		Example: fmt.Sprintf(`  slipstream azure %[1]s net/vm1
  slipstream azure %[1]s net/vm1 --yes
  slipstream azure %[1]s net/vm1 --undo --yes`, verb),
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return o.run(c.Context(), p, args[0]) },
	}
	o.subscriptions.add(c)
	f := c.Flags()
	f.BoolVar(&o.yes, "yes", false, "carry out the plan (default: print it, and change nothing)")
	f.BoolVar(&o.undo, "undo", false, "restore the state before the first switch")
	f.BoolVar(&o.live, "live", false, "change NICs without deallocating their machines, if Azure accepts that")
	f.StringVar(&o.state, "state", "", "folder of the journals (default $XDG_STATE_HOME/slipstream/azure, or ~/.local/state/slipstream/azure)")
	return c
}

// stateDir returns the folder of the journals.
func stateDir(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	return azure.JournalDir()
}

func (o switchOptions) run(ctx context.Context, p Process, target string) error {
	dir, err := stateDir(o.state)
	if err != nil {
		return usage(err)
	}
	cloud, err := o.subscriptions.open(p)
	if err != nil {
		return err
	}
	s, err := cloud.PlanSwitch(ctx, azure.SwitchOptions{Target: target, Want: o.want, Undo: o.undo, Live: o.live, Dir: dir})
	if err != nil {
		return err
	}
	for _, w := range s.Warnings {
		fmt.Fprintln(p.Err, "warning:", w)
	}
	plan, err := s.Plan(ctx)
	if err != nil {
		return err
	}
	switch {
	case o.undo && s.Found().IsZero():
		fmt.Fprintf(p.Out, "%s: nothing to undo: there is no journal of it in %s\n", s.Name(), dir)
		return nil
	case len(plan) == 0:
		fmt.Fprintf(p.Out, "%s: nothing to do\n", s.Name())
	case !o.yes:
		fmt.Fprintf(p.Out, "%s: plan (--yes carries it out):\n", s.Name())
		for _, line := range plan {
			fmt.Fprintln(p.Out, " ", line)
		}
	}
	if !o.yes {
		return nil
	}
	start := time.Now()
	if err := s.Run(ctx, func(step string) { fmt.Fprintf(p.Out, "%6.0f s  %s\n", time.Since(start).Seconds(), step) }); err != nil {
		return fmt.Errorf("%w\nrun the same command again to continue, or with --undo to restore the original state", err)
	}
	fmt.Fprintf(p.Out, "%6.0f s  %s is done\n", time.Since(start).Seconds(), s.Name())
	return nil
}
