package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/worker"
)

// kubeOptions are the flags for runs in a cluster.
type kubeOptions struct {
	access                                  kube.Access
	clientNode, serverNode, selector, image string
	// baseImage is an image without this program.
	baseImage string
}

func addClusterFlags(f *pflag.FlagSet, a *kube.Access) {
	f.StringVar(&a.Kubeconfig, "kubeconfig", "", "kubeconfig file (default $KUBECONFIG, or ~/.kube/config)")
	f.StringVar(&a.Context, "context", "", "context of the kubeconfig (default its current one)")
}

func addAccessFlags(f *pflag.FlagSet, a *kube.Access, namespace string) {
	addClusterFlags(f, a)
	f.StringVarP(&a.Namespace, "namespace", "n", "", namespace)
}

func (o *kubeOptions) addFlags(f *pflag.FlagSet) {
	addAccessFlags(f, &o.access, "create the pods in this existing namespace (default: the run creates its own)")
	f.StringVar(&o.clientNode, "client-node", "", "node of the clients (default the first that accepts pods)")
	f.StringVar(&o.serverNode, "server-node", "", "node of the servers (default the next that accepts pods)")
	f.StringVar(&o.selector, "selector", "", "choose only nodes with these labels, such as pool=net,zone=a")
	f.StringVar(&o.image, "image", "", "image of the pods with slipstream in it, pulled if a node lacks it (default this version's, if a release has published it or all nodes have it, else the base image)")
	f.StringVar(&o.baseImage, "base-image", "", "image to start pods from; slipstream copies itself into them (default "+kube.DefaultBase+", where there is no image with slipstream)")
}

// accessFlags returns the flags that were given to choose a cluster.
func (o *kubeOptions) accessFlags() (flags []string) {
	for _, f := range []struct{ flag, value string }{{"--kubeconfig", o.access.Kubeconfig}, {"--context", o.access.Context}, {"--namespace", o.access.Namespace}} {
		if f.value != "" {
			flags = append(flags, f.flag)
		}
	}
	return flags
}

// overrides returns the fields of the experiment that the flags set.
func (o *kubeOptions) overrides() ([]override, error) {
	const at = "spec.target.kubernetes."
	var all []override
	for _, f := range []struct{ flag, field, value string }{
		{"--client-node", "clientNode", o.clientNode}, {"--server-node", "serverNode", o.serverNode}, {"--image", "image", o.image}, {"--base-image", "baseImage", o.baseImage},
	} {
		if f.value != "" {
			all = append(all, override{f.flag, f.value, fmt.Sprintf("%s%s=%q", at, f.field, f.value)})
		}
	}
	if o.selector == "" {
		return all, nil
	}
	labels, err := spec.ParseLabels(o.selector)
	if err != nil {
		return nil, fmt.Errorf("--selector: %w", err)
	}
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		parts = append(parts, fmt.Sprintf("%q: %q", key, labels[key]))
	}
	return append(all, override{"--selector", o.selector, at + "nodeSelector={" + strings.Join(parts, ", ") + "}"}), nil
}

// kubeTarget runs an experiment, or its part in one of several clusters, in pods of a cluster.
type kubeTarget struct {
	member
	cluster  *kube.Cluster
	config   kube.Config
	topology *topology.Topology
	process  Process
}

// newKubeTarget chooses the nodes and the pods' image, and writes them into the experiment, so that a resumed run uses the same.
func newKubeTarget(ctx context.Context, p Process, m member, note func(string)) (*kubeTarget, error) {
	cluster, err := kube.Open(m.access)
	if err != nil {
		return nil, err
	}
	spec := m.exp.Spec.Target.Kubernetes
	nodes, err := cluster.ChooseAll(ctx, m.config(p))
	if err != nil {
		return nil, err
	}
	if spec.BaseImage, err = cluster.ChooseBase(ctx, m.config(p), nodes); err != nil {
		return nil, err
	}
	if len(nodes) == 2 && m.exp.Spec.Mesh == nil && spec.NodeNames == nil && m.exp.Pools() == nil {
		spec.ClientNode, spec.ServerNode = nodes[0], nodes[1]
	} else {
		spec.NodeNames, spec.Nodes, spec.ClientNode, spec.ServerNode = nodes, 0, "", ""
	}
	config := m.config(p)
	config.Note = func(text string) { note(m.prefix() + text) }
	return &kubeTarget{member: m, cluster: cluster, config: config, topology: topology.Of(m.exp), process: p}, nil
}

