package azuretest

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	azfake "github.com/Azure/azure-sdk-for-go/sdk/azcore/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	computefake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	aksfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8"
	networkfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8/fake"
)

func (c *Cloud) computeServer() *computefake.ServerFactory {
	s := new(computefake.ServerFactory)
	c.vmServer(&s.VirtualMachinesServer)
	c.setServer(&s.VirtualMachineScaleSetsServer)
	c.memberServer(&s.VirtualMachineScaleSetVMsServer)
	s.ResourceSKUsServer.NewListPager = func(o *armcompute.ResourceSKUsClientListOptions) azfake.PagerResponder[armcompute.ResourceSKUsClientListResponse] {
		c.Lock()
		defer c.Unlock()
		var skus []*armcompute.ResourceSKU
		if o != nil && o.Filter != nil && *o.Filter == "location eq '"+Location+"'" {
			skus = c.skus()
		}
		return pages(c, skus, func(p []*armcompute.ResourceSKU) (r armcompute.ResourceSKUsClientListResponse) { r.Value = p; return r })
	}
	s.UsageServer.NewListPager = func(string, *armcompute.UsageClientListOptions) azfake.PagerResponder[armcompute.UsageClientListResponse] {
		c.Lock()
		defer c.Unlock()
		limit := c.Limit
		if limit == 0 {
			limit = 1000
		}
		usage := func(name string) *armcompute.Usage {
			return &armcompute.Usage{Name: &armcompute.UsageName{Value: to.Ptr(name)}, CurrentValue: to.Ptr(c.InUse), Limit: to.Ptr(limit)}
		}
		return pages(c, []*armcompute.Usage{usage("cores"), usage("testFamily")}, func(p []*armcompute.Usage) (r armcompute.UsageClientListResponse) { r.Value = p; return r })
	}
	return s
}

// skus returns the list of resource SKUs. It contains a type of disk, which stands for all SKUs that are not sizes of machines.
func (c *Cloud) skus() []*armcompute.ResourceSKU {
	locations := []*string{to.Ptr(Location)}
	all := []*armcompute.ResourceSKU{{Name: to.Ptr("Standard_LRS"), ResourceType: to.Ptr("disks"), Locations: locations}}
	for name, accelerated := range c.Sizes {
		value := map[bool]string{true: "True", false: "False"}[accelerated]
		k := &armcompute.ResourceSKU{Name: to.Ptr(name), ResourceType: to.Ptr("virtualMachines"), Locations: locations, Family: to.Ptr(cmp.Or(c.Families[name], "testFamily")),
			Capabilities: []*armcompute.ResourceSKUCapabilities{{Name: to.Ptr("AcceleratedNetworkingEnabled"), Value: &value}, {Name: to.Ptr("vCPUs"), Value: to.Ptr(fmt.Sprint(cmp.Or(c.VCPUs[name], 4)))}}}
		if c.Refused[name] {
			k.Restrictions = []*armcompute.ResourceSKURestrictions{{Type: to.Ptr(armcompute.ResourceSKURestrictionsTypeLocation),
				ReasonCode: to.Ptr(armcompute.ResourceSKURestrictionsReasonCodeNotAvailableForSubscription), Values: locations}}
		}
		all = append(all, k)
	}
	return all
}

