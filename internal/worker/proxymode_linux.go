package worker

import (
	"context"
	"io"
	"net/http"
	"os"
	"slices"
	"time"
)

// kubeProxy returns the mode of the kube-proxy on this node; "" if there is none, or if this is no pod in the network namespace of a node.
func kubeProxy(ctx context.Context) string {
	if os.Getenv("KUBERNETES_SERVICE_HOST") == "" { // kubelet sets it in every pod
		return ""
	}
	return proxyMode(ctx, "http://127.0.0.1:10249")
}

// proxyMode asks the kube-proxy that serves metrics at an address for its mode. By default, kube-proxy does so on its node's
// loopback device. The mode is "" if none answers, for example because the network plugin replaces kube-proxy.
func proxyMode(ctx context.Context, at string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	ask, err := http.NewRequestWithContext(ctx, http.MethodGet, at+"/proxyMode", nil)
	if err != nil {
		return ""
	}
	answer, err := http.DefaultTransport.RoundTrip(ask) // RoundTrip follows no redirect
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
