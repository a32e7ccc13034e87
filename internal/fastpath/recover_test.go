//go:build linux

package fastpath_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// leftConnection is an idle connection whose conntrack entry on node0 a killed agent has left liberal.
type leftConnection struct {
	echo
	was  conntrack.Progress // before it was accelerated
	last time.Time          // when its last packet was sent
}

// leftLiberal returns one such connection through each front.
func (w *world) leftLiberal(fronts ...front) (all []leftConnection) {
	w.Helper()
	agent := w.startAgent("n0")
	for _, front := range fronts {
		e := w.connectBy(front).back()
		e.noKeepalive(w.T)
		c := leftConnection{echo: e, was: w.conntrack("n0", e)}
		w.eventually("the connection is accelerated, and no data unacknowledged", nil, func() bool {
			is := w.conntrack("n0", e)
			return w.isFast(e) && is.Flags[0]&is.Flags[1]&flagLiberal != 0 && (is.Flags[0]|is.Flags[1])&flagUnacknowledged == 0
		})
		c.last = time.Now()
		all = append(all, c)
	}
	if err := agent.Process.Kill(); err != nil {
		w.Fatal(err)
	}
	_ = agent.Wait()
	for _, c := range all {
		if is := w.conntrack("n0", c.echo); is.State != stateEstablished || is.Flags[0]&is.Flags[1]&flagLiberal == 0 {
			w.Fatalf("conntrack has %+v after the agent was killed", is)
		}
	}
	return all
}

// checksWindow waits until conntrack of node0 checks the window of a connection again.
func (w *world) checksWindow(c leftConnection) {
	w.Helper()
	w.eventually("conntrack checks the window", nil, func() bool {
		is := w.conntrack("n0", c.echo)
		return is.State == stateEstablished && is.Flags == c.was.Flags
	})
}

// forgeRST makes another pod forge RSTs of a connection until conntrack accepts one, which leaves the entry on node0 a timeout of
// 10 s.
func (w *world) forgeRST(c leftConnection) {
	w.Helper()
	forge := w.forger(w.otherPods()[0], c.echo)
	w.eventually("conntrack accepts the forged RST", func() { forge(rand.Uint32(), tcpRST) }, func() bool {
		return w.conntrack("n0", c.echo).Timeout <= closeTimeout
	})
}

// wantIdleSince checks that the timeout of a connection's entry is that of an ESTABLISHED connection that has been idle since
// the given time. After a forged RST it may be longer, because the agent cannot know the previous timeout.
func (w *world) wantIdleSince(node string, c leftConnection, since time.Time, forged bool) {
	w.Helper()
	// Timeouts are whole seconds. They are rounded down when the agent reads the entry, when it writes it, and here.
	at := establishedTimeout - int(time.Since(since)/time.Second)
	if is := int(w.conntrack(node, c.echo).Timeout); is < at-3 || is > at+1 && !forged {
		w.Errorf("the timeout of %s on %s is %d s, want %d", c.LocalAddr(), node, is, at)
	}
}

// reset makes the client of a connection reset it, and waits until the server's pod has received the RST.
func (w *world) reset(e echo) {
	w.Helper()
	before := w.snmp(w.farPod(), "Tcp:", "EstabResets")
	if err := e.Conn.(*net.TCPConn).SetLinger(0); err != nil {
		w.Fatal(err)
	}
	e.Conn.Close()
	w.eventually("the peer gets the RST", nil, func() bool { return w.snmp(w.farPod(), "Tcp:", "EstabResets") > before })
}

