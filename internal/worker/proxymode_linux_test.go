package worker

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestProxyMode checks that only the known modes of kube-proxy count: something else may listen at its port.
func TestProxyMode(t *testing.T) {
	answers := map[string]string{"nftables": "nftables", "ipvs": "ipvs", "<html>": "", strings.Repeat("iptables", 1000): ""}
	for answer, want := range answers {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/proxyMode" {
				_, _ = w.Write([]byte(answer))
			}
		}))
		if got := proxyMode(t.Context(), server.URL); got != want {
			t.Errorf("%.20s: %q, want %q", answer, got, want)
		}
		server.Close()
		if got := proxyMode(t.Context(), server.URL); got != "" {
			t.Errorf("nobody answers: %q", got)
		}
	}
}
