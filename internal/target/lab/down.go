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
)

// Down removes the lab, and ends the processes that are still in it. It comes
// back when names and devices are gone.
func (l *Lab) Down(ctx context.Context) error {
	if l.lock == nil {
		lock, err := acquire(l.dir, l.state.Config.Name)
		if err != nil {
			return err
		}
		// It may have gone, and come again as another, before it was locked.
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
	l.ending.Store(true)
	err := tearDown(ctx, l.state.Config)
	for _, ended := range l.ended {
		if ended != nil && err == nil {
			<-ended
		}
	}
	if err != nil {
		l.lock.release()
		err = fmt.Errorf("take down lab %s: %w", l.state.Config.Name, err)
	} else {
		err = l.lock.remove()
	}
	l.lock = nil
	return err
}

// Sweep removes the labs whose process has gone without doing so, and tells
// their names. A lab that was to be kept stays, if it ever came up.
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

// fork is how long a process that was just forked may hold what it inherited,
// until it becomes another program.
const fork = time.Second

// sweep takes one lab down. A lock may outlive its owner for a moment: in a process
// that it was about to start.
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

// sweepLocks removes what a process leaves that ends between taking a lab's
// lock and writing its state, or the other way round.
func sweepLocks(dir string) error {
	locks, err := filepath.Glob(filepath.Join(dir, "*.lock"))
	if err != nil {
		return err // not reached: the pattern is good
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

// gone is how long devices may take to go once nothing holds them.
const gone = 10 * time.Second

// tearDown removes all namespaces of a lab that are there. Pods and nodes go
// first, all at once, so that the kernel clears them up together; the switch
// stays to watch the nodes' NICs go, the last of what they had.
func tearDown(ctx context.Context, c Config) error {
	names := namespaces(c)
	if c.Shape == ShapeUDP {
		if err := giveUpConnections(names); err != nil {
			return err
		}
	}
	if err := endProcesses(ctx, names); err != nil {
		return err
	}
	if c.translated() {
		if err := removeCgroup(ctx, c); err != nil {
			return err
		}
	}
	sw, err := openNamespace(switchNS(c.Name))
	if err != nil {
		sw = nil // it was never made, or is half removed: there is nothing to watch
	}
	defer sw.close()
	for _, name := range names[:len(names)-1] {
		if err := removeNamespace(name); err != nil {
			return err
		}
	}
	if sw != nil {
		if err := awaitNICs(ctx, sw); err != nil {
			return err
		}
	}
	return removeNamespace(switchNS(c.Name))
}

// giveUpConnections has the kernel give up soon on connections that nobody has open
// any more, but whose end the other side does not know. Where the forwarder goes
// together with who had them, it never will, and each keeps its namespace for a
// minute or more.
func giveUpConnections(names []string) error {
	for _, name := range names {
		err := inside(name, func() error { return sysctl("net/ipv4/tcp_orphan_retries=1") })
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) { // never made, or half removed
			return err
		}
	}
	return nil
}

// awaitNICs waits until no veth is left in the switch: one goes with its peer,
// and that with its namespace.
func awaitNICs(ctx context.Context, sw *namespace) error {
	ctx, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	updates := make(chan netlink.LinkUpdate)
	done := make(chan struct{})
	failed := make(chan error, 1)
	if err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		Namespace: &sw.handle,
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
		for range updates { // lets go of the sender, until it has closed
		}
	}()
	for {
		links, err := sw.nl.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list the switch's ports: %w", err)
		}
		if err == nil && !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Type() == "veth" }) {
			return nil
		}
		select {
		case _, ok := <-updates:
			if !ok {
				return fmt.Errorf("watch the switch: %w", <-failed)
			}
		case <-ctx.Done():
			return fmt.Errorf("names are removed, but a process elsewhere holds network namespaces of the lab: %w", ctx.Err())
		}
	}
}

// endProcesses kills what runs in any of the namespaces, and waits until it has
// gone.
func endProcesses(ctx context.Context, names []string) error {
	inodes := make(map[string]bool)
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Stat(netnsPath(name), &st); err == nil {
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
		if err != nil || pid == os.Getpid() { // a thread of this one's may be in there for a moment
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
			err = nil // not in there, or gone
		}
		unix.Close(fd)
		if err != nil {
			return killed, fmt.Errorf("end process %d: %w", pid, err)
		}
	}
	return killed, nil
}

// end kills a process and waits until it has gone.
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
