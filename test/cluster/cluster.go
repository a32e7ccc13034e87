//go:build linux

// Package cluster runs a real Kubernetes cluster on this machine, for tests and
// to play with. kube-apiserver, controller manager, scheduler and etcd share
// one network namespace. Each node has its own namespace of each kind, in which
// containerd, kubelet, kube-proxy and flannel run. In the machine's own
// namespaces there is only a port of 127.0.0.1 that leads to the API server.
// Nothing is downloaded: programs are built from Go modules (Parts) or come
// from Debian, and images come from archives.
//
// The package does not depend on slipstream. The files run_test.go,
// agent_test.go and chart_test.go beside it test slipstream in a cluster.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// The networks are the same in every cluster, because each has its own
// namespaces.
const (
	controlAddr = "10.99.0.1"
	// nodeAddr is the address of node n, whose last byte is 10 + n.
	nodeAddr          = "10.99.0.%d"
	nodePrefix        = 24
	podNetwork        = "10.244.0.0/16"
	serviceNetwork    = "10.96.0.0/16"
	kubernetesService = "10.96.0.1"
	apiPort           = "6443"
)

// Values of Config.CNI and Config.Proxy.
const (
	Flannel       = "flannel"
	FlannelDirect = "flannel-direct"
	FlannelHostGW = "flannel-host-gw"
	Routed        = "routed"
	Cilium        = "cilium"
	CiliumVXLAN   = "cilium-vxlan"
	CiliumProxied = "cilium-kube-proxy"
	CiliumChained = "cilium-chained"
	NFTables      = "nftables"
	IPTables      = "iptables"
)

// Config describes a cluster. A zero field means its default.
type Config struct {
	// Nodes is the number of nodes, 2 to 5; the default is 2. They are named
	// node0, node1 and so on.
	Nodes int
	// Proxy is the mode of kube-proxy, NFTables or IPTables; the default is
	// NFTables. Cilium and CiliumVXLAN replace kube-proxy.
	Proxy string
	// CNI selects how pods are connected; the default is Flannel, with its backend
	// vxlan. FlannelDirect has the same with DirectRouting, and FlannelHostGW has
	// the backend host-gw: on this wire, which is one subnet, both route. Routed is a
	// VXLAN in the shape of Calico's: without a bridge, and with a route for each
	// pod. make peers builds what the others take. Cilium routes between the nodes,
	// CiliumVXLAN encapsulates, CiliumProxied routes and leaves services to kube-proxy, and
	// CiliumChained adds its programs to the pods of flannel.
	CNI string
	// Images are OCI or Docker archives to import on every node.
	Images []string
	// Log gets progress messages, line by line. It may be nil.
	Log io.Writer
}

