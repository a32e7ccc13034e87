package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"slipstream.dev/internal/place"
)

// execAPI sends commands in pods to a server of a test.
type execAPI struct {
	fakeAPI
	server string
}

func (a execAPI) Exec(_ *corev1.Pod, options *corev1.PodExecOptions) *url.URL {
	u, err := url.Parse(a.server)
	if err != nil {
		panic(err) // httptest made it
	}
	u.RawQuery = url.Values{"command": options.Command}.Encode()
	return u
}

// answers runs no command: refuse says how an API server refuses it, or else exit returns its exit code.
func answers(t *testing.T, refuse *metav1.Status, exit func(command []string) int) string {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if refuse != nil {
			refuse.Kind, refuse.APIVersion, refuse.Status = "Status", "v1", metav1.StatusFailure
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(int(refuse.Code))
			_ = json.NewEncoder(w).Encode(refuse)
			return
		}
		status := metav1.Status{Status: metav1.StatusSuccess}
		if exit(r.URL.Query()["command"]) != 0 {
			status = metav1.Status{Status: metav1.StatusFailure, Reason: "NonZeroExitCode", Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: "1"}}}}
		}
		websocket.Server{
			Handshake: func(c *websocket.Config, _ *http.Request) error {
				c.Protocol = []string{"v5.channel.k8s.io"}
				return nil
			},
			Handler: func(ws *websocket.Conn) {
				text, _ := json.Marshal(status) // which always works
				_ = websocket.Message.Send(ws, append([]byte{3}, text...))
				_ = ws.Close()
			},
		}.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestOddExec: a cluster in which no command can be run in a pod, and one in which pods do not reach each other, are told from one
// without kube-proxy.
func TestOddExec(t *testing.T) {
	const (
		forbidden = "a role or a policy of the cluster forbids you to run commands in pod slipstream-"
		proxy     = "a/client-0 cannot reach service 198.51.100.1:7466: does the cluster run kube-proxy or a replacement?"
		closed    = "a/client-0 cannot reach service 198.51.100.1:7466, nor the pod behind it at 198.51.100.7:7466: are they kept apart by a network policy"
		tls       = "the API server and the kubelet of node a do not agree on the kubelet's certificate, so kubectl exec and kubectl logs fail too: is its signing request waiting for approval"
		expired   = "the certificate of the kubelet of node a has expired or is not valid yet, by the API server's clock, so kubectl exec and kubectl logs fail too: renew it, or correct the clock of the node or of the API server"
		backend   = "the API server does not reach the kubelet of node a, so kubectl exec and kubectl logs fail too: let it through to the kubelet's port, 10250, or repair its tunnel"
	)
	to := func(address string) func([]string) int {
		return func(command []string) int {
			if slices.Contains(command, address) {
				return 0
			}
			return 1
		}
	}
	for name, tt := range map[string]struct {
		refuse *metav1.Status
		exit   func([]string) int
		// what the run says when it connects to a service, and when it starts a worker.
		service, worker string
	}{
		"as it should be":     {exit: to("198.51.100.1:7466")},
		"no kube-proxy":       {exit: to("198.51.100.7:7466"), service: proxy},
		"closed to all":       {exit: to(""), service: closed},
		"a role without exec": {refuse: &metav1.Status{Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: `pods "client-0" is forbidden: User "jane" cannot create resource "pods/exec"`}, service: forbidden, worker: forbidden},
		"a webhook": {refuse: &metav1.Status{Code: http.StatusBadRequest, Reason: metav1.StatusReasonBadRequest, Message: `admission webhook "validate.kyverno.svc-fail" denied the request: exec is not allowed`},
			service: forbidden, worker: forbidden},
		"a certificate that waits": {refuse: &metav1.Status{Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError, Message: "error dialing backend: remote error: tls: internal error"}, service: tls, worker: tls},
		"clocks that differ": {refuse: &metav1.Status{Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError, Message: "error dialing backend: tls: failed to verify certificate: x509: certificate has expired or is not yet valid: current time 2020-01-01T00:00:00Z is before 2026-01-01T00:00:00Z"},
			service: expired, worker: expired},
		"a tunnel that is down": {refuse: &metav1.Status{Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError, Message: "error dialing backend: No agent available"}, service: backend, worker: backend},
	} {
		t.Run(name, func(t *testing.T) {
			api, c := fakeCluster(t, nil)
			p, err := c.Up(t.Context(), config(nil))
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := p.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}()
			c.api, c.rest = execAPI{fakeAPI{Clientset: api}, answers(t, tt.refuse, tt.exit)}, &rest.Config{}
			err = p.reachService(t.Context(), "a/client-0", netip.MustParseAddrPort("198.51.100.1:7466"), netip.MustParseAddrPort("198.51.100.7:7466"), time.Second)
			if (err == nil) != (tt.service == "") || err != nil && !strings.HasPrefix(err.Error(), tt.service) {
				t.Errorf("a service: %v, want %q", err, tt.service)
			}
			if tt.worker == "" {
				return
			}
			s, err := p.Open(p.Places()[2], place.ForTraffic)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			<-s.done
			if tt.worker == forbidden && !s.final() {
				t.Error("a run would try again what is forbidden")
			}
			if err := s.Why(); err == nil || !strings.HasPrefix(err.Error(), tt.worker) || !strings.Contains(err.Error(), tt.refuse.Message) {
				t.Errorf("a worker: %v, want %q", err, tt.worker)
			}
		})
	}
}

// TestWorkerArguments checks that every worker ends if its controller falls silent, and that those for control follow each other.
func TestWorkerArguments(t *testing.T) {
	api, c := fakeCluster(t, nil)
	p, err := c.Up(t.Context(), config(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	var ran []string
	c.api, c.rest = execAPI{fakeAPI{Clientset: api}, answers(t, nil, func(command []string) int {
		ran = command
		return 0
	})}, &rest.Config{}
	control := "worker --remote --control --claim " + p.id + "/" + holder()
	for _, tt := range []struct {
		kind place.Kind
		use  place.Use
		want string
	}{
		{place.Node, place.ForControl, control},
		{place.Pod, place.ForControl, control + " --pod 198.51.100.7"},
		{place.Pod, place.ForTraffic, "worker --remote"},
	} {
		i := slices.IndexFunc(p.Places(), func(at place.Place) bool { return at.Kind == tt.kind })
		s, err := p.Open(p.Places()[i], tt.use)
		if err != nil {
			t.Fatal(err)
		}
		<-s.done
		_ = s.Close()
		if got := strings.Join(ran[1:], " "); got != tt.want {
			t.Errorf("a worker %s in %s: %q, want %q", tt.use, p.Places()[i].Name, got, tt.want)
		}
	}
}
