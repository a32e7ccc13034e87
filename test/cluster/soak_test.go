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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/testenv"
)

var soak = flag.Duration("soak", 0, "how long TestSoak goes on; it makes one round at least")

const (
	// patience bounds how long a message may take while agents and containers start.
	patience = 30 * time.Second
	// ackDelay is longer than TCP delays an acknowledgement.
	ackDelay = 300 * time.Millisecond
	// ruleDelay bounds how long the fast path may take to obey a rule that the kernel announces, as in
	// testRules.
	ruleDelay = 200 * time.Millisecond

	soakPort = "4000"
	// The last pod of each node is the attacker. The others hold connections.
	soakPods, attacker = 3, 2
	// Values of a conntrack entry (nf_conntrack_tcp.h).
	stateEstablished, flagLiberal = 3, 0x08
	tcpFIN, tcpSYN, tcpRST        = 0x01, 0x02, 0x04
	tcpACK                        = 0x10
)

// side is a pair of nodes, and the pods on them that hold connections.
type side struct {
	nodes [2]*Node
	pods  [2][soakPods]webPod
	// services are the addresses of the service for the pods of each node.
	services [2]string
	accepted chan net.Conn
}

// pair is the same connection on both sides.
type pair struct {
	name string
	// node is the index of the node that has the near end, on each side.
	node      int
	byService bool
	opened    time.Time
	// accelerated is when the connection was last seen on the fast path.
	accelerated time.Time
	// history lists what was done to the connection. tracked are its last known conntrack entries on the
	// nodes with the fast path.
	history []string
	tracked [2]conntrack.Progress
	// forged reports whether packets have been forged since the connection last sent.
	forged atomic.Bool
	// last is when the connection of each side last exchanged a message.
	on   [2]*connection
	last [2]time.Time
}

func (p *pair) note(what string) {
	p.history = append(p.history, time.Now().Format(time.TimeOnly)+" "+what)
}

func (p *pair) String() string {
	return fmt.Sprintf("connection %s, opened %s ago", p.name, time.Since(p.opened).Round(time.Second))
}

// end returns the connection's end at a node of a side.
func (p *pair) end(side, node int) *net.TCPConn {
	if node == p.node {
		return p.on[side].near
	}
	return p.on[side].far
}

// soakRun is a cluster whose two sides have the same connections and get the same treatment. Agents
// provide the fast path on the nodes of the first side. Those of the second, the reference, have none.
type soakRun struct {
	*testing.T
	*rand.Rand
	c *Cluster
	// kind is that of the packets between the nodes, in the agents' metrics.
	kind  string
	sides [2]*side
	pairs []*pair
	// notBusy is locked for writing to pause the connections that are always busy.
	notBusy sync.RWMutex
	// connections counts the connections opened on both sides, and gives each one its number.
	connections uint64
	// killed is when the last agent was killed, and kills counts the killed agents of each node.
	killed time.Time
	kills  [2]int
	// agentLogs hold the last lines of the killed agents' logs, by node.
	agentLogs [2]string
	// fewEndpoints reports whether the services have fewer endpoints than there are pods.
	fewEndpoints bool
	// memory is the largest memory of an agent in each round, in MiB.
	memory []float64

	rounds, policies, pods, opened, compared, differ int
	messages, bytes, resets, misdelivered            atomic.Int64
	accelerated                                      [2]float64
}

// TestSoak disturbs a cluster in every way it can while pods have connections, and compares them with the
// same connections on nodes without the fast path: none breaks, each byte arrives where it should, and
// idle ones have the same conntrack entries.
func TestSoak(t *testing.T) {
	for _, network := range []struct{ cni, kind string }{{Flannel, "vxlan"}, {FlannelHostGW, "routed"}} {
		t.Run(network.cni, func(t *testing.T) { testSoak(t, network.cni, network.kind) })
	}
}

