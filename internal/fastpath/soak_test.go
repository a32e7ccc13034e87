//go:build linux && soak

package fastpath_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/spec"
)

var soak = flag.Duration("soak", 0, "how long TestSoak runs; at least one round")

// soakRun has two worlds with the same connections and the same events: one with fast paths, in
// processes of their own, and a reference without.
type soakRun struct {
	*testing.T
	*rand.Rand
	fast, reference *world
	agents          [2]*exec.Cmd
	pairs           []pair
	kills           int
	// brokenReferences counts connections that were replaced because they, or their conntrack entries, broke without a fast
	// path.
	brokenReferences int
	// memory is the largest memory that an agent used in each round, in MiB.
	memory []int
}

// pair is the same connection in both worlds.
type pair struct {
	name            string
	fast, reference echo
	// local means that it is between two pods of node0.
	local  bool
	opened time.Time
	// forged means that another pod has forged packets of the connection since its entries were compared. One in some thousand
	// random sequence numbers lies in the window. The reference's conntrack then takes the packet for the connection's own, and
	// may wait for an acknowledgement that never comes.
	forged bool
}

// connect connects two pods of different nodes, or the pod near with another one of its node (local).
func (s *soakRun) connect(near, far int, front front, local bool) pair {
	s.Helper()
	s.fast.local, s.reference.local = local, local
	if local {
		far = near
	}
	p := pair{
		local: local,
		name:  fmt.Sprintf("%d of pods %d and %d, local %t", len(s.pairs), near, far, local),
		fast:  s.fast.connectFrom(near, far, front).back(), reference: s.reference.connectFrom(near, far, front).back(), opened: time.Now(),
	}
	p.fast.noKeepalive(s.T)
	p.reference.noKeepalive(s.T)
	return p
}

// exchangeMessages makes round trips of a connection in both worlds. A connection that breaks without a fast path is replaced:
// conntrack accepts some forged packets whatever their sequence numbers.
func (s *soakRun) exchangeMessages(i, n int) {
	s.Helper()
	p := s.pairs[i]
	age := func() time.Duration { return time.Since(p.opened).Round(time.Second) }
	for range n {
		if err := p.fast.trip(patience); err != nil {
			s.Fatalf("connection %s, opened %s ago: %v; conntrack has %+v and %+v", p.name, age(), err,
				s.fast.conntrack("n0", p.fast), s.fast.conntrack("n1", p.fast))
		}
		if err := p.reference.trip(patience); err != nil {
			s.Logf("connection %s, opened %s ago, without the fast path: %v; conntrack has %+v and %+v, and with it %+v and %+v", p.name, age(), err,
				s.reference.conntrack("n0", p.reference), s.reference.conntrack("n1", p.reference), s.fast.conntrack("n0", p.fast), s.fast.conntrack("n1", p.fast))
			s.brokenReferences++
			s.replace(i)
			return
		}
	}
}

// replace closes a connection, and opens another.
func (s *soakRun) replace(i int) {
	s.pairs[i].fast.Close()
	s.pairs[i].reference.Close()
	s.pairs[i] = s.connect(s.IntN(2), s.IntN(2), direct, s.pairs[i].local)
}

func (s *soakRun) startAgent(node int) { s.agents[node] = s.fast.startAgent(fmt.Sprintf("n%d", node)) }

