package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"

	"slipstream.dev/internal/target"
)

// Stream leads to a worker in a pod: what is written to it the worker reads, and
// the reverse. Close ends the worker's input, on which it puts things right and
// exits; Wait waits for that.
type Stream struct {
	pods *Pods
	pod  *corev1.Pod

	in     *io.PipeWriter
	out    inbox
	stderr tail

	cancel context.CancelFunc
	done   chan struct{}
	err    error // once done
}

// Open starts a worker for a use of a place, and returns the stream to it. Try
// again where connecting to it fails: Retry says whether that makes sense.
func (p *Pods) Open(at target.Place, use target.Use) (*Stream, error) {
	if err := p.hopeless(); err != nil {
		return nil, err
	}
	argv := []string{program, "worker"}
	var pod *corev1.Pod
	switch {
	case use == target.ForControl:
		pod = p.control[at.Name]
		if at.Kind == target.Pod {
			address := at.IPv4
			if !address.IsValid() {
				address = at.IPv6
			}
			argv = append(argv, "--pod", address.String())
		}
	case at.Kind == target.Node:
		pod = p.host[at.Seat]
	default:
		pod = p.traffic[at.Name]
	}
	if pod == nil {
		return nil, fmt.Errorf("there is no pod for %s in %s", use, at.Name)
	}
	return p.exec(pod, argv), nil
}

// Retry waits a moment after a worker could not be connected to, and returns nil
// if another try makes sense.
func (s *Stream) Retry(ctx context.Context, err error) error {
	if s.final() || errors.Is(err, target.ErrLost) {
		return err
	}
	if err := s.pods.unanswered(s.pod, err); errors.Is(err, target.ErrLost) {
		return err
	}
	if pause(ctx) != nil {
		return err
	}
	return nil
}

// Connected notes that the worker answers.
func (s *Stream) Connected() { s.pods.answered(s.pod) }

func (p *Pods) exec(pod *corev1.Pod, argv []string) *Stream {
	ctx, cancel := context.WithCancel(context.Background())
	in, w := io.Pipe()
	s := &Stream{pods: p, pod: pod, in: w, cancel: cancel, done: make(chan struct{})}
	s.out.init()
	go func() {
		defer close(s.done)
		defer cancel()
		s.err = p.cluster.stream(ctx, pod, argv, in, &s.out, &s.stderr)
		_ = w.Close() // whoever still reads it gets the end, and no error to tell the world of
		s.out.end()
	}()
	return s
}

// stream runs a command in a pod until it ends.
func (c *Cluster) stream(ctx context.Context, pod *corev1.Pod, argv []string, in io.Reader, out, stderr io.Writer) error {
	url := c.api.Exec(pod, &corev1.PodExecOptions{
		Container: container, Command: argv, Stdin: true, Stdout: true, Stderr: true,
	})
	// As kubectl does it: WebSocket, and SPDY for servers and proxies without.
	spdy, err := remotecommand.NewSPDYExecutor(c.rest, http.MethodPost, url)
	if err != nil {
		return fmt.Errorf("prepare exec: %w", err)
	}
	websocket, err := remotecommand.NewWebSocketExecutor(c.rest, http.MethodGet, url.String())
	if err != nil {
		return fmt.Errorf("prepare exec: %w", err)
	}
	executor, err := remotecommand.NewFallbackExecutor(websocket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return fmt.Errorf("prepare exec: %w", err)
	}
	return executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out, Stderr: stderr})
}

func (s *Stream) Read(b []byte) (int, error)  { return s.out.Read(b) }
func (s *Stream) Write(b []byte) (int, error) { return s.in.Write(b) }

// Close ends the worker's input and stops reading what it says.
func (s *Stream) Close() error {
	s.out.close()
	return s.in.Close()
}

// exitTime is how long a worker may take to put things right and exit, once its
// input has ended.
const exitTime = 20 * time.Second

// Wait waits for the worker to exit. Closed before, and after too long it is left
// alone: its pod goes in the end.
func (s *Stream) Wait() error {
	timer := time.NewTimer(exitTime)
	defer timer.Stop()
	select {
	case <-s.done:
		return s.ended()
	case <-timer.C:
		s.cancel()
		return fmt.Errorf("worker in pod %s/%s: has not ended %s after it was told to", s.pod.Namespace, s.pod.Name, exitTime)
	}
}

// ended is what the command's end was, nil if good. A stream that was cut says
// nothing of the command.
func (s *Stream) ended() error {
	select {
	case <-s.done:
	default:
		s.cancel()
		<-s.done
	}
	var exit utilexec.CodeExitError
	switch {
	case s.err == nil:
		return nil
	case errors.As(s.err, &exit):
		return fmt.Errorf("the worker in pod %s/%s ended with %s%s", s.pod.Namespace, s.pod.Name, exitWord(exit.Code), s.stderr.last())
	}
	return fmt.Errorf("exec in pod %s/%s: %w%s", s.pod.Namespace, s.pod.Name, s.err, s.stderr.last())
}

func exitWord(code int) string {
	if code > 128 {
		return fmt.Sprintf("signal %d", code-128)
	}
	return fmt.Sprintf("exit code %d", code)
}

// final tells an end that another try would only repeat: the program is not there,
// or says itself why it cannot go on, or may not be started.
func (s *Stream) final() bool {
	select {
	case <-s.done:
	default:
		return false
	}
	var exit utilexec.CodeExitError
	if errors.As(s.err, &exit) {
		return exit.Code < 128
	}
	return s.err != nil && (apierrors.IsForbidden(s.err) || strings.Contains(s.err.Error(), "executable file not found") || strings.Contains(s.err.Error(), "no such file or directory"))
}

// Why says why the stream has ended, when it was to go on: whether it was the
// worker that ended, or the way to it.
func (s *Stream) Why() error {
	select {
	case <-s.done:
	case <-time.After(time.Second): // it does not answer, and nobody has said that it has ended
		return s.pods.diagnose(context.Background(), s.pod, errors.New("its worker does not answer"))
	}
	if exit := new(utilexec.CodeExitError); s.err == nil || errors.As(s.err, exit) {
		if err := s.ended(); err != nil {
			return err
		}
		return fmt.Errorf("the worker in pod %s/%s ended by itself", s.pod.Namespace, s.pod.Name)
	}
	return s.pods.diagnose(context.Background(), s.pod, s.err)
}

// inbox holds what the worker said until it is read. It takes all there is, for
// the protocol bounds that, so that a worker whose reader has left can end.
type inbox struct {
	mu            sync.Mutex
	more          *sync.Cond
	buf           bytes.Buffer
	ended, closed bool // by who writes, by who reads
}

func (b *inbox) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.buf.Write(p)
		b.more.Broadcast()
	}
	return len(p), nil
}

func (b *inbox) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.buf.Len() == 0 && !b.ended && !b.closed {
		b.more.Wait()
	}
	if b.closed {
		return 0, io.ErrClosedPipe
	}
	return b.buf.Read(p) // io.EOF at the end
}

func (b *inbox) init()  { b.more = sync.NewCond(&b.mu) }
func (b *inbox) end()   { b.set(&b.ended) }
func (b *inbox) close() { b.set(&b.closed) }

func (b *inbox) set(what *bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	*what = true
	b.more.Broadcast()
}

// tail keeps the end of what a worker logs.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 1 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	t.buf = t.buf[max(0, len(t.buf)-tailBytes):]
	return len(p), nil
}

// last is what was logged, to go on a sentence with.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := strings.TrimSpace(string(t.buf))
	if text == "" {
		return ""
	}
	return ": " + text
}
