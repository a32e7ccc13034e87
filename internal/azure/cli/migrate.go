package cli

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/cluster"
)

type migrateOptions struct {
	subscriptions           subscriptionFlag
	m                       azure.Migration
	in                      string
	yes, back               bool
	accept                  []string
	kubeconfig, kubecontext string
	prove                   prover
}

func migrateCommand(p Process) *cobra.Command {
	var o migrateOptions
	c := &cobra.Command{
		Use:   "migrate POOL",
		Short: "Move a node pool of AKS to one with Accelerated Networking, if that is proven faster",
		Long: `Print the plan, or with --yes carry it out: create a node pool with the settings of the
old one, verify Accelerated Networking on its nodes, and measure both pools. Only if the
new pool is proven faster, cordon the old nodes and drain them one after the other. The
old pool stays, unless you give --delete-old.

Ctrl-C stops the migration; run the command again to continue. Until the old pool is
deleted, --back-out restores the original state.`,
		Example: `  slipstream azure migrate net --cluster rg/prod --size Standard_D4s_v5
  slipstream azure migrate net --cluster rg/prod --size Standard_D4s_v5 --image registry.example/slipstream:v1 --yes
  slipstream azure migrate net --cluster rg/prod --yes --delete-old
  slipstream azure migrate net --cluster rg/prod --back-out --yes`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			o.m.Pool = args[0]
			return o.run(c.Context(), p)
		},
	}
	o.subscriptions.add(c)
	f := c.Flags()
	f.StringVar(&o.in, "cluster", "", "AKS cluster, as GROUP/NAME")
	f.StringVar(&o.m.Size, "size", "", "size of the new nodes (default that of the old ones)")
	f.StringVar(&o.m.New, "name", "", "name of the new pool (default the old one's and \"an\")")
	f.BoolVar(&o.yes, "yes", false, "carry out the plan (default: print it, and change nothing)")
	f.BoolVar(&o.back, "back-out", false, "restore the original state, and delete the new pool")
	f.BoolVar(&o.m.Anyway, "anyway", false, "continue although the new pool is not proven faster; if it has not been measured, skip the measurement")
	f.BoolVar(&o.m.Delete, "delete-old", false, "delete the old pool when it is drained")
	f.StringVar(&o.m.Until, "until", "", "stop after this step: "+strings.Join(azure.Steps, ", "))
	f.DurationVar(&o.m.Pace, "pace", 0, "pause between the drains of two nodes")
	f.StringSliceVar(&o.accept, "accept", nil, "accept that these are lost: "+cluster.BarePods+", "+cluster.LocalStorage)
	f.StringVar(&o.m.Dir, "state", "", "folder of the journals and measurements (default $XDG_STATE_HOME/slipstream/azure, or ~/.local/state/slipstream/azure)")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file (default $KUBECONFIG, or ~/.kube/config)")
	f.StringVar(&o.kubecontext, "context", "", "context of the kubeconfig (default its current one)")
	f.IntVar(&o.prove.blocks, "blocks", 8, "how many times to measure each pool")
	f.StringVar(&o.prove.image, "image", "", "image of the pods that measure, as for slipstream run")
	return c
}

func (o migrateOptions) run(ctx context.Context, p Process) (err error) {
	var ok bool
	if o.m.Group, o.m.Cluster, ok = strings.Cut(o.in, "/"); !ok {
		return usage(fmt.Errorf("--cluster %q: name the cluster as GROUP/NAME", o.in))
	}
	for _, a := range o.accept {
		if !slices.Contains([]string{cluster.BarePods, cluster.LocalStorage}, a) {
			return usage(fmt.Errorf("--accept %s: choose %s or %s", a, cluster.BarePods, cluster.LocalStorage))
		}
	}
	if o.prove.blocks < 3 {
		return usage(errors.New("--blocks: must be at least 3, fewer prove nothing"))
	}
	if o.m.Dir, err = stateDir(o.m.Dir); err != nil {
		return usage(err)
	}
	cloud, err := o.subscriptions.open(p)
	if err != nil {
		return err
	}
	connect := p.Cluster
	if connect == nil {
		connect = cluster.Open
	}
	nodes, err := connect(o.kubeconfig, o.kubecontext)
	if err != nil {
		return usage(err)
	}
	o.m.Nodes = cluster.Pool{Cluster: nodes, Accept: o.accept}
	start := time.Now()
	o.m.Note = func(line string) { fmt.Fprintf(p.Out, "%6.0f s  %s\n", time.Since(start).Seconds(), line) }
	o.prove.dir, o.prove.kubeconfig, o.prove.kubecontext, o.prove.note = filepath.Join(o.m.Dir, "measure-"+o.m.Cluster+"-"+o.m.Pool), o.kubeconfig, o.kubecontext, o.m.Note
	o.m.Prove = o.prove.run
	m, err := cloud.PlanMigration(ctx, o.m)
	if err != nil {
		return err
	}
	for _, w := range m.Warnings {
		fmt.Fprintln(p.Err, "warning:", w)
	}
	switch {
	case o.back && !o.yes:
		fmt.Fprintf(p.Out, "plan (--yes carries it out): uncordon %s, restore its autoscaler, drain %s and delete it\n", o.m.Pool, m.NewName())
		return nil
	case o.back:
		err = m.BackOut(ctx)
	case !o.yes:
		fmt.Fprintf(p.Out, "plan (--yes carries it out):\n  %s\n", strings.Join(m.Plan(), "\n  "))
		for _, b := range m.Blockers {
			fmt.Fprintln(p.Out, "cannot move:", b)
		}
		return nil
	default:
		err = m.Run(ctx)
	}
	if errors.Is(err, azure.ErrNotFaster) {
		return err // the error explains how to continue
	}
	if err != nil {
		return fmt.Errorf("%w\nrun the same command again to continue", err)
	}
	o.m.Note("done")
	return nil
}
