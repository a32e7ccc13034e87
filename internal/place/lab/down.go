//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/services"
)

// Down kills the processes that are still in the lab, and removes the lab. It returns once its names and devices are gone.
func (l *Lab) Down(ctx context.Context) error {
	if l.lock == nil {
		lock, err := acquire(l.dir, l.state.Config.Name)
		if err != nil {
			return err
		}
		// Before this process had the lock, another one may have removed the lab, and created another one with its name.
		s, err := readState(l.dir, l.state.Config.Name)
		if errors.Is(err, ErrNotFound) {
			return errors.Join(err, lock.remove())
		}
		if err != nil {
			lock.release()
			return err
		}
		l.state, l.lock = s, lock
	}
	l.processes.ending.Store(true)
	err := tearDown(ctx, l.state.Config)
	if err != nil {
		l.lock.release()
		err = fmt.Errorf("remove lab %s: %w", l.state.Config.Name, err)
	} else {
		l.processes.running.Wait()
		err = l.lock.remove()
	}
	l.lock = nil
	return err
}

// Sweep removes labs whose process has ended without removing them, and returns their names. It spares labs with Keep whose
// creation was complete.
func Sweep(ctx context.Context, dir string) ([]string, error) {
	infos, err := List(dir)
	errs := []error{err}
	var swept []string
	for _, info := range infos {
		if info.Keep && info.Up {
			continue
		}
		err := sweep(ctx, dir, info)
		switch {
		case err == nil:
			swept = append(swept, info.Name)
		case !errors.Is(err, ErrInUse) && !errors.Is(err, ErrNotFound):
			errs = append(errs, err)
		}
	}
	return swept, errors.Join(append(errs, sweepLocks(dir))...)
}

// fork limits how long a forked process may hold what it has inherited, until exec: milliseconds, or longer if it waits for a
// CPU.
const fork = 15 * time.Second

// sweep removes one lab. The lock may outlive the owner for a moment, in a process that the owner was about to start.
func sweep(ctx context.Context, dir string, info Info) error {
	l, err := Open(dir, info.Name)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(fork); ; time.Sleep(time.Millisecond) {
		err := l.Down(ctx)
		alive := !errors.Is(unix.Kill(info.PID, 0), unix.ESRCH)
		if !errors.Is(err, ErrInUse) || alive || time.Now().After(deadline) {
			return err
		}
	}
}

// sweepLocks removes lock files without a state: their process ended between taking the lock and writing the state, or between
// removing the state and the lock.
func sweepLocks(dir string) error {
	locks, err := filepath.Glob(filepath.Join(dir, "*.lock"))
	if err != nil {
		return err // not reached: the pattern is valid
	}
	for _, path := range locks {
		name := strings.TrimSuffix(filepath.Base(path), ".lock")
		lock, err := acquire(dir, name)
		if errors.Is(err, ErrInUse) {
			continue
		}
		if err != nil {
			return err
		}
		if _, err := os.Lstat(statePath(dir, name)); errors.Is(err, fs.ErrNotExist) {
			if err := lock.remove(); err != nil {
				return err
			}
			continue
		}
		lock.release()
	}
	return nil
}

// gone limits how long devices may take to disappear once nothing holds them.
const gone = 30 * time.Second

// tearDown removes the namespaces of a lab. It removes those of pods and nodes together, so that the kernel destroys them in
// one batch. The switch stays until the nodes' NICs are gone, which the kernel destroys last.
func tearDown(ctx context.Context, c Config) error {
	names := namespaces(c)
	if err := giveUpConnections(names); err != nil {
		return err
	}
	if err := endProcesses(ctx, names); err != nil {
		return err
	}
	if c.translated() {
		if err := services.RemoveCgroup(ctx, c.Name); err != nil {
			return err
		}
	}
	sw, err := network.Open(switchNS(c.Name))
	if err != nil {
		sw = nil // never created, or partly removed: there is nothing to watch
	}
	defer sw.Close()
	for _, name := range names[:len(names)-1] {
		if err := network.Remove(name); err != nil {
			return err
		}
	}
	if sw != nil {
		if err := awaitNICs(ctx, sw); err != nil {
			return err
		}
	}
	return network.Remove(switchNS(c.Name))
}

// giveUpConnections makes the kernel soon give up closed connections whose peer does not answer. While the lab is removed, the
// peer, the path to it or a forwarder may be gone first, and such a connection would hold its namespace for a minute or more.
func giveUpConnections(names []string) error {
	for _, name := range names {
		err := network.Inside(name, func() error { return network.Sysctl("net/ipv4/tcp_orphan_retries=1") })
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) { // never created, or partly removed
			return err
		}
	}
	return nil
}

// awaitNICs waits until no veth is left in the switch: each disappears with its peer, and the peer with its namespace.
func awaitNICs(ctx context.Context, sw *network.Namespace) error {
	ctx, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	updates := make(chan netlink.LinkUpdate)
	done := make(chan struct{})
	failed := make(chan error, 1)
	if err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		Namespace: &sw.Handle,
		ErrorCallback: func(err error) {
			select {
			case failed <- err:
			default:
			}
		},
	}); err != nil {
		return fmt.Errorf("watch the switch: %w", err)
	}
	defer func() {
		close(done)
		for range updates { // let the sender end, which closes the channel
		}
	}()
	for {
		links, err := netns.Dump("the switch's ports", sw.Netlink.LinkList)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Type() == "veth" }) {
			return nil
		}
		select {
		case _, ok := <-updates:
			if !ok {
				return fmt.Errorf("watch the switch: %w", <-failed)
			}
		case <-ctx.Done():
			return fmt.Errorf("the names are removed, but a process outside the lab still holds its network namespaces: %w", ctx.Err())
		}
	}
}

// endProcesses kills the processes in the namespaces, and waits until they are gone.
func endProcesses(ctx context.Context, names []string) error {
	inodes := make(map[string]bool)
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Stat(network.Path(name), &st); err == nil {
			inodes[fmt.Sprintf("net:[%d]", st.Ino)] = true
		}
	}
	for {
		left, err := kill(ctx, inodes)
		if err != nil || left == 0 {
			return err
		}
	}
}

func kill(ctx context.Context, inodes map[string]bool) (killed int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() { // a thread of this process may be in a namespace for a moment
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // gone
		}
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err == nil && inodes[ns] {
			killed++
			err = end(ctx, fd)
		} else {
			err = nil // elsewhere, or gone
		}
		unix.Close(fd)
		if err != nil {
			return killed, fmt.Errorf("end process %d: %w", pid, err)
		}
	}
	return killed, nil
}

// end kills a process and waits until it is gone.
func end(ctx context.Context, pidfd int) error {
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	for {
		// A pidfd is readable when its process has ended.
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 100)
		if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}
