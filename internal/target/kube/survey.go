package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Survey is what a run would find in a cluster.
type Survey struct {
	// User is who asks, as far as the API server tells.
	User string
	// Client and Server are the nodes that it would take; empty where there are no two.
	Client, Server string
	Image          string
	// Images says of each node whether the image is there.
	Images []NodeImage
	// Rights that it needs, in order.
	Rights []Right
	// Lacks is what keeps it from running, with what to do about it; empty where nothing
	// is known to.
	Lacks []string
}

// NodeImage is whether a node has the image, in words.
type NodeImage struct{ Node, Has string }

// Right is a verb for one resource, such as "create" for "pods/exec".
type Right struct {
	Verb, Resource string
	Allowed        bool
}

// Survey asks what a run would: it reads, and changes nothing. What is missing is in the
// answer; an error says that the cluster could not be asked.
func (c *Cluster) Survey(ctx context.Context, config Config) (*Survey, error) {
	s := &Survey{}
	missing, err := c.missing(ctx, c.rights(config), func(r right, allowed bool) {
		s.Rights = append(s.Rights, Right{r.verb, r.object(), allowed})
	})
	if err != nil {
		return nil, err
	}
	for _, need := range missing.Needs {
		s.Lacks = append(s.Lacks, "the right to "+need)
	}
	if who, err := c.api.Self(ctx); err == nil {
		s.User = who.Status.UserInfo.Username
	}
	if c.namespace != "" {
		if err := c.namespaceIsThere(ctx, c.namespace); err != nil {
			s.Lacks = append(s.Lacks, err.Error())
		}
	}
	client, server, err := c.Choose(ctx, config.Spec)
	if err != nil {
		s.Lacks = append(s.Lacks, "nodes: "+err.Error())
		return s, nil
	}
	s.Client, s.Server = client, server
	if err := c.busy(ctx, client, server); err != nil {
		s.Lacks = append(s.Lacks, err.Error())
	}
	image, pull := imageOf(config.Spec.Image, config.Version)
	s.Image = image
	for _, name := range []string{client, server} {
		node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			s.Images = append(s.Images, NodeImage{name, "cannot be told: " + explain(err).Error()})
			continue
		}
		has, there := imageOn(node, image, pull)
		s.Images = append(s.Images, NodeImage{name, has})
		if !there {
			s.Lacks = append(s.Lacks, fmt.Sprintf("image %s on node %s, and nothing is pulled that nobody named: load it there (ctr -n k8s.io images import slipstream-image.tar), or name one that can be pulled with --image", image, name))
		}
	}
	return s, nil
}

// imagesListed is how many images a kubelet lists of its node, unless it is told otherwise
// (nodeStatusMaxImages): one that is not among so many may be there.
const imagesListed = 50

// imageOn says whether a node has an image. It is as good as there where it can be pulled,
// or cannot be told.
func imageOn(n *corev1.Node, image string, pull corev1.PullPolicy) (has string, there bool) {
	full := fullName(image)
	for _, i := range n.Status.Images {
		if slices.Contains(i.Names, full) || slices.Contains(i.Names, image) {
			return "is there", true
		}
	}
	switch {
	case pull != corev1.PullNever:
		return "is not there, and would be pulled", true
	case len(n.Status.Images) >= imagesListed:
		return fmt.Sprintf("is not among the %d images that the node lists; it may be there", len(n.Status.Images)), true
	}
	return "is not there", false
}

// fullName is an image's name with what container runtimes add to a short one.
func fullName(image string) string {
	host, rest, found := strings.Cut(image, "/")
	switch {
	case !found:
		image = "docker.io/library/" + image
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		image = "docker.io/" + host + "/" + rest
	}
	if last := image[strings.LastIndex(image, "/"):]; !strings.ContainsAny(last, ":@") {
		image += ":latest"
	}
	return image
}

// namespaceIsThere looks for a namespace of somebody else's.
func (c *Cluster) namespaceIsThere(ctx context.Context, name string) error {
	_, err := c.api.Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("there is no namespace %s: make it, or leave -n out, and the run makes and removes one of its own", name)
	}
	if err != nil && !apierrors.IsForbidden(err) { // who may use a namespace may not always look at it
		return fmt.Errorf("look at namespace %s: %w", name, explain(err))
	}
	return nil
}
