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

// activePods tracks the active pods: those that recently had an eligible connection. Only their links have programs, because
// every packet of a short connection would pay for them too. It has a lock of its own, so that attach requests do not wait
// while programs are being attached.
type activePods struct {
	mu sync.Mutex
	// podLinks maps each known address to the link of its pod.
	podLinks map[datapath.PodKey]int
	// requested holds the addresses of attach requests for which no link was known. The next scan looks up their routes. The
	// value tells whether the kernel was asked to resolve the address.
	requested map[netip.Addr]bool
	// links holds the links that have programs or need them.
	links map[int]podLink
}

type podLink struct {
	// used is the last time at which the pod had an eligible connection.
	used time.Time
	// idle is the time of the scan that found the pod idle. From then on its packets request programs again, as if the link had
	// none.
	idle time.Time
}

// retryAfter is how long the link of an idle pod keeps its programs. The pod may have a connection that looks eligible but
// never becomes a flow, and that would request the programs again at once. It is less than the interval between sweeps, because
// each sweep looks for idle pods.
const retryAfter = (sweepEvery - 1) * leaseRenewal

// requestedMax limits the number of routes that a scan looks up: a pod can spoof any number of addresses, and each requests
// programs. Beyond the limit, a new address replaces another one.
const requestedMax = 256

// isIdle reports whether a pod is idle: it has had no eligible connection for the idle time.
func isIdle(used time.Time) bool { return time.Since(used) >= time.Duration(idleAfter)*leaseRenewal }

// use records that the pod at a link has an eligible connection, and returns whether it was idle.
func (p *activePods) use(link int) (anew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	anew = isIdle(p.links[link].used)
	p.links[link] = podLink{used: time.Now()}
	return anew
}

// linkOf returns the link of a pod, or 0 if it is unknown. On the first request for an unknown one, anew is true: a scan must
// look up its route.
func (p *activePods) linkOf(pod datapath.PodKey) (link int, anew bool) {
	if address, known := pod.Addr(); known {
		return p.linkOfAddress(address)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.podLinks[pod], false
}

// linkOfAddress is linkOf for an address instead of its key.
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

// resolve reports whether the caller has to ask the kernel to resolve a requested address: once per request.
func (p *activePods) resolve(address netip.Addr) (ask bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	asked, requested := p.requested[address]
	if requested {
		p.requested[address] = true
	}
	return requested && !asked
}

// requestLost requests, perhaps again, the addresses that the node had for links of active pods, but has no more: the kernel has
// forgotten the MAC address, although packets that the node bridges still go there.
func (p *activePods) requestLost(had, has map[netip.Addr]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for address, link := range had {
		_, active := p.links[link]
		_, requested := p.requested[address]
		if active && has[address] == 0 && (requested || len(p.requested) < requestedMax) {
			p.requested[address] = false
		}
	}
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

func (p *activePods) wanted() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.requested))
}

// forgetRequests forgets requested addresses that do not belong to an active pod, so that they can be requested again.
func (p *activePods) forgetRequests() {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.requested, func(a netip.Addr, _ bool) bool { return p.links[p.podLinks[datapath.PodKeyOf(a)]].used.IsZero() })
}

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

// update applies a new scan. It returns all links that need programs, and separately those of active pods, for which the
// programs create flows.
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

// homes holds the link at which the address of each pod was last known. Only run uses it.
type homes map[netip.Addr]int

// moved records a new scan. It returns whether the address of a pod whose link has gone is at another link now: the pod, or what
// has its connections, goes on there. If its link has only gone, its flows will have no packets any more.
func (h homes) moved(n node) (moved bool) {
	for address, link := range n.podLinks {
		if !address.IsGlobalUnicast() {
			continue // several pods have it, such as a multicast address
		}
		if was := h[address]; was != 0 && was != link && n.names[was] == "" {
			moved = true
		}
		h[address] = link
	}
	return moved
}

// prune forgets the addresses that no pod has and no flow needs.
func (h homes) prune(n node, flows map[datapath.Flow]datapath.Activity) {
	addresses, links := make(map[netip.Addr]bool), make(map[int]bool)
	for flow, activity := range flows {
		addresses[flow.Pod.Addr()], addresses[flow.Peer.Addr()] = true, true
		links[activity.Link], links[activity.PeerLink] = true, true
	}
	maps.DeleteFunc(h, func(address netip.Addr, link int) bool {
		return n.podLinks[address] == 0 && !addresses[address] && !links[link]
	})
}
