package netns

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Sysfs opens a sysfs that shows the network devices of this namespace. A sysfs shows the devices of
// the namespace in which it was mounted, and /sys was usually mounted in another one than a pod's. The
// mount is detached: it is in no directory, nobody else sees it, and it ends when the root is closed.
//
// A caller without the right to mount, or on a kernel before 5.2, gets /sys if that shows the right
// devices, otherwise an error.
func Sysfs() (*os.Root, error) {
	// The mount belongs to the namespace of the thread that makes it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	root, err := Mount("sysfs")
	if err == nil {
		return root, nil
	}
	root, sysErr := openSysfs("/sys")
	if sysErr != nil {
		return nil, fmt.Errorf("mount a sysfs of this network namespace: %w; and %w", err, sysErr)
	}
	return root, nil
}

// Mount mounts a kernel file system, sysfs or proc, where nobody else sees it.
func Mount(kind string) (*os.Root, error) {
	ctx, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigCreate(ctx); err != nil {
		return nil, fmt.Errorf("fsconfig: %w", err)
	}
	mount, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	// From here on the root holds the mount.
	defer func() { unmounts() <- mount }()
	return os.OpenRoot("/proc/self/fd/" + strconv.Itoa(mount))
}

// unmounts closes mounts of fsmount in the background. For each the kernel waits until every CPU has
// passed through an RCU quiescent state (synchronize_rcu_expedited in fs/namespace.c): about 1 ms, and
// 100 ms if CPUs are busy, for instance when many pods start at once.
var unmounts = sync.OnceValue(func() chan<- int {
	mounts := make(chan int, 64)
	go func() {
		for mount := range mounts {
			_ = unix.Close(mount)
		}
	}()
	return mounts
})

// openSysfs opens the sysfs that is mounted at dir, and checks that its links are those of this
// namespace.
func openSysfs(dir string) (*os.Root, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	links, err := net.Interfaces()
	for _, l := range links {
		index, _ := root.ReadFile("class/net/" + l.Name + "/ifindex")
		if strings.TrimSuffix(string(index), "\n") != strconv.Itoa(l.Index) {
			err = fmt.Errorf("%s shows another network namespace", dir)
		}
	}
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	return root, nil
}
