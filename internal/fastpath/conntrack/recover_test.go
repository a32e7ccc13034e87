//go:build linux

package conntrack

import (
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/testenv"
)

// fakePath is a fast path whose pods have the given links. It records what Entries requests.
type fakePath struct {
	links    map[netip.Addr]int
	located  []netip.Addr
	attached []int
}

func (f *fakePath) DropForged()                                    {}
func (f *fakePath) Links() map[netip.Addr]int                      { return f.links }
func (f *fakePath) MACs() (map[netip.Addr]net.HardwareAddr, error) { return nil, nil }
func (f *fakePath) Locate(pod netip.Addr)                          { f.located = append(f.located, pod) }
func (f *fakePath) Attach(link int)                                { f.attached = append(f.attached, link) }
func (f *fakePath) Attached(int) bool                              { return false }

var (
	leftPod, leftPeer = netip.MustParseAddrPort("10.0.0.2:40000"), netip.MustParseAddrPort("10.0.1.2:80")
	leftFlow          = datapath.Flow{Pod: leftPod, Peer: leftPeer, Protocol: unix.IPPROTO_TCP}
)

// newEntries returns the entries of a new network namespace, which have one that an agent has left liberal: of leftFlow.
func newEntries(t *testing.T) (*Entries, *fakePath) {
	t.Helper()
	testenv.EnterNamespace(t)
	path := &fakePath{links: make(map[netip.Addr]int)}
	e := &Entries{fastpath: path, log: slog.New(slog.NewTextHandler(t.Output(), nil)), recovering: make(map[datapath.Flow]*recovery), unrecovered: make(map[datapath.Flow]bool)}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	if e.resyncs.try() != nil {
		t.Skip("the kernel has no eBPF for netfilter")
	}
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|ctNew, unix.NLM_F_CREATE|unix.NLM_F_ACK)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	for kind, ends := range map[int][2]netip.AddrPort{ctaTupleOrig: {leftPod, leftPeer}, ctaTupleReply: {leftPeer, leftPod}} {
		tuple := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
		ip := tuple.AddRtAttr(ctaTupleIP|unix.NLA_F_NESTED, nil)
		ip.AddRtAttr(ctaIPv4Src, ends[0].Addr().AsSlice())
		ip.AddRtAttr(ctaIPv4Dst, ends[1].Addr().AsSlice())
		proto := tuple.AddRtAttr(ctaTupleProto|unix.NLA_F_NESTED, nil)
		proto.AddRtAttr(ctaProtoNum, []byte{unix.IPPROTO_TCP})
		proto.AddRtAttr(ctaProtoSrcPort, binary.BigEndian.AppendUint16(nil, ends[0].Port()))
		proto.AddRtAttr(ctaProtoDstPort, binary.BigEndian.AppendUint16(nil, ends[1].Port()))
		r.AddData(tuple)
	}
	const left = tcpWindowScale | tcpLiberal
	r.AddData(tcpInfo(append(flagAttrs(left, left), nl.NewRtAttr(ctaTCPState, []byte{tcpEstablished}))...))
	r.AddData(timeoutAttr(600))
	if _, err := r.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		t.Fatal(err)
	}
	if is, err := Find(leftFlow); err != nil || is == nil || !is.leftLiberal() {
		t.Fatalf("conntrack has %+v, %v", is, err)
	}
	return e, path
}

// recoverRounds runs rounds of recovery.
func recoverRounds(t *testing.T, e *Entries, n int) {
	t.Helper()
	for range n {
		if err := e.Recover(); err != nil {
			t.Fatal(err)
		}
	}
}

// fill puts n connections without conntrack entries into a set.
func fill[T any](set map[datapath.Flow]T, n int, value T) {
	for i := range n {
		address := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		set[datapath.Flow{Pod: netip.AddrPortFrom(address, 1), Peer: leftPeer, Protocol: unix.IPPROTO_TCP}] = value
	}
}

