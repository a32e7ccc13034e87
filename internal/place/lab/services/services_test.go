//go:build linux

package services_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// TestServices checks that in each mode, connections are spread evenly over all backends, and that every backend answers as the
// service.
func TestServices(t *testing.T) {
	const servers, backends, n = 2, 10, 500
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			l := up(t, config(t, mode, servers, backends, transports...))
			for i, s := range l.Services.All(servers) {
				of, server := transports[i/servers], i%servers
				pod := fmt.Sprintf("node1/pod%d", server)
				at := answer(t, l, pod, of)
				if got := l.place(t, pod).Service.AddrPort(of.IP); got != s.Address() {
					t.Errorf("the service of %s is said to be at %s, and is at %s", pod, got, s.Address())
				}
				ask(t, l, fmt.Sprintf("node0/pod%d", server), of, s.Address(), n)
				count := make(map[netip.Addr]int)
				for range n {
					a := <-at
					count[a.Addr()]++
				}
				for j, b := range s.Backends() {
					// If 500 connections choose one of ten backends at random, one backend gets fewer than 20 or more than 90
					// of them in one of a million runs.
					if got := count[b.Addr()]; got < 20 || got > 90 {
						t.Errorf("%v, %s: %d of %d connections came to backend %d, want about %d", of, pod, got, n, j, n/backends)
					}
					delete(count, b.Addr())
				}
				if len(count) > 0 {
					t.Errorf("%v, %s: connections came to %v", of, pod, count)
				}
			}
		})
	}
}

// TestManyBackends checks that in each mode, 16,000 backends all have an address that answers, and that connections are spread
// over all of them. With iptables it uses 4,000, because loading more takes a minute of CPU time; BenchmarkServiceChange and
// the preset service-routing use all.
func TestManyBackends(t *testing.T) {
	const n = 1000
	for _, tt := range []struct {
		mode            string
		backends, least int // least of 1,000 that are chosen with equal chance: 970 and 885 are usual
	}{{spec.ServiceIPTables, 4000, 845}, {spec.ServiceNFTables, 16000, 930}, {spec.ServiceEBPF, 16000, 930}} {
		t.Run(tt.mode, func(t *testing.T) {
			mode, backends := tt.mode, tt.backends
			l := up(t, config(t, mode, 1, backends, tcp4))
			at := answer(t, l, "node1/pod0", tcp4)
			s := l.Services.All(1)[0]
			ask(t, l, "node0/pod0", tcp4, s.Address(), n)
			first := s.Backends()[0].Addr()
			distinct, quarters := make(map[netip.Addr]bool), make([]int, 4)
			for range n {
				a := (<-at).Addr()
				nth := int(binary.BigEndian.Uint32(a.AsSlice())) - int(binary.BigEndian.Uint32(first.AsSlice()))
				if nth < 0 || nth >= backends {
					t.Fatalf("a connection came to %s, backend %d", a, nth)
				}
				distinct[a] = true
				quarters[nth*4/backends]++
			}
			if len(distinct) < tt.least {
				t.Errorf("%d connections came to %d backends only", n, len(distinct))
			}
			for i, got := range quarters {
				if got < 180 || got > 320 { // 250, with a deviation of 14
					t.Errorf("%d of %d connections came to quarter %d of the backends", got, n, i)
				}
			}
			if mode != spec.ServiceEBPF {
				return // the addresses are the same in every mode
			}
			l.in(t, "node0/pod0", func() error {
				for i := range backends {
					want := netip.AddrPortFrom(network.Plus(first, i), services.Port)
					c, err := net.DialTimeout("tcp4", want.String(), 5*time.Second)
					if err != nil {
						return fmt.Errorf("backend %d: %w", i, err)
					}
					c.Close()
					if got := <-at; got != want {
						return fmt.Errorf("a connection to %s came to %s", want, got)
					}
				}
				return nil
			})
		})
	}
}

