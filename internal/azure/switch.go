package azure

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/arm"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
)

// SwitchOptions describe what to switch, and how.
type SwitchOptions struct {
	// Target is a virtual machine or scale set, as a resource ID or as GROUP/NAME.
	Target string
	// Want turns Accelerated Networking on; false turns it off.
	Want bool
	// Undo restores the state before the first switch instead.
	Undo bool
	// Live changes a NIC while its machine runs. The service may refuse that, or the change may have no effect.
	Live bool
	// Dir is the folder of the journals.
	Dir string
}

// Switch turns Accelerated Networking of one target on or off. It derives its steps from the current state, so the same
// switch can continue after an interruption: it only has to remember the original state.
type Switch struct {
	// Warnings are what a person should know before the switch runs.
	Warnings []string

	o       SwitchOptions
	clients *clients
	cloud   *Cloud
	id      *arm.ResourceID
	journal journal
	found   *found // nil if there is nothing to undo
}

// found is the journal of a switch.
type found struct {
	Target string    `json:"target"`
	Time   time.Time `json:"time"`
	// NICs maps each NIC and model to whether Accelerated Networking was enabled on it originally.
	NICs map[string]bool `json:"nics"`
	// Running maps each machine ID to whether the machine ran before the switch in progress. It is empty once the switch
	// has ended, because people start and stop machines after that.
	Running map[string]bool `json:"running"`
}

// act is one step of a change.
type act struct {
	text string
	do   func(context.Context) error
}

// PlanSwitch reads the current state, and refuses a target that must not be switched. It changes nothing.
func (c *Cloud) PlanSwitch(ctx context.Context, o SwitchOptions) (*Switch, error) {
	s := &Switch{o: o, cloud: c}
	if err := s.find(ctx); err != nil {
		return nil, err
	}
	s.journal = journalOf(o.Dir, "switch", s.id.String())
	s.found = new(found)
	known, err := s.journal.read(s.found)
	switch {
	case err != nil:
		return nil, err
	case known && (o.Undo || len(s.found.Running) > 0):
		return s, nil // undo or continue
	case known:
		s.found.Running = make(map[string]bool)
		return s, s.check(ctx)
	case o.Undo:
		s.found = nil
		return s, nil
	}
	s.found = &found{Target: s.id.String(), Time: time.Now().UTC().Truncate(time.Second), NICs: make(map[string]bool), Running: make(map[string]bool)}
	return s, s.check(ctx)
}

// find finds the target.
func (s *Switch) find(ctx context.Context) error {
	if strings.HasPrefix(s.o.Target, "/") {
		id, err := arm.ParseResourceID(s.o.Target)
		if err != nil {
			return fmt.Errorf("%s is not a resource ID of Azure: %w", s.o.Target, err)
		}
		if t := id.ResourceType.String(); !strings.EqualFold(t, typeVM) && !strings.EqualFold(t, typeSet) {
			return fmt.Errorf("%s is a %s: name a virtual machine or a scale set", s.o.Target, t)
		}
		s.id = id
		s.clients, err = s.cloud.in(id)
		return err
	}
	group, name, ok := strings.Cut(s.o.Target, "/")
	if !ok || group == "" || name == "" || strings.Contains(name, "/") {
		return fmt.Errorf("%q: name a virtual machine or scale set as GROUP/NAME, or by its resource ID", s.o.Target)
	}
	if len(s.cloud.order) != 1 {
		return errors.New("GROUP/NAME is ambiguous with several subscriptions: give one --subscription, or name the target by its resource ID")
	}
	s.clients = s.cloud.of[strings.ToLower(s.cloud.order[0])]
	vm, err := s.clients.vms.Get(ctx, group, name, nil)
	id := value(vm.ID)
	if missing(err) {
		var set armcompute.VirtualMachineScaleSetsClientGetResponse
		set, err = s.clients.sets.Get(ctx, group, name, nil)
		id = value(set.ID)
		if missing(err) {
			return fmt.Errorf("there is no virtual machine or scale set %s in subscription %s", s.o.Target, s.cloud.order[0])
		}
	}
	if err != nil {
		return failed("read "+s.o.Target, err)
	}
	s.id, err = arm.ParseResourceID(id)
	return err
}

const (
	typeVM  = "Microsoft.Compute/virtualMachines"
	typeSet = "Microsoft.Compute/virtualMachineScaleSets"
)

func (s *Switch) isVM() bool { return strings.EqualFold(s.id.ResourceType.String(), typeVM) }

