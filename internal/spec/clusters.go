package spec

import (
	"cmp"
	"fmt"
	"slices"

	"slipstream.dev/internal/words"
)

// This file has everything that is particular to experiments over several clusters.

// nodesNamed returns how many nodes are named in each of several clusters, 0 if none are.
func (k *Kubernetes) nodesNamed() int {
	for _, c := range k.Clusters {
		if len(c.NodeNames) > 0 {
			return len(c.NodeNames)
		}
	}
	return 0
}

// ClusterNames returns the names of several clusters, in order.
func (k *Kubernetes) ClusterNames() (names []string) {
	for _, c := range k.Clusters {
		names = append(names, c.Name)
	}
	return names
}

// InCluster returns the part of an experiment that runs in one of several clusters, as an experiment in that cluster alone.
func (e *Experiment) InCluster(name string) *Experiment {
	one, k := *e, *e.Spec.Target.Kubernetes
	if i := slices.IndexFunc(k.Clusters, func(c Cluster) bool { return c.Name == name }); i >= 0 {
		k.NodeNames, k.BaseImage = k.Clusters[i].NodeNames, cmp.Or(k.Clusters[i].BaseImage, k.BaseImage)
		k.Observe = slices.Concat(k.Observe, k.Clusters[i].Observe)
	}
	if len(k.NodeNames) == 2 {
		k.ClientNode, k.ServerNode, k.NodeNames = k.NodeNames[0], k.NodeNames[1], nil
	}
	k.Clusters = nil
	one.Spec.Target.Kubernetes, one.Spec.Variants = &k, nil
	for _, v := range e.Spec.Variants {
		if v.Cluster == name {
			v.Cluster = ""
			one.Spec.Variants = append(one.Spec.Variants, v)
		}
	}
	return &one
}

// AcrossClusters returns the variants of an experiment once for each of several clusters. Each is compared with the same one in the
// first cluster.
func (e *Experiment) AcrossClusters(names []string) (all []Variant) {
	for _, name := range names {
		for _, v := range e.Spec.Variants {
			one := v
			one.Name, one.Cluster, one.Versus = inCluster(name, v.Name), name, ""
			if name != names[0] {
				one.Versus = inCluster(names[0], v.Name)
			}
			all = append(all, one)
		}
	}
	return all
}

// BaselineAcross returns the baseline of the variants of AcrossClusters.
func (e *Experiment) BaselineAcross(names []string) string {
	return inCluster(names[0], e.Spec.Baseline)
}

func inCluster(cluster, variant string) string { return cluster + "/" + variant }

// nameClusters completes the clusters with those that variants name.
func (r *reader) nameClusters(s *Spec) {
	k := s.Target.Kubernetes
	if !r.has("spec.target.kubernetes.clusters") {
		for _, v := range s.Variants {
			if v.Cluster != "" && !slices.Contains(k.ClusterNames(), v.Cluster) {
				k.Clusters = append(k.Clusters, Cluster{Name: v.Cluster})
			}
		}
	}
	for i, c := range k.Clusters {
		if !r.has(fmt.Sprintf("spec.target.kubernetes.clusters[%d].context", i)) {
			k.Clusters[i].Context = c.Name
		}
	}
}

// clusters checks several clusters, and that no other field of the experiment is for a single one.
func (r *reader) clusters(path string, e *Experiment) {
	k := e.Spec.Target.Kubernetes
	if k == nil || r.malformedNear(path) {
		return
	}
	if r.set(path) {
		r.notEmpty(path, len(k.Clusters), "cluster")
	}
	if len(k.Clusters) == 0 {
		return
	}
	for _, field := range []string{"clientNode", "serverNode", "nodeNames"} {
		if at := "spec.target.kubernetes." + field; r.set(at) {
			r.fail(at, "cannot be combined with clusters, each of which has nodeNames of its own")
		}
	}
	if e.Spec.Mesh != nil {
		r.fail("spec.mesh", "is for one cluster, and the experiment has %s", words.And(k.ClusterNames()))
	}
	names, contexts := map[string]string{}, map[string]string{}
	for i, c := range k.Clusters {
		r.cluster(fmt.Sprintf("%s[%d]", path, i), e, c, names, contexts)
	}
}

// cluster checks one of several clusters. names and contexts are those of the clusters before it.
func (r *reader) cluster(at string, e *Experiment, c Cluster, names, contexts map[string]string) {
	if r.has(at) { // otherwise a variant names it
		r.name(at+".name", c.Name, names)
	}
	if r.set(at + ".context") {
		r.matches(at+".context", c.Context, loginName, "without spaces or a leading -")
	}
	reached := c.Kubeconfig + "\n" + c.Context
	if other, ok := contexts[reached]; ok {
		r.fail(at+".context", "must be another one than that of cluster %s, is %q too", other, c.Context)
	}
	contexts[reached] = c.Name
	if !slices.ContainsFunc(e.Spec.Variants, func(v Variant) bool { return v.Cluster == c.Name }) {
		r.fail(at, "no variant runs in cluster %s: give one cluster: %[1]s, or leave the cluster out", c.Name)
	}
	k := e.Spec.Target.Kubernetes
	inAll := map[string]string{}
	for i, name := range k.Observe {
		inAll[name] = fmt.Sprintf("spec.target.kubernetes.observe[%d]", i)
	}
	r.observe(at+".observe", c.Observe, k, inAll)
	r.baseImage(at+".baseImage", c.BaseImage, k.Image)
	if !r.set(at + ".nodeNames") {
		return
	}
	if want := cmp.Or(k.Nodes, k.nodesNamed()); len(c.NodeNames) != want || want < 2 || want > 2*MaxPairs {
		r.fail(at+".nodeNames", "must be 2 to %d nodes, and as many in each cluster; %s has %d, expected are %d", 2*MaxPairs, c.Name, len(c.NodeNames), max(2, want))
	}
	r.nodeNames(at+".nodeNames", c.NodeNames)
}

// inCluster checks the cluster of a variant.
func (r *reader) inCluster(path string, e *Experiment, v *Variant) {
	k := e.Spec.Target.Kubernetes
	switch {
	case k == nil && r.set(path):
		r.fail(path, "is for the target kubernetes")
	case k == nil || len(k.Clusters) == 0 || r.malformedNear("spec.target.kubernetes.clusters") || r.malformedNear(path):
	case v.Cluster == "":
		r.fail(path, "is missing: the experiment compares the clusters %s", words.And(k.ClusterNames()))
	case !cellName.MatchString(v.Cluster):
		r.fail(path, "must be of A-Z, a-z, 0-9 and + / . _ -, the first a letter or digit, is %q: give a cluster of spec.target.kubernetes.clusters another name than its context", v.Cluster)
	case !slices.Contains(k.ClusterNames(), v.Cluster):
		r.fail(path, "there is no cluster %q; %s", v.Cluster, Suggest(v.Cluster, k.ClusterNames()))
	case v.Hosts != nil:
		r.fail(path, "cannot be combined with hosts: the nodes of each cluster are chosen by nodeSelector, clientSelector and serverSelector")
	}
}
