//go:build linux

package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

// byProcess are the shapes in which a process carries packets from node to node.
var byProcess = slices.DeleteFunc(overlay.Shapes(), func(s string) bool { return !overlay.Forwards(s) })

// running returns the processes in the namespaces of a lab.
func running(t *testing.T, c Config) (pids []string) {
	t.Helper()
	inodes := make(map[string]bool)
	for _, name := range namespaces(c) {
		var st unix.Stat_t
		if err := unix.Stat(network.Path(name), &st); err == nil {
			inodes[fmt.Sprintf("net:[%d]", st.Ino)] = true
		}
	}
	all, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		if ns, err := os.Readlink(path); err == nil && inodes[ns] {
			pids = append(pids, strings.Split(path, "/")[2])
		}
	}
	return pids
}

// TestForwarderEndsWithOwner checks that forwarders end with the process that owns the lab, even without a sweep, and that a
// sweep then leaves nothing.
func TestForwarderEndsWithOwner(t *testing.T) {
	for _, shape := range byProcess {
		t.Run(shape, func(t *testing.T) {
			testenv.NeedRoot(t)
			t.Setenv(childShape, shape)
			dir, name := t.TempDir(), labName(t)
			c := config(name)
			c.Shape = shape
			before := machine(t, "slip-"+name)
			owner := startUp(t, dir, name)
			if line, err := bufio.NewReader(owner.out).ReadString('\n'); err != nil || line != "up\n" {
				t.Fatalf("child says %q, %v", line, err)
			}
			if got := running(t, c); len(got) != c.Nodes {
				t.Errorf("processes %v run in the lab, want one a node", got)
			}
			if err := owner.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			testenv.Await(t, 20*time.Second, "forwarders have ended", func() bool { return len(running(t, c)) == 0 })
			if swept, err := Sweep(t.Context(), dir); err != nil || len(swept) != 1 {
				t.Errorf("swept %v, %v", swept, err)
			}
			if after := machine(t, "slip-"+name); len(after) != len(before) {
				t.Errorf("before there was %v, now %v", before, after)
			}
		})
	}
}

// TestForwarderOfKeptLab checks that in a lab with Keep, the forwarders outlive the owner, and end with the lab.
func TestForwarderOfKeptLab(t *testing.T) {
	testenv.NeedRoot(t)
	dir, name := t.TempDir(), labName(t)
	t.Setenv(childShape, overlay.ShapeUDP)
	t.Setenv(childKeep, "1")
	c := config(name)
	c.Shape = overlay.ShapeUDP
	owner := startUp(t, dir, name)
	if line, err := bufio.NewReader(owner.out).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("child says %q, %v", line, err)
	}
	before := running(t, c)
	if err := owner.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.cmd.Wait()
	l, err := Open(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Down(context.Background()) })
	echo(t, connect(t, l, "node0/pod0", "node1/pod0", 4, 1)[0])
	if got := running(t, c); len(got) != c.Nodes || strings.Join(got, " ") != strings.Join(before, " ") {
		t.Errorf("processes %v run in the lab, and with its owner %v", got, before)
	}
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, pid := range before {
		if _, err := os.Stat("/proc/" + pid + "/ns/net"); err == nil {
			if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
				t.Errorf("forwarder %s outlives the lab: %s", pid, stat)
			}
		}
	}
}

// TestForwarderDoesNotStart checks that if a forwarder does not start, the error has its output, and the lab is not created.
func TestForwarderDoesNotStart(t *testing.T) {
	testenv.NeedRoot(t)
	dir, c := t.TempDir(), config(labName(t))
	c.Shape = overlay.ShapeUDP
	before := machine(t, "slip-"+c.Name)
	for what, try := range map[string]struct {
		forwarder []string
		want      string
	}{
		"none":    {nil, "needs Options.Forwarder"},
		"missing": {[]string{"/nonexistent"}, "/nonexistent"},
		"fails":   {[]string{"sh", "-c", "echo no such verb >&2; exit 2"}, "no such verb"},
	} {
		_, err := Up(t.Context(), c, Options{Dir: dir, Forwarder: try.forwarder})
		if err == nil || !strings.Contains(err.Error(), try.want) {
			t.Errorf("%s: %v, want it to say %q", what, err, try.want)
		}
		if after := machine(t, "slip-"+c.Name); len(after) != len(before) {
			t.Errorf("%s: before there was %v, now %v", what, before, after)
		}
		if left := files(t, dir); left != nil {
			t.Errorf("%s: files left: %v", what, left)
		}
	}
}