// TestBackendChanges checks that after a backend of a service is replaced, new connections reach the new one and the remaining
// ones.
func TestBackendChanges(t *testing.T) {
	for _, mode := range modes {
		for _, of := range []place.Transport{tcp4, udp6} {
			t.Run(mode+" "+transportName(of), func(t *testing.T) {
				l := up(t, config(t, mode, 1, 3, of))
				at := answer(t, l, "node1/pod0", of)
				all := l.Services.All(1)
				first := all[0].Backends()[0].Addr()
				came := func() map[netip.Addr]bool {
					const n = 200
					came := make(map[netip.Addr]bool)
					ask(t, l, "node0/pod0", of, all[0].Address(), n)
					for range n {
						came[(<-at).Addr()] = true
					}
					return came
				}
				want := map[netip.Addr]bool{first: true, network.Plus(first, 1): true, network.Plus(first, 2): true}
				if diff := cmp.Diff(want, came(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("before (-want +got):\n%s", diff)
				}
				l.Services.Change(t, l.Name, l.nodes(), all, 1, netip.AddrPortFrom(network.Plus(first, 100), services.Port))
				delete(want, network.Plus(first, 1))
				want[network.Plus(first, 100)] = true
				if diff := cmp.Diff(want, came(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("after (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestEndpointChanges checks that while endpoints of all services change in turn, connections reach current ones.
func TestEndpointChanges(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			c := config(t, mode, 1, 3, tcp4)
			c.Services.Total, c.Services.OtherBackends = 2, 2
			l := up(t, c)
			at := answer(t, l, "node1/pod0", tcp4)
			s := l.Services.All(1)[0]
			spare := network.Plus(s.Backends()[0].Addr(), 3)
			stop, err := l.ChangeEndpoints(t.Context(), 20)
			if err != nil {
				t.Fatal(err)
			}
			testenv.Await(t, 20*time.Second, "connections come to an endpoint that was not there", func() bool {
				const n = 20
				ask(t, l, "node0/pod0", tcp4, s.Address(), n)
				came := false
				for range n {
					came = (<-at).Addr() == spare || came
				}
				return came
			})
			if made, err := stop(); err != nil || made == 0 {
				t.Errorf("%d changes: %v", made, err)
			}
		})
	}
}

// TestServicesGo checks that rules are in the lab's namespaces only, and are removed with the lab, as is the cgroup.
func TestServicesGo(t *testing.T) {
	testenv.NeedRoot(t)
	ours := func() (text string) {
		for _, argv := range [][]string{{"nft", "list", "ruleset"}, {"iptables-legacy-save"}, {"ip6tables-legacy-save"}} {
			out, _ := exec.Command(argv[0], argv[1:]...).CombinedOutput()
			for line := range strings.Lines(string(out)) {
				// iptables-save prints counters after a chain, and comments with the time.
				if line, _, _ = strings.Cut(line, " ["); !strings.HasPrefix(line, "#") {
					text += line
				}
			}
		}
		return text
	}
	rules := ours()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			testenv.NeedRoot(t)
			c := config(t, mode, 2, 10, transports...)
			c.Services.Total = 5
			// Another process takes the lab down, as on the command line.
			l := served{Config: c, dir: t.TempDir()}
			var err error
			if l.Lab, err = lab.Up(t.Context(), c, lab.Options{Dir: l.dir, Keep: true}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := l.Down(context.Background()); err != nil && !errors.Is(err, lab.ErrNotFound) {
					t.Error(err)
				}
			})
			if got := ours(); got != rules {
				t.Errorf("the machine has other rules than before:\n%s", got)
			}
			for i, of := range transports {
				at := answer(t, l, "node1/pod0", of)
				if l.Lab, err = lab.Open(l.dir, c.Name); err != nil {
					t.Fatal(err)
				}
				ask(t, l, "node0/pod0", of, c.Services.All(c.Pods)[i*c.Services.Total].Address(), 1)
				<-at
			}
			cmd := exec.Command("sleep", "1h")
			if err := l.In(l.place(t, "node0/pod1"))(cmd); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() { _ = cmd.Wait(); close(ended) }() // it is killed
			if left := l.left(t); len(left) < 7 {
				t.Fatalf("a lab that is up is only %v", left)
			}
			if err := l.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-ended
			if left := l.left(t); left != nil {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// left returns what is left of a lab: network namespaces, its cgroup and files.
func (l served) left(t *testing.T) (all []string) {
	t.Helper()
	cgroup, err := services.CgroupPath(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{network.Path("slip-" + l.Name + "*"), cgroup, filepath.Join(l.dir, "*")} {
		some, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, some...)
	}
	return all
}
