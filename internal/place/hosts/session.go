package hosts

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"slipstream.dev/internal/place"
)

// session is a command on a host, run by an ssh process of its own. Once the command has become a worker, the session is the
// stream to it.
type session struct {
	at  *host
	cmd *exec.Cmd
	// detached means that ssh leads its own process group, shared that its connection is to be shared.
	detached, shared bool
	// begun means that the command is running, and so that the connection is established.
	begun  atomic.Bool
	mark   string
	in     io.WriteCloser
	out    *bufio.Reader
	pipe   io.Closer // the pipe below out
	stderr place.Tail
	done   chan struct{}
	err    error // valid once done is closed
	// printed is the beginning of the output that is not a report. between is such output between the last two reports.
	printed string
	between strings.Builder
}

// scriptTime limits how long a host may take to begin a script, and a script to report. It is long because a login or sudo may
// wait for a directory service.
var scriptTime = time.Minute

// within ends ssh when ctx ends or limit has passed, unless stop is called first. If limit has passed, the cause of the
// returned context is an error with the hint.
func (s *session) within(ctx context.Context, limit time.Duration, hint string) (_ context.Context, stop func()) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("host %s has not answered within %s%s", s.at.name, limit, hint))
	keep := context.AfterFunc(ctx, s.end)
	return ctx, func() {
		keep()
		cancel()
	}
}

// request is a command line for a host, and the beginning of its standard input.
type request struct{ command, input string }

// busyWaits are the pauses before further attempts if the host's SSH server, or one on the way, hung up before it identified
// itself. A server does that while many logins are in progress (MaxStartups of sshd_config).
var busyWaits = []time.Duration{time.Second, 3 * time.Second}

// open runs on the host what request returns for a mark, and returns once that reports "begin".
func (h *host) open(ctx context.Context, request func(mark string) request) (*session, error) {
	for _, wait := range busyWaits {
		s, err := h.attemptVerbosely(ctx, request)
		if !errors.As(err, new(hungUpError)) {
			return s, err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		}
	}
	return h.attemptVerbosely(ctx, request)
}

// attemptVerbosely makes an attempt. If that fails and ssh gave no reason, it makes another one without a shared connection,
// which shows what the proxy command prints, and with a higher log level, which shows what the server says before it hangs up.
func (h *host) attemptVerbosely(ctx context.Context, request func(mark string) request) (*session, error) {
	s, err := h.attempt(ctx, request)
	if !errors.As(err, new(unexplainedError)) {
		return s, err
	}
	verbose := &host{name: h.name, spec: h.spec, all: h.all, configured: h.configured, link: link{made: true, asked: true}, verbose: true}
	return verbose.attempt(ctx, request)
}

// attempt is open for one connection. It waits while too many others are being made.
func (h *host) attempt(ctx context.Context, request func(mark string) request) (*session, error) {
	select {
	case h.all.dialing <- struct{}{}:
		defer func() { <-h.all.dialing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	h.share(ctx)
	s := &session{at: h, mark: "slipstream-" + rand.Text(), done: make(chan struct{})}
	limit := scriptTime
	if h.ask() {
		limit = askTime
	}
	if err := s.start(request(s.mark)); err != nil {
		return nil, err
	}
	ctx, stop := s.within(ctx, limit, " (does a start-up file of the login shell ask something, or wait for a server?)")
	defer stop()
	word, _, err := s.next(ctx)
	if err == nil && word != "begin" {
		err = unexpected(h.name, word)
	}
	if err == nil {
		err = h.keep()
	}
	if err != nil {
		s.end()
		return nil, err
	}
	s.begun.Store(true)
	return s, nil
}

func (s *session) start(r request) error {
	h := s.at
	ask := h.ask()
	s.cmd = exec.Command("ssh", slices.Concat(h.unblocked(), h.arguments(ask), []string{r.command})...)
	if ask {
		h.link.asked = true
	} else {
		detach(s.cmd)
	}
	s.detached, s.shared = !ask, h.link.socket != ""
	s.cmd.Stderr = &s.stderr
	s.cmd.WaitDelay = time.Second // a proxy command may have inherited the pipe
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return notStarted(err)
	}
	out, theirs, err := os.Pipe() // not StdoutPipe, which Wait would close
	if err != nil {
		return notStarted(err)
	}
	defer theirs.Close()
	s.cmd.Stdout, s.in, s.out, s.pipe = theirs, in, bufio.NewReader(out), out
	if err := h.all.config.begin(s.cmd); err != nil {
		out.Close()
		return notStarted(err)
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.done)
	}()
	_, _ = io.WriteString(in, r.input) // the command reports errors
	return nil
}

// end ends ssh and what it has started, and so the command's input. It spares the proxy command of a shared connection. It
// closes the output, because the process that holds such a connection keeps it open until the host answers, which may be never.
func (s *session) end() {
	end(s.cmd, s.detached && !(s.shared && s.begun.Load()))
	s.pipe.Close()
}

// maxPrinted limits what start-up files may print before a report, in bytes.
const maxPrinted = 1 << 20

// report returns the first word of the script's next report, and the rest.
func (s *session) report(ctx context.Context) (word, rest string, err error) {
	ctx, stop := s.within(ctx, scriptTime, "")
	defer stop()
	return s.next(ctx)
}

