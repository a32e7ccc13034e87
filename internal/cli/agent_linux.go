package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/agent"
	"slipstream.dev/internal/agent/kube"
	"slipstream.dev/internal/process"
)

func agentCommand(p Process) *cobra.Command {
	var o agentOptions
	c := &cobra.Command{
		Use:   "agent",
		Short: "Keep the accelerators of policies applied on this node",
		Long: `Apply the accelerators of an AccelerationPolicy in a file, or of the policies of
a cluster that select this node, and keep them applied. The agent accelerates
new devices and pods as they appear, verifies all settings every 30 s (less
often on large nodes), and restores settings that no policy wants any more.
Settings outlive the agent, and the next agent adopts them; the fast path ends
with its agent, and the next agent starts it again.`,
		Example: `  slipstream agent --policy /etc/slipstream/policy.yaml     a host without Kubernetes
  slipstream agent --node node1                             in a cluster, as its DaemonSet starts it
  slipstream agent --revert                                 restore everything that agents have set here`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return usage(err)
			}
			return o.run(c.Context(), p)
		},
	}
	f := c.Flags()
	f.StringVar(&o.policy, "policy", "", "file with an AccelerationPolicy, read again when it changes and on SIGHUP")
	f.StringVar(&o.node, "node", "", "this node's name in the cluster")
	f.StringVar(&o.daemonSet, "daemonset", "", "NAMESPACE/NAME of the agent's DaemonSet: if that is deleted when the agent stops, the agent restores everything")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file (default: the service account of the agent's pod)")
	f.StringVar(&o.serve.Metrics, "listen", "127.0.0.1:9469", "address of /metrics; empty to disable it")
	f.StringVar(&o.serve.Health, "health", "127.0.0.1:9470", "address of /healthz; empty to disable it")
	f.BoolVar(&o.auth, "metrics-auth", false, "with --node: serve /metrics over TLS only, and only to bearer tokens that may get it (TokenReview, SubjectAccessReview)")
	f.StringVar(&o.serve.CertFile, "tls-cert", "", "file with the certificate of /metrics (default with --metrics-auth: a self-signed one)")
	f.StringVar(&o.serve.KeyFile, "tls-key", "", "file with the private key of --tls-cert")
	f.StringVar(&o.journal, "journal", journalDir, "folder of the journal of changed settings, one for the whole machine")
	f.BoolVar(&o.revert, "revert", false, "restore everything that agents have set on this machine, and exit")
	return c
}

type agentOptions struct {
	policy, node, daemonSet, kubeconfig, journal string
	serve                                        agent.ServeOptions
	revert, auth                                 bool
}

func (o agentOptions) check() error {
	modes := 0
	for _, set := range []bool{o.policy != "", o.node != "", o.revert} {
		if set {
			modes++
		}
	}
	if modes != 1 {
		return errors.New("choose one of --policy FILE, --node NAME and --revert (see slipstream agent --help)")
	}
	if o.auth && o.node == "" {
		return errors.New("--metrics-auth asks a cluster who may get /metrics, so it needs --node NAME")
	}
	return nil
}

func (o agentOptions) run(ctx context.Context, p Process) error {
	if err := asRoot("an agent changes settings of the kernel"); err != nil {
		return err
	}
	process.CollectSooner()
	log := newLog(p)
	options := agent.Options{Node: o.node, JournalDir: o.journal, Log: log}
	if o.node == "" {
		options.Node = "here"
	}
	var cluster *kube.Cluster
	if o.node != "" {
		var err error
		if cluster, err = kube.Connect(o.kubeconfig, kube.Options{Node: o.node, DaemonSet: o.daemonSet, Log: log}); err != nil {
			return err
		}
		options.Publish, options.Notify = cluster.Publish, cluster.Notify
	}
	a, err := agent.New(options)
	if err != nil {
		return err
	}
	defer a.Close()
	if o.revert {
		n, err := a.Revert(ctx)
		fmt.Fprintf(p.Out, "%d settings restored\n", n)
		return err
	}

	told := ctx
	ctx, cancel := context.WithCancelCause(told)
	var all sync.WaitGroup
	defer func() {
		cancel(nil)
		all.Wait()
	}()
	o.serve.Log = log
	if o.auth {
		o.serve.Authorize = cluster.MayGetMetrics
	}
	servers, err := a.Serve(o.serve, cancel)
	if err != nil {
		return err
	}
	defer servers.Close()
	if o.policy != "" {
		file, err := a.OpenPolicy(o.policy)
		if err != nil {
			return usage(err)
		}
		reload := make(chan os.Signal, 1)
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
		all.Go(func() { file.Follow(ctx, reload) })
	} else {
		all.Go(func() { cluster.Run(ctx, a.Set) })
	}
	if err := a.Systemd(ctx); err != nil {
		return err
	}
	if err := a.Run(ctx); err != nil {
		return err
	}
	if told.Err() == nil { // a server ended by itself: a restart may help
		return context.Cause(ctx)
	}
	if cluster == nil {
		return nil
	}
	// The agent was told to stop, for an upgrade or for good. Both timeouts fit into the pod's grace period: the chart sets 60
	// s, and the default of Kubernetes is 30 s.
	asking, asked := context.WithTimeout(context.WithoutCancel(ctx), 12*time.Second)
	defer asked()
	if !cluster.Uninstalled(asking) {
		return nil
	}
	last, done := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer done()
	n, err := a.Revert(last)
	log.Warn("the agent is uninstalled, and has restored the node's settings", "restored", n)
	return errors.Join(err, cluster.Forget(last))
}
