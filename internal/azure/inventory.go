package azure

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8"
	"golang.org/x/sync/errgroup"
)

// Fact answers one question.
type Fact string

// Facts. NotLooked means that nobody asked the question, and Unknown that there was no answer.
const (
	Yes       Fact = "yes"
	No        Fact = "no"
	Mixed     Fact = "mixed" // its NICs differ
	Unknown   Fact = "unknown"
	NotLooked Fact = "not looked"
)

// Audit is the result of an inventory.
type Audit struct {
	Version       int       `json:"version"` // of this format: 1
	Time          time.Time `json:"time"`
	Subscriptions []string  `json:"subscriptions"`
	// Groups are the resource groups that were read; empty means all.
	Groups    []string   `json:"groups,omitempty"`
	Machines  []Machine  `json:"machines"`
	ScaleSets []ScaleSet `json:"scaleSets"`
	// NotRead lists what could not be read. The audit says nothing about its contents.
	NotRead []NotRead `json:"notRead"`
}

// auditVersion is the version of Audit's format.
const auditVersion = 1

// Machine is a virtual machine, or an instance of a scale set.
type Machine struct {
	ID            string `json:"id"`
	Name          string `json:"name"`
	Subscription  string `json:"subscription"`
	ResourceGroup string `json:"resourceGroup"`
	ScaleSet      string `json:"scaleSet,omitempty"` // its name
	Cluster       string `json:"cluster,omitempty"`  // of AKS
	Pool          string `json:"pool,omitempty"`     // of the cluster
	Location      string `json:"location"`
	Size          string `json:"size"`
	// Possible is Yes if the size has the capability AcceleratedNetworkingEnabled.
	Possible Fact `json:"possible"`
	// Wanted joins enableAcceleratedNetworking of its NICs.
	Wanted Fact `json:"wanted"`
	// Used is Yes if packets take the virtual function, as the machine's agent reports.
	Used Fact `json:"used"`
	// UsedReason is the agent's reason, such as VFIdle.
	UsedReason string `json:"usedReason,omitempty"`
	// Behind means that the machine is an instance that differs from the model of its scale set.
	Behind   bool      `json:"behind,omitempty"`
	NICs     []NIC     `json:"nics"`
	Findings []Finding `json:"findings,omitempty"`
}

// NIC is a network interface of a machine.
type NIC struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Wanted Fact   `json:"wanted"`
}

// ScaleSet describes the model of a scale set, from which its next instances are made.
type ScaleSet struct {
	ID            string `json:"id"`
	Name          string `json:"name"`
	Subscription  string `json:"subscription"`
	ResourceGroup string `json:"resourceGroup"`
	Cluster       string `json:"cluster,omitempty"`
	Pool          string `json:"pool,omitempty"`
	Location      string `json:"location"`
	Size          string `json:"size"`
	Upgrade       string `json:"upgrade,omitempty"` // policy: Manual, Automatic or Rolling
	Possible      Fact   `json:"possible"`
	// Wanted is the model's. The instances have their own.
	Wanted    Fact      `json:"wanted"`
	Instances int       `json:"instances"`
	Behind    int       `json:"behind"` // how many of the instances differ from the model
	Findings  []Finding `json:"findings,omitempty"`
}

// NotRead is a list that the service did not return.
type NotRead struct {
	Scope string `json:"scope"` // a subscription, resource group, scale set or pool
	What  string `json:"what"`
	Why   string `json:"why"`
}

func (n NotRead) String() string { return n.What + " of " + n.Scope + ": " + n.Why }

// Use is the report of the agent on a node about its virtual functions.
type Use struct {
	Used   Fact
	Reason string
}

// Scope selects what an inventory reads.
type Scope struct {
	// Groups are resource groups; empty means all groups of each subscription. If one contains an AKS cluster,
	// the inventory also reads the group of the cluster's nodes.
	Groups []string
	// Uses holds the reports of agents, by the lower-case ID of the machine. It is nil if no agent was asked.
	Uses map[string]Use
}

