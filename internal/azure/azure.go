// Package azure asks Azure's control plane about Accelerated Networking, and changes it: Inventory reads
// where it is possible and wanted, Switch turns it on and off, and Migrate moves an AKS node pool that
// cannot be switched. Only the guest knows whether packets take the virtual function (internal/agent);
// the control plane does not.
//
// Only cmd/slipstream-azure links this package, so that agents and workers do not contain the SDK.
package azure

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/arm"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/containerservice/armcontainerservice/v6"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v8"
)

// Options configure the connection to Azure.
type Options struct {
	// Subscriptions are the IDs of the subscriptions to ask, at least one.
	Subscriptions []string
	// Credential authenticates the requests. If it is nil, the SDK's default chain applies: the
	// environment, a workload identity, a managed identity, the Azure CLI.
	Credential azcore.TokenCredential
	// Client replaces the SDK's transport, endpoint or retries. Tests set it.
	Client *arm.ClientOptions
	// Poll is the pause before an operation is polled again; 0 means 10 s. The service's Retry-After
	// overrides it.
	Poll time.Duration
}

// Cloud is a connection to Azure. It is safe for concurrent use.
type Cloud struct {
	order []string // the subscriptions
	of    map[string]*clients
	poll  time.Duration
}

// clients are the SDK's clients for one subscription.
type clients struct {
	vms      *armcompute.VirtualMachinesClient
	sets     *armcompute.VirtualMachineScaleSetsClient
	members  *armcompute.VirtualMachineScaleSetVMsClient
	skus     *armcompute.ResourceSKUsClient
	usage    *armcompute.UsageClient
	nics     *armnetwork.InterfacesClient
	clusters *armcontainerservice.ManagedClustersClient
	pools    *armcontainerservice.AgentPoolsClient
	machines *armcontainerservice.MachinesClient
}

// Open makes the clients. It does not connect yet.
func Open(o Options) (*Cloud, error) {
	if len(o.Subscriptions) == 0 {
		return nil, errors.New("name a subscription: --subscription ID, or AZURE_SUBSCRIPTION_ID (az account show --query id shows it)")
	}
	client := arm.ClientOptions{}
	if o.Client != nil {
		client = *o.Client
	}
	if client.Retry.MaxRetries == 0 {
		// A throttled subscription answers with Retry-After, and the SDK waits that long. The SDK's three
		// attempts are too few while other programs use up the quota too.
		client.Retry = policy.RetryOptions{MaxRetries: 8, MaxRetryDelay: 2 * time.Minute}
	}
	client.Telemetry.ApplicationID = "slipstream"
	if o.Credential == nil {
		var err error
		if o.Credential, err = azidentity.NewDefaultAzureCredential(&azidentity.DefaultAzureCredentialOptions{ClientOptions: client.ClientOptions}); err != nil {
			return nil, fmt.Errorf("find credentials of Azure: %s", reason(err))
		}
	}
	c := &Cloud{of: make(map[string]*clients), poll: o.Poll}
	if c.poll == 0 {
		c.poll = 10 * time.Second
	}
	for _, id := range o.Subscriptions {
		key := strings.ToLower(id)
		if c.of[key] != nil {
			continue
		}
		of, err := newClients(id, o.Credential, &client)
		if err != nil {
			return nil, fmt.Errorf("subscription %s: %s", id, reason(err))
		}
		c.order, c.of[key] = append(c.order, id), of
	}
	return c, nil
}

func newClients(subscription string, credential azcore.TokenCredential, o *arm.ClientOptions) (*clients, error) {
	compute, err := armcompute.NewClientFactory(subscription, credential, o)
	if err != nil {
		return nil, err
	}
	network, err := armnetwork.NewClientFactory(subscription, credential, o)
	if err != nil {
		return nil, err
	}
	aks, err := armcontainerservice.NewClientFactory(subscription, credential, o)
	if err != nil {
		return nil, err
	}
	return &clients{
		vms: compute.NewVirtualMachinesClient(), sets: compute.NewVirtualMachineScaleSetsClient(),
		members: compute.NewVirtualMachineScaleSetVMsClient(), skus: compute.NewResourceSKUsClient(), usage: compute.NewUsageClient(),
		nics:     network.NewInterfacesClient(),
		clusters: aks.NewManagedClustersClient(), pools: aks.NewAgentPoolsClient(), machines: aks.NewMachinesClient(),
	}, nil
}

