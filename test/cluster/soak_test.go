//go:build linux && soak

package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/fastpath"
	"slipstream.dev/internal/testenv"
)

var soak = flag.Duration("soak", 0, "how long TestSoak goes on; it makes one round at least")

const (
	// patience is how long a message may take, agents and containers starting meanwhile.
	patience = 30 * time.Second
	// settled is longer than an acknowledgement is delayed.
	settled = 300 * time.Millisecond
	// heard is how long an announced rule may take to be heeded, as in testRules.
	heard = 200 * time.Millisecond

	soakPort = "4000"
	// The last of each node's pods is hostile; the others hold connections.
	soakPods, hostile = 3, 2
	// What conntrack has of a connection (nf_conntrack_tcp.h).
	stateEstablished, flagLiberal = 3, 0x08
	tcpFIN, tcpSYN, tcpRST        = 0x01, 0x02, 0x04
	tcpACK                        = 0x10
)

// side is a pair of nodes, and the pods on them that hold connections.
type side struct {
	nodes [2]*Node
	pods  [2][soakPods]webPod
	// services are the addresses in front of the pods of each node.
	services [2]string
	accepted chan net.Conn
}

// pair is the same connection on both sides.
type pair struct {
	name string
	// node is which of a side's has the near end.
	node      int
	byService bool
	opened    time.Time
	// accelerated is when it was last seen on the fast path.
	accelerated time.Time
	// past is what was done to it, known what conntrack knew of it last, with the fast path.
	past  []string
	known [2]fastpath.Tracked
	// forged tells whether somebody has forged packets since it sent its last.
	forged atomic.Bool
	on     [2]*held
}

func (p *pair) note(what string) { p.past = append(p.past, time.Now().Format(time.TimeOnly)+" "+what) }

func (p *pair) String() string {
	return fmt.Sprintf("connection %s, opened %s ago", p.name, time.Since(p.opened).Round(time.Second))
}

// end is the one at a node of a side.
func (p *pair) end(side, node int) *net.TCPConn {
	if node == p.node {
		return p.on[side].near
	}
	return p.on[side].far
}

// soaked are two sides of a cluster with the same connections, which see the same: the first has
// fast paths, by the agents of its nodes, the second has none.
type soaked struct {
	*testing.T
	*rand.Rand
	c     *Cluster
	sides [2]*side
	pairs []*pair
	// calm is held to write while no connection may be busy by itself.
	calm sync.RWMutex
	// ids are given to connections, each side's another.
	ids    uint64
	killed time.Time
	// kills are those of the agents of each node.
	kills [2]int
	// said is what the agents of each node said that were killed.
	said [2]string
	// few tells whether the services have fewer pods than there are.
	few bool
	// memory is the most that an agent had in each round, MiB.
	memory []float64

	rounds, policies, pods, opened, compared, differ int
	messages, bytes, resets, misdelivered            atomic.Int64
	accelerated                                      [2]float64
}

// TestSoak has connections between pods of a cluster live through what happens there, beside the
// same ones on nodes without the fast path: none breaks, each byte arrives where it should, and
// conntrack knows the same of each that is idle.
func TestSoak(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("the seed is %d", seed)
	s := &soaked{T: t, Rand: rand.New(rand.NewPCG(seed, 0)), c: own(t, Config{Nodes: 4, Log: os.Stderr})}
	defer s.tell()
	s.furnish()
	defer s.chatter()()
	for began := time.Now(); s.rounds == 0 || time.Since(began) < *soak; s.rounds++ {
		most := 0.0
		for _, i := range s.Perm(len(troubles)) {
			s.Logf("%s round %d: %s", time.Now().Format(time.TimeOnly), s.rounds, troubles[i].name)
			troubles[i].make(s)
			for _, p := range s.pairs[:talking] {
				s.talk(p, s.IntN(60))
			}
			s.remembered()
			most = max(most, s.resident())
			if s.broken() {
				return
			}
		}
		s.settle()
		s.memory = append(s.memory, most)
		s.Logf("%s round %d: agents had %.1f MiB at most", time.Now().Format(time.TimeOnly), s.rounds, most)
	}
	if n := len(s.memory); n > 12 {
		first, last := slices.Max(s.memory[n/4:n/2]), slices.Max(s.memory[n*3/4:])
		if last > first*5/4+2 {
			t.Errorf("the memory of an agent went from %.1f to %.1f MiB", first, last)
		}
	}
}

