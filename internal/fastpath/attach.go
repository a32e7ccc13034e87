//go:build linux

package fastpath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
)

// programNames lists the names of the programs that the fast path attaches to devices.
var programNames = []string{"observe_nic", "decap_nic", "observe_router", "redirect_nic", "observe_vxlan", "redirect_vxlan", "redirect_pod", "observe_pod"}

// hook is a program and the attach point to which it is attached.
type hook struct {
	program *ebpf.Program
	egress  bool
}

func (f *Fastpath) programHooks() map[string]hook {
	return map[string]hook{
		"observe_nic":    {f.programs.ObserveNIC, true},
		"decap_nic":      {f.programs.DecapNIC, false},
		"observe_router": {f.programs.ObserveRouter, true},
		"redirect_nic":   {f.programs.RedirectNIC, false},
		"observe_vxlan":  {f.programs.ObserveVXLAN, true},
		"redirect_vxlan": {f.programs.RedirectVXLAN, false},
		"redirect_pod":   {f.programs.RedirectPod, false},
		"observe_pod":    {f.programs.ObservePod, true},
	}
}

func idsOf(hooks map[string]hook) (map[ebpf.ProgramID]bool, error) {
	ids := make(map[ebpf.ProgramID]bool)
	for name, h := range hooks {
		info, err := h.program.Info()
		if err != nil {
			return nil, fmt.Errorf("query the ID of program %s: %w", name, err)
		}
		id, _ := info.ID()
		ids[id] = true
	}
	return ids, nil
}

func (f *Fastpath) owns(id ebpf.ProgramID) bool { return f.ours[id] }

// attachPrograms attaches the programs that the devices of the node need, and detaches the others. With verify it also
// re-attaches each program that somebody has detached, or that is no longer the last one at its attach point.
func (f *Fastpath) attachPrograms(verify bool) error {
	links, watched := f.pods.update(f.node)
	want := f.node.attachments(links, f.detector.on, f.local.sampling)
	// While the fast path is idle, only the detectors attach and detach programs. Do not report these changes.
	quiet := !f.active && len(links) == 0
	detached, detachErr := f.detachUnwanted(want, verify)
	f.active = len(links) > 0
	attached, attachErr := f.attachMissing(want, watched)
	if f.updateSkipped() || (detached || attached) && !quiet {
		poke(f.updates)
	}
	return errors.Join(detachErr, attachErr)
}

// detachUnwanted detaches the programs that are not wanted, and with verify those that attachMissing must re-attach.
func (f *Fastpath) detachUnwanted(want []attachment, verify bool) (changed bool, err error) {
	hooks := f.programHooks()
	wanted := make(map[attachment]bool)
	for _, a := range want {
		wanted[a] = true
	}
	var errs []error
	unseen := false
	for a, l := range f.attached {
		// Detaching is slow and there may be hundreds: the lease must not expire meanwhile.
		errs = append(errs, f.renewLease())
		name := f.node.names[a.device]
		switch {
		case !wanted[a]:
			unseen = unseen || !slices.Contains(f.node.veths, a.device) && (name != "" || !atPod(a))
		case verify && !isAttached(l, a.device):
			// The kernel has detached it if the device has gone since the scan.
			if f.exists(a.device) {
				f.log.Warn("another process detached a program of the fast path; it is attached again", "device", name, "program", a.program)
				unseen = true
				f.repaired++
			}
		case verify && !f.isLast(attachPoint{a.device, hooks[a.program].egress}):
			f.log.Info("the fast path would bypass a program that was attached after its own; its program moves to the end", "device", name, "program", a.program)
			unseen = true
		default:
			continue
		}
		changed = changed || !f.isSampling(a)
		errs = append(errs, l.Close())
		delete(f.attached, a)
	}
	if unseen {
		errs = append(errs, f.programs.InvalidateSequences()) // until the program is attached again, it misses packets
	}
	return changed, errors.Join(errs...)
}

// attachMissing attaches the wanted programs that are not attached. A pod in watched is watched as
// soon as observe_pod is attached to its link.
func (f *Fastpath) attachMissing(want []attachment, watched []int) (changed bool, err error) {
	hooks := f.programHooks()
	errs := []error{f.setWatched(watched)}
	for _, a := range want {
		if f.attached[a] != nil {
			continue
		}
		errs = append(errs, f.renewLease())
		h := hooks[a.program]
		l, err := link.AttachTCX(link.TCXOptions{Interface: a.device, Program: h.program, Attach: attachPoint{a.device, h.egress}.attachType()})
		if errors.Is(err, unix.ENODEV) {
			continue // the device is gone; a notification follows
		}
		if err != nil {
			// The other programs may stay: a flow becomes valid only after its packets have passed all hooks.
			f.failed[a] = err
			continue
		}
		delete(f.failed, a)
		f.attached[a] = l
		changed = changed || !f.isSampling(a)
		if a.program == "observe_pod" {
			errs = append(errs, f.setWatched(watched))
		}
		if !slices.Contains(f.node.veths, a.device) {
			// If the device replaces another one, the programs missed packets of known flows. The link of a pod needs no such
			// care: its flows begin after its programs are attached.
			errs = append(errs, f.programs.InvalidateSequences())
		}
	}
	return changed, errors.Join(errs...)
}

// atPod reports whether a program is for the link of a pod. If that has gone, nothing passes it unseen (see homes).
func atPod(a attachment) bool { return a.program == "redirect_pod" || a.program == "observe_pod" }

// isSampling reports whether a program is attached to a pod's link only to find eligible connections: the link has no other
// program.
func (f *Fastpath) isSampling(a attachment) bool {
	return a.program == "redirect_pod" && f.attached[attachment{a.device, "observe_pod"}] == nil
}