// kubeConfig returns the configuration of a cluster that an experiment needs.
func kubeConfig(p Process, exp *spec.Experiment) kube.Config {
	config := kube.Config{
		Spec: *exp.Spec.Target.Kubernetes, Repository: p.Image, Version: p.Version, Mesh: exp.Spec.Mesh != nil, Pools: exp.Pools(),
		Switch: exp.Switches(), Need: make(map[int]string),
	}
	for _, w := range exp.Spec.Workloads {
		config.Need[w.Traffic().IP] = "workload " + w.Name
		if tool := w.Traffic().Tool; !spec.OwnTool(tool) && tool != spec.ToolLatte { // which a Windows node has, and not the image
			config.Programs = cmp.Or(config.Programs, tool+" of workload "+w.Name)
		}
	}
	for _, v := range exp.Spec.Variants {
		path := exp.PathOf(v)
		config.Accelerate = config.Accelerate || len(v.Accelerate) > 0
		config.Pod = config.Pod || path.Pod != nil
		config.Service = config.Service || path.Service != nil
		config.Native = config.Native || path.Native != nil
		if s := path.Service; s != nil && s.Backends > 1 && !slices.Contains(config.Backends, s.Backends) {
			config.Backends = append(config.Backends, s.Backends)
		}
		for _, w := range exp.Spec.Workloads {
			need := systemsFor(exp.WorkloadFor(v, w))
			config.LinuxClient, config.LinuxServer = cmp.Or(config.LinuxClient, need.linuxClient), cmp.Or(config.LinuxServer, need.linuxServer)
			config.Windows = cmp.Or(config.Windows, need.windows)
		}
	}
	return config
}

// surveyCluster finds out what a run, or its part in one of several clusters, would meet in a cluster.
func surveyCluster(ctx context.Context, p Process, m member) (*kube.Cluster, *kube.Survey, error) {
	cluster, err := kube.Open(m.access)
	if err != nil {
		return nil, nil, err
	}
	config := m.config(p)
	layout := topology.Of(m.exp)
	for fabric := range layout.Fabrics() {
		config.Pods = max(config.Pods, layout.Pods(fabric))
	}
	s, err := cluster.Survey(ctx, config)
	return cluster, s, err
}

func printCluster(w io.Writer, s *kube.Survey) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(what, format string, args ...any) {
		fmt.Fprintf(tw, "%s\t%s\n", what, plain.Line(fmt.Sprintf(format, args...)))
	}
	fmt.Fprintln(tw)
	if s.User != "" {
		row("user", "%s", s.User)
	}
	if len(s.Nodes) > 0 {
		row("nodes", "%s", textOfNodes(s.Nodes))
		row("image", "%s", s.Image)
	}
	for _, i := range s.Images {
		row("", "on %s: %s", i.Node, i.State)
	}
	if len(s.Permissions) == 0 {
		row("permissions", "unknown: you may not create SelfSubjectAccessReviews")
	}
	for _, line := range byResource(s.Permissions) {
		row("permissions", "%s", line)
	}
	for _, note := range s.Notes {
		row("note", "%s", note)
	}
	return tw.Flush()
}

// textOfNodes describes what runs on which nodes.
func textOfNodes(nodes []string) string {
	if len(nodes) == 2 {
		return fmt.Sprintf("clients on %s, servers on %s", nodes[0], nodes[1])
	}
	return fmt.Sprintf("%d, %s", len(nodes), strings.Join(nodes, ", "))
}

// byResource returns a line for each resource: "pods in namespace mine: get, list, create (denied)".
func byResource(permissions []kube.Permission) (lines []string) {
	last := ""
	for _, p := range permissions {
		verb, resource := p.Verb, p.Resource
		if !p.Allowed {
			verb += " (denied)"
		}
		if p.Namespace != "" {
			resource += " in namespace " + p.Namespace
		}
		if resource == last {
			lines[len(lines)-1] += ", " + verb
			continue
		}
		lines, last = append(lines, resource+": "+verb), resource
	}
	return lines
}

func (t *kubeTarget) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	t.config.Pods = t.topology.Pods(fabric)
	t.config.Note("nodes: " + textOfNodes(t.nodes()))
	up, err := t.cluster.Up(ctx, t.config)
	if err != nil {
		return nil, err
	}
	if err := up.ReachServices(ctx); err != nil {
		return nil, errors.Join(err, up.Close(context.WithoutCancel(ctx)))
	}
	return &kubeNetwork{Pods: up, Assignment: t.topology.Assign(fabric, up.Places()), member: t.member}, nil
}

type kubeNetwork struct {
	*kube.Pods
	*topology.Assignment
	member member
}

