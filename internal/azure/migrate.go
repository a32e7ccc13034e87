package azure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/arm"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
)

// Node is a node of a pool.
type Node struct {
	Name            string
	Machine         string // resource ID of its virtual machine or scale set instance; empty if it is not in Azure
	Ready, Cordoned bool
}

// Nodes gives access to the cluster whose pool migrates.
type Nodes interface {
	// Of returns the nodes of a pool.
	Of(ctx context.Context, pool string) ([]Node, error)
	// Blockers names each pod of a pool that cannot move, and why. It checks whether the pod fits a node of the new
	// pool only if that pool has nodes.
	Blockers(ctx context.Context, pool, to string) ([]string, error)
	Cordon(ctx context.Context, node string, on bool) error
	// Drain evicts all pods of a node that can be evicted, and returns when they are gone. It notes what it is
	// waiting for.
	Drain(ctx context.Context, node string, note func(string)) error
	// Waiting returns the names of the pods that have no node yet.
	Waiting(ctx context.Context) ([]string, error)
	Uses(ctx context.Context) (map[string]Use, error)
}

// Proof is the result of comparing two pools.
type Proof struct {
	Good bool   `json:"good"`
	Text string `json:"text"`
}

// Migration describes what to migrate, and how.
type Migration struct {
	Group, Cluster, Pool string // of AKS
	New, Size            string // name and size of the new pool; the defaults are the old name with "an" appended, and the old size
	// Anyway drains even if the new pool is not proven faster.
	Anyway bool
	// Delete deletes the old pool at the end.
	Delete bool
	// Until names the step after which to stop; "" means to run all.
	Until string
	// Pace is the pause between two nodes.
	Pace time.Duration
	// Timeout bounds each wait for the service or for nodes; 0 means 30 minutes.
	Timeout time.Duration
	Dir     string // of the journals
	Nodes   Nodes
	// Prove measures the old pool against the new one. It ignores measurements of a migration that began at another
	// time.
	Prove func(ctx context.Context, began time.Time, old, fresh []Node) (Proof, error)
	Note  func(string)
}

// Steps are the steps of a migration, in order.
var Steps = []string{"create", "ready", "verify", "measure", "check", "freeze", "cordon", "drain", "scale", "delete"}

// migration is the journal of a migration. It records the original state, and what cannot be read from Azure or
// the cluster.
type migration struct {
	Began    time.Time       `json:"began"`
	Cluster  string          `json:"cluster"`
	Pool     string          `json:"pool"`
	New      string          `json:"new"`
	Size     string          `json:"size"`
	Count    int32           `json:"count"`
	Scaled   bool            `json:"scaled"` // the autoscaler of the old pool was on
	Min      int32           `json:"min,omitempty"`
	Max      int32           `json:"max,omitempty"`
	Proof    *Proof          `json:"proof,omitempty"`
	Cordoned map[string]bool `json:"cordoned,omitempty"` // nodes of the old pool, and whether they were cordoned before
	Drained  bool            `json:"drained,omitempty"`
	// Deleting means that the old pool may already be deleted, so BackOut is impossible.
	Deleting   bool `json:"deleting,omitempty"`
	BackingOut bool `json:"backingOut,omitempty"`
}

// Migrator migrates one pool.
type Migrator struct {
	Migration
	// Warnings and Blockers are for people to read. If there is a blocker, no pod is touched.
	Warnings, Blockers []string

	clients  *clients
	cloud    *Cloud
	journal  journal
	at       *migration
	old      *armcontainerservice.AgentPool // nil once it is deleted
	machines string                         // prefix of the resource ID of every machine of the cluster, in lower case
	read     *migration                     // the journal as this process read it
}

// ErrNotFaster means that the migration stops before the first cordon, because the new pool was not proven faster.
var ErrNotFaster = errors.New("not proven faster")

// fromTag marks a pool that a migration created. Backing out deletes only such a pool.
const fromTag = "slipstream-migrated-from"

