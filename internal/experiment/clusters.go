package experiment

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
)

// describeClusters reads what the clusters of the run are now.
func (r *Run) describeClusters(ctx context.Context) (all []record.Cluster, err error) {
	for i, n := range r.networks {
		cluster, ok := n.Network.(Clustered)
		if !ok {
			continue
		}
		now, err := cluster.Cluster(ctx, n.facts)
		if err != nil {
			return nil, r.plan.topology.Fabrics()[i].In(err)
		}
		all = append(all, now)
	}
	return all, nil
}

// noteChanges warns of clusters whose network has changed, for example because its plugin was upgraded.
func (r *Run) noteChanges(ctx context.Context) {
	now, err := r.describeClusters(ctx)
	if err != nil {
		return // the next trial in that cluster finds out what is wrong
	}
	for i, was := range r.clusters {
		if now[i].Same(was) {
			continue
		}
		changed := record.Warnf(record.WarnNetworkChanged, "the network of %s changed during the run: it was %s, and is %s",
			cmp.Or(r.plan.topology.Fabrics()[i].Cluster, "the cluster"), was, now[i])
		r.note(changed.Message)
		r.lasting = append(r.lasting, changed)
		r.clusters[i] = now[i]
	}
}

// alike are facts that should be the same for the nodes of all clusters: they affect a result, and are not what is compared.
var alike = []struct {
	name string
	of   func(record.Node) []string
}{
	{"kernel", func(n record.Node) []string { return []string{n.Kernel} }},
	{"CPU", func(n record.Node) []string { return []string{n.CPUModel} }},
	{"CPUs online", func(n record.Node) []string { return []string{n.CPUs} }},
	{"speed of the NIC", nicSpeeds},
}

func nicSpeeds(n record.Node) (all []string) {
	for _, l := range n.Links {
		if l.Class == "nic" && l.Speed > 0 {
			all = append(all, fmt.Sprintf("%g Gbit/s", l.Speed*1e-9))
		}
	}
	return all
}

// clustersDiffer warns of facts in which the nodes of several clusters differ. What is not known of a cluster does not count.
func (r *Run) clustersDiffer() (all []record.Warning) {
	fabrics := r.plan.topology.Fabrics()
	for _, fact := range alike {
		var texts, has []string
		for i, f := range fabrics {
			var values []string
			for _, n := range r.networks[i].facts {
				values = append(values, fact.of(n)...)
			}
			slices.Sort(values)
			if text := strings.Join(slices.Compact(values), ", "); text != "" && f.Cluster != "" {
				texts, has = append(texts, text), append(has, f.Cluster+" has "+text)
			}
		}
		slices.Sort(texts)
		if len(slices.Compact(texts)) > 1 {
			all = append(all, record.Warnf(record.WarnClustersDiffer, "the nodes of the clusters differ in %s: %s", fact.name, strings.Join(has, "; ")))
		}
	}
	return all
}
