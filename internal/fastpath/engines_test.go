//go:build linux

package fastpath_test

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// Outcomes of a connection, as a pod sees them.
const (
	through = "through"
	refused = "refused" // an ICMP error, or a reset
	silence = "silence"
)

// dialogue exchanges datagrams between the first pods of both nodes, one per millisecond and
// direction, and has a TCP server at the second one.
type dialogue struct {
	*world
	datagrams *net.UDPConn
	denied    atomic.Int64 // when a datagram was last refused
	sent      atomic.Int64 // when the latest datagram that got a reply was sent
	server    netip.AddrPort
	dials     int // connections that were tried
}

func (w *world) dialogue() *dialogue {
	w.Helper()
	c := &dialogue{world: w, datagrams: w.datagrams()}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				_, err := c.datagrams.Write(binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano())))
				c.note(err)
			}
		}
	}()
	go func() {
		buf := make([]byte, 64)
		for {
			n, err := c.datagrams.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n >= 8 {
				c.sent.Store(int64(binary.BigEndian.Uint64(buf)))
			}
			c.note(err)
		}
	}()
	w.Cleanup(func() { close(quit); <-done })
	var listener net.Listener
	w.in("n1p0", func() (err error) {
		listener, err = net.Listen("tcp4", ":0")
		return err
	})
	w.Cleanup(func() { listener.Close() })
	c.server = netip.AddrPortFrom(pod(1, 0), uint16(listener.Addr().(*net.TCPAddr).Port))
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	return c
}

func (c *dialogue) note(err error) {
	if errors.Is(err, unix.ECONNREFUSED) {
		c.denied.Store(time.Now().UnixNano())
	}
}

// established returns the outcome of datagrams that are sent from now on. A busy machine may answer late, so unexpected silence
// has to last longer.
func (c *dialogue) established(want string) string {
	began := time.Now()
	for n := 1; ; n++ { // a busy machine takes longer for the change, too
		time.Sleep(5 * time.Millisecond)
		switch {
		case c.sent.Load() > began.UnixNano():
			return through
		case n < 50:
		case c.denied.Load() > began.UnixNano():
			return refused
		case want == silence || n >= 600:
			return silence
		}
	}
}

// fresh returns the outcome of a connection that is opened now. A busy machine may answer late, so
// silence has to last.
func (c *dialogue) fresh(want string) (result string) {
	c.Helper()
	for n := 1; ; n++ {
		if result = c.dial(); result != silence || n >= 12 || want == silence && n >= 4 {
			return result
		}
	}
}

func (c *dialogue) dial() (result string) {
	c.Helper()
	c.dials++
	c.in("n0p0", func() error {
		conn, err := net.DialTimeout("tcp4", c.server.String(), 250*time.Millisecond)
		var timeout net.Error
		switch {
		case err == nil:
			conn.Close()
			result = through
		case errors.Is(err, unix.ECONNREFUSED):
			result = refused
		case errors.As(err, &timeout) && timeout.Timeout():
			result = silence
		default:
			return err
		}
		return nil
	})
	return result
}

// ipset creates a set of addresses on a node, as policy engines do.
func (w *world) ipset(node, name string) {
	w.Helper()
	w.in(node, func() error {
		return netlink.IpsetCreate(name, "hash:ip", netlink.IpsetCreateOptions{Family: unix.AF_INET})
	})
}

// member adds an address to an ipset of a node, or deletes it.
func (w *world) member(node, set string, a netip.Addr, is bool) {
	w.Helper()
	w.in(node, func() error {
		change := netlink.IpsetDel
		if is {
			change = netlink.IpsetAdd
		}
		return change(set, &netlink.IPSetEntry{IP: a.AsSlice()})
	})
}

// restore changes iptables rules on a node, as policy engines do: declared chains are replaced,
// others stay.
func (w *world) restore(node, program, rules string) {
	w.Helper()
	w.in(node, func() error {
		cmd := exec.CommandContext(context.Background(), program+"-restore", "-w", "--noflush")
		cmd.Stdin = strings.NewReader(rules)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s-restore: %w: %s", program, err, out)
		}
		return nil
	})
}

// Rules in which $0 and $1 stand for the links of a node's pods.
var (
	//go:embed testdata/engines/calico.rules
	calicoRules string
	//go:embed testdata/engines/kube-router.rules
	kubeRouterRules string
)

