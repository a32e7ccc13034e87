package accel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
)

// NetnsDir is the folder in which container runtimes pin the network namespaces of pods. CRI runtimes (containerd, CRI-O) pin a
// namespace before they call the CNI plugin, so the file exists before the veth.
const NetnsDir = "/run/netns"

// Namespace is an open network namespace. Until Close, the namespace exists and its ID is not reused. Keep it open for
// milliseconds only: it delays the removal of the pod.
type Namespace struct {
	// File is the file that was opened, for messages.
	File   string
	handle netns.Handle
}

// Do runs fn inside the network namespace, on a thread of its own. It stays in the caller's mount namespace, so it reads
// nothing that a pod has mounted.
func (n *Namespace) Do(fn func() error) error { return netns.Do(n.handle, fn) }

// Close closes the namespace.
func (n *Namespace) Close() error { return n.handle.Close() }

// Finder finds the network namespaces of pods from the node, with any container runtime. Its candidates are the files in the
// folders of pinned namespaces, and /proc/PID/ns/net, which needs the host's PID namespace. It is not safe for concurrent use.
//
// Finder trusts only the kernel. IFLA_LINK_NETNSID of a veth is the ID of its peer's namespace in the node's namespace
// (rtnl_fill_link_netnsid in net/core/rtnetlink.c, with veth_get_link_net in drivers/net/veth.c). RTM_GETNSID returns the ID of
// a candidate (rtnl_net_getid in net/core/net_namespace.c). Both come from peernet2id and thus from the same table, which a pod
// can neither read nor write. Finder ignores file names, labels, addresses and whatever a pod says about itself.
type Finder struct {
	proc  string
	dirs  []string
	links *netlink.Handle
	// numbers maps the inodes of namespaces to their last known IDs. It serves only to order the candidates, because both are
	// reused.
	numbers map[uint64]int
	// last maps IDs to the files in which they were last found. Find tries these first: otherwise it would list all pinned
	// files, or all processes of the node, for every known pod.
	last map[int]candidate
}

// NewFinder returns a finder for the calling thread's network namespace.
func NewFinder(proc string, dirs ...string) (*Finder, error) {
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Finder{proc: proc, dirs: dirs, links: links, numbers: make(map[uint64]int), last: make(map[int]candidate)}, nil
}

// Close releases the resources of NewFinder.
func (f *Finder) Close() { f.links.Close() }

// candidate is a file that may refer to a network namespace.
type candidate struct {
	file  string
	inode uint64
}

// pinned lists the files of the netns folders, without opening them.
func (f *Finder) pinned() []candidate {
	var all []candidate
	for _, dir := range f.dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // the runtime pins elsewhere: processes lead to its namespaces
		}
		for _, e := range entries {
			file := filepath.Join(dir, e.Name())
			var stat unix.Stat_t
			if unix.Lstat(file, &stat) == nil && stat.Mode&unix.S_IFMT == unix.S_IFREG {
				all = append(all, candidate{file, stat.Ino})
			}
		}
	}
	return all
}

// ofProcesses lists one process of each network namespace.
func (f *Finder) ofProcesses() []candidate {
	entries, err := os.ReadDir(f.proc)
	if err != nil {
		return nil
	}
	var all []candidate
	seen := make(map[uint64]bool)
	for _, e := range entries {
		if name := e.Name(); name[0] < '0' || name[0] > '9' {
			continue
		}
		file := filepath.Join(f.proc, e.Name(), "ns/net")
		target, err := os.Readlink(file)
		if err != nil {
			continue // it ended, or is a kernel thread
		}
		number, _ := strings.CutPrefix(strings.TrimSuffix(target, "]"), "net:[")
		inode, err := strconv.ParseUint(number, 10, 64)
		if err == nil && !seen[inode] {
			seen[inode] = true
			all = append(all, candidate{file, inode})
		}
	}
	return all
}