// disturb applies the same random event to both worlds.
func (s *soakRun) disturb() {
	i := s.IntN(len(s.pairs))
	both := func(do func(*world, pair, echo)) {
		p := s.pairs[i]
		do(s.fast, p, p.fast)
		do(s.reference, p, p.reference)
	}
	node := s.IntN(2)
	switch s.IntN(6) {
	case 0: // kill the agent, start another
		_ = s.agents[node].Process.Kill()
		_ = s.agents[node].Wait()
		s.kills++
		s.exchangeMessages(s.IntN(len(s.pairs)), 20)
		s.startAgent(node)
	case 1: // add and delete a rule
		both(func(w *world, _ pair, _ echo) {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "disturb"}
			w.rules(fmt.Sprintf("n%d", node), func(conn *nftables.Conn) {
				chain := conn.AddChain(&nftables.Chain{Table: conn.AddTable(table), Name: "forward", Type: nftables.ChainTypeFilter,
					Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
				conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
			})
			w.rules(fmt.Sprintf("n%d", node), func(conn *nftables.Conn) { conn.DelTable(table) })
		})
	case 2: // another pod forges packets
		seed := s.Uint64()
		flags := []byte{tcpSYN, tcpRST, 0x11, 0x10}[s.IntN(4)]
		s.waitAccelerated(i) // until then an entry that a killed agent left liberal is not protected
		s.pairs[i].forged = true
		both(func(w *world, _ pair, e echo) {
			forge, numbers := w.forger("n0p2", e), rand.New(rand.NewPCG(seed, 1))
			for range 16 {
				forge(numbers.Uint32(), flags)
			}
		})
	case 3: // a pod floods its bridge with MAC addresses
		both(func(w *world, _ pair, _ echo) { w.tap("n0p1", "eth0").floodFrom(2000) })
	case 4: // send much data
		size := int64(s.IntN(64)+1) << 20
		both(func(w *world, _ pair, e echo) { w.transfer(e, size) })
	case 5: // replace a connection
		s.replace(i)
	}
}

// waitAccelerated uses a connection until it is accelerated on both nodes.
func (s *soakRun) waitAccelerated(i int) {
	s.Helper()
	s.fast.eventually("connection "+s.pairs[i].name+" is accelerated", func() {}, func() bool {
		before := s.slow(i)
		s.exchangeMessages(i, 100)
		now := s.slow(i)
		return now[0]-before[0] < 40 && now[1]-before[1] < 40
	})
}

// slow returns how many packets the kernel of each node has forwarded, of those that connection i may be of.
func (s *soakRun) slow(i int) (n [2]int) {
	s.fast.local = s.pairs[i].local
	n[0] = s.fast.slow()
	if !s.fast.local {
		n[1] = s.fast.forwarded("n1")
	}
	return n
}

// settle leaves all connections idle until conntrack checks their windows again, and compares their
// conntrack entries in both worlds.
func (s *soakRun) settle() {
	s.Helper()
	for i := range s.pairs {
		s.waitAccelerated(i) // so that a new agent knows it, too
	}
	for i := range s.pairs {
		s.exchangeMessages(i, 1)
	}
	time.Sleep(settled)
	for i := range s.pairs {
		if s.compareEntries(s.pairs[i]) {
			s.pairs[i].forged = false
			continue
		}
		s.brokenReferences++
		s.replace(i)
	}
	most := 0
	for _, h := range s.agents {
		_, memory := usage(s.T, h.Process.Pid)
		most = max(most, memory>>20)
	}
	s.memory = append(s.memory, most)
}

// compareEntries compares the conntrack entries of an idle connection in both worlds, and reports whether that of the
// reference is as it was before packets were forged.
func (s *soakRun) compareEntries(p pair) (undisturbed bool) {
	s.Helper()
	undisturbed = true
	s.fast.local = p.local
	for _, node := range s.fast.nodes() {
		var is, was conntrack.Progress
		for until := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
			is, was = s.fast.conntrack(node, p.fast), s.reference.conntrack(node, p.reference)
			if (is.Flags[0]|is.Flags[1])&flagLiberal == 0 || time.Now().After(until) {
				break
			}
		}
		if d := int(is.Timeout) - int(was.Timeout); is.State == was.State && is.Flags == was.Flags && d >= -1 && d <= 1 {
			continue
		}
		unharmed := is.State == stateEstablished && (is.Flags[0]|is.Flags[1])&(flagLiberal|flagUnacknowledged) == 0 && is.Timeout > establishedTimeout-600
		if p.forged && unharmed {
			s.Logf("without the fast path %s has %+v of connection %s, of which packets were forged; with it %+v", node, was, p.name, is)
			undisturbed = false
			continue
		}
		s.Errorf("%s has %+v of connection %s, without the fast path %+v", node, is, p.name, was)
	}
	return undisturbed
}

// TestSoak checks that connections survive the events of a node, compared with the same connections
// in a world without the fast path: none breaks, and the conntrack entries of idle ones are the
// same.
func TestSoak(t *testing.T) {
	s := &soakRun{T: t, Rand: rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0)),
		fast: newLocalWorld(t, spec.ShapeFlannel, false), reference: newLocalWorld(t, spec.ShapeFlannel, false)}
	for _, w := range []*world{s.fast, s.reference} {
		for _, node := range []string{"n0", "n1"} {
			w.dropInvalid(node)
		}
	}
	s.startAgent(0)
	s.startAgent(1)
	defer func() {
		if t.Failed() {
			for _, h := range s.agents {
				_ = h.Process.Signal(unix.SIGUSR1)
				time.Sleep(time.Second)
			}
		}
	}()
	for i := range 9 {
		front := direct
		if i%3 == 2 {
			front = byService
		}
		s.pairs = append(s.pairs, s.connect(i%2, i/2%2, front, i >= 6))
	}
	rounds := 0
	for began := time.Now(); rounds == 0 || time.Since(began) < *soak; rounds++ {
		for range 12 {
			s.disturb()
			for i := range s.pairs {
				s.exchangeMessages(i, s.IntN(60))
			}
		}
		s.settle()
		if t.Failed() {
			break
		}
	}
	t.Logf("%d rounds, %d kills, %d connections broke without the fast path, memory of an agent at most %v MiB", rounds, s.kills, s.brokenReferences, s.memory)
	if n := len(s.memory); n > 20 && s.memory[n-1] > s.memory[n/4]*5/4+2 {
		t.Errorf("the memory of an agent went from %d to %d MiB", s.memory[n/4], s.memory[n-1])
	}
}