// Cluster describes the cluster for the record.
func (n *kubeNetwork) Cluster(ctx context.Context, nodes []record.Node) (record.Cluster, error) {
	found, err := n.Network(ctx, nodes)
	found.Name, found.Context = n.member.name, n.member.access.Context
	return found, err
}

func (n *kubeNetwork) Places() []place.Place { return n.Assignment.Places() }

// kubeLead bounds the delay of a start time on its way to the workers, through the API server, the kubelet and
// the container runtime.
const kubeLead = 100 * time.Millisecond

func (n *kubeNetwork) Setup() place.Setup {
	return place.Setup{Placement: n.Placement(), Lead: kubeLead}
}

func (n *kubeNetwork) Worker(ctx context.Context, p place.Place, use place.Use) (experiment.Worker, error) {
	c, err := podWorker(ctx, n.Pods, p, use)
	if err != nil {
		return nil, err
	}
	return &kubeWorker{Client: c, pods: n.Pods}, nil
}

// podWorker starts a worker in a pod.
func podWorker(ctx context.Context, pods *kube.Pods, p place.Place, use place.Use) (*worker.Client, error) {
	for {
		s, err := pods.Open(p, use)
		if err != nil {
			return nil, err
		}
		c, err := worker.Attach(ctx, s)
		if err == nil {
			s.Connected()
			return c, nil
		}
		if err := s.Retry(ctx, err); err != nil {
			return nil, err
		}
	}
}

// kubeWorker adds to the description of a node the facts that its pods cannot see.
type kubeWorker struct {
	*worker.Client
	pods *kube.Pods
}

func (w *kubeWorker) Describe(ctx context.Context, p place.Place) (record.Node, error) {
	node, err := w.Client.Describe(ctx, p)
	node.Distribution = w.pods.System(p.Node)
	return node, err
}

// Sample also observes the DaemonSets that the experiment names.
func (w *kubeWorker) Sample(ctx context.Context, s place.Sampling, ready place.Ready) (record.Sample, error) {
	s.Observe = w.pods.Observe(ctx, s.Place)
	return w.Client.Sample(ctx, s, ready)
}

// refuseClusterFlags refuses the flags of cleanup that select what to remove in a cluster.
func refuseClusterFlags(f *pflag.FlagSet) error {
	for _, name := range []string{"all", "clusters", "namespace", "context", "kubeconfig"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s is for cleaning up a cluster, and a results folder is not in one: leave out --%s or the folder", name, name)
		}
	}
	return nil
}

func cleanupCommand(p Process) *cobra.Command {
	var access kube.Access
	var clusters []string
	var all, dryRun, yes bool
	c := &cobra.Command{
		Use:   "cleanup [RESULT...]",
		Short: "Clean up after killed runs: in a cluster, or undo their switches",
		Long: `Remove the namespaces, pods, services and leases of killed runs from a cluster.
When a pod of a run ends, it restores the settings of its node. cleanup skips
runs in progress: those that have renewed their lease within the last minute, by
the API server's clock. It also skips, and lists, objects that have slipstream's
labels but that no run can have created.

With results folders, cleanup undoes the switch of the run in each of them, with
the switch.back command of its experiment, and does nothing in a cluster. It
shows the commands before it runs them, and runs them only if the folder, its
files and the folders above belong to you or root and nobody else can write to
them, or with --yes.`,
		Example: `  slipstream cleanup
  slipstream cleanup --dry-run        list what would be removed
  slipstream cleanup --all            remove runs in progress too
  slipstream cleanup --clusters a,b   in the clusters of a run that compared two
  slipstream cleanup results/my-20260102T150405Z     undo the switch of that run`,
		RunE: func(c *cobra.Command, dirs []string) error {
			if len(dirs) > 0 {
				if err := refuseClusterFlags(c.Flags()); err != nil {
					return usage(err)
				}
				return cleanupSwitched(c.Context(), p, dirs, dryRun, yes)
			}
			if yes {
				return usage(errors.New("--yes is for results folders only: name one, or leave out --yes"))
			}
			return cleaner{p, all, dryRun}.cleanClusters(c.Context(), access, clusters)
		},
	}
	addAccessFlags(c.Flags(), &access, "clean up only this namespace (default: all namespaces)")
	c.Flags().StringSliceVar(&clusters, "clusters", nil, "clean up these clusters: contexts of the kubeconfig, or NAME=CONTEXT, as of run")
	c.Flags().BoolVar(&all, "all", false, "remove runs in progress too")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "list what would be removed or undone, and change nothing")
	c.Flags().BoolVar(&yes, "yes", false, "run the commands of a results folder that may be somebody else's")
	return c
}
