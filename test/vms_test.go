package test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/ssh"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/azuretest"
	azurecli "slipstream.dev/internal/azure/cli"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// azureSocket names the socket of the fake subscription to a process that stands in for slipstream-azure.
const azureSocket = "SLIPSTREAM_TEST_AZURE"

// apiName carries the name of the SDK's call, by which the fake servers choose an answer.
const apiName = "Test-Api-Name"

// standInForAzure is slipstream-azure, with the subscription of the test that has started it.
func standInForAzure(socket string) int {
	forward := forwarder{&http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	return azurecli.Main(context.Background(), azurecli.Process{
		Args: os.Args, Version: "test", Out: os.Stdout, Err: os.Stderr,
		Azure: func(azure.Options) (*azure.Cloud, error) {
			o := azuretest.New().Options()
			o.Client.Transport = forward
			return azure.Open(o)
		},
	})
}

// forwarder sends requests to the test.
type forwarder struct{ by *http.Transport }

func (f forwarder) Do(r *http.Request) (*http.Response, error) {
	name, _ := r.Context().Value(runtime.CtxAPINameKey{}).(string)
	r.Header.Set(apiName, name)
	to := *r.URL
	to.Scheme = "http" // the socket is the connection
	sent := r.Clone(r.Context())
	sent.URL = &to
	return f.by.RoundTrip(sent)
}

// serveAzure answers the requests of such processes.
func serveAzure(t *testing.T, cloud *azuretest.Cloud, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	must(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = r.WithContext(context.WithValue(r.Context(), runtime.CtxAPINameKey{}, r.Header.Get(apiName)))
		r.URL.Scheme, r.URL.Host, r.RequestURI = "https", r.Host, ""
		answer, err := cloud.Do(r)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer answer.Body.Close()
		for key, values := range answer.Header {
			w.Header()[key] = values
		}
		w.WriteHeader(answer.StatusCode)
		_, _ = io.Copy(w, answer.Body)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
}

// vm stands in for a virtual machine: a network namespace with an SSH server. With Accelerated Networking eth0 has a device
// below it, as with a virtual function.
type vm struct {
	t             *testing.T
	name, address string
	dir           string
	ns            netns.Handle
	controller    netns.Handle
	accelerated   bool
	sshd          *exec.Cmd
	log           strings.Builder
}

func (v *vm) ip(lines string) {
	v.t.Helper()
	must(v.t, netns.Do(v.ns, func() error {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(lines)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", lines, err, out)
		}
		return nil
	}))
}

// start starts the machine, and waits until its SSH server answers.
func (v *vm) start(accelerated bool) {
	v.t.Helper()
	switch {
	case accelerated && !v.accelerated:
		v.ip("link set eth0 down\nlink set eth0 name vf0\nlink add link vf0 name eth0 type macvlan mode bridge\nlink set vf0 up\n")
	case !accelerated && v.accelerated:
		v.ip("link del eth0\nlink set vf0 down\nlink set vf0 name eth0\n")
	}
	v.accelerated = accelerated
	v.ip("addr flush dev eth0\naddr add " + v.address + "/24 dev eth0\nlink set eth0 up\nlink set lo up\n")
	v.sshd = exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", `
		for folder in /run /tmp /var/tmp /dev/shm; do mount -t tmpfs tmpfs $folder; done
		mkdir /run/sshd; mount -t proc proc /proc; mount -t sysfs sysfs /sys
		exec /usr/sbin/sshd -D -e -f "$1"`, "sh", filepath.Join(v.dir, v.name+".conf"))
	v.sshd.Stderr = &v.log
	v.sshd.WaitDelay = time.Second
	must(v.t, netns.Do(v.ns, v.sshd.Start))
	testenv.Eventually(v.t, 15*time.Second, "the SSH server of "+v.name, func() string {
		err := netns.Do(v.controller, func() error {
			c, err := net.DialTimeout("tcp", v.address+":22", time.Second)
			if err == nil {
				c.Close()
			}
			return err
		})
		if err != nil {
			return err.Error()
		}
		return ""
	})
}

func (v *vm) stop() {
	if v.sshd != nil {
		_ = v.sshd.Process.Kill()
		_ = v.sshd.Wait()
		v.sshd = nil
	}
}

// newVMs starts machines in a network of their own. home has the SSH configuration and keys, and bin the programs ssh and
// slipstream, which a run in the network namespace controller finds in PATH.
func newVMs(t *testing.T, names ...string) (vms map[string]*vm, controller netns.Handle, bin string) {
	t.Helper()
	controller, err := netns.New()
	must(t, err)
	t.Cleanup(func() { controller.Close() })
	must(t, netns.Do(controller, func() error {
		return exec.Command("sh", "-ec", "ip link set lo up; ip link add br0 type bridge; ip addr add 10.9.0.254/24 dev br0; ip link set br0 up").Run()
	}))
	dir, err := os.MkdirTemp("/opt", "slipstream-vms") // the machines have a /tmp of their own
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	public := newKey(t, filepath.Join(dir, "key"))
	write := func(name, text string, mode os.FileMode) {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), mode))
	}
	write("authorized_keys", string(ssh.MarshalAuthorizedKey(public)), 0o600)
	vms = map[string]*vm{}
	var config, known string
	for i, name := range names {
		v := &vm{t: t, name: name, address: fmt.Sprintf("10.9.0.%d", i+1), dir: dir, controller: controller}
		v.ns, err = netns.New()
		must(t, err)
		t.Cleanup(func() { v.ns.Close() })
		must(t, netns.Do(controller, func() error {
			bridge, err := netlink.LinkByName("br0")
			if err != nil {
				return err
			}
			port := netlink.LinkAttrs{Name: "to-" + name, MasterIndex: bridge.Attrs().Index, Flags: net.FlagUp}
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: port, PeerName: "eth0", PeerNamespace: netlink.NsFd(v.ns)})
		}))
		host := newKey(t, filepath.Join(dir, name+".key"))
		write(name+".conf", fmt.Sprintf("ListenAddress %s\nHostKey %s/%s.key\nAuthorizedKeysFile %[2]s/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n", v.address, dir, name), 0o600)
		config += fmt.Sprintf("Host %s\n  HostName %s\n", name, v.address)
		known += v.address + " " + string(ssh.MarshalAuthorizedKey(host))
		v.start(false)
		t.Cleanup(v.stop)
		vms[name] = v
	}
	write("known_hosts", known, 0o600)
	write("config", config+fmt.Sprintf("Host *\n  User root\n  IdentityFile %s/key\n  UserKnownHostsFile %[1]s/known_hosts\n", dir), 0o600)
	bin = filepath.Join(dir, "bin")
	must(t, os.Mkdir(bin, 0o755))
	self, err := os.Executable()
	must(t, err)
	write("bin/ssh", fmt.Sprintf("#!/bin/sh\nexec /usr/bin/ssh -F %s/config \"$@\"\n", dir), 0o755)
	write("bin/slipstream", fmt.Sprintf("#!/bin/sh\n[ \"$1\" = azure ] || exit 2\nshift\nexport %s=%s/azure XDG_STATE_HOME=%[2]s/state\nexec %s \"$@\"\n", azureSocket, dir, self), 0o755)
	return vms, controller, bin
}

func newKey(t *testing.T, file string) ssh.PublicKey {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	block, err := ssh.MarshalPrivateKey(private, "")
	must(t, err)
	must(t, os.WriteFile(file, pem.EncodeToMemory(block), 0o600))
	key, err := ssh.NewPublicKey(public)
	must(t, err)
	return key
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestANVMs runs the preset an-vms: its own commands switch Accelerated Networking of two machines, which they restart, by
// slipstream azure. All trials succeed, those of the variant on with Accelerated Networking and those of off without, and at
// the end the machines are as they were. Before that, a run without the resource group says what to set, and changes nothing.
func TestANVMs(t *testing.T) {
	t.Parallel() // most of the time it waits
	testenv.NeedRoot(t)
	for _, tool := range []string{"/usr/sbin/sshd", "ip", "iperf3", "qperf"} {
		testenv.NeedProgram(t, tool, "make test-deps")
	}
	vms, controller, bin := newVMs(t, "vm1", "vm2")
	cloud := azuretest.New()
	cloud.Strict = true
	for name := range vms {
		cloud.AddVM("net", name, "Standard_D4s_v5", false)
	}
	restarts := 0
	cloud.Fault = func(_ int, r *http.Request) azuretest.Fault {
		parts := strings.Split(r.URL.Path, "/")
		v := vms[parts[len(parts)-2]]
		switch verb := parts[len(parts)-1]; {
		case v == nil || r.Method != http.MethodPost:
		case verb == "deallocate":
			v.stop()
		case verb == "start":
			restarts++
			cloud.Lock()
			wanted := *cloud.NICs["net/"+v.name+"-nic0"].Properties.EnableAcceleratedNetworking
			cloud.Unlock()
			v.start(wanted)
		}
		return azuretest.None
	}
	serveAzure(t, cloud, filepath.Join(filepath.Dir(bin), "azure"))

	out := t.TempDir()
	run := func(args ...string) (text string, code int) {
		cmd := exec.Command(program, append([]string{"run", "an-vms", "--on", "hosts:vm1,vm2", "--out", out, "--runs", "2", "--duration", "1s",
			"--set", "spec.trialsPerPeriod=1", "--set", "spec.variants.on.switch.settle=100ms"}, args...)...)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "SSH_AUTH_SOCK=", "AZURE_SUBSCRIPTION_ID="+azuretest.Subscription)
		var all strings.Builder
		cmd.Stdout, cmd.Stderr = &all, &all
		must(t, netns.Do(controller, cmd.Start))
		if err := cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
			t.Fatal(err)
		}
		return all.String(), cmd.ProcessState.ExitCode()
	}
	const unset = "{group}: --set spec.parameters.group=VALUE"
	if text, code := run("--dry-run"); code != 2 || !strings.Contains(text, unset) || !strings.Contains(text, "enable {group}/vm1 --yes") {
		t.Errorf("dry run: exit code %d\n%s", code, text)
	}
	if text, code := run(); code != 2 || !strings.Contains(text, unset) || cloud.Requests() > 0 {
		t.Errorf("without the group: exit code %d, %d requests\n%s", code, cloud.Requests(), text)
	}
	text, code := run("--set", "spec.parameters.group=net")
	if code != 0 {
		t.Fatalf("exit code %d\n%s", code, text)
	}
	found, _ := filepath.Glob(filepath.Join(out, "an-vms-*"))
	if len(found) != 1 {
		t.Fatalf("results: %v", found)
	}
	dir, err := record.Open(found[0])
	must(t, err)
	count := map[string]int{}
	for _, tr := range measured(t, dir) {
		if tr.Status != record.StatusOK {
			t.Errorf("%s %s: %s", tr.Variant, tr.Workload, tr.Error)
		}
		count[tr.Variant+" "+tr.Workload]++
	}
	for _, cell := range []string{"off iperf3", "off tcp_lat", "on iperf3", "on tcp_lat"} {
		if count[cell] != 2 {
			t.Errorf("%d trials of %s, want 2: %v", count[cell], cell, count)
		}
	}
	// Periods are off, on, on, off or on, off, off, on: each of the two machines restarts at every change, and twice between
	// two of the same.
	if restarts < 8 || restarts%4 != 0 {
		t.Errorf("%d restarts", restarts)
	}
	for name, v := range vms {
		if *cloud.NICs["net/"+name+"-nic0"].Properties.EnableAcceleratedNetworking || v.accelerated {
			t.Errorf("%s still has Accelerated Networking", name)
		}
	}
}

// TestHostPresets runs the presets for hosts, shortened, through a firewall that lets SSH and the ports of their workloads through, if
// they have any. All trials succeed, on the hosts of their variants.
func TestHostPresets(t *testing.T) {
	t.Parallel() // most of the time it waits
	testenv.NeedRoot(t)
	for _, tool := range []string{"/usr/sbin/sshd", "ip", "nft", "qperf", "sockperf"} {
		testenv.NeedProgram(t, tool, "make test-deps")
	}
	for _, c := range []struct {
		preset string
		hosts  int
		closed bool
		trials int
		// ends are the hosts of each variant: the client's and the server's.
		ends map[string]string
	}{
		{"an-linux", 4, false, 12, map[string]string{"off": "vm1 vm2", "on": "vm3 vm4"}},
		{"instances-hosts", 4, true, 4, map[string]string{"small": "vm1 vm2", "large": "vm3 vm4"}},
		{"placement", 4, true, 4, map[string]string{"apart": "vm1 vm2", "group": "vm3 vm4"}},
		{"zones", 3, true, 4, map[string]string{"within": "vm1 vm2", "between": "vm1 vm3"}},
	} {
		t.Run(c.preset, func(t *testing.T) {
			t.Parallel()
			names := []string{"vm1", "vm2", "vm3", "vm4"}[:c.hosts]
			vms, controller, bin := newVMs(t, names...)
			for _, v := range vms {
				rules := "flush ruleset\n"
				if c.closed {
					rules += `table ip host {
	chain in {
		type filter hook input priority 0; policy drop;
		ct state established,related accept
		iif lo accept
		tcp dport { 22, 4000, 4001 } accept
	}
}
`
				}
				must(t, netns.Do(v.ns, func() error {
					cmd := exec.Command("nft", "-f", "-")
					cmd.Stdin = strings.NewReader(rules)
					text, err := cmd.CombinedOutput()
					if err != nil {
						err = fmt.Errorf("%w: %s", err, text)
					}
					return err
				}))
			}
			out := t.TempDir()
			cmd := exec.Command(program, "run", c.preset, "--on", "hosts:"+strings.Join(names, ","), "--out", out, "--runs", "1", "--duration", "1s")
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "SSH_AUTH_SOCK=")
			var all strings.Builder
			cmd.Stdout, cmd.Stderr = &all, &all
			must(t, netns.Do(controller, cmd.Start))
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v\n%s", err, all.String())
			}
			found, _ := filepath.Glob(filepath.Join(out, c.preset+"-*"))
			if len(found) != 1 {
				t.Fatalf("results: %v", found)
			}
			dir, err := record.Open(found[0])
			must(t, err)
			trials := measured(t, dir)
			for _, tr := range trials {
				switch ends := tr.PerPair[0].Client.Place + " " + tr.PerPair[0].Server.Place; {
				case tr.Status != record.StatusOK:
					t.Errorf("%s %s: %s", tr.Variant, tr.Workload, tr.Error)
				case ends != c.ends[tr.Variant]:
					t.Errorf("%s is on %s, want %s", tr.Variant, ends, c.ends[tr.Variant])
				}
			}
			if len(trials) != c.trials {
				t.Errorf("%d trials, want %d", len(trials), c.trials)
			}
		})
	}
}
