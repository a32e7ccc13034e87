package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/cluster"
)

type auditOptions struct {
	subscriptions     subscriptionFlag
	groups            []string
	format, since     string
	gate              bool
	kubeconfig        string
	kubecontext       string
	kubeconfigChanged bool
	size, location    string
}

func auditCommand(p Process) *cobra.Command {
	var o auditOptions
	c := &cobra.Command{
		Use:   "audit",
		Short: "Show where Accelerated Networking is possible, wanted and used",
		Long: `Show three facts about each virtual machine, scale set and node of AKS: whether
Accelerated Networking is possible (the size supports it), wanted (enabled on the
NICs, or in the scale set's model) and used (packets use the virtual function, as
slipstream's agent on the node reports). audit changes nothing.

With --size, read the subscription's list of sizes instead: whether this size supports
Accelerated Networking in a location, and which others of its family do. No machine
needs to exist.

The exit code is 4 if something could not be read; the output names it. With --gate
it is 3 if there is a finding, with --gate and --since if something changed, and with
--gate and --size if the size does not support Accelerated Networking.`,
		Example: `  slipstream azure audit --subscription 00000000-0000-0000-0000-000000000000
  slipstream azure audit --resource-group net --kubeconfig ~/.kube/config
  slipstream azure audit -o json > audit.json
  slipstream azure audit --since audit.json --gate
  slipstream azure audit --size Standard_DS13_v2 --location westeurope`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o.kubeconfigChanged = c.Flags().Changed("kubeconfig") || c.Flags().Changed("context")
			if c.Flags().Changed("size") || c.Flags().Changed("location") {
				return o.ofSize(c, p)
			}
			return o.run(c.Context(), p)
		},
	}
	o.subscriptions.add(c)
	f := c.Flags()
	f.StringSliceVarP(&o.groups, "resource-group", "g", nil, "audit only this resource group, and that of the nodes of its AKS clusters; repeat for several")
	f.StringVarP(&o.format, "output", "o", "text", "text, json or csv (a line for each NIC, or with --size for each size)")
	f.StringVar(&o.since, "since", "", "show what changed since an earlier audit, a file written with -o json")
	f.BoolVar(&o.gate, "gate", false, "exit with 3 if there is a finding, with --since if something changed, with --size if it does not support Accelerated Networking")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "ask the agents of this cluster whether the virtual functions are used")
	f.StringVar(&o.kubecontext, "context", "", "context of the kubeconfig (default its current one)")
	f.StringVar(&o.size, "size", "", "ask only whether this size supports Accelerated Networking, such as Standard_D4s_v5")
	f.StringVar(&o.location, "location", "", "location of --size, such as westeurope")
	return c
}

// agentsTime bounds the requests to a cluster: an audit must not hang because a cluster is gone.
const agentsTime = 30 * time.Second

func (o auditOptions) run(ctx context.Context, p Process) error {
	write, ok := azure.Formats[o.format]
	if !ok {
		return o.noFormat()
	}
	var before *azure.Audit
	if o.since != "" {
		var err error
		if before, err = azure.ReadAudit(o.since); err != nil {
			return usage(fmt.Errorf("--since: %w", err))
		}
	}
	cloud, err := o.subscriptions.open(p)
	if err != nil {
		return err
	}
	scope := azure.Scope{Groups: o.groups}
	var asked error
	if o.kubeconfigChanged {
		scope.Uses, asked = o.uses(ctx)
	}
	audit, err := cloud.Inventory(ctx, scope)
	if err != nil {
		return err
	}
	if asked != nil {
		audit.NotRead = append(audit.NotRead, azure.NotRead{Scope: "the cluster", What: "what agents say", Why: asked.Error()})
	}
	var drift []azure.Drift
	if before != nil {
		drift = append([]azure.Drift{}, audit.Since(before)...)
	}
	if err := write(p.Out, audit, drift); err != nil {
		return err
	}
	switch {
	case o.gate && before != nil && len(drift) > 0:
		return exitError{code: exitFound, err: errors.New("gate: something changed since the earlier audit")}
	case o.gate && before == nil && audit.Found():
		return exitError{code: exitFound, err: errors.New("gate: there are findings")}
	case !audit.Complete():
		return exitError{code: exitIncomplete, err: errors.New("the audit is incomplete: the output names what could not be read or is unknown")}
	}
	return nil
}

func (o auditOptions) noFormat() error {
	return usage(fmt.Errorf("--output %s: there is no such format; choose text, json or csv", o.format))
}

// ofSize answers --size.
func (o auditOptions) ofSize(c *cobra.Command, p Process) error {
	for _, flag := range []string{"resource-group", "since", "kubeconfig", "context"} {
		if c.Flags().Changed(flag) {
			return usage(fmt.Errorf("--%s is about machines, and --size about a size: leave one out", flag))
		}
	}
	if o.size == "" || o.location == "" {
		return usage(errors.New("--size and --location need each other: --size Standard_D4s_v5 --location westeurope"))
	}
	write, ok := azure.SizeFormats[o.format]
	if !ok {
		return o.noFormat()
	}
	cloud, err := o.subscriptions.open(p)
	if err != nil {
		return err
	}
	audit, err := cloud.AuditSize(c.Context(), o.size, o.location)
	if errors.Is(err, azure.ErrNoSize) {
		return usage(err)
	}
	if err != nil {
		return err
	}
	if err := write(p.Out, audit); err != nil {
		return err
	}
	if o.gate && audit.Size.Possible != azure.Yes {
		return exitError{code: exitFound, err: fmt.Errorf("gate: %s does not support Accelerated Networking", audit.Size.Name)}
	}
	return nil
}

func (o auditOptions) uses(ctx context.Context) (map[string]azure.Use, error) {
	c, err := cluster.Open(o.kubeconfig, o.kubecontext)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, agentsTime)
	defer cancel()
	return c.Uses(ctx)
}
