//go:build linux

package hosts_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

var tcp4 = place.Transport{IP: 4, Protocol: "tcp"}

// specs returns nodes as the hosts of an experiment.
func specs(user string, nodes []*node) (all []spec.Host) {
	for _, n := range nodes {
		all = append(all, spec.Host{Name: n.name, Address: n.address, User: user})
	}
	return all
}

func fromAToB(address string, t place.Transport) []hosts.Path {
	return []hosts.Path{{Client: "a", Server: "b", Address: address, Transport: t}}
}

// TestUp checks runs on hosts that lack something. A run does without it or says what to do, as does a dry run where it can
// know. Both leave nothing behind.
func TestUp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		node  nodeOptions
		user  string
		spoil func(t *testing.T, w *world, nodes []*node, c *hosts.Config)
		want  string // of the error; "" if there is to be none
		// late means that a dry run cannot know.
		late bool
	}{
		{name: "MaxSessions 1", node: nodeOptions{config: "MaxSessions 1\n"}, user: "root"},
		{
			name: "each command with a connection of its own", user: "root",
			spoil: func(_ *testing.T, _ *world, _ []*node, c *hosts.Config) { *c = c.Alone() },
		},
		{name: "no root", user: "user"},
		{
			name: "a folder behind a link", user: "user",
			node: nodeOptions{startup: "XDG_RUNTIME_DIR=/mnt/run; export XDG_RUNTIME_DIR", before: "ln -s /home/user /mnt/run"},
		},
		{name: "noexec home", node: nodeOptions{noexec: []string{"/home"}}, user: "user"},
		{name: "only one folder", node: nodeOptions{noexec: []string{"/run", "/tmp", "/var/tmp", "/home"}}, user: "user"},
		{name: "only one folder with room", node: nodeOptions{full: []string{"/run", "/tmp", "/var/tmp", "/home"}}, user: "user"},
		{
			name: "no room", node: nodeOptions{full: folders}, user: "user",
			want: " has no folder in which the program can run: /run/user/12345 does not exist, /tmp has 0 MiB free, and the program needs ",
		},
		{name: "talkative shell", node: nodeOptions{startup: "echo good morning; echo slipstream-is here"}, user: "root"},
		{name: "a banner without a newline", node: nodeOptions{startup: `printf "welcome: "`}, user: "root"},
		{name: "a banner of 3000 lines", node: nodeOptions{startup: "seq 3000"}, user: "user"},
		{name: "no home", node: nodeOptions{home: "/nowhere"}, user: "user"},
		{name: "PATH without the usual folders", node: nodeOptions{config: "SetEnv PATH=/opt/bin\n"}, user: "user"},
		{name: "low soft limits", node: nodeOptions{startup: "ulimit -S -f 2000; ulimit -S -v 200000; ulimit -S -n 64"}, user: "user"},
		{
			name: "a low limit of files' sizes", node: nodeOptions{startup: "ulimit -f 2000"}, user: "user",
			want: " limits the size of files to 2000 blocks of 512 bytes (ulimit -f), and a worker needs ",
		},
		{
			name: "a low limit of addresses", node: nodeOptions{startup: "ulimit -v 200000"}, user: "user",
			want: " limits the addresses of a process to 200000 KiB (ulimit -v), and a worker needs 4194304: raise as in /etc/security/limits.conf there",
		},
		{
			name: "a low limit of open files", node: nodeOptions{startup: "ulimit -n 64"}, user: "user",
			want: " limits open files to 64 (ulimit -n), and a worker needs 256: raise nofile",
		},
		{
			name: "no sessions", node: nodeOptions{config: "MaxSessions 0\n"}, user: "root",
			want: "Its server lets the user log in and run nothing (MaxSessions 0 of sshd_config)",
		},
		{
			name: "a login that takes too long", node: nodeOptions{config: "LoginGraceTime 1\nAuthorizedKeysCommand /usr/bin/sleep 5\nAuthorizedKeysCommandUser nobody\n", key: "# "}, user: "root",
			want: "Its server's log says why (journalctl -u ssh there): for example LoginGraceTime",
		},
		{
			name: "a folder to be confined to that is not there", node: nodeOptions{config: "ChrootDirectory /nowhere\n"}, user: "user",
			want: "Its server's log says why (journalctl -u ssh there): for example LoginGraceTime, MaxStartups, ChrootDirectory",
		},
		{
			name: "a restricted shell", node: nodeOptions{shell: "/bin/rbash"}, user: "user",
			want: " does not run the command that it is sent (exit code 1): rbash: line 1: exec: restricted. A worker needs a login that runs commands",
		},
		{
			name: "no address of the connection", node: nodeOptions{startup: "unset SSH_CONNECTION"}, user: "user",
			want: ": its SSH server, or a start-up file of the user's shell, hides the address of the connection: SSH_CONNECTION",
		},
		{
			name: "a clock that is behind by a day", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				certify(t, w, nodes, "10.9.0.*", time.Now().Add(24*time.Hour))
			},
			want: ": the certificate of its key is not valid (not yet valid): renew it, or correct the clock of this machine, where it is 20",
		},
		{
			name: "a key that others can read", user: "root",
			spoil: func(t *testing.T, w *world, _ []*node, _ *hosts.Config) {
				must(t, os.Chmod(filepath.Join(w.home, ".ssh", "id_ed25519"), 0o644))
			},
			want: ".ssh/id_ed25519, which others can read: chmod 600 /",
		},
		{
			name: "a jump host whose key is unknown", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, c *hosts.Config) {
				w.know(t, nodes[1])
				w.configure(t, "Host b\n  ProxyJump root@"+nodes[0].address+"\n")
				c.Hosts, c.Paths = c.Hosts[1:], nil
			},
			want: "host b: ssh does not accept its key, or that of a machine on the way (root@[10.9.0.1]): Host key verification failed.; ",
		},
		{
			name: "IPv6 alone", user: "root", node: nodeOptions{config: "ListenAddress ::\n"},
			spoil: func(t *testing.T, w *world, nodes []*node, c *hosts.Config) {
				must(t, netns.Do(w.ns, exec.Command("ip", "address", "add", "fd77::fe/64", "dev", "br0", "nodad").Run))
				for i, n := range nodes {
					n.address = fmt.Sprintf("fd77::%d", i+1)
					n.in("ip", "address", "add", n.address+"/64", "dev", "eth0", "nodad")
					c.Hosts[i].Address = n.address
				}
				w.know(t, nodes...)
				c.Paths = fromAToB("native", place.Transport{IP: 6, Protocol: "tcp"})
			},
		},
		{name: "busybox as sh", node: nodeOptions{sh: "/bin/busybox"}, user: "user"},
		{name: "another shell", node: nodeOptions{shell: "/bin/bash"}, user: "user"},
		{
			name: "no shell", node: nodeOptions{shell: "/usr/sbin/nologin"}, user: "user",
			want: " does not run the command that it is sent; it printed \"This account is currently not available.\" (exit code 1). Does",
		},
		{
			name: "noexec everywhere", node: nodeOptions{noexec: folders}, user: "user",
			want: " has no folder in which the program can run: /run/user/12345 does not exist, /tmp runs no programs (it is mounted noexec, or a security policy forbids it), ",
		},
		{
			name: "forced command", node: nodeOptions{key: `command="echo this account is for git" `}, user: "root",
			want: ` does not run the command that it is sent; it printed "this account is for git". Does the key have a forced command`,
		},
		{
			name: "unknown host key", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) { w.know(t, nodes[1]) },
			want:  "host a: the key of 10.9.0.1 is not known, so it may be another machine: connect once with ssh -o HostName=10.9.0.1 root@a and compare its fingerprint",
		},
		{
			name: "changed host key", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				nodes[0].hostKey = nodes[1].hostKey
				w.know(t, nodes...)
			},
			want: "its key has changed, so it may be another machine: it is SHA256:",
		},
		{
			name: "changed host key of another type", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				key, err := rsa.GenerateKey(rand.Reader, 2048)
				must(t, err)
				signer, err := ssh.NewSignerFromKey(key)
				must(t, err)
				nodes[0].hostKey = signer
				w.know(t, nodes...)
			},
			want: "host a: its key has changed, so it may be another machine: it is SHA256:",
		},
		{
			name: "host certificate", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				certify(t, w, nodes, "10.9.0.*", time.Time{})
			},
		},
		{
			name: "host certificate of another authority", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				certify(t, w, nodes, "10.9.0.*", time.Time{})
				certify(t, w, nodes[1:], "10.9.0.*", time.Time{})
			},
			want: "host a: the key of 10.9.0.1 is not known",
		},
		{
			name: "another key", user: "root",
			spoil: func(t *testing.T, w *world, _ []*node, _ *hosts.Config) {
				newKey(t, filepath.Join(w.home, ".ssh", "id_ed25519"))
			},
			want: "does not let root in: add a public key of yours to ~/.ssh/authorized_keys there, or name another key with identityFile or ssh-add: ",
		},
		{
			name: "no key", user: "root",
			spoil: func(t *testing.T, w *world, _ []*node, _ *hosts.Config) {
				must(t, os.Remove(filepath.Join(w.home, ".ssh", "id_ed25519")))
			},
			want: "Permission denied (publickey,keyboard-interactive). Nobody can be asked for a password or passphrase here: a key that has one must be in the SSH agent",
		},
		{
			name: "named key that is not there", user: "root",
			spoil: func(t *testing.T, w *world, _ []*node, c *hosts.Config) {
				must(t, os.Remove(filepath.Join(w.home, ".ssh", "id_ed25519")))
				c.Hosts[0].IdentityFile, c.Hosts[1].IdentityFile = "/nowhere/lab", "/nowhere/lab"
			},
			want: " does not let root in, and the key /nowhere/lab cannot be read (No such file or directory): correct identityFile",
		},
		{
			name: "sudo that does not know the user", user: "user", spoil: needsRoot,
			want: ": rps{nic, all} of variant rps needs root, and sudo there wants a password from the user, or lets the user do nothing: allow it without one (USER ALL=(ALL) NOPASSWD: ALL in sudoers), log in as root",
		},
		{
			name: "sudo with a password", user: "user", node: nodeOptions{sudoers: "user ALL=(ALL) ALL\n"}, spoil: needsRoot,
			want: "sudo there wants a password from the user",
		},
		{
			name: "sudo with a terminal", user: "user", node: nodeOptions{sudoers: "Defaults requiretty\nuser ALL=(ALL) NOPASSWD: ALL\n"}, spoil: needsRoot,
			want: "sudo there refuses commands without a terminal: exempt the user (Defaults:USER !requiretty in sudoers)",
		},
		{
			name: "sudo for one command", user: "user", node: nodeOptions{sudoers: "user ALL=(ALL) NOPASSWD: /usr/bin/true\n"}, spoil: needsRoot,
			want: "sudo there wants a password from the user, or lets the user do nothing",
		},
		{
			name: "sudo whose commands start no others", user: "user", node: nodeOptions{sudoers: "user ALL=(ALL) NOPASSWD: NOEXEC: ALL\n"}, spoil: needsRoot,
			want: "sudo there lets no command start another (NOEXEC): allow it (USER ALL=(ALL) NOPASSWD: EXEC: ALL in sudoers)",
		},
		{
			name: "sudo with a terminal of its own and without PATH", user: "user", spoil: needsRoot,
			node: nodeOptions{sudoers: "Defaults use_pty,secure_path=/nowhere,umask=0777,umask_override,lecture=always\nuser ALL=(ALL) NOPASSWD: ALL\n"},
		},
		{
			name: "no sudo", user: "user", node: nodeOptions{without: []string{"sudo"}}, spoil: needsRoot,
			want: "the user there is not root, and there is no sudo: install it",
		},
		{name: "another program for SHA-256", user: "user", node: nodeOptions{without: []string{"sha256sum"}}},
		{
			name: "no program for SHA-256", user: "user", node: nodeOptions{without: []string{"sha256sum", "shasum", "openssl"}},
			want: " lacks sha256sum, which the copy of the program needs: install it (package coreutils)",
		},
		{
			name: "no mktemp and no readlink", user: "user", node: nodeOptions{without: []string{"mktemp", "readlink"}},
			want: " lacks mktemp and readlink, which the copy",
		},
		{name: "no timeout and no tr", user: "user", node: nodeOptions{without: []string{"timeout", "tr", "tail"}}},
		{name: "no df", user: "user", node: nodeOptions{without: []string{"df"}}},
		{
			name: "read-only folders", user: "user", node: nodeOptions{readonly: []string{"/run", "/tmp", "/var/tmp", "/dev/shm"}, noexec: []string{"/home"}},
			want: "/tmp cannot be written to, /var/tmp cannot be written to, /home/user runs no programs (it is mounted noexec, or a security policy forbids it), /dev/shm cannot be written to. Free",
		},
		{
			name: "a second factor", user: "root", node: nodeOptions{config: "AuthenticationMethods publickey,keyboard-interactive\nKbdInteractiveAuthentication yes\n"},
			want: " wants more than a key from root (keyboard-interactive), such as a password or a second factor: start the run at a terminal, where ssh asks you once, or first open a connection that it can share (ControlPath in ~/.ssh/config, then ssh -MNf -o HostName=10.9.0.",
		},
		{
			name: "an authority for all names, and an unknown key", user: "root",
			spoil: func(t *testing.T, w *world, _ []*node, _ *hosts.Config) {
				authority := newKey(t, filepath.Join(w.home, "authority"))
				line := "@cert-authority * " + string(ssh.MarshalAuthorizedKey(authority.PublicKey()))
				must(t, os.WriteFile(filepath.Join(w.home, ".ssh", "known_hosts"), []byte(line), 0o600))
			},
			want: " is not known, so it may be another machine: connect once with ssh -o HostName=10.9.0.",
		},
		{
			name: "a changed key in a line for others too", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				line := "10.9.0.* " + string(ssh.MarshalAuthorizedKey(newKey(t, filepath.Join(w.home, "other")).PublicKey()))
				must(t, os.WriteFile(filepath.Join(w.home, ".ssh", "known_hosts"), []byte(line), 0o600))
			},
			want: "If it was reinstalled, correct that line by hand, as it is for 10.9.0.* and connect once with ssh -o HostName=10.9.0.",
		},
		{
			name: "two names for one host", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, c *hosts.Config) { c.Hosts[1].Address = nodes[0].address },
			want:  "hosts a and b are one machine by two names (10.9.0.1 and 10.9.0.1; boot ID ",
		},
		{
			name: "64 MiB of memory", user: "root", node: nodeOptions{limits: map[string]int{"memory": 64 << 20}},
			want: " limits memory to 64 MiB (memory.",
		},
		{name: "256 MiB of memory", user: "root", node: nodeOptions{limits: map[string]int{"memory": 256 << 20}}},
		{
			name: "20 processes", user: "root", node: nodeOptions{limits: map[string]int{"pids": 20}},
			want: " limits processes and threads to 20 (pids.max of a control group), and a run needs ",
		},
		{name: "200 processes", user: "root", node: nodeOptions{limits: map[string]int{"pids": 200}}},
		{name: "processes of others that nobody sees", user: "user", node: nodeOptions{before: "mount -o remount,hidepid=2 /proc"}},
		{name: "a notice before the login, and keys that change often", user: "user", node: nodeOptions{config: "Banner /mnt/passwd\nRekeyLimit 1M\n"}},
		{
			name: "a maintenance", user: "user", node: nodeOptions{pam: pam, before: "echo scheduled maintenance until noon >/mnt/nologin"},
			want: ": scheduled maintenance until noon; ",
		},
		{
			name: "an expired password", user: "user", node: nodeOptions{pam: pam, before: "printf 'root:*:19000::::::\\nuser:*:0:0:99999:7:::\\n' >/etc/shadow"},
			want: " runs nothing until the user's password there is changed: ",
		},
		{
			name: "a jump host that forwards nothing", user: "root", node: nodeOptions{config: "AllowTcpForwarding no\n"},
			spoil: func(t *testing.T, w *world, nodes []*node, c *hosts.Config) {
				w.configure(t, "Host b\n  ProxyJump root@"+nodes[0].address+"\n")
				c.Hosts, c.Paths = c.Hosts[1:], nil
			},
			want: ". The machine on the way (root@[10.9.0.1]) forwards no connections, or not this one: permit it there (AllowTcpForwarding and PermitOpen of sshd_config)",
		},
		{
			name: "a port that a jump host does not reach", user: "root",
			spoil: func(t *testing.T, w *world, nodes []*node, c *hosts.Config) {
				w.configure(t, "Host b\n  ProxyJump root@"+nodes[0].address+"\n")
				c.Hosts, c.Paths = c.Hosts[1:], nil
				c.Hosts[0].Port = 2222
			},
			want: "Connection refused; stdio forwarding failed; kex_exchange_identification: Connection closed by remote host; Connection closed by UNKNOWN port 65535. The machine on the way (root@[10.9.0.1]) does not reach it: correct its name or port",
		},
		{
			name: "a jump host that admits few logins at once", user: "root", node: nodeOptions{config: "MaxStartups 1\n"},
			spoil: func(t *testing.T, w *world, nodes []*node, _ *hosts.Config) {
				w.configure(t, "Host b\n  ProxyJump root@"+nodes[0].address+"\n")
			},
		},
		{
			name: "sudo", user: "user", node: nodeOptions{sudoers: "user ALL=(ALL) NOPASSWD: ALL\n"}, spoil: needsRoot,
		},
		{
			name: "firewall", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, _ *hosts.Config) {
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip saddr 10.9.0.1 tcp dport 1024-65535 reject with icmp admin-prohibited")
			},
			late: true, want: "host a cannot reach host b at 10.9.0.2, tcp port ",
		},
		{
			name: "firewall without a word", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, _ *hosts.Config) {
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip saddr 10.9.0.1 tcp dport 1024-65535 drop")
			},
			late: true, want: "host a cannot reach host b at 10.9.0.2, tcp port ",
		},
		{
			name: "firewall that lets a given port through", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, c *hosts.Config) {
				c.Paths[0].Port = 4000
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip saddr 10.9.0.1 tcp dport { 1024-3999, 4001-65535 } drop")
			},
		},
		{
			name: "firewall of a given port", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, c *hosts.Config) {
				c.Paths[0].Port = 4000
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip saddr 10.9.0.1 tcp dport 4000 reject with icmp admin-prohibited")
			},
			late: true, want: "host a cannot reach host b at 10.9.0.2, tcp port 4000 ",
		},
		{
			name: "firewall of datagrams without a word", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, c *hosts.Config) {
				c.Paths = fromAToB("native", place.Transport{IP: 4, Protocol: "udp"})
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip saddr 10.9.0.1 udp dport 1024-65535 drop")
			},
			late: true, want: "host a cannot reach host b at 10.9.0.2, udp port ",
		},
		{
			name: "firewall of datagrams on another path", user: "root",
			spoil: func(_ *testing.T, _ *world, nodes []*node, c *hosts.Config) {
				c.Hosts[1].Addresses = map[string]string{"weave": "10.32.0.2"}
				c.Paths = append(c.Paths, fromAToB("weave", place.Transport{IP: 4, Protocol: "udp"})...)
				nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in ip daddr 10.32.0.2 udp dport 1024-65535 reject")
			},
			late: true, want: "host a cannot reach host b at 10.32.0.2, udp port ",
		},
		{
			name: "a long way", user: "root",
			spoil: func(t *testing.T, _ *world, nodes []*node, c *hosts.Config) {
				slowly(t, nodes)
				c.Hosts[1].Addresses = map[string]string{"slow": "10.33.0.2"}
				c.Paths = append(c.Paths, fromAToB("slow", tcp4)...)
			},
		},
		{
			name: "an address that is another's", user: "root",
			spoil: func(_ *testing.T, _ *world, _ []*node, c *hosts.Config) {
				c.Hosts[1].Addresses = map[string]string{"native": "10.32.0.1"}
			},
			late: true, want: "host b cannot receive traffic at its address 10.32.0.1 (path native)",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.node.sh != "" {
				testenv.NeedProgram(t, c.node.sh, "apt-get install busybox")
			}
			w, nodes := newWorld(t, c.node, c.node)
			config := w.config(t, hosts.Config{Hosts: specs(c.user, nodes), Paths: fromAToB("native", tcp4)})
			if c.spoil != nil {
				c.spoil(t, w, nodes, &config)
			}
			found, err := hosts.Survey(t.Context(), config)
			must(t, err)
			missing := func(f hosts.Finding) bool { return f.Missing != nil && strings.Contains(f.Missing.Error(), c.want) }
			if sees := slices.ContainsFunc(found, missing); !c.late && sees != (c.want != "") {
				t.Errorf("a dry run finds %+v\nwant %s", found, c.want)
			}
			clean(t, nodes)
			up, err := hosts.Up(t.Context(), config)
			if err == nil {
				workersAnswer(t, up)
			}
			switch {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error %v\nwant  %s", err, c.want)
			}
			clean(t, nodes)
		})
	}
}

