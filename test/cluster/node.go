//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Node is a machine of the cluster: a network, mount, PID and UTS namespace with
// its own kubelet. It shares the machine's file tree, except for the folders
// that a node changes.
type Node struct {
	c     *Cluster
	name  string
	index int
	// dir holds the node's files.
	dir string
	// init is the node's first process. It is in the machine's network namespace,
	// like the init process of any real node: only that namespace has the settings
	// that the kernel shares between all, such as net.core.rps_sock_flow_entries.
	// network keeps the node's network namespace alive.
	init, network *exec.Cmd
}

// PID returns the node's first process. The node ends with it.
func (n *Node) PID() int { return n.init.Process.Pid }

// Netns returns the path of the node's network namespace, for setns(2).
func (n *Node) Netns() string { return netnsOf(n.network) }

// Addr returns the node's address.
func (n *Node) Addr() string { return fmt.Sprintf(nodeAddr, 10+n.index) }

func netnsOf(cmd *exec.Cmd) string { return fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid) }

// Command returns a command that runs in all namespaces of the node. It ends
// with the context, or with the cluster.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter",
		append([]string{"--target=" + strconv.Itoa(n.PID()), "--mount", "--uts", "--net=" + n.Netns(), "--pid", "--", name}, args...)...)
	n.c.adopt(cmd)
	// The command is a child of nsenter, because only a child can be in another PID
	// namespace. So Cancel kills the process group of both.
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	return cmd
}

// Kill ends the node as a crash does: all its processes at once.
func (n *Node) Kill() error {
	for _, p := range []*exec.Cmd{n.init, n.network} {
		if err := p.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("kill %s: %w", n.name, err)
		}
	}
	// The first process of a PID namespace ends last.
	return poll(context.Background(), 10*time.Millisecond, func() (bool, error) {
		return errors.Is(n.init.Process.Signal(syscall.Signal(0)), os.ErrProcessDone), nil
	})
}

// start starts the node's programs, and returns before the node is Ready.
func (n *Node) start(ctx context.Context, fail context.CancelCauseFunc, api <-chan struct{}) error {
	if err := os.Mkdir(n.dir, 0o755); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	if err := makeNodeCgroups(filepath.Base(n.c.dir), n.name); err != nil {
		return err
	}
	var err error
	if n.network, err = n.c.first(n.name+"-network", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}); err != nil {
		return err
	}
	n.init, err = n.c.first(n.name, &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWUTS,
		// With this flag, Go makes the child's mounts private.
		Unshareflags: unix.CLONE_NEWNS,
	})
	if err != nil {
		return err
	}
	if err := n.furnish(ctx); err != nil {
		return err
	}
	if err := n.connect(); err != nil {
		return err
	}
	daemon := func(name string, args ...string) error {
		return n.c.daemon(fail, n.name+"-"+filepath.Base(name), n.Command(context.Background(), name, args...))
	}
	containerd, err := n.write("containerd.toml", fmt.Sprintf(containerdConfig, pauseImage, filepath.Join(n.c.dir, "plugins"), n.dir))
	if err != nil {
		return err
	}
	if err := daemon("containerd", "--config="+containerd); err != nil {
		return err
	}
	if err := n.importImages(ctx); err != nil {
		return err
	}
	select {
	case <-api:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if n.c.config.cilium() {
		if err := n.prepareNodeForCilium(); err != nil {
			return err
		}
	}
	config, err := n.write("kubelet.yaml", fmt.Sprintf(kubeletConfig, n.c.authority.path("ca.crt"), filepath.Join(cgroupName(filepath.Base(n.c.dir)), n.name)))
	if err != nil {
		return err
	}
	kubeconfig, err := n.c.authority.kubeconfig("kubelet-"+n.name, apiURL, "system:node:"+n.name, "system:nodes")
	if err != nil {
		return err
	}
	if err := daemon(filepath.Join(n.c.parts, "kubelet"), "--config="+config, "--kubeconfig="+kubeconfig,
		"--hostname-override="+n.name, "--node-ip="+n.Addr()); err != nil {
		return err
	}
	if n.c.config.replacesProxy() {
		return nil
	}
	if kubeconfig, err = n.c.authority.kubeconfig("kube-proxy-"+n.name, apiURL, "system:kube-proxy"); err != nil {
		return err
	}
	// 0 keeps the limits of connection tracking, which belong to the whole machine.
	if err := daemon(filepath.Join(n.c.parts, "kube-proxy"), "--kubeconfig="+kubeconfig, "--hostname-override="+n.name,
		"--proxy-mode="+n.c.config.Proxy, "--cluster-cidr="+podNetwork,
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"); err != nil {
		return err
	}
	if flannelBackends[n.c.config.CNI] != "" {
		return n.startFlannel(ctx, daemon)
	}
	return nil
}

