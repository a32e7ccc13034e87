//go:build linux

package hosts_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// ssh returns a command that runs ssh as the controller's user.
func (w *world) ssh(args ...string) *exec.Cmd {
	return exec.Command("/usr/bin/ssh", append([]string{"-F", filepath.Join(w.home, ".ssh", "config")}, args...)...)
}

// TestConfiguration checks that a run respects the user's ssh configuration for a host.
func TestConfiguration(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text string // ADDRESS is the host's, PROXY a proxy command to it
		login      string
	}{
		{
			"ProxyCommand", "Host near\n  HostName 192.0.2.1\n  HostKeyAlias ADDRESS\n  User root\nPROXY",
			"root@192.0.2.1:22 by ",
		},
		{
			"Match exec", "Match originalhost near exec \"test %n = near\"\n  HostName ADDRESS\n  User root\n",
			"root@10.9.0.1:22",
		},
		{
			"forwardings and a command", "Host near\n  HostName ADDRESS\n  User root\n  LocalForward 22 ADDRESS:22\n  RemoteForward 22 ADDRESS:22\n  RemoteCommand false\n  RequestTTY force\n  LocalCommand false\n  PermitLocalCommand yes\n",
			"root@10.9.0.1:22",
		},
		{
			"no session, no input, in the background", "Host near\n  HostName ADDRESS\n  User root\n  SessionType none\n  StdinNull yes\n  ForkAfterAuthentication yes\n",
			"root@10.9.0.1:22",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, nodes := newWorld(t, nodeOptions{})
			w.configure(t, strings.NewReplacer("ADDRESS", nodes[0].address, "PROXY", through(t, "never", 0, nodes[0].address+":22")).Replace(c.text))
			config := w.config(t, hosts.Config{Hosts: []spec.Host{{Name: "near"}}})
			found, err := hosts.Survey(t.Context(), config)
			must(t, err)
			if found[0].Missing != nil || !strings.HasPrefix(found[0].Login, c.login) {
				t.Errorf("found %+v", found[0])
			}
			up, err := hosts.Up(t.Context(), config)
			must(t, err)
			must(t, up.Close(context.Background()))
			clean(t, nodes)
		})
	}
}

// TestLongFolder: temporary files that have long names, as in a workspace of CI, do not keep commands from sharing a connection.
func TestLongFolder(t *testing.T) {
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	must(t, os.Mkdir(long, 0o700))
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", long)
	up, err := hosts.Up(t.Context(), w.config(t, hosts.Config{Hosts: specs("root", nodes), Paths: fromAToB("native", tcp4)}))
	must(t, err)
	workersAnswer(t, up)
	for _, n := range nodes {
		if logins := strings.Count(n.log.String(), "Accepted publickey"); logins != 1 {
			t.Errorf("%d logins on %s", logins, n.name)
		}
	}
	left, err := os.ReadDir(long)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// TestOwnConnection checks that a run shares a connection that the user has opened for that (ControlMaster), and leaves it
// open.
func TestOwnConnection(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{})
	w.configure(t, "Host near\n  HostName "+nodes[0].address+"\n  User root\n  ControlPath "+filepath.Join(w.home, "c")+"\n")
	own := w.ssh("-M", "-N", "near")
	must(t, netns.Do(w.ns, own.Start))
	t.Cleanup(func() { _ = own.Wait() })
	t.Cleanup(func() { _ = own.Process.Signal(syscall.SIGTERM) })
	testenv.Await(t, 15*time.Second, "the user's connection", func() bool { return w.ssh("-O", "check", "near").Run() == nil })
	must(t, os.Remove(filepath.Join(w.home, ".ssh", "id_ed25519"))) // so there is no other
	up, err := hosts.Up(t.Context(), w.config(t, hosts.Config{Hosts: []spec.Host{{Name: "near"}}}))
	must(t, err)
	must(t, up.Close(context.Background()))
	if out, err := w.ssh("-O", "check", "near").CombinedOutput(); err != nil {
		t.Errorf("the user's connection after the run: %v: %s", err, out)
	}
}

// person is somebody at a terminal who knows the passphrase.
type person struct {
	terminal, keyboard *os.File // of the program, and of the person
	asked              chan int // how often, once the terminal is closed
}

const passphrase = "correct horse"

