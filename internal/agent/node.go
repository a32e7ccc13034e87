package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
)

// node is what Run knows about its node.
type node struct {
	policies []*policy
	pods     map[netip.Addr]*Pod
	// links holds all links by index, including those without a class.
	links map[int]link
	// fresh holds the links that have appeared since the last pass.
	fresh map[int]bool
	// groups holds the pods' network namespaces, by their IDs in the node's network namespace (RTM_GETNSID).
	groups map[int]*group
	// counts and refused are the results for the node's own devices and for the machine.
	counts  map[accel.SettingOf]accel.Count
	refused []accel.Refusal
	// acting holds the keys of the policies that have something to act on.
	acting []string
	// relist means that notifications were lost: the next list of all devices will find devices without one, which is no sign
	// of a bug.
	relist bool
	// adopted means that a full pass has succeeded: from then on, a setting with another value is drift, and one in a namespace
	// that the agent does not keep is unwanted.
	adopted bool
	// departed means that namespaces are gone whose journals still exist.
	departed bool
	// unverified holds the pods' namespaces that the current verification has not reached yet.
	unverified []int
	// failure is the error of the last pass.
	failure error
}

// link is a link of the node.
type link struct {
	name, kind, class string
	// peer is the index of a veth's peer, and number the ID of the network namespace that the peer is in.
	peer, number int
	// announced means that a notification, or the first list, had the link.
	announced bool
}

// group is a pod's network namespace and the veths into it.
type group struct {
	ends []accel.End
	// since is when the first link of the namespace appeared, or when the policies last changed.
	since time.Time
	// id is the namespace's cookie, or 0 until the agent has entered the namespace.
	id  netns.Cookie
	pod *Pod
	// addresses are those that the namespace had when the agent last looked up which pod it belongs to.
	addresses []netip.Addr
	// sought means that the namespace may belong to a pod of a new list of pods.
	sought bool
	// policies holds the keys of the applied policies, and kept the result.
	policies []string
	// conflicts maps each conflicting policy to the one that takes precedence.
	conflicts map[string]string
	kept      accel.Kept
	err       error
	// missing means that neither a file nor a process of this namespace was found.
	missing  bool
	done     bool
	verified time.Time
}

// take reads the desired state, and reports whether the policies have changed.
func (a *Agent) take() (changed bool) {
	a.mu.Lock()
	d := a.desired
	a.mu.Unlock()
	a.node.pods = make(map[netip.Addr]*Pod)
	for i := range d.Pods {
		for _, ip := range d.Pods[i].Addresses {
			a.node.pods[ip] = &d.Pods[i]
		}
	}
	same := func(p *policy, q Policy) bool {
		return p.key() == q.key() && p.Withheld == q.Withheld && p.LaterInvalid == q.LaterInvalid
	}
	if changed = a.policies == nil || !slices.EqualFunc(a.policies, d.Policies, same); changed {
		a.policies = make([]*policy, len(d.Policies))
		for i, p := range d.Policies {
			a.policies[i] = newPolicy(p)
		}
	}
	unplaced := a.unplaced()
	listed := func(ip netip.Addr) bool { return a.node.pods[ip] != nil }
	for _, g := range a.groups {
		if changed {
			g.since = time.Now()
		}
		if a.undecided(g) && (len(g.addresses) == 0 && unplaced || slices.ContainsFunc(g.addresses, listed)) {
			g.sought = true
		}
	}
	return changed
}

// unplaced reports whether the namespace of a listed pod is not known yet. It may be one that had no address when the agent
// last read its addresses.
func (a *Agent) unplaced() bool {
	placed := make(map[*Pod]bool)
	for _, g := range a.groups {
		for _, ip := range g.addresses {
			placed[a.node.pods[ip]] = true
		}
	}
	for _, pod := range a.node.pods {
		if !placed[pod] {
			return true
		}
	}
	return false
}

// configured reports whether Set has been called.
func (a *Agent) configured() bool { return a.policies != nil }