// pam is a configuration of PAM for an SSH server.
const pam = "auth required pam_permit.so\naccount required pam_nologin.so file=/mnt/nologin\naccount required pam_unix.so\npassword required pam_unix.so\nsession required pam_permit.so\n"

// workersAnswer checks that a worker answers at each place, and removes what Up has created.
func workersAnswer(t *testing.T, up *hosts.Hosts) {
	t.Helper()
	for _, p := range up.Places() {
		worker, err := up.Worker(t.Context(), p, place.ForControl)
		must(t, err)
		must(t, worker.Alive(t.Context()))
		must(t, worker.Close())
	}
	must(t, up.Close(context.Background()))
}

// TestUpByShells checks login shells other than sh, with start-up files that print something, fail and spoil PATH.
func TestUpByShells(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ shell, from, file, text string }{
		{"zsh", "zsh", ".zshenv", "echo good morning; PATH=/nowhere; setopt noclobber; setopt nonsense"},
		{"fish", "fish", ".config/fish/config.fish", "echo good morning; set -x PATH /nowhere; nonsense"},
		{"tcsh", "tcsh", ".cshrc", "echo good morning; stty erase ^H; setenv PATH /nowhere; set noclobber"},
		{"bsd-csh", "csh", ".cshrc", "echo good morning; stty erase ^H; setenv PATH /nowhere; set noclobber"},
	} {
		t.Run(c.shell, func(t *testing.T) {
			t.Parallel()
			o := nodeOptions{shell: testenv.NeedProgram(t, c.shell, c.from), files: map[string]string{c.file: c.text + "\n"}}
			w, nodes := newWorld(t, o, o)
			config := w.config(t, hosts.Config{Hosts: specs("user", nodes), Paths: fromAToB("native", tcp4)})
			found, err := hosts.Survey(t.Context(), config)
			must(t, err)
			for _, f := range found {
				must(t, f.Missing)
			}
			up, err := hosts.Up(t.Context(), config)
			must(t, err)
			workersAnswer(t, up)
			clean(t, nodes)
		})
	}
}

