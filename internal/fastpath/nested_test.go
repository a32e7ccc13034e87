//go:build linux

package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// forged is the payload by which TestNestedVXLAN recognises its packets.
var forged = []byte("this is forged")

// encapsulated returns a datagram in VXLAN, as a node would send it (RFC 7348, section 5).
func encapsulated(vni int, to, from net.HardwareAddr, source, destination netip.AddrPort) []byte {
	udp := slices.Concat(make([]byte, 8), forged)
	binary.BigEndian.PutUint16(udp, source.Port())
	binary.BigEndian.PutUint16(udp[2:], destination.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	ip := make([]byte, 20)
	ip[0], ip[8], ip[9] = 0x45, 63, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(udp)))
	copy(ip[12:], source.Addr().AsSlice())
	copy(ip[16:], destination.Addr().AsSlice())
	binary.BigEndian.PutUint16(udp[6:], ^grammar.Sum(uint32(unix.IPPROTO_UDP+len(udp))+uint32(grammar.Sum(0, ip[12:20])), udp))
	binary.BigEndian.PutUint16(ip[10:], ^grammar.Sum(0, ip))
	vxlan := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, uint32(vni<<8))
	return slices.Concat(vxlan, to, from, []byte{8, 0}, ip, udp)
}

// forgedAt counts the forged datagrams that a pod receives.
func (w *world) forgedAt(place string) (seen func() map[string]int) {
	w.Helper()
	fd := -1
	w.in(place, func() (err error) {
		every := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP)))
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, every); err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(every), Ifindex: eth0()}))
	})
	w.Cleanup(func() { unix.Close(fd) })
	return func() map[string]int {
		all := make(map[string]int)
		for b := make([]byte, 2048); ; {
			n, from, err := unix.Recvfrom(fd, b, 0)
			if errors.Is(err, unix.EAGAIN) {
				return all
			}
			if err != nil {
				w.Fatal(err)
			}
			if frame := b[:n]; from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING && n > 42 && frame[23] == unix.IPPROTO_UDP && bytes.Contains(frame, forged) {
				all[fmt.Sprintf("%s: %d bytes to %v port %d", place, n, netip.AddrFrom4([4]byte(frame[30:34])), binary.BigEndian.Uint16(frame[36:]))]++
			}
		}
	}
}

// TestNestedVXLAN sends VXLAN packets from a pod that look like the ones that a node would send for
// an accelerated connection, to pods and to the addresses and ports at which nodes decapsulate. The
// pods must receive the same packets as without the fast path.
func TestNestedVXLAN(t *testing.T) {
	t.Parallel()
	vnis := map[string]int{spec.ShapeFlannel: 1, spec.ShapeCalico: 4096}
	vxlanDevices := map[string]string{spec.ShapeFlannel: "flannel.1", spec.ShapeCalico: "vxlan.calico"}
	for _, shape := range tunnels {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shape, spec.OffloadFull)
			c := w.dialogue()
			e := w.connect().back()
			near, far := c.datagrams.LocalAddr().(*net.UDPAddr).AddrPort(), c.datagrams.RemoteAddr().(*net.UDPAddr).AddrPort()
			var hostile *net.UDPConn
			w.in("n0p1", func() (err error) {
				hostile, err = net.ListenUDP("udp4", nil)
				return err
			})
			t.Cleanup(func() { hostile.Close() })
			option(t, hostile, func(fd int) error {
				return errors.Join( // as a node would send it: DF, TTL 64 behind the node, no checksum
					unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT),
					unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 65),
					unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1))
			})
			var macs [2]net.HardwareAddr
			for node := range macs {
				macs[node] = w.device(fmt.Sprintf("n%d", node), vxlanDevices[shape]).Attrs().HardwareAddr
			}
			var captures []func() map[string]int
			for _, place := range []string{"n0p0", "n0p1", "n1p0", "n1p1"} {
				captures = append(captures, w.forgedAt(place))
			}
			const times = 10
			came := func() map[string]int {
				t.Helper()
				for node, targets := range [][]netip.Addr{
					{netip.AddrFrom4([4]byte{198, 18, 0, 1}), pod(0, -1), pod(0, 0)},
					{netip.AddrFrom4([4]byte{198, 18, 0, 2}), pod(1, 0)},
				} {
					source, destination := near, far
					if node == 0 {
						source, destination = far, near
					}
					for _, target := range targets {
						for _, port := range []uint16{4789, 8472} {
							for _, vni := range []int{vnis[shape], vnis[shape] + 1} {
								for range times {
									_, err := hostile.WriteToUDPAddrPort(encapsulated(vni, macs[node], macs[1-node], source, destination), netip.AddrPortFrom(target, port))
									if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
										t.Fatal(err)
									}
								}
							}
						}
					}
				}
				all, last := make(map[string]int), time.Now()
				w.eventually("no more datagrams arrive", nil, func() bool {
					for _, seen := range captures {
						for what, n := range seen() {
							all[what] += n
							last = time.Now()
						}
					}
					return time.Since(last) > 100*time.Millisecond
				})
				return all
			}
			c.waitAccelerated(e)
			want := came()
			t.Log(want)
			w.start()
			c.waitAccelerated(e)
			testenv.Retry(t, 3, func() error { // the backlog of a busy machine may drop or delay some
				if d := cmp.Diff(want, came()); d != "" {
					return fmt.Errorf("datagrams received (-without the fast path +with):\n%s", d)
				}
				return nil
			})
			c.waitAccelerated(e)
		})
	}
}
