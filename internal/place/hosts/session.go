package hosts

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"slipstream.dev/internal/place"
)

// session is a command on a host, in a connection of its own. If the command has become a worker, the
// session is the stream to it.
type session struct {
	host   string
	client *ssh.Client
	mark   string
	in     io.WriteCloser
	out    *bufio.Reader
	stderr place.Tail
	done   chan struct{}
	err    error // once done
	// printed is the beginning of the output that is not a report.
	printed string
}

// scriptTime bounds how long a host takes to begin a script, and the script to report: a login or sudo may
// wait for a directory service.
var scriptTime = time.Minute

// within closes the connection when ctx ends or limit has passed, unless stop is called before. The cause of
// the context is the reason.
func within(ctx context.Context, limit time.Duration, host string, client *ssh.Client) (_ context.Context, stop func()) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("host %s has not answered within %s", host, limit))
	keep := context.AfterFunc(ctx, func() { client.Close() })
	return ctx, func() {
		keep()
		cancel()
	}
}

// open runs a command that reports with a mark.
func open(host string, client *ssh.Client, script func(mark string) string) (*session, error) {
	s := &session{host: host, client: client, mark: "slipstream-" + rand.Text(), done: make(chan struct{})}
	run, err := client.NewSession()
	if err != nil {
		return nil, fmt.Errorf("host %s: open a session: %w", host, err)
	}
	run.Stderr = &s.stderr
	if s.in, err = run.StdinPipe(); err != nil {
		return nil, fmt.Errorf("host %s: open a session: %w", host, err)
	}
	out, err := run.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("host %s: open a session: %w", host, err)
	}
	s.out = bufio.NewReader(out)
	if err := run.Start(script(s.mark)); err != nil {
		return nil, fmt.Errorf("host %s: run a command: %w", host, err)
	}
	go func() {
		s.err = run.Wait()
		close(s.done)
	}()
	return s, nil
}

// maxPrinted bounds what start-up files may print before a script reports, in lines.
const maxPrinted = 1000

// report returns the script's next word and what follows it.
func (s *session) report(ctx context.Context) (word, rest string, err error) {
	ctx, stop := within(ctx, scriptTime, s.host, s.client)
	defer stop()
	for range maxPrinted {
		part, err := s.out.ReadSlice('\n') // of a line that is longer than the buffer
		line := string(part)
		if text, ok := strings.CutPrefix(line, s.mark+" "); ok && err == nil {
			word, rest, _ = strings.Cut(strings.TrimRight(text, "\r\n"), " ")
			return word, strings.TrimSpace(rest), nil
		}
		if len(s.printed) < 200 {
			s.printed += line
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return "", "", s.silent(ctx)
		}
	}
	return "", "", s.silent(ctx)
}

// expect reads the next report, which must begin with word.
func (s *session) expect(ctx context.Context, word string) error {
	got, _, err := s.report(ctx)
	switch {
	case err != nil:
		return err
	case got == "gone":
		return fmt.Errorf("host %s: its first worker has ended", s.host)
	case got != word:
		return unexpected(s.host, got)
	}
	return nil
}

// silent returns why a script did not report: it was not run, or it failed.
func (s *session) silent(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ended := s.settle()
	printed := strings.TrimSpace(s.printed)
	exit, code := new(ssh.ExitError), ""
	failed := errors.As(s.err, &exit)
	if failed {
		code = fmt.Sprintf(" (exit code %d)", exit.ExitStatus())
	}
	switch {
	case failed && printed == "" && s.stderr.Last() != "":
		return fmt.Errorf("host %s: the command for a worker failed%s%s", s.host, code, s.stderr.Last())
	case !ended, s.err == nil, failed:
		return fmt.Errorf("host %s does not run the command that it is sent; it printed %q%s%s. Does the key have a forced command (command= in authorized_keys, ForceCommand in sshd_config), or the user no shell? A worker needs a login that runs commands",
			s.host, clip(printed), code, s.stderr.Last())
	}
	return s.broken()
}

// settle waits a moment for the end of a command whose output has ended, and then ends it. It reports
// whether the command ended by itself.
func (s *session) settle() bool {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-s.done:
		return true
	case <-timer.C:
		s.client.Close()
		<-s.done
		return false
	}
}

func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}

func (s *session) broken() error {
	if missing := new(ssh.ExitMissingError); errors.As(s.err, &missing) { // it says no more than that
		return fmt.Errorf("the connection to host %s broke%s", s.host, s.stderr.Last())
	}
	return fmt.Errorf("the connection to host %s broke: %w%s", s.host, s.err, s.stderr.Last())
}

func (s *session) Read(b []byte) (int, error)  { return s.out.Read(b) }
func (s *session) Write(b []byte) (int, error) { return s.in.Write(b) }

// Close ends the worker's input, on which it reverts what it applied and exits. If it has not exited after
// exitTime, the connection ends: gRPC waits for the end of what it reads.
func (s *session) Close() error {
	time.AfterFunc(exitTime, func() { s.client.Close() })
	err := s.in.Close()
	if errors.Is(err, io.EOF) { // it has ended by itself
		return nil
	}
	return err
}

// exitTime bounds how long a worker may take to revert and exit once its input has ended.
const exitTime = 20 * time.Second

// Wait waits for the worker to exit, after Close, and closes the connection.
func (s *session) Wait() error {
	defer s.client.Close()
	timer := time.NewTimer(exitTime)
	defer timer.Stop()
	select {
	case <-s.done:
		return s.ended()
	case <-timer.C:
		return fmt.Errorf("the worker on host %s has not exited after %s", s.host, exitTime)
	}
}

// ended returns how the worker ended, nil if successfully.
func (s *session) ended() error {
	exit := new(ssh.ExitError)
	switch {
	case s.err == nil:
		return nil
	case errors.As(s.err, &exit) && exit.Signal() != "":
		return fmt.Errorf("the worker on host %s ended by signal %s%s", s.host, exit.Signal(), s.stderr.Last())
	case errors.As(s.err, &exit):
		return fmt.Errorf("the worker on host %s ended with exit code %d%s", s.host, exit.ExitStatus(), s.stderr.Last())
	}
	return s.broken()
}

// Why says why the stream ended too early.
func (s *session) Why() error {
	if !s.settle() { // neither an answer nor an end
		return fmt.Errorf("host %s does not answer", s.host)
	}
	if err := s.ended(); err != nil {
		return err
	}
	return fmt.Errorf("the worker on host %s exited unexpectedly%s", s.host, s.stderr.Last())
}
