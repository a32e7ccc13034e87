//go:build linux

package lab

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/place/lab/services"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

var tcp4 = place.Transport{IP: 4, Protocol: "tcp"}

// TestServicesRefused checks that impossible services are refused before anything is touched.
func TestServicesRefused(t *testing.T) {
	testenv.NeedRoot(t)
	positions := func(n int) (all []place.Position) {
		for i := range n {
			all = append(all, place.Position{Node: 1, Pod: i})
		}
		return all
	}
	for what, tt := range map[string]struct {
		change func(*testing.T, *Config)
		want   string
	}{
		"too many backends": {
			func(_ *testing.T, c *Config) {
				c.Pods = 64
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 16000, Total: 31, Servers: positions(31), Transports: []place.Transport{tcp4}}
			},
			"31 servers of node1 with 16000 backends each need more addresses than 10.136.0.0/13 holds, which is enough for 30: choose fewer backends",
		},
		"more than there is": {
			func(_ *testing.T, c *Config) {
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1 << 20, Total: 1, Servers: positions(1), Transports: []place.Transport{tcp4}}
			},
			"which is enough for 0",
		},
		"no such pod": {
			func(_ *testing.T, c *Config) {
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1, Total: 3, Servers: positions(3), Transports: []place.Transport{tcp4}}
			},
			"there is no node1/pod2 to be a server",
		},
		"no transport": {
			func(_ *testing.T, c *Config) {
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1, Total: 1, Servers: positions(1)}
			},
			"services: at least one transport is needed",
		},
		"no such transport": {
			func(_ *testing.T, c *Config) {
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{{IP: 4, Protocol: "sctp"}}}
			},
			"services: transports must be tcp or udp over IP version 4 or 6, each once, are [{4 sctp}]",
		},
		"another shape": {
			func(_ *testing.T, c *Config) {
				c.Shape = overlay.ShapeRouted
				c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{tcp4}}
			},
			"must be of shape flannel, is routed",
		},
		"no iptables": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &services.Config{Mode: spec.ServiceIPTables, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{tcp4}}
			},
			"need iptables-restore, which is not installed: install it (apt install iptables), or use another mode",
		},
		"no ip6tables": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &services.Config{Mode: spec.ServiceIPTables, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{{IP: 6, Protocol: "udp"}}}
			},
			"need ip6tables-restore, which is not installed: install it (apt install iptables), or use another mode",
		},
		"no nft": {
			func(t *testing.T, c *Config) {
				t.Setenv("PATH", t.TempDir())
				c.Services = &services.Config{Mode: spec.ServiceNFTables, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{tcp4}}
			},
			"need nft, which is not installed: install it (apt install nftables)",
		},
		"a tool that fails": {
			func(t *testing.T, c *Config) {
				dir := t.TempDir()
				if err := os.WriteFile(dir+"/nft", []byte("#!/bin/sh\necho no such thing >&2; echo more >&2; exit 3\n"), 0o755); err != nil {
					t.Fatal(err)
				}
				t.Setenv("PATH", dir)
				c.Services = &services.Config{Mode: spec.ServiceNFTables, Backends: 1, Total: 1, Servers: positions(1), Transports: []place.Transport{tcp4}}
			},
			"does not accept their rules: nft: exit status 3: no such thing",
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir, c := t.TempDir(), config(labName(t))
			before := machine(t, "slip-"+c.Name)
			tt.change(t, &c)
			l, err := Up(t.Context(), c, Options{Dir: dir})
			if err == nil {
				err = l.Down(t.Context())
				t.Fatalf("came up; %v", err)
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("says %q, want %q in it", err, tt.want)
			}
			if diff := cmp.Diff(before, machine(t, "slip-"+c.Name)); diff != "" {
				t.Errorf("changed (-before +after):\n%s", diff)
			}
			if left := files(t, dir); left != nil {
				t.Errorf("files left: %v", left)
			}
		})
	}
}

// TestForeignCgroup checks that a cgroup with a name like a lab's that belongs to no lab is left alone.
func TestForeignCgroup(t *testing.T) {
	testenv.NeedRoot(t)
	c := config(labName(t))
	c.Services = &services.Config{Mode: spec.ServiceEBPF, Backends: 1, Total: 1, Servers: []place.Position{{Node: 1}}, Transports: []place.Transport{tcp4}}
	path, err := services.CgroupPath(c.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	if _, err := Up(t.Context(), c, Options{Dir: t.TempDir()}); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), path) {
		t.Errorf("a lab over a foreign cgroup: %v, want %v", err, ErrExists)
	}
}
