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

// claimName is a named pipe, which goes with the process that has made it.
const claimName = `\\.\pipe\slipstream-run`

// claimTime bounds how long a process takes to answer a claim, and to give way to it.
const claimTime = 5 * time.Second

// askTime bounds how long a process that asks may take. It is shorter than claimTime, because the pipe has one
// instance: after a silent process, the next one still gets its answer.
const askTime = time.Second

// claimRights lets this user, administrators and the system use the pipe, and nobody else.
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
		// A wait may end a moment before the deadline, because it is in whole milliseconds.
		case errors.Is(askErr, os.ErrDeadlineExceeded), askErr != nil && !time.Now().Before(deadline):
			return fmt.Errorf("claim this host: ask who holds it: %w", askErr)
		case askErr == nil && holder != "":
			return fmt.Errorf("another run (%s) is in progress on this host, and the two would disturb each other: wait for it, or stop it", holder)
		case !time.Now().Before(deadline):
			return fmt.Errorf("claim this host: its former worker has not ended after %s", claimTime)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells when the name of a pipe is free
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

// newClaim makes the pipe. Another process must not have one of its name.
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

// askClaim returns who holds the host. It returns "" if the holder belongs to the same run, and so gives way. The
// holder may be any process that took the name first: it learns who asks, and cannot act as that user.
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
	// A process that has hung up needs no answer. One that has its answer hangs up; if this end closed first,
	// what the other has not read yet would be lost.
	_, _ = fmt.Fprintln(c, who)
	_, _ = c.Read(make([]byte, 1))
	return same
}

// pipeEnd is an end of a pipe that is used until a deadline. It does not own the handle.
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

// overlapped begins an operation, waits for its end, and cancels it after a time in milliseconds.
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
		_ = windows.CancelIoEx(h, o) // it fails for one that has just ended
	}
	var n uint32
	err = windows.GetOverlappedResult(h, o, &n, true) // the system is done with the buffer after that alone
	return int(n), err
}