// PlanMigration reads the current state, and refuses a pool that must not migrate. It changes nothing.
func (c *Cloud) PlanMigration(ctx context.Context, o Migration) (*Migrator, error) {
	if len(c.order) != 1 {
		return nil, errors.New("a cluster is in one subscription: name one with --subscription")
	}
	if o.Until != "" && !slices.Contains(Steps, o.Until) {
		return nil, fmt.Errorf("--until %s: there is no such step; choose one of %s", o.Until, strings.Join(Steps, ", "))
	}
	m := &Migrator{Migration: o, cloud: c, clients: c.of[strings.ToLower(c.order[0])], at: new(migration), read: new(migration)}
	cluster, err := m.clients.clusters.Get(ctx, o.Group, o.Cluster, nil)
	if err != nil {
		return nil, failed("read cluster "+o.Group+"/"+o.Cluster, err)
	}
	m.journal = journalOf(o.Dir, "migrate", value(cluster.ID)+"/agentPools/"+o.Pool)
	known, err := m.journal.read(m.at)
	if err != nil {
		return nil, err
	}
	if _, err := m.journal.read(m.read); err != nil {
		return nil, err
	}
	if m.old, err = m.pool(ctx, o.Pool); err != nil {
		return nil, err
	}
	switch {
	case m.old == nil && !m.at.Deleting:
		return nil, fmt.Errorf("cluster %s has no node pool %s", o.Cluster, o.Pool)
	case m.old != nil && m.at.Deleting && value(m.old.Properties.ProvisioningState) != "Deleting":
		// Azure refused the delete, and somebody may have used the pool since.
		m.at.Deleting, m.at.Drained = false, false
	}
	for what, tags := range map[string]map[string]*string{"cluster": cluster.Tags, "pool": m.tags()} {
		for _, tool := range ownersOf(tags) {
			m.Warnings = append(m.Warnings, "tags of the "+what+" say that "+tool+" manages it: change its configuration too, or it will undo the migration")
		}
	}
	if known {
		if (o.New != "" && o.New != m.at.New) || (o.Size != "" && o.Size != m.at.Size) {
			return nil, fmt.Errorf("a migration of %s to pool %s of size %s is in progress: continue it without other values of --name and --size, or give --back-out", o.Pool, m.at.New, m.at.Size)
		}
	} else if err := m.begin(ctx, value(cluster.Location), value(cluster.ID)); err != nil {
		return nil, err
	}
	id, err := arm.ParseResourceID(value(cluster.ID))
	if err == nil && cluster.Properties == nil {
		err = fmt.Errorf("read cluster %s/%s: it has no properties", o.Group, o.Cluster)
	}
	if err != nil {
		return nil, err
	}
	m.machines = strings.ToLower("/subscriptions/" + id.SubscriptionID + "/resourceGroups/" + value(cluster.Properties.NodeResourceGroup) + "/")
	if err := m.sameCluster(ctx); err != nil {
		return nil, err
	}
	if m.old != nil {
		m.Blockers, err = o.Nodes.Blockers(ctx, o.Pool, m.at.New)
	}
	return m, err
}

// sameCluster refuses a kubeconfig of another cluster: the migration would drain that cluster's nodes, and delete
// this cluster's pool.
func (m *Migrator) sameCluster(ctx context.Context) error {
	const hint = "name the cluster's context with --context"
	for _, pool := range []string{m.Pool, m.at.New} {
		nodes, err := m.Nodes.Of(ctx, pool)
		if err != nil {
			return err
		}
		for _, n := range nodes {
			if !strings.HasPrefix(strings.ToLower(n.Machine), m.machines) {
				return fmt.Errorf("the kubeconfig is not that of %s/%s: its node %s is no machine of that cluster; %s", m.Group, m.Cluster, n.Name, hint)
			}
		}
		if len(nodes) == 0 && pool == m.Pool && m.old != nil && value(m.old.Properties.Count) > 0 {
			return fmt.Errorf("the kubeconfig is not that of %s/%s: it has no node of pool %s, and Azure has %d; %s", m.Group, m.Cluster, pool, *m.old.Properties.Count, hint)
		}
	}
	return nil
}

func (m *Migrator) tags() map[string]*string {
	if m.old == nil || m.old.Properties == nil {
		return nil
	}
	return m.old.Properties.Tags
}

