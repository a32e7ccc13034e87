package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/kube"
	"slipstream.dev/internal/plain"
)

// restTime bounds how long doctor waits for the last nodes of a cluster, when half of them are ready.
const restTime = 20 * time.Second

// examineCluster asks the API server, and with --probe examines pods and nodes.
func (o doctorOptions) examineCluster(ctx context.Context, p Process, d *diagnosis) error {
	exp, err := runOptions{kube: o.kube}.load([]string{"kubernetes"})
	if err != nil {
		return usage(err)
	}
	cluster, err := kube.Open(o.kube.access)
	if err != nil {
		return err
	}
	config := kubeConfig(p, exp)
	config.Binaries = o.hosts.binaries
	// Only privileged pods can examine the nodes. Switch is set because nodes that an agent accelerates are to be examined.
	config.Accelerate, config.Switch = true, true
	s, err := cluster.Survey(ctx, config)
	if err != nil {
		return err
	}
	found, err := cluster.Facts(ctx)
	if err != nil {
		return err
	}
	found.Denied, found.Lacks = s.Denied, s.Missing
	d.addCluster(s, found)
	if o.probe && len(found.Denied) == 0 && (o.all || len(found.Lacks) == 0) {
		d.cluster = &found
		err = o.probeCluster(ctx, p, cluster, config, s, d)
	}
	d.Findings = slices.Concat(doctor.ExamineCluster(found), d.Findings)
	return err
}

// probeCluster examines pods and nodes.
func (o doctorOptions) probeCluster(ctx context.Context, p Process, cluster *kube.Cluster, config kube.Config, s *kube.Survey, d *diagnosis) error {
	nodes := s.Nodes
	if !o.all {
		config.Spec.ClientNode, config.Spec.ServerNode, config.Pods = nodes[0], nodes[1], 1
	} else {
		config.Mesh, config.Rest = true, restTime // a mesh goes on without a node whose pod does not start
		for _, n := range d.cluster.Nodes {
			config.Spec.NodeNames = append(config.Spec.NodeNames, n.Name)
		}
		nodes = config.Spec.NodeNames
	}
	var err error
	if config.Spec.BaseImage, err = cluster.ChooseBase(ctx, config, nodes); err != nil {
		return err
	}
	config.Note = func(text string) { fmt.Fprintln(p.Err, plain.Line(text)) }
	up, err := cluster.Up(ctx, config)
	if err != nil {
		if !slices.Contains(d.cluster.Lacks, err.Error()) {
			d.cluster.Lacks = append(d.cluster.Lacks, err.Error())
		}
		return ctx.Err()
	}
	probe := o.probePods
	if o.all {
		probe = o.probeNodes
	}
	return errors.Join(probe(ctx, d, up), up.Close(context.WithoutCancel(ctx)))
}

// addCluster adds the facts that the API server reports.
func (d *diagnosis) addCluster(s *kube.Survey, found doctor.Cluster) {
	add := func(from, format string, args ...any) {
		d.Facts = append(d.Facts, fact{"", doctor.Evidence{From: from, Value: fmt.Sprintf(format, args...)}})
	}
	if s.User != "" {
		add("user", "%s", s.User)
	}
	if len(found.Nodes) > 0 {
		add("nodes", "%d", len(found.Nodes))
	}
	if len(s.Nodes) > 0 {
		add("a run takes", "nodes %s and %s, image %s", s.Nodes[0], s.Nodes[1], s.Image)
	}
	if s.Busy != "" {
		add("dry run", "%s", s.Busy)
	}
	for _, note := range s.Notes {
		add("dry run", "%s", note)
	}
	for _, e := range found.Known() {
		d.Facts = append(d.Facts, fact{"", e})
	}
}

// probePods checks both nodes, and the paths between the nodes, between the pods, and from a node to the
// pod of the other. It tries services only if all paths are open: a closed path closes them too.
func (o doctorOptions) probePods(ctx context.Context, d *diagnosis, up *kube.Pods) error {
	var nodes, pods []*machine
	for _, p := range up.Places() {
		use := place.ForControl
		if p.Kind == place.Pod {
			use = place.ForTraffic
		}
		c, err := podWorker(ctx, up, p, use)
		if err != nil {
			return err
		}
		defer c.Close()
		if m := newMachine(p, c); m.pod {
			pods = append(pods, m)
		} else {
			nodes = append(nodes, m)
		}
	}
	if err := o.readFacts(ctx, nodes); err != nil {
		return err
	}
	for _, m := range nodes {
		d.add(m.name, m.facts)
	}
	var ends [][2]*machine
	for i := range nodes {
		d.Findings = append(d.Findings, doctor.ExaminePair(doctor.NewPeer(nodes[i].name, nodes[i].facts), doctor.NewPeer(nodes[1-i].name, nodes[1-i].facts))...)
		ends = append(ends, [2]*machine{nodes[i], nodes[1-i]}, [2]*machine{pods[i], pods[1-i]}, [2]*machine{nodes[i], pods[1-i]})
	}
	paths := make([]doctor.Path, len(ends))
	g, together := errgroup.WithContext(ctx)
	for i, pair := range ends {
		g.Go(func() (err error) {
			paths[i], err = probePath(together, pair[0], pair[1], exchangeWithin(kubeLead))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	addPodMTUs(ends, paths)
	open := true
	for _, path := range paths {
		found := doctor.ExaminePath(path)
		open = open && !slices.ContainsFunc(found, doctor.IsSerious)
		d.Findings = append(d.Findings, found...)
	}
	if !open {
		return nil
	}
	if err := up.ReachServices(ctx); err != nil {
		d.cluster.Lacks = append(d.cluster.Lacks, err.Error())
	}
	return ctx.Err()
}

// addPodMTUs adds to the paths that end at pods the MTUs with which the same pods send.
func addPodMTUs(ends [][2]*machine, paths []doctor.Path) {
	for i, end := range ends {
		from := slices.IndexFunc(ends, func(e [2]*machine) bool { return e[0] == end[1] })
		if end[1].pod && from >= 0 {
			paths[i].PodMTU = paths[from].Sent.DeviceMTU
		}
	}
}