// TestForwarderDies checks that a warning names the unreachable node when a forwarder dies.
func TestForwarderDies(t *testing.T) {
	testenv.NeedRoot(t)
	c := config(labName(t))
	c.Shape = overlay.ShapeUDP
	var log lines
	l, err := Up(t.Context(), c, Options{Dir: t.TempDir(), Forwarder: forwarderCommand, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Down(context.Background()) })
	conn := connect(t, l, "node0", "node1/pod0", 4, 1)[0]
	all := running(t, c)
	if len(all) != 2 {
		t.Fatalf("processes %v", all)
	}
	var pid int
	if _, err := fmt.Sscan(all[0], &pid); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testenv.Await(t, 20*time.Second, "its end is told", func() bool { return strings.Contains(log.String(), "the forwarder exited") })
	if !strings.Contains(log.String(), "node=node") || !strings.Contains(log.String(), "killed") {
		t.Errorf("told is %s", log.String())
	}
	// A connection that cannot be closed properly must not delay the removal of the lab.
	if _, err := conn[0].Write(make([]byte, 10_000)); err != nil {
		t.Fatal(err)
	}
	conn[0].Close()
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if strings.Count(log.String(), "\n") != 1 {
		t.Errorf("the end of the others is told, too: %s", log.String())
	}
}

// lines is a buffer that several goroutines may write to.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestForwarderHostile checks that a forwarder ignores datagrams that are not packets, and packets to unknown addresses, and
// that the next packet arrives.
func TestForwarderHostile(t *testing.T) {
	l := up(t, func(c *Config) { c.Shape, c.Pods = overlay.ShapeUDP, 1 })
	to, own := placeOf(t, l, "node0/pod0"), placeOf(t, l, "node1/pod0").IPv4
	var server *net.UDPConn
	var outer *net.UDPConn
	in(t, l, to.Name, func() (err error) {
		server, err = net.ListenUDP("udp", &net.UDPAddr{IP: to.IPv4.AsSlice()})
		return err
	})
	defer server.Close()
	in(t, l, "node1", func() (err error) {
		outer, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: placeOf(t, l, "node0").IPv4.AsSlice(), Port: 8285})
		return err
	})
	defer outer.Close()
	port := server.LocalAddr().(*net.UDPAddr).Port
	good := udpPacket(own, to.IPv4, port, "good")
	far := udpPacket(own, to.IPv4, port, "too far")
	far[8] = 1
	binary.BigEndian.PutUint16(far[10:], 0)
	binary.BigEndian.PutUint16(far[10:], ^grammar.Sum(0, far[:20]))
	onlyGoodArrives(t, outer, server, [][]byte{
		{}, {0x45}, good[:19], append([]byte{0x65}, good[1:]...), append([]byte{0}, good[1:]...), bytes.Repeat([]byte{0x60}, 39),
		make([]byte, 9000), bytes.Repeat([]byte{0x45}, 1472), far, udpPacket(own, netip.MustParseAddr("10.244.77.1"), port, "for nobody"), good,
	})
}

// onlyGoodArrives sends datagrams to a forwarder. The last one carries the text good to the server, which must not receive
// another one before it.
func onlyGoodArrives(t *testing.T, outer, server *net.UDPConn, datagrams [][]byte) {
	t.Helper()
	for _, d := range datagrams {
		if _, err := outer.Write(d); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 2000)
	if n, err := server.Read(got); err != nil || string(got[:n]) != "good" {
		t.Errorf("%q arrives, %v", got[:n], err)
	}
}

