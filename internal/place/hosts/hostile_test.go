package hosts

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
)

// hostile starts an SSH server that lets everybody in, and then does what a test wants. It returns the configuration of a run
// on that host.
func hostile(t *testing.T, serve func(ssh.NewChannel)) Config {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, private, err := ed25519.GenerateKey(nil)
	check(err)
	key, err := ssh.NewSignerFromKey(private)
	check(err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	t.Cleanup(func() { listener.Close() })
	dir := t.TempDir()
	block, err := ssh.MarshalPrivateKey(private, "")
	check(err)
	check(os.WriteFile(filepath.Join(dir, "key"), pem.EncodeToMemory(block), 0o600))
	line := knownhosts.Line([]string{listener.Addr().String()}, key.PublicKey())
	check(os.WriteFile(filepath.Join(dir, "known"), []byte(line+"\n"), 0o600))
	check(os.WriteFile(filepath.Join(dir, "config"), fmt.Appendf(nil, "UserKnownHostsFile %s/known\nIdentityFile %[1]s/key\n", dir), 0o600))
	config := &ssh.ServerConfig{PublicKeyCallback: func(ssh.ConnMetadata, ssh.PublicKey) (*ssh.Permissions, error) { return nil, nil }}
	config.AddHostKey(key)
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				_, channels, requests, err := ssh.NewServerConn(c, config)
				if err != nil {
					return
				}
				go ssh.DiscardRequests(requests)
				for channel := range channels {
					go serve(channel)
				}
			}()
		}
	}()
	return Config{
		Hosts: []spec.Host{{Name: "h", Address: "127.0.0.1", Port: listener.Addr().(*net.TCPAddr).Port, User: "me"}},
		Note:  func(string) {},
	}.Begin(func(cmd *exec.Cmd) error {
		cmd.Args = append([]string{cmd.Args[0], "-F", filepath.Join(dir, "config")}, cmd.Args[1:]...)
		return cmd.Start()
	})
}

var someMark = regexp.MustCompile(`slipstream-[A-Z2-7]{20,}`)

// answering accepts a command, and writes what answer returns for its mark, until answer returns "".
func answering(answer func(mark string, n int) string) func(ssh.NewChannel) {
	return func(offered ssh.NewChannel) {
		channel, requests, err := offered.Accept()
		if err != nil {
			return
		}
		for r := range requests {
			_ = r.Reply(true, nil)
			if r.Type != "exec" {
				continue
			}
			script := string(r.Payload)
			if !someMark.MatchString(script) {
				script, _ = bufio.NewReader(channel).ReadString('\n')
			}
			mark := someMark.FindString(script)
			for n := 0; ; n++ {
				text := answer(mark, n)
				if text == "" {
					break
				}
				if _, err := io.WriteString(channel, text); err != nil {
					return
				}
			}
		}
	}
}

// TestHostile checks that whatever a host answers, or if it does not answer, the result is an error of bounded size in bounded
// time.
func TestHostile(t *testing.T) {
	defer func(was time.Duration) { scriptTime = was }(scriptTime)
	once := func(text string) func(string, int) string {
		return func(mark string, n int) string {
			if n > 0 {
				return ""
			}
			return strings.ReplaceAll(text, "MARK", mark)
		}
	}
	for name, c := range map[string]struct {
		serve func(ssh.NewChannel)
		want  string
	}{
		"no answer to a session": {func(ssh.NewChannel) {}, "host h has not answered within 1.5s"},
		"no answer to a command": {func(offered ssh.NewChannel) { _, _, _ = offered.Accept() }, "host h has not answered within 1.5s"},
		"no report":              {answering(once("")), "host h has not answered within 1.5s"},
		"no further report":      {answering(once("MARK begin\nMARK system Linux x86_64\n")), "host h has not answered within 1.5s"},
		"a report of nothing":    {answering(once("MARK \n")), `host h: sh there does not run the script that it was sent: it answers ""`},
		"a report of no meaning": {answering(once("MARK \x1b[2J\n")), `host h: sh there does not run the script that it was sent: it answers "\x1b[2J"`},
		"a line without an end": {
			answering(func(string, int) string { return strings.Repeat("x", 1<<15) }),
			`host h does not run the command that it is sent; it printed "xxx`,
		},
		"lines without an end": {
			answering(func(string, int) string { return "\x1b[2Jy\n" }),
			`host h does not run the command that it is sent; it printed "\x1b[2Jy\n`,
		},
		"reports without an end": {
			answering(func(mark string, n int) string { return mark + []string{" begin\n", " folder /tmp\n"}[min(n, 1)] }),
			"host h reports more than 1000 facts",
		},
	} {
		t.Run(name, func(t *testing.T) {
			scriptTime = time.Minute
			if strings.Contains(c.want, "within 1.5s") { // the others answer, and a busy machine takes its time
				scriptTime = 1500 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			found, err := Survey(ctx, hostile(t, c.serve))
			if err != nil {
				t.Fatal(err)
			}
			if err := found[0].Missing; err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v\nwant  %s", err, c.want)
			}
		})
	}
}

// TestSlowCopy checks that the last part of a copy, which ssh has taken but not sent yet, may take longer than a script.
func TestSlowCopy(t *testing.T) {
	defer func(was time.Duration) { scriptTime = was }(scriptTime)
	h, err := New(hostile(t, answering(func(mark string, n int) string {
		switch n {
		case 0:
			return mark + " begin\n" + mark + " send\n"
		case 1:
			time.Sleep(1500 * time.Millisecond) // a slow link
			return mark + " program 1 file\n"
		}
		return ""
	})))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close(context.Background())
	s, err := h.hosts[0].open(t.Context(), func(mark string) request { return request{"a script with " + mark, ""} })
	if err != nil {
		t.Fatal(err)
	}
	defer s.end()
	scriptTime = 500 * time.Millisecond
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	if p, err := s.copy(t.Context(), "/tmp", build.Build{File: file, Size: 7}); err != nil || p != (program{"1", "file"}) {
		t.Errorf("copied as %v, %v", p, err)
	}
}

// TestSilentFiles checks that the end of a run waits no longer for a server's SFTP than for a script.
func TestSilentFiles(t *testing.T) {
	defer func(was time.Duration) { scriptTime = was }(scriptTime)
	scriptTime = 100 * time.Millisecond
	h, err := New(hostile(t, func(offered ssh.NewChannel) { _, _, _ = offered.Accept() }))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close(context.Background())
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := h.hosts[0].remove(ctx, "x.exe"); err == nil || !strings.Contains(err.Error(), "host h has not answered within 100ms") {
		t.Error(err)
	}
}

// TestSilentAgent checks that an SSH agent that does not answer, such as one that a lost connection has forwarded, fails the
// host in bounded time.
func TestSilentAgent(t *testing.T) {
	defer func(was time.Duration) { scriptTime = was }(scriptTime)
	scriptTime = 500 * time.Millisecond
	config := hostile(t, answering(func(mark string, n int) string { return []string{mark + " begin\n", mark + " end\n", ""}[min(n, 2)] }))
	socket := filepath.Join(t.TempDir(), "agent")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	t.Setenv("SSH_AUTH_SOCK", socket)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	found, err := Survey(ctx, config)
	if err != nil || found[0].Missing == nil || !strings.Contains(found[0].Missing.Error(), "host h has not answered within 500ms") {
		t.Errorf("found %v, %v", found, err)
	}
}
