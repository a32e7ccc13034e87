package kube

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	appsv1 "k8s.io/api/apps/v1"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"slipstream.dev/api/v1alpha1"
)

// clients has the agent's REST clients, which share one connection. Each has its own request limit,
// so that none delays the others: neither events nor the conditions of a thousand policies may
// delay the node's own status.
type clients struct {
	// watchCore and watchOurs list and watch, through the gate.
	watchCore, watchOurs rest.Interface
	// status writes the NodeAcceleration, shared the policies' statuses, which all agents write.
	status, shared rest.Interface
	// nodes reads nodes, the agents' pods and their namespace; reports reads NodeAccelerations of other nodes.
	nodes, reports, events, apps rest.Interface
	authn, authz                 rest.Interface
}

// userAgent is the name of an agent in audit logs and metrics of the API server.
const userAgent = "slipstream-agent"

// protobuf takes a third of the bytes of JSON, and a fraction of the time to decode; custom resources support only JSON.
const protobuf = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON

func (c *Cluster) connect(config *rest.Config) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, appsv1.AddToScheme, authentication.AddToScheme, authorization.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	config = rest.CopyConfig(config)
	config.Wrap(c.clock.Follow)
	if file := config.BearerTokenFile; file != "" {
		// client-go's own use of the file would keep a refused token for up to a minute.
		config.BearerToken, config.BearerTokenFile = "", ""
		config.Wrap(transport.ResettableTokenSourceWrapTransport(transport.NewCachedFileTokenSource(file)))
	}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	if config.UserAgent == "" {
		config.UserAgent = userAgent
	}
	plain, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	plain.Transport = renewed(plain.Transport)
	c.gate = newGate(plain.Transport, c.options.Log)
	gated := &http.Client{Transport: c.gate}
	for _, of := range []struct {
		to    *rest.Interface
		http  *http.Client
		gv    schema.GroupVersion
		qps   float32
		burst int
	}{
		{&c.clients.watchCore, gated, corev1.SchemeGroupVersion, -1, 0}, // the gate limits both
		{&c.clients.watchOurs, gated, v1alpha1.GroupVersion, -1, 0},
		{&c.clients.status, plain, v1alpha1.GroupVersion, 1, 5},
		{&c.clients.shared, plain, v1alpha1.GroupVersion, -1, 0}, // sharedLimit is its limit
		{&c.clients.nodes, plain, corev1.SchemeGroupVersion, 5, 20},
		{&c.clients.reports, plain, v1alpha1.GroupVersion, 5, 20},
		{&c.clients.events, plain, corev1.SchemeGroupVersion, 1, 10},
		{&c.clients.apps, plain, appsv1.SchemeGroupVersion, 1, 5},
		{&c.clients.authn, plain, authentication.SchemeGroupVersion, config.QPS, config.Burst},
		{&c.clients.authz, plain, authorization.SchemeGroupVersion, config.QPS, config.Burst},
	} {
		one := rest.CopyConfig(config)
		one.GroupVersion, one.APIPath, one.QPS, one.Burst = &of.gv, "/apis", of.qps, of.burst
		if of.gv.Group == "" {
			one.APIPath = "/api"
		}
		if of.gv != v1alpha1.GroupVersion {
			one.AcceptContentTypes = protobuf
		}
		if *of.to, err = rest.RESTClientForConfigAndClient(one, of.http); err != nil {
			return err
		}
	}
	return nil
}

// renewed repeats a request whose token was refused. By then client-go has dropped the token and reads its file again, unless it
// has just done so. So no write fails because a token was replaced early. Without this, the first agents that write a policy's
// status fail, and by the time one succeeds many others have sent the same write. While the file has no valid token either, an
// agent sends its requests twice.
func renewed(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		answer, err := next.RoundTrip(r)
		if err != nil || answer.StatusCode != http.StatusUnauthorized || r.Body != nil && r.GetBody == nil {
			return answer, err
		}
		again := r.Clone(r.Context())
		if r.GetBody != nil {
			if again.Body, err = r.GetBody(); err != nil {
				return answer, nil //nolint:nilerr // the answer says what is wrong
			}
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 64<<10)) // otherwise the connection could not be reused
		_ = answer.Body.Close()
		return next.RoundTrip(again)
	})
}