// restrict_oom_score_adj: a machine may lack the capability (CAP_SYS_RESOURCE)
// to give a pod a lower score than containerd's. Then no pod would start.
const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%s"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "%s"
    conf_dir = "%s/cni"
`

// This kubelet does not change the machine: it creates control groups only below
// its own, and does not evict pods, because the disk is shared. It restarts a
// container within a second or two, however often the container has ended:
// tests kill containers all the time.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %q}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /%s
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
volumePluginDir: /var/lib/kubelet/plugins
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%"}
resolvConf: ""
clusterDomain: cluster.local
nodeStatusUpdateFrequency: 5s
syncFrequency: 5s
featureGates: {KubeletCrashLoopBackOffMax: true}
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
`

// write writes a file of the node.
func (n *Node) write(name, content string) (string, error) {
	path := filepath.Join(n.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return path, nil
}

// machineSettings are sysctls of the whole machine that a kubelet sets. The node
// gets stand-in files that already have these values.
var machineSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// furnish gives the node its own /proc, /sys, /run, /var/lib and /var/log, and
// the settings of its network.
func (n *Node) furnish(ctx context.Context) error {
	for _, dir := range []string{"lib", "log", "cni", "sysctl"} {
		if err := os.Mkdir(filepath.Join(n.dir, dir), 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	// /proc shows the PID namespace of the process that mounts it, and no thread of
	// this process can be in the node's.
	if _, err := output(n.Command(ctx, "mount", "-t", "proc", "proc", "/proc")); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return n.inside(func() error {
		if err := unix.Sethostname([]byte(n.name)); err != nil {
			return fmt.Errorf("set name: %w", err)
		}
		// The mounts below would hide these folders.
		dirs := []string{cgroupDir, n.c.dir, n.c.parts}
		if n.c.peers != "" {
			dirs = append(dirs, n.c.peers)
		}
		var keep []*mountTree
		for _, dir := range dirs {
			t, err := cloneMounts(dir)
			if err != nil {
				return err
			}
			defer t.close()
			keep = append(keep, t)
		}
		for _, m := range []struct {
			from, to, kind string
			flags          uintptr
		}{
			// sysfs shows the network namespace in which it is mounted.
			{"sysfs", "/sys", "sysfs", 0},
			{"bpf", "/sys/fs/bpf", "bpf", 0},
			{filepath.Join(n.dir, "lib"), "/var/lib", "", unix.MS_BIND},
			{filepath.Join(n.dir, "log"), "/var/log", "", unix.MS_BIND},
			{"tmpfs", "/run", "tmpfs", 0},
		} {
			if err := unix.Mount(m.from, m.to, m.kind, m.flags, ""); err != nil {
				return fmt.Errorf("mount %s: %w", m.to, err)
			}
		}
		for _, t := range keep {
			if err := t.attach(); err != nil {
				return err
			}
		}
		settings, err := n.standIns()
		if err != nil {
			return err
		}
		for name, value := range settings {
			path := filepath.Join(n.dir, "sysctl", strings.ReplaceAll(name, "/", "."))
			if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
				return fmt.Errorf("write stand-in for sysctl %s: %w", name, err)
			}
			if err := unix.Mount(path, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("mount stand-in for sysctl %s: %w", name, err)
			}
		}
		// Pods may ask to see later mounts.
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
			return fmt.Errorf("share mounts: %w", err)
		}
		for _, dir := range []string{"/run/netns", "/run/lock", "/run/flannel", "/var/log/pods", "/var/log/containers"} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return fmt.Errorf("make folder: %w", err)
			}
		}
		return sysctl("net/ipv4/ip_forward=1", "?net/bridge/bridge-nf-call-iptables=1")
	})
}

