//go:build linux

package hosts_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/cli"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/testenv"
)

// The program that is copied to hosts is this test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "worker" || os.Args[1] == "accel" || os.Args[1] == "run" || os.Args[1] == "doctor") {
		os.Exit(cli.Main(context.Background(), cli.Process{
			Args: os.Args, Version: "test", Hurry: make(chan struct{}), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		}))
	}
	if len(os.Args) > 1 && os.Args[1] == "proxy" {
		proxy(os.Args[2], os.Args[3], os.Args[4])
		return
	}
	_ = os.Unsetenv("SSH_AUTH_SOCK") // keys of whoever runs the tests log in nowhere
	os.Exit(tests(m))
}

// shared is a folder of all tests.
var shared string

// tests runs the tests. The programs that they start find an ssh that takes its configuration from HOME; the real one takes it
// from the home directory in the user database.
func tests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "slipstream-ssh-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	shared = dir
	for _, name := range []string{"ssh", "sftp"} {
		script := fmt.Sprintf("#!/bin/sh\nexec /usr/bin/%s -F \"$HOME/.ssh/config\" \"$@\"\n", name)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			panic(err)
		}
	}
	_ = os.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return m.Run()
}

// proxy is a proxy command. After it has sent some bytes, or never, it goes silent in both directions or breaks the connection.
func proxy(then, bytes, address string) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var silent atomic.Bool
	go func() {
		buf := make([]byte, 1<<15)
		for {
			n, err := c.Read(buf)
			if silent.Load() {
				select {}
			}
			if _, failed := os.Stdout.Write(buf[:n]); err != nil || failed != nil {
				os.Exit(0)
			}
		}
	}()
	if then == "never" {
		_, _ = io.Copy(c, os.Stdin)
		return
	}
	limit, err := strconv.ParseInt(bytes, 10, 64)
	if err != nil {
		panic(err)
	}
	_, _ = io.CopyN(c, os.Stdin, limit)
	if then == "silent" {
		silent.Store(true)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// through returns the line of an SSH configuration for such a proxy command.
func through(t *testing.T, then string, bytes int64, address string) string {
	self, err := os.Executable()
	must(t, err)
	return fmt.Sprintf("  ProxyCommand %s proxy %s %d %s\n", self, then, bytes, address)
}

// world is a network with a controller, which is the test, and SSH servers.
type world struct {
	home string // of the controller's user
	ns   netns.Handle
	key  ssh.Signer // of the controller's user
}

// node is an SSH server in network, mount and PID namespaces of its own.
type node struct {
	t       testing.TB
	name    string
	address string
	ns      netns.Handle
	// begin starts a command in ns.
	begin   func(*exec.Cmd) error
	dir     string // its /mnt
	hostKey ssh.Signer
	options nodeOptions

	log  *output
	sshd *exec.Cmd
}

// nodeOptions configure how an SSH server differs from a typical one.
type nodeOptions struct {
	// config is added to sshd_config, key to the line of the key that may log in, before it.
	config, key string
	// noexec are folders in which no programs run.
	noexec []string
	// full are folders without room for the program.
	full []string
	// readonly are folders that cannot be written to.
	readonly []string
	// without are programs that are missing.
	without []string
	// shell is the login shell, /bin/sh if empty. startup are commands that it runs first.
	shell, startup string
	// home is the home directory of user, if it is not the usual one.
	home string
	// files are in /home/user, by their names.
	files map[string]string
	// sh is the program that is /bin/sh there, if not the usual one.
	sh string
	// sudoers is the content of that file, pam that of PAM's for the server, which has no PAM if that is empty.
	sudoers, pam string
	// limits are those of control groups that the machine is in, by their controllers: memory and pids.
	limits map[string]int
	// before are commands that run as root before the server starts.
	before string
}

// Folders that could hold the program. Every node has its own.
var folders = []string{"/run", "/tmp", "/var/tmp", "/home", "/dev/shm"}

// output keeps what a process logs.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newKey(t testing.TB, file string) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	must(t, err)
	writeKey(t, key, file)
	signer, err := ssh.NewSignerFromKey(key)
	must(t, err)
	return signer
}