// note records a notification, and reports whether it needs a full pass.
func (a *Agent) note(u netlink.LinkUpdate) (full bool) {
	a.metrics.messages.Inc()
	a.heard(true)
	// The same multicast group has notifications of bridges about their ports.
	if u.IfInfomsg.Family != unix.AF_UNSPEC || a.links == nil {
		return a.links == nil
	}
	index := int(u.Index)
	known, ok := a.links[index]
	if u.Header.Type == unix.RTM_DELLINK {
		if ok {
			a.forget(index)
		}
		return known.class == v1alpha1.DeviceNIC || known.class == v1alpha1.DeviceOverlay
	}
	attrs := u.Attrs()
	now := link{name: attrs.Name, kind: u.Type(), class: known.class, peer: attrs.ParentIndex, number: attrs.NetNsID, announced: true}
	if ok && now.name == known.name && now.kind == known.kind && now.peer == known.peer && now.number == known.number {
		if !known.announced {
			a.links[index] = now
		}
		return false
	}
	if now.kind != "veth" || known.class == v1alpha1.DeviceNIC {
		a.links[index] = now
		return true // its class depends on routes, addresses and other links
	}
	now.class = ""
	if now.number >= 0 {
		now.class = v1alpha1.DeviceHostVeth
	}
	a.learn(index, now)
	return false
}

// learn records a link, and the veth's end in a pod if it has one.
func (a *Agent) learn(index int, now link) {
	if was, ok := a.links[index]; ok && (was.class != now.class || was.number != now.number || was.peer != now.peer) {
		a.forget(index)
	}
	if _, ok := a.links[index]; !ok || a.links[index].name != now.name {
		a.fresh[index] = true
	}
	a.links[index] = now
	if now.class != v1alpha1.DeviceHostVeth {
		return
	}
	end := accel.End{Index: now.peer, Host: index}
	g := a.groups[now.number]
	if g == nil {
		g = &group{since: time.Now()}
		a.groups[now.number] = g
	}
	if !slices.Contains(g.ends, end) {
		g.ends = append(g.ends, end)
		g.done = false
	}
}

func (a *Agent) forget(index int) {
	gone := a.links[index]
	delete(a.links, index)
	delete(a.fresh, index)
	maps.DeleteFunc(a.counts, func(s accel.SettingOf, _ accel.Count) bool { return s.Link == index })
	g := a.groups[gone.number]
	if gone.class != v1alpha1.DeviceHostVeth || g == nil {
		return
	}
	g.ends = slices.DeleteFunc(g.ends, func(e accel.End) bool { return e.Host == index })
	maps.DeleteFunc(g.kept.Counts, func(s accel.SettingOf, _ accel.Count) bool { return s.Link == gone.peer })
	if len(g.ends) == 0 {
		delete(a.groups, gone.number)
		a.departed = a.departed || g.id != 0
	}
}

// pass applies the desired state to the whole node, or to new devices only.
func (a *Agent) pass(ctx context.Context, full bool) error {
	began := time.Now()
	if !full {
		for _, g := range a.groups {
			a.choosePolicies(g)
		}
		// A policy may have been waiting for the first device of a class, or for the first pod that it selects.
		full = !slices.Equal(a.acting, a.active())
	}
	keep := a.keepFresh
	if full {
		keep = a.keepNode
	}
	if err := keep(ctx); err != nil {
		return err
	}
	a.keepPods(ctx, full)
	if !slices.Equal(a.acting, a.active()) { // keepPods may have found the first pod of a policy
		if err := a.keepNode(ctx); err != nil {
			return err
		}
	}
	if full {
		a.adopted = true
		a.metrics.verified.SetToCurrentTime()
	}
	a.failure = nil
	a.metrics.passes.WithLabelValues(map[bool]string{true: "full", false: "part"}[full]).Observe(time.Since(began).Seconds())
	return nil
}

// keepNode lists the node's devices and applies the policies to them. It runs before the pods' turn, because the RFS tables of
// their queues index the machine's flow table, which it sets.
func (a *Agent) keepNode(ctx context.Context) error {
	view, err := a.host.View()
	if err != nil {
		// A runner whose policy was deleted or rolled back must end all the same.
		return errors.Join(err, a.host.StopExcept(a.wants))
	}
	a.compare(view.Devices)
	judge(a.policies, view)
	for _, g := range a.groups {
		a.choosePolicies(g)
	}
	a.acting = a.active()
	kept, err := a.host.Keep(ctx, view, a.ofNode())
	if err != nil {
		return err
	}
	clear(a.fresh)
	a.counts, a.refused = make(map[accel.SettingOf]accel.Count), nil
	a.recordNode(kept)
	return nil
}

