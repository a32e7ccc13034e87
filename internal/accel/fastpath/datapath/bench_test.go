//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// BenchmarkFastPath measures encap and vxlan_ingress on a packet of an accelerated connection, up
// to the last check: whether a device has verified its checksum, which no device has in a test run.
// The kernel's cost of redirecting the packet is not included.
func BenchmarkFastPath(b *testing.B) {
	for _, v := range []version{four, six} {
		for name, protocol := range map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP} {
			for _, way := range []struct {
				name    string
				program func(*Programs) *ebpf.Program
				packet  func(version, uint8) grammar.Packet
			}{
				{"encap", func(p *Programs) *ebpf.Program { return p.Encap }, outPacket},
				{"vxlan_ingress", func(p *Programs) *ebpf.Program { return p.VXLANIngress }, inPacket},
			} {
				b.Run(v.String()+"/"+name+"/"+way.name, func(b *testing.B) {
					f := loadForTest(b, nil)
					packet := way.packet(v, protocol).Bytes()
					var took time.Duration
					var n int
					for b.Loop() {
						// Renew the flow before it is due for revalidation.
						f.addFlow(b, v, protocol, nil)
						const repeat = 100_000
						_, each, err := way.program(f).Benchmark(packet, repeat, nil)
						if err != nil {
							b.Fatal(err)
						}
						took += each
						n++
					}
					b.ReportMetric(float64(took.Nanoseconds())/float64(n), "ns/packet")
				})
			}
		}
	}
}

// BenchmarkRoundTrip measures encap and vxlan_ingress on the round trips of a connection, of which one CPU
// handles the requests and another the responses: what either writes, the other may have to fetch.
func BenchmarkRoundTrip(b *testing.B) {
	if runtime.NumCPU() < 2 {
		b.Skip("needs two CPUs")
	}
	const size = 100 // of the payload of a test packet
	f := loadForTest(b, nil)
	request, response := outPacket(four, unix.IPPROTO_TCP).Bytes(), inPacket(four, unix.IPPROTO_TCP).Bytes()
	var turn atomic.Int64
	// handle runs a program on a CPU, whenever it is its turn, and returns the time per packet.
	handle := func(cpu int64, program *ebpf.Program, packet []byte, rounds int64) (each time.Duration, err error) {
		runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
		var on unix.CPUSet
		on.Set(int(cpu))
		if err := unix.SchedSetaffinity(0, &on); err != nil {
			return 0, fmt.Errorf("pin to CPU %d: %w", cpu, err)
		}
		for i := range rounds {
			for turn.Load() != 2*i+cpu {
				runtime.Gosched()
			}
			if err == nil {
				binary.BigEndian.PutUint32(packet[14+20+4:], 1000+size*uint32(i))
				binary.BigEndian.PutUint32(packet[14+20+8:], 1000+size*(uint32(i)+uint32(cpu)))
				var took time.Duration
				_, took, err = program.Benchmark(packet, 1, nil)
				each += took
			}
			turn.Add(1)
		}
		return each / time.Duration(rounds), err
	}
	var encap, ingress time.Duration
	rounds := 0
	for b.Loop() {
		f.addFlow(b, four, unix.IPPROTO_TCP, nil) // before it is due for revalidation
		turn.Store(0)
		const each = 10_000
		var cpus errgroup.Group
		var out, in time.Duration
		cpus.Go(func() (err error) { out, err = handle(0, f.Encap, request, each); return err })
		cpus.Go(func() (err error) { in, err = handle(1, f.VXLANIngress, response, each); return err })
		if err := cpus.Wait(); err != nil {
			b.Fatal(err)
		}
		encap, ingress, rounds = encap+out, ingress+in, rounds+1
	}
	b.ReportMetric(float64(encap.Nanoseconds())/float64(rounds), "ns/request")
	b.ReportMetric(float64(ingress.Nanoseconds())/float64(rounds), "ns/response")
}
