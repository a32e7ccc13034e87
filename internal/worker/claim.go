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

// claimName and controlName are abstract sockets: they need no file, belong to a network namespace, and end with the process that
// listens.
const claimName, controlName = "@slipstream/run", "@slipstream/control"

// claimTime limits how long a process may take to answer a claim and to give way. A worker for control may take controlTime,
// because it first reverts what it has applied.
const claimTime, controlTime = 5 * time.Second, 20 * time.Second

// Claim reserves this network namespace for one run, because two runs would disturb each other. run identifies the run, and who
// describes it to the user of another run. A controller that has lost its connection to this process starts another worker,
// whose claim calls yield here and takes over. The claim ends with the process, or with release. A worker for control makes a
// separate claim, which ends only with the process: its successor must not measure while it still holds settings. The successor
// may even belong to another run, if this one has lost its claim to the host.
//
// Anybody with a shell here can connect to the socket, and can read run in the arguments of the process. So a claim yields only
// to this process's own user.
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
		case !time.Now().Before(deadline) && holder != "":
			return nil, fmt.Errorf("claim this host: the worker of another run (%s) has not ended after %s: wait for that run, or stop it", holder, limit)
		case !time.Now().Before(deadline):
			return nil, fmt.Errorf("claim this host: its previous worker has not ended after %s", limit)
		}
		time.Sleep(20 * time.Millisecond) // there is no notification when an abstract socket becomes free
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

// askClaim returns who holds the host, or "" if the holder belongs to the same run and gives way.
func askClaim(name, run string) (string, error) {
	c, err := net.DialTimeout("unix", name, claimTime)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(claimTime)); err != nil {
		return "", err
	}
	// A process of another user answers without reading, and may already have closed the connection.
	_, sendErr := fmt.Fprintln(c, run)
	who, err := bufio.NewReader(io.LimitReader(c, 256)).ReadString('\n')
	if err != nil {
		return "", errors.Join(sendErr, err)
	}
	return strings.TrimSpace(who), nil
}

// answerClaim reads only what its own user sends. It tells others who holds the host without waiting for them.
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
