//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// ciliumValues are the values of Cilium's chart in all modes. They turn off its proxy and its observability (Hubble).
var ciliumValues = []string{
	"k8sServiceHost=" + controlAddr, "k8sServicePort=" + apiPort,
	"ipam.mode=kubernetes", "l7Proxy=false", "envoy.enabled=false", "hubble.enabled=false",
	// These checks would need a second program of Cilium, which answers them.
	"healthChecking=false", "endpointHealthChecking.enabled=false",
}

// Values of several modes. Without masquerading in eBPF, packets would pass through the node's stack.
const (
	withoutProxy  = "kubeProxyReplacement=true,bpf.masquerade=true"
	nativeRouting = "routingMode=native,autoDirectNodeRoutes=true,ipv4NativeRoutingCIDR=" + podNetwork
)

// ciliumModes has the further values of each mode.
var ciliumModes = map[string][]string{
	Cilium:      {withoutProxy, nativeRouting},
	CiliumVXLAN: {withoutProxy, "routingMode=tunnel,tunnelProtocol=vxlan"},
	// Only if there is no kube-proxy does Cilium handle services, and with them host routing, by eBPF.
	CiliumProxied: {"kubeProxyReplacement=false", nativeRouting},
	// The agent adds its plugin to flannel's list of plugins.
	CiliumChained: {"kubeProxyReplacement=false,routingMode=native,enableIPv4Masquerade=false,cni.chainingMode=generic-veth,cni.chainingTarget=pods,cni.exclusive=false"},
}

// ciliumSettings are sysctls of the whole machine that Cilium's agent sets, with the values that it wants.
var ciliumSettings = map[string]string{"kernel/unprivileged_bpf_disabled": "1", "kernel/timer_migration": "0"}

// clangDir has Debian's compiler under the name by which the agent calls it.
const clangDir = "/usr/lib/llvm-19/bin"

func (c *Config) cilium() bool { return ciliumModes[c.CNI] != nil }

// replacesProxy reports whether there is no kube-proxy.
func (c *Config) replacesProxy() bool { return c.CNI == Cilium || c.CNI == CiliumVXLAN }

// findPeers returns the folder with what make peers has built.
func findPeers(ctx context.Context) (string, error) {
	root, err := checkout(ctx)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, "bin/peers")
	if _, err := os.Stat(filepath.Join(dir, ".built")); err != nil {
		return "", fmt.Errorf("find Cilium: %w: build it first (make peers)", err)
	}
	return dir, nil
}

// ciliumConfig returns the configuration that Cilium's chart makes of the mode's values.
func (c *Cluster) ciliumConfig(ctx context.Context) (*corev1.ConfigMap, error) {
	values := strings.Join(slices.Concat(ciliumModes[c.config.CNI], ciliumValues), ",")
	rendered, err := output(exec.CommandContext(ctx, filepath.Join(c.peers, "../tools/helm"), "template", "cilium", filepath.Join(c.peers, "chart"),
		"--namespace=kube-system", "--kube-version=1.34", "--show-only=templates/cilium-configmap.yaml", "--set="+values))
	if err != nil {
		return nil, fmt.Errorf("render Cilium's chart: %w", err)
	}
	var object corev1.ConfigMap
	if err := yaml.Unmarshal([]byte(rendered), &object); err != nil {
		return nil, fmt.Errorf("read Cilium's configuration: %w", err)
	}
	return &object, nil
}

// prepareCilium creates the ConfigMap of the agents, from which each node gets files, defines Cilium's kinds of objects, and creates the
// agents' DaemonSet. Usually the operator defines the kinds; nothing else that it does is needed here.
func (c *Cluster) prepareCilium(ctx context.Context) error {
	config, err := c.ciliumConfig(ctx)
	if err != nil {
		return err
	}
	c.ciliumOptions = config.Data
	if _, err := c.client.CoreV1().ConfigMaps(config.Namespace).Create(ctx, config, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create Cilium's configuration: %w", err)
	}
	if _, err := output(exec.CommandContext(ctx, filepath.Join(c.parts, "kubectl"), "--kubeconfig="+c.kubeconfig,
		"create", "--recursive", "--filename="+filepath.Join(c.peers, "crds"))); err != nil {
		return fmt.Errorf("define Cilium's kinds of objects: %w", err)
	}
	return c.createCilium(ctx)
}