// needsRoot has a variant with accelerators on host b.
func needsRoot(_ *testing.T, _ *world, _ []*node, c *hosts.Config) {
	c.Root = map[string]string{"b": "rps{nic, all} of variant rps"}
}

// TestAdvice follows the advice for a changed key, and checks that it removes that key and no other.
func TestAdvice(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	known := filepath.Join(w.home, ".ssh", "known_hosts")
	other := knownhosts.Line([]string{nodes[1].address}, nodes[1].hostKey.PublicKey()) + "\n"
	wrong := knownhosts.Line([]string{nodes[0].address}, newKey(t, filepath.Join(w.home, "other")).PublicKey()) + "\n"
	must(t, os.WriteFile(known, []byte(other+wrong), 0o600))
	config := w.config(t, hosts.Config{Hosts: specs("root", nodes)})
	missing := func() string {
		t.Helper()
		found, err := hosts.Survey(t.Context(), config)
		must(t, err)
		if found[1].Missing != nil {
			t.Error(found[1].Missing)
		}
		return fmt.Sprint(found[0].Missing)
	}
	said := missing()
	_, advice, _ := strings.Cut(said, "remove the old key (")
	advice, _, ok := strings.Cut(advice, ")")
	if !ok || !strings.Contains(said, "line 2 of "+known+" has another") {
		t.Fatalf("no advice: %s", said)
	}
	if out, err := exec.Command("sh", "-c", advice).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", advice, err, out)
	}
	said = missing()
	_, advice, ok = strings.Cut(said, "connect once with ssh ")
	advice, _, _ = strings.Cut(advice, " and compare")
	if !ok || !strings.Contains(said, "the key of 10.9.0.1 is not known") {
		t.Fatalf("after %s: %s", advice, said)
	}
	must(t, netns.Do(w.ns, w.ssh(append([]string{"-o", "StrictHostKeyChecking=accept-new"}, append(strings.Fields(advice), "true")...)...).Run))
	if said = missing(); said != "<nil>" {
		t.Errorf("after all advice was followed: %s", said)
	}
	if left, err := os.ReadFile(known); err != nil || !strings.Contains(string(left), other) {
		t.Errorf("the other host's key is gone: %s, %v", left, err)
	}
}