// TestIdleConnectionsRecovered kills an agent and starts another, while another pod forges an RST. Conntrack must check the
// windows of idle connections again, and have the states and timeouts that it would have without the fast path. No data is
// sent, and nothing reaches the other node. An entry whose pod has reset its connection meanwhile is not kept.
func TestIdleConnectionsRecovered(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name                 string
		six, local           bool
		idle, forgedRST, own front
	}{
		{"IPv4", false, false, direct, byService, direct},
		{"Service", false, false, byService, direct, byService},
		{"IPv6", true, false, direct, nil, direct},
		{"local IPv4", false, true, direct, byService, direct},
		{"local Service", false, true, byService, direct, byService},
		{"local IPv6", true, true, direct, nil, direct},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var w *world
			if tt.local {
				w = newLocalWorld(t, spec.ShapeFlannel, tt.six)
			} else {
				w = newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, tt.six)
			}
			fronts := []front{tt.own, tt.idle}
			if tt.forgedRST != nil {
				fronts = append(fronts, tt.forgedRST)
			}
			all := w.leftLiberal(fronts...)
			ended, open := all[0], all[1:]
			time.Sleep(4 * time.Second) // so that a restarted timeout shows
			// From here on the entries of two connections last 10 s.
			if tt.forgedRST != nil {
				w.forgeRST(open[1])
			}
			w.reset(ended.echo)

			w.startAgent("n0")
			for i, e := range open {
				w.checksWindow(e)
				for _, node := range w.nodes() {
					w.wantIdleSince(node, e, e.last, i > 0)
				}
			}
			if is := w.conntrack("n0", ended.echo); is.Timeout > closeTimeout {
				t.Errorf("conntrack has %+v of a connection that its pod has reset", is)
			}
			for _, e := range open {
				w.trip(e.echo, 100)
			}
		})
	}
}

// delayedAck is the longest time for which TCP may delay an acknowledgement (TCP_DELACK_MAX).
const delayedAck = 200 * time.Millisecond

// TestRecoveredEntryKeepsTimeoutPolicy checks that an entry with a timeout policy (nft's ct timeout) keeps its timeout.
func TestRecoveredEntryKeepsTimeoutPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	const timeout = 200
	w.rules("n0", func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Name: "policies", Family: nftables.TableFamilyIPv4})
		chain := conn.AddChain(&nftables.Chain{Name: "prerouting", Table: table, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle, Type: nftables.ChainTypeFilter})
		conn.AddObj(&nftables.NamedObj{Table: table, Name: "short", Type: nftables.ObjTypeCtTimeout, Obj: &expr.CtTimeout{
			L3Proto: unix.NFPROTO_IPV4, L4Proto: unix.IPPROTO_TCP, Policy: expr.CtStatePolicyTimeout{expr.CtStateTCPESTABLISHED: timeout},
		}})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Objref{Type: int(nftables.ObjTypeCtTimeout), Name: "short"},
		}})
	})
	c := w.leftLiberal(byService)[0]
	w.restart(0)
	w.checksWindow(c)
	if is := w.conntrack("n0", c.echo); is.Timeout > timeout || is.Timeout < timeout-20 {
		t.Errorf("the timeout is %d s, want at most %d", is.Timeout, timeout)
	}
}

// TestStaleTimeoutOfUnacknowledgedData kills an agent before it has cleared the flag of unacknowledged data. The next agent
// must give the idle connection the timeout of an ESTABLISHED one.
func TestStaleTimeoutOfUnacknowledgedData(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	all := w.leftLiberal(byService, byService)
	// The pod delays its last acknowledgement. Conntrack clears the flag if it sees that.
	w.eventually("the last acknowledgement was sent", nil, func() bool { return time.Since(all[1].last) > delayedAck })
	for _, c := range all {
		w.setUnacknowledged(c)
	}
	set := time.Now()
	w.forgeRST(all[1])
	w.restart(0)
	for i, c := range all {
		w.checksWindow(c)
		w.wantIdleSince("n0", c, set, i > 0)
	}
}

// setUnacknowledged marks an entry on node0 as one with unacknowledged data, as conntrack does.
func (w *world) setUnacknowledged(c leftConnection) {
	w.Helper()
	w.in("n0", func() error {
		return errors.Join(
			conntrack.SetFlags(flowOf(c), flagUnacknowledged, flagUnacknowledged),
			conntrack.SetTimeout(flowOf(c), unacknowledgedTimeout))
	})
	if is := w.conntrack("n0", c.echo); (is.Flags[0]|is.Flags[1])&flagUnacknowledged == 0 || is.Timeout > unacknowledgedTimeout {
		w.Fatalf("conntrack has %+v", is)
	}
}