// compare updates the known links from a list of all devices, and counts those that no notification announced.
func (a *Agent) compare(devices []accel.Device) {
	if a.links == nil {
		a.links, a.fresh, a.groups = make(map[int]link), make(map[int]bool), make(map[int]*group)
		a.relist = true
	}
	first := a.relist
	a.relist = false
	there := make(map[int]bool, len(devices))
	missed := 0
	for _, d := range devices {
		there[d.Index] = true
		was, known := a.links[d.Index]
		if known && !was.announced && !first {
			missed++ // the previous list had it too, and there still was no notification
		}
		a.learn(d.Index, link{name: d.Name, kind: d.Kind, class: d.Class, peer: d.Peer, number: d.PeerNamespace, announced: first || known && was.announced})
	}
	for index := range a.links {
		if !there[index] {
			a.forget(index)
		}
	}
	if missed == 0 {
		return
	}
	a.heard(false)
	a.metrics.missed.Add(float64(missed))
	a.options.Log.Error("devices appeared without a netlink notification", "devices", missed)
	for index, l := range a.links {
		l.announced = true
		a.links[index] = l
	}
}

// heard records whether a device was announced by a notification.
func (a *Agent) heard(notification bool) {
	if notification && a.silentPasses == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.silentPasses++; notification {
		a.silentPasses = 0
	}
}

// keepFresh applies the policies to new devices.
func (a *Agent) keepFresh(ctx context.Context) error {
	var devices []accel.Device
	for index := range a.fresh {
		l := a.links[index]
		if l.class == v1alpha1.DeviceHostVeth {
			devices = append(devices, accel.Device{Name: l.name, Index: index, Kind: l.kind, Class: l.class})
		}
	}
	clear(a.fresh)
	if len(devices) == 0 {
		return nil
	}
	kept, err := a.host.KeepDevices(ctx, devices)
	a.recordNode(kept)
	return err
}

// recordNode records the results for the node's own devices.
func (a *Agent) recordNode(kept accel.Kept) {
	maps.Copy(a.counts, kept.Counts)
	a.refused = append(a.refused, kept.Refused...)
	a.countChanges(a.options.Node, kept)
}

// countChanges counts changed settings, and reports repaired and refused ones.
func (a *Agent) countChanges(place string, kept accel.Kept) {
	a.metrics.set.Add(float64(kept.Set))
	a.metrics.reverted.Add(float64(kept.Reverted))
	if kept.Repaired > 0 && a.adopted {
		a.metrics.repaired.Add(float64(kept.Repaired))
		a.notify(Event{Warning: true, Reason: "Repaired", Message: fmt.Sprintf("%d settings of %s had been changed by something else, and are restored to what the policies want", kept.Repaired, place)})
	}
	for _, r := range kept.Refused {
		a.options.Log.Warn("keep accelerators", "place", place, "error", r.Err)
		if errors.Is(r.Err, journal.ErrChanged) {
			a.notify(Event{Warning: true, Reason: "Changed", Message: r.Err.Error()})
		}
	}
}

func (a *Agent) notify(e Event) {
	a.options.Log.Warn(e.Message, "reason", e.Reason)
	a.options.Notify(e)
}

// Limits of one pass over pods.
const (
	// atOnce limits the number of open namespaces.
	atOnce = 64
	// verifyAtOnce limits the number of pods per verification. Those that have waited longest come first.
	verifyAtOnce = 128
	// verifyTogether is the number of pods that are verified without looking for notifications: a new pod waits for at most
	// these.
	verifyTogether = 4
)

// keepPods applies the policies to pods that are new or whose policies have changed. In a full pass, it marks the others for
// verification.
func (a *Agent) keepPods(ctx context.Context, full bool) {
	var due, verify []int
	for number, g := range a.groups {
		if !g.done || g.sought {
			due = append(due, number)
		} else if full && (len(g.policies) > 0 || a.undecided(g)) {
			verify = append(verify, number)
		}
	}
	for numbers := range slices.Chunk(due, atOnce) {
		a.keepThese(ctx, numbers)
	}
	if full {
		slices.SortFunc(verify, func(x, y int) int { return a.groups[x].verified.Compare(a.groups[y].verified) })
		a.unverified = verify[:min(len(verify), verifyAtOnce)]
	}
}

// verifyPart verifies the node's runners, and then pods until it has used up its budget of CPU time. It stops early for
// notifications, so that a new pod need not wait.
func (a *Agent) verifyPart(ctx context.Context, budget time.Duration) {
	a.host.Verify(time.Now())
	for end := cpuTime() + budget; len(a.unverified) > 0 && ctx.Err() == nil; {
		n := min(len(a.unverified), verifyTogether)
		a.keepThese(ctx, a.unverified[:n])
		a.unverified = a.unverified[n:]
		if len(a.watch.changes) > 0 || cpuTime() >= end {
			return
		}
	}
}

