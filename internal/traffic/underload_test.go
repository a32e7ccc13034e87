package traffic

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// TestPhases checks that the connections of a sender do not all send at the same time: the first message of each is due at a time of
// its own within the first interval.
func TestPhases(t *testing.T) { bothWays(t, testPhases) }

func testPhases(t *testing.T, loop bool) {
	const connections, interval = 16, 20 * time.Millisecond
	spec := Spec{Kind: UnderLoad, Size: 64, Connections: connections, Rate: int(time.Second / interval), EventLoop: loop}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var mu sync.Mutex
	var first []int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, spec.Size)
				if _, err := io.ReadFull(c, buf[:len(Secret{})]); err != nil {
					return
				}
				for n := 0; ; n++ {
					if _, err := io.ReadFull(c, buf); err != nil {
						return
					}
					if n == 0 {
						mu.Lock()
						first = append(first, spec.stamped(buf))
						mu.Unlock()
					}
					if _, err := c.Write(buf); err != nil {
						return
					}
				}
			}()
		}
	}()
	end, err := Dial(t.Context(), spec, netip.MustParseAddrPort(l.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	start := Now() + int64(5*time.Millisecond)
	out, err := end.Run(t.Context(), Window{start, start + int64(interval), start + int64(11*interval)}, func(Progress) {})
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := histogram(t, out); n != 10*connections {
		t.Errorf("%d latencies, want %d", n, 10*connections)
	}
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(first)
	if len(slices.Compact(slices.Clone(first))) != connections {
		t.Fatalf("%d connections, due at %v", len(first), first)
	}
	if first[0] < start || first[connections-1] >= start+int64(interval) || first[connections-1]-first[0] < int64(interval/4) {
		t.Errorf("from %d to %d ns after the start", first[0]-start, first[connections-1]-start)
	}
}

// TestPhasesOfPages checks the same of the first user of each client.
func TestPhasesOfPages(t *testing.T) {
	const interval = 100 * time.Millisecond
	objects := map[string]int{pageIndex: indexSize, pageScript: 1000, pageStyles: stylesSize}
	came := make(chan int64, 1)
	w := serveWeb(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == pageIndex {
			came <- Now()
		}
		w.Header().Set("Content-Length", strconv.Itoa(objects[r.URL.Path]))
		_, _ = w.Write(make([]byte, objects[r.URL.Path]))
	})
	var after []int64
	for range 8 {
		end, err := Dial(t.Context(), Spec{Kind: HTTP, Size: 1000, Connections: 1, Page: true, EventLoop: true, Rate: int(time.Second / interval)}, w.addr)
		if err != nil {
			t.Fatal(err)
		}
		start := Now()
		_, err = end.Run(t.Context(), Window{start, start, start + int64(interval)}, func(Progress) {})
		end.Close()
		if err != nil {
			t.Fatal(err)
		}
		after = append(after, <-came-start)
	}
	if spread := slices.Max(after) - slices.Min(after); spread < int64(interval/20) {
		t.Errorf("the first users came %d ns after the start", after)
	}
}