// engine is a policy engine that uses iptables and ipset, on the node of the other pod.
type engine struct {
	name, shape string
	// sets maps its ipsets to whether the first pod of node0 is in them. rules are there from the
	// start; changes are made in order.
	sets    map[string]bool
	rules   string
	changes []engineChange
}

// engineChange is a change of a pod or a policy.
type engineChange struct {
	name string
	// The change is either in rules, or in the members of a set.
	rules, set string
	member     bool
	// forget also flushes the pod's conntrack entries, as some engines do.
	forget bool
	// established and fresh are the outcomes of an existing connection and of a new one, as the pod
	// of node0 sees them.
	established, fresh string
}

// notified reports whether the kernel announces a change of rules that program makes.
func (c engineChange) notified(program string) bool {
	return c.rules != "" && !c.forget && program == "iptables-nft"
}

// calico has the rules that Felix writes (felix/rules, by Calico 3.30) for two pods, the first with
// a policy that allows the members of a set. An untracked policy (doNotTrack) drops packets from
// the members of another set, even those of established connections.
var calico = engine{
	name: "Calico", shape: spec.ShapeCalico, sets: map[string]bool{"cali40s:allowed": true, "cali40s:denied": false},
	rules: calicoRules,
	changes: []engineChange{
		{name: "pod no longer allowed", set: "cali40s:allowed", established: through, fresh: silence},
		{name: "pod allowed again", set: "cali40s:allowed", member: true, established: through, fresh: through},
		{name: "untracked policy denies the pod", set: "cali40s:denied", member: true, established: silence, fresh: silence},
		{name: "untracked policy no longer denies the pod", set: "cali40s:denied", established: through, fresh: through},
		{name: "endpoint deleted", established: silence, fresh: silence, rules: `*filter
:cali-to-wl-dispatch - [0:0]
-A cali-to-wl-dispatch -o $1 -g cali-tw-1
-A cali-to-wl-dispatch -m comment --comment "Unknown interface" -j DROP
COMMIT
`},
		{name: "endpoint added", established: through, fresh: through, rules: `*filter
:cali-to-wl-dispatch - [0:0]
-A cali-to-wl-dispatch -o $0 -g cali-tw-0
-A cali-to-wl-dispatch -o $1 -g cali-tw-1
-A cali-to-wl-dispatch -m comment --comment "Unknown interface" -j DROP
COMMIT
`},
		{name: "policy before the rule for established connections", established: through, fresh: silence, rules: `*filter
:cali-pi-_allowed - [0:0]
-A cali-pi-_allowed -m set --match-set cali40s:allowed src -j DROP
COMMIT
`},
	},
}

// kubeRouter has the rules that kube-router writes (pkg/controllers/netpol, by version 2.5) for a
// pod with a policy that allows the members of a set.
var kubeRouter = engine{
	name: "kube-router", shape: spec.ShapeFlannel, sets: map[string]bool{"KUBE-SRC-ALLOWED": true},
	rules: kubeRouterRules,
	changes: []engineChange{
		{name: "policy added that allows the pod", established: through, fresh: through, rules: kubeRouterPolicy("KUBE-NWPLCY-0", "KUBE-NWPLCY-DEFAULT")},
		{name: "pod no longer allowed", set: "KUBE-SRC-ALLOWED", established: through, fresh: refused},
		{name: "policy deleted", established: through, fresh: through, rules: kubeRouterPolicy("KUBE-NWPLCY-DEFAULT", "KUBE-NWPLCY-DEFAULT")},
		{name: "policies for both directions added, conntrack flushed", forget: true, established: refused, fresh: refused, rules: kubeRouterPolicy("KUBE-NWPLCY-0", "KUBE-NWPLCY-0")},
		{name: "pod allowed", set: "KUBE-SRC-ALLOWED", member: true, established: through, fresh: through},
	},
}

// kubeRouterPolicy makes the pod's chain jump to a policy for each direction.
func kubeRouterPolicy(ingress, egress string) string {
	return fmt.Sprintf("*filter\n-R KUBE-POD-FW-0 4 -d 10.244.1.2 -j %s\n-R KUBE-POD-FW-0 5 -s 10.244.1.2 -j %s\nCOMMIT\n", ingress, egress)
}