// TestPodIsLocated checks that the entry of a pod whose link the agent does not know when it starts is not given up: it looks for the
// pod, recovers the connection once it knows the link, and counts it until the entry has gone.
func TestPodIsLocated(t *testing.T) {
	e, path := newEntries(t)
	if err := e.FindLiberal(); err != nil {
		t.Fatal(err)
	}
	recoverRounds(t, e, 2)
	for _, end := range []netip.Addr{leftPod.Addr(), leftPeer.Addr()} {
		if !slices.Contains(path.located, end) {
			t.Errorf("the agent does not look for %s, only for %v", end, path.located)
		}
	}
	if !e.AnyLeft() {
		t.Error("the connection is not counted")
	}
	path.links[leftPod.Addr()] = 7
	recoverRounds(t, e, 1)
	if r := e.recovering[leftFlow]; r == nil || r.Link != 7 || !slices.Contains(path.attached, 7) {
		t.Errorf("programs are requested for links %v, recovering %+v", path.attached, r)
	}
	recoverRounds(t, e, recoverTries)
	if len(e.recovering) > 0 || !e.unrecovered[leftFlow] || !e.AnyLeft() {
		t.Errorf("%d connections are being recovered, the connection is unrecovered: %v, and counted: %v", len(e.recovering), e.unrecovered[leftFlow], e.AnyLeft())
	}
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	if e.AnyLeft() {
		t.Error("the connection is counted after its entry has gone")
	}
}

// TestRecoveryIsBounded checks that no more than recoverMost connections are kept in each set, that another one counts
// nevertheless, and that a later search finds it.
func TestRecoveryIsBounded(t *testing.T) {
	e, path := newEntries(t)
	path.links[leftPod.Addr()] = 7
	fill(e.recovering, recoverMost, &recovery{})
	if err := e.recoverLater(leftFlow); err != nil {
		t.Fatal(err)
	}
	if len(e.recovering) != recoverMost {
		t.Errorf("%d connections are being recovered", len(e.recovering))
	}
	clear(e.recovering)
	if !e.AnyLeft() {
		t.Error("the connection does not count")
	}
	e.searchAt = time.Now().Add(-time.Second)
	recoverRounds(t, e, 1)
	if e.recovering[leftFlow] == nil {
		t.Error("the search does not find the connection")
	}
	fill(e.unrecovered, recoverMost, true)
	recoverRounds(t, e, recoverTries)
	if len(e.unrecovered) != recoverMost || e.searchAt.IsZero() {
		t.Errorf("%d connections are unrecovered, the next search is at %v", len(e.unrecovered), e.searchAt)
	}
}

// TestUnrecoveredArePruned checks that each call of AnyLeft forgets some of the connections that have ended, although another one is
// left.
func TestUnrecoveredArePruned(t *testing.T) {
	e, _ := newEntries(t)
	fill(e.unrecovered, 2*pruneMost, true)
	e.unrecovered[leftFlow] = true
	for n := range 3 {
		if !e.AnyLeft() {
			t.Fatal("none is left")
		}
		if most := max(1, 2*pruneMost+1-(n+1)*(pruneMost-1)); len(e.unrecovered) > most {
			t.Errorf("%d of %d connections are kept after %d calls", len(e.unrecovered), 2*pruneMost+1, n+1)
		}
	}
}

// TestCrowdedOutIsRecovered checks that a connection that leaves a crowded flow table while its entry is liberal is recovered.
func TestCrowdedOutIsRecovered(t *testing.T) {
	e, path := newEntries(t)
	path.links[leftPod.Addr()] = 7
	programs, err := datapath.Load()
	if err != nil {
		t.Fatal(err)
	}
	defer programs.Close()
	e.programs = programs
	if forgotten, err := e.Forget(leftFlow, true); err != nil || !forgotten {
		t.Fatalf("the flow is forgotten: %v, %v", forgotten, err)
	}
	if e.recovering[leftFlow] == nil {
		t.Error("nobody returns to the liberal entry")
	}
}