// broken tells whether a connection has broken: that ends the soak. What conntrack knows and
// should not is counted, and it goes on.
func (s *soaked) broken() bool { return s.resets.Load()+s.misdelivered.Load() > 0 }

// tell prints what came of it, and when it failed what there is to know.
func (s *soaked) tell() {
	if s.Failed() {
		for i := range s.sides[0].nodes {
			s.confess(i)
		}
	}
	first, last := 0.0, 0.0
	if n := len(s.memory); n > 0 {
		first, last = s.memory[0], s.memory[n-1]
	}
	s.Logf(`
rounds                       %d
agents killed                %d
policy changes               %d
pods created and deleted     %d
connections opened           %d on each side
messages                     %d, %.1f GB, both sides
packets accelerated, by node     %.0f and %.0f
resets                       %d
misdeliveries                %d
entries compared             %d
entries that differ          %d
memory of an agent, MiB      %.1f in the first round, %.1f in the last, each at most: %.1f`,
		s.rounds, s.kills[0]+s.kills[1], s.policies, s.pods, s.opened, s.messages.Load(), float64(s.bytes.Load())/1e9, s.accelerated[0], s.accelerated[1],
		s.resets.Load(), s.misdelivered.Load(), s.compared, s.differ, first, last, s.memory)
}

// confess prints what an accelerated node says of itself.
func (s *soaked) confess(node int) {
	n := s.sides[0].nodes[node]
	s.hear(node)
	s.Logf("%s, the agents' log:\n%s", n.name, s.said[node])
	status, err := output(n.Command(context.Background(), program, "accel", "status"))
	s.Logf("%s, slipstream accel status: %v\n%s", n.name, err, status)
	object, err := tryKubectl(s.c, nil, "get", "nodeacceleration", n.name, "-o", "jsonpath={.status}")
	s.Logf("%s, its NodeAcceleration: %v\n%s", n.name, err, object)
}

// hear keeps the end of what the agent of a node has said so far.
func (s *soaked) hear(node int) {
	n := s.sides[0].nodes[node]
	out, err := tryKubectl(s.c, nil, "get", "pods", "-n", chartNamespace, "--field-selector", "spec.nodeName="+n.name, "-o", "name")
	if err == nil {
		out, err = tryKubectl(s.c, nil, "logs", "-n", chartNamespace, "--tail=60", strings.TrimSpace(out))
	}
	if err != nil {
		out = err.Error()
	}
	s.said[node] += out + "\n"
	s.said[node] = s.said[node][max(0, len(s.said[node])-1<<14):]
}

// kubectl asks again where the cluster does not answer, as a person would.
func (s *soaked) kubectl(stdin string, args ...string) (out string) {
	s.Helper()
	testenv.Eventually(s, time.Minute, fmt.Sprintf("kubectl %v", args), func() string {
		var err error
		if out, err = tryKubectl(s.c, strings.NewReader(stdin), args...); err != nil {
			return err.Error()
		}
		return ""
	})
	return out
}

const soakPolicy = "{nodeSelector: {soak: fast}, rollout: {stepPercent: 100, pauseSeconds: 1}, accelerate: [{fastpath: {}}]}"

// furnish makes the pods, the agents, the policy and the connections.
func (s *soaked) furnish() {
	s.Helper()
	run, chart := helm(s, s.c)
	s.kubectl("", "create", "namespace", chartNamespace)
	run("install", "slipstream", chart, "--set", "image.tag=test,metrics.address=127.0.0.1", "--wait", "--timeout", "3m")
	for i := range s.sides {
		s.sides[i] = s.newSide(i)
		for _, n := range s.sides[i].nodes {
			// As nodes do whose rules are made by kube-proxy in mode iptables.
			s.node(n, "nft 'add table ip invalid; add chain ip invalid forward { type filter hook forward priority 0; }; add rule ip invalid forward ct state invalid drop'")
		}
	}
	for _, n := range s.sides[0].nodes {
		s.kubectl("", "label", "--overwrite", "node", n.name, "soak=fast")
	}
	s.applyPolicy()
	for i := range busyFrom + 2 {
		s.pairs = append(s.pairs, s.connect(i, i%2, i/2%2 == 1))
	}
}

// Of all connections the first talk after each trouble; those behind are idle between rounds; the
// last are busy all the time.
const talking, busyFrom = 4, 8

