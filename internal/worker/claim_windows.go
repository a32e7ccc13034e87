package worker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

// claimName is a named pipe, which ends with the process that made it.
const claimName = `\\.\pipe\slipstream-run`

// claimTime limits how long a process may take to answer a claim and to give way.
const claimTime = 5 * time.Second

// askTime limits how long a process that asks may take. The pipe has only one instance, so it is shorter than claimTime: after
// a silent process, the next one still gets an answer in time.
const askTime = time.Second

// claimRights lets only this user, administrators and the system use the pipe.
const claimRights = "D:P(A;;GA;;;OW)(A;;GA;;;BA)(A;;GA;;;SY)"

// Claim reserves this machine for one run, because two runs would disturb each other. run identifies the run, and who
// describes it to the user of another run. A controller that has lost its connection to this process starts another
// worker, whose claim calls yield here and takes over. The claim ends with the process.
func Claim(run, who string, yield func()) error {
	deadline := time.Now().Add(claimTime)
	pipe, err := newClaim()
	for errors.Is(err, windows.ERROR_ACCESS_DENIED) || errors.Is(err, windows.ERROR_PIPE_BUSY) {
		holder, askErr := askClaim(run, deadline)
		switch {
		case errors.Is(askErr, windows.ERROR_ACCESS_DENIED):
			return errors.New("another user's run is in progress on this host, and the two would disturb each other: wait for it")
		// Waits are in whole milliseconds, so one may end just before the deadline.
		case errors.Is(askErr, os.ErrDeadlineExceeded), askErr != nil && !time.Now().Before(deadline):
			return fmt.Errorf("claim this host: ask who holds it: %w", askErr)
		case askErr == nil && holder != "":
			return fmt.Errorf("another run (%s) is in progress on this host, and the two would disturb each other: wait for it, or stop it", holder)
		case !time.Now().Before(deadline):
			return fmt.Errorf("claim this host: its previous worker has not ended after %s", claimTime)
		}
		time.Sleep(20 * time.Millisecond) // there is no notification when the name of a pipe becomes free
		pipe, err = newClaim()
	}
	if err != nil {
		return fmt.Errorf("claim this host: %w", err)
	}
	go func() {
		for !answerClaim(pipe, run, who) {
			_ = windows.DisconnectNamedPipe(pipe)
		}
		_ = windows.CloseHandle(pipe)
		yield()
	}()
	return nil
}

// newClaim makes the pipe. It fails if another process has one of that name.
func newClaim() (windows.Handle, error) {
	rights, err := windows.SecurityDescriptorFromString(claimRights)
	if err != nil {
		return 0, fmt.Errorf("parse the rights of a pipe: %w", err)
	}
	security := &windows.SecurityAttributes{SecurityDescriptor: rights}
	security.Length = uint32(unsafe.Sizeof(*security))
	return windows.CreateNamedPipe(windows.StringToUTF16Ptr(claimName),
		windows.PIPE_ACCESS_DUPLEX|windows.FILE_FLAG_FIRST_PIPE_INSTANCE|windows.FILE_FLAG_OVERLAPPED,
		windows.PIPE_TYPE_BYTE|windows.PIPE_REJECT_REMOTE_CLIENTS, 1, 256, 256, 0, security)
}

// askClaim returns who holds the host, or "" if the holder belongs to the same run and gives way. The holder may be any process
// that took the name first: it may learn who asks, but not act as that user.
func askClaim(run string, deadline time.Time) (string, error) {
	pipe, err := windows.CreateFile(windows.StringToUTF16Ptr(claimName), windows.GENERIC_READ|windows.GENERIC_WRITE, 0, nil, windows.OPEN_EXISTING,
		windows.FILE_FLAG_OVERLAPPED|windows.SECURITY_SQOS_PRESENT|windows.SECURITY_IDENTIFICATION, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = windows.CloseHandle(pipe) }()
	c := pipeEnd{pipe, deadline}
	_, sendErr := fmt.Fprintln(c, run)
	who, err := bufio.NewReader(io.LimitReader(c, 256)).ReadString('\n')
	if err != nil {
		return "", errors.Join(sendErr, err)
	}
	return strings.TrimSpace(who), nil
}

// answerClaim answers the next process that asks, and reports whether it belongs to the same run.
func answerClaim(pipe windows.Handle, run, who string) (same bool) {
	_, err := overlapped(pipe, windows.INFINITE, func(o *windows.Overlapped) error { return windows.ConnectNamedPipe(pipe, o) })
	if err != nil && !errors.Is(err, windows.ERROR_PIPE_CONNECTED) {
		return false
	}
	c := pipeEnd{pipe, time.Now().Add(askTime)}
	asks, err := bufio.NewReader(io.LimitReader(c, 256)).ReadString('\n')
	if err != nil {
		return false
	}
	if strings.TrimSpace(asks) == run {
		same, who = true, ""
	}
	// An error means that the other process is gone. Wait until it has closed its end: closing this one first would discard an
	// answer that it has not read yet.
	_, _ = fmt.Fprintln(c, who)
	_, _ = c.Read(make([]byte, 1))
	return same
}

// pipeEnd reads and writes one end of a pipe until a deadline. It does not own the handle.
type pipeEnd struct {
	handle   windows.Handle
	deadline time.Time
}

func (p pipeEnd) Read(b []byte) (int, error) {
	return p.move(func(o *windows.Overlapped) error { return windows.ReadFile(p.handle, b, nil, o) })
}

func (p pipeEnd) Write(b []byte) (int, error) {
	return p.move(func(o *windows.Overlapped) error { return windows.WriteFile(p.handle, b, nil, o) })
}

func (p pipeEnd) move(begin func(*windows.Overlapped) error) (int, error) {
	n, err := overlapped(p.handle, uint32(max(0, time.Until(p.deadline).Milliseconds())), begin)
	if errors.Is(err, windows.ERROR_OPERATION_ABORTED) {
		err = fmt.Errorf("the other end of %s: %w", claimName, os.ErrDeadlineExceeded)
	}
	return n, err
}

// overlapped begins an operation and waits for its end. It cancels the operation after limit, in milliseconds.
func overlapped(h windows.Handle, limit uint32, begin func(*windows.Overlapped) error) (int, error) {
	event, err := windows.CreateEvent(nil, 1, 0, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = windows.CloseHandle(event) }()
	o := &windows.Overlapped{HEvent: event}
	if err := begin(o); err != nil && !errors.Is(err, windows.ERROR_IO_PENDING) {
		return 0, err
	}
	if got, _ := windows.WaitForSingleObject(event, limit); got != windows.WAIT_OBJECT_0 {
		_ = windows.CancelIoEx(h, o) // it fails if the operation has just ended
	}
	var n uint32
	err = windows.GetOverlappedResult(h, o, &n, true) // only now is the system done with the buffer
	return int(n), err
}
