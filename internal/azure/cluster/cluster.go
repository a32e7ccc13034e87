// Package cluster gives migrations and audits access to a Kubernetes cluster: its nodes, their pods, the budgets and
// volumes that keep pods in place, and the reports of the agents. It drains nodes with kubectl's own package, which
// needs client-go's clientset. No other package may import that: only slipstream-azure links it.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/azure"
)

// providerScheme precedes the machine's resource ID in the provider ID of a node.
const providerScheme = "azure://"

// requestTimeout bounds how long the API server may take to answer.
const requestTimeout = 30 * time.Second

// Cluster is a connection to a cluster.
type Cluster struct {
	client kubernetes.Interface
	// agents reads the reports of the agents, whose kind the clientset does not know.
	agents func(context.Context) ([]byte, error)
	poll   time.Duration
}

// Open reads a kubeconfig, which it finds as kubectl does if path is empty. It does not connect yet.
func Open(path, name string) (*Cluster, error) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // errors say what a user needs to know
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = path
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: name}).ClientConfig()
	if err != nil {
		if clientcmd.IsEmptyConfig(err) {
			return nil, errors.New("no kubeconfig found: name one with --kubeconfig, or set KUBECONFIG (az aks get-credentials writes one)")
		}
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	config.UserAgent, config.Timeout = "slipstream-azure", requestTimeout
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return completeEvictions{next} })
	config.QPS, config.Burst = 50, 100
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	return &Cluster{client: client, poll: 2 * time.Second, agents: func(ctx context.Context) ([]byte, error) {
		return client.RESTClient().Get().AbsPath("/apis/slipstream.dev/v1alpha1/nodeaccelerations").Do(ctx).Raw()
	}}, nil
}

// completeEvictions lets an eviction complete even if its caller is interrupted. The API server first counts the pod as
// gone in its PodDisruptionBudget, and then deletes it. If the client disconnects between the two, the pod stays, and
// the budget allows no eviction for two minutes (DeletionTimeout of the disruption controller).
type completeEvictions struct{ next http.RoundTripper }

func (e completeEvictions) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/eviction") {
		ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
		time.AfterFunc(requestTimeout, cancel) // the body is still to be read when this returns
		r = r.WithContext(ctx)
	}
	return e.next.RoundTrip(r)
}

// Uses returns how the agents report the virtual functions of their nodes, by the lower-case ID of the Azure machine. It
// leaves out a node without an agent, and a node whose policies do not verify its virtual functions.
func (c *Cluster) Uses(ctx context.Context) (map[string]azure.Use, error) {
	nodes, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	uses := make(map[string]azure.Use)
	data, err := c.agents(ctx)
	if apierrors.IsNotFound(err) {
		return uses, nil // slipstream's agent is not installed
	}
	if err != nil {
		return nil, fmt.Errorf("list nodeaccelerations: %w", err)
	}
	var list v1alpha1.NodeAccelerationList
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("list nodeaccelerations: %w", err)
	}
	conditions := make(map[string]*metav1.Condition)
	for _, n := range list.Items {
		conditions[n.Name] = meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionVF)
	}
	for _, n := range nodes.Items {
		id, azureNode := strings.CutPrefix(n.Spec.ProviderID, providerScheme)
		if condition := conditions[n.Name]; azureNode && condition != nil {
			use := azure.Use{Used: azure.Unknown, Reason: condition.Reason}
			switch condition.Status {
			case metav1.ConditionTrue:
				use.Used = azure.Yes
			case metav1.ConditionFalse:
				use.Used = azure.No
			}
			uses[strings.ToLower(id)] = use
		}
	}
	return uses, nil
}