// node runs a command on a node.
func (s *soaked) node(n *Node, command string) string {
	s.Helper()
	out, err := output(n.Command(s.Context(), "sh", "-c", command))
	if err != nil {
		s.Fatalf("%s: %v", n.name, err)
	}
	return out
}

const soakPod = `
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default, labels: {soak: %s, serves: %s}}
spec:
  nodeName: %s
  terminationGracePeriodSeconds: 1
  containers: [{name: it, image: "slipstream.dev/slipstream:test", imagePullPolicy: Never, args: [worker, --hold]}]
---
`

// newSide makes the pods of two nodes, and services in front of them.
func (s *soaked) newSide(i int) *side {
	s.Helper()
	d := &side{accepted: make(chan net.Conn, 64)}
	var manifest strings.Builder
	for j := range d.nodes {
		name := fmt.Sprintf("node%d", 2*i+j)
		d.nodes[j] = s.c.Node(name)
		for k := range soakPods {
			serves := name
			if k == hostile {
				serves = "nothing"
			}
			fmt.Fprintf(&manifest, soakPod, fmt.Sprintf("%s-%d", name, k), "holds", serves, name)
		}
		fmt.Fprintf(&manifest, "{apiVersion: v1, kind: Service, metadata: {name: %s, namespace: default}, spec: {selector: {serves: %s}, ports: [{port: 80, targetPort: %s}]}}\n---\n",
			name, name, soakPort)
	}
	s.kubectl(manifest.String(), "apply", "-f", "-")
	s.kubectl("", "wait", "--for=condition=Ready", "pod", "-l", "soak=holds", "--timeout=90s")
	for j, n := range d.nodes {
		d.services[j] = s.kubectl("", "get", "service", n.name, "-o", "jsonpath={.spec.clusterIP}")
		for k := range d.pods[j] {
			name := fmt.Sprintf("%s-%d", n.name, k)
			ip := s.kubectl("", "get", "pod", name, "-o", "jsonpath={.status.podIP}")
			d.pods[j][k] = webPod{name, ip, podNetns(s, n, ip)}
			if k != hostile {
				go d.accept(listen(s, d.pods[j][k], soakPort))
			}
		}
	}
	return d
}

// accept takes the connections to a pod, until the test ends.
func (d *side) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		d.accepted <- c
	}
}

// connect opens a connection on both sides.
func (s *soaked) connect(i, node int, byService bool) *pair {
	s.Helper()
	near, far := s.IntN(hostile), s.IntN(hostile)
	what := fmt.Sprintf("to pod %d", far)
	if byService {
		what = "to the service"
	}
	p := &pair{node: node, byService: byService, opened: time.Now()}
	for j, d := range s.sides {
		to := net.JoinHostPort(d.pods[1-node][far].ip, soakPort)
		if byService {
			to = net.JoinHostPort(d.services[1-node], "80")
		}
		p.on[j] = s.dial(d, d.pods[node][near], to)
		from, _ := ends(p.on[j].near)
		p.name += fmt.Sprintf("%s %v ", d.nodes[node].name, from)
	}
	p.name = fmt.Sprintf("%d (%s, %s of the other node)", i, strings.TrimSpace(p.name), what)
	s.opened++
	return p
}

// dial opens a connection from a pod of a side. kube-proxy refuses those to a service until it
// has heard of its pods.
func (s *soaked) dial(d *side, from webPod, to string) (h *held) {
	s.Helper()
	testenv.Eventually(s, time.Minute, "connection to "+to, func() string {
		var near net.Conn
		if err := onNetns(from.netns, func() (err error) {
			near, err = (&net.Dialer{Timeout: patience, KeepAlive: -1}).Dial("tcp4", to)
			return err
		}); err != nil {
			return err.Error()
		}
		for timeout := time.After(patience); ; {
			select {
			case far := <-d.accepted:
				if far.RemoteAddr().String() == near.LocalAddr().String() {
					s.ids++
					h = newHeld(near, far, s.ids)
					s.Cleanup(h.close)
					return ""
				}
				far.Close() // of one that was given up
			case <-timeout:
				near.Close()
				return "nobody accepted it"
			}
		}
	})
	return h
}

// exchange sends the same on both sides.
func (s *soaked) exchange(p *pair, size int) bool {
	s.Helper()
	for i, h := range p.on {
		s.messages.Add(1)
		s.bytes.Add(2 * int64(size))
		p.forged.Store(false)
		if err := h.exchange(size); err != nil {
			s.broke(p, i, err)
			return false
		}
	}
	return true
}

