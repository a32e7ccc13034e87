package collect

import (
	"net"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestCongestionControl checks that the congestion control of each end of a connection is found by its port, and that of no
// other connection.
func TestCongestionControl(t *testing.T) {
	allowed, err := os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Fields(string(allowed))
	first, last := names[0], names[len(names)-1]
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		if got, err := CongestionControl(port, true); err != nil || got != nil {
			t.Errorf("without a connection: %q, %v", got, err)
		}
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		setCongestionControl(t, client, first)
		setCongestionControl(t, server, last)
		for remote, want := range map[bool]string{true: first, false: last} {
			got, err := CongestionControl(port, remote)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{want}, got); diff != "" {
				t.Errorf("%s, remote %v (-want +got):\n%s", address, remote, diff)
			}
		}
	}
}

func setCongestionControl(t *testing.T, c net.Conn, name string) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	if err := raw.Control(func(fd uintptr) {
		set = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	}); err != nil || set != nil {
		t.Fatal(err, set)
	}
}

func FuzzParseCongestionControl(f *testing.F) {
	f.Add(append(make([]byte, inetDiagMsgLen), 10, 0, inetDiagCong, 0, 'c', 'u', 'b', 'i', 'c', 0, 0, 0))
	f.Fuzz(func(_ *testing.T, answer []byte) { _, _ = parseCongestionControl(answer) })
}
