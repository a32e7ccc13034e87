//go:build linux

package fastpath

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"slipstream.dev/internal/fastpath/datapath"
)

// activePods tracks the links of active pods, which have programs. Others have none, because every packet
// of a short connection would pay for them. Its lock is separate, so that attach requests do not
// wait while programs are being attached.
type activePods struct {
	mu sync.Mutex
	// podLinks maps each known address to the link of its pod.
	podLinks map[datapath.PodKey]int
	// requested has the addresses with attach requests whose links were unknown: the next scan
	// looks up their routes. The value is whether the kernel was asked to resolve the address.
	requested map[netip.Addr]bool
	// links has the links that have programs, or need them.
	links map[int]podLink
}

// podLink is the link of a pod.
type podLink struct {
	// used is the last time at which the pod had an eligible connection.
	used time.Time
	// idle is the time of the scan that found the pod idle. From then on its packets request programs again, as the packets of a
	// pod without programs do.
	idle time.Time
}

// retryAfter is the time for which the link of an idle pod keeps its programs. The pod may have a connection
// that looks eligible but never becomes a flow, and that connection would request the programs
// again at once. The time ends before the next sweep, which looks for idle pods.
const retryAfter = (sweepEvery - 1) * leaseRenewal

// requestedMax limits the number of routes that each scan looks up: a pod can request any number of
// addresses by spoofing them. Beyond the limit, a new address replaces another.
const requestedMax = 256

// isIdle reports whether a pod is idle: it has had no eligible connection for the idle time.
func isIdle(used time.Time) bool { return time.Since(used) >= time.Duration(idleAfter)*leaseRenewal }

// use records that a pod has an eligible connection, and returns whether the pod was idle.
func (p *activePods) use(link int) (anew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	anew = isIdle(p.links[link].used)
	p.links[link] = podLink{used: time.Now()}
	return anew
}

// linkOf returns the link of a pod, or 0 if it is unknown, and whether this is the first request for it:
// then a scan must look up its route.
func (p *activePods) linkOf(pod datapath.PodKey) (link int, anew bool) {
	if address, known := pod.Addr(); known {
		return p.linkOfAddress(address)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.podLinks[pod], false
}

// linkOfAddress is linkOf for the whole address.
func (p *activePods) linkOfAddress(address netip.Addr) (link int, anew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	link = p.podLinks[datapath.PodKeyOf(address)]
	if _, known := p.requested[address]; known || link != 0 {
		return link, false
	}
	if len(p.requested) >= requestedMax {
		p.evictRequest()
	}
	p.requested[address] = false
	return 0, true
}

// resolve reports whether the kernel has not been asked to resolve a requested address yet.
func (p *activePods) resolve(address netip.Addr) (ask bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	asked, requested := p.requested[address]
	if requested {
		p.requested[address] = true
	}
	return requested && !asked
}

// evictRequest forgets one requested address, preferably one without a link.
func (p *activePods) evictRequest() {
	var some netip.Addr
	for some = range p.requested { // in no order
		if p.podLinks[datapath.PodKeyOf(some)] == 0 {
			break
		}
	}
	delete(p.requested, some)
}

// wanted returns the requested addresses.
func (p *activePods) wanted() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.requested))
}

// forgetRequests forgets requested addresses that lead to no active pod, so that they can be requested
// again.
func (p *activePods) forgetRequests() {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.requested, func(a netip.Addr, _ bool) bool { return p.links[p.podLinks[datapath.PodKeyOf(a)]].used.IsZero() })
}

// anyIdle reports whether a pod with programs is idle.
func (p *activePods) anyIdle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.links {
		if isIdle(l.used) {
			return true
		}
	}
	return false
}

// update applies a new scan. It returns the links that need programs, and those among them whose
// pods are active: for these, the programs create flows.
func (p *activePods) update(n node) (all, watched []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.podLinks = make(map[datapath.PodKey]int)
	for address, link := range n.podLinks {
		p.podLinks[datapath.PodKeyOf(address)] = link
	}
	for link, l := range p.links {
		switch {
		case !slices.Contains(n.veths, link), !l.idle.IsZero() && time.Since(l.idle) >= retryAfter:
			delete(p.links, link)
			continue
		case !isIdle(l.used):
			watched = append(watched, link)
		case l.idle.IsZero():
			p.links[link] = podLink{l.used, time.Now()}
		}
		all = append(all, link)
	}
	return all, watched
}