func (c *Cloud) vmServer(s *computefake.VirtualMachinesServer) {
	s.NewListAllPager = func(*armcompute.VirtualMachinesClientListAllOptions) azfake.PagerResponder[armcompute.VirtualMachinesClientListAllResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.VMs, every), func(p []*armcompute.VirtualMachine) (r armcompute.VirtualMachinesClientListAllResponse) {
			r.Value = p
			return r
		})
	}
	s.NewListPager = func(group string, _ *armcompute.VirtualMachinesClientListOptions) azfake.PagerResponder[armcompute.VirtualMachinesClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.VMs, below(group)), func(p []*armcompute.VirtualMachine) (r armcompute.VirtualMachinesClientListResponse) {
			r.Value = p
			return r
		})
	}
	s.Get = func(_ context.Context, group, name string, _ *armcompute.VirtualMachinesClientGetOptions) (resp azfake.Responder[armcompute.VirtualMachinesClientGetResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if vm := c.VMs[key(group, name)]; vm != nil {
			resp.SetResponse(http.StatusOK, armcompute.VirtualMachinesClientGetResponse{VirtualMachine: copied(vm)}, nil)
		} else {
			notFound(&e)
		}
		return resp, e
	}
	s.InstanceView = func(_ context.Context, group, name string, _ *armcompute.VirtualMachinesClientInstanceViewOptions) (resp azfake.Responder[armcompute.VirtualMachinesClientInstanceViewResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		var r armcompute.VirtualMachinesClientInstanceViewResponse
		r.Statuses = c.statuses(ID(group, TypeVM, name))
		resp.SetResponse(http.StatusOK, r, nil)
		return resp, e
	}
	s.BeginDeallocate = func(_ context.Context, group, name string, _ *armcompute.VirtualMachinesClientBeginDeallocateOptions) (resp azfake.PollerResponder[armcompute.VirtualMachinesClientDeallocateResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		return ended(armcompute.VirtualMachinesClientDeallocateResponse{}, func() { c.Power[strings.ToLower(ID(group, TypeVM, name))] = "deallocated" }), e
	}
	s.BeginStart = func(_ context.Context, group, name string, _ *armcompute.VirtualMachinesClientBeginStartOptions) (resp azfake.PollerResponder[armcompute.VirtualMachinesClientStartResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		return ended(armcompute.VirtualMachinesClientStartResponse{}, func() { c.Power[strings.ToLower(ID(group, TypeVM, name))] = "running" }), e
	}
}

func (c *Cloud) statuses(id string) []*armcompute.InstanceViewStatus {
	return []*armcompute.InstanceViewStatus{{Code: to.Ptr("ProvisioningState/succeeded")}, {Code: to.Ptr("PowerState/" + c.Power[strings.ToLower(id)])}}
}

func (c *Cloud) setServer(s *computefake.VirtualMachineScaleSetsServer) {
	s.NewListAllPager = func(*armcompute.VirtualMachineScaleSetsClientListAllOptions) azfake.PagerResponder[armcompute.VirtualMachineScaleSetsClientListAllResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.Sets, every), func(p []*armcompute.VirtualMachineScaleSet) (r armcompute.VirtualMachineScaleSetsClientListAllResponse) {
			r.Value = p
			return r
		})
	}
	s.NewListPager = func(group string, _ *armcompute.VirtualMachineScaleSetsClientListOptions) azfake.PagerResponder[armcompute.VirtualMachineScaleSetsClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.Sets, below(group)), func(p []*armcompute.VirtualMachineScaleSet) (r armcompute.VirtualMachineScaleSetsClientListResponse) {
			r.Value = p
			return r
		})
	}
	s.Get = func(_ context.Context, group, name string, _ *armcompute.VirtualMachineScaleSetsClientGetOptions) (resp azfake.Responder[armcompute.VirtualMachineScaleSetsClientGetResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if set := c.Sets[key(group, name)]; set != nil {
			resp.SetResponse(http.StatusOK, armcompute.VirtualMachineScaleSetsClientGetResponse{VirtualMachineScaleSet: copied(set)}, nil)
		} else {
			notFound(&e)
		}
		return resp, e
	}
	s.BeginCreateOrUpdate = func(_ context.Context, group, name string, set armcompute.VirtualMachineScaleSet, o *armcompute.VirtualMachineScaleSetsClientBeginCreateOrUpdateOptions) (resp azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientCreateOrUpdateResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		now := c.Sets[key(group, name)]
		if o != nil && o.IfMatch != nil && *o.IfMatch != *now.Etag {
			e.SetResponseError(http.StatusPreconditionFailed, "PreconditionFailed")
			return resp, e
		}
		return ended(armcompute.VirtualMachineScaleSetsClientCreateOrUpdateResponse{VirtualMachineScaleSet: set}, func() {
			set.ID, set.Name, set.Etag = now.ID, now.Name, to.Ptr(*now.Etag+"1")
			c.Sets[key(group, name)] = &set
			for _, m := range c.Members[key(group, name)] {
				if *set.Properties.UpgradePolicy.Mode == armcompute.UpgradeModeManual {
					m.Properties.LatestModelApplied = to.Ptr(false)
				} else {
					c.apply(&set, m)
				}
			}
		}), e
	}
	s.BeginUpdateInstances = func(_ context.Context, group, name string, ids armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs, _ *armcompute.VirtualMachineScaleSetsClientBeginUpdateInstancesOptions) (resp azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientUpdateInstancesResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		return ended(armcompute.VirtualMachineScaleSetsClientUpdateInstancesResponse{}, func() {
			for _, m := range c.Members[key(group, name)] {
				for _, id := range ids.InstanceIDs {
					if *id == *m.InstanceID {
						c.apply(c.Sets[key(group, name)], m)
					}
				}
			}
		}), e
	}
}

// apply brings an instance up to date with the model of its scale set.
func (c *Cloud) apply(set *armcompute.VirtualMachineScaleSet, m *armcompute.VirtualMachineScaleSetVM) {
	m.Properties.LatestModelApplied = to.Ptr(true)
	nic := c.NICs[strings.ToLower(*m.ID+"/networkInterfaces/nic0")]
	wanted := *set.Properties.VirtualMachineProfile.NetworkProfile.NetworkInterfaceConfigurations[0].Properties.EnableAcceleratedNetworking
	nic.Properties.EnableAcceleratedNetworking = &wanted
}