// talk makes so many round trips on both sides.
func (s *soaked) talk(p *pair, n int) {
	s.Helper()
	for range n {
		if !s.exchange(p, s.IntN(2048)+1) {
			s.FailNow()
		}
	}
}

// broke tells of a connection that did not do what it should.
func (s *soaked) broke(p *pair, side int, err error) {
	s.Helper()
	if errors.Is(err, errMisdelivered) {
		s.misdelivered.Add(1)
	} else {
		s.resets.Add(1)
	}
	without := []string{"", ", without the fast path"}[side]
	s.Errorf("%v, between %s and %s%s: %v; an agent was killed last at %v, it was last accelerated at %v\n%s", p, s.sides[side].nodes[0].name, s.sides[side].nodes[1].name,
		without, err, s.killed.Format(time.TimeOnly), p.accelerated.Format(time.TimeOnly), s.entries(p))
}

// entries is what all nodes know of a connection, and what was done to it last.
func (s *soaked) entries(p *pair) (text string) {
	for i, d := range s.sides {
		for j, n := range d.nodes {
			t, err := tracked(n, p.end(i, j))
			text += fmt.Sprintf("  %s knows %+v %v\n", n.name, t, err)
		}
	}
	return text + "  " + strings.Join(p.past[max(0, len(p.past)-20):], "\n  ")
}

// chatter has some connections be busy, until what it returns is called.
func (s *soaked) chatter() (stop func()) {
	quit := make(chan struct{})
	var running sync.WaitGroup
	for i, p := range s.pairs[busyFrom:] {
		numbers := rand.New(rand.NewPCG(s.Uint64(), uint64(i)))
		running.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for ok := true; ok; {
				select {
				case <-quit:
					return
				case <-tick.C:
				}
				s.calm.RLock()
				ok = s.exchange(p, numbers.IntN(1<<15)+1)
				s.calm.RUnlock()
			}
		})
	}
	return func() { close(quit); running.Wait() }
}

// calmly does something while no connection is busy by itself.
func (s *soaked) calmly(do func()) {
	s.calm.Lock()
	defer s.calm.Unlock()
	do()
}

// took is how many packets a node's agent has had take the fast path, out and in.
func took(n *Node) (out, in float64, err error) {
	text, err := scrape(n)
	if err != nil {
		return 0, 0, err
	}
	out, _ = metricIn(text, `slipstream_fastpath_packets_total{reason="fast-out"}`)
	in, _ = metricIn(text, `slipstream_fastpath_packets_total{reason="fast-in"}`)
	return out, in, nil
}

// accelerate exchanges messages until both nodes accelerate a connection: those of the process that came after a kill too.
func (s *soaked) accelerate(p *pair) {
	s.Helper()
	const trips = 100
	var before [2][2]float64
	talked := false
	s.calmly(func() {
		testenv.Eventually(s, time.Minute, p.String()+", to be accelerated", func() (missing string) {
			for i, n := range s.sides[0].nodes {
				out, in, err := took(n)
				if err != nil {
					missing += err.Error() + " "
				} else if out, in := out-before[i][0], in-before[i][1]; !talked || out < trips*3/4 || in < trips*3/4 {
					missing += fmt.Sprintf("of %d there and back %s had %.0f and %.0f take the fast path ", trips, n.name, out, in)
				} else {
					s.accelerated[i] += out + in
				}
				before[i] = [2]float64{out, in}
			}
			if missing != "" {
				// The pause of 200 ms is longer than scrapes share what one of them has gathered.
				s.talk(p, trips)
				talked = true
				missing += s.entries(p)
			}
			return missing
		})
	})
	p.accelerated = time.Now()
	p.note("is accelerated")
}

// forgotten waits until the fast path has let go of connections that are idle: conntrack checks
// their windows again.
func (s *soaked) forgotten(all ...*pair) {
	s.Helper()
	var left string
	for deadline := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		if left = s.liberal(all); left == "" {
			return
		}
		if time.Now().After(deadline) {
			s.Errorf("conntrack does not check windows %v after the last packet: %s", patience, left)
			return
		}
	}
}