// slowly joins two nodes by a link with a delay of about 50 ms for a small packet.
func slowly(t *testing.T, nodes []*node) {
	t.Helper()
	must(t, netns.Do(nodes[0].ns, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "slow"}, PeerName: "slow", PeerNamespace: netlink.NsFd(nodes[1].ns)})
	}))
	for i, n := range nodes {
		must(t, netns.Do(n.ns, func() error { return addAddress("slow", fmt.Sprintf("10.33.0.%d/24", i+1)) }))
		n.in("tc", "qdisc", "add", "dev", "slow", "root", "tbf", "rate", "20kbit", "burst", "200", "latency", "5s")
	}
}

// certify gives nodes certificates of a new authority, which is all that the controller knows. They are valid from then on.
func certify(t *testing.T, w *world, nodes []*node, names string, from time.Time) {
	t.Helper()
	authority := newKey(t, filepath.Join(w.home, "authority"))
	for _, n := range nodes {
		n.stop()
		certificate := &ssh.Certificate{
			Key: n.hostKey.PublicKey(), CertType: ssh.HostCert, ValidPrincipals: []string{n.address}, ValidBefore: ssh.CertTimeInfinity,
		}
		if !from.IsZero() {
			certificate.ValidAfter = uint64(from.Unix())
		}
		must(t, certificate.SignCert(rand.Reader, authority))
		must(t, os.WriteFile(filepath.Join(n.dir, "host_key-cert.pub"), ssh.MarshalAuthorizedKey(certificate), 0o600))
		n.options.config += "HostCertificate /mnt/host_key-cert.pub\n"
		n.start(w)
	}
	line := "@cert-authority " + names + " " + string(ssh.MarshalAuthorizedKey(authority.PublicKey()))
	must(t, os.WriteFile(filepath.Join(w.home, ".ssh", "known_hosts"), []byte(line), 0o600))
}

