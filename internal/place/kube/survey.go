package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Survey describes what a run would find in a cluster.
type Survey struct {
	// User is the authenticated user, if the API server tells.
	User string `json:"user,omitempty"`
	// Nodes that the run would use, one for clients and one for servers in turn; none if there are too few.
	Nodes []string `json:"nodes,omitempty"`
	Image string   `json:"image"`
	// Images says for each node whether the image is present.
	Images []NodeImage `json:"images,omitempty"`
	// Permissions that the run needs, in order.
	Permissions []Permission `json:"permissions,omitempty"`
	// Denied are the permissions that are not given, with the namespace.
	Denied []string `json:"-"`
	// Missing says what else is known to make the run fail, and what to do about it.
	Missing []string `json:"-"`
	// Busy names another run that is in progress on the nodes, for which this one would have to wait. It is no fault of the
	// cluster.
	Busy string `json:"-"`
	// Notes say what does not make the run fail, but bears on what it measures.
	Notes []string `json:"notes,omitempty"`
	// AnswerSeconds is how long the API server took to answer one request.
	AnswerSeconds float64 `json:"answer_seconds"`
}

// NodeImage says whether a node has the image.
type NodeImage struct {
	Node  string `json:"node"`
	State string `json:"state"`
}

// Permission is a verb for one resource, such as "create" for "pods/exec", in a namespace. Without a namespace it is for all of
// them, or for what no namespace has.
type Permission struct {
	Verb      string `json:"verb"`
	Resource  string `json:"resource"`
	Namespace string `json:"namespace,omitempty"`
	Allowed   bool   `json:"allowed"`
}

// Survey checks what a run needs. It reads and changes nothing. What is missing is in the result; an
// error means that the API server gave no answer.
func (c *Cluster) Survey(ctx context.Context, config Config) (*Survey, error) {
	s := &Survey{}
	missing, err := c.missing(ctx, c.permissions(config), func(p permission, allowed bool) {
		s.Permissions = append(s.Permissions, Permission{p.verb, p.object(), p.namespace, allowed})
	})
	if err != nil {
		return nil, err
	}
	s.Denied = missing.Needs
	asked := time.Now()
	if who, err := c.api.Self(ctx); err == nil {
		s.User = who.Status.UserInfo.Username
	}
	took := time.Since(asked)
	s.AnswerSeconds = took.Seconds()
	s.note(slow(took))
	var noNamespace error
	if c.namespace != "" {
		noNamespace = c.checkNamespace(ctx, c.namespace)
		s.lack(noNamespace)
	}
	nodes, err := c.ChooseAll(ctx, config)
	if err != nil {
		if apierrors.IsForbidden(err) { // with the role that grants it
			s.Denied = slices.DeleteFunc(s.Denied, ofNodes)
		}
		s.lack(fmt.Errorf("nodes: %w", err))
		return s, nil
	}
	s.Nodes = nodes
	if config.Spec.BaseImage, err = c.ChooseBase(ctx, config, nodes); err != nil {
		s.lack(err)
		return s, nil
	}
	s.lack(lacksPrograms(config))
	config.Spec.NodeNames, config.Pods = nodes, max(1, config.Pods)
	if err := c.busy(ctx, nil, nodes...); err != nil {
		s.Busy = err.Error()
	}
	pods := newPods(c, config)
	mixed, err := pods.readNodes(ctx, nodes)
	s.lack(err)
	s.note(mixed)
	for _, node := range nodes {
		if why := pods.unfit[node]; err == nil && why != nil {
			s.note(fmt.Sprintf("the mesh goes on without node %s: %v", node, why))
		}
	}
	s.lack(c.canObserve(ctx, config.Spec.Observe, nodes))
	notes, err := c.accelerated(ctx, config, nodes)
	s.lack(err)
	s.note(notes...)
	if noNamespace == nil { // otherwise it would be said again of each pod
		lacks, notes := pods.admits(ctx)
		s.Missing = append(s.Missing, lacks...)
		s.note(notes...)
	}
	image, pull := imageOf(config)
	s.Image = image
	for _, name := range nodes {
		node, err := c.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			s.Images = append(s.Images, NodeImage{name, "unknown: " + explain(err).Error()})
			continue
		}
		state, usable := imageOn(node, image, pull)
		s.Images = append(s.Images, NodeImage{name, state})
		if !usable {
			s.Missing = append(s.Missing, fmt.Sprintf("image %s on node %s, which never pulls the default image: load it there (ctr -n k8s.io images import slipstream-image.tar), or push it to your registry (slipstream image push REGISTRY/NAME) and name it with --image", image, name))
		}
	}
	return s, nil
}

// lack adds an error to what is missing, if there is one.
func (s *Survey) lack(err error) {
	if err != nil {
		s.Missing = append(s.Missing, err.Error())
	}
}

// note adds notes that are not empty.
func (s *Survey) note(notes ...string) {
	s.Notes = append(s.Notes, slices.DeleteFunc(notes, func(note string) bool { return note == "" })...)
}

// slowAnswer is a time in which an API server of any size answers a request that it serves from memory.
const slowAnswer = time.Second

// slow says that an API server took long for an answer; "" if it did not.
func slow(took time.Duration) string {
	if took < slowAnswer {
		return ""
	}
	return fmt.Sprintf("the API server took %s to answer one request, and the connections to all workers pass through it", took.Round(100*time.Millisecond))
}

// imagesListed is how many images a kubelet reports by default (nodeStatusMaxImages). If it reports
// that many, the node may have others.
const imagesListed = 50

// imageOn says whether a node has an image. It counts as usable if it can be pulled, or if the node
// does not say.
func imageOn(n *corev1.Node, image string, pull corev1.PullPolicy) (state string, usable bool) {
	switch {
	case hasImage(n, image):
		return "present", true
	case pull != corev1.PullNever:
		return "absent, would be pulled", true
	case len(n.Status.Images) >= imagesListed:
		return fmt.Sprintf("not among the %d images that the node reports, may be present", len(n.Status.Images)), true
	}
	return "absent", false
}

// hasImage reports whether a node says that it has an image.
func hasImage(n *corev1.Node, image string) bool {
	full := fullName(image)
	return slices.ContainsFunc(n.Status.Images, func(i corev1.ContainerImage) bool {
		return slices.Contains(i.Names, full) || slices.Contains(i.Names, image)
	})
}

// fullName expands a short image name as container runtimes do.
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

// checkNamespace returns an error if a namespace that the user named does not exist, or is being deleted.
func (c *Cluster) checkNamespace(ctx context.Context, name string) error {
	n, err := c.api.Namespaces().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("namespace %s does not exist: create it, or leave out -n and the run creates and removes its own", name)
	case apierrors.IsForbidden(err): // a user of a namespace may lack the permission to get it
		return nil
	case err != nil:
		return fmt.Errorf("get namespace %s: %w", name, explain(err))
	case n.DeletionTimestamp != nil:
		return fmt.Errorf("namespace %s is being deleted (kubectl describe namespace %[1]s says what it waits for): name another one, or leave out -n and the run creates and removes its own", name)
	}
	return nil
}