// newPerson returns a person who thinks for this time before each answer.
func newPerson(t *testing.T, thinking time.Duration) *person {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	must(t, err)
	must(t, unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	must(t, err)
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	must(t, err)
	p := &person{terminal: terminal, keyboard: keyboard, asked: make(chan int, 1)}
	go func() {
		var seen []byte
		buf := make([]byte, 4096)
		asked := 0
		for {
			n, err := keyboard.Read(buf)
			if err != nil {
				p.asked <- asked
				return
			}
			seen = append(seen, buf[:n]...)
			for bytes.Contains(seen, []byte("Enter passphrase for key")) {
				_, rest, ok := bytes.Cut(seen, []byte("': "))
				if !ok {
					break
				}
				seen = rest
				asked++
				time.Sleep(thinking)
				_, _ = fmt.Fprintln(keyboard, passphrase)
			}
		}
	}()
	return p
}

// run runs the program in the person's terminal, from which it takes its input unless it is a script.
func (p *person) run(t *testing.T, w *world, script bool, args ...string) (asked int, text string, err error) {
	t.Helper()
	run := &program{Cmd: exec.Command("/proc/self/exe", args...)}
	run.Env = append(os.Environ(), "HOME="+w.home, "SSH_AUTH_SOCK=")
	run.Stdout, run.Stderr = &run.output, &run.output
	run.ExtraFiles = []*os.File{p.terminal}
	run.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 3}
	if !script {
		run.Stdin = p.terminal
	}
	must(t, netns.Do(w.ns, run.Start))
	t.Cleanup(func() { _ = run.Process.Kill() })
	p.terminal.Close()
	text, err = run.end()
	select {
	case asked = <-p.asked:
	case <-time.After(15 * time.Second):
		t.Errorf("somebody holds the terminal after %v", args)
	}
	p.keyboard.Close()
	return asked, text, err
}

// lock protects the key of the controller's user with a passphrase.
func (w *world) lock(t *testing.T) {
	t.Helper()
	file := filepath.Join(w.home, ".ssh", "id_ed25519")
	data, err := os.ReadFile(file)
	must(t, err)
	key, err := ssh.ParseRawPrivateKey(data)
	must(t, err)
	block, err := ssh.MarshalPrivateKeyWithPassphrase(*key.(*ed25519.PrivateKey), "", []byte(passphrase))
	must(t, err)
	must(t, os.WriteFile(file, pem.EncodeToMemory(block), 0o600))
}

// TestAsked checks that a person is asked once for each host, and that a script is never asked, not even by the ssh of a jump
// host.
func TestAsked(t *testing.T) {
	t.Parallel()
	w, nodes := newWorld(t, nodeOptions{}, nodeOptions{})
	w.configure(t, "Host far\n  HostName "+nodes[1].address+"\n  User root\n  ProxyJump root@"+nodes[0].address+"\n")
	w.lock(t)
	experiment := filepath.Join(w.home, "hosts.yaml")
	must(t, os.WriteFile(experiment, []byte(strings.NewReplacer("USER", "root", "RUNS", "1").Replace(experimentText)), 0o600))
	both := "hosts:root@" + nodes[0].address + ",root@" + nodes[1].address
	for _, c := range []struct {
		name   string
		script bool
		args   []string
		asked  int
		want   string
		// thinking is longer than a connection lasts that has no commands and that nobody holds.
		thinking time.Duration
	}{
		{"run", false, []string{"run", experiment, "--out", filepath.Join(w.home, "results")}, 2, "", 0},
		{"doctor", false, []string{"doctor", "--for", "100ms", both}, 2, "", 3 * time.Second},
		{"jump host", false, []string{"doctor", "--for", "100ms", "hosts:far"}, 2, "", 0},
		{"script", true, []string{"run", experiment, "--out", filepath.Join(w.home, "results")}, 0, "Nobody can be asked for a password or passphrase here", 0},
		{"script through a jump host", true, []string{"doctor", "--for", "100ms", "hosts:far"}, 0, "Permission denied", 0},
	} {
		asked, text, err := newPerson(t, c.thinking).run(t, w, c.script, c.args...)
		if asked != c.asked || c.want != "" && (err == nil || !strings.Contains(text, c.want)) || c.want == "" && (strings.Contains(text, "host-unfit") || strings.Contains(text, "slipstream: ")) {
			t.Errorf("%s: asked %d times, want %d: %v\n%s", c.name, asked, c.asked, err, text)
		}
	}
	clean(t, nodes)
}