// liberal tells of which connections conntrack does not check the windows.
func (s *soaked) liberal(all []*pair) (text string) {
	s.Helper()
	for _, p := range all {
		for j, n := range s.sides[0].nodes {
			if is := s.tracked(p, 0, j); (is.Flags[0]|is.Flags[1])&flagLiberal != 0 {
				text += fmt.Sprintf("%s knows %+v of %v\n", n.name, is, p)
			}
		}
	}
	return text
}

func (s *soaked) tracked(p *pair, side, node int) fastpath.Tracked {
	s.Helper()
	t, err := tracked(s.sides[side].nodes[node], p.end(side, node))
	if err != nil {
		s.Fatal(err)
	}
	return t
}

// settle has all be accelerated, and then be idle until conntrack checks the windows of all connections,
// and compares what it knows of each.
func (s *soaked) settle() {
	s.Helper()
	for _, p := range s.pairs {
		s.accelerate(p)
	}
	s.calmly(func() {
		for _, p := range s.pairs {
			s.talk(p, 1)
		}
		time.Sleep(settled)
		s.forgotten(s.pairs...)
		for _, p := range s.pairs {
			s.compare(p, 0)
			s.compare(p, 1)
		}
	})
	for _, n := range s.sides[1].nodes {
		if text, err := scrape(n); err != nil {
			s.Errorf("%s, which has no policy: %v", n.name, err)
		} else if strings.Contains(text, "slipstream_fastpath_packets_total") {
			s.Errorf("%s, which has no policy, has a fast path:\n%s", n.name, text)
		}
	}
	s.restarts()
}

// left compares what a node knows that the fast path has left. A connection that nobody has accelerated since
// an agent was killed may be as that one left it.
func (s *soaked) left(node int) {
	s.Helper()
	s.calmly(func() {
		time.Sleep(settled)
		for _, p := range s.pairs {
			if p.accelerated.After(s.killed) {
				s.compare(p, node)
			}
		}
	})
}

// compare holds what a node of the fast path knows of a connection against the same connection on the second side. What forged
// packets do to its time-out they do until it sends again, unless its numbers are renewed.
func (s *soaked) compare(p *pair, node int) {
	s.Helper()
	is, was := s.tracked(p, 0, node), s.tracked(p, 1, node)
	if was.State != stateEstablished {
		s.Fatalf("of %v is known %+v without a fast path\n%s", p, was, s.entries(p))
	}
	s.compared++
	d := int(is.Timeout) - int(was.Timeout)
	if is.State != was.State || is.Flags != was.Flags || (d < -1 || d > 1) && !p.forged.Load() {
		s.differ++
		s.Errorf("of %v %s knows %+v, and %s, without the fast path, %+v\n%s", p,
			s.sides[0].nodes[node].name, is, s.sides[1].nodes[node].name, was, s.entries(p))
	}
}

// restarts wants agents to have ended only where they were killed.
func (s *soaked) restarts() {
	s.Helper()
	for i, d := range s.sides {
		for j, n := range d.nodes {
			want := "0"
			if i == 0 {
				want = fmt.Sprint(s.kills[j])
			}
			testenv.Eventually(s, time.Minute, "agent of "+n.name, func() string {
				got := s.kubectl("", "get", "pods", "-n", chartNamespace, "--field-selector", "spec.nodeName="+n.name,
					"-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}")
				if got != want {
					return fmt.Sprintf("has begun again %s times, and was killed %s times", got, want)
				}
				return ""
			})
		}
	}
}

// resident is the most memory that an agent of the fast path has now, MiB.
func (s *soaked) resident() (most float64) {
	for _, n := range s.sides[0].nodes {
		// There is none for a moment after each kill.
		if pid, err := agentOn(n); err == nil && pid != 0 {
			if now, err := residentMiB(pid); err == nil {
				most = max(most, now)
			}
		}
	}
	return most
}

// remembered wants conntrack not to have forgotten any connection, and notes what it knows that it
// did not.
func (s *soaked) remembered() {
	s.Helper()
	for _, p := range s.pairs {
		for j, n := range s.sides[0].nodes {
			is := s.tracked(p, 0, j)
			if was := &p.known[j]; is.State != was.State || is.Flags != was.Flags {
				p.note(fmt.Sprintf("%s knows %+v", n.name, is))
				*was = is
			}
			if is.State == 0 {
				s.differ++
				s.Fatalf("%s knows nothing of %v\n%s", n.name, p, s.entries(p))
			}
		}
	}
}