func (c *Cloud) memberServer(s *computefake.VirtualMachineScaleSetVMsServer) {
	s.NewListPager = func(group, set string, o *armcompute.VirtualMachineScaleSetVMsClientListOptions) azfake.PagerResponder[armcompute.VirtualMachineScaleSetVMsClientListResponse] {
		c.Lock()
		defer c.Unlock()
		var all []*armcompute.VirtualMachineScaleSetVM
		for _, m := range c.Members[key(group, set)] {
			one, properties := *m, *m.Properties
			if o != nil && o.Expand != nil && *o.Expand == "instanceView" {
				properties.InstanceView = &armcompute.VirtualMachineScaleSetVMInstanceView{Statuses: c.statuses(*m.ID)}
			}
			one.Properties = &properties
			all = append(all, &one)
		}
		return pages(c, all, func(p []*armcompute.VirtualMachineScaleSetVM) (r armcompute.VirtualMachineScaleSetVMsClientListResponse) {
			r.Value = p
			return r
		})
	}
	s.BeginDeallocate = func(_ context.Context, group, set, id string, _ *armcompute.VirtualMachineScaleSetVMsClientBeginDeallocateOptions) (resp azfake.PollerResponder[armcompute.VirtualMachineScaleSetVMsClientDeallocateResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		return ended(armcompute.VirtualMachineScaleSetVMsClientDeallocateResponse{}, func() { c.Power[strings.ToLower(ID(group, TypeSet, set)+"/virtualMachines/"+id)] = "deallocated" }), e
	}
	s.BeginStart = func(_ context.Context, group, set, id string, _ *armcompute.VirtualMachineScaleSetVMsClientBeginStartOptions) (resp azfake.PollerResponder[armcompute.VirtualMachineScaleSetVMsClientStartResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		return ended(armcompute.VirtualMachineScaleSetVMsClientStartResponse{}, func() { c.Power[strings.ToLower(ID(group, TypeSet, set)+"/virtualMachines/"+id)] = "running" }), e
	}
}

func (c *Cloud) networkServer() *networkfake.ServerFactory {
	f := new(networkfake.ServerFactory)
	s := &f.InterfacesServer
	s.NewListAllPager = func(*armnetwork.InterfacesClientListAllOptions) azfake.PagerResponder[armnetwork.InterfacesClientListAllResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.NICs, named), func(p []*armnetwork.Interface) (r armnetwork.InterfacesClientListAllResponse) { r.Value = p; return r })
	}
	s.NewListPager = func(group string, _ *armnetwork.InterfacesClientListOptions) azfake.PagerResponder[armnetwork.InterfacesClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.NICs, below(group)), func(p []*armnetwork.Interface) (r armnetwork.InterfacesClientListResponse) { r.Value = p; return r })
	}
	s.NewListVirtualMachineScaleSetNetworkInterfacesPager = func(group, set string, _ *armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesOptions) azfake.PagerResponder[armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.NICs, below(strings.ToLower(ID(group, TypeSet, set)))), func(p []*armnetwork.Interface) (r armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesResponse) {
			r.Value = p
			return r
		})
	}
	s.Get = func(_ context.Context, group, name string, _ *armnetwork.InterfacesClientGetOptions) (resp azfake.Responder[armnetwork.InterfacesClientGetResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if nic := c.NICs[key(group, name)]; nic != nil {
			resp.SetResponse(http.StatusOK, armnetwork.InterfacesClientGetResponse{Interface: copied(nic)}, nil)
		} else {
			notFound(&e)
		}
		return resp, e
	}
	s.BeginCreateOrUpdate = func(ctx context.Context, group, name string, nic armnetwork.Interface, _ *armnetwork.InterfacesClientBeginCreateOrUpdateOptions) (resp azfake.PollerResponder[armnetwork.InterfacesClientCreateOrUpdateResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		now := c.NICs[key(group, name)]
		if vm := now.Properties.VirtualMachine; vm != nil && c.Strict && c.Power[strings.ToLower(*vm.ID)] != "deallocated" {
			e.SetResponseError(http.StatusConflict, "NicMustBeOnDeallocatedVm")
			return resp, e
		}
		return ended(armnetwork.InterfacesClientCreateOrUpdateResponse{Interface: nic}, func() {
			nic.ID, nic.Name, nic.Etag = now.ID, now.Name, to.Ptr(*now.Etag+"1")
			nic.Properties.VirtualMachine, nic.Properties.ProvisioningState = now.Properties.VirtualMachine, now.Properties.ProvisioningState
			c.NICs[key(group, name)] = &nic
		}), e
	}
	return f
}

func (c *Cloud) aksServer() *aksfake.ServerFactory {
	f := new(aksfake.ServerFactory)
	f.ManagedClustersServer.NewListPager = func(*armcontainerservice.ManagedClustersClientListOptions) azfake.PagerResponder[armcontainerservice.ManagedClustersClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.Clusters, every), func(p []*armcontainerservice.ManagedCluster) (r armcontainerservice.ManagedClustersClientListResponse) {
			r.Value = p
			return r
		})
	}
	f.ManagedClustersServer.NewListByResourceGroupPager = func(group string, _ *armcontainerservice.ManagedClustersClientListByResourceGroupOptions) azfake.PagerResponder[armcontainerservice.ManagedClustersClientListByResourceGroupResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.Clusters, below(group)), func(p []*armcontainerservice.ManagedCluster) (r armcontainerservice.ManagedClustersClientListByResourceGroupResponse) {
			r.Value = p
			return r
		})
	}
	f.ManagedClustersServer.Get = func(_ context.Context, group, name string, _ *armcontainerservice.ManagedClustersClientGetOptions) (resp azfake.Responder[armcontainerservice.ManagedClustersClientGetResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if m := c.Clusters[key(group, name)]; m != nil {
			resp.SetResponse(http.StatusOK, armcontainerservice.ManagedClustersClientGetResponse{ManagedCluster: copied(m)}, nil)
		} else {
			notFound(&e)
		}
		return resp, e
	}
	f.MachinesServer.NewListPager = func(group, cluster, pool string, _ *armcontainerservice.MachinesClientListOptions) azfake.PagerResponder[armcontainerservice.MachinesClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, c.Machines[key(group, cluster, pool)], func(p []*armcontainerservice.Machine) (r armcontainerservice.MachinesClientListResponse) {
			r.Value = p
			return r
		})
	}
	c.poolServer(&f.AgentPoolsServer)
	return f
}

