//go:build linux

package cluster

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

var rules = flag.Int("rules", 8, "how many rules testAgent has come and go while packets take the fast path")

// datagrams are UDP flows between two pods. Each flow sends a datagram every two milliseconds, and the
// other pod sends it back.
type datagrams struct {
	began time.Time
	sent  atomic.Uint64
	// delivered holds for each flow the send time of its latest delivered datagram, since began.
	delivered [16]atomic.Int64
}

func newDatagrams(t testing.TB, near, far webPod) *datagrams {
	t.Helper()
	d := &datagrams{began: time.Now()}
	var echo *net.UDPConn
	to := &net.UDPAddr{IP: net.ParseIP(far.ip), Port: 4001}
	if err := onNetns(far.netns, func() (err error) {
		echo, err = net.ListenUDP("udp4", to)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { echo.Close() })
	go func() {
		for message := make([]byte, 64); ; {
			n, from, err := echo.ReadFromUDPAddrPort(message)
			if err != nil {
				return
			}
			last := &d.delivered[binary.NativeEndian.Uint64(message)]
			last.Store(max(last.Load(), int64(binary.NativeEndian.Uint64(message[8:]))))
			_, _ = echo.WriteToUDPAddrPort(message[:n], from)
		}
	}()
	var flows [len(d.delivered)]net.Conn
	if err := onNetns(near.netns, func() (err error) {
		for i := range flows {
			if flows[i], err = net.DialUDP("udp4", nil, to); err != nil {
				return err
			}
			t.Cleanup(func() { flows[i].Close() })
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(quit); <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for message := make([]byte, 64); ; {
			for i, f := range flows {
				binary.NativeEndian.PutUint64(message, uint64(i))
				binary.NativeEndian.PutUint64(message[8:], uint64(d.now()))
				_, _ = f.Write(message)
			}
			d.sent.Add(uint64(len(flows)))
			select {
			case <-quit:
				return
			case <-tick.C:
			}
		}
	}()
	return d
}

func (d *datagrams) now() time.Duration { return time.Since(d.began) }

// last returns the latest send time of any delivered datagram, and least the smallest of the flows'
// latest send times.
func (d *datagrams) last() time.Duration  { return slices.Max(d.times()) }
func (d *datagrams) least() time.Duration { return slices.Min(d.times()) }

func (d *datagrams) times() (all []time.Duration) {
	for i := range d.delivered {
		all = append(all, time.Duration(d.delivered[i].Load()))
	}
	return all
}

// lateAt inserts a rule, and waits until nothing is delivered any more. It returns how long after the
// insertion the last delivered datagram was sent.
func (d *datagrams) lateAt(t *testing.T, node *Node, insert, remove string) time.Duration {
	t.Helper()
	do := func(command string) {
		t.Helper()
		if _, err := output(node.Command(t.Context(), "sh", "-c", command)); err != nil {
			t.Fatal(err)
		}
	}
	do(insert)
	defer do(remove)
	at := d.now()
	testenv.Eventually(t, time.Minute, "nothing is delivered", func() string {
		if quiet := d.now() - d.last(); quiet < 200*time.Millisecond {
			return fmt.Sprintf("something was %v ago", quiet)
		}
		return ""
	})
	return max(0, d.last()-at)
}

// testRules inserts and deletes rules that drop packets to a pod, on either node, beside kube-proxy's
// rules. Nothing that is sent after the bound may arrive. accelerated counts the packets that took the
// fast path.
func testRules(t *testing.T, c *Cluster, near, far webPod, accelerated func() float64) {
	// heard allows for an agent that waits for a CPU before it hears an announcement.
	const heard, unannounced = 200 * time.Millisecond, time.Second
	kinds := []struct {
		name, insert, remove string
		bound                time.Duration
	}{
		{"nftables", "nft 'add table ip deny; add chain ip deny drops { type filter hook forward priority 0; }; add rule ip deny drops ip daddr POD drop'",
			"nft delete table ip deny", heard},
		{"iptables", "iptables-nft -w -I FORWARD -d POD -j DROP", "iptables-nft -w -D FORWARD -d POD -j DROP", heard},
		{"a verdict map", "nft 'add table ip deny; add map ip deny pods { type ipv4_addr : verdict; }; add chain ip deny drops { type filter hook forward priority 0; };" +
			" add rule ip deny drops ip daddr vmap @pods; add element ip deny pods { POD : drop }'", "nft delete table ip deny", heard},
		{"legacy iptables", "iptables-legacy -w -I FORWARD -d POD -j DROP", "iptables-legacy -w -D FORWARD -d POD -j DROP", unannounced},
	}
	d := newDatagrams(t, near, far)
	longest, times := map[string]time.Duration{}, map[string]int{}
	for n := range *rules {
		kind, node := kinds[n%len(kinds)], c.Node(fmt.Sprint("node", n/len(kinds)%2))
		measure := func() time.Duration {
			t.Helper()
			began, sent, fast := d.now(), d.sent.Load(), accelerated()
			testenv.Eventually(t, time.Minute, "all that is sent takes the fast path", func() string {
				before, was := sent, fast
				sent, fast = d.sent.Load(), accelerated()
				if d.least() < began || fast-was < float64(sent-before)*7/8 {
					return fmt.Sprintf("%.0f of %d", fast-was, sent-before)
				}
				return ""
			})
			forPod := strings.NewReplacer("POD", far.ip)
			return d.lateAt(t, node, forPod.Replace(kind.insert), forPod.Replace(kind.remove))
		}
		late := measure()
		for try := 1; late > kind.bound && try < 3; try++ { // now and then, an agent may wait longer for a CPU
			t.Logf("%s on %s: what was sent %v later was delivered", kind.name, node.name, late)
			late = measure()
		}
		if late > kind.bound {
			t.Errorf("%s on %s: what was sent %v later was delivered", kind.name, node.name, late)
		}
		times[kind.name]++
		longest[kind.name] = max(longest[kind.name], late)
	}
	for _, kind := range kinds {
		t.Logf("%s: %d times, the last that was delivered was sent %v later", kind.name, times[kind.name], longest[kind.name])
	}
}