// gate is the transport of lists and watches; the write of the node's own status waits for it too. While the API server refuses
// connections, the gate holds requests back, and tries once in each period, at a moment that differs from agent to agent: the
// requests of a thousand agents that have lost their watches at the same moment are spread over one period. Without it,
// reflectors that were refused for a while would wait for up to a minute, and the others would come all at once. The gate also
// limits an agent to two requests a second, and to one after an outage. An agent that comes back sends six. Without the limit, a
// second in which many agents happen to come back would have twice the mean.
type gate struct {
	next   http.RoundTripper
	period time.Duration
	limit  *rate.Limiter
	log    *slog.Logger
	closed chan struct{}
	once   sync.Once

	mu sync.Mutex
	// until is when the gate opens again; zero if it is open.
	until time.Time
	// opened is when the gate last opened; zero if it was never shut.
	opened time.Time
}

// catchUp is the time in which an agent that comes back lists what it watches: six requests at one a second.
const catchUp = 8 * time.Second

func newGate(next http.RoundTripper, log *slog.Logger) *gate {
	return &gate{next: next, period: usualPace.outage, limit: rate.NewLimiter(2, 2), log: log, closed: make(chan struct{})}
}

// RoundTrip sends a request without a body, and repeats it until there is an answer.
func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		if resumes(r) && g.isShut() {
			return expired(r), nil
		}
		if err := g.wait(r.Context()); err != nil {
			return nil, err
		}
		if err := g.limit.Wait(r.Context()); err != nil {
			return nil, err
		}
		if g.shutFor() > 0 { // another request was refused meanwhile
			continue
		}
		answer, err := g.next.RoundTrip(r)
		if err == nil {
			g.open()
			return answer, nil
		}
		if r.Context().Err() != nil {
			return nil, err
		}
		g.shut(err)
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.until.IsZero() {
		g.until, g.opened = time.Time{}, time.Now()
	}
}

// caughtUp reports whether the agent has had time to list what it watches since the gate was shut. If the gate should have been
// opened long ago, no request is waiting for it, and nothing has to be listed.
func (g *gate) caughtUp() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.until.IsZero() {
		return time.Since(g.until) > g.period
	}
	return time.Since(g.opened) > catchUp
}

// allBack returns the time by which all agents have caught up after the last outage, even if this one was the first to come back.
func (g *gate) allBack() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.opened.Add(g.period + catchUp)
}

func (g *gate) isShut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.until.IsZero()
}

// resumes reports whether a request continues a watch.
func resumes(r *http.Request) bool {
	q := r.URL.Query()
	return q.Get("watch") != "" && q.Get("resourceVersion") != ""
}

// expired returns the answer of a restarted API server to a watch that resumes: its watch cache starts empty. The gate gives the
// same answer while the API server cannot be reached, so that the reflector's next request is a list. That saves a third of the
// requests of a thousand agents when a restarted API server is back. If it did not restart, and only the network was interrupted,
// a watch could have resumed, and the list is one request more.
func expired(r *http.Request) *http.Response {
	const status = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}`
	return &http.Response{
		Status: "410 Gone", StatusCode: http.StatusGone, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}, Body: io.NopCloser(strings.NewReader(status)),
	}
}

// shutFor returns how long the gate stays shut, at most 0 if it is open.
func (g *gate) shutFor() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return time.Until(g.until)
}

func (g *gate) wait(ctx context.Context) error {
	t := time.NewTimer(g.shutFor())
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.closed:
		return errors.New("the agent is stopping")
	case <-t.C:
		return nil
	}
}

// shut closes the gate for a random part of a period at first, and then for whole periods, so that the
// attempts of a thousand agents stay evenly spread.
func (g *gate) shut(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now, wait := time.Now(), g.period
	switch {
	case now.Before(g.until):
		return // another request has shut it already
	case g.until.IsZero():
		wait = rand.N(g.period)
	}
	g.until = now.Add(wait)
	g.limit.SetLimit(1)
	g.limit.SetBurst(1)
	g.log.Warn("the API server does not answer; the node keeps its current settings", "again", wait.Round(time.Second), "error", err)
}

// close makes the waiting requests fail.
func (g *gate) close() { g.once.Do(func() { close(g.closed) }) }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