// pool reads a pool. It returns nil if the pool does not exist.
func (m *Migrator) pool(ctx context.Context, name string) (*armcontainerservice.AgentPool, error) {
	p, err := m.clients.pools.Get(ctx, m.Group, m.Cluster, name, nil)
	switch {
	case missing(err):
		return nil, nil
	case err != nil:
		return nil, failed("read node pool "+name, err)
	case p.Properties == nil:
		return nil, fmt.Errorf("read node pool %s: it has no properties", name)
	}
	return &p.AgentPool, nil
}

var poolName = regexp.MustCompile(`^[a-z][a-z0-9]{0,11}$`)

// begin chooses the name and the settings of the new pool, and checks that the pool may migrate.
func (m *Migrator) begin(ctx context.Context, location, cluster string) error {
	p := m.old.Properties
	if t := value(p.Type); t != armcontainerservice.AgentPoolTypeVirtualMachineScaleSets {
		return fmt.Errorf("%s is a pool of type %s, whose settings slipstream cannot copy: it migrates pools of scale sets only", m.Pool, t)
	}
	if p.PowerState != nil && value(p.PowerState.Code) == armcontainerservice.CodeStopped {
		return fmt.Errorf("%s is stopped, so it cannot be measured: start it first", m.Pool)
	}
	longest := 12
	if value(p.OSType) == armcontainerservice.OSTypeWindows {
		longest = 6
	}
	name := m.New
	if name == "" {
		name = m.Pool[:min(len(m.Pool), longest-2)] + "an"
	}
	if !poolName.MatchString(name) || len(name) > longest {
		return fmt.Errorf("%q is not a valid name of a node pool: it must be a lower-case letter, then lower-case letters and digits, %d characters at most; choose another with --name", name, longest)
	}
	*m.at = migration{Began: time.Now().UTC().Truncate(time.Second), Cluster: cluster, Pool: m.Pool, New: name, Size: cmp.Or(m.Size, value(p.VMSize)), Count: value(p.Count),
		Scaled: value(p.EnableAutoScaling), Min: value(p.MinCount), Max: value(p.MaxCount)}
	pools, err := all(ctx, m.clients.pools.NewListPager(m.Group, m.Cluster, nil),
		func(r armcontainerservice.AgentPoolsClientListResponse) []*armcontainerservice.AgentPool {
			return r.Value
		})
	if err != nil {
		return failed("list node pools", err)
	}
	system := 0
	for _, other := range pools {
		if value(other.Name) == name {
			if other.Properties != nil && value(other.Properties.Tags[fromTag]) == m.Pool {
				return fmt.Errorf("node pool %s belongs to a migration of %s whose journal is not %s: name its folder with --state, or delete the pool", name, m.Pool, m.journal.path)
			}
			return fmt.Errorf("there is a node pool %s already: choose another name with --name", name)
		}
		if other.Properties != nil && value(other.Properties.Mode) == armcontainerservice.AgentPoolModeSystem {
			system++
		}
	}
	if value(p.Mode) == armcontainerservice.AgentPoolModeSystem && system < 2 {
		return fmt.Errorf("%s is the only system pool, and a cluster needs one: add another first (az aks nodepool add --mode System)", m.Pool)
	}
	return m.fits(ctx, location)
}

// fits checks that the new size supports Accelerated Networking, and that the quota allows the new pool.
func (m *Migrator) fits(ctx context.Context, location string) error {
	sizes, err := m.clients.sizes(ctx, location)
	if err != nil {
		return failed("list sizes of "+location, err)
	}
	k := sizes[strings.ToLower(location+"/"+m.at.Size)]
	switch {
	case k == nil:
		return fmt.Errorf("location %s has no size %s", location, m.at.Size)
	case k.accelerated != Yes:
		return fmt.Errorf("size %s does not support Accelerated Networking: choose another with --size (slipstream azure audit --size %s --location %s shows which of its family do)", m.at.Size, m.at.Size, location)
	case k.restricted:
		return fmt.Errorf("this subscription may not use size %s in %s", m.at.Size, location)
	}
	cpus, err := strconv.ParseInt(k.vcpus, 10, 64)
	if err != nil {
		m.Warnings = append(m.Warnings, "the quota was not checked: the number of vCPUs of "+m.at.Size+" is unknown")
		return nil
	}
	usage, err := all(ctx, m.clients.usage.NewListPager(location, nil), func(r armcompute.UsageClientListResponse) []*armcompute.Usage { return r.Value })
	if err != nil {
		return failed("read the quota of "+location, err)
	}
	needs := int64(m.at.Count) * cpus
	for _, u := range usage {
		if u.Name == nil || !strings.EqualFold(value(u.Name.Value), "cores") && !strings.EqualFold(value(u.Name.Value), k.family) {
			continue
		}
		if left := value(u.Limit) - int64(value(u.CurrentValue)); left < needs {
			return fmt.Errorf("the quota of %s in %s has %d vCPUs left, and %d nodes of %s need %d", value(u.Name.Value), location, left, m.at.Count, m.at.Size, needs)
		}
	}
	return nil
}