// atOnce is the number of requests that an inventory has in flight. The service limits requests per
// subscription, and other programs need their share.
const atOnce = 6

// Inventory reads the state that the control plane has. It lists in NotRead the parts that it was not allowed to read,
// and returns an error only if ctx ends.
func (c *Cloud) Inventory(ctx context.Context, s Scope) (*Audit, error) {
	a := &Audit{Version: auditVersion, Time: time.Now().UTC().Truncate(time.Second), Subscriptions: c.order, Groups: slices.Clone(s.Groups),
		Machines: []Machine{}, ScaleSets: []ScaleSet{}, NotRead: []NotRead{}}
	for _, id := range c.order {
		r := &reader{clients: c.of[strings.ToLower(id)], subscription: id, scope: s, found: a,
			instances: make(map[string][]*armcompute.VirtualMachineScaleSetVM),
			wanted:    make(map[string]Fact), names: make(map[string][]NIC), poolOf: make(map[string]string), sizes: make(map[string]*size)}
		if err := r.read(ctx); err != nil {
			return nil, err
		}
	}
	judge(a)
	a.sort()
	return a, nil
}

func (a *Audit) sort() {
	slices.SortFunc(a.Machines, func(x, y Machine) int { return cmp.Compare(strings.ToLower(x.ID), strings.ToLower(y.ID)) })
	slices.SortFunc(a.ScaleSets, func(x, y ScaleSet) int { return cmp.Compare(strings.ToLower(x.ID), strings.ToLower(y.ID)) })
	slices.SortFunc(a.NotRead, func(x, y NotRead) int { return cmp.Compare(x.String(), y.String()) })
}

// reader reads one subscription.
type reader struct {
	*clients
	subscription string
	scope        Scope

	mu          sync.Mutex // guards the fields below
	found       *Audit
	allVMs      []*armcompute.VirtualMachine
	allSets     []*armcompute.VirtualMachineScaleSet
	allClusters []*armcontainerservice.ManagedCluster
	instances   map[string][]*armcompute.VirtualMachineScaleSetVM // by scale set ID
	// The keys of these maps are lower-case IDs and names:
	wanted map[string]Fact   // by NIC
	names  map[string][]NIC  // by machine: the NICs that name it as their machine
	poolOf map[string]string // by machine: its pool, as the Machines API reports it
	sizes  map[string]*size  // by location/size
}

// step is one list to read.
type step struct {
	scope, what string
	read        func(context.Context) error
}

// list reads all pages of a list, and passes each item to take, one caller at a time. If a page fails, take
// still gets the items of those before it.
func list[R, T any](r *reader, scope, what string, pager *runtime.Pager[R], of func(R) []*T, take func(*T)) step {
	return step{scope, what, func(ctx context.Context) error {
		items, err := all(ctx, pager, of)
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, item := range items {
			take(item)
		}
		return err
	}}
}

// read reads a subscription: first the lists that tell what else to read, then the rest.
func (r *reader) read(ctx context.Context) error {
	first := r.everything()
	if len(r.scope.Groups) > 0 {
		first = nil
		for _, g := range r.scope.Groups {
			first = append(first, r.group(g)...)
			first = append(first, list(r, "resource group "+g, "AKS clusters", r.clusters.NewListByResourceGroupPager(g, nil),
				func(p armcontainerservice.ManagedClustersClientListByResourceGroupResponse) []*armcontainerservice.ManagedCluster {
					return p.Value
				}, r.addCluster))
		}
	}
	if err := r.run(ctx, first); err != nil {
		return err
	}
	if err := r.run(ctx, r.nodeGroups()); err != nil {
		return err
	}
	if err := r.run(ctx, r.rest()); err != nil {
		return err
	}
	r.collect()
	return nil
}

// run runs steps, several at once, and notes those that fail.
func (r *reader) run(ctx context.Context, steps []step) error {
	group, inner := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, s := range steps {
		group.Go(func() error {
			err := s.read(inner)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.found.NotRead = append(r.found.NotRead, NotRead{Scope: s.scope, What: s.what, Why: reason(err)})
			}
			return nil
		})
	}
	return group.Wait()
}