// TestPolicyEngines changes policies on nodes with the rules of policy engines. The fast path must make no difference to the
// accelerated and new connections of a pod. The kernel sends no notification of changes by legacy iptables and ipset, so these
// may take effect up to a second later.
func TestPolicyEngines(t *testing.T) {
	t.Parallel()
	for _, engine := range []engine{calico, kubeRouter} {
		for _, program := range []string{"iptables-nft", "iptables-legacy"} {
			for _, with := range []string{"without", "with"} {
				t.Run(fmt.Sprintf("%s %s %s", engine.name, program, with), func(t *testing.T) {
					t.Parallel()
					testenv.Retry(t, 3, func() error {
						w := newWorld(t, engine.shape, spec.OffloadFull)
						if !w.has(program) {
							return nil
						}
						for set, is := range engine.sets {
							w.ipset("n1", set)
							if is {
								w.member("n1", set, pod(0, 0), true)
							}
						}
						w.sysctl("n1", "net/ipv4/icmp_ratelimit", "0") // no limit on ICMP errors
						w.restore("n1", program, strings.NewReplacer("$0", w.link(1, 0), "$1", w.link(1, 1)).Replace(engine.rules))
						if with == "with" {
							w.start()
						}
						c := w.dialogue()
						late := engine.test(c, program)
						if late != nil { // the next attempt has the machine to itself
							c.datagrams.Close()
							w.stop(0)
							w.stop(1)
						}
						return late
					})
				})
			}
		}
	}
}

// test makes the changes of an engine, and checks the outcomes of connections. It returns an error if a result was right, but
// took too long.
func (g engine) test(c *dialogue, program string) (late error) {
	c.Helper()
	e := c.connect().back()
	links := strings.NewReplacer("$0", c.link(1, 0), "$1", c.link(1, 1))
	is := through
	for _, change := range g.changes {
		if is == through {
			c.waitAccelerated(e)
		}
		is = change.established
		if change.rules != "" {
			c.restore("n1", program, links.Replace(change.rules))
		}
		if change.set != "" {
			c.member("n1", change.set, pod(0, 0), change.member)
		}
		if change.forget {
			c.in("n1", func() error { return flushConntrack(pod(1, 0)) })
		}
		limit := within
		if is == through || change.notified(program) || c.paths[1] == nil {
			limit = soon
		}
		late = errors.Join(late, c.check(change, limit))
		if is == through {
			c.trip(e, 10)
		}
	}
	return late
}

// check checks the outcomes of connections after a change that has just been made. It returns an error if a result was right, but
// took longer than limit.
func (c *dialogue) check(change engineChange, limit time.Duration) (late error) {
	c.Helper()
	set, dials := time.Now(), c.dials
	if fresh := c.fresh(change.fresh); fresh != change.fresh {
		c.Errorf("%s: a new connection sees %s, want %s", change.name, fresh, change.fresh)
	}
	if tried := c.dials - dials; tried > 4 {
		late = fmt.Errorf("%s: a new connection sees %s after %d attempts", change.name, change.fresh, tried)
	}
	c.eventually("the limit has passed", nil, func() bool { return time.Since(set) > limit })
	asked := time.Now()
	established := c.established(change.established)
	if took := time.Since(asked); change.established != silence && took > soon {
		late = fmt.Errorf("%s: the established connection sees %s after %s", change.name, established, took)
	}
	if established != change.established {
		c.eventually("the longest limit has passed", nil, func() bool { return time.Since(set) > within })
		established = c.established(change.established)
	}
	if established != change.established {
		c.Errorf("%s: the established connection sees %s, want %s", change.name, established, change.established)
	}
	if took := time.Unix(0, c.sent.Load()).Sub(set); change.established != through && took > within {
		c.Errorf("%s: datagrams were answered for %s, want at most %s", change.name, took, within)
	} else if change.established != through && took > limit {
		late = fmt.Errorf("%s: datagrams were answered for %s, want at most %s", change.name, took, limit)
	}
	return late
}

// waitAccelerated waits until both connections get through, by the fast path if there is one.
func (c *dialogue) waitAccelerated(e echo) {
	c.Helper()
	c.eventually("both connections are accelerated", func() { c.trip(e, 1) }, func() bool {
		for i, f := range c.paths {
			if f != nil && c.fastNow(i) != 2 {
				return false
			}
		}
		return c.established(through) == through
	})
}