func (c *Config) complete() error {
	if c.Nodes == 0 {
		c.Nodes = 2
	}
	if c.CNI == "" {
		c.CNI = Flannel
	}
	if c.Proxy == "" && !c.replacesProxy() {
		c.Proxy = NFTables
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	if c.Nodes < 2 || c.Nodes > 5 {
		return fmt.Errorf("nodes of a cluster must be 2 to 5, are %d", c.Nodes)
	}
	if kinds := []string{Flannel, FlannelDirect, FlannelHostGW, Routed, Cilium, CiliumVXLAN, CiliumProxied, CiliumChained}; !slices.Contains(kinds, c.CNI) {
		return fmt.Errorf("CNI must be one of %s, is %q", strings.Join(kinds, ", "), c.CNI)
	}
	if c.replacesProxy() && c.Proxy != "" {
		return fmt.Errorf("there is no kube-proxy with CNI %s: its mode must be empty, is %q", c.CNI, c.Proxy)
	}
	if !c.replacesProxy() && c.Proxy != NFTables && c.Proxy != IPTables {
		return fmt.Errorf("mode of kube-proxy must be %s or %s, is %q", NFTables, IPTables, c.Proxy)
	}
	return nil
}

// Cluster is a running cluster.
type Cluster struct {
	config Config
	parts  string
	// peers has Cilium's programs, and ciliumOptions what its chart makes of the mode.
	peers         string
	ciliumOptions map[string]string
	// dir is the cluster's folder, whose last element is the cluster's ID. owner
	// locks it: the process that holds the lock owns the cluster.
	dir   string
	owner *os.File
	// processes is the control group of every process that the cluster starts.
	processes  *os.File
	running    sync.WaitGroup
	began      time.Time
	authority  *authority
	control    *exec.Cmd // the first process of the control plane's namespace
	forward    *forwarder
	kubeconfig string
	client     kubernetes.Interface
	nodes      []*Node
}

// upTime bounds how long a cluster takes to start once its parts are built.
const upTime = 5 * time.Minute

// Up starts a cluster, and returns when all nodes are Ready and the default
// service account exists. It first removes what processes that died have left
// (Sweep). If it fails, it takes down what it has created.
func Up(ctx context.Context, config Config) (*Cluster, error) {
	if err := config.complete(); err != nil {
		return nil, err
	}
	if err := probe(config); err != nil {
		return nil, err
	}
	if err := Sweep(ctx); err != nil {
		return nil, err
	}
	dir, err := buildParts(ctx, parts, config.Log)
	if err != nil {
		return nil, err
	}
	c := &Cluster{config: config, parts: dir, began: time.Now()}
	if config.cilium() {
		if c.peers, err = findPeers(ctx); err != nil {
			return nil, err
		}
	}
	if c.dir, c.owner, err = newState(ctx); err != nil {
		return nil, err
	}
	making, cancel := context.WithTimeoutCause(ctx, upTime, fmt.Errorf("it is not up after %s", upTime))
	defer cancel()
	if err := c.make(making); err != nil {
		return nil, errors.Join(fmt.Errorf("bring up a cluster: %w", err), c.Down(context.WithoutCancel(ctx)))
	}
	c.log("up: KUBECONFIG=%s", c.kubeconfig)
	return c, nil
}

// probe returns an error that names what this machine lacks.
func probe(config Config) error {
	if os.Geteuid() != 0 {
		return errors.New("a cluster is made of namespaces, for which it takes root: run it as root")
	}
	programs := []string{"containerd", "runc", "ctr", "nsenter", "iptables", filepath.Join(cniDir, "bridge")}
	if config.Proxy == NFTables {
		programs = append(programs, "nft")
	}
	if config.cilium() {
		programs = append(programs, filepath.Join(clangDir, "clang"), "ipset")
	}
	var missing []string
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("missing here: %s: install what a cluster needs (make deps)", strings.Join(missing, ", "))
	}
	return nil
}