// TestFramesHostile checks that a forwarder of frames ignores what no node of the lab has sent, and frames to other nodes, and
// that the next frame arrives.
func TestFramesHostile(t *testing.T) {
	l := up(t, func(c *Config) { c.Shape, c.Pods = overlay.ShapeWeave, 1 })
	nodes := layout(l.state.Config)
	pod := nodes[0].Pods[0]
	var server, outer *net.UDPConn
	in(t, l, pod.Place.Name, func() (err error) {
		server, err = net.ListenUDP("udp", &net.UDPAddr{IP: pod.Place.IPv4.AsSlice()})
		return err
	})
	defer server.Close()
	in(t, l, "node1", func() (err error) {
		outer, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: nodes[0].Place.IPv4.AsSlice(), Port: 6783})
		return err
	})
	defer outer.Close()
	port := server.LocalAddr().(*net.UDPAddr).Port
	names := [][]byte{network.HardwareAddr("node0", "weave"), network.HardwareAddr("node1", "weave")}
	stranger := network.HardwareAddr("node2", "weave")
	frame := func(message string) []byte {
		f := slices.Concat(pod.MAC, nodes[1].Pods[0].MAC, []byte{8, 0})
		return append(f, udpPacket(nodes[1].Pods[0].Place.IPv4, pod.Place.IPv4, port, message)...)
	}
	datagram := func(sender, receiver []byte, size int, frame []byte) []byte {
		return append(binary.BigEndian.AppendUint16(slices.Concat(sender, sender, receiver), uint16(size)), frame...)
	}
	good := frame("good")
	onlyGoodArrives(t, outer, server, [][]byte{
		{}, names[1][:5], names[1], datagram(names[1], names[0], 0, nil), make([]byte, 9000),
		datagram(stranger, names[0], len(good), frame("from a stranger")), datagram(names[1], stranger, len(good), frame("for another")),
		datagram(names[1], names[0], len(good)+1, good), datagram(names[1], names[0], 13, good),
		datagram(names[1], names[0], len(good), good),
	})
}

// TestForwardedPackets checks that forwarders carry the fragments of a large packet, and that a client gets an error for an
// address that no pod has.
func TestForwardedPackets(t *testing.T) {
	for _, shape := range byProcess {
		for _, version := range []int{4, 6} {
			t.Run(fmt.Sprintf("%s IPv%d", shape, version), func(t *testing.T) {
				t.Parallel()
				l := up(t, func(c *Config) { c.Shape, c.Pods = shape, 1 })
				from, to := placeOf(t, l, "node0/pod0"), placeOf(t, l, "node1/pod0")
				fragmented(t, l, from, to, version)
				in(t, l, from.Name, func() error {
					d := net.Dialer{Timeout: 20 * time.Second}
					nobody := netip.AddrPortFrom(network.Plus(to.IP(version), 100), 1)
					if _, err := d.Dial("tcp", nobody.String()); !errors.Is(err, unix.EHOSTUNREACH) {
						t.Errorf("to %s: %v, want %v", nobody, err, unix.EHOSTUNREACH)
					}
					return nil
				})
				echo(t, connect(t, l, from.Name, to.Name, version, 1)[0])
			})
		}
	}
}

// fragmented sends a datagram in several fragments, and checks what arrives.
func fragmented(t *testing.T, l *Lab, from, to place.Place, version int) {
	t.Helper()
	var server, client net.Conn
	in(t, l, to.Name, func() error {
		s, err := net.ListenUDP("udp", &net.UDPAddr{IP: to.IP(version).AsSlice()})
		server = s
		return err
	})
	defer server.Close()
	in(t, l, from.Name, func() (err error) {
		client, err = net.Dial("udp", server.LocalAddr().String())
		return err
	})
	defer client.Close()
	message := make([]byte, 5000)
	for i := range message {
		message[i] = byte(i * 7)
	}
	if _, err := client.Write(message); err != nil {
		t.Fatal(err)
	}
	if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1<<16)
	if n, err := server.Read(got); err != nil || !bytes.Equal(got[:n], message) {
		t.Errorf("%d bytes arrive, %v, want %d", n, err, len(message))
	}
}
