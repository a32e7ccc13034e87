//go:build linux

package fastpath_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

var changes = flag.Int("changes", 80, "how many rules TestPolicy inserts and removes")

// traffic sends datagrams between sockets of both nodes: one per millisecond in each direction of
// each connection.
type traffic struct {
	*world
	sockets [2][4]*net.UDPConn // by node
	flows   [16]struct {
		from, to netip.AddrPort
		// last is when the kernel received the last datagram.
		last atomic.Int64
	}
	sent atomic.Uint64 // by each node
}

func (w *world) traffic() *traffic {
	w.Helper()
	tr := &traffic{world: w}
	at := func(node, i int) netip.AddrPort { return netip.AddrPortFrom(pod(node, i/2), uint16(5000+i%2)) }
	for node := range tr.sockets {
		for i := range tr.sockets[node] {
			w.in(fmt.Sprintf("n%dp%d", node, i/2), func() error {
				conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at(node, i)))
				if err != nil {
					return err
				}
				tr.sockets[node][i] = conn
				raw, err := conn.SyscallConn()
				if err != nil {
					return err
				}
				return errors.Join(raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
				}), err)
			})
			w.Cleanup(func() { tr.sockets[node][i].Close() })
			go tr.receive(tr.sockets[node][i])
		}
	}
	for c := range len(tr.flows) / 2 { // no tuple twice
		near, far := c%4, (c+c/4)%4
		tr.flows[2*c].from, tr.flows[2*c].to = at(0, near), at(1, far)
		tr.flows[2*c+1].from, tr.flows[2*c+1].to = at(1, far), at(0, near)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		var message [64]byte
		for {
			for i := range tr.flows {
				f := &tr.flows[i]
				binary.NativeEndian.PutUint64(message[:], uint64(i))
				_, _ = tr.sockets[i%2][2*int(f.from.Addr().As4()[3]-2)+int(f.from.Port()-5000)].WriteToUDPAddrPort(message[:], f.to)
			}
			tr.sent.Add(uint64(len(tr.flows) / 2))
			select {
			case <-quit:
				return
			case <-tick.C:
			}
		}
	}()
	w.Cleanup(func() { close(quit); <-done })
	return tr
}

func (tr *traffic) receive(c *net.UDPConn) {
	buf, oob := make([]byte, 64), make([]byte, 64)
	for {
		n, oobn, _, _, err := c.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		messages, parseErr := unix.ParseSocketControlMessage(oob[:oobn])
		if err = cmp.Or(err, parseErr); err != nil || n != len(buf) || len(messages) != 1 {
			tr.Errorf("%d bytes with %d messages: %v", n, len(messages), err)
			return
		}
		stamp := messages[0].Data // struct timespec
		at := time.Unix(int64(binary.NativeEndian.Uint64(stamp)), int64(binary.NativeEndian.Uint64(stamp[8:])))
		tr.flows[binary.NativeEndian.Uint64(buf)].last.Store(at.UnixNano())
	}
}

// waitAccelerated waits until the datagrams take the fast path, and are delivered.
func (tr *traffic) waitAccelerated() {
	tr.Helper()
	var sent uint64
	var began time.Time
	var fast [2]uint64
	begin := func() {
		sent, began = tr.sent.Load(), time.Now()
		for i := range fast {
			fast[i] = tr.counts(i)["fast-out"]
		}
	}
	begin()
	tr.eventually("all that is sent takes the fast path", func() { time.Sleep(4 * time.Millisecond) }, func() bool {
		n := tr.sent.Load() - sent
		if n < 16 {
			return false
		}
		for i := range fast {
			if tr.counts(i)["fast-out"]-fast[i] < n*7/8 {
				begin()
				return false
			}
		}
		for i := range tr.flows {
			if tr.flows[i].last.Load() < began.UnixNano() {
				begin()
				return false
			}
		}
		return true
	})
}

// match selects the packets of a rule. Fields that are not set match anything.
type match struct {
	source, target netip.Addr
	port           uint16 // destination port
}

