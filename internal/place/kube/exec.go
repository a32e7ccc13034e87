package kube

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"

	"slipstream.dev/internal/place"
)

// Stream connects to the standard input and output of a worker in a pod. Close ends the worker's input,
// on which it reverts what it applied and exits; Wait waits for that.
type Stream struct {
	pods *Pods
	pod  *corev1.Pod

	in     *io.PipeWriter
	out    inbox
	stderr place.Tail

	cancel context.CancelFunc
	done   chan struct{}
	err    error // once done
}

// Open starts a worker for one use of a place, and returns the stream to it. If connecting to the
// worker fails, Retry says whether to try again.
//
// The end of a connection may never reach a pod. So a worker ends if it hears nothing for some time, and one for control waits
// for its predecessor to end: that may still hold settings.
func (p *Pods) Open(at place.Place, use place.Use) (*Stream, error) {
	argv := []string{"worker", "--remote"}
	var pod *corev1.Pod
	switch {
	case use == place.ForControl:
		pod = p.control[at.Name]
		argv = append(argv, "--control", "--claim", p.id+"/"+holder())
		if at.Kind == place.Pod {
			address := at.IPv4
			if !address.IsValid() {
				address = at.IPv6
			}
			argv = append(argv, "--pod", address.String())
		}
	case at.Kind == place.Node:
		pod = p.host[at.StandsFor]
	default:
		pod = p.traffic[at.Name]
	}
	if pod == nil {
		return nil, fmt.Errorf("%s has no pod for %s", at.Name, use)
	}
	if err := p.isLost(pod); err != nil {
		return nil, err
	}
	return p.exec(pod, argv...), nil
}

// Retry waits a moment after connecting to a worker failed, and returns nil if another attempt makes
// sense.
func (s *Stream) Retry(ctx context.Context, err error) error {
	if s.final() || errors.Is(err, place.ErrLost) {
		return err
	}
	if err := s.pods.unanswered(s.pod, err); errors.Is(err, place.ErrLost) {
		return err
	}
	if pause(ctx) != nil {
		return err
	}
	return nil
}

// Connected records that the worker answers.
func (s *Stream) Connected() { s.pods.answered(s.pod) }

// exec starts the program in a pod with other arguments.
func (p *Pods) exec(pod *corev1.Pod, arguments ...string) *Stream {
	argv := append([]string{programOf(pod)}, arguments...)
	ctx, cancel := context.WithCancel(context.Background())
	in, w := io.Pipe()
	s := &Stream{pods: p, pod: pod, in: w, cancel: cancel, done: make(chan struct{})}
	s.out.init(cancel)
	go func() {
		defer close(s.done)
		defer cancel()
		s.err = p.cluster.stream(ctx, pod, argv, in, &s.out, &s.stderr)
		_ = w.Close() // a reader gets io.EOF, not an error that would be reported
		s.out.end()
	}()
	return s
}

// stream runs a command in a pod until it ends.
func (c *Cluster) stream(ctx context.Context, pod *corev1.Pod, argv []string, in io.Reader, out, stderr io.Writer) error {
	url := c.api.Exec(pod, &corev1.PodExecOptions{
		Container: container, Command: argv, Stdin: true, Stdout: true, Stderr: true,
	})
	// Like kubectl: WebSocket, or SPDY if a server or proxy lacks it.
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

// Close ends the worker's input and discards its output.
func (s *Stream) Close() error {
	s.out.close()
	return s.in.Close()
}

// exitTime bounds how long a worker may take to revert and exit once its input has ended.
const exitTime = 20 * time.Second

// Wait waits for the worker to exit, after Close. It gives up after exitTime: the worker ends with its
// pod.
func (s *Stream) Wait() error {
	timer := time.NewTimer(exitTime)
	defer timer.Stop()
	select {
	case <-s.done:
		return s.ended()
	case <-timer.C:
		s.cancel()
		return fmt.Errorf("the worker in pod %s/%s has not exited after %s", s.pod.Namespace, s.pod.Name, exitTime)
	}
}

// ended returns how the command ended, nil if successfully. If the stream broke, that is unknown.
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
		return fmt.Errorf("the worker in pod %s/%s ended with %s%s", s.pod.Namespace, s.pod.Name, exitWord(exit.Code), s.stderr.Last())
	}
	headline := cmp.Or(notStarted(s.pod, s.err), fmt.Sprintf("exec in pod %s/%s", s.pod.Namespace, s.pod.Name))
	return execError{fmt.Errorf("%s: %w%s", headline, s.err, s.stderr.Last())}
}

// execError means that a command was not started in a pod, or that the stream to it broke.
type execError struct{ error }

func exitWord(code int) string {
	if code > 128 {
		return fmt.Sprintf("signal %d", code-128)
	}
	return fmt.Sprintf("exit code %d", code)
}

// final reports whether another attempt would end the same way: the program is missing, may not be
// started, or exited with an error.
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
	return s.err != nil && (execForbidden(s.err) || strings.Contains(s.err.Error(), "executable file not found") || strings.Contains(s.err.Error(), "no such file or directory") || strings.Contains(s.err.Error(), "cannot find the file"))
}

// Why says why the stream ended too early: because the worker exited, or because the connection broke.
func (s *Stream) Why() error {
	if s.out.isOverrun() {
		return fmt.Errorf("pod %s/%s: %w", s.pod.Namespace, s.pod.Name, errNotWorker)
	}
	select {
	case <-s.done:
	case <-time.After(time.Second): // neither an answer nor an end
		return s.pods.diagnose(context.Background(), s.pod, errors.New("its worker does not answer"))
	}
	if exit := new(utilexec.CodeExitError); s.err == nil || errors.As(s.err, exit) {
		if err := s.ended(); err != nil {
			return err
		}
		return fmt.Errorf("the worker in pod %s/%s exited unexpectedly", s.pod.Namespace, s.pod.Name)
	}
	return s.pods.diagnose(context.Background(), s.pod, s.err)
}

// inbox buffers a worker's output until it is read. It never blocks, so that a worker whose reader is
// gone can exit. gRPC's windows bound how much a worker sends before it is read. A program that sends more is not a worker.
type inbox struct {
	mu            sync.Mutex
	more          *sync.Cond
	buf           bytes.Buffer
	ended, closed bool   // by the writer, by the reader
	overrun       bool   // more than maxInbox was unread
	abort         func() // is called then
}

// maxInbox is twice gRPC's largest window.
const maxInbox = 32 << 20

// errNotWorker is returned for a program in a pod that does not keep to the protocol.
var errNotWorker = fmt.Errorf("it has sent more than %d MiB that nobody read: it is not a worker", maxInbox>>20)

func (b *inbox) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.overrun:
		return 0, errNotWorker
	case b.closed:
	case b.buf.Len()+len(p) > maxInbox:
		b.overrun, b.ended, b.buf = true, true, bytes.Buffer{}
		b.more.Broadcast()
		b.abort()
		return 0, errNotWorker
	default:
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

func (b *inbox) init(abort func()) { b.more, b.abort = sync.NewCond(&b.mu), abort }

func (b *inbox) isOverrun() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.overrun
}

func (b *inbox) end()   { b.set(&b.ended) }
func (b *inbox) close() { b.set(&b.closed) }

func (b *inbox) set(what *bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	*what = true
	b.more.Broadcast()
}