// ciliumPod is the DaemonSet of Cilium's agents. It is like the chart's in all that matters to other programs, but has no image of
// Cilium: its container has the pause image, and mounts the node's folders, which contain the agent, its libraries and its compiler.
const ciliumPod = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: cilium, namespace: kube-system, labels: {k8s-app: cilium}}
spec:
  selector: {matchLabels: {k8s-app: cilium}}
  template:
    metadata: {labels: {k8s-app: cilium}}
    spec:
      hostNetwork: true
      hostPID: true
      automountServiceAccountToken: false
      priorityClassName: system-node-critical
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 1
      containers:
      - name: cilium-agent
        image: %q
        imagePullPolicy: Never
        command: [%q, --config-dir=%s/$(K8S_NODE_NAME)/cilium]
        env:
        - {name: K8S_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: CILIUM_K8S_NAMESPACE, value: kube-system}
        - {name: PATH, value: %q}
        securityContext: {privileged: true, runAsUser: 0}
        volumeMounts: [%s]
      volumes: [%s]
`

// createCilium creates the DaemonSet. Its pods start once the nodes have registered.
func (c *Cluster) createCilium(ctx context.Context) error {
	var mounts, volumes []string
	for i, at := range []struct{ folder, in string }{
		{"/usr", "/usr"}, {"/bin", "/bin"}, {"/sbin", "/sbin"}, {"/lib", "/lib"}, {"/lib64", "/lib64"}, {"/etc", "/etc"},
		{"/run", "/run"}, {"/run", "/var/run"}, {"/var/lib", "/var/lib"}, {"/sys", "/sys"}, {"/proc", ciliumProc}, {c.peers, c.peers},
	} {
		mounts = append(mounts, fmt.Sprintf("{name: v%d, mountPath: %q}", i, at.in))
		volumes = append(volumes, fmt.Sprintf("{name: v%d, hostPath: {path: %q}}", i, at.folder))
	}
	manifest := fmt.Sprintf(ciliumPod, pauseImage, filepath.Join(c.peers, "cilium-agent"), c.dir, clangDir+":"+os.Getenv("PATH"),
		strings.Join(mounts, ", "), strings.Join(volumes, ", "))
	cmd := exec.CommandContext(ctx, filepath.Join(c.parts, "kubectl"), "--kubeconfig="+c.kubeconfig, "create", "--filename=-")
	cmd.Stdin = strings.NewReader(manifest)
	if _, err := output(cmd); err != nil {
		return fmt.Errorf("create Cilium's DaemonSet: %w", err)
	}
	return nil
}

// ciliumProc is where the agent has the node's /proc, in which stand-ins take the place of the machine's settings.
const ciliumProc = "/host/proc"

// prepareNodeForCilium writes what the agent reads on its node. The agent compiles its programs, and then installs the node's CNI
// configuration.
func (n *Node) prepareNodeForCilium() error {
	kubeconfig, err := n.c.authority.kubeconfig("cilium-"+n.name, apiURL, "cilium", "system:masters")
	if err != nil {
		return err
	}
	options := maps.Clone(n.c.ciliumOptions)
	options["k8s-kubeconfig-path"] = kubeconfig
	options["write-cni-conf-when-ready"] = filepath.Join(n.dir, "cni", "05-cilium.conflist")
	options["procfs"] = ciliumProc
	dir := filepath.Join(n.dir, "cilium")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	for name, value := range options {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0o644); err != nil {
			return fmt.Errorf("write Cilium's configuration: %w", err)
		}
	}
	// The agent adds headers to the sources.
	if err := os.CopyFS(filepath.Join(n.dir, "lib/cilium/bpf"), os.DirFS(filepath.Join(n.c.peers, "bpf"))); err != nil {
		return fmt.Errorf("copy Cilium's programs: %w", err)
	}
	return n.inside(n.mountCiliumCgroup)
}

// mountCiliumCgroup mounts the control group of the node's pods where the agent expects the root of all control groups. The
// programs that choose a service's backend when a socket connects are attached there.
func (n *Node) mountCiliumCgroup() error {
	root := n.c.ciliumOptions["cgroup-root"]
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	v2, err := unified()
	if err != nil {
		return err
	}
	if err := unix.Mount(filepath.Join(v2, cgroupName(filepath.Base(n.c.dir)), n.name), root, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount the node's control group at %s: %w", root, err)
	}
	return nil
}

// standIns returns the sysctls of the whole machine that programs of the node set, and that this machine has.
func (n *Node) standIns() (map[string]string, error) {
	all := maps.Clone(machineSettings)
	if !n.c.config.cilium() {
		return all, nil
	}
	for name, value := range ciliumSettings {
		switch _, err := os.Stat("/proc/sys/" + name); {
		case err == nil:
			all[name] = value
		case !errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("find sysctl: %w", err)
		}
	}
	return all, nil
}