func (m match) is(from, to netip.AddrPort) bool {
	return (!m.source.IsValid() || m.source == from.Addr()) && (!m.target.IsValid() || m.target == to.Addr()) && (m.port == 0 || m.port == to.Port())
}

// exprs returns an nftables rule that drops matching packets.
func (m match) exprs() (all []expr.Any) {
	compare := func(base expr.PayloadBase, offset uint32, value []byte) {
		all = append(all, &expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(value))},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: value})
	}
	if m.source.IsValid() {
		compare(expr.PayloadBaseNetworkHeader, 12, m.source.AsSlice())
	}
	if m.target.IsValid() {
		compare(expr.PayloadBaseNetworkHeader, 16, m.target.AsSlice())
	}
	if m.port != 0 {
		compare(expr.PayloadBaseTransportHeader, 2, binary.BigEndian.AppendUint16(nil, m.port))
	}
	return append(all, &expr.Verdict{Kind: expr.VerdictDrop})
}

// args returns the same rule for iptables.
func (m match) args(verb string) []string {
	all := []string{"-w", verb, "FORWARD", "-p", "udp"}
	if m.source.IsValid() {
		all = append(all, "-s", m.source.String())
	}
	if m.target.IsValid() {
		all = append(all, "-d", m.target.String())
	}
	if m.port != 0 {
		all = append(all, "--dport", strconv.Itoa(int(m.port)))
	}
	return append(all, "-j", "DROP")
}

func (m match) String() string {
	return fmt.Sprintf("from %s to %s port %d", m.source, m.target, m.port)
}

// both matches all packets to and from a pod. Policies stop both; so do routes, as a sender without
// a route back gets no answers.
func (m match) both(from, to netip.AddrPort) bool {
	return m.target == from.Addr() || m.target == to.Addr()
}

// policy has the objects of a network policy controller on a node: rules that stay, and maps from
// pods to verdicts that change.
type policy struct {
	*nftables.Conn
	// any decides on every packet, and fresh on those of new connections.
	any, fresh *nftables.Set
	forward    *nftables.Chain
}

func (w *world) policy(node string) *policy {
	w.Helper()
	ns := w.ns(node)
	w.Cleanup(func() { ns.Close() })
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		w.Fatal(err)
	}
	p := &policy{Conn: conn}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "policy"})
	chain := func(name string) *nftables.Chain {
		return conn.AddChain(&nftables.Chain{Table: table, Name: name, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
	}
	verdicts := func(c *nftables.Chain) *nftables.Set {
		set := &nftables.Set{Table: table, Name: c.Name, IsMap: true, KeyType: nftables.TypeIPAddr, DataType: nftables.TypeVerdict}
		if err := conn.AddSet(set, nil); err != nil {
			w.Fatal(err)
		}
		for _, offset := range []uint32{12, 16} {
			conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: []expr.Any{
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
				&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID, DestRegister: 0, IsDestRegSet: true},
			}})
		}
		return set
	}
	p.forward = chain("forward")
	p.any = verdicts(chain("any"))
	fresh := chain("fresh")
	conn.AddRule(&nftables.Rule{Table: table, Chain: fresh, Exprs: []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}})
	p.fresh = verdicts(fresh)
	if err := conn.Flush(); err != nil {
		w.Fatal(err)
	}
	return p
}

// isolate sets a pod's verdict in a map to drop, or deletes it.
func (p *policy) isolate(set *nftables.Set, pod netip.Addr, on bool) error {
	element := []nftables.SetElement{{Key: pod.AsSlice(), VerdictData: &expr.Verdict{Kind: expr.VerdictDrop}}}
	change := p.SetAddElements
	if !on {
		change = p.SetDeleteElements
	}
	return errors.Join(change(set, element), p.Flush())
}

func flushConntrack(pod netip.Addr) error {
	filter := new(netlink.ConntrackFilter)
	if err := filter.AddIP(netlink.ConntrackOrigSrcIP, pod.AsSlice()); err != nil {
		return err
	}
	back := new(netlink.ConntrackFilter)
	if err := back.AddIP(netlink.ConntrackOrigDstIP, pod.AsSlice()); err != nil {
		return err
	}
	_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(unix.AF_INET), filter, back)
	return err
}

