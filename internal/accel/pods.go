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

// NetnsDir is where container runtimes pin the network namespaces of pods, those
// of CRI (containerd, CRI-O) before they call the CNI plugin: a namespace is
// there by the time its veth is.
const NetnsDir = "/run/netns"

// Namespace is a network namespace that is open: it cannot end, nor its number
// be used again, until Close. Hold it for milliseconds; a pod that is to go waits.
type Namespace struct {
	// File that it was opened by, for messages.
	File   string
	handle netns.Handle
}

// Do runs fn inside, on a thread of its own meanwhile. The mounts stay those of
// the caller: nothing that a pod has mounted is looked at.
func (n *Namespace) Do(fn func() error) error { return netns.Do(n.handle, fn) }

// Close lets go of it.
func (n *Namespace) Close() error { return n.handle.Close() }

// Finder finds the network namespaces of pods from the node's side, whatever the
// container runtime. The candidates are the files of netns folders, and
// /proc/PID/ns/net, which needs the host's PID namespace. It is not safe for
// concurrent use.
//
// What chooses among them is the kernel alone. A veth's IFLA_LINK_NETNSID is the
// number that its own namespace has for that of its peer (rtnl_fill_link_netnsid
// in net/core/rtnetlink.c, with veth_get_link_net in drivers/net/veth.c), and
// RTM_GETNSID is the number that it has for a candidate (rtnl_net_getid in
// net/core/net_namespace.c): both are peernet2id of the same table, which a pod
// can neither write nor see. Names of files, labels, addresses and what a pod
// says of itself play no part.
type Finder struct {
	proc  string
	dirs  []string
	links *netlink.Handle
	// numbers are those that namespaces had, by inode. They only order the
	// candidates, as inodes and numbers are used again.
	numbers map[uint64]int
	// last are the files that numbers were found by. They are tried first: without them every look at a pod that is known would
	// list all pinned files, or all processes of the node.
	last map[int]candidate
}

// NewFinder is a finder for the calling thread's network namespace.
func NewFinder(proc string, dirs ...string) (*Finder, error) {
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Finder{proc: proc, dirs: dirs, links: links, numbers: make(map[uint64]int), last: make(map[int]candidate)}, nil
}

// Close lets go of what NewFinder opened.
func (f *Finder) Close() { f.links.Close() }

// candidate is a file that may stand for a network namespace.
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
			continue // a runtime that pins elsewhere: its processes show its namespaces
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
			continue // it ended, or is a kernel thread's
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

// Find opens the namespaces of some numbers, each a veth's IFLA_LINK_NETNSID. What
// no file and no process stands for is missing from the result. The caller closes
// them.
func (f *Finder) Find(numbers ...int) map[int]*Namespace {
	found := make(map[int]*Namespace)
	for _, number := range numbers {
		c, ok := f.last[number]
		if !ok {
			continue
		}
		if f.open(c, numbers, found); found[number] == nil {
			delete(f.last, number) // another one has the file
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
	// Those that have not been seen are likely new, as what is looked for; then
	// those that had the number; then the rest.
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

// forget drops what is known of namespaces other than those of the last look.
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

// open adds a candidate to found if its number is one of those looked for.
func (f *Finder) open(c candidate, numbers []int, found map[int]*Namespace) {
	handle, err := netns.Open(c.file)
	if err != nil {
		return
	}
	number, err := f.links.GetNetNsIdByFd(int(handle))
	if err != nil {
		// No namespace, whatever stands in its place.
		_ = handle.Close()
		return
	}
	if number >= 0 { // one without a number may be about to get it
		f.numbers[c.inode] = number
	}
	if number < 0 || found[number] != nil || !slices.Contains(numbers, number) {
		_ = handle.Close()
		return
	}
	found[number] = &Namespace{File: c.file, handle: handle}
	f.last[number] = c
}

// FindAddress opens the network namespace in which an interface has the address,
// be it that of a pod by the IP that its status has. Two that have it are an error:
// a pod with CAP_NET_ADMIN can take any address inside.
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

// addresses are those of the calling thread's network namespace, but for the
// loopback's and the link's own.
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

// Addresses are those that the namespace's interfaces have, but for the
// loopback's and the links' own.
func (n *Namespace) Addresses() (out []netip.Addr, err error) {
	err = n.Do(func() error {
		out, err = addresses()
		return err
	})
	return out, err
}

// End is a veth's end in a pod, as its other end on the node tells: the index of
// each in its own namespace.
type End struct{ Index, Host int }

// KeepInside does Keep in a pod's namespace, for the ends of the node's veths
// there and nothing else: what else a pod may have made is not looked at, so that
// it costs nobody anything. Nor is the machine's table touched, which is the
// node's. Of o the place's kind is overruled.
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
		// Another device may have the index by now: iflink is that of a veth's
		// other end.
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

// Sweep lets go of what the owner of o holds, persistently, in network namespaces
// other than those to keep, and restores it where the namespace is still there.
// One that neither a file nor a process stands for is taken to be gone, and what
// was set there with it.
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