// TestLogin logs in by the agent, by an alias of the configuration, and through another machine.
func TestLogin(t *testing.T) {
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	raw, err := os.ReadFile(filepath.Join(w.home, ".ssh", "id_ed25519"))
	must(t, err)
	keys := agent.NewKeyring()
	must(t, addTo(keys, raw))
	must(t, os.Remove(filepath.Join(w.home, ".ssh", "id_ed25519")))
	socket := filepath.Join(w.home, "agent")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	defer listener.Close()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _ = agent.ServeAgent(keys, c) }()
		}
	}()
	t.Setenv("SSH_AUTH_SOCK", socket)
	w.configure(t, `
Host near far
  User root
Host near
  HostName `+nodes[0].address+`
Host far
  HostName `+nodes[1].address+`
  ProxyJump near
`)
	config := w.config(t, hosts.Config{Hosts: []spec.Host{{Name: "near"}, {Name: "far"}}, Paths: []hosts.Path{{Client: "near", Server: "far", Address: "native", Transport: tcp4}}})
	up, err := hosts.Up(t.Context(), config)
	must(t, err)
	must(t, up.Close(context.Background()))
	if log := nodes[1].log.String(); !strings.Contains(log, "Accepted publickey for root from "+nodes[0].address) || strings.Contains(log, "Accepted publickey for root from 10.9.0.254") {
		t.Errorf("connections went to the far host directly:\n%s", log)
	}
	clean(t, nodes)
}

func addTo(keys agent.Agent, key []byte) error {
	parsed, err := sshKey(key)
	if err != nil {
		return err
	}
	return keys.Add(agent.AddedKey{PrivateKey: parsed})
}

// TestCut checks that nothing is left, whenever the connection breaks.
func TestCut(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	config := w.config(t, hosts.Config{Hosts: specs("root", nodes), Paths: fromAToB("native", tcp4)})
	self, err := os.Stat("/proc/self/exe")
	must(t, err)
	// During the handshake, the examination of the host, and the copy.
	for _, bytes := range []int64{700, 1400, 1800, 2200, 2600, 3000, 3400, 3800, 4200, 4600, 1 << 20, self.Size() / 2, self.Size()} {
		w.configure(t, "Host b\n"+through(t, "cut", bytes, "%h:%p"))
		up, err := hosts.Up(t.Context(), config)
		if err == nil {
			t.Errorf("cut after %d bytes, and nobody saw it", bytes)
			must(t, up.Close(context.Background()))
		}
		t.Logf("cut after %d bytes: %v", bytes, err)
		clean(t, nodes)
	}
	w.configure(t, "")
	// When the program starts.
	ended, cut := make(chan error), make(chan struct{})
	go func() {
		up, err := hosts.Up(t.Context(), config)
		<-cut
		if err == nil {
			err = up.Close(context.Background())
		}
		ended <- err
	}()
	testenv.Await(t, 15*time.Second, "a worker", func() bool { return strings.Contains(nodes[1].left(), "worker --remote --claim") })
	nodes[1].disconnect()
	close(cut)
	t.Logf("cut as the program begins: %v", <-ended)
	clean(t, nodes)
	up, err := hosts.Up(t.Context(), config)
	must(t, err)
	// Now all connections break at once, in the middle of the run.
	for _, p := range up.Places() {
		_, err := up.Worker(t.Context(), p, place.ForTraffic)
		must(t, err)
	}
	nodes[1].disconnect()
	must(t, up.Await(t.Context(), true)) // a new connection takes over
	must(t, up.Close(context.Background()))
	clean(t, nodes)
}

// TestClaim checks that a second run on a host is told who uses it.
func TestClaim(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	config := w.config(t, hosts.Config{Hosts: specs("root", nodes), Paths: fromAToB("native", tcp4)})
	up, err := hosts.Up(t.Context(), config)
	must(t, err)
	_, err = hosts.Up(t.Context(), config)
	if want := fmt.Sprintf("process-%d) is in progress on this host", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a second run: %v, want %s", err, want)
	}
	must(t, up.Close(context.Background()))
	clean(t, nodes)
}

// The traffic is paced, to leave CPU time to other tests. A datagram without an answer counts as lost after half of the window.
// So a thread that waits that long for a CPU does not look like a connection that is stalled at the end of the window.
const experimentText = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: hosts}
spec:
  target:
    hosts:
    - {name: a, address: 10.9.0.1, user: USER, labels: {zone: east}, addresses: {weave: 10.32.0.1}, price: 1 EUR}
    - {name: b, address: 10.9.0.2, user: USER, labels: {zone: west}, addresses: {weave: 10.32.0.2}, price: 2 EUR}
  baseline: native
  variants:
  - {name: native}
  - {name: weave, path: {address: weave}}
  - {name: back, hosts: {client: {zone: west}}}
  - {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}
  workloads:
  - {name: tcp, underload: {rate: 500, warmup: 50ms, duration: 100ms}}
  - {name: udp, underload: {protocol: udp, rate: 500, warmup: 50ms, duration: 400ms}, pairs: [2]}
  runs: RUNS
