package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/cluster"
)

const agents = `{"items": [
	{"metadata": {"name": "used"}, "status": {"conditions": [{"type": "VF", "status": "True", "reason": "VFUsed"}]}},
	{"metadata": {"name": "idle"}, "status": {"conditions": [{"type": "VF", "status": "False", "reason": "VFIdle"}]}},
	{"metadata": {"name": "early"}, "status": {"conditions": [{"type": "VF", "status": "Unknown", "reason": "VFPresent"}]}},
	{"metadata": {"name": "unasked"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}]}`

// A node's provider ID joins the report of its agent to its machine. Azure does not preserve the case of IDs.
func TestUsesJoinsAgentsToMachines(t *testing.T) {
	client := fake.NewClientset()
	for _, name := range []string{"used", "idle", "early", "unasked", "agentless"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{ProviderID: "azure:///subscriptions/S/RG/" + name}}
		if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	c := cluster.New(client, func(context.Context) ([]byte, error) { return []byte(agents), nil }, time.Millisecond)
	got, err := c.Uses(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]azure.Use{"/subscriptions/s/rg/used": {Used: azure.Yes, Reason: "VFUsed"}, "/subscriptions/s/rg/idle": {Used: azure.No, Reason: "VFIdle"},
		"/subscriptions/s/rg/early": {Used: azure.Unknown, Reason: "VFPresent"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	// If the cluster lacks the agent's kinds, no agent has reported, and that is no error.
	c = cluster.New(client, func(context.Context) ([]byte, error) {
		return nil, apierrors.NewNotFound(schema.GroupResource{}, "nodeaccelerations")
	}, time.Millisecond)
	if got, err := c.Uses(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}
