package worker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/windows"
)

// claimName is a named pipe, which goes with the process that has made it.
const claimName = `\\.\pipe\slipstream-run`

// claimTime bounds how long a claim takes to be answered, and a process to give way.
const claimTime = 5 * time.Second

// Claim makes a run the only one that measures on this machine, as two would measure each other. run
// identifies it, and who describes it to the user of another run. If the controller of the same run has lost
// its connection to this process, it starts another one, whose claim calls yield here and takes over. The
// claim ends with the process.
//
// By default, a named pipe takes what its own user and administrators write, and nobody else.
func Claim(run, who string, yield func()) error {
	pipe, err := newClaim()
	for deadline := time.Now().Add(claimTime); errors.Is(err, windows.ERROR_ACCESS_DENIED) || errors.Is(err, windows.ERROR_PIPE_BUSY); {
		holder, askErr := askClaim(run)
		switch {
		case errors.Is(askErr, windows.ERROR_ACCESS_DENIED):
			return errors.New("another user's run is in progress on this host, and each would measure the other: wait for it")
		case askErr != nil && !time.Now().Before(deadline):
			return fmt.Errorf("claim this host: ask who holds it: %w", askErr)
		case askErr == nil && holder != "":
			return fmt.Errorf("another run (%s) is in progress on this host, and each would measure the other: wait for it, or stop it", holder)
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

func newClaim() (windows.Handle, error) {
	name, err := windows.UTF16PtrFromString(claimName)
	if err != nil {
		return 0, err
	}
	return windows.CreateNamedPipe(name, windows.PIPE_ACCESS_DUPLEX|windows.FILE_FLAG_FIRST_PIPE_INSTANCE,
		windows.PIPE_TYPE_BYTE|windows.PIPE_REJECT_REMOTE_CLIENTS, 1, 256, 256, 0, nil)
}

// askClaim returns who holds the host; "" if that is the same run, whose process ends its claim.
func askClaim(run string) (string, error) {
	pipe, err := os.OpenFile(claimName, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer pipe.Close()
	_, sendErr := fmt.Fprintln(pipe, run)
	who, err := bufio.NewReader(io.LimitReader(pipe, 256)).ReadString('\n')
	if err != nil {
		return "", errors.Join(sendErr, err)
	}
	return strings.TrimSpace(who), nil
}

// answerClaim answers the next who asks, and tells whether it is the same run.
func answerClaim(pipe windows.Handle, run, who string) (same bool) {
	if err := windows.ConnectNamedPipe(pipe, nil); err != nil && !errors.Is(err, windows.ERROR_PIPE_CONNECTED) {
		return false
	}
	asks, err := bufio.NewReader(io.LimitReader(handleReader(pipe), 256)).ReadString('\n')
	if err != nil {
		return false
	}
	if strings.TrimSpace(asks) == run {
		same, who = true, ""
	}
	var n uint32
	_ = windows.WriteFile(pipe, []byte(who+"\n"), &n, nil) // one that has hung up needs no answer
	_ = windows.FlushFileBuffers(pipe)
	return same
}

// handleReader reads a pipe that this process goes on using: an os.File would close it.
type handleReader windows.Handle

func (h handleReader) Read(b []byte) (int, error) {
	var n uint32
	err := windows.ReadFile(windows.Handle(h), b, &n, nil)
	return int(n), err
}
