package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"slipstream.dev/internal/testenv"
)

// reviews is an API server that knows some tokens. The user of each has the same name as the token.
type reviews struct {
	*httptest.Server
	asked   map[string]int // by resource
	down    bool
	allowed map[string]bool
}

func newReviews(t *testing.T, allowed map[string]bool) (*reviews, *Cluster) {
	s := &reviews{asked: make(map[string]int), allowed: allowed}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	c, err := New(&rest.Config{Host: s.URL, QPS: -1}, Options{Node: "node0"})
	must(t, err)
	return s, c
}

func (s *reviews) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	s.asked[resource]++
	w.Header().Set("Content-Type", "application/json")
	var o struct {
		Kind, APIVersion string
		Spec             struct {
			Token, User           string
			Groups                []string
			Extra                 map[string][]string
			NonResourceAttributes struct{ Path, Verb string }
		}
	}
	err := json.NewDecoder(r.Body).Decode(&o)
	if s.down || err != nil || r.Method != http.MethodPost {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	answer := object{"kind": o.Kind, "apiVersion": o.APIVersion}
	switch resource {
	case "tokenreviews":
		_, known := s.allowed[o.Spec.Token]
		answer["status"] = object{"authenticated": known, "user": object{"username": o.Spec.Token, "groups": []string{"scrapers"}, "extra": object{"from": []string{"here"}}}}
	case "subjectaccessreviews":
		asks := fmt.Sprint(o.Spec.NonResourceAttributes, o.Spec.Groups, o.Spec.Extra)
		answer["status"] = object{"allowed": s.allowed[o.Spec.User] && asks == "{/metrics get} [scrapers] map[from:[here]]"}
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func TestMayGetMetrics(t *testing.T) {
	s, c := newReviews(t, map[string]bool{"reader": true, "other": false})
	check := func(token string, want, fails bool) {
		t.Helper()
		if may, err := c.MayGetMetrics(t.Context(), token); may != want || (err != nil) != fails {
			t.Errorf("%s: %v, %v, want %v and an error: %v", token, may, err, want, fails)
		}
	}
	check("reader", true, false)
	check("other", false, false)
	check("unknown", false, false)
	s.down = true
	check("reader", true, false)
	check("other", false, false)
	check("new", false, true)
}

// TestReviewsRemembered checks that the answers of the cluster are cached, but not for long, and
// not for any number of tokens.
func TestReviewsRemembered(t *testing.T) {
	s, c := newReviews(t, map[string]bool{"reader": true})
	now := time.Now()
	may := func(token string, at time.Time) bool {
		ok, err := c.reviewer.may(t.Context(), token, at)
		must(t, err)
		return ok
	}
	for i, tt := range []struct {
		token string
		after time.Duration
		asks  int
	}{
		{"reader", 0, 1}, {"reader", rememberYes - 1, 1}, {"reader", rememberYes, 2},
		{"no", 0, 3}, {"no", rememberNo - 1, 3}, {"no", rememberNo, 4},
	} {
		if got := may(tt.token, now.Add(tt.after)); got != (tt.token == "reader") {
			t.Errorf("%d: %s may: %t", i, tt.token, got)
		}
		if s.asked["tokenreviews"] != tt.asks {
			t.Errorf("%d: the cluster was asked %d times, want %d", i, s.asked["tokenreviews"], tt.asks)
		}
	}
	// Made-up tokens do not evict the valid one.
	for i := range 10 * answersMost {
		may(fmt.Sprint("made up ", i), now.Add(rememberYes))
	}
	if n := len(c.reviewer.known); n > answersMost {
		t.Errorf("%d answers are remembered, want at most %d", n, answersMost)
	}
	before := s.asked["tokenreviews"]
	if may("reader", now.Add(rememberYes+1)); s.asked["tokenreviews"] != before {
		t.Error("made-up tokens pushed out a good one")
	}
	// More valid tokens than there is room for.
	for i := range 2 * answersMost {
		s.allowed[fmt.Sprint(i)] = true
		may(fmt.Sprint(i), now.Add(rememberYes))
	}
	may("one that is not", now.Add(rememberYes))
	if n := len(c.reviewer.known); n > answersMost {
		t.Errorf("%d answers are remembered, want at most %d", n, answersMost)
	}
	// The maximum number of requests is in progress.
	for range askingMost {
		c.reviewer.asking <- struct{}{}
	}
	if _, err := c.reviewer.may(t.Context(), "new", now); err == nil {
		t.Error("one more question was asked")
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until want returns "". If it does not, the last text that it returned fails the
// test.
func eventually(t testing.TB, what string, want func() string) {
	t.Helper()
	testenv.Eventually(t, 30*time.Second, what, want) // at the start, requests are rate-limited
}
