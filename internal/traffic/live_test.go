package traffic

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

const childEnv = "SLIPSTREAM_TEST_TRAFFIC_CHILD"

// inNamespace runs the calling test again, in a process with its own network namespace, and calls body there. The loopback
// device carries rate bytes per second from a queue of limit bytes, which makes a sender wait. Everything runs on one CPU,
// because packets in the backlogs of two CPUs may overtake each other.
func inNamespace(t *testing.T, rate uint64, limit uint32, body func(*testing.T)) {
	t.Helper()
	testenv.NeedRoot(t)
	if os.Getenv(childEnv) == "" {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=1m")
		cmd.Env = append(os.Environ(), childEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := onOneCPU(cmd.Start)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil {
			t.Errorf("%v\n%s", err, out.Bytes())
		}
		return
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = errors.Join(netlink.LinkSetUp(lo), netlink.QdiscAdd(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: lo.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
			Rate:       rate, Buffer: 20_000, Limit: limit,
		}))
	}
	if err != nil {
		t.Fatal(err)
	}
	body(t)
}

// onOneCPU starts a process on the first of this process's CPUs.
func onOneCPU(start func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for cpu := 0; first.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			first.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &first); err != nil {
		return err
	}
	return errors.Join(start(), unix.SchedSetaffinity(0, &all))
}

// dropEveryTenth drops every tenth incoming datagram of size bytes.
func dropEveryTenth(t *testing.T, size uint16) {
	t.Helper()
	nft, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := nft.AddTable(&nftables.Table{Name: "test", Family: nftables.TableFamilyINet})
	chain := nft.AddChain(&nftables.Chain{Name: "in", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		// udp length
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 4, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(size + 8)},
		&expr.Numgen{Register: 1, Modulus: 10, Type: unix.NFT_NG_INCREMENTAL},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}})
	if err := nft.Flush(); err != nil {
		t.Fatal(err)
	}
}

// lost returns the loss that a trial would report.
func lost(client, server record.Endpoint) float64 {
	return float64(client.Messages-server.Arrived) / float64(client.Messages)
}

// TestLossExact checks that if the kernel drops every tenth datagram, the ends report exactly that.
func TestLossExact(t *testing.T) { inNamespace(t, 10e6, 1<<20, lossExact) }

func lossExact(t *testing.T) {
	const size = 1000
	dropEveryTenth(t, size)
	bothWays(t, func(t *testing.T, loop bool) {
		lossOf(t, Spec{Kind: Stream, UDP: true, Size: size, Connections: 1, EventLoop: loop})
	})
}

func lossOf(t *testing.T, spec Spec) {
	ce, se := ends(t, spec)
	defer ce.Close()
	defer se.Close()
	client, server := runEnds(t, ce, se, time.Second)
	if client.Messages < 5000 {
		t.Errorf("only %d datagrams were sent", client.Messages)
	}
	// A tenth of the window's datagrams is dropped, rounded up or down.
	if n := client.Messages - server.Arrived; n != client.Messages/10 && n != (client.Messages+9)/10 {
		t.Errorf("%d of %d datagrams are lost, want a tenth", n, client.Messages)
	}
	if server.Reordered+server.Duplicates != 0 || server.Jitter <= 0 || server.Jitter > 0.01 {
		t.Errorf("%d reordered, %d twice, jitter %g s", server.Reordered, server.Duplicates, server.Jitter)
	}
}

// TestLostLocally checks that datagrams that a local queue drops count as sent and lost, whether or not the socket gets an
// error.
func TestLostLocally(t *testing.T) { inNamespace(t, 10e6, 3000, lostLocally) }

func lostLocally(t *testing.T) {
	for name, told := range map[string]int{"silent": 0, "told": 1} {
		t.Run(name, func(t *testing.T) {
			client, server := ends(t, Spec{Kind: Stream, UDP: true, Size: 1000, Connections: 1})
			defer client.Close()
			defer server.Close()
			if err := unix.SetsockoptInt(client.conns[0].fd, unix.IPPROTO_IP, unix.IP_RECVERR, told); err != nil {
				t.Fatal(err)
			}
			sent, got := runEnds(t, client, server, 500*time.Millisecond)
			// The device takes 10 MB/s.
			if n := float64(got.Arrived) * 1000 / got.Seconds; n < 8e6 || n > 11e6 {
				t.Errorf("%.3g bytes arrived a second", n)
			}
			if share := lost(sent, got); share < 0.5 || share >= 1 {
				t.Errorf("%.3f of %d are lost, where the queue takes a small part", share, sent.Messages)
			}
			if dropped := told == 1; dropped != (sent.Bytes < sent.Messages*1000) {
				t.Errorf("handed over %d bytes in %d messages", sent.Bytes, sent.Messages)
			}
		})
	}
}