`

// program is a run of an experiment.
type program struct {
	*exec.Cmd
	output output
}

// run starts a new experiment on the hosts.
func (w *world) run(t *testing.T, user string, runs int, args ...string) *program {
	t.Helper()
	file := filepath.Join(w.home, "hosts.yaml")
	text := strings.NewReplacer("USER", user, "RUNS", fmt.Sprint(runs)).Replace(experimentText)
	must(t, os.WriteFile(file, []byte(text), 0o600))
	return w.start(t, append([]string{"run", file, "--out", filepath.Join(w.home, "results")}, args...)...)
}

// start starts this program in the controller's namespace, as its user.
func (w *world) start(t *testing.T, args ...string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command("/proc/self/exe", args...)}
	p.Env = append(os.Environ(), "HOME="+w.home, "SSH_AUTH_SOCK=")
	p.Stdout, p.Stderr = &p.output, &p.output
	must(t, netns.Do(w.ns, p.Start))
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// end waits for the end of a run, and returns what it printed.
func (p *program) end() (text string, err error) {
	err = p.Wait() // which also waits for the whole output
	return p.output.String(), err
}

func (w *world) trials(t *testing.T) (all []record.Trial) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(w.home, "results", "*", "trials.jsonl"))
	must(t, err)
	if len(files) != 1 {
		t.Fatalf("results: %v", files)
	}
	data, err := os.ReadFile(files[0])
	must(t, err)
	for line := range strings.Lines(string(data)) {
		var trial record.Trial
		must(t, json.Unmarshal([]byte(line), &trial))
		all = append(all, trial)
	}
	return all
}

// measured returns the trials without those that the run repeated because a connection stalled.
func (w *world) measured(t *testing.T) []record.Trial {
	t.Helper()
	return slices.DeleteFunc(w.trials(t), func(t record.Trial) bool { return t.Stalled })
}

// served reports whether a server saw traffic. It need not have, where a warning says that the client sent late.
func served(trial record.Trial) bool {
	server := trial.PerPair[0].Server
	return server.Messages > 0 || server.Bytes > 0 || slices.ContainsFunc(trial.Warnings, func(w record.Warning) bool {
		return w.Code == record.WarnGeneratorBound || w.Code == record.WarnSaturated
	})
}

// TestExperiment checks that every variant yields results, and that the user becomes root where a variant needs it.
func TestExperiment(t *testing.T) {
	t.Parallel()
	with := nodeOptions{config: "MaxSessions 1\n", sudoers: "user ALL=(ALL) NOPASSWD: ALL\n"}
	w, nodes := newWorld(t, with, with)
	dry, err := w.run(t, "user", 1, "--dry-run").end()
	for _, want := range []string{"hosts a, b", "user@10.9.0.1:22", "by sudo -n", "Nothing is missing"} {
		if !strings.Contains(dry, want) {
			t.Errorf("the plan lacks %q: %v\n%s", want, err, dry)
		}
	}
	clean(t, nodes)
	text, err := w.run(t, "user", 2).end()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	trials := w.measured(t)
	if len(trials) != 16 {
		t.Errorf("%d trials, want 2 blocks of 4 variants by 2 workloads", len(trials))
	}
	for _, trial := range trials {
		client := trial.PerPair[0].Client.Place
		switch {
		case trial.Status != record.StatusOK || !served(trial):
			t.Errorf("%s %s: %s, %+v", trial.Variant, trial.Workload, trial.Error, trial.PerPair[0].Server)
		case client != map[bool]string{true: "b", false: "a"}[trial.Variant == "back"]:
			t.Errorf("%s: the client is on %s", trial.Variant, client)
		case (trial.Variant == "rps") != (len(trial.Settings) > 0):
			t.Errorf("%s: settings %v", trial.Variant, trial.Settings)
		}
	}
	clean(t, nodes)
}

// recorded returns the number of trials on record.
func (w *world) recorded() int {
	files, _ := filepath.Glob(filepath.Join(w.home, "results", "*", "trials.jsonl"))
	if len(files) == 0 {
		return 0
	}
	data, _ := os.ReadFile(files[0])
	return strings.Count(string(data), "\n")
}

// TestResume checks that a run whose controller is killed, even in a trial with accelerators, leaves nothing on the hosts, and
// that the resumed run neither loses nor repeats a trial.
func TestResume(t *testing.T) {
	t.Parallel()
	with := nodeOptions{sudoers: "user ALL=(ALL) NOPASSWD: ALL\n"}
	w, nodes := newWorld(t, with, with)
	found := nodes[0].read("sys/class/net/eth0/queues/rx-0/rps_cpus")
	kill := func(p *program) {
		t.Helper()
		must(t, p.Process.Kill())
		_, _ = p.end() // killed
		clean(t, nodes)
		for _, n := range nodes {
			if left := n.read("sys/class/net/eth0/queues/rx-0/rps_cpus"); left != found {
				t.Errorf("rps_cpus of host %s is %s, was %s", n.name, left, found)
			}
		}
	}
	p := w.run(t, "user", 3)
	testenv.Await(t, 60*time.Second, "a trial with RPS", func() bool {
		return nodes[0].read("sys/class/net/eth0/queues/rx-0/rps_cpus") != found
	})
	kill(p)
	folders, err := filepath.Glob(filepath.Join(w.home, "results", "*"))
	must(t, err)
	for range 2 {
		before := w.recorded()
		p = w.start(t, "run", "--resume", folders[0])
		testenv.Eventually(t, 60*time.Second, "another trial", func() string {
			if w.recorded() > before {
				return ""
			}
			return fmt.Sprintf("%d are on record\n%s", w.recorded(), p.output.String())
		})
		kill(p)
	}
	if text, err := w.start(t, "run", "--resume", folders[0]).end(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	seen := make(map[string]int)
	trials := w.measured(t)
	for _, trial := range trials {
		seen[fmt.Sprint(trial.Block, trial.Variant, trial.Workload)]++
		if trial.Status != record.StatusOK {
			t.Errorf("%s %s: %s", trial.Variant, trial.Workload, trial.Error)
		}
	}
	if len(trials) != 24 || len(seen) != 24 {
		t.Errorf("%d trials of %d cells, want 3 blocks of 4 variants by 2 workloads", len(trials), len(seen))
	}
	clean(t, nodes)
}

// TestAnotherAddress checks that a host that comes back at another address ends the run: traffic would go to nobody, or to
// somebody else.
func TestAnotherAddress(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	b := nodes[1]
	known := knownhosts.Line([]string{nodes[0].address}, nodes[0].hostKey.PublicKey()) + "\n" + knownhosts.Line([]string{"b.example"}, b.hostKey.PublicKey()) + "\n"
	must(t, os.WriteFile(filepath.Join(w.home, ".ssh", "known_hosts"), []byte(known), 0o600))
	config := w.config(t, hosts.Config{Hosts: specs("root", nodes), Paths: fromAToB("native", tcp4)})
	config.Hosts[1].Address = "b.example"
	now := filepath.Join(w.home, "b.example") // as its name server has it
	must(t, os.WriteFile(now, []byte(b.address), 0o600))
	w.configure(t, "Host b\n"+through(t, "never", 0, "$(cat "+now+"):%p"))
	up, err := hosts.Up(t.Context(), config)
	must(t, err)
	b.stop()
	b.in("ip", "address", "del", b.address+"/24", "dev", "eth0")
	b.in("ip", "address", "add", "10.9.0.77/24", "dev", "eth0")
	b.address = "10.9.0.77"
	must(t, os.WriteFile(now, []byte(b.address), 0o600))
	b.start(w)
	err = up.Await(t.Context(), true)
	if want := "host b has come back at another address, 10.9.0.77 for 10.9.0.2"; !errors.Is(err, place.ErrLost) || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v\nwant  %s", err, want)
	}
	must(t, up.Close(context.Background()))
	clean(t, nodes)
}

// TestDropOff checks that a host that loses power during a trial costs only that trial.
func TestDropOff(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	p := w.run(t, "root", 3)
	testenv.Await(t, 60*time.Second, "three trials", func() bool { return w.recorded() >= 3 })
	nodes[1].stop()
	nodes[1].start(w)
	text, err := p.end()
	failed := 0
	trials := w.measured(t)
	for _, trial := range trials {
		if trial.Status != record.StatusOK {
			failed++
			t.Log(trial.Error)
		}
	}
	// Between two trials it may cost none. It costs two if the kernel kills the first trial's worker before the one that tells
	// whether the host is there.
	if err != nil || failed > 2 || len(trials) != 24+failed {
		t.Errorf("%d of %d trials failed: %v\n%s", failed, len(trials), err, text)
	}
	if !strings.Contains(text, "host b is back") {
		t.Errorf("it did not say that the host is back:\n%s", text)
	}
	clean(t, nodes)
}

// outageText has traffic that lasts long enough for an outage within a window.
const outageText = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: outage}
spec:
  target: {hosts: [{name: a, address: 10.9.0.1, user: root}, {name: b, address: 10.9.0.2, user: root}]}
  baseline: native
  variants: [{name: native}, {name: again}]
  workloads: [{name: w, WORKLOAD}]
  runs: 2
`

