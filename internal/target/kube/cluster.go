package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	authzv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Access says how to get to a cluster, as kubectl's flags do.
type Access struct {
	// Kubeconfig is a file; the usual places unless set.
	Kubeconfig string
	// Context of the kubeconfig; its current one unless set.
	Context string
	// Namespace to make pods in, which is there already; namespaces of the run's
	// own unless set.
	Namespace string
}

// requestTime bounds one request to the API server.
const requestTime = 15 * time.Second

// Cluster is a cluster that can be asked.
type Cluster struct {
	api api
	// rest is for streams, which have no time limit.
	rest      *rest.Config
	namespace string
}

// Open reads the kubeconfig; it asks the cluster nothing yet.
func Open(a Access) (*Cluster, error) {
	// The client's own log is for the programmers of controllers; what goes wrong
	// comes back as an error.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.Context}).ClientConfig()
	if err != nil {
		if clientcmd.IsEmptyConfig(err) {
			return nil, errors.New("there is no cluster to run in: name one with --kubeconfig, or set KUBECONFIG")
		}
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	// A run asks in bursts, and rarely; the server has limits of its own.
	config.QPS, config.Burst = 100, 200
	config.UserAgent = "slipstream"
	config.WarningHandler = rest.NoWarnings{} // about what this program writes, to someone who did not
	limited := rest.CopyConfig(config)
	limited.Timeout = requestTime
	asked, err := newAPI(limited)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	return &Cluster{api: asked, rest: config, namespace: a.Namespace}, nil
}

// right is something that a run must be allowed to do: in a namespace, or, where
// that is empty, in all.
type right struct {
	verb, group, resource, subresource, namespace string
}

// object is what a right is about: "pods/exec", "leases.coordination.k8s.io".
func (r right) object() string {
	what := r.resource
	if r.subresource != "" {
		what += "/" + r.subresource
	}
	if r.group != "" {
		what += "." + r.group
	}
	return what
}

func (r right) String() string {
	what := r.object()
	switch {
	case r.resource == "namespaces":
		return r.verb + " " + what
	case r.namespace == "":
		return fmt.Sprintf("%s %s, in every namespace (or in one that is there, which -n names)", r.verb, what)
	}
	return fmt.Sprintf("%s %s in namespace %s", r.verb, what, r.namespace)
}

// MissingError is what a user may not do and a run needs.
type MissingError struct {
	User  string
	Needs []string
}

func (e *MissingError) Error() string {
	user := "you are"
	if e.User != "" {
		user = e.User + " is"
	}
	return fmt.Sprintf("%s not allowed what a run needs:\n  %s\nask for a role with these rights, or use another --kubeconfig or --context",
		user, strings.Join(e.Needs, "\n  "))
}

// check asks for all rights at once, so that the answer names all that are
// missing.
func (c *Cluster) check(ctx context.Context, rights []right) error {
	missing, err := c.missing(ctx, rights, func(right, bool) {})
	if err != nil || len(missing.Needs) == 0 {
		return err
	}
	who, err := c.api.Self(ctx)
	if err == nil {
		missing.User = who.Status.UserInfo.Username
	}
	return missing
}

// missing asks for rights, tells of each, and returns those that the user does not have.
func (c *Cluster) missing(ctx context.Context, rights []right, tell func(r right, allowed bool)) (*MissingError, error) {
	missing := &MissingError{}
	for _, r := range rights {
		review, err := c.api.Allowed(ctx, &authzv1.SelfSubjectAccessReview{
			Spec: authzv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authzv1.ResourceAttributes{
				Verb: r.verb, Group: r.group, Resource: r.resource, Subresource: r.subresource, Namespace: r.namespace,
			}},
		})
		if apierrors.IsForbidden(err) {
			return missing, nil // not even this; the first thing refused will name itself
		}
		if err != nil {
			return nil, fmt.Errorf("ask the API server what is allowed: %w", explain(err))
		}
		if !review.Status.Allowed {
			missing.Needs = append(missing.Needs, r.String())
		}
		tell(r, review.Status.Allowed)
	}
	return missing, nil
}

// explain says what to do about an answer that is no answer.
func explain(err error) error {
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not know you: renew your credentials, or use another --kubeconfig or --context: %w", err)
	case unreachable(err):
		return fmt.Errorf("the API server does not answer: %w", err)
	}
	return err
}

// unreachable tells that no API server has answered, or none that could.
func unreachable(err error) bool {
	if err == nil {
		return false
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true
	}
	return apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsTooManyRequests(err)
}