func (s *session) next(ctx context.Context) (word, rest string, err error) {
	s.between.Reset()
	for read := 0; read < maxPrinted; {
		part, err := s.out.ReadSlice('\n') // a part of a line, if that is longer than the buffer
		line := string(part)
		read += len(part)
		// What start-up files print before a report need not end with a newline.
		if _, text, ok := strings.Cut(line, s.mark+" "); ok && err == nil {
			word, rest, _ = strings.Cut(strings.TrimRight(text, "\r\n"), " ")
			return word, strings.TrimSpace(rest), nil
		}
		if len(s.printed) < 200 {
			s.printed += line
		}
		s.between.WriteString(line)
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
		return fmt.Errorf("host %s: its first worker has ended", s.at.name)
	case got != word:
		return unexpected(s.at.name, got)
	}
	return nil
}

// notRunError means that the host answers but did not run a script.
type notRunError struct{ error }

// silent returns why there was no report: ssh did not connect, the host did not run the script, or the script failed.
func (s *session) silent(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ended := s.settle()
	printed, exit, code := strings.TrimSpace(s.printed), s.exit(), ""
	if exit > 0 {
		code = fmt.Sprintf(" (exit code %d)", exit)
	}
	switch {
	case exit == sshFailed && !s.begun.Load() && printed == "":
		return s.at.unreachable(s.stderr.Last())
	case exit == sshFailed && s.begun.Load(), exit < 0 && ended:
		return s.broken()
	case exit > 0 && expired.MatchString(s.said()):
		return refusedError{fmt.Errorf("host %s runs nothing until the user's password there is changed%s Log in once with %s and change it", s.at.name, s.said(), s.at.byHand())}
	case exit > 0 && printed == "" && s.said() != "":
		return notRunError{fmt.Errorf("host %s does not run the command that it is sent%s%s. A worker needs a login that runs commands", s.at.name, code, s.said())}
	}
	return notRunError{fmt.Errorf("host %s does not run the command that it is sent; it printed %q%s%s. Does the key have a forced command (command= in authorized_keys, ForceCommand in sshd_config), or the user no shell? A worker needs a login that runs commands",
		s.at.name, clip(printed), code, s.said())}
}

// expired matches what OpenSSH's server prints if a password has expired.
var expired = regexp.MustCompile(`[Pp]assword change required`)

// sshFailed is the exit code of ssh if ssh itself has failed, not the command.
const sshFailed = 255

// exit returns the exit code of a session that is done, or -1 if ssh was killed.
func (s *session) exit() int {
	if failed := new(exec.ExitError); errors.As(s.err, &failed) {
		return failed.ExitCode()
	}
	return 0
}

// said returns the error output of ssh and the command, for the end of a sentence. It leaves out that a server allows no more
// sessions in a connection.
func (s *session) said() string {
	var all []string
	for line := range strings.Lines(s.stderr.Last()) {
		text := strings.TrimPrefix(line, ": ")
		if !strings.HasPrefix(text, refusedSession) && !strings.HasPrefix(text, "ControlSocket ") {
			all = append(all, text)
		}
	}
	return oneLine(strings.Join(all, ""))
}

// oneLine joins the lines of what ssh or a host has printed, for the end of a sentence.
func oneLine(text string) string {
	var lines []string
	for line := range strings.FieldsFuncSeq(strings.TrimPrefix(text, ": "), func(r rune) bool { return r == '\n' || r == '\r' }) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "@@@") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		return ""
	}
	return ": " + strings.Join(lines, "; ")
}

// settle waits a moment for a command whose output has ended to exit, and otherwise ends it. It reports whether the command has
// exited by itself.
func (s *session) settle() bool {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-s.done:
		return true
	case <-timer.C:
		s.end()
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

// brokenConnection means that ssh itself has ended, not the command.
type brokenConnection struct{ error }

func (s *session) broken() error {
	return brokenConnection{fmt.Errorf("the connection to host %s broke%s", s.at.name, s.said())}
}

func (s *session) Read(b []byte) (int, error)  { return s.out.Read(b) }
func (s *session) Write(b []byte) (int, error) { return s.in.Write(b) }

// Close closes the worker's input. The worker then reverts what it has applied, and exits. After exitTime, Close ends the
// connection, because gRPC waits for the end of the output.
func (s *session) Close() error {
	time.AfterFunc(exitTime, s.end)
	err := s.in.Close()
	if errors.Is(err, os.ErrClosed) { // it has ended by itself
		return nil
	}
	return err
}

// exitTime limits how long a worker may take to revert and exit after the end of its input.
const exitTime = 20 * time.Second

// Wait waits, after Close, for the worker to exit. A broken connection is no error: the run restores in the end what the worker
// did not revert.
func (s *session) Wait() error {
	defer s.end()
	timer := time.NewTimer(exitTime)
	defer timer.Stop()
	select {
	case <-s.done:
		if err := s.ended(); !errors.As(err, new(brokenConnection)) {
			return err
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("the worker on host %s has not exited after %s", s.at.name, exitTime)
	}
}

// ended returns nil if the worker exited successfully, or how it ended. The exit code of ssh does not tell a killed worker from
// a broken connection.
func (s *session) ended() error {
	switch exit := s.exit(); exit {
	case 0:
		return nil
	case -1, sshFailed:
		return s.broken()
	default:
		return fmt.Errorf("the worker on host %s ended with exit code %d%s", s.at.name, exit, s.said())
	}
}

// Why says why the stream ended too early.
func (s *session) Why() error {
	if !s.settle() { // ssh had neither output nor an end
		return fmt.Errorf("host %s does not answer", s.at.name)
	}
	if err := s.ended(); err != nil {
		return err
	}
	return fmt.Errorf("the worker on host %s exited unexpectedly%s", s.at.name, s.said())
}