// in returns the clients of the subscription that an ID names.
func (c *Cloud) in(id *arm.ResourceID) (*clients, error) {
	of := c.of[strings.ToLower(id.SubscriptionID)]
	if of == nil {
		return nil, fmt.Errorf("%s is in subscription %s: name that with --subscription", id.Name, id.SubscriptionID)
	}
	return of, nil
}

// wait waits until a long-running operation ends.
func wait[T any](ctx context.Context, c *Cloud, p *runtime.Poller[T], err error) error {
	if err == nil {
		_, err = p.PollUntilDone(ctx, &runtime.PollUntilDoneOptions{Frequency: c.poll})
	}
	return err
}

// all reads every page of a list.
func all[R, T any](ctx context.Context, p *runtime.Pager[R], of func(R) []*T) (items []*T, err error) {
	for p.More() {
		page, err := p.NextPage(ctx)
		if err != nil {
			return items, err
		}
		for _, item := range of(page) {
			if item != nil {
				items = append(items, item)
			}
		}
	}
	return items, nil
}

// action matches the operation that the service did not allow, such as
// "Microsoft.Compute/virtualMachines/read".
var action = regexp.MustCompile(`perform action '([A-Za-z./*]+)'`)

// reason explains in one line why a request failed. It leaves out bodies, headers and queries, which the
// SDK's errors print: a body repeats what was sent, and a query can contain a signature.
func reason(err error) string {
	var answer *azcore.ResponseError
	var credential *azidentity.AuthenticationFailedError
	var address *url.Error
	switch {
	case errors.As(err, &answer):
		text := fmt.Sprintf("%d %s", answer.StatusCode, http.StatusText(answer.StatusCode))
		if answer.ErrorCode != "" {
			text = fmt.Sprintf("%d %s", answer.StatusCode, answer.ErrorCode)
		}
		if m := action.FindStringSubmatch(err.Error()); m != nil && answer.StatusCode == http.StatusForbidden {
			text += ": you lack the permission for " + m[1]
		}
		return text
	case errors.As(err, &credential):
		return "Azure refused the credentials (try az login)"
	case errors.As(err, &address):
		host := address.URL
		if u, err := url.Parse(address.URL); err == nil {
			host = u.Host
		}
		return fmt.Sprintf("%s %s: %v", strings.ToLower(address.Op), host, address.Err)
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// missing reports whether the service answered that the resource does not exist.
func missing(err error) bool { return status(err) == http.StatusNotFound }

// status returns the HTTP status of the answer, or 0 if there was none.
func status(err error) int {
	var answer *azcore.ResponseError
	if errors.As(err, &answer) {
		return answer.StatusCode
	}
	return 0
}

// failed names the operation of a request that failed. It does not wrap the SDK's error: whoever prints
// that would print what reason leaves out.
func failed(what string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return &requestError{what: what, why: reason(err), status: status(err)}
}

// requestError describes a request that failed. The status is 0 if there was no answer.
type requestError struct {
	what, why string
	status    int
}

func (e *requestError) Error() string { return e.what + ": " + e.why }

// value dereferences a pointer of the SDK. It returns the zero value for nil.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// last returns the last segment of a resource ID.
func last(id string) string { return id[strings.LastIndexByte(id, '/')+1:] }

// groupOf returns the resource group of an ID, or "".
func groupOf(id string) string {
	parts := strings.Split(id, "/")
	for i := range parts {
		if strings.EqualFold(parts[i], "resourceGroups") && i+1 < len(parts) {
			return parts[i+1]
		}
	}
	return ""
}
