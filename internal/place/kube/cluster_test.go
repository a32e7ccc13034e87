package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	authnv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"slipstream.dev/internal/spec"
)

// kubeconfig writes one with two contexts, whose user is given, for a server.
func kubeconfig(t *testing.T, server, current, user string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
%s
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: %s}]
contexts: [{name: prod, context: {cluster: c, user: u}}, {name: stage, context: {cluster: c, user: u}}]
`, current, server, user)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestOpen: each way in which a kubeconfig leads nowhere has a sentence of its own.
func TestOpen(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	pod := filepath.Join(t.TempDir(), "pod.yaml")
	if err := os.WriteFile(pod, []byte("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	orphan := kubeconfig(t, "https://192.0.2.1", "current-context: prod", "{}")
	text, err := os.ReadFile(orphan)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(orphan, []byte(strings.Replace(string(text), "clusters: [{name: c,", "clusters: [{name: d,", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		access Access
		want   string
	}{
		"good":                       {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "current-context: prod", "{}")}, ""},
		"no current context":         {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "", "{}")}, "it has no current context: name one with --context, or set it with kubectl config use-context; it has prod, stage"},
		"context named":              {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "", "{}"), Context: "stage"}, ""},
		"no such context":            {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "", "{}"), Context: "sage"}, "it has no context sage; it has prod, stage"},
		"current one does not exist": {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "current-context: old", "{}")}, "its current context old does not exist"},
		"cluster is not there":       {Access{Kubeconfig: orphan}, "its context prod is for the cluster \"c\", which it does not have: name another context"},
		"plug-in of another version": {Access{Kubeconfig: kubeconfig(t, "https://192.0.2.1", "current-context: prod", "{exec: {apiVersion: client.authentication.k8s.io/v1alpha1, command: x}}")}, "exec plugin: invalid apiVersion"},
		"a pod":                      {Access{Kubeconfig: pod}, pod + " is no kubeconfig but a file of the kind Pod: name the file with which kubectl reaches the cluster"},
		"empty":                      {Access{Kubeconfig: empty}, empty + ", which --kubeconfig names, has no clusters: name the file with which kubectl reaches the cluster"},
	} {
		c, err := Open(tt.access)
		if err == nil && c.flags != tt.access.flags() {
			t.Errorf("%s: another command would get the flags %q", name, c.flags)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: it says more than one sentence: %v", name, err)
		}
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// TestExplain: a credential plug-in that fails, credentials that are refused, a server that does not answer, and one that is slow.
func TestExplain(t *testing.T) {
	refusing := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }))
	defer refusing.Close()
	gone := httptest.NewServer(nil)
	gone.Close()
	answering := func(code int, kind, text string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", kind)
			w.WriteHeader(code)
			_, _ = io.WriteString(w, text)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	status := func(code int, reason metav1.StatusReason) string {
		return answering(code, "application/json", fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d}`, reason, code))
	}
	page := answering(http.StatusOK, "text/html", "<html>Sign in</html>")
	plugin := func(command string) string {
		return fmt.Sprintf("{exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: %s}}", command)
	}
	for name, tt := range map[string]struct{ server, user, want string }{
		"plug-in that fails":        {refusing.URL, plugin("/bin/false"), "the credential plug-in /bin/false of your kubeconfig failed: log in with it again"},
		"plug-in that is absent":    {refusing.URL, plugin("no-such-plugin"), "the credential plug-in no-such-plugin of your kubeconfig failed"},
		"plug-in that says nothing": {refusing.URL, plugin("/bin/true"), "the credential plug-in of your kubeconfig printed no credentials, or other text too"},
		"plug-in that says more":    {refusing.URL, plugin("/bin/echo, args: [Logging in]"), "the credential plug-in of your kubeconfig printed no credentials, or other text too (run it by hand"},
		"refused":                   {refusing.URL, "{token: x}", "the API server does not accept your credentials"},
		"gone":                      {gone.URL, "{token: x}", "the API server does not answer"},
		"login page":                {page, "{token: x}", "no API server answers, but something that sends text/html, such as the login page of a proxy"},
		"another protocol":          {strings.Replace(page, "http:", "https:", 1), "{token: x}", "the server of your kubeconfig does not speak TLS"},
		"half an answer":            {answering(http.StatusOK, "application/json", `{"kind":`), "{token: x}", "the answer of the API server cannot be read"},
		"overloaded":                {status(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests), "{token: x}", "the API server is overloaded, or limits how often you may ask it"},
		"without etcd":              {status(http.StatusInternalServerError, metav1.StatusReasonInternalError), "{token: x}", "the API server, or a load balancer before it, cannot serve the request now"},
		"webhook that is down":      {answering(http.StatusInternalServerError, "application/json", `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500,"message":"Internal error occurred: failed calling webhook \"x\": failed to call webhook: connection refused"}`), "{token: x}", "an admission webhook of the cluster does not answer, and the API server admits nothing without it"},
		"load balancer alone":       {answering(http.StatusServiceUnavailable, "text/plain", "no healthy upstream"), "{token: x}", "the API server, or a load balancer before it, cannot serve the request now"},
	} {
		c, err := Open(Access{Kubeconfig: kubeconfig(t, tt.server, "current-context: prod", tt.user)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.ChooseAll(t.Context(), Config{}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	for want, err := range map[string]error{
		"the certificate of the API server is not valid at this time: renew it, or correct the clock of this machine, where it is 20": x509.CertificateInvalidError{Reason: x509.Expired},
		"the certificate of the API server is not one that your kubeconfig accepts: is it that of another cluster":                    &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}},
	} {
		if got := explain(&url.Error{Op: "Get", URL: "https://x", Err: err}); !strings.Contains(got.Error(), want) {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := explain(fmt.Errorf("get: %w", context.DeadlineExceeded)); !strings.Contains(err.Error(), "has not answered in time (a request may take 15s)") {
		t.Errorf("a slow server: %v", err)
	}
}

// shutSocks is a SOCKS proxy that connects nobody.
func shutSocks(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			for _, answer := range []string{"\x05\x00", "\x05\x01\x00\x01\x00\x00\x00\x00\x00\x00"} { // no password; a general failure
				_, _ = c.Read(make([]byte, 64))
				_, _ = io.WriteString(c, answer)
			}
			c.Close()
		}
	}()
	return "socks5://" + l.Addr().String()
}

// TestProxy: a proxy that does not answer, or refuses the way, is not taken for the API server.
func TestProxy(t *testing.T) {
	gone := httptest.NewServer(nil)
	gone.Close()
	refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusProxyAuthRequired) }))
	defer refusing.Close()
	for proxy, want := range map[string]string{
		gone.URL: "(HTTPS_PROXY, or proxy-url of your kubeconfig) does not answer: correct or unset it, or add the API server to NO_PROXY",
		strings.Replace(gone.URL, "http:", "socks5:", 1): "(HTTPS_PROXY, or proxy-url of your kubeconfig) does not answer",
		shutSocks(t): "does not let you through, or does not reach the API server",
		refusing.URL: "does not let you through, or does not reach the API server: log in there, or add the API server to NO_PROXY",
	} {
		file := kubeconfig(t, "https://192.0.2.1", "current-context: prod", "{token: x}")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(strings.Replace(string(text), "{server:", fmt.Sprintf("{proxy-url: %q, server:", proxy), 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Open(Access{Kubeconfig: file})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.ChooseAll(t.Context(), Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", proxy, err, want)
		}
	}
}

// TestKubeconfigVariable: a variable that names files which do not exist, some that do, and a home that is not the user's.
func TestKubeconfigVariable(t *testing.T) {
	good, empty := kubeconfig(t, "https://192.0.2.1", "current-context: prod", "{}"), filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ files, sudo, want string }{
		"two files":           {files: "/nowhere/config:" + good},
		"a file that is gone": {files: "/nowhere/config", want: "no kubeconfig found, as KUBECONFIG names /nowhere/config, which does not exist: correct it, or name one with --kubeconfig"},
		"sudo":                {files: empty, sudo: "jane", want: "no kubeconfig found: name one with --kubeconfig, or set KUBECONFIG; under sudo, root's kubeconfig is the default, and a run in a cluster needs no root here: leave out sudo"},
	} {
		t.Setenv("KUBECONFIG", tt.files)
		t.Setenv("SUDO_USER", tt.sudo)
		if _, err := Open(Access{}); (err == nil) != (tt.want == "") || err != nil && err.Error() != tt.want {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// TestPathPrefix: an API server behind a path of another one, as Rancher's, gets every request there.
func TestPathPrefix(t *testing.T) {
	const prefix = "/k8s/clusters/c-m-1"
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"kind":"NodeList","apiVersion":"v1","items":[]}`)
	}))
	defer server.Close()
	c, err := Open(Access{Kubeconfig: kubeconfig(t, server.URL+prefix+"/", "current-context: prod", "{token: x}")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.api.Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", Name: "x"}}
	asked = append(asked, c.api.Exec(pod, &corev1.PodExecOptions{}).Path)
	if want := []string{prefix + "/api/v1/nodes", prefix + "/api/v1/namespaces/mine/pods/x/exec"}; !slices.Equal(asked, want) {
		t.Errorf("asked %q, want %q", asked, want)
	}
}

// TestTenant: whoever may edit one namespace alone gets the ClusterRole that is needed to read nodes, in the dry run and the run.
func TestTenant(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}); err != nil {
		t.Fatal(err)
	}
	user := "jane"
	api.PrependReactor("create", "selfsubjectreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authnv1.SelfSubjectReview{Status: authnv1.SelfSubjectReviewStatus{UserInfo: authnv1.UserInfo{Username: user}}}, nil
	})
	api.PrependReactor("*", "nodes", refuse)
	api.PrependReactor("create", "selfsubjectaccessreviews", deny("nodes"))
	const role = "kubectl create clusterrole slipstream-nodes --verb=get,list --resource=nodes; kubectl create clusterrolebinding slipstream-nodes --clusterrole=slipstream-nodes "
	s, err := c.Survey(t.Context(), Config{Spec: spec.Kubernetes{Image: "registry.example/s:1"}})
	if err != nil || len(s.Denied) > 0 || len(s.Missing) != 1 || !strings.Contains(s.Missing[0], role+"--user=jane") {
		t.Errorf("denied %q, missing %q, %v", s.Denied, s.Missing, err)
	}
	user = "system:serviceaccount:mine:ci"
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), "permissions that a run needs:\n  get nodes\n") || !strings.Contains(err.Error(), role+"--serviceaccount=mine:ci") {
		t.Errorf("a run: %v", err)
	}
}

// TestSlowServer: the time of a slow API server is said, and where a permission is for.
func TestSlowServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, nil)
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Slow(t.Context()); err != nil {
			t.Errorf("quick: %v", err)
		}
		slowly := func(clienttesting.Action) (bool, runtime.Object, error) {
			time.Sleep(7 * time.Second) // of synctest
			return false, nil, nil
		}
		api.PrependReactor("get", "leases", slowly)
		api.PrependReactor("create", "selfsubjectreviews", slowly)
		if err := p.Slow(t.Context()); err == nil || !strings.Contains(err.Error(), "the API server took 7s to answer one request") {
			t.Errorf("slow: %v", err)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
		s, err := c.Survey(t.Context(), config(func(c *Config) { c.Spec.Image = "registry.example/s:1" }))
		if err != nil || s.AnswerSeconds != 7 || len(s.Missing) > 0 || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "took 7s") {
			t.Errorf("%+v, %v", s, err)
		}
	})
}

// TestRevoked: if a token is revoked in mid-run, what stays is named with the whole command that removes it, and who can run it.
func TestRevoked(t *testing.T) {
	for namespace, want := range map[string][]string{
		"mine": {"the API server does not accept your credentials", "up to 6 pods and a lease of run ", " may be left in namespace mine", "slipstream cleanup --kubeconfig '/etc/my config' --context prod -n mine\n", "whoever may list and delete pods, services and leases there"},
		"":     {"up to 6 pods of run ", "slipstream cleanup --kubeconfig '/etc/my config' --context prod\n", "whoever may list and delete namespaces"},
	} {
		api, c := fakeCluster(t, nil)
		c.namespace, c.flags = namespace, Access{Kubeconfig: "/etc/my config", Context: "prod"}.flags()
		if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}); err != nil {
			t.Fatal(err)
		}
		p, err := c.Up(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		api.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewUnauthorized("Unauthorized")
		})
		err = p.Close(t.Context())
		for _, part := range want {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("-n %q: %v\nwithout %q", namespace, err, part)
			}
		}
	}
}

// TestLateLease: a run says once that its lease is not renewed, and once that it is again, but nothing of one renewal that fails.
func TestLateLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, c := fakeCluster(t, nil)
		var revoked atomic.Bool
		api.PrependReactor("patch", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
			return revoked.Load(), nil, apierrors.NewUnauthorized("Unauthorized")
		})
		var notes []string
		p, err := c.Up(t.Context(), config(func(c *Config) { c.Note = func(text string) { notes = append(notes, text) } }))
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			revoked bool
			lasts   time.Duration
			want    []string
		}{
			{true, renewTime + time.Second, nil},
			{false, renewTime, nil},
			{true, 6 * renewTime, []string{" has not been renewed for 20s (the API server does not accept your credentials"}},
			{false, 2 * renewTime, []string{" is renewed again"}},
		} {
			notes = nil
			revoked.Store(step.revoked)
			time.Sleep(step.lasts) // of synctest
			synctest.Wait()
			if !slices.EqualFunc(notes, step.want, func(note, want string) bool { return strings.HasPrefix(note, "the lease of run "+p.id+want) }) {
				t.Errorf("revoked %v: %q, want %q", step.revoked, notes, step.want)
			}
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestCleanupWithoutServices: a user whose run had no services can clean up without the right to list them.
func TestCleanupWithoutServices(t *testing.T) {
	api, c := fakeCluster(t, nil)
	leave(t, c, deadID, time.Now().Add(-time.Hour))
	api.PrependReactor("list", "services", refuse)
	if runs, _, err := c.Runs(t.Context()); err != nil || len(runs) != 1 {
		t.Errorf("%v, %v", runs, err)
	}
}

// TestTerminating: a namespace that is being deleted is refused before anything is created in it.
func TestTerminating(t *testing.T) {
	api, c := fakeCluster(t, nil)
	c.namespace = "mine"
	if err := api.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mine", DeletionTimestamp: new(metav1.Now()), Finalizers: []string{"x"}}}); err != nil {
		t.Fatal(err)
	}
	const want = "namespace mine is being deleted (kubectl describe namespace mine says what it waits for)"
	if _, err := c.Up(t.Context(), config(nil)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a run: %v", err)
	}
	s, err := c.Survey(t.Context(), config(func(c *Config) { c.Spec.Image = "registry.example/s:1" }))
	if err != nil || len(s.Missing) != 1 || !strings.HasPrefix(s.Missing[0], want) {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestPermissionNamespaces: each permission says in which namespace it is needed.
func TestPermissionNamespaces(t *testing.T) {
	for _, namespace := range []string{"", "mine"} {
		_, c := fakeCluster(t, nil)
		c.namespace = namespace
		s, err := c.Survey(t.Context(), config(nil))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range s.Permissions {
			want := namespace
			if p.Resource == "nodes" || p.Resource == "namespaces" {
				want = ""
			}
			if p.Namespace != want {
				t.Errorf("-n %q: %+v", namespace, p)
			}
		}
	}
}
