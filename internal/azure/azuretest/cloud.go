// Package azuretest provides a subscription in memory, behind the fake servers of Azure's SDK. It answers the requests of
// internal/azure as the service's documentation says, and applies its changes. It has never been compared with a real
// subscription.
package azuretest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/arm"
	azfake "github.com/Azure/azure-sdk-for-go/sdk/azcore/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	computefake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	aksfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8"
	networkfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8/fake"

	"slipstream.dev/internal/azure"
)

// Subscription is the ID of the subscription.
const Subscription = "00000000-0000-4000-8000-000000000000"

// Location is the location of every resource.
const Location = "westeurope"

// secrets are planted where the real service has secrets.
var secrets = []string{"planted-token", "planted-custom-data", "planted-user-data", "planted-tag", "planted-signature", "planted-body"}

// CheckSecrets fails a test if a log, record or plan contains a planted secret. The error names the text by what.
func CheckSecrets(t testing.TB, what, text string) {
	t.Helper()
	for _, secret := range secrets {
		if strings.Contains(text, secret) {
			t.Errorf("%s contains %s", what, secret)
		}
	}
}

// Cloud is the fake subscription. Set its fields before the first request; after that, hold the lock.
type Cloud struct {
	sync.Mutex
	PageSize int // default 50

	VMs      map[string]*armcompute.VirtualMachine // by lower-case "group/name", as in the maps below
	Power    map[string]string                     // "running" or "deallocated", by machine ID
	NICs     map[string]*armnetwork.Interface
	Sets     map[string]*armcompute.VirtualMachineScaleSet
	Members  map[string][]*armcompute.VirtualMachineScaleSetVM
	Clusters map[string]*armcontainerservice.ManagedCluster
	Pools    map[string]*armcontainerservice.AgentPool // "group/cluster/pool"
	Machines map[string][]*armcontainerservice.Machine
	Sizes    map[string]bool   // whether a size has Accelerated Networking
	Families map[string]string // of a size; default testFamily
	Refused  map[string]bool   // the sizes that this subscription may not use
	VCPUs    map[string]int    // of a size; default 4
	Limit    int64             // quota of vCPUs; default 1000
	InUse    int32

	// OnPool is called, with the lock held, for each pool that is created. For a deleted pool it gets nil.
	OnPool func(name string, pool *armcontainerservice.AgentPool)
	// Strict refuses to change a NIC while its machine is not deallocated, as Azure's documentation demands.
	Strict bool
	// Fault chooses the fault of each request, whose number counts from 1. It may be nil.
	Fault func(n int, r *http.Request) Fault

	requests  int
	compute   policy.Transporter
	network   policy.Transporter
	container policy.Transporter
}

// Fault is what goes wrong with a request.
type Fault int

// Faults.
const (
	None Fault = iota
	// Throttled asks for another attempt after a millisecond, ThrottledSecond after a second.
	Throttled
	ThrottledSecond
	Forbidden
	Conflict
	// Failing accepts the operation, which then fails.
	Failing
	// Lost closes the connection before the request is served.
	Lost
	// LostAfter closes the connection after the request is served.
	LostAfter
)

// Interruptions are the faults that stop a command, by name.
var Interruptions = map[string]Fault{"403": Forbidden, "409": Conflict, "429": Throttled, "failed operation": Failing, "lost": Lost, "lost after": LostAfter}

// Stride returns the distance between the requests at which a test interrupts a command: 1 interrupts it at each request. It is larger
// with -short.
func Stride() int {
	if testing.Short() {
		return 9
	}
	return 1
}

// Interrupt applies the fault to each request for which hits returns true. Once a connection is lost, all later requests
// are lost too. Calls of hits never overlap. happened reports whether the fault was applied to any request.
func (c *Cloud) Interrupt(fault Fault, hits func(*http.Request) bool) (happened func() bool) {
	var mu sync.Mutex
	met := false
	c.Fault = func(_ int, r *http.Request) Fault {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case met && (fault == Lost || fault == LostAfter):
			return Lost
		case hits(r):
			met = true
			return fault
		}
		return None
	}
	return func() bool {
		mu.Lock()
		defer mu.Unlock()
		return met
	}
}

// InterruptAt applies the fault to the at-th request from now on, as Interrupt does.
func (c *Cloud) InterruptAt(at int, fault Fault) (happened func() bool) {
	n := 0
	return c.Interrupt(fault, func(*http.Request) bool { n++; return n == at })
}