// check refuses a target that must not be switched, and collects warnings.
func (s *Switch) check(ctx context.Context) error {
	var tags map[string]*string
	var location, hardware string
	if s.isVM() {
		vm, err := s.clients.vms.Get(ctx, s.id.ResourceGroupName, s.id.Name, nil)
		if err != nil {
			return failed("read "+s.id.Name, err)
		}
		tags, location = vm.Tags, value(vm.Location)
		if h := vm.Properties.HardwareProfile; h != nil {
			hardware = string(value(h.VMSize))
		}
		if vm.Properties.AvailabilitySet != nil && s.o.Want {
			s.Warnings = append(s.Warnings, "it is in an availability set, whose hardware may not support Accelerated Networking: if it cannot start, give --undo, or deallocate all machines of the set first")
		}
	} else {
		set, err := s.clients.sets.Get(ctx, s.id.ResourceGroupName, s.id.Name, nil)
		if err != nil {
			return failed("read "+s.id.Name, err)
		}
		tags, location, hardware = set.Tags, value(set.Location), sizeOf(&set.VirtualMachineScaleSet)
		if flexible(&set.VirtualMachineScaleSet) {
			return fmt.Errorf("%s is a flexible scale set, whose instances are virtual machines: name each of them instead", s.id.Name)
		}
		members, err := s.members(ctx)
		if err != nil {
			return err
		}
		for _, m := range members {
			if !value(m.Properties.LatestModelApplied) {
				return fmt.Errorf("instance %s of %s differs from its model, so updating it would change more than Accelerated Networking: update it first (az vmss update-instances)", value(m.InstanceID), s.id.Name)
			}
		}
	}
	if pool := value(tags[poolTag]); pool != "" {
		return fmt.Errorf("%s belongs to node pool %s of AKS, which undoes such changes: use slipstream azure migrate %s", s.id.Name, pool, pool)
	}
	for _, tool := range ownersOf(tags) {
		s.Warnings = append(s.Warnings, "its tags say that "+tool+" manages it, which may undo the change: change its configuration too")
	}
	if !s.o.Want {
		return nil
	}
	sizes, err := s.clients.sizes(ctx, location)
	switch k := sizes[strings.ToLower(location+"/"+hardware)]; {
	case err != nil || k == nil:
		s.Warnings = append(s.Warnings, "whether size "+hardware+" supports Accelerated Networking is unknown")
	case k.accelerated == No:
		return fmt.Errorf("%s has size %s, which does not support Accelerated Networking: choose another size (slipstream azure audit --size %s --location %s shows which of its family do)", s.id.Name, hardware, hardware, location)
	}
	return nil
}

// owners maps words in the tags of resources to the infrastructure-as-code tools that write such tags, or that people
// name in tags.
var owners = map[string]string{"terraform": "Terraform", "opentofu": "OpenTofu", "pulumi": "Pulumi", "bicep": "Bicep", "crossplane": "Crossplane",
	"cluster-api": "Cluster API", "capz": "Cluster API", "azd-env-name": "the Azure Developer CLI", "ansible": "Ansible"}

// ownersOf returns the tools that own a resource according to its tags. Most tools leave no other sign.
func ownersOf(tags map[string]*string) (tools []string) {
	for k, v := range tags {
		text := strings.ToLower(k + "=" + value(v))
		for word, tool := range owners {
			if strings.Contains(text, word) && !slices.Contains(tools, tool) {
				tools = append(tools, tool)
			}
		}
	}
	slices.Sort(tools)
	return tools
}

// Found returns when the state that Undo restores was recorded, or the zero time if there is nothing to undo.
func (s *Switch) Found() time.Time {
	if s.found == nil {
		return time.Time{}
	}
	return s.found.Time
}

// Name returns the target as GROUP/NAME.
func (s *Switch) Name() string { return s.id.ResourceGroupName + "/" + s.id.Name }

// Plan describes the remaining steps. There are none if the target is already in the desired state.
func (s *Switch) Plan(ctx context.Context) (lines []string, err error) {
	acts, err := s.acts(ctx)
	for _, a := range acts {
		lines = append(lines, a.text)
	}
	return lines, err
}

// Run takes the remaining steps. After an error the same switch continues where this one stopped.
func (s *Switch) Run(ctx context.Context, note func(string)) error {
	if s.found == nil {
		return nil
	}
	release, err := s.journal.lock()
	if err != nil {
		return err
	}
	defer release()
	acts, err := s.acts(ctx)
	if err != nil {
		return err
	}
	if err := s.journal.write(s.found); err != nil {
		return err
	}
	for _, a := range acts {
		note(a.text)
		if err := a.do(ctx); err != nil {
			return failed(a.text, err)
		}
	}
	if left, err := s.Plan(ctx); err != nil || len(left) > 0 {
		return errors.Join(err, errorIf(len(left) > 0, "Azure accepted each step, but these had no effect: "+strings.Join(left, "; ")))
	}
	if s.o.Undo {
		return s.journal.remove()
	}
	clear(s.found.Running)
	return s.journal.write(s.found)
}

