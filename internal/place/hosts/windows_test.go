//go:build linux

package hosts_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// server is an SSH server on this machine, which stands in for that of Windows or of Linux.
type server struct {
	t    *testing.T
	name string
	// in is the controller's network, where it is.
	in   *world
	port int
	// shell runs a command as the user's login shell does.
	shell func(command string) *exec.Cmd
	// home is the user's home directory.
	home string

	mu      sync.Mutex
	copying func() // called once, by the next SFTP session that has received a megabyte
	clients []*ssh.ServerConn
	running []*exec.Cmd
}

// serve starts an SSH server of a version in the controller's namespace, which the controller's user may log in to.
func (w *world) serve(t *testing.T, name, version, home string, key ssh.PublicKey, shell func(string) *exec.Cmd) *server {
	t.Helper()
	config := &ssh.ServerConfig{ServerVersion: version, PublicKeyCallback: func(_ ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		if string(k.Marshal()) != string(key.Marshal()) {
			return nil, fmt.Errorf("not the key")
		}
		return nil, nil
	}}
	host := newKey(t, filepath.Join(t.TempDir(), "host_key"))
	config.AddHostKey(host)
	var listener net.Listener
	must(t, w.do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	s := &server{in: w, t: t, name: name, port: listener.Addr().(*net.TCPAddr).Port, home: home, shell: shell}
	file, err := os.OpenFile(filepath.Join(w.home, ".ssh", "known_hosts"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(t, err)
	_, err = fmt.Fprintln(file, knownhosts.Line([]string{listener.Addr().String()}, host.PublicKey()))
	must(t, err)
	must(t, file.Close())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { s.serve(c, config) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		s.cut()
		serving.Wait()
	})
	return s
}

func (s *server) host() spec.Host {
	return spec.Host{Name: s.name, Address: "127.0.0.1", Port: s.port}
}

// cut breaks all connections and kills what they run, as the server of Windows does with its job object.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cmd := range s.running {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	for _, c := range s.clients {
		c.Close()
	}
	s.clients, s.running = nil, nil
}

func (s *server) serve(raw net.Conn, config *ssh.ServerConfig) {
	defer raw.Close()
	c, channels, requests, err := ssh.NewServerConn(raw, config)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.clients = append(s.clients, c)
	s.mu.Unlock()
	go ssh.DiscardRequests(requests)
	var sessions sync.WaitGroup
	defer sessions.Wait()
	for offered := range channels {
		channel, requests, err := offered.Accept()
		if err != nil {
			return
		}
		sessions.Go(func() {
			defer channel.Close()
			for r := range requests {
				var is struct{ Text string }
				_ = ssh.Unmarshal(r.Payload, &is)
				_ = r.Reply(r.Type == "exec" || is.Text == "sftp", nil)
				switch {
				case r.Type == "exec":
					s.run(c, channel, is.Text)
					return
				case is.Text == "sftp":
					files := exec.Command("/usr/lib/openssh/sftp-server", "-d", s.home)
					files.Stdin, files.Stdout = &observedCopy{Channel: channel, of: s}, channel
					_ = files.Run() // it ends with the session
					return
				}
			}
		})
	}
}

func (s *server) run(c *ssh.ServerConn, channel ssh.Channel, command string) {
	cmd := s.shell(command)
	client, port, _ := net.SplitHostPort(c.RemoteAddr().String())
	cmd.Env = append(cmd.Environ(), fmt.Sprintf("SSH_CONNECTION=%s %s 127.0.0.1 %d", client, port, s.port))
	cmd.Stdout, cmd.Stderr = channel, channel.Stderr()
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	must(s.t, err)
	if err := s.in.do(cmd.Start); err != nil {
		s.t.Errorf("%s: %v", command, err)
		return
	}
	s.mu.Lock()
	s.running = append(s.running, cmd)
	s.mu.Unlock()
	go func() {
		_, _ = io.Copy(in, channel)
		in.Close()
	}()
	var status struct{ Code uint32 }
	if err := cmd.Wait(); err != nil {
		s.t.Logf("%s: %s: %v", s.name, command, err)
		status.Code = uint32(max(1, cmd.ProcessState.ExitCode()))
	}
	_, _ = channel.SendRequest("exit-status", false, ssh.Marshal(status))
}