func writeKey(t testing.TB, key crypto.PrivateKey, file string) {
	t.Helper()
	block, err := ssh.MarshalPrivateKey(key, "")
	must(t, err)
	must(t, os.WriteFile(file, pem.EncodeToMemory(block), 0o600))
}

// newWorld makes a network with nodes a, b and so on, whose keys the controller
// knows.
func newWorld(t *testing.T, all ...nodeOptions) (*world, []*node) {
	t.Helper()
	w := newController(t)
	var nodes []*node
	for i, o := range all {
		ns := namespace(t)
		n := w.join(t, i, "eth0", ns, func(cmd *exec.Cmd) error { return netns.Do(ns, cmd.Start) }, o)
		must(t, netns.Do(ns, func() error { return addAddress("eth0", fmt.Sprintf("10.32.0.%d/24", i+1)) }))
		nodes = append(nodes, n)
	}
	w.know(t, nodes...)
	return w, nodes
}

// newController makes a network with a controller alone.
func newController(t testing.TB) *world {
	t.Helper()
	testenv.NeedRoot(t)
	w := &world{home: t.TempDir()}
	must(t, os.Mkdir(filepath.Join(w.home, ".ssh"), 0o700))
	w.key = newKey(t, filepath.Join(w.home, ".ssh", "id_ed25519"))
	w.configure(t, "")
	w.ns = namespace(t)
	must(t, netns.Do(w.ns, func() error {
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}); err != nil {
			return err
		}
		return addAddress("br0", "10.9.0.254/24")
	}))
	return w
}

// join connects a network namespace to the controller by a device, and starts an SSH server in it.
func (w *world) join(t testing.TB, i int, device string, ns netns.Handle, begin func(*exec.Cmd) error, o nodeOptions) *node {
	t.Helper()
	name := string(rune('a' + i))
	n := &node{t: t, name: name, address: fmt.Sprintf("10.9.0.%d", i+1), ns: ns, begin: begin, dir: t.TempDir(), options: o}
	must(t, netns.Do(w.ns, func() error {
		bridge, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		port := netlink.LinkAttrs{Name: "to-" + name, MasterIndex: bridge.Attrs().Index}
		veth := &netlink.Veth{LinkAttrs: port, PeerName: device, PeerNamespace: netlink.NsFd(ns)}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return netlink.LinkSetUp(veth)
	}))
	must(t, netns.Do(ns, func() error { return addAddress(device, n.address+"/24") }))
	n.hostKey = newKey(t, filepath.Join(n.dir, "host_key"))
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader) // that nobody knows
	must(t, err)
	writeKey(t, other, filepath.Join(n.dir, "other_key"))
	n.start(w)
	return n
}

func namespace(t testing.TB) netns.Handle {
	t.Helper()
	ns, err := netns.New()
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	must(t, netns.Do(ns, func() error { return netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}) }))
	return ns
}

func addAddress(link string, addresses ...string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(l)
}

// know writes the keys of nodes to known_hosts.
func (w *world) know(t testing.TB, nodes ...*node) {
	t.Helper()
	var text string
	for _, n := range nodes {
		text += knownhosts.Line([]string{n.address}, n.hostKey.PublicKey()) + "\n"
	}
	must(t, os.WriteFile(filepath.Join(w.home, ".ssh", "known_hosts"), []byte(text), 0o600))
}