// kind is a way to drop packets. turn turns it on or off in the network namespace of the thread.
type kind struct {
	name  string
	about func(*rand.Rand) match
	turn  func(p *policy, m match, on bool) error
	// hits reports which flows are affected; if nil, match.is does.
	hits func(m match, from, to netip.AddrPort) bool
	// notified means that the kernel announces the change; otherwise it takes up to a second.
	// spares means that established connections continue on the slow path.
	notified, spares bool
}

const (
	// soon is how long packets may still be delivered after a change that the kernel announces. After any other change, flows
	// stay valid for half a second at least.
	soon = 400 * time.Millisecond
	// within is the same for a change that the kernel does not announce, with a margin for clocks.
	within = time.Second + 50*time.Millisecond
)

// promptly makes, up to three times, a change that the kernel announces. It fails if packets were delivered for longer than soon
// after every try, or for longer than within after any. An agent may have to wait for a CPU, but not each time.
func promptly(t testing.TB, what string, try func() (delivered time.Duration)) (longest time.Duration) {
	t.Helper()
	testenv.Retry(t, 3, func() error {
		took := try()
		longest = max(longest, took)
		if took > within {
			t.Errorf("%s: packets were delivered for %s, want at most %s", what, took, within)
		} else if took > soon {
			return fmt.Errorf("%s: packets were delivered for %s, want at most %s", what, took, soon)
		}
		return nil
	})
	return longest
}

func randomMatch(r *rand.Rand) (m match) {
	what, node := 1+r.IntN(7), r.IntN(2)
	if what&1 != 0 {
		m.source = pod(node, r.IntN(2))
	}
	if what&2 != 0 {
		m.target = pod(1-node, r.IntN(2))
	}
	if what&4 != 0 {
		m.port = uint16(5000 + r.IntN(2))
	}
	return m
}

func randomPodMatch(r *rand.Rand) match { return match{target: pod(r.IntN(2), r.IntN(2))} }

func iptables(program string) func(*policy, match, bool) error {
	return func(_ *policy, m match, on bool) error {
		verb := "-I"
		if !on {
			verb = "-D"
		}
		out, err := exec.Command(program, m.args(verb)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %q: %w: %s", program, m.args(verb), err, out)
		}
		return nil
	}
}

func kinds() []kind {
	return []kind{
		{name: "nftables rule", about: randomMatch, notified: true, turn: func(p *policy, m match, on bool) error {
			if on {
				p.InsertRule(&nftables.Rule{Table: p.forward.Table, Chain: p.forward, Exprs: m.exprs()})
			} else {
				p.FlushChain(p.forward)
			}
			return p.Flush()
		}},
		{name: "iptables-nft rule", about: randomMatch, notified: true, turn: iptables("iptables-nft")},
		{name: "verdict map", about: randomPodMatch, notified: true, hits: match.both, turn: func(p *policy, m match, on bool) error {
			return p.isolate(p.any, m.target, on)
		}},
		{name: "route", about: randomPodMatch, notified: true, hits: match.both, turn: func(_ *policy, m match, on bool) error {
			r := &netlink.Route{Dst: &net.IPNet{IP: m.target.AsSlice(), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_BLACKHOLE, Table: 99}
			rule := netlink.NewRule()
			rule.Table, rule.Priority = 99, 1
			if on {
				return errors.Join(netlink.RouteAdd(r), netlink.RuleAdd(rule))
			}
			return errors.Join(netlink.RuleDel(rule), netlink.RouteDel(r))
		}},
		{name: "verdict map for new connections", about: randomPodMatch, notified: true, spares: true, turn: func(p *policy, m match, on bool) error {
			return p.isolate(p.fresh, m.target, on)
		}},
		{name: "verdict map and conntrack flush", about: randomPodMatch, hits: match.both, turn: func(p *policy, m match, on bool) error {
			err := p.isolate(p.fresh, m.target, on)
			if err == nil && on {
				err = flushConntrack(m.target)
			}
			return err
		}},
		{name: "iptables-legacy rule", about: randomMatch, turn: iptables("iptables-legacy")},
	}
}

// has reports whether the machine supports a variant of iptables.
func (w *world) has(program string) (has bool) {
	w.Helper()
	w.in("n0", func() error {
		out, err := exec.Command(program, "-w", "-L").CombinedOutput()
		if has = err == nil; !has {
			w.Logf("%s does not work here: %v: %s", program, err, out)
		}
		return nil
	})
	return has
}

// TestPolicy adds and deletes rules on either node while connections are accelerated: no packet may
// be delivered later than allowed. -changes 1000 takes about four minutes.
func TestPolicy(t *testing.T) {
	t.Parallel()
	for i, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shape, offloads[i%2])
			w.start()
			all := kinds()
			if !w.has("iptables-legacy") {
				all = all[:len(all)-1]
			}
			policies := [2]*policy{w.policy("n0"), w.policy("n1")}
			tr := w.traffic()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			times, longest, late := make([]int, len(all)), make([]time.Duration, len(all)), 0
			for change := range *changes / len(shapes) / 2 {
				// Each kind once, and the faster kinds once more.
				what := change / 2 % len(all)
				if change%2 == 1 {
					what = r.IntN(4)
				}
				times[what]++
				took := tr.turn(all[what], policies, r)
				longest[what] = max(longest[what], took)
				if all[what].notified && took > soon {
					late++
				}
				if t.Failed() {
					break
				}
			}
			if late > 1+*changes/100 {
				t.Errorf("%d changes that the kernel notifies were made again, as packets were delivered for longer than %s", late, soon)
			}
			for i, k := range all {
				t.Logf("%s: %d times, delivered for at most %s", k.name, times[i], longest[i])
			}
		})
	}
}