// NewName returns the name of the new pool.
func (m *Migrator) NewName() string { return m.at.New }

// Plan describes the steps of the migration.
func (m *Migrator) Plan() []string {
	lines := []string{
		fmt.Sprintf("create:  node pool %s, %d nodes of %s, with the settings of %s", m.at.New, m.at.Count, m.at.Size, m.Pool),
		"ready:   wait until all its nodes are Ready",
		"verify:  Accelerated Networking is enabled on each of their NICs, and no agent reports it unused",
		"measure: " + m.Pool + " and " + m.at.New + "; continue only if the latter is proven faster",
		"check:   every pod of " + m.Pool + " can move",
		"freeze:  turn the autoscaler of " + m.Pool + " off, if it is on",
		"cordon:  all nodes of " + m.Pool,
		"drain:   one node after the other",
		"scale:   give " + m.at.New + " the autoscaler of " + m.Pool + ", if that had one",
	}
	if m.Delete {
		return append(lines, "delete:  node pool "+m.Pool+"; after that, --back-out is impossible")
	}
	return append(lines, "         node pool "+m.Pool+" stays, empty and cordoned, until --delete-old")
}

// Run migrates. After an error or an interruption it continues from the current state.
func (m *Migrator) Run(ctx context.Context) error {
	if m.at.BackingOut {
		return errors.New("this migration is being undone: finish that first (--back-out)")
	}
	release, err := m.hold()
	if err != nil {
		return err
	}
	defer release()
	if err := m.journal.write(m.at); err != nil {
		return err
	}
	do := map[string]func(context.Context) error{"create": m.create, "ready": m.ready, "verify": m.verify, "measure": m.measure, "check": m.check,
		"freeze": m.freeze, "cordon": m.cordon, "drain": m.drain, "scale": m.scale, "delete": m.delete}
	for _, step := range Steps {
		if step == "delete" && !m.Delete {
			break
		}
		if m.at.Deleting && step != "delete" {
			continue // the old pool may be gone
		}
		// The proof and the drain stay valid. After a drain, the skipped steps would measure an empty pool.
		if m.at.Drained && slices.Contains([]string{"measure", "check"}, step) {
			continue
		}
		m.Note(step)
		if err := do[step](ctx); err != nil {
			var request *requestError
			if errors.As(err, &request) || ctx.Err() != nil {
				return fmt.Errorf("%s: %w", step, err)
			}
			return fmt.Errorf("%s: %s", step, reason(err))
		}
		if step == m.Until {
			return nil
		}
	}
	if m.Delete {
		return m.journal.remove()
	}
	return nil
}