// Find opens the namespaces with the given IDs, each the IFLA_LINK_NETNSID of a veth. The result lacks those to which neither a
// file nor a process refers. The caller closes the namespaces.
func (f *Finder) Find(numbers ...int) map[int]*Namespace {
	found := make(map[int]*Namespace)
	for _, number := range numbers {
		c, ok := f.last[number]
		if !ok {
			continue
		}
		if f.open(c, numbers, found); found[number] == nil {
			delete(f.last, number) // the file now refers to another namespace
		}
	}
	if len(found) == len(numbers) {
		return found
	}
	pinned := f.pinned()
	seen := pinned
	processes := sync.OnceValue(func() []candidate {
		all := f.ofProcesses()
		seen = slices.Concat(pinned, all)
		return all
	})
	// Try the most likely candidates first: those that had the ID before; then new ones, because the namespace is probably new;
	// then the rest.
	fresh := func(c candidate) bool { _, known := f.numbers[c.inode]; return !known }
	had := func(c candidate) bool { n, known := f.numbers[c.inode]; return known && slices.Contains(numbers, n) }
	for _, pass := range []struct {
		candidates func() []candidate
		take       func(candidate) bool
	}{
		{func() []candidate { return pinned }, had},
		{func() []candidate { return pinned }, fresh},
		{processes, had},
		{processes, func(candidate) bool { return true }},
		{func() []candidate { return pinned }, func(candidate) bool { return true }},
	} {
		if len(found) == len(numbers) {
			break
		}
		for _, c := range pass.candidates() {
			if !pass.take(c) {
				continue
			}
			if f.open(c, numbers, found); len(found) == len(numbers) {
				break
			}
		}
	}
	if len(f.numbers) > 2*len(seen)+64 {
		f.forget(seen)
	}
	return found
}

// forget drops the namespaces that were not among the candidates of the last Find.
func (f *Finder) forget(seen []candidate) {
	numbers := make(map[uint64]int, len(seen))
	for _, c := range seen {
		if n, known := f.numbers[c.inode]; known {
			numbers[c.inode] = n
		}
	}
	f.numbers = numbers
	maps.DeleteFunc(f.last, func(_ int, c candidate) bool { _, known := numbers[c.inode]; return !known })
}

// open opens a candidate, and adds it to found if its ID is one of numbers.
func (f *Finder) open(c candidate, numbers []int, found map[int]*Namespace) {
	handle, err := netns.Open(c.file)
	if err != nil {
		return
	}
	number, err := f.links.GetNetNsIdByFd(int(handle))
	if err != nil {
		// The file is not a network namespace.
		_ = handle.Close()
		return
	}
	if number >= 0 { // a namespace without an ID may get one later
		f.numbers[c.inode] = number
	}
	if number < 0 || found[number] != nil || !slices.Contains(numbers, number) {
		_ = handle.Close()
		return
	}
	found[number] = &Namespace{File: c.file, handle: handle}
	f.last[number] = c
}

// FindAddress opens the network namespace that has this address, such as the IP in a pod's status. It returns an error if two
// namespaces have it: a pod with CAP_NET_ADMIN can give itself any address.
func FindAddress(proc string, dirs []string, address netip.Addr) (*Namespace, error) {
	f := &Finder{proc: proc, dirs: dirs}
	candidates := append(f.pinned(), f.ofProcesses()...)
	seen := make(map[uint64]bool)
	var found *Namespace
	for _, c := range candidates {
		if seen[c.inode] {
			continue
		}
		seen[c.inode] = true
		handle, err := netns.Open(c.file)
		if err != nil {
			continue
		}
		n := &Namespace{File: c.file, handle: handle}
		if has, err := n.Addresses(); err != nil || !slices.Contains(has, address) {
			_ = n.Close()
			continue
		}
		if found != nil {
			err := fmt.Errorf("find the network namespace with %s: both %s and %s have it", address, found.File, n.File)
			return nil, errors.Join(err, found.Close(), n.Close())
		}
		found = n
	}
	if found == nil {
		return nil, fmt.Errorf("find the network namespace with %s: none of %s or of the processes of %s has it (the host's PID namespace is needed)",
			address, strings.Join(dirs, ", "), proc)
	}
	return found, nil
}