// New returns an empty subscription.
func New() *Cloud {
	c := &Cloud{
		VMs: make(map[string]*armcompute.VirtualMachine), Power: make(map[string]string), NICs: make(map[string]*armnetwork.Interface),
		Sets: make(map[string]*armcompute.VirtualMachineScaleSet), Members: make(map[string][]*armcompute.VirtualMachineScaleSetVM),
		Clusters: make(map[string]*armcontainerservice.ManagedCluster), Pools: make(map[string]*armcontainerservice.AgentPool),
		Machines: make(map[string][]*armcontainerservice.Machine), Sizes: map[string]bool{"Standard_D4s_v5": true, "Standard_B2s": false},
	}
	c.compute = computefake.NewServerFactoryTransport(c.computeServer())
	c.network = networkfake.NewServerFactoryTransport(c.networkServer())
	c.container = aksfake.NewServerFactoryTransport(c.aksServer())
	return c
}

// Options returns options that connect to the fake subscription.
func (c *Cloud) Options() azure.Options {
	return azure.Options{
		Subscriptions: []string{Subscription}, Credential: credential{}, Poll: time.Millisecond,
		Client: &arm.ClientOptions{ClientOptions: policy.ClientOptions{Transport: c,
			Retry: policy.RetryOptions{MaxRetries: 3, RetryDelay: time.Millisecond, MaxRetryDelay: 2 * time.Second}}},
	}
}

type credential struct{}

func (credential) GetToken(context.Context, policy.TokenRequestOptions) (t azcore.AccessToken, err error) {
	return azcore.AccessToken{Token: "planted-token", ExpiresOn: time.Now().Add(time.Hour)}, nil
}

// Requests returns the number of requests so far.
func (c *Cloud) Requests() int {
	c.Lock()
	defer c.Unlock()
	return c.requests
}

// Do serves a request.
func (c *Cloud) Do(r *http.Request) (*http.Response, error) {
	c.Lock()
	c.requests++
	n, ask := c.requests, c.Fault
	c.Unlock()
	fault := None
	if ask != nil {
		fault = ask(n, r)
	}
	switch fault {
	case Throttled:
		return answer(r, http.StatusTooManyRequests, "TooManyRequests"), nil
	case ThrottledSecond:
		a := answer(r, http.StatusTooManyRequests, "TooManyRequests")
		a.Header.Del("Retry-After-Ms")
		a.Header.Set("Retry-After", "1")
		return a, nil
	case Forbidden:
		return answer(r, http.StatusForbidden, "AuthorizationFailed"), nil
	case Conflict:
		return answer(r, http.StatusConflict, "AnotherOperationInProgress"), nil
	case Lost:
		return nil, errLost
	}
	to := c.compute
	name, _ := r.Context().Value(runtime.CtxAPINameKey{}).(string)
	switch client, _, _ := strings.Cut(name, "."); client {
	case "InterfacesClient":
		to = c.network
	case "ManagedClustersClient", "AgentPoolsClient", "MachinesClient":
		to = c.container
	}
	if strings.HasSuffix(r.URL.Path, failedOperation) {
		return operation(r, http.StatusOK, `{"status": "Failed", "error": {"code": "OperationFailed", "message": "planted-body"}}`), nil
	}
	if fault == Failing && r.Method != http.MethodGet {
		return operation(r, http.StatusAccepted, ""), nil
	}
	response, err := to.Do(r)
	if err == nil && fault == LostAfter {
		return nil, errLost
	}
	return response, err
}

var errLost = errors.New("connection reset by peer")

func answer(r *http.Request, status int, code string) *http.Response {
	body := fmt.Sprintf(`{"error": {"code": %q, "message": "The client does not have authorization to perform action 'Microsoft.Test/things/%s' planted-body"}}`, code, strings.ToLower(r.Method))
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Request: r, Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{"X-Ms-Error-Code": {code}, "Retry-After-Ms": {"1"}, "Content-Type": {"application/json"}}}
}

const failedOperation = "/operations/failed"

// operation answers with the address of a long-running operation, which contains a signature.
func operation(r *http.Request, status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Request: r, Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{"Azure-Asyncoperation": {"https://" + r.URL.Host + "/subscriptions/" + Subscription + failedOperation + "?s=planted-signature"}}}
}

// ID returns a resource ID.
func ID(group, kind, name string) string {
	return "/subscriptions/" + Subscription + "/resourceGroups/" + group + "/providers/" + kind + "/" + name
}