// TestOutage checks that a network that drops everything during a trial costs that trial, whichever tool made its traffic, and
// that the trial is repeated and not part of the means.
func TestOutage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		workload string
		bytes    int // that are sent until well within the window
	}{
		"datagrams": {"pingpong: {protocol: udp, warmup: 100ms, duration: 3s}", 600_000},
		"underload": {"underload: {rate: 500, warmup: 100ms, duration: 3s}", 40_000},
		"tool":      {"stream: {tool: iperf3, warmup: 1s, duration: 3s, connections: 1}", 4_000_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "tool" {
				testenv.NeedProgram(t, "iperf3", "make test-deps")
			}
			w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
			file := filepath.Join(w.home, "outage.yaml")
			must(t, os.WriteFile(file, []byte(strings.ReplaceAll(outageText, "WORKLOAD", c.workload)), 0o600))
			nodes[0].in("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "20k", "latency", "50ms") // to leave CPU time
			p := w.start(t, "run", file, "--out", filepath.Join(w.home, "results"))
			testenv.Await(t, 60*time.Second, "a trial", func() bool { return w.recorded() >= 1 })
			const sent = "sys/class/net/eth0/statistics/tx_bytes"
			bytes := func() (n int) {
				_, err := fmt.Sscan(nodes[0].read(sent), &n)
				must(t, err)
				return n
			}
			before := bytes()
			testenv.Await(t, 60*time.Second, "the next trial's traffic", func() bool { return bytes() > before+c.bytes })
			nodes[1].in("nft", "add table inet f; add chain inet f in { type filter hook prerouting priority 0; policy drop; }")
			time.Sleep(2500 * time.Millisecond) // as long as the outage lasts
			nodes[1].in("nft", "delete table inet f")
			text, err := p.end()
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			stalled := 0
			for _, trial := range w.trials(t) {
				switch client := trial.PerPair[0].Client; {
				case trial.Status != record.StatusOK:
					t.Log(trial.Error)
					stalled++
				case client.Silent > 1.5, name == "tool" && trial.Metrics[metrics.Throughput] < 10e6:
					t.Errorf("this trial counts: silent for %g s, %v", client.Silent, trial.Metrics)
				}
			}
			if stalled == 0 {
				t.Errorf("no trial has failed\n%s", text)
			}
		})
	}
}

// command copies this program to a node, and returns a command that runs it there.
func (n *node) command(args ...string) *exec.Cmd {
	n.t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	must(n.t, err)
	must(n.t, os.WriteFile(filepath.Join(n.dir, "slipstream"), self, 0o700))
	return exec.Command("nsenter", append([]string{"--target", n.init(), "--mount", "--pid", "--net", "/mnt/slipstream"}, args...)...)
}

// TestAppliedBefore checks that what an administrator has applied on a host outlives a run with accelerators of its own there, and that
// the run says before its first trial what every variant is measured with.
func TestAppliedBefore(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	must(t, os.WriteFile(filepath.Join(nodes[0].dir, "rps.yaml"), []byte(strings.NewReplacer("USER", "root", "RUNS", "2").Replace(experimentText)), 0o600))
	const setting = "sys/class/net/eth0/queues/rx-0/rps_cpus"
	found := nodes[0].read(setting)
	if out, err := nodes[0].command("accel", "apply", "/mnt/rps.yaml", "rps").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	applied := nodes[0].read(setting)
	if applied == found {
		t.Fatalf("%s is %s with RPS, too", setting, found)
	}
	text, err := w.run(t, "root", 2).end()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if before, _, _ := strings.Cut(text, "block 1"); !strings.Contains(before, "a is accelerated already (") {
		t.Errorf("it began without a word about what is applied:\n%s", text)
	}
	if now := nodes[0].read(setting); now != applied {
		t.Errorf("%s is %s after the run, was %s", setting, now, applied)
	}
}