// windowsWorld returns a controller, a Windows host, which Wine's cmd stands in for, and a Linux host.
func windowsWorld(t *testing.T) (w *world, windows, linux *server) {
	t.Helper()
	wine := testenv.NeedWine(t)
	w = &world{home: t.TempDir(), ns: namespace(t)}
	must(t, netns.Do(w.ns, func() error { // otherwise Windows has no address
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "wire"})
		return errors.Join(err, addAddress("wire"), addAddress("eth0", "192.0.2.1/24"))
	}))
	must(t, os.Mkdir(filepath.Join(w.home, ".ssh"), 0o700))
	w.key = newKey(t, filepath.Join(w.home, ".ssh", "id_ed25519"))
	key := w.key.PublicKey()
	w.configure(t, "")
	scripts := t.TempDir()
	var mu sync.Mutex
	n := 0
	windows = w.serve(t, "windows", "SSH-2.0-OpenSSH_for_Windows_8.1", wine.Home, key, func(command string) *exec.Cmd {
		// The server passes the command to cmd.exe verbatim. Wine would quote it, so it is in a file.
		mu.Lock()
		defer mu.Unlock()
		n++
		file := filepath.Join(scripts, fmt.Sprintf("%d.cmd", n))
		must(t, os.WriteFile(file, []byte("@"+command+"\r\n"), 0o600))
		return wine.Command("cmd", "/d", "/c", "Z:"+strings.ReplaceAll(file, "/", `\`))
	})
	linux = w.serve(t, "linux", "SSH-2.0-OpenSSH_9.2", t.TempDir(), key, func(command string) *exec.Cmd {
		return exec.Command("sh", "-c", command)
	})
	return w, windows, linux
}

// observedCopy is the channel of an SFTP session.
type observedCopy struct {
	ssh.Channel
	of       *server
	received int
}

func (c *observedCopy) Read(b []byte) (int, error) {
	n, err := c.Channel.Read(b)
	if c.received += n; c.received > 1<<20 {
		c.of.mu.Lock()
		copying := c.of.copying
		c.of.copying = nil
		c.of.mu.Unlock()
		if copying != nil {
			copying()
		}
	}
	return n, err
}

// programs returns the programs that are left in the user's folder.
func (s *server) programs() string {
	left, err := filepath.Glob(filepath.Join(s.home, "slipstream*"))
	must(s.t, err)
	return strings.Join(left, "\n")
}

// windowsProgram builds the program for Windows once.
var windowsProgram = sync.OnceValues(func() (string, error) {
	file := filepath.Join(shared, "slipstream.exe")
	return file, testenv.BuildForWindows(file, "slipstream.dev/cmd/slipstream")
})

// TestWindowsUp checks that traffic gets through between a Windows host and a Linux host in both directions, that nothing is left, and
// that the run says beforehand what a Windows host cannot do.
func TestWindowsUp(t *testing.T) {
	t.Parallel()
	w, windows, linux := windowsWorld(t)
	program, err := windowsProgram()
	must(t, err)
	var notes []string
	config := hosts.Config{
		Hosts: []spec.Host{windows.host(), linux.host()}, Binaries: []string{program},
		Paths: []hosts.Path{
			{Client: "linux", Server: "windows", Address: "native", Transport: tcp4},
			{Client: "windows", Server: "linux", Address: "native", Transport: place.Transport{IP: 4, Protocol: "udp"}},
		},
	}
	config = w.config(t, config)
	config.Note = func(text string) { notes = append(notes, text) }
	stale := filepath.Join(windows.home, "slipstream-aaaaaaaaaaaaaaaa.exe")
	must(t, os.WriteFile(stale, []byte("of a run whose connection broke"), 0o600))
	old := time.Now().Add(-11 * time.Minute)
	must(t, os.Chtimes(stale, old, old))
	fresh := filepath.Join(windows.home, "slipstream-bbbbbbbbbbbbbbbb.exe")
	must(t, os.WriteFile(fresh, []byte("of a run that is about to start it"), 0o600))
	recent := time.Now().Add(-9 * time.Minute)
	must(t, os.Chtimes(fresh, recent, recent))
	up, err := hosts.Up(t.Context(), config)
	must(t, err)
	if left := windows.programs(); strings.Contains(left, stale) || !strings.Contains(left, fresh) || strings.Count(left, "\n") != 1 {
		t.Errorf("in the user's folder while the run lasts: %s", left)
	}
	must(t, os.Remove(fresh))
	// A run whose start fails leaves the folder as it was.
	before := windows.programs()
	_, err = hosts.Up(t.Context(), config)
	if err == nil || !strings.Contains(err.Error(), "another run (") {
		t.Errorf("a second run: %v", err)
	}
	testenv.Eventually(t, 5*time.Second, "the user's folder as before the second run", func() string {
		if now := windows.programs(); now != before {
			return now
		}
		return ""
	})
	// So does one that ends while it copies the program.
	ctx, cancel := context.WithCancel(t.Context())
	windows.mu.Lock()
	windows.copying = cancel
	windows.mu.Unlock()
	alone := config
	alone.Hosts, alone.Paths = config.Hosts[:1], nil
	if _, err = hosts.Up(ctx, alone); !errors.Is(err, context.Canceled) {
		t.Errorf("a run that is cancelled: %v", err)
	}
	if now := windows.programs(); now != before {
		t.Errorf("after a run that is cancelled: %s, before it %s", now, before)
	}
	if len(notes) != 1 || !strings.Contains(notes[0], "host windows runs Windows: the load of its CPUs") {
		t.Errorf("notes %q", notes)
	}
	for _, p := range up.Places() {
		if p.Unprivileged != (p.Name == "windows") {
			t.Errorf("%+v", p)
		}
	}
	// The connection breaks: the server ends the worker, the program stays, and the next worker's start removes it.
	windows.cut()
	must(t, up.Await(t.Context(), true))
	if now := windows.programs(); now == before || strings.Contains(now, "\n") {
		t.Errorf("after the connection broke: %s, before it %s", now, before)
	}
	must(t, up.Close(context.Background()))
	testenv.Eventually(t, 10*time.Second, "the user's folder as it was", windows.programs)

	for name, change := range map[string]func(*hosts.Config){
		"host windows runs Windows, and rps of variant rps needs Linux":                    func(c *hosts.Config) { c.Root = map[string]string{"windows": "rps of variant rps"} },
		"host windows runs Windows, and http of workload page needs Linux":                 func(c *hosts.Config) { c.Linux = map[string]string{"windows": "http of workload page"} },
		"host linux does not run Windows, and latte of workload pp needs it":               func(c *hosts.Config) { c.Windows = map[string]string{"linux": "latte of workload pp"} },
		"host windows runs Windows, and doctor looks at Linux machines":                    func(c *hosts.Config) { c.ReadOnly = true },
		"host windows needs a build of this program for windows/amd64, and none was found": func(c *hosts.Config) { c.Binaries = nil },
	} {
		c := config
		change(&c)
		found, err := hosts.Survey(t.Context(), c)
		must(t, err)
		if missing := fmt.Sprint(found[0].Missing, found[1].Missing); !strings.Contains(missing, name) {
			t.Errorf("%s: found %s", name, missing)
		}
	}
	twins := config
	again := windows.host()
	again.Name = "again"
	twins.Hosts, twins.Paths = []spec.Host{windows.host(), again}, nil
	oneMachine(t, twins, "hosts windows and again are one machine by two names (127.0.0.1 and 127.0.0.1; computer name ")

	config.Root = map[string]string{"windows": "rps of variant rps"}
	if up, err := hosts.Up(t.Context(), config); err == nil || !strings.Contains(err.Error(), "rps of variant rps needs Linux") {
		t.Errorf("a run with rps on Windows: %v", err)
		if err == nil {
			must(t, up.Close(context.Background()))
		}
	}
	testenv.Eventually(t, 10*time.Second, "the user's folder as it was", windows.programs)
}

// oneMachine checks that the dry run and the run refuse two names of one host.
func oneMachine(t *testing.T, config hosts.Config, want string) {
	t.Helper()
	found, err := hosts.Survey(t.Context(), config)
	must(t, err)
	if err := found[1].Missing; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a dry run finds %v", err)
	}
	up, err := hosts.Up(t.Context(), config)
	if err == nil {
		must(t, up.Close(context.Background()))
	}
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a run: %v", err)
	}
}

// TestWindowsTwins checks that two Windows hosts count as one machine if the computer's name and all addresses are the same.
// Clones that were never renamed differ in their addresses.
func TestWindowsTwins(t *testing.T) {
	t.Parallel()
	testenv.NeedProgram(t, "ssh", "apt-get install openssh-client")
	home := t.TempDir()
	must(t, os.Mkdir(filepath.Join(home, ".ssh"), 0o700))
	key := newKey(t, filepath.Join(home, ".ssh", "id_ed25519")).PublicKey()
	w := &world{home: home}
	w.configure(t, "")
	mark := regexp.MustCompile(`echo (slipstream-\w+) begin`)
	one := func(name, computer, address string) spec.Host {
		return w.serve(t, name, "SSH-2.0-OpenSSH_for_Windows_8.1", home, key, func(command string) *exec.Cmd {
			m := mark.FindStringSubmatch(command)
			if m == nil {
				return exec.Command("false") // a command for Linux
			}
			text := strings.ReplaceAll("MARK begin\r\nMARK system Windows AMD64\r\nMARK connection 192.0.2.9 1 192.0.2.1 22\r\nMARK home C:\\Users\\me\r\n"+
				"MARK computer "+computer+"\r\n\r\nEthernet-Adapter:\r\n   IPv4-Adresse: "+address+"\r\nMARK end\r\n", "MARK", m[1])
			return exec.Command("printf", "%s", text)
		}).host()
	}
	a, b := one("a", "PC-7", "10.1.0.4"), one("b", "PC-7", "10.1.0.4")
	for _, c := range []struct {
		other spec.Host
		twins bool
	}{{b, true}, {one("c", "PC-7", "10.1.0.5"), false}, {one("d", "PC-8", "10.1.0.4"), false}} {
		found, err := hosts.Survey(t.Context(), w.config(t, hosts.Config{Hosts: []spec.Host{a, c.other}}))
		must(t, err)
		if twins := found[1].Missing != nil && strings.Contains(found[1].Missing.Error(), " are one machine by two names"); twins != c.twins {
			t.Errorf("host %s: %+v", c.other.Name, found)
		}
	}
}

// TestWindows checks the results of a run with its clients on Linux, and of one with its clients on Windows.
func TestWindows(t *testing.T) {
	t.Parallel()
	w, windows, linux := windowsWorld(t)
	exe, err := windowsProgram()
	must(t, err)
	file := filepath.Join(w.home, "hosts.yaml")
	must(t, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: windows}
spec:
  target:
    hosts:
    - {name: linux, address: 127.0.0.1, port: %d, labels: {os: linux}}
    - {name: windows, address: 127.0.0.1, port: %d, labels: {os: windows}}
  baseline: to-linux
  runs: 2
  workloads:
  - {name: pp, pingpong: {duration: 500ms, warmup: 100ms}}
  - {name: load, underload: {rate: 200, duration: 500ms, warmup: 100ms}}
  variants:
  - {name: to-windows, hosts: {server: {os: windows}}}
  - {name: to-linux, hosts: {server: {os: linux}}}
`, linux.port, windows.port), 0o600))
	slipstream := func(args ...string) string {
		text, err := w.start(t, append([]string{"run", file, "--host-binary", exe}, args...)...).end()
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		return text
	}
	dry := slipstream("--dry-run")
	for _, want := range []string{"Windows AMD64", "host windows runs Windows: the load of its CPUs", "Nothing is missing"} {
		if !strings.Contains(dry, want) {
			t.Errorf("the plan lacks %q\n%s", want, dry)
		}
	}
	text := slipstream("--out", filepath.Join(w.home, "results"))
	trials := w.measured(t)
	if len(trials) != 8 {
		t.Errorf("%d trials, want 2 blocks of 2 variants by 2 workloads\n%s", len(trials), text)
	}
	for _, trial := range trials {
		if trial.Status != record.StatusOK || !served(trial) {
			t.Errorf("%s %s: %s, %+v", trial.Variant, trial.Workload, trial.Error, trial.PerPair[0].Server)
		}
		if server := strings.TrimPrefix(trial.Variant, "to-"); trial.PerPair[0].Server.Place != server {
			t.Errorf("the server of %s is %s", trial.Variant, trial.PerPair[0].Server.Place)
		}
	}
	testenv.Eventually(t, 10*time.Second, "the user's folder as it was", windows.programs)
}
