package experiment

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// twoClusters is a fakeTarget of two clusters. lost says why one is lost, by name; facts has those of its nodes.
type twoClusters struct {
	*fakeTarget
	lost  map[string]error
	facts map[string]record.Node
	// version of the network plugin, by cluster.
	version map[string]string
}

func (f *twoClusters) Network(ctx context.Context, fabric int) (Network, error) {
	n, err := f.fakeTarget.Network(ctx, fabric)
	if err != nil {
		return nil, err
	}
	return &fakeCluster{n.(*fakeNetwork), f, f.topology.Fabrics()[fabric].Cluster}, nil
}

type fakeCluster struct {
	*fakeNetwork
	of   *twoClusters
	name string
}

func (c *fakeCluster) Cluster(_ context.Context, nodes []record.Node) (record.Cluster, error) {
	return record.Cluster{Name: c.name, PluginVersion: c.of.version[c.name], KubeProxy: nodes[0].KubeProxy}, nil
}

func (c *fakeCluster) Worker(ctx context.Context, p place.Place, use place.Use) (Worker, error) {
	w, err := c.fakeNetwork.Worker(ctx, p, use)
	return &clusterWorker{w, c}, err
}

type clusterWorker struct {
	Worker
	of *fakeCluster
}

func (w *clusterWorker) Describe(ctx context.Context, p place.Place) (record.Node, error) {
	n, err := w.Worker.Describe(ctx, p)
	facts := w.of.of.facts[w.of.name]
	facts.Name, facts.Boot = n.Name, w.of.name+p.Node
	return facts, err
}

func (w *clusterWorker) Serve(ctx context.Context, t place.Traffic, ready place.Ready) (record.Endpoint, error) {
	if why := w.of.of.lost[w.of.name]; why != nil {
		return record.Endpoint{}, why
	}
	return w.Worker.Serve(ctx, t, ready)
}

// inClusters is an experiment over the clusters a and b.
func inClusters(t *testing.T) *spec.Experiment {
	return parse(t, "spec.target={kubernetes: {}}", "spec.path=", "spec.baseline=a/pod", "spec.pairs=[1]", "spec.runs=20",
		"spec.variants=[{name: a/pod, cluster: a}, {name: b/pod, cluster: b, versus: a/pod}, {name: b/service, cluster: b, path: {service: {}}}]")
}

