//go:build linux

package bpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/grammar"
)

// BenchmarkCarry times what leave and arrive do for a packet of a connection that is carried, up to
// the last question: whether a device vouches for its checksum, which none does here. So nothing
// of it is what the kernel does to move it.
func BenchmarkCarry(b *testing.B) {
	for _, v := range []version{four, six} {
		for name, protocol := range map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP} {
			for _, way := range []struct {
				name    string
				program func(*Fastpath) *ebpf.Program
				packet  func(version, uint8) grammar.Packet
			}{
				{"encap", func(f *Fastpath) *ebpf.Program { return f.Encap }, outPacket},
				{"vxlan_ingress", func(f *Fastpath) *ebpf.Program { return f.VXLANIngress }, inPacket},
			} {
				b.Run(v.String()+"/"+name+"/"+way.name, func(b *testing.B) {
					f := loadForTest(b, nil)
					packet := way.packet(v, protocol).Bytes()
					var took time.Duration
					var n int
					for b.Loop() {
						// For less long than a packet goes to see.
						f.know(b, v, protocol, nil)
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
