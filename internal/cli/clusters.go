package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// This file has what concerns experiments over several clusters: kubeTarget runs the part in each.

// member is a cluster of an experiment, with the part of the experiment that runs there.
type member struct {
	name   string // "" if there is only one cluster
	access kube.Access
	exp    *spec.Experiment
	// binaries are builds of slipstream for pods.
	binaries []string
}

// config returns the configuration of the member's part.
func (m member) config(p Process) kube.Config {
	config := kubeConfig(p, m.exp)
	config.Binaries = m.binaries
	return config
}

// members returns the clusters of an experiment. binaries are builds of slipstream for their pods.
func (o *kubeOptions) members(exp *spec.Experiment, binaries []string) ([]member, error) {
	clusters := exp.Spec.Target.Kubernetes.Clusters
	if len(clusters) == 0 {
		return []member{{access: o.access, exp: exp, binaries: binaries}}, nil
	}
	if o.access.Context != "" {
		return nil, usage(fmt.Errorf("--context names one cluster, and the experiment compares %s: leave it out, or set spec.target.kubernetes.clusters.NAME.context",
			words.And(exp.Spec.Target.Kubernetes.ClusterNames())))
	}
	var all []member
	for _, c := range clusters {
		access := o.access
		access.Context = c.Context
		if c.Kubeconfig != "" {
			access.Kubeconfig = c.Kubeconfig
		}
		all = append(all, member{name: c.Name, access: access, exp: exp.InCluster(c.Name), binaries: binaries})
	}
	return all, nil
}

// prefix begins texts about one of several clusters.
func (m member) prefix() string {
	if m.name == "" {
		return ""
	}
	return "cluster " + m.name + ": "
}

// in says in which of several clusters an error happened.
func (m member) in(err error) error {
	if m.name == "" || err == nil {
		return err
	}
	return fmt.Errorf("%s%w", m.prefix(), err)
}

// nodes returns the nodes that were chosen.
func (m member) nodes() []string {
	k := m.exp.Spec.Target.Kubernetes
	if k.NodeNames != nil {
		return k.NodeNames
	}
	return []string{k.ClientNode, k.ServerNode}
}

// kubeTargets runs each variant in its cluster. It has the clusters by fabric.
type kubeTargets []*kubeTarget