// TestClusters runs blocks over two clusters: each block has every variant, in random order, and the environment has both clusters.
func TestClusters(t *testing.T) {
	f := &twoClusters{fakeTarget: newFake(2), facts: map[string]record.Node{
		"a": {Kernel: "6.1", CPUs: "0-3", CPUModel: "x", KubeProxy: "iptables", Links: []record.Link{{Name: "eth0", Class: "nic", Speed: 25e9}}},
		"b": {Kernel: "6.8", CPUs: "0-3", KubeProxy: "nftables", Links: []record.Link{{Name: "eth0", Class: "nic", Speed: 1e11}}},
	}}
	exp := inClusters(t)
	r, err := Start(t.Context(), f.plan(exp), f, nil, "test", nil, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	env := r.Environment()
	want := []record.Cluster{{Name: "a", KubeProxy: "iptables"}, {Name: "b", KubeProxy: "nftables"}}
	if diff := cmp.Diff(want, env.Clusters); diff != "" || env.Placement != "Cluster a: in memory Cluster b: in memory" {
		t.Errorf("placement %q, clusters (-want +got):\n%s", env.Placement, diff)
	}
	var nodes []string
	for _, n := range env.Nodes {
		nodes = append(nodes, n.Name+" "+n.Kernel)
	}
	if diff := cmp.Diff([]string{"a/node0 6.1", "a/node1 6.1", "b/node0 6.8", "b/node1 6.8"}, nodes); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	trials, err := r.Measure(t.Context(), new(memory))
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	first := map[string]bool{}
	for block := range slices.Chunk(trials, 3) {
		var in []string
		for _, tr := range block {
			in = append(in, tr.Variant)
		}
		first[in[0]] = true
		if slices.Sort(in); !slices.Equal(in, []string{"a/pod", "b/pod", "b/service"}) || block[0].Block != block[2].Block {
			t.Errorf("block %d has %v", block[0].Block, in)
		}
	}
	if len(first) != 3 {
		t.Errorf("blocks begin with %v only", first)
	}
	var differ []string // what is not known of a cluster does not count
	for _, w := range trials[0].Warnings {
		if w.Code == record.WarnClustersDiffer {
			differ = append(differ, w.Message)
		}
	}
	if diff := cmp.Diff([]string{
		"the nodes of the clusters differ in kernel: a has 6.1; b has 6.8",
		"the nodes of the clusters differ in speed of the NIC: a has 25 Gbit/s; b has 100 Gbit/s",
	}, differ); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

// TestClusterLost: a cluster is lost in mid-block. The run ends with its name, what was recorded stays, and a resumed run completes the
// blocks.
func TestClusterLost(t *testing.T) {
	exp := inClusters(t)
	f, out := &twoClusters{fakeTarget: newFake(2), lost: map[string]error{}}, new(memory)
	at := 4 // the first trial of block 2
	measure := func() error {
		r, err := Start(t.Context(), f.plan(exp), f, nil, "test", slices.Clone(out.trials), func(e Event) {
			if e.Kind == Ends && e.Trial.Order == at {
				f.lost["b"] = &place.LostError{Why: errors.New("the API server has not answered for 45s")}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Measure(t.Context(), out)
		return errors.Join(err, r.Close())
	}
	err := measure()
	if want := "cluster b: the target is lost: the API server has not answered for 45s"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if n := len(out.trials); n < 4 || n > 5 || slices.ContainsFunc(out.trials, func(tr record.Trial) bool { return tr.Status != record.StatusOK }) {
		t.Errorf("on record: %+v", keys(out.trials))
	}
	at, f.lost = 0, map[string]error{}
	f.fakeTarget = newFake(2)
	if err := measure(); err != nil || len(out.trials) != 60 {
		t.Errorf("resumed: %d trials, %v", len(out.trials), err)
	}
	// A trial that fails for another reason names the cluster too.
	f, out = &twoClusters{fakeTarget: newFake(2), lost: map[string]error{"b": errors.New("no")}}, new(memory)
	if err := measure(); !errors.Is(err, ErrMissing) {
		t.Errorf("failed trials: %v", err)
	}
	for _, tr := range out.trials {
		if failed := strings.HasPrefix(tr.Variant, "b/"); failed != (tr.Status == record.StatusFailed) || failed && !strings.HasPrefix(tr.Error, "cluster b: ") {
			t.Errorf("%s: %s %s", tr.Variant, tr.Status, tr.Error)
		}
	}
}

// TestNetworkChanged: a plugin is upgraded between two blocks. The trials from then on say so.
func TestNetworkChanged(t *testing.T) {
	f, out := &twoClusters{fakeTarget: newFake(2), version: map[string]string{"a": "v1", "b": "v1"}}, new(memory)
	var notes []string
	r, err := Start(t.Context(), f.plan(inClusters(t)), f, nil, "test", nil, func(e Event) {
		if e.Kind == Ends && e.Trial.Order == 6 { // the last of block 2
			f.version["b"] = "v2"
		}
		if e.Kind == Note {
			notes = append(notes, e.Text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Measure(t.Context(), out)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"the network of b changed during the run: it was v1, and is v2"}, notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	for _, tr := range out.trials {
		warned := slices.ContainsFunc(tr.Warnings, func(w record.Warning) bool { return w.Code == record.WarnNetworkChanged })
		if warned != (tr.Block > 2) {
			t.Errorf("block %d, %s: warnings %v", tr.Block, tr.Variant, tr.Warnings)
		}
	}
}