// TestPeerDisappearsBetweenAgents checks that the entry of a connection with data that really is unacknowledged soon has the
// timeout of unacknowledged data again.
func TestPeerDisappearsBetweenAgents(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.sysctl("n0", "net/netfilter/nf_conntrack_tcp_max_retrans", "1") // the next retransmissions are rare
	c := w.leftLiberal(direct)[0]
	w.in("n1p0", func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: prefix(pod(0, 0), 32), Type: unix.RTN_BLACKHOLE})
	})
	if _, err := c.Write(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	w.setUnacknowledged(c)
	w.restart(0)
	w.eventually("the flag is cleared", nil, func() bool {
		is := w.conntrack("n0", c.echo)
		return (is.Flags[0]|is.Flags[1])&flagUnacknowledged == 0
	})
	w.eventually("the timeout is of unacknowledged data", nil, func() bool { return w.conntrack("n0", c.echo).Timeout <= unacknowledgedTimeout })
}

// TestConnectionsEndDuringRecovery checks that a pod may end a connection right after the next agent has started:
// the peer gets an RST, and no entry becomes ESTABLISHED again.
func TestConnectionsEndDuringRecovery(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	all := w.leftLiberal(direct, byService, direct)
	reset, closed, half := all[0], all[1], all[2]
	w.restart(0)
	w.reset(reset.echo)
	closed.Conn.Close() // the peer answers with a FIN, and the pod is in TIME_WAIT
	closed.far.Close()
	if err := half.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 3*time.Second; time.Sleep(100 * time.Millisecond) {
		for i, c := range all {
			if is := w.conntrack("n0", c.echo); time.Since(began) > time.Second && is.State == stateEstablished && is.Timeout > closeTimeout {
				t.Fatalf("conntrack has %+v of connection %d, which has ended", is, i)
			}
		}
	}
}

// TestPodDoesNotAnswer checks that the entry of a connection stays as it is if its pod does not answer keepalives, even if the
// agent stops meanwhile, which it does at once. An RST of the pod is not an answer, and reaches the peer.
func TestPodDoesNotAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	all := w.leftLiberal(direct, direct, direct)
	c, others := all[0], all[1:]
	was := w.conntrack("n0", c.echo)
	w.rules("n0p0", func(conn *nftables.Conn) {
		drop := nftables.ChainPolicyDrop
		table := conn.AddTable(&nftables.Table{Name: "silent", Family: nftables.TableFamilyIPv4})
		conn.AddChain(&nftables.Chain{Name: "input", Table: table, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter, Type: nftables.ChainTypeFilter, Policy: &drop})
	})
	ask := func(times int) {
		t.Helper()
		got := w.snmp("n0p0", "Ip:", "InReceives")
		w.restart(0)
		w.eventually("the agent asks the pod", nil, func() bool { return w.snmp("n0p0", "Ip:", "InReceives") >= got+times })
	}
	isAsBefore := func() {
		t.Helper()
		if is := w.conntrack("n0", c.echo); is.Flags != was.Flags || is.State != was.State {
			t.Errorf("conntrack has %+v, had %+v", is, was)
		}
	}
	testenv.Retry(t, len(others), func() error { // to detach programs, the agent may have to wait for a lock of the whole kernel
		ask(1 + len(others))
		w.reset(others[0].echo)
		others = others[1:]
		began := time.Now()
		w.stop(0)
		isAsBefore()
		if took := time.Since(began); took > 1900*time.Millisecond { // the agent waits 2 s for connections that do not pause
			return fmt.Errorf("the agent stopped after %s", took)
		}
		return nil
	})
	for _, other := range others {
		w.reset(other.echo)
	}
	ask(6)
	w.eventually("no flow is left", nil, func() bool {
		known, _, err := w.paths[0].Connections()
		return err == nil && known == 0
	})
	isAsBefore()
	// No event would announce that the connection is used again.
	for range 3 {
		time.Sleep(fastpath.SweepInterval)
		if !w.paths[0].DropsForged() {
			t.Fatal("drop_forged is not attached")
		}
	}
	w.reset(c.echo)
	w.eventually("drop_forged is detached", nil, func() bool { return !w.paths[0].DropsForged() })
}

