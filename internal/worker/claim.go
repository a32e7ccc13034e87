//go:build linux

package worker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// claimName and controlName are abstract sockets: they are in no file system, and go with the process that listens.
const claimName, controlName = "@slipstream/run", "@slipstream/control"

// claimTime bounds how long a process takes to answer a claim, and to give way to it. A worker for control has
// controlTime, because it reverts what it applied first.
const claimTime, controlTime = 5 * time.Second, 20 * time.Second

// Claim reserves this network namespace for one run, because two runs would disturb each other. run identifies the run,
// and who describes it to the user of another run. A controller that has lost its connection to this process starts
// another worker, whose claim calls yield here and takes over. The claim ends with the process, or with release. A
// worker for control has a separate claim, which only ends with the process, so that its successor does not measure
// while it still holds settings. It may even belong to another run, which has lost its claim to the host.
//
// Anybody with a shell here can connect to the socket, and can read run among the arguments of the process. So a claim
// only yields to this process's own user.
func Claim(control bool, run, who string, yield func()) (release func(), err error) {
	name, limit := claimName, claimTime
	if control {
		name, limit = controlName, controlTime
	}
	listener, err := net.Listen("unix", name)
	for deadline := time.Now().Add(limit); errors.Is(err, syscall.EADDRINUSE); {
		holder, askErr := askClaim(name, run)
		switch {
		case askErr != nil && !time.Now().Before(deadline):
			return nil, fmt.Errorf("claim this host: ask who holds it: %w", askErr)
		case askErr == nil && holder != "" && !control:
			return nil, fmt.Errorf("another run (%s) is in progress on this host, and the two would disturb each other: wait for it, or stop it", holder)
		case !time.Now().Before(deadline):
			return nil, fmt.Errorf("claim this host: its former worker has not ended after %s", limit)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells when an abstract socket is free
		listener, err = net.Listen("unix", name)
	}
	if err != nil {
		return nil, fmt.Errorf("claim this host: %w", err)
	}
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			answerClaim(c, run, who, func() {
				if !control {
					listener.Close()
				}
				yield()
			})
		}
	}()
	return func() { listener.Close() }, nil
}

// askClaim returns who holds the host. It returns "" if the holder belongs to the same run, and so gives way.
func askClaim(name, run string) (string, error) {
	c, err := net.DialTimeout("unix", name, claimTime)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(claimTime)); err != nil {
		return "", err
	}
	// A process of another user answers without listening, and may have hung up.
	_, sendErr := fmt.Fprintln(c, run)
	who, err := bufio.NewReader(io.LimitReader(c, 256)).ReadString('\n')
	if err != nil {
		return "", errors.Join(sendErr, err)
	}
	return strings.TrimSpace(who), nil
}

// answerClaim lets only its own user speak. It tells others who holds the host, without waiting for them.
func answerClaim(c net.Conn, run, who string, yield func()) {
	defer c.Close()
	if user, err := peerOf(c); err != nil || user != os.Getuid() {
		fmt.Fprintln(c, who)
		return
	}
	if err := c.SetDeadline(time.Now().Add(claimTime)); err != nil {
		return
	}
	asks, err := bufio.NewReader(io.LimitReader(c, 256)).ReadString('\n')
	switch {
	case err != nil:
	case strings.TrimSpace(asks) == run:
		fmt.Fprintln(c)
		yield()
	default:
		fmt.Fprintln(c, who)
	}
}

// peerOf returns the user at the other end of a Unix socket.
func peerOf(c net.Conn) (user int, err error) {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { peer, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, credErr); err != nil {
		return 0, err
	}
	return int(peer.Uid), nil
}
