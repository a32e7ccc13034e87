//go:build linux

package services

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/lab/network"
)

// Rules make the services of a lab work on a node, as kube-proxy's do: commands to run one after the other.
type Rules []command

// command is a command that loads rules, and its input.
type command struct {
	argv []string
	text []byte
}

// nft and iptables load rules as kube-proxy does. Legacy iptables has one lock for the whole machine, and
// waits for it.
func nft(text []byte) command { return command{[]string{"nft", "-f", "-"}, text} }

func iptables(v version, text []byte) command {
	return command{[]string{v.restore, "-w", "5", "--noflush"}, text}
}

// kubeProxy returns what kube-proxy loads for services in a mode, one IP version after the other.
func kubeProxy(mode string, services []service) (all Rules) {
	for _, ip := range []int{4, 6} {
		v, mine := versions[ip], slices.DeleteFunc(slices.Clone(services), func(s service) bool { return s.transport.IP != ip })
		switch {
		case len(mine) == 0:
		case mode == v1alpha1.ServiceIPTables:
			all = append(all, iptables(v, append(iptablesRules(mine, mine), iptablesJumps()...)))
		default:
			text := nftablesTable(v)
			for _, s := range mine {
				text = append(text, nftablesRules(s)...)
			}
			all = append(all, nft(text))
		}
	}
	return all
}

// Rules returns the rules of the services of a lab, for a mode of kube-proxy.
func (s *Config) Rules(nodes []network.Node) Rules { return kubeProxy(s.Mode, s.services(nodes)) }

// Version returns the version of the program that loads the rules: "1.8.9 (nf_tables)" is an iptables on top of
// nftables.
func (r Rules) Version(ctx context.Context) (string, error) {
	said, err := exec.CommandContext(ctx, r[0].argv[0], "--version").Output()
	if err != nil {
		return "", fmt.Errorf("get the version of %s: %w", r[0].argv[0], err)
	}
	_, version, _ := strings.Cut(strings.TrimSpace(string(said)), " v")
	return version, nil
}

// Load loads the rules in the namespace of a node, and returns how long it took.
func (r Rules) Load(ctx context.Context, ns *network.Namespace) (took time.Duration, err error) {
	begin := time.Now()
	for _, c := range r {
		if err := c.run(ctx, ns); err != nil {
			return 0, err
		}
	}
	return time.Since(begin), nil
}

func (c command) run(ctx context.Context, ns *network.Namespace) error {
	cmd := exec.CommandContext(ctx, c.argv[0], c.argv[1:]...)
	cmd.Stdin = bytes.NewReader(c.text)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &said
	if err := ns.Do(cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", c.argv[0], err)
	}
	if err := cmd.Wait(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return fmt.Errorf("%s: %w: %s", c.argv[0], err, first)
	}
	return nil
}