// start starts the SSH server, and waits until it answers.
func (n *node) start(w *world) {
	n.t.Helper()
	write := func(name, text string) { must(n.t, os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600)) }
	write("sshd_config", "ListenAddress "+n.address+"\nHostKey /mnt/other_key\nHostKey /mnt/host_key\nAuthorizedKeysFile /mnt/authorized_keys\nStrictModes no\nUsePAM "+map[bool]string{true: "yes", false: "no"}[n.options.pam != ""]+"\n"+
		"PasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n"+n.options.config)
	write("authorized_keys", n.options.key+string(ssh.MarshalAuthorizedKey(w.key.PublicKey())))
	shell := cmp.Or(n.options.shell, "/bin/sh")
	if n.options.startup != "" {
		shell = "/mnt/shell"
	}
	write("shell", "#!/bin/sh\n"+n.options.startup+"\nexec /bin/sh \"$@\"\n")
	write("passwd", "root:x:0:0::/home/root:"+shell+"\nuser:x:12345:12345::"+cmp.Or(n.options.home, "/home/user")+":"+shell+"\nsshd:x:100:65534::/run/sshd:/bin/false\nnobody:x:65534:65534::/:/bin/false\n")
	write("shadow", "root:*:19000::::::\nuser:*:19000::::::\n")
	write("sudoers", n.options.sudoers)
	write("pam", n.options.pam)
	script := n.grouped() + "set -e; umask 022; mount --bind " + n.dir + " /mnt; chmod 755 /mnt /mnt/shell; chmod 644 /mnt/passwd /mnt/authorized_keys; chmod 440 /mnt/sudoers;\n"
	for _, folder := range folders {
		flags := "mode=1777"
		if slices.Contains(n.options.noexec, folder) {
			flags += ",noexec"
		}
		if slices.Contains(n.options.full, folder) {
			flags += ",size=1m"
		}
		script += "mount -t tmpfs -o " + flags + " tmpfs " + folder + "\n"
	}
	for _, program := range n.options.without { // what is not executable is not found
		script += "if [ -e /usr/bin/" + program + " ]; then mount --bind /dev/null /usr/bin/" + program + "; fi\n"
	}
	script += `mkdir -p /run/sshd /home/root /home/user; chmod 755 /run /run/sshd; chown 12345:12345 /home/user
mount --bind /mnt/passwd /etc/passwd; mount --bind /mnt/shadow /etc/shadow
if [ -e /etc/sudoers ]; then mount --bind /mnt/sudoers /etc/sudoers; mount -t tmpfs tmpfs /etc/sudoers.d; fi
mkdir -p /mnt/cgroup; mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount --rbind /mnt/cgroup /sys/fs/cgroup
`
	if n.options.pam != "" {
		script += "mount --bind /mnt/pam /etc/pam.d/sshd\n"
	}
	for name, text := range n.options.files {
		copied := filepath.Base(name)
		write(copied, text)
		script += "mkdir -p /home/user/" + filepath.Dir(name) + "; cp /mnt/" + copied + " /home/user/" + name + "; chown -R 12345 /home/user\n"
	}
	for _, folder := range n.options.readonly {
		script += "mount -o remount,ro " + folder + "\n"
	}
	if n.options.sh != "" {
		script += "mount --bind " + n.options.sh + " /bin/sh\n"
	}
	script += n.options.before + "\nexec /usr/sbin/sshd -D -e -f /mnt/sshd_config\n"
	n.log = new(output)
	n.sshd = exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script)
	n.sshd.Stderr, n.sshd.Stdout = n.log, n.log
	n.sshd.WaitDelay = time.Second
	must(n.t, n.begin(n.sshd))
	n.t.Cleanup(n.stop)
	testenv.Eventually(n.t, 15*time.Second, "the SSH server of "+n.name, func() string {
		c, err := w.dial(context.Background(), "tcp", n.address+":22")
		if err != nil {
			return err.Error() + " " + n.log.String()
		}
		c.Close()
		return ""
	})
}

// grouped returns commands by which a shell enters the control groups of the machine.
func (n *node) grouped() (commands string) {
	for controller, most := range n.options.limits {
		root, limit := filepath.Join("/sys/fs/cgroup", controller), map[string]string{"memory": "memory.limit_in_bytes", "pids": "pids.max"}[controller]
		if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil { // version 2
			root, limit = "/sys/fs/cgroup", controller+".max"
		}
		dir, err := os.MkdirTemp(root, "slipstream-test-")
		must(n.t, err)
		n.t.Cleanup(func() {
			// Its last process may still be exiting.
			testenv.Eventually(n.t, 15*time.Second, "remove a control group", func() string {
				if err := os.Remove(dir); err != nil {
					return err.Error()
				}
				return ""
			})
		})
		must(n.t, os.WriteFile(filepath.Join(dir, limit), []byte(strconv.Itoa(most)), 0))
		commands += "echo $$ >" + dir + "/cgroup.procs\n"
	}
	return commands
}

// stop kills all processes of the machine at the same time, like a power cut.
func (n *node) stop() {
	if n.sshd != nil {
		_ = n.sshd.Process.Kill()
		_ = n.sshd.Wait()
		n.sshd = nil
	}
}

