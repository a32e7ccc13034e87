//go:build linux

package fastpath

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"slipstream.dev/bpf"
)

// pods are the links of pods that have connections worth it, and so programs: a short
// connection pays for each that it meets. They are told of while programs are being attached,
// and do not wait for that.
type pods struct {
	mu sync.Mutex
	// behind are the links by the addresses that are known to be there.
	behind map[bpf.PodKey]int
	// asked are addresses that were not: a route may lead to them.
	asked map[netip.Addr]bool
	// used says when there was a connection worth it last.
	used map[int]time.Time
}

// retryAfter is how long a pod that is watched no more keeps its programs: it may have a connection
// that never becomes known, to somewhere else, and would have it watched again at once.
const retryAfter = sweepEvery * leaseRenewal

// requestedMax bounds the addresses that are looked up at each look at the devices. Where there are
// more, others make room, whichever they are: a pod that sends in the name of many addresses has
// as many be asked for.
const requestedMax = 256

// isIdle tells whether a pod has had no connection for so long that it is not watched.
func isIdle(used time.Time) bool { return time.Since(used) >= time.Duration(idleAfter)*leaseRenewal }

// use notes that a pod has a connection worth it, and tells whether that is new.
func (p *pods) use(link int) (anew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	anew = isIdle(p.used[link])
	p.used[link] = time.Now()
	return anew
}

// linkOf is where an address is, or 0, and whether that is asked for the first time: then the
// next look at the devices tells where a route leads to it.
func (p *pods) linkOf(pod bpf.PodKey) (link int, anew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	link = p.behind[pod]
	address, known := pod.Addr()
	if link != 0 || !known || p.asked[address] {
		return link, false
	}
	if len(p.asked) >= requestedMax {
		p.makeRoom()
	}
	p.asked[address] = true
	return 0, true
}

// makeRoom has some address be asked for no more, one that leads nowhere if there is any.
func (p *pods) makeRoom() {
	var some netip.Addr
	for some = range p.asked { // in no order
		if p.behind[bpf.PodKeyOf(some)] == 0 {
			break
		}
	}
	delete(p.asked, some)
}

// wanted are the addresses that were asked for.
func (p *pods) wanted() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.asked))
}

// forget has addresses that lead to no pod which is watched be asked for anew.
func (p *pods) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.asked, func(a netip.Addr, _ bool) bool { return p.used[p.behind[bpf.PodKeyOf(a)]].IsZero() })
}

// rest tells whether any are resting.
func (p *pods) rest() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range p.used {
		if isIdle(at) {
			return true
		}
	}
	return false
}

// follow learns what a node has, and returns those of its links that are to have all programs,
// and those of them that are watched.
func (p *pods) follow(n node) (all, watched []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.behind = make(map[bpf.PodKey]int)
	for address, link := range n.behind {
		p.behind[bpf.PodKeyOf(address)] = link
	}
	for link, at := range p.used {
		switch {
		case !slices.Contains(n.veths, link) || isIdle(at.Add(retryAfter)):
			delete(p.used, link)
			continue
		case !isIdle(at):
			watched = append(watched, link)
		}
		all = append(all, link)
	}
	return all, watched
}