// TestEdgesBetweenMessages checks that the window has its length even if no message comes near its edges.
func TestEdgesBetweenMessages(t *testing.T) {
	for name, spec := range map[string]Spec{
		"TCP": {Kind: UnderLoad, Size: 64}, "TCP on a loop": {Kind: UnderLoad, Size: 64, EventLoop: true},
		"UDP": {Kind: UnderLoad, Size: 64, UDP: true}, "UDP on a loop": {Kind: UnderLoad, Size: 64, UDP: true, EventLoop: true},
		"page": {Kind: HTTP, Size: 1000, Page: true, EventLoop: true},
	} {
		t.Run(name, func(t *testing.T) {
			const warmup, window = 70 * time.Millisecond, 325 * time.Millisecond // no multiples of stallCheck
			spec.Connections, spec.Rate = 1, 10
			// Another process may have the CPU at an edge, but not three times in a row.
			testenv.Retry(t, 3, func() error {
				ce, se := ends(t, spec)
				defer ce.Close()
				defer se.Close()
				start := Now() + int64(5*time.Millisecond)
				w := Window{start, start + int64(warmup), start + int64(warmup+window)}
				served := make(chan error, 1)
				go func() {
					_, err := se.Run(t.Context(), w, func(Progress) {})
					served <- err
				}()
				client, err := ce.Run(t.Context(), w, func(Progress) {})
				err = errors.Join(err, <-served)
				if off := client.Seconds - window.Seconds(); err == nil && (off < -0.003 || off > 0.003) {
					err = fmt.Errorf("a window of %.4f s", client.Seconds)
				}
				if err == nil && (client.Messages < 2 || client.Messages > 4) {
					err = fmt.Errorf("%d messages, want about 3", client.Messages)
				}
				return err
			})
		})
	}
}

// TestSchedule checks that connections are due in order, also those that were late.
func TestSchedule(t *testing.T) {
	flows := make([]flow, 5)
	l := &loopLoad{queue: make([]*flow, len(flows))}
	due := func(f *flow, at int64) {
		f.due = at
		l.schedule(f)
	}
	for i := range flows {
		due(&flows[i], rand.Int64N(100))
	}
	for n, last := 0, int64(-1); n < 1000; n++ {
		next := l.next
		f := l.unschedule()
		if f.due != next || f.due < last {
			t.Fatalf("after %d came %d, and %d was said to be next", last, f.due, next)
		}
		last = f.due
		if n%7 != 0 {
			due(f, f.due+100)
			continue
		}
		g := l.unschedule() // which waits for room
		last = max(last, g.due)
		due(f, f.due+100)
		due(g, g.due+100+rand.Int64N(50))
	}
	if n := testing.AllocsPerRun(10, func() { l.schedule(l.unschedule()) }); n > 0 {
		t.Errorf("%g allocations for a message", n)
	}
}

// TestDuplicateReplies checks that a second copy of a reply answers nothing. A message under load that is too small for a number
// counts it, but no message counts as lost for that.
func TestDuplicateReplies(t *testing.T) { bothWays(t, testDuplicateReplies) }

func testDuplicateReplies(t *testing.T, loop bool) {
	for _, size := range []int{64, 16, 8} {
		spec := Spec{Kind: UnderLoad, UDP: true, Size: size, Connections: 2, Rate: 500, EventLoop: loop}
		out, err := drive(t, t.Context(), spec, repeat(t, spec.hello(), 0), 300*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := histogram(t, out); out.Lost > 0 || size > 8 && n != 300 {
			t.Errorf("%d bytes: %d answered, %d lost, want 300 and 0", size, n, out.Lost)
		}
	}
}

// TestRepliesOutlastSender checks that replies are received while the sender still sends late messages, even if all messages so far
// are answered.
func TestRepliesOutlastSender(t *testing.T) {
	spec := Spec{Kind: UnderLoad, UDP: true, Size: 64}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeSocket(fds[0])
	defer closeSocket(fds[1])
	if err := setTimeouts(fds[0], stallCheck); err != nil {
		t.Fatal(err)
	}
	// Another process may have the CPU for lostAfter, but not three times in a row.
	testenv.Retry(t, 3, func() error {
		r := &run{clock: newClock()}
		now := r.now()
		r.Window = Window{now - 1e9, now - 1e9, now}
		for seq := range int64(2) {
			message := make([]byte, spec.Size)
			spec.stamp(message, r.From+seq, seq)
			if _, err := send(fds[1], message); err != nil {
				return err
			}
		}
		c := &conn{fd: fds[0], hdr: record.NewHistogram()}
		c.pace.sent.Store(1) // the second is being sent
		answered, err := spec.replies(c, r, &c.pace)
		if err == nil && answered != 2 {
			err = fmt.Errorf("%d replies, want 2", answered)
		}
		return err
	})
}