// TestManyConnectionsRecovered checks that an agent that finds thousands of conntrack entries of a killed agent accelerates
// connections meanwhile, and forgets the connections that the pod does not have.
func TestManyConnectionsRecovered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	e := w.connect().back()
	w.trip(e, 10) // so that the node knows the pod's MAC address
	const entries, scaled = 8192, 0x01
	info := nl.NewRtAttr(nl.CTA_PROTOINFO|unix.NLA_F_NESTED, nil)
	tcp := info.AddRtAttr(nl.CTA_PROTOINFO_TCP|unix.NLA_F_NESTED, nil)
	tcp.AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, []byte{stateEstablished})
	for _, way := range []int{nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, nl.CTA_PROTOINFO_TCP_FLAGS_REPLY} {
		tcp.AddRtAttr(way, []byte{flagLiberal | scaled, flagLiberal | scaled})
	}
	w.addEntries(unix.IPPROTO_TCP, w.pod(0, 0), statusReplied|statusAssured|statusConfirmed, func(n int) (bool, error) { return n >= entries, nil }, info)
	w.start()
	w.accelerate(e)
	trips := 0
	testenv.Await(t, 3*patience, "the pod has refused all keepalives", func() bool {
		w.trip(e, 100)
		trips += 100
		return w.snmp("n0p0", "Tcp:", "OutRsts") >= entries
	})
	if known, _, err := w.paths[0].Connections(); err != nil || known > 10 {
		t.Errorf("%d connections are known: %v", known, err)
	}
	// On a busy machine the lease may expire once.
	if c := w.counts(0); c["lease-expired"] > uint64(trips/10) {
		t.Errorf("the lease expired for %d packets of %d round trips", c["lease-expired"], trips)
	}
	w.accelerate(e)
}

// TestNoMapOutlivesAgent checks that the maps of a killed agent are gone: the next agent may have another version, whose maps
// have another layout.
func TestNoMapOutlivesAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	agent := w.startAgent("n0")
	e := w.connect().back()
	w.eventually("the connection is accelerated", nil, func() bool { return w.isFast(e) })
	var ids []ebpf.MapID
	for _, name := range []string{"flows", "encap_templates", "vxlan_devices", "cpu_states"} {
		m := w.table("n0", name)
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		ids = append(ids, id)
		m.Close()
	}
	if err := agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = agent.Wait()
	w.eventually("the maps are gone", nil, func() bool {
		return !slices.ContainsFunc(ids, func(id ebpf.MapID) bool {
			m, err := ebpf.NewMapFromID(id)
			if err == nil {
				m.Close()
			}
			return !errors.Is(err, os.ErrNotExist)
		})
	})
	w.startAgent("n0")
	w.eventually("the connection is accelerated again", nil, func() bool { return w.isFast(e) })
}

// TestQuietPodRecovered kills an agent and makes its node forget where the pod is, as after a time without packets. The pod sends
// nothing. The next agent must find it and recover its connection.
func TestQuietPodRecovered(t *testing.T) {
	t.Parallel()
	for _, shape := range shapes {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shape, spec.OffloadFull)
			c := w.leftLiberal(direct)[0]
			w.deleteNeighbour("n0", w.pod(0, 0))
			if shape == spec.ShapeFlannel {
				w.in("n0", func() error {
					port, err := netlink.LinkByName(w.link(0, 0))
					if err != nil {
						return err
					}
					all, err := netlink.NeighList(port.Attrs().Index, unix.AF_BRIDGE)
					for _, at := range all {
						if at.State&netlink.NUD_PERMANENT == 0 {
							at.Flags |= netlink.NTF_MASTER
							err = errors.Join(err, netlink.NeighDel(&at))
						}
					}
					return err
				})
			}
			w.startAgent("n0")
			w.checksWindow(c)
		})
	}
}