// dial connects from the controller's namespace.
func (w *world) dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = netns.Do(w.ns, func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// init returns the PID of the machine's first process, from which all others descend.
func (n *node) init() string {
	n.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", n.sshd.Process.Pid))
	must(n.t, err)
	return strings.Fields(string(data))[0]
}

func (n *node) read(name string) string {
	n.t.Helper()
	data, err := os.ReadFile(filepath.Join("/proc", n.init(), "root", name))
	must(n.t, err)
	return strings.TrimSpace(string(data))
}

// left returns what a run has left on the node: files, and processes other than the SSH server.
func (n *node) left() string {
	var all []string
	root := filepath.Join("/proc", n.init(), "root")
	for _, folder := range folders {
		err := filepath.WalkDir(filepath.Join(root, folder), func(name string, d os.DirEntry, err error) error {
			if _, ours := n.options.files[strings.TrimPrefix(name, root+"/home/user/")]; err == nil && !d.IsDir() && !ours {
				all = append(all, strings.TrimPrefix(name, root))
			}
			return nil
		})
		must(n.t, err)
	}
	processes, err := filepath.Glob(filepath.Join(root, "proc/[0-9]*/cmdline"))
	must(n.t, err)
	for _, name := range processes {
		if line, err := os.ReadFile(name); err == nil && filepath.Base(filepath.Dir(name)) != "1" {
			all = append(all, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return strings.Join(all, "\n")
}

// clean waits until nothing is left on the nodes.
func clean(t *testing.T, nodes []*node) {
	t.Helper()
	for _, n := range nodes {
		testenv.Eventually(t, 15*time.Second, "host "+n.name+" as it was", n.left)
	}
}

// in runs a command in the network namespace of a node.
func (n *node) in(argv ...string) {
	n.t.Helper()
	must(n.t, netns.Do(n.ns, func() error {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", argv, err, out)
		}
		return nil
	}))
}

// disconnect ends the SSH server's processes for connections.
func (n *node) disconnect() {
	n.kill(func(line string) bool { return strings.HasPrefix(line, "sshd: ") })
}

// kill kills the processes whose command lines match.
func (n *node) kill(which func(line string) bool) {
	n.t.Helper()
	machine, err := os.Readlink(filepath.Join("/proc", n.init(), "ns/pid"))
	must(n.t, err)
	processes, err := filepath.Glob("/proc/[0-9]*")
	must(n.t, err)
	for _, dir := range processes {
		of, _ := os.Readlink(filepath.Join(dir, "ns/pid"))
		line, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if of == machine && which(strings.ReplaceAll(string(line), "\x00", " ")) && filepath.Base(dir) != n.init() {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// configure writes the SSH configuration of the controller's user.
func (w *world) configure(t testing.TB, text string) {
	t.Helper()
	w.writeConfig(t, filepath.Join(w.home, ".ssh", "config"), text)
}

func (w *world) writeConfig(t testing.TB, file, text string) {
	t.Helper()
	common := strings.ReplaceAll("Host *\n  IdentityFile DIR/id_ed25519\n  UserKnownHostsFile DIR/known_hosts\n  GlobalKnownHostsFile none\n", "DIR", filepath.Join(w.home, ".ssh"))
	must(t, os.WriteFile(file, []byte(text+common), 0o600))
}

// config makes a run connect from the controller's namespace, as its user.
func (w *world) config(t testing.TB, c hosts.Config) hosts.Config {
	return w.by(t, c, filepath.Join(w.home, ".ssh", "config"))
}

// by makes a run use an SSH configuration file.
func (w *world) by(t testing.TB, c hosts.Config, file string) hosts.Config {
	c.Note = func(text string) { t.Log(text) }
	return c.Begin(func(cmd *exec.Cmd) error {
		cmd.Path, cmd.Args = filepath.Join("/usr/bin", cmd.Args[0]), append([]string{cmd.Args[0], "-F", file}, cmd.Args[1:]...)
		return w.do(cmd.Start)
	})
}

// do calls f in the controller's namespace.
func (w *world) do(f func() error) error {
	if w.key == nil { // the hosts are on this machine's own network
		return f()
	}
	return netns.Do(w.ns, f)
}