// hold locks the journal. It fails if another process has changed the journal since this one read it.
func (m *Migrator) hold() (release func(), err error) {
	release, err = m.journal.lock()
	if err != nil {
		return nil, err
	}
	now := new(migration)
	if _, err = m.journal.read(now); err == nil && !reflect.DeepEqual(now, m.read) {
		err = errors.New("another process has continued this migration meanwhile: run the command again")
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// settings returns the settings of the new pool: the old pool's, without those that only the service sets.
func (m *Migrator) settings() armcontainerservice.AgentPool {
	p := *m.old.Properties
	p.CurrentOrchestratorVersion, p.ETag, p.NodeImageVersion, p.ProvisioningState, p.PowerState = nil, nil, nil, nil, nil
	p.OrchestratorVersion = cmp.Or(m.old.Properties.CurrentOrchestratorVersion, p.OrchestratorVersion)
	p.VMSize, p.Count = &m.at.Size, &m.at.Count
	// Both autoscalers stay off until all pods have moved.
	p.EnableAutoScaling, p.MinCount, p.MaxCount = to.Ptr(false), nil, nil
	p.Tags = maps.Clone(p.Tags)
	if p.Tags == nil {
		p.Tags = make(map[string]*string)
	}
	p.Tags[fromTag] = &m.Pool
	p.NodeLabels = maps.Clone(p.NodeLabels)
	maps.DeleteFunc(p.NodeLabels, func(key string, _ *string) bool {
		domain, _, _ := strings.Cut(key, "/")
		return key == "agentpool" || domain == "kubernetes.azure.com" || strings.HasSuffix(domain, ".kubernetes.azure.com")
	})
	return armcontainerservice.AgentPool{Properties: &p}
}

func (m *Migrator) create(ctx context.Context) error {
	fresh, err := m.pool(ctx, m.at.New)
	if err != nil {
		return err
	}
	if fresh != nil {
		if value(fresh.Properties.Tags[fromTag]) != m.Pool {
			return fmt.Errorf("node pool %s exists and does not belong to this migration", m.at.New)
		}
		return m.succeeded(ctx, m.at.New)
	}
	p, err := m.clients.pools.BeginCreateOrUpdate(ctx, m.Group, m.Cluster, m.at.New, m.settings(), &armcontainerservice.AgentPoolsClientBeginCreateOrUpdateOptions{IfNoneMatch: to.Ptr("*")})
	if err := wait(ctx, m.cloud, p, err); err != nil {
		return failed("create node pool "+m.at.New, err)
	}
	return nil
}

// settled waits until no operation on a pool is in progress, not even one that another process began. It returns the
// pool's provisioning state.
func (m *Migrator) settled(ctx context.Context, name string) (state string, err error) {
	err = m.until(ctx, "node pool "+name+" to settle", func() (bool, error) {
		p, err := m.pool(ctx, name)
		if err != nil || p == nil {
			return false, cmp.Or(err, fmt.Errorf("node pool %s is gone", name))
		}
		state = value(p.Properties.ProvisioningState)
		return slices.Contains([]string{"Succeeded", "Failed", "Canceled"}, state), nil
	})
	return state, err
}

// succeeded waits until a pool has settled. It fails if the operation on the pool failed.
func (m *Migrator) succeeded(ctx context.Context, name string) error {
	state, err := m.settled(ctx, name)
	if err == nil && state != "Succeeded" {
		err = fmt.Errorf("the last operation on node pool %s %s: see az aks nodepool show; then correct it and continue, or give --back-out", name, strings.ToLower(state))
	}
	return err
}

// count returns how many nodes the new pool should have: the number that it was created with, unless somebody has
// scaled it.
func (m *Migrator) count(ctx context.Context) (int, error) {
	p, err := m.pool(ctx, m.at.New)
	if err != nil || p == nil {
		return 0, cmp.Or(err, fmt.Errorf("node pool %s is gone", m.at.New))
	}
	if n := value(p.Properties.Count); n > 0 {
		return int(n), nil
	}
	return 0, fmt.Errorf("node pool %s was scaled to no node", m.at.New)
}

// until calls is until that returns true or an error, with a pause between calls. It fails after the timeout.
func (m *Migrator) until(ctx context.Context, what string, is func() (bool, error)) error {
	timeout := m.Timeout
	if timeout == 0 {
		timeout = 30 * time.Minute
	}
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for {
		if ok, err := is(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("waited %v for %s", timeout, what)
		case <-time.After(m.cloud.poll):
		}
	}
}

func (m *Migrator) ready(ctx context.Context) error {
	count, err := m.count(ctx)
	if err != nil {
		return err
	}
	return m.until(ctx, fmt.Sprintf("%d nodes of %s to be Ready", count, m.at.New), func() (bool, error) {
		nodes, err := m.Nodes.Of(ctx, m.at.New)
		ready := 0
		for _, n := range nodes {
			if n.Ready {
				ready++
			}
		}
		return ready >= count, err
	})
}

// verify checks the machines of the new pool as they were created, not as they were requested.
func (m *Migrator) verify(ctx context.Context) error {
	uses, err := m.Nodes.Uses(ctx)
	if err != nil {
		return err
	}
	a, err := m.cloud.Inventory(ctx, Scope{Groups: []string{m.Group}, Uses: uses})
	if err != nil {
		return err
	}
	machines := 0
	for _, x := range a.Machines {
		if x.Pool != m.at.New || !strings.EqualFold(x.Cluster, m.Cluster) {
			continue
		}
		machines++
		if x.Wanted != Yes {
			return fmt.Errorf("%s does not have Accelerated Networking enabled on every NIC (wanted: %s)", x.Name, x.Wanted)
		}
		if x.Used == No && !m.Anyway {
			return fmt.Errorf("packets of %s do not use the virtual function (%s); to continue nevertheless: --anyway", x.Name, x.UsedReason)
		}
	}
	count, err := m.count(ctx)
	if err == nil && machines < count {
		err = fmt.Errorf("%d machines of %s were found, not %d: %v", machines, m.at.New, count, a.NotRead)
	}
	return err
}

// measure runs before the first cordon: until then the old pool is unchanged.
func (m *Migrator) measure(ctx context.Context) error {
	if m.Anyway && (m.at.Proof == nil || !m.at.Proof.Good) {
		m.Note("not proven faster; continuing because of --anyway")
		return nil
	}
	if m.at.Proof == nil {
		old, err := m.Nodes.Of(ctx, m.Pool)
		if err != nil {
			return err
		}
		fresh, err := m.Nodes.Of(ctx, m.at.New)
		if err != nil {
			return err
		}
		proof, err := m.Prove(ctx, m.at.Began, old, fresh)
		if err != nil {
			return err
		}
		m.at.Proof = &proof
		if err := m.journal.write(m.at); err != nil {
			return err
		}
	}
	m.Note(m.at.Proof.Text)
	if !m.at.Proof.Good {
		return fmt.Errorf("%s is %w than %s, which is unchanged: give --back-out to delete %s, or --anyway to continue", m.at.New, ErrNotFaster, m.Pool, m.at.New)
	}
	return nil
}

func (m *Migrator) check(ctx context.Context) error {
	blockers, err := m.Nodes.Blockers(ctx, m.Pool, m.at.New)
	if err == nil && len(blockers) > 0 {
		err = fmt.Errorf("not every pod can move: %s", strings.Join(blockers, "; "))
	}
	return err
}

// autoscale turns the autoscaler of a pool on or off. It changes nothing else of the pool's current settings.
func (m *Migrator) autoscale(ctx context.Context, name string, on bool) error {
	p, err := m.pool(ctx, name)
	if err != nil || p == nil || value(p.Properties.EnableAutoScaling) == on {
		return err
	}
	p.Properties.EnableAutoScaling, p.Properties.MinCount, p.Properties.MaxCount = &on, nil, nil
	if on {
		p.Properties.MinCount, p.Properties.MaxCount = &m.at.Min, &m.at.Max
	}
	poller, err := m.clients.pools.BeginCreateOrUpdate(ctx, m.Group, m.Cluster, name, *p, &armcontainerservice.AgentPoolsClientBeginCreateOrUpdateOptions{IfMatch: p.Properties.ETag})
	if err := wait(ctx, m.cloud, poller, err); err != nil {
		return failed("turn the autoscaler of "+name+" "+onOff(on), err)
	}
	return nil
}

func (m *Migrator) freeze(ctx context.Context) error {
	if err := m.succeeded(ctx, m.Pool); err != nil {
		return err
	}
	return m.autoscale(ctx, m.Pool, false)
}

func (m *Migrator) scale(ctx context.Context) error {
	if !m.at.Scaled {
		return nil
	}
	if err := m.succeeded(ctx, m.at.New); err != nil {
		return err
	}
	return m.autoscale(ctx, m.at.New, true)
}

func (m *Migrator) cordon(ctx context.Context) error {
	nodes, err := m.Nodes.Of(ctx, m.Pool)
	if err != nil {
		return err
	}
	if m.at.Cordoned == nil {
		m.at.Cordoned = make(map[string]bool)
	}
	for _, n := range nodes {
		if _, ok := m.at.Cordoned[n.Name]; !ok {
			m.at.Cordoned[n.Name] = n.Cordoned
		}
	}
	if err := m.journal.write(m.at); err != nil {
		return err
	}
	for _, n := range nodes {
		if err := m.Nodes.Cordon(ctx, n.Name, true); err != nil {
			return err
		}
	}
	return nil
}

func (m *Migrator) drain(ctx context.Context) error {
	if err := m.drainPool(ctx, m.Pool); err != nil {
		return err
	}
	m.at.Drained = true
	return m.journal.write(m.at)
}

func (m *Migrator) drainPool(ctx context.Context, pool string) error {
	nodes, err := m.Nodes.Of(ctx, pool)
	if err != nil {
		return err
	}
	before, err := m.Nodes.Waiting(ctx)
	if err != nil {
		return err
	}
	for i, n := range nodes {
		if i > 0 && m.Pace > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(m.Pace):
			}
		}
		m.Note("drain " + n.Name)
		if err := m.Nodes.Drain(ctx, n.Name, m.Note); err != nil {
			return err
		}
		if err := m.placed(ctx, before); err != nil {
			return fmt.Errorf("after the drain of %s: %w", n.Name, err)
		}
	}
	return nil
}