// gate is a tc program that passes packets while it is open.
func gate(t *testing.T) (p *ebpf.Program, open func(bool)) {
	t.Helper()
	closed := array(t, 4, 1)
	p = program(t, ebpf.SchedCLS, append(lookUpFirst(closed, "out"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.Word),
		asm.Mov.Imm(asm.R0, 2), // TC_ACT_SHOT
		asm.JNE.Imm(asm.R1, 0, "end"),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
		asm.Mov.Reg(asm.R0, asm.R0).WithSymbol("end"),
	)...)
	return p, func(is bool) {
		value := uint32(1)
		if is {
			value = 0
		}
		if err := closed.Put(uint32(0), value); err != nil {
			t.Fatal(err)
		}
	}
}

// TestChainedCilium attaches programs as Cilium does when it is chained to another CNI plugin (generic-veth): at both hooks of
// a pod's link. No packet may then take the fast path through that link, and the programs must be able to deny connections that
// were accelerated before. The test runs alone, because it measures how soon they can.
func TestChainedCilium(t *testing.T) {
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.start()
	c := w.dialogue()
	e := c.connect().back()
	for _, by := range []string{"tcx", "tc filters"} {
		attach := func(program *ebpf.Program, egress bool) (end func()) {
			l, parent, at := w.device("n1", "pod"), uint32(netlink.HANDLE_MIN_INGRESS), ebpf.AttachTCXIngress
			if egress {
				parent, at = netlink.HANDLE_MIN_EGRESS, ebpf.AttachTCXEgress
			}
			if by == "tcx" {
				return w.attachTCX("n1", l, at, program)
			}
			return w.attachTC("n1", l, parent, program)
		}
		for _, egress := range []bool{false, true} {
			side := map[bool]string{false: "from the pod", true: "to the pod"}[egress]
			t.Run(by+" "+side, func(t *testing.T) {
				c.waitAccelerated(e)
				first, open := gate(t)
				second, _ := gate(t)
				open(false)
				defer attach(first, egress)()
				came := time.Now()
				defer attach(second, !egress)()
				limit := soon
				if by == "tcx" {
					limit = noticed // the kernel does not announce it
				}
				for is := c.established(silence); is != silence; is = c.established(silence) {
					if took := time.Since(came); took > limit {
						t.Fatalf("the established connection sees %s %s after the program came, want silence", is, took)
					}
				}
				open(true)
				w.eventually("datagrams get through", nil, func() bool { return c.established(through) == through })
				w.eventually("the link is skipped", nil, func() bool { return w.skips(1, w.link(1, 0)+": it has ") })
				if fast := w.roundTrips(e, 1, 100); fast > 0 {
					t.Errorf("%d packets took the fast path", fast)
				}
				open(false)
				if is := c.established(silence); is != silence {
					t.Errorf("the connection on the slow path sees %s, want silence", is)
				}
				open(true)
			})
		}
	}
}

// TestEbtablesRules checks that ebtables rules at the pods' bridge stop accelerated connections at
// once, as on the slow path, and that these continue when the rules are deleted.
func TestEbtablesRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.start()
	c := w.dialogue()
	e := c.connect().back()
	mac := ""
	w.in("n1p0", func() error {
		l, err := netlink.LinkByIndex(eth0())
		if err == nil {
			mac = l.Attrs().HardwareAddr.String()
		}
		return err
	})
	for _, rule := range [][]string{{"INPUT", "-s", mac}, {"OUTPUT", "-d", mac}} {
		ebtables := func(verb string) {
			t.Helper()
			w.in("n1", func() error {
				out, err := exec.Command("ebtables-nft", append(append([]string{verb}, rule...), "-j", "DROP")...).CombinedOutput()
				if err != nil {
					return fmt.Errorf("ebtables %s %v: %w: %s", verb, rule, err, out)
				}
				return nil
			})
		}
		promptly(t, fmt.Sprint(rule), func() time.Duration {
			c.waitAccelerated(e)
			ebtables("-A")
			set := time.Now()
			w.eventually("the longest limit has passed", nil, func() bool { return time.Since(set) > within })
			if is := c.established(silence); is != silence {
				t.Errorf("%v: the established connection sees %s", rule, is)
			}
			took := time.Unix(0, c.sent.Load()).Sub(set)
			ebtables("-D")
			return took
		})
	}
	c.waitAccelerated(e)
}