// sysctl writes settings of the thread's network namespace. The prefix ? marks
// one that the kernel may lack.
func sysctl(settings ...string) error {
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		key, optional := strings.CutPrefix(key, "?")
		err := os.WriteFile("/proc/sys/"+key, []byte(value), 0)
		if err != nil && !(optional && errors.Is(err, os.ErrNotExist)) {
			return fmt.Errorf("set sysctl %s: %w", key, err)
		}
	}
	return nil
}

// inside runs f on a thread in the node's network, mount and UTS namespaces.
func (n *Node) inside(f func() error) error {
	return onThread(func() error {
		// A thread may only change its mount namespace if it does not share its root
		// folder.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("leave the file system context: %w", err)
		}
		pidfd, err := unix.PidfdOpen(n.PID(), 0)
		if err != nil {
			return fmt.Errorf("open process: %w", err)
		}
		defer unix.Close(pidfd)
		network, err := os.Open(n.Netns())
		if err != nil {
			return fmt.Errorf("open network namespace: %w", err)
		}
		defer network.Close()
		if err := unix.Setns(int(network.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		if err := unix.Setns(pidfd, unix.CLONE_NEWNS|unix.CLONE_NEWUTS); err != nil {
			return fmt.Errorf("enter namespaces: %w", err)
		}
		return f()
	})
}

// mountTree is a copy of the mounts at and below a path, to attach there again.
type mountTree struct {
	fd   int
	path string
}

func cloneMounts(path string) (*mountTree, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("clone what is mounted at %s: %w", path, err)
	}
	return &mountTree{fd, path}, nil
}

func (t *mountTree) attach() error {
	if err := os.MkdirAll(t.path, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s again: %w", t.path, err)
	}
	return nil
}

func (t *mountTree) close() { unix.Close(t.fd) }

// importImages waits for containerd, and imports the images.
func (n *Node) importImages(ctx context.Context) error {
	socket := fmt.Sprintf("/proc/%d/root/run/containerd/containerd.sock", n.PID())
	if err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	}); err != nil {
		return fmt.Errorf("wait for containerd: %w", err)
	}
	for _, image := range append([]string{filepath.Join(n.c.parts, "pause.tar")}, n.c.config.Images...) {
		if err := n.importImage(ctx, image); err != nil {
			return err
		}
	}
	return nil
}

// importImage imports an image from an archive. The node reads it from standard input, because it may not see the file.
func (n *Node) importImage(ctx context.Context, archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("open image: %w", err)
	}
	defer f.Close()
	cmd := n.Command(ctx, "ctr", "--namespace=k8s.io", "images", "import", "-")
	cmd.Stdin = f
	if _, err := output(cmd); err != nil {
		return fmt.Errorf("import image %s: %w", archive, err)
	}
	return nil
}

// object returns the node's object from the API server, or nil if there is none
// yet.
func (n *Node) object(ctx context.Context) (*corev1.Node, error) {
	o, err := n.c.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return o, err
}

// podCIDR waits until the node has a range for its pods.
func (n *Node) podCIDR(ctx context.Context) (cidr string, err error) {
	err = poll(ctx, 50*time.Millisecond, func() (bool, error) {
		o, err := n.object(ctx)
		if o == nil {
			return false, err
		}
		cidr = o.Spec.PodCIDR
		return cidr != "", nil
	})
	if err != nil {
		return "", fmt.Errorf("wait for addresses of pods: %w", err)
	}
	return cidr, nil
}

func (n *Node) awaitReady(ctx context.Context) error {
	return poll(ctx, 50*time.Millisecond, func() (bool, error) {
		o, err := n.object(ctx)
		if o == nil {
			return false, err
		}
		// A node that has just become Ready keeps its not-ready taint for a moment.
		ready := slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
		return ready && len(o.Spec.Taints) == 0, nil
	})
}
