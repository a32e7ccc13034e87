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

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
)

var soak = flag.Duration("soak", 0, "how long TestSoak goes on; it makes one round at least")

// soaked are two worlds with the same connections, which see the same: one with fast paths, by
// processes of their own, and one without.
type soaked struct {
	*testing.T
	*rand.Rand
	fast, slow *world
	holders    [2]*exec.Cmd
	pairs      []pair
	kills      int
	// brokenTwins are connections that broke without a fast path, and were left out from then on.
	brokenTwins int
	// memory is the most that a holder had in each round, MiB.
	memory []int
}

// pair is the same connection in both worlds.
type pair struct {
	name       string
	fast, slow echo
	// opened is when it was.
	opened time.Time
}

func (s *soaked) connect(near, far int, front front) pair {
	s.Helper()
	p := pair{
		name: fmt.Sprintf("%d of pods %d and %d", len(s.pairs), near, far),
		fast: s.fast.connectFrom(near, far, front).back(), slow: s.slow.connectFrom(near, far, front).back(), opened: time.Now(),
	}
	p.fast.quiet(s.T)
	p.slow.quiet(s.T)
	return p
}

// talk makes so many round trips of a connection in both worlds. One that breaks without a fast
// path, as conntrack believes some forged packets whatever their numbers, is replaced.
func (s *soaked) talk(i, n int) {
	s.Helper()
	p := s.pairs[i]
	age := func() time.Duration { return time.Since(p.opened).Round(time.Second) }
	for range n {
		if err := p.fast.trip(patience); err != nil {
			s.Fatalf("connection %s, opened %s ago: %v; conntrack knows %+v and %+v", p.name, age(), err,
				s.fast.conntrack("n0", p.fast), s.fast.conntrack("n1", p.fast))
		}
		if err := p.slow.trip(patience); err != nil {
			s.Logf("connection %s, opened %s ago, without the fast path: %v; conntrack knows %+v and %+v, and with it %+v and %+v", p.name, age(), err,
				s.slow.conntrack("n0", p.slow), s.slow.conntrack("n1", p.slow), s.fast.conntrack("n0", p.fast), s.fast.conntrack("n1", p.fast))
			s.brokenTwins++
			s.replace(i)
			return
		}
	}
}

// replace has a connection end, and another begin.
func (s *soaked) replace(i int) {
	s.pairs[i].fast.Close()
	s.pairs[i].slow.Close()
	s.pairs[i] = s.connect(s.IntN(2), s.IntN(2), direct)
}

// hold has a process begin to hold the fast path of a node.
func (s *soaked) hold(node int) { s.holders[node] = s.fast.hold(fmt.Sprintf("n%d", node)) }