// placed waits until every pod has a node, except those that had none before the drain. The next node must not be
// drained while the pods of the last one have no room.
func (m *Migrator) placed(ctx context.Context, before []string) error {
	var waiting []string
	err := m.until(ctx, "evicted pods to get a node", func() (bool, error) {
		now, err := m.Nodes.Waiting(ctx)
		waiting = slices.DeleteFunc(now, func(pod string) bool { return slices.Contains(before, pod) })
		return len(waiting) == 0, err
	})
	if err != nil && len(waiting) > 0 {
		return fmt.Errorf("%w; without a node: %s", err, strings.Join(waiting, ", "))
	}
	return err
}

func (m *Migrator) delete(ctx context.Context) error {
	if !m.at.Drained {
		return errors.New("the old pool is not drained")
	}
	m.at.Deleting = true
	if err := m.journal.write(m.at); err != nil {
		return err
	}
	return m.deletePool(ctx, m.Pool)
}

func (m *Migrator) deletePool(ctx context.Context, name string) error {
	p, err := m.clients.pools.BeginDelete(ctx, m.Group, m.Cluster, name, nil)
	if err := wait(ctx, m.cloud, p, err); err != nil && !missing(err) {
		return failed("delete node pool "+name, err)
	}
	return nil
}

// BackOut undoes the migration, from any step before the delete: it uncordons the old nodes, drains the new ones
// and deletes the new pool. After an error it continues where it stopped.
func (m *Migrator) BackOut(ctx context.Context) error {
	if m.at.Deleting {
		return fmt.Errorf("node pool %s has been deleted or is being deleted, so the migration cannot be undone", m.Pool)
	}
	release, err := m.hold()
	if err != nil {
		return err
	}
	defer release()
	m.at.BackingOut = true
	if err := m.journal.write(m.at); err != nil {
		return err
	}
	for _, node := range slices.Sorted(maps.Keys(m.at.Cordoned)) {
		if !m.at.Cordoned[node] {
			if err := m.Nodes.Cordon(ctx, node, false); err != nil {
				return err
			}
		}
	}
	if m.at.Scaled {
		m.Note("turn the autoscaler of " + m.Pool + " on")
		if _, err := m.settled(ctx, m.Pool); err != nil {
			return err
		}
		if err := m.autoscale(ctx, m.Pool, true); err != nil {
			return err
		}
	}
	fresh, err := m.pool(ctx, m.at.New)
	if err != nil {
		return err
	}
	if fresh != nil && value(fresh.Properties.Tags[fromTag]) == m.Pool {
		if err := m.leave(ctx); err != nil {
			return err
		}
	}
	return m.journal.remove()
}

// leave empties the new pool and deletes it.
func (m *Migrator) leave(ctx context.Context) error {
	// Nodes of a pool that is still being created would join after the drain.
	if _, err := m.settled(ctx, m.at.New); err != nil {
		return err
	}
	if err := m.autoscale(ctx, m.at.New, false); err != nil {
		return err
	}
	nodes, err := m.Nodes.Of(ctx, m.at.New)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if err := m.Nodes.Cordon(ctx, n.Name, true); err != nil {
			return err
		}
	}
	if err := m.drainPool(ctx, m.at.New); err != nil {
		return err
	}
	m.Note("delete node pool " + m.at.New)
	return m.deletePool(ctx, m.at.New)
}