// updateSkipped updates the list of skipped devices, which includes those to which a program could
// not be attached, and logs new ones. It returns whether the list has changed.
func (f *Fastpath) updateSkipped() (changed bool) {
	var unattached []skip
	for a, err := range f.failed {
		if name, there := f.node.names[a.device]; there {
			unattached = append(unattached, skip{name, byFailure, fmt.Sprintf("%s: attach %s: %v", name, a.program, err)})
		} else {
			delete(f.failed, a)
		}
	}
	slices.SortFunc(unattached, func(a, b skip) int { return cmp.Compare(a.sentence, b.sentence) })
	skipped := slices.Concat(f.node.skipped, unattached)
	known := sentences(f.skipped)
	for _, why := range sentences(skipped) {
		if !slices.Contains(known, why) {
			f.log.Info("the fast path skips " + why)
		}
	}
	changed = !slices.Equal(skipped, f.skipped)
	f.skipped = skipped
	return changed
}

// setWatched sets the pods for which the programs create flows: those in watched whose links have
// observe_pod, without which no flow becomes valid.
func (f *Fastpath) setWatched(watched []int) error {
	addresses := make(map[int][]netip.Addr)
	for address, link := range f.node.podLinks {
		addresses[link] = append(addresses[link], address)
	}
	var all []datapath.Pod
	for _, link := range watched {
		if f.attached[attachment{link, "observe_pod"}] != nil {
			all = append(all, datapath.Pod{Link: link, Addresses: addresses[link]})
		}
	}
	return f.programs.SetWatched(all)
}

// exists reports whether a device exists. It returns true if the kernel does not answer.
func (f *Fastpath) exists(device int) bool {
	_, err := f.links.LinkByIndex(device)
	return !errors.As(err, new(netlink.LinkNotFoundError))
}

// isLast reports whether the programs of the fast path run last at an attach point; they would bypass a program behind them. It
// returns true if the kernel does not answer.
func (f *Fastpath) isLast(p attachPoint) bool {
	all, err := programsAt(p)
	return err != nil || len(all) == 0 || endsWith(all, f.owns)
}

// endsWith reports whether programs end with those of the fast path, of which there is at least one.
func endsWith(programs []ebpf.ProgramID, ours func(ebpf.ProgramID) bool) bool {
	first := slices.IndexFunc(programs, ours)
	return first >= 0 && !slices.ContainsFunc(programs[first:], func(id ebpf.ProgramID) bool { return !ours(id) })
}

// isAttached reports whether a program is still attached to its device. It returns true if the
// kernel does not answer.
func isAttached(l link.Link, device int) bool {
	info, err := l.Info()
	if err != nil {
		return true // do not replace it without evidence
	}
	at := info.TCX()
	return at == nil || int(at.Ifindex) == device
}

// inspectMax limits the number of attach points that inspect checks per lease renewal: enough for 128 active pods. The next
// renewal continues with the next ones.
const inspectMax = 256

// inspect polls for changes that netlink does not announce (sysctls, XDP and tcx programs), and requests a scan if it finds
// one. It checks VXLAN devices, bridges, NICs, and pods' links with a program of the fast path or a foreign tcx program.
func (f *Fastpath) inspect() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, why, err := unsupportedNode(f.unseenBy)
	if err != nil {
		return err
	}
	ports, err := sourcePorts()
	if err != nil {
		return err
	}
	changed := why != f.node.unsupported || ports != f.node.ports
	hooks := f.programHooks()
	ours := make(map[attachPoint]bool)
	for a := range f.attached {
		ours[attachPoint{a.device, hooks[a.program].egress}] = true
	}
	points := slices.Collect(maps.Keys(ours))
	for _, device := range f.node.monitored {
		for _, p := range both(device) {
			if !ours[p] {
				points = append(points, p)
			}
		}
	}
	for p, foreign := range f.node.observers.programs {
		if len(foreign) > 0 && !ours[p] && !slices.Contains(f.node.monitored, p.device) {
			points = append(points, p) // such as those of a skipped link of a pod
		}
	}
	slices.SortFunc(points, func(a, b attachPoint) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.String(), b.String()))
	})
	points, f.inspected = batch(points, f.inspected)
	for _, p := range points {
		// Each query takes the RTNL lock, so all of them together may take longer than the lease.
		if err := f.renewLease(); err != nil {
			return err
		}
		same, err := f.unchanged(p, ours[p])
		if err != nil {
			return err
		}
		changed = changed || !same
	}
	if changed {
		f.Verify()
	}
	return nil
}

// batch returns the attach points to inspect, starting at index from, and the index of the next batch.
func batch(all []attachPoint, from int) (part []attachPoint, next int) {
	if from >= len(all) {
		from = 0
	}
	next = min(from+inspectMax, len(all))
	return all[from:next], next
}

// unchanged reports whether an attach point has the same foreign programs as in the last scan, followed by a program of the
// fast path if ours is set, and its device the same IPv6 MTU.
func (f *Fastpath) unchanged(p attachPoint, ours bool) (bool, error) {
	all, err := programsAt(p)
	if err != nil || ours && !endsWith(all, f.owns) {
		return false, err
	}
	was, scanned := f.node.observers.programs[p]
	if scanned && !slices.Equal(slices.DeleteFunc(all, f.owns), was) {
		return false, nil
	}
	if p.egress {
		return true, nil
	}
	if was, limits := f.node.mtus6[p.device]; limits {
		if mtu, err := mtu6(f.node.names[p.device]); err != nil || mtu != was {
			return false, err
		}
	}
	if !slices.Contains(f.node.monitored, p.device) {
		return true, nil
	}
	l, err := f.links.LinkByIndex(p.device)
	return err != nil || hasXDP(l) == f.node.observers.xdp[p.device], nil // netlink notifies of a removed device
}
