package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An eviction that is in progress completes even if its caller is interrupted. Any other request ends with its caller.
func TestInterruptedEvictionIsCompleted(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	cut := make(chan bool, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // otherwise the server does not notice that its client has gone
		interrupt()
		patience := 5 * time.Second
		if r.Method == http.MethodPost {
			patience = 100 * time.Millisecond
		}
		select {
		case <-r.Context().Done():
			cut <- true
		case <-time.After(patience):
			cut <- false
		}
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, fmt.Appendf(nil, `{clusters: [{name: c, cluster: {server: %q}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Open(path, "")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.client.CoreV1().Pods("web").EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "pod"}})
	if <-cut {
		t.Error("the API server lost the client of an eviction")
	}
	ctx, interrupt = context.WithCancel(t.Context())
	defer interrupt()
	if _, err := c.client.CoreV1().Pods("web").Get(ctx, "pod", metav1.GetOptions{}); err == nil || !<-cut {
		t.Errorf("another request was not interrupted: %v", err)
	}
}