// addresses returns the addresses of the calling thread's network namespace, except loopback and link-local ones.
func addresses() ([]netip.Addr, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	list, err := netns.Dump("addresses", func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	var out []netip.Addr
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && a.IP.IsGlobalUnicast() {
			out = append(out, ip.Unmap())
		}
	}
	return out, err
}

// Addresses returns the addresses of the namespace, except loopback and link-local ones.
func (n *Namespace) Addresses() (out []netip.Addr, err error) {
	err = n.Do(func() error {
		out, err = addresses()
		return err
	})
	return out, err
}

// End identifies the pod's end of a veth by its index in the pod, and the index of the peer on the node.
type End struct{ Index, Host int }

// KeepInside does what Keep does, in a pod's namespace and only for the given ends of the node's veths. It does not look at
// other devices: a pod may make any number. It does not touch the machine's table, which belongs to the node. It overrides the
// kind of o.Place.
func (n *Namespace) KeepInside(ctx context.Context, o Options, ends []End, accelerators []v1alpha1.PolicyAccelerator) (id netns.Cookie, kept Kept, err error) {
	o.Place.Kind = "pod"
	err = n.Do(func() error {
		k, err := OpenKeeper(o)
		if err != nil {
			return err
		}
		defer k.Close()
		id = k.id.Cookie
		kept, err = k.keepEnds(ctx, ends, accelerators)
		return err
	})
	if err != nil {
		return id, kept, Forbidden(fmt.Errorf("keep accelerators of %s: %w", o.Place.Name, err))
	}
	return id, kept, nil
}

func (k *Keeper) keepEnds(ctx context.Context, ends []End, accelerators []v1alpha1.PolicyAccelerator) (kept Kept, err error) {
	indexes := make([]int, len(ends))
	for i, end := range ends {
		indexes[i] = end.Index
	}
	names, err := k.links.Names(indexes)
	if err != nil {
		return kept, err
	}
	var devices []Device
	for _, end := range ends {
		name := names[end.Index]
		if name == "" {
			continue // it has gone
		}
		// Another device may have this index by now. iflink is the index of a veth's peer.
		other, err := k.sys.Read("class/net/" + name + "/iflink")
		if kernel.Gone(err) || err == nil && other != strconv.Itoa(end.Host) {
			continue
		}
		if err != nil {
			return kept, fmt.Errorf("look for the other end of %s: %w", name, err)
		}
		queues, err := rxQueues(k.sys, name)
		if kernel.Gone(err) {
			continue
		}
		if err != nil {
			return kept, err
		}
		devices = append(devices, Device{Name: name, Index: end.Index, Kind: "veth", Class: v1alpha1.DevicePod, RxQueues: queues})
	}
	if k.wanted, err = k.plan(accelerators, devices); err != nil {
		return kept, err
	}
	err = k.transact(ctx, !k.pod(), func(machine, place *journal.Book) error {
		kept, err = k.keep(machine, place, devices, true)
		return err
	})
	return kept, err
}

// Sweep releases the persistent settings of o.Owner in all network namespaces except those that keep selects, and restores them
// where the namespace still exists. A namespace to which neither a file nor a process refers counts as gone, together with its
// settings.
func (f *Finder) Sweep(ctx context.Context, o Options, keep func(netns.Cookie) bool) (restored int, err error) {
	o = o.withDefaults()
	j, err := journal.Open(o.JournalDir, o.Proc)
	if err != nil {
		return 0, err
	}
	all, err := j.Namespaces()
	if err != nil {
		return 0, err
	}
	files := sync.OnceValue(func() map[uint64]string {
		files := make(map[uint64]string)
		for _, c := range append(f.ofProcesses(), f.pinned()...) {
			files[c.inode] = c.file
		}
		return files
	})
	var errs []error
	for _, id := range all {
		if keep(id) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return restored, errors.Join(append(errs, err)...)
		}
		n, err := j.ReleaseIn(id, journal.Holder{Owner: o.Owner}, files())
		restored += n
		errs = append(errs, err)
	}
	return restored, errors.Join(errs...)
}