func (r *reader) everything() []step {
	at := "subscription " + r.subscription
	return []step{
		list(r, at, "virtual machines", r.vms.NewListAllPager(nil),
			func(p armcompute.VirtualMachinesClientListAllResponse) []*armcompute.VirtualMachine { return p.Value }, r.addVM),
		list(r, at, "scale sets", r.sets.NewListAllPager(nil),
			func(p armcompute.VirtualMachineScaleSetsClientListAllResponse) []*armcompute.VirtualMachineScaleSet {
				return p.Value
			}, r.addSet),
		list(r, at, "network interfaces", r.nics.NewListAllPager(nil),
			func(p armnetwork.InterfacesClientListAllResponse) []*armnetwork.Interface { return p.Value }, r.addNIC),
		list(r, at, "AKS clusters", r.clusters.NewListPager(nil),
			func(p armcontainerservice.ManagedClustersClientListResponse) []*armcontainerservice.ManagedCluster {
				return p.Value
			}, r.addCluster),
	}
}

func (r *reader) group(g string) []step {
	at := "resource group " + g
	return []step{
		list(r, at, "virtual machines", r.vms.NewListPager(g, nil),
			func(p armcompute.VirtualMachinesClientListResponse) []*armcompute.VirtualMachine { return p.Value }, r.addVM),
		list(r, at, "scale sets", r.sets.NewListPager(g, nil),
			func(p armcompute.VirtualMachineScaleSetsClientListResponse) []*armcompute.VirtualMachineScaleSet {
				return p.Value
			}, r.addSet),
		list(r, at, "network interfaces", r.nics.NewListPager(g, nil),
			func(p armnetwork.InterfacesClientListResponse) []*armnetwork.Interface { return p.Value }, r.addNIC),
	}
}

// nodeGroups reads the resource groups that hold the nodes of clusters, unless they have been read.
func (r *reader) nodeGroups() (steps []step) {
	for _, m := range r.allClusters {
		g := value(m.Properties.NodeResourceGroup)
		if len(r.scope.Groups) > 0 && g != "" && !slices.ContainsFunc(r.scope.Groups, func(x string) bool { return strings.EqualFold(x, g) }) {
			steps = append(steps, r.group(g)...)
			r.found.Groups = append(r.found.Groups, g)
		}
	}
	return steps
}

// poolVMs is the type of a pool whose nodes are separate virtual machines. The SDK's list of types does not
// have it yet.
const poolVMs armcontainerservice.AgentPoolType = "VirtualMachines"

// rest reads what depends on the first lists: instances and NICs of scale sets, machines of pools, and sizes.
func (r *reader) rest() (steps []step) {
	locations := make(map[string]bool)
	for _, vm := range r.allVMs {
		locations[strings.ToLower(value(vm.Location))] = true
	}
	for _, s := range r.allSets {
		locations[strings.ToLower(value(s.Location))] = true
		if flexible(s) {
			continue // its instances are in the list of virtual machines
		}
		id, name, g := value(s.ID), value(s.Name), groupOf(value(s.ID))
		at := "scale set " + g + "/" + name
		steps = append(steps,
			list(r, at, "instances", r.members.NewListPager(g, name, nil),
				func(p armcompute.VirtualMachineScaleSetVMsClientListResponse) []*armcompute.VirtualMachineScaleSetVM {
					return p.Value
				},
				func(m *armcompute.VirtualMachineScaleSetVM) { r.instances[id] = append(r.instances[id], m) }),
			list(r, at, "network interfaces", r.nics.NewListVirtualMachineScaleSetNetworkInterfacesPager(g, name, nil),
				func(p armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesResponse) []*armnetwork.Interface {
					return p.Value
				}, r.addNIC))
	}
	for _, m := range r.allClusters {
		for _, p := range m.Properties.AgentPoolProfiles {
			if p == nil || value(p.Type) != poolVMs {
				continue
			}
			g, cluster, pool := groupOf(value(m.ID)), value(m.Name), value(p.Name)
			steps = append(steps, list(r, "node pool "+cluster+"/"+pool, "machines", r.machines.NewListPager(g, cluster, pool, nil),
				func(p armcontainerservice.MachinesClientListResponse) []*armcontainerservice.Machine { return p.Value },
				func(x *armcontainerservice.Machine) {
					if x.Properties != nil {
						r.poolOf[strings.ToLower(value(x.Properties.ResourceID))] = pool
					}
				}))
		}
	}
	for location := range locations {
		steps = append(steps, list(r, "location "+location+" of subscription "+r.subscription, "sizes", r.skuPager(location), skuPage, func(k *armcompute.ResourceSKU) { addSize(r.sizes, k) }))
	}
	return steps
}