// Resource types.
const (
	TypeVM      = "Microsoft.Compute/virtualMachines"
	TypeSet     = "Microsoft.Compute/virtualMachineScaleSets"
	TypeNIC     = "Microsoft.Network/networkInterfaces"
	TypeCluster = "Microsoft.ContainerService/managedClusters"
)

func key(parts ...string) string { return strings.ToLower(strings.Join(parts, "/")) }

// AddVM adds a running machine with a NIC for each value of wanted.
func (c *Cloud) AddVM(group, name, size string, wanted ...bool) *armcompute.VirtualMachine {
	id := ID(group, TypeVM, name)
	vm := &armcompute.VirtualMachine{
		ID: &id, Name: &name, Location: to.Ptr(Location), Tags: map[string]*string{"note": to.Ptr("planted-tag")},
		Properties: &armcompute.VirtualMachineProperties{
			HardwareProfile: &armcompute.HardwareProfile{VMSize: to.Ptr(armcompute.VirtualMachineSizeTypes(size))},
			OSProfile:       &armcompute.OSProfile{CustomData: to.Ptr("planted-custom-data")}, UserData: to.Ptr("planted-user-data"),
			NetworkProfile: &armcompute.NetworkProfile{}, ProvisioningState: to.Ptr("Succeeded"),
		},
	}
	for i, w := range wanted {
		nic := fmt.Sprintf("%s-nic%d", name, i)
		nicID := ID(group, TypeNIC, nic)
		c.NICs[key(group, nic)] = &armnetwork.Interface{ID: &nicID, Name: &nic, Location: to.Ptr(Location), Etag: to.Ptr("1"),
			Properties: &armnetwork.InterfacePropertiesFormat{EnableAcceleratedNetworking: to.Ptr(w), EnableIPForwarding: to.Ptr(true),
				VirtualMachine: &armnetwork.SubResource{ID: &id}, ProvisioningState: to.Ptr(armnetwork.ProvisioningStateSucceeded)}}
		vm.Properties.NetworkProfile.NetworkInterfaces = append(vm.Properties.NetworkProfile.NetworkInterfaces, &armcompute.NetworkInterfaceReference{ID: &nicID})
	}
	c.VMs[key(group, name)] = vm
	c.Power[strings.ToLower(id)] = "running"
	return vm
}

// AddSet adds a uniform scale set whose instances match its model.
func (c *Cloud) AddSet(group, name, size string, wanted bool, mode armcompute.UpgradeMode, instances int) *armcompute.VirtualMachineScaleSet {
	id := ID(group, TypeSet, name)
	set := &armcompute.VirtualMachineScaleSet{
		ID: &id, Name: &name, Location: to.Ptr(Location), SKU: &armcompute.SKU{Name: &size, Capacity: to.Ptr(int64(instances))}, Etag: to.Ptr("1"),
		Tags: map[string]*string{"note": to.Ptr("planted-tag")},
		Properties: &armcompute.VirtualMachineScaleSetProperties{
			UpgradePolicy: &armcompute.UpgradePolicy{Mode: &mode}, OrchestrationMode: to.Ptr(armcompute.OrchestrationModeUniform), ProvisioningState: to.Ptr("Succeeded"),
			VirtualMachineProfile: &armcompute.VirtualMachineScaleSetVMProfile{
				UserData: to.Ptr("planted-user-data"),
				NetworkProfile: &armcompute.VirtualMachineScaleSetNetworkProfile{NetworkInterfaceConfigurations: []*armcompute.VirtualMachineScaleSetNetworkConfiguration{
					{Name: to.Ptr("nic0"), Properties: &armcompute.VirtualMachineScaleSetNetworkConfigurationProperties{EnableAcceleratedNetworking: &wanted}}}},
			},
		},
	}
	c.Sets[key(group, name)] = set
	for i := range instances {
		n := fmt.Sprint(i)
		member := id + "/virtualMachines/" + n
		c.Members[key(group, name)] = append(c.Members[key(group, name)], &armcompute.VirtualMachineScaleSetVM{
			ID: &member, InstanceID: &n, Name: to.Ptr(name + "_" + n), SKU: &armcompute.SKU{Name: &size},
			Properties: &armcompute.VirtualMachineScaleSetVMProperties{LatestModelApplied: to.Ptr(true)}})
		nic := member + "/networkInterfaces/nic0"
		c.NICs[strings.ToLower(nic)] = &armnetwork.Interface{ID: &nic, Name: to.Ptr("nic0"),
			Properties: &armnetwork.InterfacePropertiesFormat{EnableAcceleratedNetworking: to.Ptr(wanted), VirtualMachine: &armnetwork.SubResource{ID: &member}}}
		c.Power[strings.ToLower(member)] = "running"
	}
	return set
}