// TestControlWorkerKilled checks that the settings of a dead worker are restored before the next trials.
func TestControlWorkerKilled(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	const setting = "sys/class/net/eth0/queues/rx-0/rps_cpus"
	found := nodes[0].read(setting)
	p := w.run(t, "root", 20)
	for killed := ""; killed != "rps"; { // the trial may have ended meanwhile, and another one loses its worker
		testenv.Await(t, 60*time.Second, "a trial with RPS", func() bool { return nodes[0].read(setting) != found })
		before := w.recorded()
		nodes[0].kill(func(line string) bool {
			return strings.HasPrefix(line, "/proc/") && strings.Contains(line, " worker --control ")
		})
		var during []record.Trial
		testenv.Await(t, 60*time.Second, "the setting as it was", func() bool {
			all := w.trials(t)[before:]
			if nodes[0].read(setting) == found {
				return true
			}
			during = all
			return false
		})
		testenv.Await(t, 60*time.Second, "the trial that lost its worker", func() bool {
			all := w.trials(t)[before:]
			i := slices.IndexFunc(all, func(t record.Trial) bool { return t.Status == record.StatusFailed })
			if i >= 0 {
				killed = all[i].Variant
			}
			return i >= 0
		})
		for _, trial := range during {
			if killed == "rps" && trial.Variant != "rps" { // one of these sets it again
				t.Errorf("a trial of %s ran before the setting was as it had been", trial.Variant)
			}
		}
	}
	must(t, p.Process.Signal(os.Interrupt))
	text, _ := p.end() // interrupted
	if now := nodes[0].read(setting); now != found {
		t.Errorf("%s is %s after the run, was %s\n%s", setting, now, found, text)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(text)
		}
	})
	clean(t, nodes)
}

// TestSwitchRestartsHost checks that a switch that reboots a host costs no trial, and that the settings of the run are restored
// at its end. The first of two commands returns while the host is still down.
func TestSwitchRestartsHost(t *testing.T) {
	t.Parallel()
	with := nodeOptions{sudoers: "user ALL=(ALL) NOPASSWD: ALL\n"}
	w, nodes := newWorld(t, with, with)
	text := strings.NewReplacer("USER", "user", "RUNS", "2").Replace(experimentText)
	text = text[:strings.Index(text, "  - {name: weave")] + `  - {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}
  - {name: restarted, switch: {to: [sh, -c, SCRIPT], back: [sh, -c, SCRIPT]}}
` + text[strings.Index(text, "  workloads:"):] + "  trialsPerPeriod: 1\n"
	commands := filepath.Join(w.home, "commands")
	text = strings.ReplaceAll(text, "SCRIPT", fmt.Sprintf("'echo >>%s; n=$(wc -l <%[1]s); until [ -e %[1]s-$n ]; do sleep 0.02; done'", commands))
	must(t, os.WriteFile(commands, nil, 0o600))
	file := filepath.Join(w.home, "hosts.yaml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	p := w.start(t, "run", file, "--out", filepath.Join(w.home, "results"))
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	var err error
	restarts := 0
	for running := true; running; {
		select {
		case err = <-ended:
			running = false
			continue
		case <-time.After(20 * time.Millisecond):
		}
		if asked, _ := os.ReadFile(commands); len(asked) == restarts {
			continue
		}
		restarts++
		done := func() { must(t, os.WriteFile(fmt.Sprintf("%s-%d", commands, restarts), nil, 0o600)) }
		nodes[1].stop()
		if restarts%2 == 0 {
			done()
		}
		nodes[1].start(w)
		if restarts%2 == 1 {
			done()
		}
	}
	if err != nil || restarts < 4 {
		t.Errorf("%d restarts: %v\n%s", restarts, err, p.output.String())
	}
	for _, trial := range w.trials(t) {
		if trial.Status != record.StatusOK && !trial.Stalled {
			t.Errorf("%s %s: %s", trial.Variant, trial.Workload, trial.Error)
		}
	}
	clean(t, nodes)
}

// TestSilentJump checks that a jump host that goes silent does not hold up a run whose patience is over.
func TestSilentJump(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	// During the handshake with either machine, the examination of the host, and the copy.
	for _, bytes := range []int64{1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 1 << 20} {
		t.Run(fmt.Sprint(bytes), func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			file := filepath.Join(t.TempDir(), "config")
			w.writeConfig(t, file, "Host far\n  HostName "+nodes[1].address+"\n  User root\n  ProxyJump root@"+nodes[0].address+"\n"+
				"Host "+nodes[0].address+"\n"+through(t, "silent", bytes, "%h:%p"))
			began := time.Now()
			up, err := hosts.Up(ctx, w.by(t, hosts.Config{Hosts: []spec.Host{{Name: "far"}}}, file))
			if err == nil {
				must(t, up.Close(context.Background()))
			}
			if took := time.Since(began); err == nil || took > 20*time.Second {
				t.Errorf("after %s: %v", took, err)
			}
		})
	}
}

func sshKey(pem []byte) (any, error) { return ssh.ParseRawPrivateKey(pem) }

// TestTakeover checks that if the connection to a worker breaks silently, so that its input stays open, the worker yields to
// another one of its run, but to no other, not even to one of another user who has seen the name of the run.
func TestTakeover(t *testing.T) {
	t.Parallel()
	testenv.NeedRoot(t)
	ns := namespace(t)
	start := func(user uint32, claim string) *exec.Cmd {
		cmd := exec.Command("/proc/self/exe", "worker", "--remote", "--claim", claim)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
		cmd.Stderr = new(output)
		_, err := cmd.StdinPipe()
		must(t, err)
		must(t, netns.Do(ns, cmd.Start))
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd
	}
	const nobody = 65534
	first := start(0, "mine/somebody")
	testenv.Await(t, 10*time.Second, "the claim", func() bool {
		sockets, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", first.Process.Pid))
		return err == nil && strings.Contains(string(sockets), "@slipstream/run")
	})
	for user, claim := range map[uint32]string{0: "another/somebody-else", nobody: "mine/somebody"} {
		other := start(user, claim)
		kill := time.AfterFunc(10*time.Second, func() { _ = other.Process.Kill() })
		if err := other.Wait(); err == nil || !strings.Contains(other.Stderr.(*output).String(), "another run (somebody) is in progress on this host") {
			t.Errorf("a claim of %s by user %d: %v, %s", claim, user, err, other.Stderr)
		}
		kill.Stop()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = first.Wait() // however it ends
	}()
	start(0, "mine/somebody")
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the first has not ended")
	}
}
