package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	authzv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/klog/v2"

	"slipstream.dev/internal/serverclock"
	"slipstream.dev/internal/shell"
)

// Access says how to reach a cluster, as kubectl's flags do.
type Access struct {
	// Kubeconfig is a file; empty for kubectl's defaults.
	Kubeconfig string
	// Context of the kubeconfig; empty for its current one.
	Context string
	// Namespace is an existing one to create the pods in; if empty, a run creates its own.
	Namespace string
}

// requestTime bounds one request to the API server.
const requestTime = 15 * time.Second

// Cluster is a connection to a cluster.
type Cluster struct {
	api api
	// rest is for streams, which must not time out.
	rest      *rest.Config
	namespace string
	// flags are those of the command line that reach this cluster, in the form of a shell.
	flags string
	// clock is that of the API server: runs of several machines compare the times of their leases.
	clock serverclock.Clock
}

// Open reads the kubeconfig. It does not connect yet.
func Open(a Access) (*Cluster, error) {
	// What a user must know of client-go's log is also in the errors that it returns.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.Kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.Context})
	config, err := loader.ClientConfig()
	if err != nil {
		if raw, rawErr := loader.RawConfig(); rawErr == nil {
			err = cmp.Or(wrongContext(a.Context, raw), err)
		}
		if clientcmd.IsEmptyConfig(err) {
			if a.Kubeconfig != "" {
				return nil, fmt.Errorf("%s, which --kubeconfig names, has no clusters: name the file with which kubectl reaches the cluster", a.Kubeconfig)
			}
			return nil, noKubeconfig(rules.Precedence)
		}
		if kind := otherKind.FindStringSubmatch(err.Error()); kind != nil {
			return nil, fmt.Errorf("%s is no kubeconfig but a file of the kind %s: name the file with which kubectl reaches the cluster", cmp.Or(a.Kubeconfig, "the file that KUBECONFIG names"), kind[1])
		}
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	// A run sends few requests, in bursts, and those for EndpointSlices a few at a time; the server has its own limits.
	config.QPS, config.Burst = 1000, 2000
	config.UserAgent = "slipstream"
	config.WarningHandler = rest.NoWarnings{} // they are for developers of this program
	c := &Cluster{rest: config, namespace: a.Namespace, flags: a.flags()}
	limited := rest.CopyConfig(config)
	limited.Timeout = requestTime
	limited.Wrap(c.clock.Follow)
	if c.api, err = newAPI(limited); err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	return c, nil
}

// otherKind matches client-go's error about a file of another kind, such as a Pod.
var otherKind = regexp.MustCompile(`no kind "(\w+)" is registered`)

// noKubeconfig says that none of the files that kubectl would read by default has a configuration.
func noKubeconfig(files []string) error {
	why, remedy := "", "name one with --kubeconfig, or set KUBECONFIG"
	absent := slices.DeleteFunc(slices.Clone(files), func(file string) bool {
		_, err := os.Stat(file)
		return !errors.Is(err, os.ErrNotExist)
	})
	switch user := os.Getenv("SUDO_USER"); {
	case os.Getenv(clientcmd.RecommendedConfigPathEnvVar) != "" && len(absent) > 0:
		why = fmt.Sprintf(", as %s names %s, which does not exist", clientcmd.RecommendedConfigPathEnvVar, strings.Join(absent, ", "))
		remedy = "correct it, or name one with --kubeconfig"
	case user != "" && user != "root":
		remedy += "; under sudo, root's kubeconfig is the default, and a run in a cluster needs no root here: leave out sudo"
	}
	return fmt.Errorf("no kubeconfig found%s: %s", why, remedy)
}

// flags returns the flags with which another command reaches the same cluster, each after a space.
func (a Access) flags() (all string) {
	if a.Kubeconfig != "" {
		all += " --kubeconfig " + shell.Quote(a.Kubeconfig)
	}
	if a.Context != "" {
		all += " --context " + shell.Quote(a.Context)
	}
	return all
}

// wrongContext returns an error if a kubeconfig has contexts, and not the one that is wanted; if that is empty, no current one.
func wrongContext(want string, config clientcmdapi.Config) error {
	names := slices.Sorted(maps.Keys(config.Contexts))
	if len(names) == 0 {
		return nil
	}
	has := strings.Join(names, ", ")
	name := cmp.Or(want, config.CurrentContext)
	chosen := config.Contexts[name]
	switch {
	case want == "" && config.CurrentContext == "":
		return fmt.Errorf("it has no current context: name one with --context, or set it with kubectl config use-context; it has %s", has)
	case want != "" && config.Contexts[want] == nil:
		return fmt.Errorf("it has no context %s; it has %s", want, has)
	case chosen != nil && config.Clusters[chosen.Cluster] == nil:
		return fmt.Errorf("its context %s is for the cluster %q, which it does not have: name another context with --context; it has %s", name, chosen.Cluster, has)
	case want == "" && config.Contexts[config.CurrentContext] == nil:
		return fmt.Errorf("its current context %s does not exist: name another with --context, or set one with kubectl config use-context; it has %s", config.CurrentContext, has)
	}
	return nil
}

// permission names something that a run must be allowed to do, in a namespace or, if that is empty, in all.
type permission struct {
	verb, group, resource, subresource, namespace string
}

// object returns what a permission is for: "pods/exec", "leases.coordination.k8s.io".
func (p permission) object() string {
	what := p.resource
	if p.subresource != "" {
		what += "/" + p.subresource
	}
	if p.group != "" {
		what += "." + p.group
	}
	return what
}

// clusterScoped reports whether it is for objects that no namespace has.
func (p permission) clusterScoped() bool { return p.resource == "namespaces" || p.resource == "nodes" }

const everywhere = " in all namespaces"

// OneNamespace says how to run without permissions in all namespaces, if needs has any of these; otherwise it returns "".
func OneNamespace(needs []string) string {
	if !slices.ContainsFunc(needs, func(need string) bool { return strings.HasSuffix(need, everywhere) }) {
		return ""
	}
	return "name an existing namespace with -n: then a run needs those permissions there only, not" + everywhere
}

func (p permission) String() string {
	what := p.object()
	switch {
	case p.clusterScoped():
		return p.verb + " " + what
	case p.namespace == "":
		return p.verb + " " + what + everywhere
	}
	return fmt.Sprintf("%s %s in namespace %s", p.verb, what, p.namespace)
}

// MissingError lists the permissions that a run needs and the user does not have.
type MissingError struct {
	User  string
	Needs []string
	// Remedy is a further line on how to get what no role of a namespace grants.
	Remedy string
}

func (e *MissingError) Error() string {
	user := "you lack"
	if e.User != "" {
		user = e.User + " lacks"
	}
	text := fmt.Sprintf("%s permissions that a run needs:\n  %s\nask for a role that grants them, or use another --kubeconfig or --context",
		user, strings.Join(e.Needs, "\n  "))
	if one := OneNamespace(e.Needs); one != "" {
		text += "; or " + one
	}
	if e.Remedy != "" {
		text += "\n" + e.Remedy
	}
	return text
}

// nodeRole says which role lets the user read nodes. Those that are granted in a namespace, such as edit, do not.
func (c *Cluster) nodeRole(ctx context.Context) string {
	subject := "--user=USER"
	if who, err := c.api.Self(ctx); err == nil && who.Status.UserInfo.Username != "" {
		subject = "--user=" + shell.Quote(who.Status.UserInfo.Username)
		if account, ok := strings.CutPrefix(who.Status.UserInfo.Username, "system:serviceaccount:"); ok {
			subject = "--serviceaccount=" + account
		}
	}
	return "no role in a namespace lets you read nodes; an administrator has to create a ClusterRole once: " +
		"kubectl create clusterrole slipstream-nodes --verb=get,list --resource=nodes; " +
		"kubectl create clusterrolebinding slipstream-nodes --clusterrole=slipstream-nodes " + subject +
		" (get alone suffices for nodes that --client-node and --server-node name)"
}

// check returns an error that names all missing permissions.
func (c *Cluster) check(ctx context.Context, permissions []permission) error {
	missing, err := c.missing(ctx, permissions, func(permission, bool) {})
	if err != nil || len(missing.Needs) == 0 {
		return err
	}
	who, err := c.api.Self(ctx)
	if err == nil {
		missing.User = who.Status.UserInfo.Username
	}
	if slices.ContainsFunc(missing.Needs, ofNodes) {
		missing.Remedy = c.nodeRole(ctx)
	}
	return missing
}

// ofNodes reports whether a permission is to read nodes.
func ofNodes(need string) bool { return need == "get nodes" || need == "list nodes" }

// missing asks the API server about permissions, calls tell for each, and returns those that the user
// lacks.
func (c *Cluster) missing(ctx context.Context, permissions []permission, tell func(p permission, allowed bool)) (*MissingError, error) {
	missing := &MissingError{}
	for _, p := range permissions {
		review, err := c.api.Allowed(ctx, &authzv1.SelfSubjectAccessReview{
			Spec: authzv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authzv1.ResourceAttributes{
				Verb: p.verb, Group: p.group, Resource: p.resource, Subresource: p.subresource, Namespace: p.namespace,
			}},
		})
		if apierrors.IsForbidden(err) {
			return missing, nil // the user may not even ask; the first request that is denied says so
		}
		if err != nil {
			return nil, fmt.Errorf("ask the API server for permissions: %w", explain(err))
		}
		if !review.Status.Allowed {
			missing.Needs = append(missing.Needs, p.String())
		}
		tell(p, review.Status.Allowed)
	}
	return missing, nil
}