// runEnds runs two connected ends for a window of d.
func runEnds(t *testing.T, client, server *End, d time.Duration) (sent, got record.Endpoint) {
	t.Helper()
	// The socket must not overflow, however long its reader waits for the CPU.
	if err := unix.SetsockoptInt(server.conns[0].fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20); err != nil {
		t.Fatal(err)
	}
	start := Now() + int64(5*time.Millisecond)
	from := start + int64(50*time.Millisecond)
	w := Window{Start: start, From: from, To: from + int64(d)}
	served := make(chan error, 1)
	go func() {
		var err error
		got, err = server.Run(t.Context(), w, func(Progress) {})
		served <- err
	}()
	sent, err := client.Run(t.Context(), w, func(Progress) {})
	if err := errors.Join(err, <-served); err != nil {
		t.Fatal(err)
	}
	return sent, got
}

// TestReorderExact sends through a relay. Of every ten datagrams, the relay swaps the third and fourth, sends the sixth twice,
// and holds back the ninth behind seven others.
func TestReorderExact(t *testing.T) { inNamespace(t, 10e6, 1<<20, reorderExact) }

func reorderExact(t *testing.T) {
	spec := Spec{Kind: Stream, UDP: true, Size: 1000, Connections: 1}
	s, err := Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	relay, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	go shuffle(relay, s.Addr())
	client, server := join(t, spec, s, relay.LocalAddr().(*net.UDPAddr).AddrPort())
	defer client.Close()
	defer server.Close()
	// The relay's own datagrams wait in the same queue: there must be room.
	if err := unix.SetsockoptInt(client.conns[0].fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10); err != nil {
		t.Fatal(err)
	}
	sent, got := runEnds(t, client, server, time.Second)
	if sent.Messages < 2000 || got.Arrived != sent.Messages {
		t.Errorf("%d of %d datagrams arrived", got.Arrived, sent.Messages)
	}
	tenths := float64(got.Messages) / 10
	near := func(what string, n uint64, want float64) {
		t.Helper()
		if float64(n) < want-2 || float64(n) > want+2 {
			t.Errorf("%d of %d %s, want %.0f", n, got.Messages, what, want)
		}
	}
	near("reordered", got.Reordered, 2*tenths)
	near("came twice", got.Duplicates, tenths)
	if got.Bytes != got.Messages*1000 {
		t.Errorf("%d bytes in %d messages", got.Bytes, got.Messages)
	}
}

// shuffle relays between a client and a server at to.
func shuffle(relay *net.UDPConn, to netip.AddrPort) {
	var client netip.AddrPort
	var third, ninth []byte
	var passed int
	buf := make([]byte, 64<<10)
	for {
		n, from, err := relay.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		msg := buf[:n]
		send := func(b []byte, to netip.AddrPort) {
			if b != nil {
				_, _ = relay.WriteToUDPAddrPort(b, to)
			}
		}
		switch {
		case from == to:
			send(msg, client)
			continue
		case string(msg) == Spec{}.hello():
			client = from
			send(msg, to)
			continue
		}
		switch passed++; passed % 10 {
		case 3:
			third = append([]byte(nil), msg...)
		case 4:
			send(msg, to)
			send(third, to)
		case 6:
			send(msg, to)
			send(msg, to)
			send(ninth, to) // of the previous ten
			ninth = nil
		case 9:
			ninth = append([]byte(nil), msg...)
		default:
			send(msg, to)
		}
	}
}

// TestPortsOfUDP uses nearly all ports of a small range, and checks that each flow of a client has a port of its own, never its
// server's, and that each server has a port of its own, too.
func TestPortsOfUDP(t *testing.T) { inNamespace(t, 10e6, 1<<20, portsOfUDP) }

func portsOfUDP(t *testing.T) {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40063"), 0); err != nil {
		t.Fatal(err)
	}
	client, server, err := pair(t, t.Context(), Spec{Kind: PingPong, UDP: true, Size: 64, Connections: 60}, "127.0.0.1", 200*time.Millisecond)
	if err != nil || client.Messages == 0 || client.Lost > 0 || server.Messages == 0 {
		t.Errorf("%d messages, %d lost, %d answered: %v", client.Messages, client.Lost, server.Messages, err)
	}
	ports := make(map[uint16]bool)
	for range 60 { // servers end with the process
		s, err := Listen(Spec{Kind: PingPong, UDP: true, Size: 64, Connections: 1}, netip.MustParseAddrPort("127.0.0.1:0"))
		if err != nil {
			t.Fatal(err)
		}
		if ports[s.Addr().Port()] {
			t.Errorf("two servers have port %d", s.Addr().Port())
		}
		ports[s.Addr().Port()] = true
	}
}