// newKubeTargets connects to all clusters of an experiment, and creates nothing. It writes what it has chosen into the experiment. It fails
// if a run would fail in one of several clusters, so that nothing is created in the others.
func newKubeTargets(ctx context.Context, p Process, o kubeOptions, binaries []string, exp *spec.Experiment, note func(string)) (kubeTargets, error) {
	members, err := o.members(exp, binaries)
	if err != nil {
		return nil, err
	}
	var all kubeTargets
	for i, m := range members {
		t, err := newKubeTarget(ctx, p, m, note)
		if err == nil && m.name != "" {
			recorded := &exp.Spec.Target.Kubernetes.Clusters[i]
			recorded.NodeNames, recorded.BaseImage = t.nodes(), t.config.Spec.BaseImage
			err = t.cluster.Permit(ctx, t.config)
		}
		if err != nil {
			return nil, m.in(err)
		}
		all = append(all, t)
	}
	if len(all) == 1 {
		return all, nil
	}
	layout := topology.Of(exp)
	slices.SortFunc(all, func(a, b *kubeTarget) int { return fabricOf(layout, a.name) - fabricOf(layout, b.name) })
	who := make(apart)
	for _, t := range all {
		if err := who.add(ctx, t.member, t.cluster); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func fabricOf(layout *topology.Topology, cluster string) int {
	return slices.IndexFunc(layout.Fabrics(), func(f topology.Fabric) bool { return f.Cluster == cluster })
}

// Network creates the pods in one of the clusters.
func (t kubeTargets) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	if len(t) == 1 {
		return t[0].Network(ctx, fabric)
	}
	return t[fabric].Network(ctx, 0) // the part of the experiment has only one
}

// apart has the members by the identity of their cluster.
type apart map[string]member

// add returns an error if a member's cluster is that of another one: it would be compared with itself.
func (a apart) add(ctx context.Context, m member, c *kube.Cluster) error {
	id, err := c.Identity(ctx)
	if err != nil {
		return m.in(err)
	}
	if other, ok := a[id]; ok {
		return fmt.Errorf("clusters %s and %s are one and the same: the contexts %s and %s lead to it. Name the context of another cluster",
			other.name, m.name, other.access.Context, m.access.Context)
	}
	a[id] = m
	return nil
}

// checkSameNetworks returns an error if a cluster has another network than when a run began.
func checkSameNetworks(was, now []record.Cluster) error {
	for _, c := range was {
		i := slices.IndexFunc(now, func(other record.Cluster) bool { return other.Name == c.Name })
		if i >= 0 && !c.Same(now[i]) {
			return fmt.Errorf("%s had %s when the run began, and has %s now: its trials cannot be pooled with new ones, so start a new run",
				cmp.Or(c.Name, "the cluster"), c, now[i])
		}
	}
	return nil
}

// memberSurvey is what a dry run finds in one of several clusters.
type memberSurvey struct {
	Cluster string `json:"cluster"`
	*kube.Survey
}

// surveyClusters finds out what a run would meet in the clusters of an experiment. If one does not answer, it still asks the
// others.
func surveyClusters(ctx context.Context, p Process, o kubeOptions, binaries []string, exp *spec.Experiment) (*survey, error) {
	members, err := o.members(exp, binaries)
	if err != nil {
		return nil, err
	}
	who := make(apart)
	var found []memberSurvey
	all := &survey{unchecked: "starting a pod"}
	for _, m := range members {
		cluster, s, err := surveyCluster(ctx, p, m)
		switch {
		case err != nil && m.name == "":
			return nil, err
		case err != nil:
			all.missing = append(all.missing, m.in(err).Error())
			continue
		}
		found = append(found, memberSurvey{m.name, s})
		for _, need := range s.Denied {
			all.missing = append(all.missing, m.prefix()+"permission to "+need)
		}
		if one := kube.OneNamespace(s.Denied); one != "" {
			all.missing[len(all.missing)-1] += ": " + one
		}
		if s.Busy != "" {
			all.missing = append(all.missing, m.prefix()+s.Busy)
		}
		for _, lack := range s.Missing {
			all.missing = append(all.missing, m.prefix()+lack)
		}
		if m.name == "" {
			all.found, all.print = s, func(w io.Writer) error { return printCluster(w, s) }
			return all, nil
		}
		if err := who.add(ctx, m, cluster); err != nil {
			all.missing = append(all.missing, err.Error())
		}
	}
	all.found, all.print = found, func(w io.Writer) error { return printClusters(w, found) }
	return all, nil
}

func printClusters(w io.Writer, found []memberSurvey) error {
	for _, f := range found {
		fmt.Fprintf(w, "\ncluster %s\n", f.Cluster)
		if err := printCluster(w, f.Survey); err != nil {
			return err
		}
	}
	return nil
}

// parseClusters reads --clusters: names, each of which is a context of the kubeconfig unless one is given.
func parseClusters(flag []string) (all []spec.Cluster, err error) {
	for _, text := range flag {
		name, context, named := strings.Cut(text, "=")
		if !named {
			context = name
		}
		if !spec.ValidName(name) || context == "" {
			return nil, fmt.Errorf("--clusters: %q must be a name of A-Z, a-z, 0-9 and + / . _ -, or such a name and a context: prod=%[1]s", text)
		}
		all = append(all, spec.Cluster{Name: name, Context: context})
	}
	return all, nil
}

// acrossClusters returns the overrides with which every variant of an experiment runs in each of the clusters of --clusters.
func acrossClusters(flag []string, name string, exp *spec.Experiment) ([]override, error) {
	if err := checkInCluster("--clusters", name, exp); err != nil {
		return nil, err
	}
	clusters, err := parseClusters(flag)
	if err != nil {
		return nil, err
	}
	if len(clusters) < 2 {
		return nil, errors.New("--clusters compares two clusters or more: name another one, or name the only one with --context")
	}
	if own := exp.Spec.Target.Kubernetes.Clusters; len(own) > 0 {
		return nil, errors.New("--clusters is for experiments in one cluster, and this one has clusters of its own: set spec.target.kubernetes.clusters.NAME.context")
	}
	var names []string
	for _, c := range clusters {
		names = append(names, c.Name)
	}
	value := strings.Join(flag, ",")
	var all []override
	for _, f := range []struct {
		field string
		to    any
	}{{"spec.target.kubernetes.clusters", clusters}, {"spec.variants", exp.AcrossClusters(names)}, {"spec.baseline", exp.BaselineAcross(names)}} {
		text, err := json.Marshal(f.to)
		if err != nil {
			return nil, fmt.Errorf("--clusters: %w", err)
		}
		all = append(all, override{"--clusters", value, f.field + "=" + string(text)})
	}
	return all, nil
}

// cleaner removes what killed runs have left in clusters.
type cleaner struct {
	process     Process
	all, dryRun bool
}

// clean cleans up one cluster.
func (c cleaner) clean(ctx context.Context, m member) error {
	tell := func(format string, args ...any) {
		fmt.Fprintln(c.process.Out, m.prefix()+plain.Line(fmt.Sprintf(format, args...)))
	}
	cluster, err := kube.Open(m.access)
	if err != nil {
		return m.in(err)
	}
	runs, foreign, err := cluster.Runs(ctx)
	if err != nil {
		return m.in(err)
	}
	for _, f := range foreign {
		tell("skipped: %s", f)
	}
	if len(runs) == 0 {
		tell("no runs found")
	}
	var errs []error
	for _, r := range runs {
		switch {
		case r.Alive && !c.all:
			tell("skipped: %s, in progress (%s)", r, r.Holder)
			continue
		case c.dryRun:
			tell("would remove: %s", r)
			continue
		}
		if err := cluster.Remove(ctx, r); err != nil {
			errs = append(errs, m.in(fmt.Errorf("%s: %w", r, err)))
			continue
		}
		tell("removed: %s", r)
	}
	return errors.Join(errs...)
}

// cleanClusters cleans up the cluster of an access, or those of --clusters. If one does not answer, it cleans up the others.
func (c cleaner) cleanClusters(ctx context.Context, access kube.Access, flag []string) error {
	if flag == nil {
		return c.clean(ctx, member{access: access})
	}
	if access.Context != "" {
		return usage(errors.New("--context names one cluster, and --clusters several: leave one of them out"))
	}
	clusters, err := parseClusters(flag)
	if err != nil {
		return usage(err)
	}
	var errs []error
	for _, one := range clusters {
		access.Context = one.Context
		errs = append(errs, c.clean(ctx, member{name: one.Name, access: access}))
	}
	return errors.Join(errs...)
}