// any is a connection at random.
func (s *soaked) any() *pair { return s.pairs[s.IntN(len(s.pairs))] }

// troubles happen once a round each, in any order.
var troubles = []struct {
	name string
	make func(*soaked)
}{
	{"an agent is killed", (*soaked).kill},
	{"the policy is deleted and applied", (*soaked).changePolicy},
	{"a label is taken and given", (*soaked).changeLabel},
	{"pods come and go", (*soaked).churn},
	{"the services' pods change", (*soaked).changeEndpoints},
	{"a rule denies a connection", (*soaked).deny},
	{"a pod floods its bridge with Ethernet addresses", func(s *soaked) { s.flood(false) }},
	{"a pod floods its bridge with ARP", func(s *soaked) { s.flood(true) }},
	{"another pod opens a connection anew", func(s *soaked) { s.forge(tcpSYN) }},
	{"another pod resets a connection", func(s *soaked) { s.forge(tcpRST) }},
	{"another pod ends a connection", func(s *soaked) { s.forge(tcpFIN | tcpACK) }},
	{"another pod goes on with a connection", func(s *soaked) { s.forge(tcpACK) }},
	{"much is sent", (*soaked).bulk},
	{"a connection ends, another begins", (*soaked).replace},
	{"a connection is idle", (*soaked).idle},
}

// kill has the agent of a node end at once, and waits for the one that its kubelet starts.
func (s *soaked) kill() {
	node := s.IntN(2)
	n := s.sides[0].nodes[node]
	var was int
	testenv.Eventually(s, time.Minute, "agent of "+n.name, func() (missing string) {
		var err error
		if was, err = agentOn(n); err != nil || was == 0 {
			return fmt.Sprintf("there is none: %v", err)
		}
		return ""
	})
	s.hear(node)
	if err := unix.Kill(was, unix.SIGKILL); err != nil {
		s.Fatal(err)
	}
	s.kills[node]++
	s.killed = time.Now()
	for range 4 {
		s.talk(s.pairs[s.IntN(talking)], 20)
	}
	testenv.Eventually(s, time.Minute, "another agent on "+n.name, func() string {
		if pid, err := agentOn(n); err != nil || pid == 0 || pid == was {
			return fmt.Sprintf("it is process %d, was %d: %v", pid, was, err)
		}
		return ""
	})
}

// applied waits until the policy is on at nodes, or off.
func (s *soaked) applied(on bool, nodes ...*Node) {
	s.Helper()
	want := ""
	if on {
		want = "applied True"
	}
	for _, n := range nodes {
		testenv.Eventually(s, time.Minute, fmt.Sprintf("fast path of %s to be on: %t", n.name, on), func() string {
			out, err := tryKubectl(s.c, nil, "get", "nodeacceleration", n.name, "-o",
				`jsonpath={.status.observed[*].state} {.status.conditions[?(@.type=="Fastpath")].status}`)
			if err != nil || strings.TrimSpace(out) != want {
				return fmt.Sprintf("%q %v", out, err)
			}
			return ""
		})
	}
}

func (s *soaked) applyPolicy() {
	s.Helper()
	s.kubectl(accelerationPolicy("fast", soakPolicy), "apply", "-f", "-")
	s.applied(true, s.sides[0].nodes[:]...)
	// A flood while a rollout looks for lost packets would halt it.
	s.kubectl("", "wait", "--for=condition=RolledOut", "accelerationpolicy/fast", "--timeout=30s")
}

func (s *soaked) changePolicy() {
	s.kubectl("", "delete", "accelerationpolicy", "fast", "--ignore-not-found")
	s.applied(false, s.sides[0].nodes[:]...)
	s.left(0)
	s.left(1)
	for _, p := range s.pairs[:talking] {
		s.talk(p, 20)
	}
	s.applyPolicy()
	s.policies += 2
}

func (s *soaked) changeLabel() {
	node := s.IntN(2)
	n := s.sides[0].nodes[node]
	s.kubectl("", "label", "node", n.name, "soak-")
	s.applied(false, n)
	s.left(node)
	for _, p := range s.pairs[:talking] {
		s.talk(p, 20)
	}
	s.kubectl("", "label", "--overwrite", "node", n.name, "soak=fast")
	s.applied(true, n)
	s.policies += 2
}