func (c *Cloud) poolServer(s *aksfake.AgentPoolsServer) {
	s.NewListPager = func(group, cluster string, _ *armcontainerservice.AgentPoolsClientListOptions) azfake.PagerResponder[armcontainerservice.AgentPoolsClientListResponse] {
		c.Lock()
		defer c.Unlock()
		return pages(c, sorted(c.Pools, below(key(group, cluster))), func(p []*armcontainerservice.AgentPool) (r armcontainerservice.AgentPoolsClientListResponse) {
			r.Value = p
			return r
		})
	}
	s.Get = func(_ context.Context, group, cluster, name string, _ *armcontainerservice.AgentPoolsClientGetOptions) (resp azfake.Responder[armcontainerservice.AgentPoolsClientGetResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if p := c.Pools[key(group, cluster, name)]; p != nil {
			resp.SetResponse(http.StatusOK, armcontainerservice.AgentPoolsClientGetResponse{AgentPool: copied(p)}, nil)
		} else {
			notFound(&e)
		}
		return resp, e
	}
	s.BeginCreateOrUpdate = func(_ context.Context, group, cluster, name string, pool armcontainerservice.AgentPool, o *armcontainerservice.AgentPoolsClientBeginCreateOrUpdateOptions) (resp azfake.PollerResponder[armcontainerservice.AgentPoolsClientCreateOrUpdateResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		now := c.Pools[key(group, cluster, name)]
		if now != nil && o != nil && o.IfNoneMatch != nil {
			e.SetResponseError(http.StatusPreconditionFailed, "PreconditionFailed")
			return resp, e
		}
		return ended(armcontainerservice.AgentPoolsClientCreateOrUpdateResponse{AgentPool: pool}, func() {
			pool.ID, pool.Name = to.Ptr(ID(group, TypeCluster, cluster)+"/agentPools/"+name), &name
			pool.Properties.ProvisioningState = to.Ptr("Succeeded")
			c.Pools[key(group, cluster, name)] = &pool
			if now != nil {
				return
			}
			c.addPoolSet(name, &pool)
			if c.OnPool != nil {
				c.OnPool(name, &pool)
			}
		}), e
	}
	s.BeginDelete = func(_ context.Context, group, cluster, name string, _ *armcontainerservice.AgentPoolsClientBeginDeleteOptions) (resp azfake.PollerResponder[armcontainerservice.AgentPoolsClientDeleteResponse], e azfake.ErrorResponder) {
		c.Lock()
		defer c.Unlock()
		if c.Pools[key(group, cluster, name)] == nil {
			notFound(&e)
			return resp, e
		}
		delete(c.Pools, key(group, cluster, name))
		c.removePoolSet(name)
		if c.OnPool != nil {
			c.OnPool(name, nil)
		}
		resp.SetTerminalResponse(http.StatusNoContent, armcontainerservice.AgentPoolsClientDeleteResponse{}, nil)
		return resp, e
	}
}
