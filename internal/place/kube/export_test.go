package kube

import (
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"slipstream.dev/internal/place"
)

// PodOn returns a run with a pod for control of a node. A server of a test runs its commands.
func PodOn(node place.Place, server string) *Pods {
	p := newPods(&Cluster{rest: &rest.Config{}}, Config{})
	pod := p.nodePod("node", node.Name)
	p.control[node.Name] = pod
	p.cluster.api = execAPI{fakeAPI{Clientset: fake.NewClientset(pod)}, server}
	return p
}