// keepThese applies the policies to the pods with these numbers, if they still exist.
func (a *Agent) keepThese(ctx context.Context, numbers []int) {
	if ctx.Err() != nil {
		return
	}
	found := a.finder.Find(numbers...)
	for _, number := range numbers {
		n, g := found[number], a.groups[number]
		if g != nil {
			seek := g.done && g.sought
			g.missing = n == nil
			g.done, g.sought = true, false // until a notification or the next verification
			if n != nil {
				a.keepPod(ctx, g, n, seek)
			}
		}
		if n != nil {
			_ = n.Close()
		}
	}
}

// selective reports whether any policy selects pods.
func (a *Agent) selective() bool {
	return slices.ContainsFunc(a.policies, func(p *policy) bool { return p.ofPods() && p.Pods != nil })
}

// undecided reports whether the policies of a namespace depend on which pod it belongs to, and that is not known.
func (a *Agent) undecided(g *group) bool { return g.pod == nil && a.selective() }

// choosePolicies determines the policies of a pod, and marks it as not done if they differ from the applied ones.
func (a *Agent) choosePolicies(g *group) {
	if g.pod != nil {
		// Its labels may have changed, or another pod may have its address now.
		var again *Pod
		for _, ip := range g.pod.Addresses {
			if again == nil {
				again = a.node.pods[ip]
			}
		}
		g.pod = again
	}
	keys, conflicts := a.policiesOf(g.pod)
	if !slices.Equal(keys, g.policies) {
		g.done = false
	}
	g.policies, g.conflicts = keys, conflicts
}

// keepPod applies the policies to a pod. With seek, it only acts if the namespace turns out to belong to a listed pod.
// Otherwise every new list of pods would make the agent verify all settings in namespaces that belong to no pod of the cluster,
// and such a namespace may have a thousand interfaces.
func (a *Agent) keepPod(ctx context.Context, g *group, n *accel.Namespace, seek bool) {
	if a.undecided(g) {
		addresses, err := n.Addresses()
		if err != nil {
			g.err = err
			return
		}
		g.addresses = addresses
		for _, ip := range addresses {
			if pod := a.node.pods[ip]; pod != nil && g.pod == nil {
				g.pod = pod
			}
		}
		if seek && g.pod == nil {
			return
		}
		g.policies, g.conflicts = a.policiesOf(g.pod)
	}
	if len(g.policies) == 0 && g.id == 0 {
		return // nothing to apply or restore: sweep restores what an earlier agent has set
	}
	place := place.Place{Name: a.options.Node + "/" + g.name(), Node: a.options.Node, IRQCPUs: a.host.IRQCPUs()}
	first := g.id == 0
	var id netns.Cookie
	id, g.kept, g.err = n.KeepInside(ctx, a.options.accel(place), g.ends, a.ofPod(g.policies))
	if id != 0 {
		g.id = id
	}
	if g.err != nil {
		a.metrics.errors.Inc()
		a.options.Log.Warn("keep accelerators of a pod", "place", place.Name, "error", g.err)
		return
	}
	g.verified = time.Now()
	if len(g.policies) == 0 && len(g.kept.Refused) == 0 {
		g.id = 0 // everything is restored, and the journal of the namespace is gone
	}
	if first {
		a.metrics.latency.Observe(time.Since(g.since).Seconds())
		a.options.Log.Info("accelerated a pod", "place", place.Name, "settings", g.kept.Set)
	}
	if !first || g.kept.Set > 0 {
		a.countChanges(place.Name, g.kept)
	}
}

// name returns the name of the pod, or names the node's end of its first veth if the pod is not known.
func (g *group) name() string {
	if g.pod != nil {
		return g.pod.Name
	}
	if len(g.ends) == 0 {
		return "pod"
	}
	return fmt.Sprintf("pod of link %d", g.ends[0].Host)
}

// sweep releases the settings of namespaces that are gone, and restores those in namespaces whose policies ended while no agent
// was running.
func (a *Agent) sweep(ctx context.Context) {
	if a.links == nil {
		return
	}
	keep := map[netns.Cookie]bool{a.host.Cookie(): true}
	for _, g := range a.groups {
		keep[g.id] = true
	}
	a.departed = false
	restored, err := a.finder.Sweep(ctx, a.options.accel(place.Place{Name: a.options.Node}), func(id netns.Cookie) bool { return keep[id] })
	a.metrics.reverted.Add(float64(restored))
	if err != nil && ctx.Err() == nil {
		a.metrics.errors.Inc()
		a.options.Log.Warn("forget pods that are gone", "error", err)
	}
}

func (a *Agent) fail(err error) {
	a.failure = err
	a.options.Log.Error("keep accelerators", "error", err)
}