func errorIf(b bool, text string) error {
	if b {
		return errors.New(text)
	}
	return nil
}

// wants returns whether a NIC or model should have Accelerated Networking on. It records the current setting when it
// sees the NIC or model for the first time.
func (s *Switch) wants(id string, now bool) bool {
	key := strings.ToLower(id)
	if _, ok := s.found.NICs[key]; !ok {
		s.found.NICs[key] = now
	}
	if s.o.Undo {
		return s.found.NICs[key]
	}
	return s.o.Want
}

// ran returns whether a machine should run at the end. It refuses a machine whose power state Azure does not report,
// because that machine would stay off.
func (s *Switch) ran(id, power string) (bool, error) {
	if power == "" {
		return false, fmt.Errorf("the power state of %s is unknown: try again later", last(id))
	}
	key := strings.ToLower(id)
	if _, ok := s.found.Running[key]; !ok {
		s.found.Running[key] = power == "running" || power == "starting"
	}
	return s.found.Running[key], nil
}

func (s *Switch) acts(ctx context.Context) ([]act, error) {
	switch {
	case s.found == nil:
		return nil, nil
	case s.isVM():
		return s.vmActs(ctx)
	}
	return s.setActs(ctx)
}

func power(statuses []*armcompute.InstanceViewStatus) string {
	for _, x := range statuses {
		if p, ok := strings.CutPrefix(value(x.Code), "PowerState/"); ok {
			return p
		}
	}
	return ""
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

func (s *Switch) vmActs(ctx context.Context) (acts []act, err error) {
	group, name := s.id.ResourceGroupName, s.id.Name
	vm, err := s.clients.vms.Get(ctx, group, name, nil)
	if err != nil {
		return nil, failed("read "+name, err)
	}
	view, err := s.clients.vms.InstanceView(ctx, group, name, nil)
	if err != nil {
		return nil, failed("read the power state of "+name, err)
	}
	now := power(view.Statuses)
	ran, err := s.ran(s.id.String(), now)
	if err != nil {
		return nil, err
	}
	var nics []act
	if p := vm.Properties.NetworkProfile; p != nil {
		for _, ref := range p.NetworkInterfaces {
			id, err := arm.ParseResourceID(value(ref.ID))
			if err != nil {
				return nil, err
			}
			nic, err := s.clients.nics.Get(ctx, id.ResourceGroupName, id.Name, nil)
			if err != nil {
				return nil, failed("read NIC "+id.Name, err)
			}
			is := value(nic.Properties.EnableAcceleratedNetworking)
			if want := s.wants(id.String(), is); want != is {
				nics = append(nics, act{fmt.Sprintf("turn Accelerated Networking of NIC %s %s", id.Name, onOff(want)), func(ctx context.Context) error { return s.setNIC(ctx, id, want) }})
			}
		}
	}
	if len(nics) > 0 && !s.o.Live && now != "deallocated" {
		acts = append(acts, act{"deallocate " + name + ", which is " + now, func(ctx context.Context) error {
			p, err := s.clients.vms.BeginDeallocate(ctx, group, name, nil)
			return wait(ctx, s.cloud, p, err)
		}})
		now = "deallocated"
	}
	acts = append(acts, nics...)
	if ran && now != "running" && now != "starting" {
		acts = append(acts, act{"start " + name, func(ctx context.Context) error {
			p, err := s.clients.vms.BeginStart(ctx, group, name, nil)
			return wait(ctx, s.cloud, p, err)
		}})
	}
	return acts, nil
}

// setNIC changes only this setting of a NIC's current state. The service refuses the change if somebody else has changed
// the NIC meanwhile.
func (s *Switch) setNIC(ctx context.Context, id *arm.ResourceID, want bool) error {
	nic, err := s.clients.nics.Get(ctx, id.ResourceGroupName, id.Name, nil)
	if err != nil {
		return err
	}
	nic.Properties.EnableAcceleratedNetworking = &want
	put := ctx
	if nic.Etag != nil {
		put = policy.WithHTTPHeader(ctx, http.Header{"If-Match": {*nic.Etag}})
	}
	p, err := s.clients.nics.BeginCreateOrUpdate(put, id.ResourceGroupName, id.Name, nic.Interface, nil)
	return wait(ctx, s.cloud, p, err)
}

func (s *Switch) members(ctx context.Context) ([]*armcompute.VirtualMachineScaleSetVM, error) {
	pager := s.clients.members.NewListPager(s.id.ResourceGroupName, s.id.Name, &armcompute.VirtualMachineScaleSetVMsClientListOptions{Expand: to.Ptr("instanceView")})
	members, err := all(ctx, pager, func(p armcompute.VirtualMachineScaleSetVMsClientListResponse) []*armcompute.VirtualMachineScaleSetVM {
		return p.Value
	})
	if err != nil {
		return nil, failed("list instances of "+s.id.Name, err)
	}
	return slices.DeleteFunc(members, func(m *armcompute.VirtualMachineScaleSetVM) bool {
		return m.ID == nil || m.InstanceID == nil || m.Properties == nil
	}), nil
}

// setActs changes the model of a scale set, and then one instance after another. If the upgrade policy updates instances
// by itself, all of them are deallocated before the model changes.
func (s *Switch) setActs(ctx context.Context) (acts []act, err error) {
	group, name := s.id.ResourceGroupName, s.id.Name
	set, err := s.clients.sets.Get(ctx, group, name, nil)
	if err != nil {
		return nil, failed("read "+name, err)
	}
	members, err := s.members(ctx)
	if err != nil {
		return nil, err
	}
	change := make(map[string]bool) // of the model, by the name of a NIC
	for _, n := range modelNICs(&set.VirtualMachineScaleSet) {
		if n.Properties != nil {
			is := value(n.Properties.EnableAcceleratedNetworking)
			if want := s.wants(s.id.String()+"/"+value(n.Name), is); want != is {
				change[value(n.Name)] = want
			}
		}
	}
	var model []act
	for _, nic := range slices.Sorted(maps.Keys(change)) {
		model = append(model, act{fmt.Sprintf("turn Accelerated Networking of NIC %s in the model of %s %s", nic, name, onOff(change[nic])), func(ctx context.Context) error { return s.setModel(ctx, change) }})
		break // one request changes all of them
	}
	manual := true
	if p := set.Properties.UpgradePolicy; p != nil && p.Mode != nil {
		manual = *p.Mode == armcompute.UpgradeModeManual
	}
	if manual {
		acts = append(acts, model...)
	}
	var after []act
	for _, m := range members {
		before, then, err := s.memberActs(m, len(change) > 0)
		if err != nil {
			return nil, err
		}
		if manual {
			acts = append(append(acts, before...), then...)
		} else {
			acts, after = append(acts, before...), append(after, then...)
		}
	}
	if !manual {
		acts = append(append(acts, model...), after...)
	}
	return acts, nil
}

// memberActs returns the steps for an instance: those to take before it gets the new model, and those after.
func (s *Switch) memberActs(m *armcompute.VirtualMachineScaleSetVM, changes bool) (before, then []act, err error) {
	group, set, id := s.id.ResourceGroupName, s.id.Name, *m.InstanceID
	now := ""
	if v := m.Properties.InstanceView; v != nil {
		now = power(v.Statuses)
	}
	ran, err := s.ran(*m.ID, now)
	if err != nil {
		return nil, nil, err
	}
	if changes || !value(m.Properties.LatestModelApplied) {
		if now != "deallocated" && !s.o.Live {
			before = append(before, act{"deallocate instance " + id, func(ctx context.Context) error {
				p, err := s.clients.members.BeginDeallocate(ctx, group, set, id, nil)
				return wait(ctx, s.cloud, p, err)
			}})
			now = "deallocated"
		}
		then = append(then, act{"give instance " + id + " the new model", func(ctx context.Context) error {
			p, err := s.clients.sets.BeginUpdateInstances(ctx, group, set, armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs{InstanceIDs: []*string{&id}}, nil)
			return wait(ctx, s.cloud, p, err)
		}})
	}
	if ran && now != "running" && now != "starting" {
		then = append(then, act{"start instance " + id, func(ctx context.Context) error {
			p, err := s.clients.members.BeginStart(ctx, group, set, id, nil)
			return wait(ctx, s.cloud, p, err)
		}})
	}
	return before, then, nil
}

// setModel changes only this setting of the model's current state.
func (s *Switch) setModel(ctx context.Context, change map[string]bool) error {
	set, err := s.clients.sets.Get(ctx, s.id.ResourceGroupName, s.id.Name, nil)
	if err != nil {
		return err
	}
	for _, n := range modelNICs(&set.VirtualMachineScaleSet) {
		if want, ok := change[value(n.Name)]; ok && n.Properties != nil {
			n.Properties.EnableAcceleratedNetworking = &want
		}
	}
	p, err := s.clients.sets.BeginCreateOrUpdate(ctx, s.id.ResourceGroupName, s.id.Name, set.VirtualMachineScaleSet,
		&armcompute.VirtualMachineScaleSetsClientBeginCreateOrUpdateOptions{IfMatch: set.Etag})
	return wait(ctx, s.cloud, p, err)
}