func (r *reader) addVM(vm *armcompute.VirtualMachine) {
	if vm.ID != nil && vm.Properties != nil {
		r.allVMs = append(r.allVMs, vm)
	}
}

func (r *reader) addSet(s *armcompute.VirtualMachineScaleSet) {
	if s.ID != nil && s.Properties != nil {
		r.allSets = append(r.allSets, s)
	}
}

func (r *reader) addCluster(m *armcontainerservice.ManagedCluster) {
	if m.ID != nil && m.Properties != nil {
		r.allClusters = append(r.allClusters, m)
	}
}

func (r *reader) addNIC(n *armnetwork.Interface) {
	if n.ID == nil || n.Properties == nil {
		return
	}
	nic := NIC{ID: *n.ID, Name: value(n.Name), Wanted: boolean(n.Properties.EnableAcceleratedNetworking)}
	r.wanted[strings.ToLower(nic.ID)] = nic.Wanted
	if vm := n.Properties.VirtualMachine; vm != nil {
		key := strings.ToLower(value(vm.ID))
		r.names[key] = append(r.names[key], nic)
	}
}

// boolean converts a flag of the service, where an absent flag means off.
func boolean(b *bool) Fact {
	if value(b) {
		return Yes
	}
	return No
}

func flexible(s *armcompute.VirtualMachineScaleSet) bool {
	return value(s.Properties.OrchestrationMode) == armcompute.OrchestrationModeFlexible
}

// collect assembles the audit from the lists.
func (r *reader) collect() {
	models := make(map[string]Fact)
	behind, count := make(map[string]int), make(map[string]int)
	for _, s := range r.allSets {
		models[strings.ToLower(*s.ID)] = modelWants(s)
	}
	add := func(m Machine, set string, current *bool) {
		key := strings.ToLower(set)
		if set != "" {
			m.ScaleSet = last(set)
			model, known := models[key]
			m.Behind = current != nil && !*current || known && model != Unknown && m.Wanted != Unknown && m.Wanted != model
			count[key]++
			if m.Behind {
				behind[key]++
			}
		}
		r.found.Machines = append(r.found.Machines, m)
	}
	for _, vm := range r.allVMs {
		var ids []string
		if p := vm.Properties.NetworkProfile; p != nil {
			for _, n := range p.NetworkInterfaces {
				ids = append(ids, value(n.ID))
			}
		}
		var hardware string
		if h := vm.Properties.HardwareProfile; h != nil {
			hardware = string(value(h.VMSize))
		}
		var set string
		if s := vm.Properties.VirtualMachineScaleSet; s != nil {
			set = value(s.ID)
		}
		add(r.machine(*vm.ID, value(vm.Name), value(vm.Location), hardware, vm.Tags, r.nicsOf(*vm.ID, ids)), set, nil)
	}
	for _, s := range r.allSets {
		for _, m := range r.instances[*s.ID] {
			hardware := ""
			if m.SKU != nil {
				hardware = value(m.SKU.Name)
			}
			if m.ID == nil || m.Properties == nil {
				continue
			}
			add(r.machine(*m.ID, value(m.Name), value(s.Location), cmp.Or(hardware, sizeOf(s)), s.Tags, r.nicsOf(*m.ID, nil)), *s.ID, m.Properties.LatestModelApplied)
		}
	}
	for _, s := range r.allSets {
		key := strings.ToLower(*s.ID)
		x := ScaleSet{ID: *s.ID, Name: value(s.Name), Subscription: r.subscription, ResourceGroup: groupOf(*s.ID), Location: value(s.Location), Size: sizeOf(s),
			Possible: r.possible(value(s.Location), sizeOf(s)), Wanted: models[key], Instances: count[key], Behind: behind[key]}
		if p := s.Properties.UpgradePolicy; p != nil {
			x.Upgrade = string(value(p.Mode))
		}
		x.Cluster, x.Pool = r.pool(*s.ID, s.Tags)
		r.found.ScaleSets = append(r.found.ScaleSets, x)
	}
}

