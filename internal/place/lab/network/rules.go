//go:build linux

package network

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// Rules are netfilter rules of a node: the commands that load them, in order.
type Rules []Command

// Command is a command that loads rules, and its input.
type Command struct {
	Argv []string
	Text []byte
}

// NFT returns the command that loads a text with nft -f.
func NFT(text []byte) Command { return Command{[]string{"nft", "-f", "-"}, text} }

// Restore returns the command that loads a text with iptables-restore or ip6tables-restore. It waits for the lock of legacy
// iptables, which the whole machine shares before version 1.8.6 (see Run).
func Restore(program string, text []byte) Command {
	return Command{[]string{program, "-w", "5", "--noflush"}, text}
}

// Version returns the version of the program that loads the rules, such as "1.8.9 (nf_tables)" for iptables on top of nftables.
func (r Rules) Version(ctx context.Context) (string, error) {
	said, err := exec.CommandContext(ctx, r[0].Argv[0], "--version").Output()
	if err != nil {
		return "", fmt.Errorf("get the version of %s: %w", r[0].Argv[0], err)
	}
	_, version, _ := strings.Cut(strings.TrimSpace(string(said)), " v")
	return version, nil
}

// Load loads the rules in the namespace of a node, and returns how long that took.
func (r Rules) Load(ctx context.Context, ns *Namespace) (took time.Duration, err error) {
	begin := time.Now()
	for _, c := range r {
		if err := c.Run(ctx, ns); err != nil {
			return 0, err
		}
	}
	return time.Since(begin), nil
}

// Probe tries to load rules in a temporary namespace. what says what they are for. The error says what is missing and what to
// do. packages maps programs to their packages.
func (r Rules) Probe(ns *Namespace, what string, packages map[string]string) error {
	for _, c := range r {
		name := c.Argv[0]
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%s need %s, which is not installed: install it (apt install %s), or use another mode", what, name, packages[name])
		}
		if err := c.Run(context.Background(), ns); err != nil {
			return fmt.Errorf("%s: this kernel or %s does not accept their rules: %w", what, name, err)
		}
	}
	return nil
}

// Run runs the command in the namespace of a node.
func (c Command) Run(ctx context.Context, ns *Namespace) error {
	cmd := exec.CommandContext(ctx, c.Argv[0], c.Argv[1:]...)
	cmd.Stdin = bytes.NewReader(c.Text)
	// Legacy iptables locks a file for as long as it loads rules. The nodes load theirs at the same time, and the rules of one
	// are no concern of another: so the file is the network namespace.
	cmd.Env = append(cmd.Environ(), "XTABLES_LOCKFILE=/proc/self/ns/net")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &said
	if err := ns.Do(cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", c.Argv[0], err)
	}
	if err := cmd.Wait(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return fmt.Errorf("%s: %w: %s", c.Argv[0], err, first)
	}
	return nil
}
