// Package cluster is what a migration of a node pool, and an audit, need of a Kubernetes cluster: its nodes, what
// runs on them and what keeps it there, and what the agents say. It drains as kubectl does, with kubectl's package,
// and so has client-go's clientset, which no other package may have: only slipstream-azure links it.
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

// providerScheme is before the resource ID of a node's machine in its provider ID.
const providerScheme = "azure://"

// requestTimeout is how long the API server may take to answer.
const requestTimeout = 30 * time.Second

// Cluster is a connection to a cluster.
type Cluster struct {
	client kubernetes.Interface
	// agents reads what the agents report. It is for kinds that the clientset does not know.
	agents func(context.Context) ([]byte, error)
	poll   time.Duration
}

// Open reads a kubeconfig, as kubectl finds it if path is empty. It does not connect yet.
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

// completeEvictions lets an eviction that is under way complete when its caller is interrupted. The API server first
// counts the pod as gone in its PodDisruptionBudget, and then deletes it. If the client disconnects between the two, the
// pod stays, and the budget allows no eviction for two minutes (DeletionTimeout of the disruption controller).
type completeEvictions struct{ next http.RoundTripper }

func (e completeEvictions) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/eviction") {
		ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
		time.AfterFunc(requestTimeout, cancel) // the body is still to be read when this returns
		r = r.WithContext(ctx)
	}
	return e.next.RoundTrip(r)
}

// New is a cluster behind a client of a test's. The agents' report is a list of NodeAccelerations as JSON.
func New(client kubernetes.Interface, agents func(context.Context) ([]byte, error), poll time.Duration) *Cluster {
	return &Cluster{client: client, agents: agents, poll: poll}
}

// Uses tells what the agents say of the virtual functions of their nodes, by the lower-case ID of the Azure machine. A
// node without an agent, or whose policies do not verify its virtual functions, is not in it.
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