// explain adds what to do if the API server does not answer, or does not know the user.
func explain(err error) error {
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not accept your credentials: renew them, or use another --kubeconfig or --context: %w", err)
	case pluginOf(err) != "":
		// The request was not sent. What the plug-in printed is on the terminal already.
		if noCredentials.MatchString(err.Error()) {
			return fmt.Errorf("%s of your kubeconfig printed no credentials, or other text too (run it by hand: its standard output must be a single JSON object): update it, or use another --kubeconfig or --context: %w", pluginOf(err), err)
		}
		return fmt.Errorf("%s of your kubeconfig failed: log in with it again, or use another --kubeconfig or --context: %w", pluginOf(err), err)
	case strings.Contains(err.Error(), "failed calling webhook"):
		return fmt.Errorf("an admission webhook of the cluster does not answer, and the API server admits nothing without it: ask who maintains it to repair it: %w", err)
	case os.IsTimeout(err) || errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the API server has not answered in time (a request may take %s): %w", requestTime, err)
	case apierrors.IsTooManyRequests(err):
		return fmt.Errorf("the API server is overloaded, or limits how often you may ask it: try again later: %w", err)
	case errors.As(err, new(apierrors.APIStatus)) && unreachable(err):
		return fmt.Errorf("the API server, or a load balancer before it, cannot serve the request now: %w", err)
	case unreachable(err):
		return fmt.Errorf("%s: %w", notAnswered(err), err)
	}
	return err
}