func (c *Cluster) log(format string, args ...any) {
	fmt.Fprintf(c.config.Log, "%5.1f s  %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

// make builds the cluster. It fails as soon as one of the cluster's processes
// ends.
func (c *Cluster) make(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var err error
	if c.processes, err = makeCgroups(filepath.Base(c.dir)); err != nil {
		return err
	}
	for _, dir := range []string{"logs", "etcd"} {
		if err := os.Mkdir(filepath.Join(c.dir, dir), 0o755); err != nil {
			return fmt.Errorf("make folder of the cluster: %w", err)
		}
	}
	if c.authority, err = newAuthority(filepath.Join(c.dir, "pki")); err != nil {
		return err
	}
	if err := c.linkPlugins(); err != nil {
		return err
	}
	if err := c.startWire(); err != nil {
		return err
	}
	ready := make(chan struct{}) // closed when the API server answers
	g, together := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := c.startControlPlane(together, fail); err != nil {
			return err
		}
		c.log("the API server answers")
		close(ready)
		return nil
	})
	for i := range c.config.Nodes {
		name := fmt.Sprintf("node%d", i)
		n := &Node{c: c, name: name, index: i, dir: filepath.Join(c.dir, name)}
		c.nodes = append(c.nodes, n)
		g.Go(func() error {
			if err := n.start(together, fail, ready); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			c.log("%s has its network", name)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause // the process that ended first, not the step that noticed
		}
		return err
	}
	if c.config.CNI == Routed {
		if err := c.route(ctx); err != nil {
			return err
		}
	}
	for _, n := range c.nodes {
		if err := n.awaitReady(ctx); err != nil {
			return fmt.Errorf("wait for %s to be Ready: %w", n.name, err)
		}
	}
	c.log("all nodes are Ready")
	return c.awaitServiceAccount(ctx)
}

// Join adds a node to a cluster whose CNI is Flannel, and returns when it is Ready.
func (c *Cluster) Join(ctx context.Context, name string) (*Node, error) {
	if c.config.CNI != Flannel {
		return nil, fmt.Errorf("nodes join clusters of CNI %s only, not %s", Flannel, c.config.CNI)
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	n := &Node{c: c, name: name, dir: filepath.Join(c.dir, name)}
	for _, other := range c.nodes {
		n.index = max(n.index, other.index+1)
	}
	api := make(chan struct{})
	close(api) // the API server answers already
	err := n.start(ctx, fail, api)
	if err == nil {
		err = n.awaitReady(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, cmp.Or(context.Cause(ctx), err))
	}
	c.nodes = append(c.nodes, n)
	c.log("%s has joined", name)
	return n, nil
}

// Leave kills a node and deletes it from the API, as a cloud does when it deletes a machine.
func (n *Node) Leave(ctx context.Context) error {
	if err := n.Kill(); err != nil {
		return err
	}
	if err := n.c.client.CoreV1().Nodes().Delete(ctx, n.name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("remove %s: %w", n.name, err)
	}
	n.c.nodes = slices.DeleteFunc(n.c.nodes, func(other *Node) bool { return other == n })
	if err := removeCgroups(ctx, filepath.Join(cgroupName(filepath.Base(n.c.dir)), n.name)); err != nil {
		return err
	}
	if err := os.RemoveAll(n.dir); err != nil {
		return fmt.Errorf("remove the folder of %s: %w", n.name, err)
	}
	n.c.log("%s has left", n.name)
	return nil
}

// daemon starts a command in the cluster's control group. Its output goes to a
// file with its name. When the command ends, daemon calls fail.
func (c *Cluster) daemon(fail context.CancelCauseFunc, name string, cmd *exec.Cmd) error {
	path := filepath.Join(c.dir, "logs", name)
	log, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("make log of %s: %w", name, err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = frugal()
	c.adopt(cmd)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	c.running.Go(func() {
		err := cmd.Wait()
		fail(fmt.Errorf("%s ended (%w): %s", name, err, lastLines(path)))
	})
	return nil
}

// frugal is the environment of programs whose own CPU time nobody measures.
// Most are Go programs that run for minutes with a small heap, so that by
// default they spend much of their CPU time on garbage collection.
func frugal() []string { return append(os.Environ(), "GOGC=400") }

// adopt makes a command start in the cluster's control group, and in a new
// process group, so that an interrupt of this process does not reach it.
func (c *Cluster) adopt(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.UseCgroupFD = true
	cmd.SysProcAttr.CgroupFD = int(c.processes.Fd())
}

func lastLines(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// first starts the process that keeps namespaces alive.
func (c *Cluster) first(name string, attr *syscall.SysProcAttr) (*exec.Cmd, error) {
	cmd := exec.Command(filepath.Join(c.parts, "pause"))
	cmd.SysProcAttr = attr
	return cmd, c.daemon(func(error) {}, name, cmd)
}

// onControlPlane returns a command that runs in the control plane's network
// namespace.
func (c *Cluster) onControlPlane(name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{fmt.Sprintf("--net=%s", netnsOf(c.control)), filepath.Join(c.parts, name)}, args...)...)
}

// etcd is the URL of etcd inside the control plane's namespace.
const etcd = "http://127.0.0.1:2379"

func (c *Cluster) startControlPlane(ctx context.Context, fail context.CancelCauseFunc) error {
	if err := c.authority.files(); err != nil {
		return err
	}
	if err := c.daemon(fail, "etcd", c.onControlPlane("etcd",
		"--data-dir="+filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+etcd, "--advertise-client-urls="+etcd, "--listen-peer-urls=http://127.0.0.1:2380")); err != nil {
		return err
	}
	if err := c.startAPIServer(fail); err != nil {
		return err
	}
	a := c.authority
	var err error
	if c.forward, err = newForwarder(c.control, net.JoinHostPort(controlAddr, apiPort)); err != nil {
		return err
	}
	if c.kubeconfig, err = a.kubeconfig("admin", "https://"+c.forward.Addr().String(), "admin", "system:masters"); err != nil {
		return err
	}
	rest, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		return fmt.Errorf("read kubeconfig: %w", err)
	}
	rest.QPS = -1 // no limit: only one process uses this cluster
	if c.client, err = kubernetes.NewForConfig(rest); err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	if err := poll(ctx, 100*time.Millisecond, func() (bool, error) {
		return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil, nil
	}); err != nil {
		return fmt.Errorf("wait for the API server: %w", err)
	}
	const qps, burst = "--kube-api-qps=500", "--kube-api-burst=1000"
	for name, args := range map[string][]string{
		"kube-scheduler": nil,
		"kube-controller-manager": {
			"--allocate-node-cidrs", "--cluster-cidr=" + podNetwork, "--service-cluster-ip-range=" + serviceNetwork,
			"--use-service-account-credentials", "--root-ca-file=" + a.path("ca.crt"),
			"--service-account-private-key-file=" + a.path("service-accounts.key"),
			// A node that dies is NotReady after 20 s instead of 50.
			"--node-monitor-period=2s", "--node-monitor-grace-period=20s",
		},
	} {
		kubeconfig, err := a.kubeconfig(name, apiURL, "system:"+name)
		if err != nil {
			return err
		}
		args = append([]string{"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--cert-dir=" + a.path(name), qps, burst}, args...)
		if err := c.daemon(fail, name, c.onControlPlane(name, args...)); err != nil {
			return err
		}
	}
	if c.config.cilium() {
		return c.prepareCilium(ctx)
	}
	return nil
}

// startAPIServer starts the API server, or starts it again after it was killed.
func (c *Cluster) startAPIServer(fail context.CancelCauseFunc) error {
	a := c.authority
	return c.daemon(fail, "kube-apiserver", c.onControlPlane("kube-apiserver",
		"--etcd-servers="+etcd, "--advertise-address="+controlAddr, "--secure-port="+apiPort,
		"--service-cluster-ip-range="+serviceNetwork, "--allow-privileged", "--anonymous-auth=false",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--cert-dir="+a.path("apiserver"), "--client-ca-file="+a.path("ca.crt"),
		"--tls-cert-file="+a.path("apiserver.crt"), "--tls-private-key-file="+a.path("apiserver.key"),
		"--kubelet-client-certificate="+a.path("apiserver-kubelet.crt"), "--kubelet-client-key="+a.path("apiserver-kubelet.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+a.path("service-accounts.crt"), "--service-account-signing-key-file="+a.path("service-accounts.key")))
}

// apiURL is the URL of the API server inside the cluster.
const apiURL = "https://" + controlAddr + ":" + apiPort

// awaitServiceAccount waits for the service account that pods need in their
// namespace.
func (c *Cluster) awaitServiceAccount(ctx context.Context) error {
	if err := poll(ctx, 50*time.Millisecond, func() (bool, error) {
		_, err := c.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return true, err
	}); err != nil {
		return fmt.Errorf("wait for the default service account: %w", err)
	}
	return nil
}

// Kubeconfig returns the path of the administrator's kubeconfig. It works in
// the machine's own network namespace, as long as this process lives.
func (c *Cluster) Kubeconfig() string { return c.kubeconfig }

// WriteKubeconfig writes a kubeconfig with a context for each cluster.
func WriteKubeconfig(file string, clusters map[string]*Cluster) error {
	all := clientcmdapi.NewConfig()
	for name, c := range clusters {
		one, err := clientcmd.LoadFromFile(c.kubeconfig)
		if err != nil {
			return fmt.Errorf("read kubeconfig of %s: %w", name, err)
		}
		current := one.Contexts[one.CurrentContext]
		all.Clusters[name], all.AuthInfos[name] = one.Clusters[current.Cluster], one.AuthInfos[current.AuthInfo]
		all.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	}
	if len(clusters) == 1 {
		for name := range clusters {
			all.CurrentContext = name
		}
	}
	if err := clientcmd.WriteToFile(*all, file); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

// Node returns the node with this name, or nil.
func (c *Cluster) Node(name string) *Node {
	for _, n := range c.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// Down ends the cluster and removes everything that belongs to it.
func (c *Cluster) Down(ctx context.Context) error {
	if c.owner == nil {
		return nil
	}
	if c.forward != nil {
		c.forward.Close()
	}
	if err := remove(ctx, c.dir); err != nil {
		return fmt.Errorf("take down the cluster: %w", err)
	}
	c.running.Wait()
	if c.processes != nil {
		c.processes.Close()
	}
	c.owner.Close()
	c.owner = nil
	lock, err := flock(ctx, filepath.Join(stateDir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	return releaseFlowTable()
}
