//go:build linux

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/place/lab/network"
)

// TestChooseProxy checks that the built-in proxy is chosen if HAProxy is not installed, unless the configuration requires
// HAProxy.
func TestChooseProxy(t *testing.T) {
	with := t.TempDir()
	if err := os.WriteFile(filepath.Join(with, "haproxy"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		proxy, path string
		builtin     []string
		want, err   string
	}{
		{"", with, nil, "haproxy", ""},
		{"haproxy", with, nil, "haproxy", ""},
		{"builtin", with, []string{"proxy"}, "builtin", ""},
		{"", "", []string{"proxy"}, "builtin", ""},
		{"haproxy", "", []string{"proxy"}, "", "HAProxy is not installed: install it (apt install haproxy), or use the built-in proxy (proxy: builtin)"},
		{"builtin", with, nil, "", "needs Options.Balancer"},
	} {
		t.Setenv("PATH", c.path)
		b := Config{Proxy: c.proxy}
		err := b.Choose(c.builtin)
		switch {
		case c.err == "" && (err != nil || b.Proxy != c.want):
			t.Errorf("%q of %q: %q, %v, want %q", c.proxy, c.path, b.Proxy, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%q of %q: %v, want it to say %q", c.proxy, c.path, err, c.err)
		}
	}
}

// TestHAProxyConfig checks the configuration of HAProxy for the first of two pairs with two backends.
func TestHAProxyConfig(t *testing.T) {
	b := Config{Backends: 2, Pairs: 2}
	nodes := make([]network.Node, 4)
	for i := range nodes {
		nodes[i].Place.IPv4 = netip.AddrFrom4([4]byte{198, 18, 0, byte(i + 1)})
		nodes[i].Place.IPv6 = netip.MustParseAddr(fmt.Sprintf("fd73:6c69:7000::%d", i+1))
	}
	got := string(haproxy(b.fronts(nodes), 20_000))
	want := `global
    maxconn 9488
defaults
    mode tcp
    balance roundrobin
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen pair0-ipv4
    bind 198.18.0.2:7465
    server backend0 198.18.0.3:7465
    server backend1 198.18.0.4:7465
listen pair0-ipv6
    bind [fd73:6c69:7000::2]:7465
    server backend0 [fd73:6c69:7000::3]:7465
    server backend1 [fd73:6c69:7000::4]:7465
`
	if first, _, _ := strings.Cut(got, "listen pair1-ipv4"); first != want {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, first))
	}
}

// TestBalancerCores checks that the proxy has a CPU of its own if nodes share two or more.
func TestBalancerCores(t *testing.T) {
	b := &Config{Backends: 4}
	for cpus, want := range map[string][]int{"3": {3, 3, 3, 3, 3, 3}, "0-1": {0, 1, 0, 0, 0, 0}, "0,2,5,7": {0, 2, 5, 7, 0, 5}} {
		list, err := cpuset.ParseList(cpus)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for i := range 6 {
			got = append(got, b.Core(list.CPUs(), i))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("CPUs %s (-want +got):\n%s", cpus, diff)
		}
	}
}

func TestHAProxyVersion(t *testing.T) {
	for said, want := range map[string]string{
		"HAProxy version 2.6.12-1+deb12u4 2026/10/17 - https://haproxy.org/\nStatus: long-term\n": "haproxy 2.6.12-1+deb12u4",
		"HA-Proxy version 1.8.30 2021/04/12\n":                                                    "haproxy 1.8.30",
		"":                                                                                        "haproxy",
		"usage: haproxy [-f <file>]":                                                              "haproxy",
	} {
		if got := haproxyVersion([]byte(said)); got != want {
			t.Errorf("%q: %q, want %q", said, got, want)
		}
	}
}

const procNetTCP = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 020012C6:1D29 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9103681 1 0000000000000000 100 0 0 10 0
   1: 020012C6:1D2A 010012C6:D2F0 01 00000000:00000000 02:000004A1 00000000     0        0 9103682 2 0000000000000000 20 4 30 10 -1
`

// FuzzListeningPorts checks that only listening sockets count, of both IP versions.
func FuzzListeningPorts(f *testing.F) {
	f.Add([]byte(procNetTCP))
	f.Add([]byte("1: 00000000000000000000000000000000:1D2B 0:0 0A"))
	f.Add([]byte("1: :FFFFF 0:0 0A\n2: 1 0 0A\n3: 1:zz 0 0A"))
	f.Fuzz(func(t *testing.T, text []byte) {
		ports := listeningPorts(text)
		if n := bytes.Count(text, []byte("0A")); len(ports) > n {
			t.Errorf("%d ports listen in %q", len(ports), text)
		}
	})
}

func TestListeningPorts(t *testing.T) {
	got := listeningPorts([]byte(procNetTCP + "   2: 00000000000000000000000001000000:1D2B 00000000000000000000000000000000:0000 0A\nnonsense\n"))
	if diff := cmp.Diff([]uint16{7465, 7467}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
