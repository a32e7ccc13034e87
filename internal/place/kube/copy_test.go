package kube

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	utilexec "k8s.io/client-go/util/exec"

	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
)

// needShells returns the shells that a base image may have, those of them that are here.
func needShells(t *testing.T) (all [][]string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("the scripts are for Linux")
	}
	for _, shell := range [][]string{{"sh"}, {"busybox", "sh"}} {
		if path, err := exec.LookPath(shell[0]); err == nil {
			all = append(all, append([]string{path}, shell[1:]...))
		}
	}
	return all
}

// programs returns a folder with the programs of a base image, those of busybox or of this machine, or an empty one.
func programs(t *testing.T, shell string, all bool) string {
	t.Helper()
	dir := t.TempDir()
	if !all {
		return dir
	}
	for _, name := range []string{"head", "gzip", "chmod", "mv", "rm", "sha256sum"} {
		file := shell
		if filepath.Base(shell) != "busybox" {
			var err error
			if file, err = exec.LookPath(name); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(file, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// in returns a script with another folder in place of that of the copy.
func in(dir, script string) string { return strings.ReplaceAll(script, copyDir, dir) }

// packedText returns a program, as it is sent, and its sum.
func packedText(t *testing.T, text string) (sum string, data []byte) {
	t.Helper()
	sum = fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := Pods{fitting: map[string]build.Build{"a": {File: file, Sum: sum}}}
	if err := p.pack(); err != nil {
		t.Fatal(err)
	}
	return sum, p.packed[sum]
}

// TestReceive: a copy has its name only if it is whole, and otherwise nothing is left of it.
func TestReceive(t *testing.T) {
	const text, broken = "#!/bin/sh\necho ran\n", "#!/bin/sh\nexit 126\n"
	sum, data := packedText(t, text)
	brokenSum, brokenData := packedText(t, broken)
	for _, shell := range needShells(t) {
		for name, c := range map[string]struct {
			sent, before string
			sum          string // of another program
			bare         bool
			code         int
			says, left   string
		}{
			"whole":         {sent: string(data), says: complete, left: text},
			"with more":     {sent: string(data) + "more", says: complete, left: text},
			"cut":           {sent: string(data[:10]), code: differs, says: "the copy differs from the program that was sent"},
			"other bytes":   {sent: strings.Repeat("x", len(data)), code: differs, says: "the copy differs"},
			"there already": {before: "#!/bin/sh\n", says: complete, left: "#!/bin/sh\n"},
			"a bare image":  {sent: string(data), bare: true, code: 1, says: "the image lacks"},
			"cannot run":    {sent: string(brokenData), sum: brokenSum, code: 1, says: "the copied program does not run there"},
		} {
			dir := t.TempDir()
			file := filepath.Join(dir, "slipstream")
			if c.before != "" {
				if err := os.WriteFile(file, []byte(c.before), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			size, sum := len(data), sum
			if c.sum != "" {
				size, sum = len(c.sent), c.sum
			}
			cmd := exec.Command(shell[0], append(shell[1:], "-c", in(dir, receive(size, sum)))...)
			cmd.Stdin = strings.NewReader(c.sent)
			cmd.Env = []string{"PATH=" + programs(t, shell[0], !c.bare)}
			said, err := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(said), c.says) {
				t.Errorf("%s, %s: exit code %d, %v: %s", shell, name, code, err, said)
			}
			entries, err := os.ReadDir(dir)
			got, _ := os.ReadFile(file)
			if err != nil || string(got) != c.left || len(entries) > 1 || c.left == "" && len(entries) > 0 {
				t.Errorf("%s, %s: left %v with %q, %v", shell, name, entries, got, err)
			}
		}
	}
}

// receiver is an API server that takes what is sent to commands in pods. It treats the first attempts as fail says: "absent" breaks the
// connection before the command runs, "cut" while it runs, and other texts are the output of a command that exits with a code.
type receiver struct {
	fail []string
	code string

	mu   sync.Mutex
	sent [][]byte
}

func (r *receiver) serve(t *testing.T) string {
	server := httptest.NewServer(websocket.Server{
		Handshake: func(c *websocket.Config, _ *http.Request) error {
			c.Protocol = []string{"v5.channel.k8s.io"}
			return nil
		},
		Handler: r.answer,
	})
	t.Cleanup(server.Close)
	return server.URL
}

func (r *receiver) answer(ws *websocket.Conn) {
	defer ws.Close()
	var data []byte
	for {
		var message []byte
		if err := websocket.Message.Receive(ws, &message); err != nil || message[0] == 255 { // the end of a channel
			break
		}
		data = append(data, message[1:]...)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	status := metav1.Status{Status: metav1.StatusSuccess}
	if len(r.fail) > 0 {
		says := r.fail[0]
		r.fail = r.fail[1:]
		if says == "absent" {
			return
		}
		_ = websocket.Message.Send(ws, []byte("\x01begin\n"))
		if says == "cut" {
			return
		}
		_ = websocket.Message.Send(ws, append([]byte{2}, says...))
		status = metav1.Status{Status: metav1.StatusFailure, Reason: "NonZeroExitCode", Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: r.code}}}}
	} else {
		_ = websocket.Message.Send(ws, []byte("\x01begin\ncomplete\n"))
		r.sent = append(r.sent, data)
	}
	text, _ := json.Marshal(status) // which always works
	_ = websocket.Message.Send(ws, append([]byte{3}, text...))
}

// TestCopyPrograms: every pod gets the program for its node, again if a connection breaks, and the pods of a run that fails are removed.
func TestCopyPrograms(t *testing.T) {
	text := strings.Repeat("the program ", 10_000)
	sum, data := packedText(t, text)
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ours := build.Build{File: file, System: "linux", Arch: "amd64", Sum: sum}
	for name, c := range map[string]struct {
		receiver *receiver
		arch     string
		want     string // of the error
		sent     int
	}{
		"as it should be":       {receiver: &receiver{}, arch: "amd64", sent: 6},
		"broken connections":    {arch: "amd64", receiver: &receiver{fail: []string{"cut", "cut"}}, sent: 6},
		"absent containers":     {arch: "amd64", receiver: &receiver{fail: slices.Repeat([]string{"absent"}, 30)}, sent: 6},
		"a copy that differs":   {arch: "amd64", receiver: &receiver{fail: []string{"differs"}, code: fmt.Sprint(differs)}, sent: 6},
		"an image without gzip": {arch: "amd64", receiver: &receiver{fail: []string{"the image lacks gzip", "the image lacks gzip"}, code: "1"}, want: "command terminated with exit code 1: the image lacks gzip"},
		"no room":               {arch: "amd64", receiver: &receiver{fail: slices.Repeat([]string{"gzip: No space left on device"}, 99), code: fmt.Sprint(differs)}, want: "No space left on device"},
		"another architecture":  {receiver: &receiver{}, arch: "arm64", want: "node a needs a build of this program for linux/arm64"},
	} {
		t.Run(name, func(t *testing.T) {
			api, cluster := fakeCluster(t, nil)
			for _, name := range []string{"a", "b"} {
				n := node(name, func(n *corev1.Node) { n.Status.NodeInfo.Architecture = c.arch })
				if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
					t.Fatal(err)
				}
			}
			r := c.receiver
			cluster.api, cluster.rest = execAPI{fakeAPI{Clientset: api}, r.serve(t)}, &rest.Config{}
			var notes []string
			p, err := cluster.Up(t.Context(), config(func(config *Config) {
				config.Spec.BaseImage, config.Accelerate, config.builds = "registry.example/busybox:1", true, []build.Build{ours}
				config.Note = func(text string) { notes = append(notes, text) }
			}))
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want %q", err, c.want)
			}
			if err != nil {
				if all := left(t, api); all != nil {
					t.Errorf("left %v", all)
				}
				return
			}
			for _, got := range r.sent {
				if !bytes.Equal(got, data) {
					t.Errorf("sent %d bytes that are not the %d of the program", len(got), len(data))
				}
			}
			if len(r.sent) != c.sent {
				t.Errorf("sent %d times, want %d", len(r.sent), c.sent)
			}
			if want := "They started from registry.example/busybox:1, with a copy of this program (SHA-256 " + sum + ")."; !strings.HasSuffix(p.Placement(), want) {
				t.Errorf("placement %q, want %q", p.Placement(), want)
			}
			if !slices.ContainsFunc(notes, func(n string) bool {
				return strings.HasPrefix(n, "pods start from the image registry.example/busybox:1, and slipstream copies itself into each of the 6")
			}) {
				t.Errorf("notes %q", notes)
			}
			runs, foreign, err := cluster.Runs(t.Context())
			if err != nil || len(runs) != 1 || runs[0].Pods != 6 || len(foreign) > 0 {
				t.Errorf("runs %+v, foreign %v, %v", runs, foreign, err)
			}
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestMeshWithoutBuild: a mesh goes on without a node for which there is no build, as long as enough others are left, and the survey
// says so before.
func TestMeshWithoutBuild(t *testing.T) {
	sum, _ := packedText(t, "the program")
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("the program"), 0o600); err != nil {
		t.Fatal(err)
	}
	const without = "the mesh goes on without node c: node c needs a build of this program for linux/arm64"
	for name, c := range map[string]struct {
		nodes  []string
		rest   time.Duration
		refuse string
	}{
		"two others":                               {nodes: []string{"a", "b", "c"}},
		"one other":                                {nodes: []string{"a", "c"}, refuse: "node c needs a build of this program for linux/arm64"},
		"one other, with a time for the rest":      {nodes: []string{"a", "c"}, rest: 20 * time.Second},
		"nothing but it, with a time for the rest": {nodes: []string{"c"}, rest: 20 * time.Second, refuse: "node c needs a build of this program for linux/arm64"},
	} {
		t.Run(name, func(t *testing.T) {
			api, cluster := fakeCluster(t, nil)
			n := node("c", func(n *corev1.Node) { n.Status.NodeInfo.Architecture = "arm64" })
			if err := api.Tracker().Add(&n); err != nil {
				t.Fatal(err)
			}
			cluster.api, cluster.rest = execAPI{fakeAPI{Clientset: api}, (&receiver{}).serve(t)}, &rest.Config{}
			var notes []string
			mesh := config(func(config *Config) {
				config.Mesh, config.Rest, config.Spec = true, c.rest, spec.Kubernetes{NodeNames: c.nodes, BaseImage: "registry.example/busybox:1"}
				config.builds = []build.Build{{File: file, System: "linux", Arch: "amd64", Sum: sum}}
				config.Note = func(text string) { notes = append(notes, text) }
			})
			p, err := cluster.Up(t.Context(), mesh)
			if (err == nil) != (c.refuse == "") || err != nil && !strings.Contains(err.Error(), c.refuse) {
				t.Fatalf("%v, want %q", err, c.refuse)
			}
			survey, surveyErr := cluster.Survey(t.Context(), mesh)
			if surveyErr != nil {
				t.Fatal(surveyErr)
			}
			about := func(texts []string, what string) (n int) {
				for _, text := range texts {
					if strings.HasPrefix(text, what) {
						n++
					}
				}
				return n
			}
			if err != nil {
				if about(survey.Missing, c.refuse) != 1 || left(t, api) != nil {
					t.Errorf("the survey has %q, and %v is left", survey.Missing, left(t, api))
				}
				return
			}
			if about(notes, without) != 1 || about(survey.Notes, without) != 1 {
				t.Errorf("notes %q and %q, want in both %s", notes, survey.Notes, without)
			}
			for _, name := range c.nodes {
				if lost := p.isLostNode(name) != nil; lost != (name == "c") {
					t.Errorf("node %s is lost: %t", name, lost)
				}
			}
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestFinalErrors: a copy is tried again after errors that may pass.
func TestFinalErrors(t *testing.T) {
	exit := func(code int) error {
		return fmt.Errorf("in a pod: %w", utilexec.CodeExitError{Err: errors.New("exit"), Code: code})
	}
	for _, c := range []struct {
		err   error
		final bool
	}{
		{exit(1), true},
		{exit(127), true},
		{exit(differs), false},
		{exit(137), false}, // its container was restarted
		{errors.New("dial tcp 192.0.2.1:6443: connect: connection refused"), false},
	} {
		if isFinal(c.err) != c.final {
			t.Errorf("%v: final is %t, want %t", c.err, !c.final, c.final)
		}
	}
}

// TestPackOfChangedProgram: a program that was built again since the run chose it is not sent.
func TestPackOfChangedProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := Pods{fitting: map[string]build.Build{"a": {File: file, Sum: fmt.Sprintf("%x", sha256.Sum256([]byte("old")))}}}
	if err := p.pack(); err == nil || !strings.Contains(err.Error(), file+", the program to copy, changed since the run began") {
		t.Errorf("%v", err)
	}
}

// TestCopyIntoForbiddenPods: a role that permits no exec ends the run, which leaves nothing.
func TestCopyIntoForbiddenPods(t *testing.T) {
	api, cluster := fakeCluster(t, nil)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: `pods "client-0" is forbidden: User "jane" cannot create resource "pods/exec"`})
	}))
	t.Cleanup(server.Close)
	cluster.api, cluster.rest = execAPI{fakeAPI{Clientset: api}, server.URL}, &rest.Config{}
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := cluster.Up(t.Context(), config(func(config *Config) {
		config.Spec.BaseImage, config.Spec.Unprivileged, config.Pods = DefaultBase, true, 1
		config.builds = []build.Build{{File: file, System: "linux", Arch: "amd64", Sum: fmt.Sprintf("%x", sha256.Sum256([]byte("x")))}}
	}))
	if err == nil || !strings.Contains(err.Error(), "a role or a policy of the cluster forbids you to run commands in pod") {
		t.Errorf("%v", err)
	}
	if all := left(t, api); all != nil {
		t.Errorf("left %v", all)
	}
}

func TestChooseBase(t *testing.T) {
	const image = "slipstream.dev/slipstream:v1"
	for name, c := range map[string]struct {
		a, b       corev1.Node
		spec       spec.Kubernetes
		repository string
		want       string
	}{
		"no node has the image":    {a: node("a"), b: node("b"), want: DefaultBase},
		"one has it":               {a: node("a", holding(image)), b: node("b"), want: DefaultBase},
		"all have it":              {a: node("a", holding(image)), b: node("b", holding(image))},
		"of another version":       {a: node("a", holding("slipstream.dev/slipstream:v2")), b: node("b", holding(image)), want: DefaultBase},
		"a release has published":  {a: node("a"), b: node("b"), repository: "registry.example/slipstream"},
		"an image that is named":   {a: node("a"), b: node("b"), spec: spec.Kubernetes{Image: "registry.example/s:1"}},
		"a base image that is":     {a: node("a", holding(image)), b: node("b", holding(image)), spec: spec.Kubernetes{BaseImage: "registry.example/b:1"}, want: "registry.example/b:1"},
		"a node that runs Windows": {a: node("a"), b: node("b", windows)},
		"the other, too":           {a: node("a", windows), b: node("b")},
	} {
		t.Run(name, func(t *testing.T) {
			api, cluster := fakeCluster(t, nil)
			for _, n := range []corev1.Node{c.a, c.b} {
				if err := api.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), &n, ""); err != nil {
					t.Fatal(err)
				}
			}
			got, err := cluster.ChooseBase(t.Context(), Config{Spec: c.spec, Repository: c.repository, Version: "v1"}, []string{"a", "b"})
			if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
				t.Errorf("%v, (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestPermit: before anything is created in one of several clusters, a run is refused that would fail in another.
func TestPermit(t *testing.T) {
	ours := build.Build{System: "linux", Arch: "amd64"}
	theirs := build.Build{System: "linux", Arch: "arm64"}
	for want, change := range map[string]func(*Config){
		"": func(c *Config) { c.builds = []build.Build{ours} },
		"node a needs a build of this program for linux/amd64": func(c *Config) { c.builds = []build.Build{theirs} },
		"iperf3 of workload bulk needs programs":               func(c *Config) { c.Programs = "iperf3 of workload bulk" },
	} {
		_, cluster := fakeCluster(t, nil)
		err := cluster.Permit(t.Context(), config(func(c *Config) {
			c.Spec.BaseImage = DefaultBase
			change(c)
		}))
		if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