func sizeOf(s *armcompute.VirtualMachineScaleSet) string {
	if s.SKU == nil {
		return ""
	}
	return value(s.SKU.Name)
}

// modelWants returns what the model of a scale set sets on the NICs of new instances.
func modelWants(s *armcompute.VirtualMachineScaleSet) Fact {
	var all []Fact
	for _, n := range modelNICs(s) {
		if n.Properties == nil {
			all = append(all, No)
			continue
		}
		all = append(all, boolean(n.Properties.EnableAcceleratedNetworking))
	}
	return join(all)
}

func modelNICs(s *armcompute.VirtualMachineScaleSet) []*armcompute.VirtualMachineScaleSetNetworkConfiguration {
	if s.Properties == nil || s.Properties.VirtualMachineProfile == nil || s.Properties.VirtualMachineProfile.NetworkProfile == nil {
		return nil // a flexible scale set may have no model
	}
	return s.Properties.VirtualMachineProfile.NetworkProfile.NetworkInterfaceConfigurations
}

// join combines several facts into one.
func join(facts []Fact) Fact {
	if len(facts) == 0 || slices.Contains(facts, Unknown) {
		return Unknown
	}
	for _, f := range facts {
		if f != facts[0] {
			return Mixed
		}
	}
	return facts[0]
}

// nicsOf returns the NICs of a machine: those that the machine names, or else those that name the machine.
func (r *reader) nicsOf(machine string, ids []string) []NIC {
	nics := []NIC{}
	for _, id := range ids {
		nics = append(nics, NIC{ID: id, Name: last(id), Wanted: cmp.Or(r.wanted[strings.ToLower(id)], Unknown)})
	}
	if len(ids) == 0 {
		nics = append(nics, r.names[strings.ToLower(machine)]...)
	}
	return nics
}

func (r *reader) machine(id, name, location, size string, tags map[string]*string, nics []NIC) Machine {
	m := Machine{ID: id, Name: name, Subscription: r.subscription, ResourceGroup: groupOf(id), Location: location, Size: size, NICs: nics,
		Possible: r.possible(location, size), Used: NotLooked}
	var facts []Fact
	for _, n := range nics {
		facts = append(facts, n.Wanted)
	}
	m.Wanted = join(facts)
	m.Cluster, m.Pool = r.pool(id, tags)
	if r.scope.Uses != nil {
		if use, ok := r.scope.Uses[strings.ToLower(id)]; ok {
			m.Used, m.UsedReason = use.Used, use.Reason
		}
	}
	return m
}

func (r *reader) possible(location, size string) Fact {
	if s := r.sizes[strings.ToLower(location+"/"+size)]; s != nil {
		return s.accelerated
	}
	return Unknown
}

// poolTag is the tag that AKS sets on the scale sets and virtual machines of its node pools.
const poolTag = "aks-managed-poolName"

// pool returns the node pool that a resource belongs to.
func (r *reader) pool(id string, tags map[string]*string) (cluster, pool string) {
	for _, m := range r.allClusters {
		if strings.EqualFold(value(m.Properties.NodeResourceGroup), groupOf(id)) {
			cluster = value(m.Name)
		}
	}
	pool = value(tags[poolTag])
	return cluster, cmp.Or(r.poolOf[strings.ToLower(id)], pool)
}