// noSerializer matches client-go's error for an answer of a content type that an API server does not send.
var noSerializer = regexp.MustCompile(`serializer for (\S+) doesn't exist`)

// notAnswered says what happened in place of an answer from an API server.
func notAnswered(err error) string {
	var invalid x509.CertificateInvalidError
	const proxy = "the proxy between you and the API server (HTTPS_PROXY, or proxy-url of your kubeconfig)"
	switch {
	case fails(err, "proxyconnect"):
		return proxy + " does not answer: correct or unset it, or add the API server to NO_PROXY"
	case fails(err, "socks connect"), refusedByProxy(err):
		return proxy + " does not let you through, or does not reach the API server: log in there, or add the API server to NO_PROXY"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "the certificate of the API server is not valid at this time: renew it, or correct the clock of this machine, where it is " + time.Now().Format(time.DateTime+" MST")
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return "the certificate of the API server is not one that your kubeconfig accepts: is it that of another cluster, or of a proxy on the way?"
	case errors.As(err, new(tls.RecordHeaderError)), errors.Is(err, http.ErrSchemeMismatch):
		return "the server of your kubeconfig does not speak TLS: does the port belong to another program?"
	case noSerializer.MatchString(err.Error()):
		return fmt.Sprintf("no API server answers, but something that sends %s, such as the login page of a proxy: log in there, or correct the server of your kubeconfig", noSerializer.FindStringSubmatch(err.Error())[1])
	case errors.As(err, new(*url.Error)):
		return "the API server does not answer"
	}
	return "the answer of the API server cannot be read"
}

// fails reports whether it is an operation of this name, such as net/http's for a connection to a proxy, that has failed.
func fails(err error, name string) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == name
}

// refusedByProxy reports whether a proxy answered CONNECT by an error. All that net/http tells of it is the text of the status.
func refusedByProxy(err error) bool {
	var asked *url.Error
	if !errors.As(err, &asked) {
		return false
	}
	for status := http.StatusBadRequest; status < 600; status++ {
		if text := http.StatusText(status); text != "" && asked.Err.Error() == text {
			return true
		}
	}
	return false
}

// pluginOf returns the credential plug-in that a request failed for (client-go's plugin/pkg/client/auth/exec), "" if it did not.
func pluginOf(err error) string {
	if err == nil {
		return ""
	}
	_, why, failed := strings.Cut(err.Error(), "getting credentials: ")
	if name := pluginName.FindStringSubmatch(why); failed && name != nil {
		return "the credential plug-in " + name[1]
	}
	if failed {
		return "the credential plug-in"
	}
	return ""
}

// noCredentials matches what client-go says of the output of a plug-in that has ended well.
var noCredentials = regexp.MustCompile(`decoding stdout: |plugin (returned|didn't return) `)

var pluginName = regexp.MustCompile(`^exec: (?:executable|fork/exec) "?([^\s":]+)`)

// unreachable reports whether no API server answered, or one that could not serve the request.
func unreachable(err error) bool {
	if err == nil {
		return false
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true
	}
	// 500 and 502 are those of an API server that loses its etcd, and of a load balancer that loses its API server.
	return status.Status().Code >= http.StatusInternalServerError || apierrors.IsTooManyRequests(err)
}