// trouble does something at random to both worlds.
func (s *soaked) trouble() {
	i := s.IntN(len(s.pairs))
	both := func(do func(*world, pair, echo)) {
		p := s.pairs[i]
		do(s.fast, p, p.fast)
		do(s.slow, p, p.slow)
	}
	node := s.IntN(2)
	switch s.IntN(6) {
	case 0: // the process is killed, and another begins
		_ = s.holders[node].Process.Kill()
		_ = s.holders[node].Wait()
		s.kills++
		s.talk(s.IntN(len(s.pairs)), 20)
		s.hold(node)
	case 1: // a rule comes and goes
		both(func(w *world, _ pair, _ echo) {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "trouble"}
			w.rules(fmt.Sprintf("n%d", node), func(conn *nftables.Conn) {
				chain := conn.AddChain(&nftables.Chain{Table: conn.AddTable(table), Name: "forward", Type: nftables.ChainTypeFilter,
					Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
				conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
			})
			w.rules(fmt.Sprintf("n%d", node), func(conn *nftables.Conn) { conn.DelTable(table) })
		})
	case 2: // another pod forges packets of a connection
		seed := s.Uint64()
		flags := []byte{tcpSYN, tcpRST, 0x11, 0x10}[s.IntN(4)]
		s.carried(i) // what was left liberal by a process that died is not guarded until then
		both(func(w *world, _ pair, e echo) {
			forge, numbers := w.forger("n0p1", e), rand.New(rand.NewPCG(seed, 1))
			for range 16 {
				forge(numbers.Uint32(), flags)
			}
		})
	case 3: // a pod floods its bridge
		both(func(w *world, _ pair, _ echo) { w.tap("n0p1", "eth0").floods(2000) })
	case 4: // much is sent
		size := int64(s.IntN(64)+1) << 20
		both(func(w *world, _ pair, e echo) { w.transfer(e, size) })
	case 5: // a connection ends, another begins
		s.replace(i)
	}
}

// carried talks by a connection until it is carried on both nodes.
func (s *soaked) carried(i int) {
	s.Helper()
	s.fast.eventually("connection "+s.pairs[i].name+" to be carried", func() {}, func() bool {
		before := [2]int{s.fast.forwarded("n0"), s.fast.forwarded("n1")}
		s.talk(i, 100)
		return s.fast.forwarded("n0")-before[0] < 40 && s.fast.forwarded("n1")-before[1] < 40
	})
}

// settle has all be idle until conntrack checks the windows of all connections, and compares
// what it knows of each.
func (s *soaked) settle() {
	s.Helper()
	for i := range s.pairs {
		s.carried(i) // and known to the process that came after a kill
	}
	for i := range s.pairs {
		s.talk(i, 1)
	}
	time.Sleep(settled)
	for _, p := range s.pairs {
		for _, node := range []string{"n0", "n1"} {
			var is, was fastpath.Tracked
			for until := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
				is, was = s.fast.conntrack(node, p.fast), s.slow.conntrack(node, p.slow)
				if (is.Flags[0]|is.Flags[1])&flagLiberal == 0 || time.Now().After(until) {
					break
				}
			}
			if d := int(is.Timeout) - int(was.Timeout); is.State != was.State || is.Flags != was.Flags || d < -1 || d > 1 {
				s.Errorf("%s knows %+v of connection %s, and without the fast path %+v", node, is, p.name, was)
			}
		}
	}
	most := 0
	for _, h := range s.holders {
		_, memory := usage(s.T, h.Process.Pid)
		most = max(most, memory>>20)
	}
	s.memory = append(s.memory, most)
}

// TestSoak has connections live through what happens on a node, beside the same ones on a node
// without: none breaks, and conntrack knows the same of each that is idle.
func TestSoak(t *testing.T) {
	s := &soaked{T: t, Rand: rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0)),
		fast: newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull), slow: newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)}
	for _, w := range []*world{s.fast, s.slow} {
		for _, node := range []string{"n0", "n1"} {
			w.dropInvalid(node)
		}
	}
	s.hold(0)
	s.hold(1)
	defer func() {
		if t.Failed() {
			for _, h := range s.holders {
				_ = h.Process.Signal(unix.SIGUSR1)
				time.Sleep(time.Second)
			}
		}
	}()
	for i := range 6 {
		front := direct
		if i%3 == 2 {
			front = byService
		}
		s.pairs = append(s.pairs, s.connect(i%2, i/2%2, front))
	}
	rounds := 0
	for began := time.Now(); rounds == 0 || time.Since(began) < *soak; rounds++ {
		for range 12 {
			s.trouble()
			for i := range s.pairs {
				s.talk(i, s.IntN(60))
			}
		}
		s.settle()
		if t.Failed() {
			break
		}
	}
	t.Logf("%d rounds, %d kills, %d connections broke without the fast path, memory of a holder at most %v MiB", rounds, s.kills, s.brokenTwins, s.memory)
	if n := len(s.memory); n > 20 && s.memory[n-1] > s.memory[n/4]*5/4+2 {
		t.Errorf("the memory of a holder went from %d to %d MiB", s.memory[n/4], s.memory[n-1])
	}
}
