//go:build linux

package datapath

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// BenchmarkFastPath measures redirect_pod and redirect_vxlan on a packet of an accelerated connection. The programs stop at
// their last check, whether a device has verified the checksum, because none does in a test run. So the result does not include
// the cost of redirecting the packet in the kernel.
func BenchmarkFastPath(b *testing.B) {
	for _, v := range []version{four, six} {
		for name, protocol := range map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP} {
			for _, way := range []struct {
				name    string
				program func(*Programs) *ebpf.Program
				packet  func(version, uint8) grammar.Packet
			}{
				{"redirect_pod", func(p *Programs) *ebpf.Program { return p.RedirectPod }, outPacket},
				{"redirect_vxlan", func(p *Programs) *ebpf.Program { return p.RedirectVXLAN }, inPacket},
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

// BenchmarkOwnPackets measures the overhead of the programs at a NIC for a packet of the node itself, while there are flows.
func BenchmarkOwnPackets(b *testing.B) {
	f := loadForTest(b, nil)
	own := outPacket(four, unix.IPPROTO_TCP)
	own.Source, own.Target = netip.MustParseAddrPort("192.0.2.1:4000"), netip.MustParseAddrPort("192.0.2.2:5000")
	f.addFlow(b, four, unix.IPPROTO_TCP, nil)
	if err := errors.Join(f.objects.BloomA.Set(make([]byte, f.objects.BloomA.Size())), f.objects.BloomB.Set(make([]byte, f.objects.BloomB.Size()))); err != nil {
		b.Fatal(err)
	}
	for name, program := range map[string]*ebpf.Program{"observe_nic": f.ObserveNIC, "decap_nic": f.DecapNIC, "observe_router": f.ObserveRouter, "redirect_nic": f.RedirectNIC} {
		b.Run(name, func(b *testing.B) {
			var took time.Duration
			var n int
			for b.Loop() {
				_, each, err := program.Benchmark(own.Bytes(), 100_000, nil)
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
