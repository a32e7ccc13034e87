package worker

import (
	"context"
	"io"
	"net/http"
	"slices"
	"time"
)

// proxyMode asks the kube-proxy whose metrics are at an address for its mode. It is "" if none answers: by default, kube-proxy listens on
// a port of its node's loopback device, and there is none if the network plugin replaces it.
func proxyMode(ctx context.Context, at string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	ask, err := http.NewRequestWithContext(ctx, http.MethodGet, at+"/proxyMode", nil)
	if err != nil {
		return ""
	}
	answer, err := http.DefaultTransport.RoundTrip(ask) // and follow no redirect
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, 64))
	if mode := string(text); err == nil && slices.Contains([]string{"iptables", "nftables", "ipvs"}, mode) {
		return mode
	}
	return ""
}