func testSoak(t *testing.T, cni, kind string) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("the seed is %d", seed)
	s := &soakRun{T: t, Rand: rand.New(rand.NewPCG(seed, 0)), c: own(t, Config{CNI: cni, Nodes: 4, Log: os.Stderr}), kind: kind}
	defer s.printSummary()
	s.setUp()
	defer s.startBusyTraffic()()
	for began := time.Now(); s.rounds == 0 || time.Since(began) < *soak; s.rounds++ {
		most := 0.0
		for _, i := range s.Perm(len(disturbances)) {
			s.Logf("%s round %d: %s", time.Now().Format(time.TimeOnly), s.rounds, disturbances[i].name)
			disturbances[i].make(s)
			for _, p := range s.pairs[:activePairs] {
				s.exchangeMessages(p, s.IntN(60))
			}
			s.checkTracked()
			most = max(most, s.agentMemory())
			if s.anyBroken() {
				return
			}
		}
		s.compareIdle()
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

// anyBroken reports whether a connection has broken, which ends the run. Differing conntrack entries are
// only counted.
func (s *soakRun) anyBroken() bool { return s.resets.Load()+s.misdelivered.Load() > 0 }

// printSummary prints the figures of the run, and the state of the nodes if it failed.
func (s *soakRun) printSummary() {
	if s.Failed() {
		for i := range s.sides[0].nodes {
			s.printNodeStatus(i)
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
packets accelerated, by node %.0f and %.0f
resets                       %d
misdeliveries                %d
entries compared             %d
entries that differ          %d
memory of an agent, MiB      %.1f in the first round, %.1f in the last, each at most: %.1f`,
		s.rounds, s.kills[0]+s.kills[1], s.policies, s.pods, s.opened, s.messages.Load(), float64(s.bytes.Load())/1e9, s.accelerated[0], s.accelerated[1],
		s.resets.Load(), s.misdelivered.Load(), s.compared, s.differ, first, last, s.memory)
}

// printNodeStatus prints the agents' log and the status of a node with the fast path.
func (s *soakRun) printNodeStatus(node int) {
	n := s.sides[0].nodes[node]
	s.saveAgentLog(node)
	s.Logf("%s, the agents' log:\n%s", n.name, s.agentLogs[node])
	status, err := output(n.Command(context.Background(), program, "accel", "status"))
	s.Logf("%s, slipstream accel status: %v\n%s", n.name, err, status)
	object, err := tryKubectl(s.c, nil, "get", "nodeacceleration", n.name, "-o", "jsonpath={.status}")
	s.Logf("%s, its NodeAcceleration: %v\n%s", n.name, err, object)
}

// saveAgentLog keeps the end of the log of a node's agent, which is lost when the agent is killed.
func (s *soakRun) saveAgentLog(node int) {
	n := s.sides[0].nodes[node]
	out, err := tryKubectl(s.c, nil, "get", "pods", "-n", chartNamespace, "--field-selector", "spec.nodeName="+n.name, "-o", "name")
	if err == nil {
		out, err = tryKubectl(s.c, nil, "logs", "-n", chartNamespace, "--tail=60", strings.TrimSpace(out))
	}
	if err != nil {
		out = err.Error()
	}
	s.agentLogs[node] += out + "\n"
	s.agentLogs[node] = s.agentLogs[node][max(0, len(s.agentLogs[node])-1<<14):]
}

// kubectl retries while the cluster does not answer, as a person would.
func (s *soakRun) kubectl(stdin string, args ...string) (out string) {
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

// setUp creates the pods, the agents, the policy and the connections.
func (s *soakRun) setUp() {
	s.Helper()
	run, chart := helm(s, s.c)
	s.kubectl("", "create", "namespace", chartNamespace)
	run("install", "slipstream", chart, "--set", "image.tag=test,metrics.address=127.0.0.1", "--wait", "--timeout", "3m")
	for i := range s.sides {
		s.sides[i] = s.newSide(i)
		for _, n := range s.sides[i].nodes {
			// kube-proxy in iptables mode has the same rule.
			s.onNode(n, "nft 'add table ip invalid; add chain ip invalid forward { type filter hook forward priority 0; }; add rule ip invalid forward ct state invalid drop'")
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

// The first pairs exchange messages after each disturbance, and those from busyFrom on all the time. The
// pairs in between are idle until the end of the round.
const activePairs, busyFrom = 4, 8

// onNode runs a shell command on a node.
func (s *soakRun) onNode(n *Node, command string) string {
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

// newSide creates the pods of two nodes, and services for them.
func (s *soakRun) newSide(i int) *side {
	s.Helper()
	d := &side{accepted: make(chan net.Conn, 64)}
	var manifest strings.Builder
	for j := range d.nodes {
		name := fmt.Sprintf("node%d", 2*i+j)
		d.nodes[j] = s.c.Node(name)
		for k := range soakPods {
			serves := name
			if k == attacker {
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
			if k != attacker {
				go d.accept(listen(s, d.pods[j][k], soakPort))
			}
		}
	}
	return d
}

// accept accepts the connections to a pod, until the test ends.
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
func (s *soakRun) connect(i, node int, byService bool) *pair {
	s.Helper()
	near, far := s.IntN(attacker), s.IntN(attacker)
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

// dial opens a connection from a pod of a side. It retries, because kube-proxy refuses connections to a
// service until it knows the service's pods.
func (s *soakRun) dial(d *side, from webPod, to string) (c *connection) {
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
					s.connections++
					c = newConnection(near, far, s.connections)
					s.Cleanup(c.close)
					return ""
				}
				far.Close() // from an abandoned attempt
			case <-timeout:
				near.Close()
				return "nobody accepted it"
			}
		}
	})
	return c
}

// exchange sends the same data on both sides.
func (s *soakRun) exchange(p *pair, size int) bool {
	s.Helper()
	for i, c := range p.on {
		s.messages.Add(1)
		s.bytes.Add(2 * int64(size))
		p.forged.Store(false)
		if err := c.exchange(size); err != nil {
			s.connectionBroke(p, i, err)
			return false
		}
		p.last[i] = time.Now()
	}
	return true
}

// exchangeMessages makes n round trips on both sides.
func (s *soakRun) exchangeMessages(p *pair, n int) {
	s.Helper()
	for range n {
		if !s.exchange(p, s.IntN(2048)+1) {
			s.FailNow()
		}
	}
}

// connectionBroke reports a connection that was reset, or that delivered wrong data.
func (s *soakRun) connectionBroke(p *pair, side int, err error) {
	s.Helper()
	if errors.Is(err, errMisdelivered) {
		s.misdelivered.Add(1)
	} else {
		s.resets.Add(1)
	}
	without := []string{"", ", without the fast path"}[side]
	s.Errorf("%v, between %s and %s%s: %v; an agent was killed last at %v, it was last accelerated at %v\n%s", p, s.sides[side].nodes[0].name, s.sides[side].nodes[1].name,
		without, err, s.killed.Format(time.TimeOnly), p.accelerated.Format(time.TimeOnly), s.conntrackEntries(p))
}

// conntrackEntries returns the entries of a connection on all nodes, and what was last done to it.
func (s *soakRun) conntrackEntries(p *pair) (text string) {
	for i, d := range s.sides {
		for j, n := range d.nodes {
			t, err := tracked(n, p.end(i, j))
			text += fmt.Sprintf("  %s has the conntrack entry %+v %v\n", n.name, t, err)
		}
	}
	return text + "  " + strings.Join(p.history[max(0, len(p.history)-20):], "\n  ")
}

// startBusyTraffic keeps the last pairs busy until stop is called.
func (s *soakRun) startBusyTraffic() (stop func()) {
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
				s.notBusy.RLock()
				ok = s.exchange(p, numbers.IntN(1<<15)+1)
				s.notBusy.RUnlock()
			}
		})
	}
	return func() { close(quit); running.Wait() }
}

// whileNotBusy runs f while the busy pairs pause.
func (s *soakRun) whileNotBusy(f func()) {
	s.notBusy.Lock()
	defer s.notBusy.Unlock()
	f()
}

// acceleratedPackets returns how many packets between nodes took a node's fast path, out and in, from the
// agent's metrics.
func (s *soakRun) acceleratedPackets(n *Node) (out, in float64, err error) {
	text, err := scrape(n)
	if err != nil {
		return 0, 0, err
	}
	return carriedOf(text, s.kind, "out"), carriedOf(text, s.kind, "in"), nil
}

// accelerate exchanges messages until both nodes accelerate a connection. That works even if an agent was
// killed and another has just started.
func (s *soakRun) accelerate(p *pair) {
	s.Helper()
	const trips = 100
	var before [2][2]float64
	exchanged := false
	s.whileNotBusy(func() {
		testenv.Eventually(s, time.Minute, p.String()+", to be accelerated", func() (missing string) {
			for i, n := range s.sides[0].nodes {
				out, in, err := s.acceleratedPackets(n)
				if err != nil {
					missing += err.Error() + " "
				} else if out, in := out-before[i][0], in-before[i][1]; !exchanged || out < trips*3/4 || in < trips*3/4 {
					missing += fmt.Sprintf("of %d round trips %s accelerated %.0f and %.0f packets ", trips, n.name, out, in)
				} else {
					s.accelerated[i] += out + in
				}
				before[i] = [2]float64{out, in}
			}
			if missing != "" {
				// Eventually pauses for 200 ms, longer than the time for which scrapes share one reading of the counters.
				s.exchangeMessages(p, trips)
				exchanged = true
				missing += s.conntrackEntries(p)
			}
			return missing
		})
	})
	p.accelerated = time.Now()
	p.note("is accelerated")
}

// awaitWindowChecks waits until the fast path has released the idle connections, so that conntrack checks
// their windows again.
func (s *soakRun) awaitWindowChecks(all ...*pair) {
	s.Helper()
	var left string
	for deadline := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		if left = s.uncheckedWindows(all); left == "" {
			return
		}
		if time.Now().After(deadline) {
			s.Errorf("conntrack does not check windows %v after the last packet: %s", patience, left)
			return
		}
	}
}

// uncheckedWindows lists the connections whose windows conntrack does not check.
func (s *soakRun) uncheckedWindows(all []*pair) (text string) {
	s.Helper()
	for _, p := range all {
		for j, n := range s.sides[0].nodes {
			if is := s.tracked(p, 0, j); (is.Flags[0]|is.Flags[1])&flagLiberal != 0 {
				text += fmt.Sprintf("%v on %s: %+v\n", p, n.name, is)
			}
		}
	}
	return text
}

func (s *soakRun) tracked(p *pair, side, node int) conntrack.Progress {
	s.Helper()
	t, err := tracked(s.sides[side].nodes[node], p.end(side, node))
	if err != nil {
		s.Fatal(err)
	}
	return t
}

// compareIdle accelerates every connection, leaves it idle until conntrack checks its windows again, and
// compares the conntrack entries of both sides.
func (s *soakRun) compareIdle() {
	s.Helper()
	for _, p := range s.pairs {
		s.accelerate(p)
	}
	s.whileNotBusy(func() {
		for _, p := range s.pairs {
			s.exchangeMessages(p, 1)
		}
		time.Sleep(ackDelay)
		s.awaitWindowChecks(s.pairs...)
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
	s.checkRestarts()
}

// compareAfterDetach compares the conntrack entries of a node whose fast path was detached.
func (s *soakRun) compareAfterDetach(node int) {
	s.Helper()
	s.whileNotBusy(func() {
		time.Sleep(ackDelay)
		for _, p := range s.pairs {
			s.compare(p, node)
		}
	})
}

// compare compares a connection's conntrack entry on a node with the fast path with the entry of the same
// connection on the reference node. After forged packets it ignores the timeout: they can change that
// until the connection sends again, unless conntrack is resynchronised.
func (s *soakRun) compare(p *pair, node int) {
	s.Helper()
	is, was := s.tracked(p, 0, node), s.tracked(p, 1, node)
	if was.State != stateEstablished {
		s.Fatalf("%v has the conntrack entry %+v without a fast path\n%s", p, was, s.conntrackEntries(p))
	}
	s.compared++
	// A timeout counts whole seconds since the last packet that conntrack saw. The sides send one after the other, and with the fast path
	// conntrack may have missed the packets of the last second.
	age := float64(was.Timeout) - float64(is.Timeout) - p.last[1].Sub(p.last[0]).Seconds()
	if is.State != was.State || is.Flags != was.Flags || (age < -1.5 || age > 2) && !p.forged.Load() {
		s.differ++
		s.Errorf("%v has different conntrack entries: on %s %+v, on %s, without the fast path, %+v\n%s", p,
			s.sides[0].nodes[node].name, is, s.sides[1].nodes[node].name, was, s.conntrackEntries(p))
	}
}

// checkRestarts checks that agents only ended where they were killed.
func (s *soakRun) checkRestarts() {
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
					return fmt.Sprintf("restarted %s times, and was killed %s times", got, want)
				}
				return ""
			})
		}
	}
}

// agentMemory returns the larger memory of the two agents with a fast path, in MiB.
func (s *soakRun) agentMemory() (most float64) {
	for _, n := range s.sides[0].nodes {
		// There is no agent for a moment after each kill.
		if pid, err := agentOn(n); err == nil && pid != 0 {
			if now, err := UsageOf(pid); err == nil {
				most = max(most, now.MiB)
			}
		}
	}
	return most
}

// checkTracked checks that conntrack still has an entry for each connection, and notes the entries that
// have changed.
func (s *soakRun) checkTracked() {
	s.Helper()
	for _, p := range s.pairs {
		for j, n := range s.sides[0].nodes {
			is := s.tracked(p, 0, j)
			if was := &p.tracked[j]; is.State != was.State || is.Flags != was.Flags {
				p.note(fmt.Sprintf("%s has the conntrack entry %+v", n.name, is))
				*was = is
			}
			if is.State == 0 {
				s.differ++
				s.Fatalf("%s has no conntrack entry of %v\n%s", n.name, p, s.conntrackEntries(p))
			}
		}
	}
}

// randomPair returns any of the pairs.
func (s *soakRun) randomPair() *pair { return s.pairs[s.IntN(len(s.pairs))] }

// disturbances are the ways to disturb the cluster. Each happens once a round, in random order.
var disturbances = []struct {
	name string
	make func(*soakRun)
}{
	{"an agent is killed", (*soakRun).killAgent},
	{"the policy is deleted and applied", (*soakRun).changePolicy},
	{"a node loses its label and gets it back", (*soakRun).changeLabel},
	{"pods are created and deleted", (*soakRun).createAndDeletePods},
	{"the endpoints of the services change", (*soakRun).changeEndpoints},
	{"a rule denies a connection", (*soakRun).denyByRule},
	{"the attacker floods its bridge with Ethernet addresses", func(s *soakRun) { s.floodBridge(false) }},
	{"the attacker floods its bridge with ARP", func(s *soakRun) { s.floodBridge(true) }},
	{"the attacker forges a SYN", func(s *soakRun) { s.forgePackets(tcpSYN) }},
	{"the attacker forges a reset", func(s *soakRun) { s.forgePackets(tcpRST) }},
	{"the attacker forges a FIN", func(s *soakRun) { s.forgePackets(tcpFIN | tcpACK) }},
	{"the attacker forges data", func(s *soakRun) { s.forgePackets(tcpACK) }},
	{"a connection sends megabytes", (*soakRun).sendMegabytes},
	{"a connection sends packets with IP options", func(s *soakRun) { s.sendUnusual("IP options", withOptions) }},
	{"a connection sends packets that expire", func(s *soakRun) { s.sendUnusual("a TTL of 1", withShortTTL) }},
	{"a connection sends urgent data", func(s *soakRun) { s.sendUnusual("urgent data", withUrgentData) }},
	{"a connection sends padded packets", func(s *soakRun) { s.sendUnusual("padding", withPadding) }},
	{"a connection ends and another one opens", (*soakRun).replaceConnection},
	{"a connection goes idle", (*soakRun).idleConnection},
}

// killAgent kills the agent of a node, and waits until the agent that the kubelet starts has recovered
// the conntrack entries. That includes a connection for which the attacker forges a reset meanwhile.
func (s *soakRun) killAgent() {
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
	s.saveAgentLog(node)
	if err := unix.Kill(was, unix.SIGKILL); err != nil {
		s.Fatal(err)
	}
	s.kills[node]++
	s.killed = time.Now()
	for range 4 {
		s.exchangeMessages(s.pairs[s.IntN(activePairs)], 20)
	}
	testenv.Eventually(s, time.Minute, "another agent on "+n.name, func() string {
		if pid, err := agentOn(n); err != nil || pid == 0 || pid == was {
			return fmt.Sprintf("it is process %d, was %d: %v", pid, was, err)
		}
		return ""
	})
	if s.IntN(2) == 0 {
		s.forgePackets(tcpRST)
	}
	s.whileNotBusy(func() {
		time.Sleep(ackDelay)
		s.awaitWindowChecks(s.pairs...)
		for _, p := range s.pairs {
			s.compare(p, node)
		}
	})
}

// awaitPolicy waits until the policy is applied on nodes, or no longer is.
func (s *soakRun) awaitPolicy(on bool, nodes ...*Node) {
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

func (s *soakRun) applyPolicy() {
	s.Helper()
	s.kubectl(accelerationPolicy("fast", soakPolicy), "apply", "-f", "-")
	s.awaitPolicy(true, s.sides[0].nodes[:]...)
	// A flood while a rollout checks for lost packets would halt the rollout.
	s.kubectl("", "wait", "--for=condition=RolledOut", "accelerationpolicy/fast", "--timeout=30s")
}

func (s *soakRun) changePolicy() {
	s.kubectl("", "delete", "accelerationpolicy", "fast", "--ignore-not-found")
	s.awaitPolicy(false, s.sides[0].nodes[:]...)
	s.compareAfterDetach(0)
	s.compareAfterDetach(1)
	for _, p := range s.pairs[:activePairs] {
		s.exchangeMessages(p, 20)
	}
	s.applyPolicy()
	s.policies += 2
}

func (s *soakRun) changeLabel() {
	node := s.IntN(2)
	n := s.sides[0].nodes[node]
	s.kubectl("", "label", "node", n.name, "soak-")
	s.awaitPolicy(false, n)
	s.compareAfterDetach(node)
	for _, p := range s.pairs[:activePairs] {
		s.exchangeMessages(p, 20)
	}
	s.kubectl("", "label", "--overwrite", "node", n.name, "soak=fast")
	s.awaitPolicy(true, n)
	s.policies += 2
}

// createAndDeletePods creates a pod on each node and deletes it.
func (s *soakRun) createAndDeletePods() {
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

// changeEndpoints removes a pod from each service, or adds it again, and waits until kube-proxy has
// applied the change. The pod keeps running, and so do its connections.
func (s *soakRun) changeEndpoints() {
	s.fewEndpoints = !s.fewEndpoints
	for _, d := range s.sides {
		for j, n := range d.nodes {
			serves := "serves=" + n.name
			if s.fewEndpoints {
				serves = "serves=nothing"
			}
			pod := d.pods[j][1]
			s.kubectl("", "label", "--overwrite", "pod", pod.name, serves)
			other := d.nodes[1-j]
			testenv.Eventually(s, time.Minute, "kube-proxy of "+other.name, func() string {
				out, err := output(other.Command(s.Context(), "nft", "list", "table", "ip", "kube-proxy"))
				if err != nil || strings.Contains(out, pod.ip+":"+soakPort) == s.fewEndpoints {
					return fmt.Sprintf("pod %s of %s is there or not: %v", pod.ip, n.name, err)
				}
				return ""
			})
		}
	}
}

// denyByRule inserts a rule that drops what the near end of a connection sends, as a network policy does:
// nothing arrives until the rule is deleted, and then everything does.
func (s *soakRun) denyByRule() {
	p, node := s.randomPair(), s.IntN(2)
	p.note("is denied by a rule")
	s.whileNotBusy(func() {
		for i, d := range s.sides {
			c, n := p.on[i], d.nodes[node]
			from, _ := ends(c.near)
			s.onNode(n, fmt.Sprintf("nft 'add table ip deny; add chain ip deny forward { type filter hook forward priority 0; };"+
				" add rule ip deny forward ip saddr %s tcp sport %d drop'", from.Addr(), from.Port()))
			time.Sleep(ruleDelay)
			const size = 100
			err := c.send(size)
			if err == nil {
				if err = c.receive(size, ruleDelay); err == nil {
					s.Errorf("%v: %s let a message through that a rule denies", p, n.name)
				}
			}
			s.onNode(n, "nft delete table ip deny")
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = c.receive(size, patience)
			}
			if err != nil {
				s.connectionBroke(p, i, err)
				s.FailNow()
			}
			s.messages.Add(1)
		}
	})
}

func (s *soakRun) floodBridge(arp bool) {
	node := s.IntN(2)
	for _, d := range s.sides {
		if err := flood(d.pods[node][attacker], 2000, arp); err != nil {
			s.Fatal(err)
		}
	}
}

// forgePackets makes the attacker on a connection's near node send packets in the name of the connection.
//
// An agent that is killed leaves its connections liberal in conntrack. The next agent recovers them. But
// if a FIN has moved an entry to FIN_WAIT, it recovers only after both sides have sent more data. So a
// FIN is forged only once the connection is accelerated again.
func (s *soakRun) forgePackets(flags byte) {
	p := s.randomPair()
	if flags&tcpFIN != 0 && !p.accelerated.After(s.killed) {
		s.accelerate(p)
	}
	p.note(fmt.Sprintf("packets are forged with TCP flags %#x", flags))
	p.forged.Store(true)
	offsets := make([]float64, 16)
	for i := range offsets {
		offsets[i] = s.Float64()
	}
	var next [2]uint32
	s.whileNotBusy(func() { // nextNumber puts the socket into repair mode, in which reads fail
		for i, c := range p.on {
			var err error
			if next[i], err = nextNumber(c.near); err != nil {
				s.Fatal(err)
			}
		}
	})
	for i, c := range p.on {
		if err := c.forge(s.sides[i].pods[p.node][attacker], flags, next[i], offsets); err != nil {
			s.Fatal(err)
		}
	}
}

func (s *soakRun) sendMegabytes() {
	p := s.randomPair()
	p.note("sends megabytes")
	if !s.exchange(p, (s.IntN(32)+1)<<20) {
		s.FailNow()
	}
}

// sendUnusual makes one end of a connection send packets that the fast path does not forward, and then
// leaves the connection idle.
func (s *soakRun) sendUnusual(what string, begin func(s *soakRun, from webPod, end *net.TCPConn) (stop func() error)) {
	p := s.randomPair()
	s.accelerate(p)
	node := s.IntN(2)
	p.note(fmt.Sprintf("%s of node %d", what, node))
	var stops []func() error
	for i, d := range s.sides {
		end := p.end(i, node)
		stops = append(stops, begin(s, d.podOf(node, end), end))
	}
	s.exchangeMessages(p, 20)
	for range 4 {
		if !s.exchange(p, (s.IntN(8)+1)<<20) {
			s.FailNow()
		}
	}
	for _, stop := range stops {
		if err := stop(); err != nil {
			s.Fatal(err)
		}
	}
	s.whileNotBusy(func() { s.awaitWindowChecks(p) })
	s.exchangeMessages(p, 20)
}

// podOf returns the pod at an end of a connection.
func (d *side) podOf(node int, end *net.TCPConn) webPod {
	ip := end.LocalAddr().(*net.TCPAddr).IP.String()
	i := slices.IndexFunc(d.pods[node][:], func(p webPod) bool { return p.ip == ip })
	return d.pods[node][i]
}

func withOptions(s *soakRun, _ webPod, end *net.TCPConn) (stop func() error) {
	set := func(options string) error {
		return control(end, func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, options) })
	}
	if err := set("\x01\x01\x01\x01"); err != nil {
		s.Fatal(err)
	}
	return func() error { return set("") }
}

func withShortTTL(s *soakRun, _ webPod, end *net.TCPConn) (stop func() error) {
	set := func(ttl int) error {
		return control(end, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl) })
	}
	if err := set(1); err != nil {
		s.Fatal(err)
	}
	done := make(chan error, 1)
	time.AfterFunc(50*time.Millisecond, func() { done <- set(64) })
	return func() error { return <-done }
}

// withUrgentData also sends the urgent data itself: that byte is not part of the stream that the other
// end reads.
func withUrgentData(s *soakRun, _ webPod, end *net.TCPConn) (stop func() error) {
	send := func() error {
		return control(end, func(fd int) error { return unix.Sendto(fd, []byte{1}, unix.MSG_OOB, nil) })
	}
	if err := send(); err != nil {
		s.Fatal(err)
	}
	return send
}

// withPadding pads short frames of a pod, as some NICs of virtual machines do.
func withPadding(s *soakRun, from webPod, _ *net.TCPConn) (stop func() error) {
	const least = 200
	pad, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word), // struct __sk_buff, len
		asm.JGE.Imm(asm.R2, least, "out"),
		asm.Mov.Imm(asm.R2, least),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnSkbChangeTail.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"), // TCX_NEXT
		asm.Return(),
	}})
	if err != nil {
		s.Fatal(err)
	}
	defer pad.Close()
	var l link.Link
	if err := onNetns(from.netns, func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			l, err = link.AttachTCX(link.TCXOptions{Interface: eth0.Index, Program: pad, Attach: ebpf.AttachTCXEgress})
		}
		return err
	}); err != nil {
		s.Fatal(err)
	}
	return l.Close
}

func control(c *net.TCPConn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) { err = do(int(fd)) }), err)
}

func (s *soakRun) replaceConnection() {
	i := s.IntN(busyFrom) // startBusyTraffic uses the later ones
	p := s.pairs[i]
	for _, c := range p.on {
		c.close()
	}
	s.pairs[i] = s.connect(i, s.IntN(2), s.IntN(2) == 1)
}

// idleConnection accelerates a connection, leaves it idle until the fast path has released it, and uses
// it again.
func (s *soakRun) idleConnection() {
	p := s.randomPair()
	s.accelerate(p)
	s.whileNotBusy(func() { s.awaitWindowChecks(p) })
	s.exchangeMessages(p, 20)
}