// machineGroup is the resource group that holds the machines of every cluster.
const machineGroup = "MC"

// AddCluster adds a cluster without node pools.
func (c *Cloud) AddCluster(group, name string) {
	id := ID(group, TypeCluster, name)
	c.Clusters[key(group, name)] = &armcontainerservice.ManagedCluster{ID: &id, Name: &name, Location: to.Ptr(Location), Tags: map[string]*string{"by": to.Ptr("terraform planted-tag")},
		Properties: &armcontainerservice.ManagedClusterProperties{NodeResourceGroup: to.Ptr(machineGroup)}}
}

// AddPool adds a node pool with its scale set, and with the autoscaler off. It does not call OnPool.
func (c *Cloud) AddPool(group, cluster, name, size string, mode armcontainerservice.AgentPoolMode, count int) *armcontainerservice.AgentPool {
	p := &armcontainerservice.AgentPool{Name: &name, Properties: &armcontainerservice.ManagedClusterAgentPoolProfileProperties{
		Mode: &mode, VMSize: &size, Count: to.Ptr(int32(count)), Type: to.Ptr(armcontainerservice.AgentPoolTypeVirtualMachineScaleSets), EnableAutoScaling: to.Ptr(false), MaxPods: to.Ptr(int32(60)),
		AvailabilityZones: []*string{to.Ptr("1")}, NodeTaints: []*string{to.Ptr("net=yes:PreferNoSchedule")}, NodeLabels: map[string]*string{"team": to.Ptr("net"), "kubernetes.azure.com/mode": to.Ptr("user")},
		OrchestratorVersion: to.Ptr("1.33"), CurrentOrchestratorVersion: to.Ptr("1.33.2"), ProvisioningState: to.Ptr("Succeeded"), Tags: map[string]*string{"note": to.Ptr("planted-tag")}}}
	c.Pools[key(group, cluster, name)] = p
	c.addPoolSet(name, p)
	return p
}

// addPoolSet adds the scale set of a pool.
func (c *Cloud) addPoolSet(name string, p *armcontainerservice.AgentPool) {
	set := c.AddSet(machineGroup, "aks-"+name, *p.Properties.VMSize, c.Sizes[*p.Properties.VMSize], armcompute.UpgradeModeManual, int(*p.Properties.Count))
	set.Tags["aks-managed-poolName"] = &name
}

// removePoolSet removes the scale set of a pool, with its instances.
func (c *Cloud) removePoolSet(name string) {
	delete(c.Sets, key(machineGroup, "aks-"+name))
	delete(c.Members, key(machineGroup, "aks-"+name))
}

// ProviderID returns the provider ID of node i of a pool, counted from 0.
func ProviderID(pool string, i int) string {
	return "azure://" + ID(strings.ToLower(machineGroup), TypeSet, "aks-"+pool) + "/virtualMachines/" + fmt.Sprint(i)
}

func sorted[T any](m map[string]T, in func(string) bool) (all []T) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if in(k) {
			all = append(all, m[k])
		}
	}
	return all
}

func every(string) bool { return true }

// below returns a filter for the keys of one resource group. The NICs of scale sets have no such key.
func below(group string) func(string) bool {
	return func(k string) bool { return strings.HasPrefix(k, strings.ToLower(group)+"/") }
}

func named(k string) bool { return !strings.HasPrefix(k, "/") }

// pages answers a list request, page by page.
func pages[R, T any](c *Cloud, items []T, page func([]T) R) (resp azfake.PagerResponder[R]) {
	size := c.PageSize
	if size == 0 {
		size = 50
	}
	for len(items) > size {
		resp.AddPage(http.StatusOK, page(items[:size:size]), nil)
		items = items[size:]
	}
	resp.AddPage(http.StatusOK, page(items), nil)
	return resp
}

func notFound(e *azfake.ErrorResponder) { e.SetResponseError(http.StatusNotFound, "ResourceNotFound") }

// ended applies an operation at once, and answers that it has ended.
func ended[R any](answer R, apply func()) (resp azfake.PollerResponder[R]) {
	apply()
	resp.SetTerminalResponse(http.StatusOK, answer, nil)
	return resp
}

// copied returns a copy, so that a client cannot change the original.
func copied[T any](v *T) T { return *v }
