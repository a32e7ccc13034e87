package kube

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync"
	"time"

	"slipstream.dev/internal/agent"

	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	"k8s.io/client-go/rest"
)

// reviewer asks the API server to whom a token belongs and what its owner may do, like
// kube-rbac-proxy. It caches the answers, and the client's request limit bounds what guessed tokens
// cost the API server.
type reviewer struct {
	authn, authz rest.Interface
	// asking limits the number of concurrent requests.
	asking chan struct{}

	mu    sync.Mutex
	known map[[sha256.Size]byte]answer
}

type answer struct {
	may   bool
	until time.Time
}

// The owner of a revoked token can read metrics for up to rememberYes more, and a new permission takes effect after up to
// rememberNo.
const (
	rememberYes = time.Minute
	rememberNo  = 10 * time.Second
	answersMost = 64
	askingMost  = 4
	askTimeout  = 10 * time.Second
)

func newReviewer(authn, authz rest.Interface) *reviewer {
	return &reviewer{authn: authn, authz: authz, asking: make(chan struct{}, askingMost), known: make(map[[sha256.Size]byte]answer)}
}

// MayGetMetrics reports whether the owner of a token may get /metrics. An error means that the API server
// did not answer.
func (c *Cluster) MayGetMetrics(ctx context.Context, token string) (bool, error) {
	return c.reviewer.may(ctx, token, time.Now())
}

func (r *reviewer) may(ctx context.Context, token string, now time.Time) (bool, error) {
	key := sha256.Sum256([]byte(token))
	r.mu.Lock()
	a, ok := r.known[key]
	r.mu.Unlock()
	if ok && now.Before(a.until) {
		return a.may, nil
	}
	select {
	case r.asking <- struct{}{}:
		defer func() { <-r.asking }()
	default:
		return false, agent.ErrBusy
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	may, err := r.ask(ctx, token)
	if err != nil {
		return false, err
	}
	a = answer{may, now.Add(rememberNo)}
	if may {
		a.until = now.Add(rememberYes)
	}
	r.remember(key, a, now)
	return may, nil
}

// remember evicts expired answers first, then denials, so that made-up tokens do not evict valid ones. If
// there are more valid tokens than room, some are reviewed again.
func (r *reviewer) remember(key [sha256.Size]byte, a answer, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, drop := range []func(answer) bool{
		func(old answer) bool { return !now.Before(old.until) },
		func(old answer) bool { return !old.may },
		func(answer) bool { return a.may },
	} {
		for k, old := range r.known {
			if len(r.known) >= answersMost && drop(old) {
				delete(r.known, k)
			}
		}
	}
	if len(r.known) < answersMost {
		r.known[key] = a
	}
}

func (r *reviewer) ask(ctx context.Context, token string) (bool, error) {
	who := authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: token}}
	if err := r.authn.Post().Resource("tokenreviews").Body(&who).Do(ctx).Into(&who); err != nil {
		return false, fmt.Errorf("review a token: %w", err)
	}
	if !who.Status.Authenticated {
		return false, nil
	}
	user := who.Status.User
	what := authorization.SubjectAccessReview{Spec: authorization.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: make(map[string]authorization.ExtraValue),
		NonResourceAttributes: &authorization.NonResourceAttributes{Path: "/metrics", Verb: "get"},
	}}
	for key, values := range user.Extra {
		what.Spec.Extra[key] = authorization.ExtraValue(values)
	}
	if err := r.authz.Post().Resource("subjectaccessreviews").Body(&what).Do(ctx).Into(&what); err != nil {
		return false, fmt.Errorf("review the access of %s: %w", user.Username, err)
	}
	return what.Status.Allowed, nil
}
