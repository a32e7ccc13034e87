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

// reviewer asks the cluster who has a token and what they may, as kube-rbac-proxy does.
// What it has heard it remembers for a while: somebody who tries tokens costs the API
// server no more than the client's rate of requests.
type reviewer struct {
	authn, authz rest.Interface
	// asking bounds the questions that are under way.
	asking chan struct{}

	mu    sync.Mutex
	known map[[sha256.Size]byte]answer
}

type answer struct {
	may   bool
	until time.Time
}

// A token that is revoked reads metrics for rememberYes longer, and a right that is given
// takes rememberNo to be noticed.
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

// MayGetMetrics tells whether the cluster lets whoever has a token get /metrics. An error
// is that the cluster could not be asked.
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

// remember makes room by what is out of date, then by refusals: tokens that somebody makes up
// push out no token that is good. Of more good ones than there is room for, some are asked for anew.
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