// turn drops packets for a while on some node, and returns how long packets were still delivered
// after the change.
func (tr *traffic) turn(k kind, policies [2]*policy, r *rand.Rand) time.Duration {
	tr.Helper()
	m, node, other := k.about(r), r.IntN(2), r.IntN(2) == 0
	what := fmt.Sprintf("%s on n%d, %s", k.name, node, m)
	try := func() time.Duration { return tr.once(k, policies[node], m, fmt.Sprint("n", node), other) }
	if k.notified {
		return promptly(tr, what, try)
	}
	took := try()
	if took > within {
		tr.Errorf("%s: packets were delivered for %s, want at most %s", what, took, within)
	}
	return took
}

// once is one attempt of turn.
func (tr *traffic) once(k kind, p *policy, m match, place string, other bool) (longest time.Duration) {
	tr.Helper()
	tr.waitAccelerated()
	hits := k.hits
	if hits == nil {
		hits = match.is
	}
	var set time.Time
	tr.in(place, func() error { err := k.turn(p, m, true); set = time.Now(); return err })
	limit := within
	if k.notified {
		limit = soon
	}
	tr.eventually("the limit has passed", func() { time.Sleep(5 * time.Millisecond) }, func() bool {
		if other && k.notified && time.Since(set) > limit/2 {
			other = false
			tr.in(place, func() error {
				route := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}, Type: unix.RTN_BLACKHOLE}
				return errors.Join(netlink.RouteAdd(route), netlink.RouteDel(route))
			})
		}
		return time.Since(set) > limit+50*time.Millisecond
	})
	affected := func(i int) bool { return hits(m, tr.flows[i].from, tr.flows[i].to) && !k.spares }
	// On a stalled machine even datagrams that no rule matches may be late.
	tr.eventually(fmt.Sprintf("%s on %s, %s: what no rule matches is delivered", k.name, place, m), nil, func() bool {
		for i := range tr.flows {
			if !affected(i) && time.Unix(0, tr.flows[i].last.Load()).Sub(set) < limit/2 {
				return false
			}
		}
		return true
	})
	for i := range tr.flows {
		f := &tr.flows[i]
		took := time.Unix(0, f.last.Load()).Sub(set)
		if affected(i) {
			longest = max(longest, took)
			if took > limit {
				tr.Logf("%s on %s, %s: %s to %s was delivered for %s", k.name, place, m, f.from, f.to, took)
			}
		}
	}
	tr.in(place, func() error { return k.turn(p, m, false) })
	return longest
}