// churn has a pod come and go on each node.
func (s *soaked) churn() {
	var manifest strings.Builder
	for _, d := range s.sides {
		for _, n := range d.nodes {
			fmt.Fprintf(&manifest, soakPod, n.name+"-churn", "churns", "nothing", n.name)
		}
	}
	s.kubectl(manifest.String(), "apply", "-f", "-")
	s.kubectl("", "wait", "--for=condition=Ready", "pod", "-l", "soak=churns", "--timeout=90s")
	s.kubectl("", "delete", "pod", "-l", "soak=churns", "--timeout=90s")
	s.pods += 4
}

// changeEndpoints has each service lose a pod, which stays, or get it back, and waits until
// kube-proxy has heard of it. Connections to that pod go on.
func (s *soaked) changeEndpoints() {
	s.few = !s.few
	for _, d := range s.sides {
		for j, n := range d.nodes {
			serves := "serves=" + n.name
			if s.few {
				serves = "serves=nothing"
			}
			pod := d.pods[j][1]
			s.kubectl("", "label", "--overwrite", "pod", pod.name, serves)
			other := d.nodes[1-j]
			testenv.Eventually(s, time.Minute, "kube-proxy of "+other.name, func() string {
				out, err := output(other.Command(s.Context(), "nft", "list", "table", "ip", "kube-proxy"))
				if err != nil || strings.Contains(out, pod.ip+":"+soakPort) == s.few {
					return fmt.Sprintf("pod %s of %s is there or not: %v", pod.ip, n.name, err)
				}
				return ""
			})
		}
	}
}

// deny has a rule drop what the near end of a connection sends, as a network policy does: nothing
// arrives until it goes, and then all does.
func (s *soaked) deny() {
	p, node := s.any(), s.IntN(2)
	p.note("is denied by a rule")
	s.calmly(func() {
		for i, d := range s.sides {
			h, n := p.on[i], d.nodes[node]
			from, _ := ends(h.near)
			s.node(n, fmt.Sprintf("nft 'add table ip deny; add chain ip deny forward { type filter hook forward priority 0; };"+
				" add rule ip deny forward ip saddr %s tcp sport %d drop'", from.Addr(), from.Port()))
			time.Sleep(heard)
			const size = 100
			err := h.send(size)
			if err == nil {
				if err = h.receive(size, heard); err == nil {
					s.Errorf("%v: %s let a message through that a rule denies", p, n.name)
				}
			}
			s.node(n, "nft delete table ip deny")
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = h.receive(size, patience)
			}
			if err != nil {
				s.broke(p, i, err)
				s.FailNow()
			}
			s.messages.Add(1)
		}
	})
}

func (s *soaked) flood(arp bool) {
	node := s.IntN(2)
	for _, d := range s.sides {
		if err := flood(d.pods[node][hostile], 2000, arp); err != nil {
			s.Fatal(err)
		}
	}
}

// forge has the hostile pod of a connection's near node send packets as if they were the connection's.
//
// Where a killed agent has left conntrack liberal, it accepts each FIN and reset, whatever its
// numbers, until the next agent has learnt of the connection: that is known, and as with the
// kernel's own flow tables. So these wait until it is accelerated again.
func (s *soaked) forge(flags byte) {
	p := s.any()
	if flags&(tcpFIN|tcpRST) != 0 && !p.accelerated.After(s.killed) {
		s.accelerate(p)
	}
	p.note(fmt.Sprintf("is forged with flags %#x", flags))
	p.forged.Store(true)
	offsets := make([]float64, 16)
	for i := range offsets {
		offsets[i] = s.Float64()
	}
	for i, h := range p.on {
		if err := h.forge(s.sides[i].pods[p.node][hostile], flags, offsets); err != nil {
			s.Fatal(err)
		}
	}
}

func (s *soaked) bulk() {
	p := s.any()
	p.note("has much to send")
	if !s.exchange(p, (s.IntN(32)+1)<<20) {
		s.FailNow()
	}
}

func (s *soaked) replace() {
	i := s.IntN(busyFrom) // those behind have somebody talk all the time
	p := s.pairs[i]
	for _, h := range p.on {
		h.close()
	}
	s.pairs[i] = s.connect(i, s.IntN(2), s.IntN(2) == 1)
}

// idle has a connection be accelerated, be idle for as long as the fast path takes to forget it, and go on.
func (s *soaked) idle() {
	p := s.any()
	s.accelerate(p)
	s.calmly(func() { s.forgotten(p) })
	s.talk(p, 20)
}
