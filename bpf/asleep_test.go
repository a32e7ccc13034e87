//go:build linux

package bpf

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/grammar"
)

// Programs that sleep tell of a connection that is picked twice, 50 ms apart or more, and not
// of those that have the same ports one after the other.
func TestWakes(t *testing.T) {
	for _, way := range []struct {
		name    string
		program func(*Fastpath) *ebpf.Program
		packet  func(uint8) grammar.Packet
	}{
		{"leave", func(f *Fastpath) *ebpf.Program { return f.Leave }, outPacket},
		{"arrive", func(f *Fastpath) *ebpf.Program { return f.Arrive }, inPacket},
	} {
		f := loadForTest(t, nil)
		if err := f.SetAsleep(true); err != nil {
			t.Fatal(err)
		}
		show := func(p grammar.Packet, times uint32) {
			t.Helper()
			code, err := way.program(f).Run(&ebpf.RunOptions{Data: p.Bytes(), Repeat: times})
			if err != nil || int32(code) != -1 {
				t.Fatalf("returns %d, %v", int32(code), err)
			}
		}
		told := func() bool {
			t.Helper()
			f.news.SetDeadline(time.Now())
			flow, err := f.News()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return false
			}
			if err != nil || flow != (Flow{}) {
				t.Fatalf("told of %v, %v", flow, err)
			}
			return true
		}
		const some = 64 // one of them is picked at least
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			start := time.Now()
			for !told() {
				if time.Since(start) > 20*time.Second {
					t.Fatalf("%s: never told of protocol %d", way.name, protocol)
				}
				show(way.packet(protocol), some)
			}
			if took := time.Since(start); took < 40*time.Millisecond {
				t.Errorf("%s: told after %v", way.name, took)
			}
		}

		opening := way.packet(unix.IPPROTO_TCP)
		opening.Flags = 0x02
		for try := 1; ; try++ {
			var longest time.Duration
			woken := false
			for start := time.Now(); time.Since(start) < 300*time.Millisecond; {
				began := time.Now()
				show(opening, 1)
				show(way.packet(unix.IPPROTO_TCP), some)
				longest = max(longest, time.Since(began))
				woken = told() || woken
			}
			if !woken {
				break
			}
			// One that lasts so long is worth it.
			if longest < 40*time.Millisecond || try == 20 {
				t.Errorf("%s: told of short connections, the longest of %v", way.name, longest)
				break
			}
		}
	}
}
