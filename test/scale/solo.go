//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/stats"
)

const (
	// soloNode is the node of the real agent.
	soloNode = "node-solo"
	// soloPods is how many pods a kubelet takes by default, and soloVeths how many other veths the node has.
	soloPods  = 110
	soloVeths = 1000
)

// solo is one node with the program that users install: in a network namespace of its own, with a NIC,
// with pods that have a process and an address each, and with veths that belong to no pod of the cluster.
type solo struct {
	agent *exec.Cmd
	// sleepers are processes, one in each namespace. Namespaces and devices end with them.
	sleepers []*exec.Cmd
	relay    net.Listener
	log      string
}

// startSolo makes the node and starts its agent.
func (f *fleet) startSolo() error {
	s := &solo{log: filepath.Join(filepath.Dir(f.tokenFile), "agent.log")}
	f.solo = s
	config, err := f.agentConfig()
	if err != nil {
		return err
	}
	kubeconfig, err := f.kubeconfig(config.Host, config.CAData)
	if err != nil {
		return err
	}
	node, err := s.namespace()
	if err != nil {
		return err
	}
	return netns.DoAt(netnsOf(node), func() error {
		if err := s.devices(f.nodes + 1); err != nil {
			return fmt.Errorf("make the devices of %s: %w", soloNode, err)
		}
		address := strings.TrimPrefix(config.Host, "https://")
		if s.relay, err = net.Listen("tcp", address); err != nil {
			return err
		}
		go relay(s.relay, address)
		return s.start(f.agent, "agent", "--node", soloNode, "--daemonset", namespace+"/"+account,
			"--kubeconfig", kubeconfig, "--journal", filepath.Join(filepath.Dir(f.tokenFile), "journal"))
	})
}

// kubeconfig writes one for the agent, which connects as its pod does: with a token that is renewed.
func (f *fleet) kubeconfig(server string, ca []byte) (file string, err error) {
	file = f.tokenFile + ".kubeconfig"
	text := fmt.Appendf(nil, `
apiVersion: v1
kind: Config
clusters: [{name: scale, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: agent, user: {tokenFile: %q}}]
contexts: [{name: scale, context: {cluster: scale, user: agent}}]
current-context: scale
`, server, f.tokenFile+".ca", f.tokenFile)
	return file, errors.Join(os.WriteFile(f.tokenFile+".ca", ca, 0o600), os.WriteFile(file, text, 0o600))
}

// start starts the agent in the network namespace of the calling thread.
func (s *solo) start(program string, args ...string) error {
	log, err := os.Create(s.log)
	if err != nil {
		return fmt.Errorf("make the agent's log: %w", err)
	}
	defer log.Close()
	s.agent = exec.Command(program, args...)
	s.agent.Stdout, s.agent.Stderr = log, log
	s.agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return s.agent.Start()
}

// namespace starts a process in a network namespace of its own, as that of a pod is.
func (s *solo) namespace() (pid int, err error) {
	cmd := exec.Command("sleep", "infinity")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("make a network namespace (make scale needs root): %w", err)
	}
	s.sleepers = append(s.sleepers, cmd)
	return cmd.Process.Pid, nil
}

func netnsOf(pid int) string { return fmt.Sprintf("/proc/%d/ns/net", pid) }

// devices makes a NIC, the veths of pods, and the others, in the network namespace of the calling thread. Every
// each-th pod of the cluster is this node's: their addresses tell the agent which veth is whose.
func (s *solo) devices(each int) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	others, err := s.namespace()
	if err != nil {
		return err
	}
	if err := veth("eth0", others, ""); err != nil {
		return err
	}
	if err := address("eth0", "192.0.2.1/24"); err != nil {
		return err
	}
	for i := range soloVeths {
		if err := veth(fmt.Sprintf("veth%d", i), others, ""); err != nil {
			return err
		}
	}
	for i := range soloPods {
		pod, err := s.namespace()
		if err != nil {
			return err
		}
		if err := veth(fmt.Sprintf("pod%d", i), pod, podIP(i*each+each-1)+"/32"); err != nil {
			return err
		}
	}
	return nil
}

// veth makes one whose other end is in the namespace of a process, where it has an address or none.
func veth(name string, process int, ip string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = name, net.FlagUp
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "end-" + name, PeerNamespace: netlink.NsPid(process)}); err != nil {
		return fmt.Errorf("add veth %s: %w", name, err)
	}
	if ip == "" {
		return nil
	}
	return netns.DoAt(netnsOf(process), func() error { return address("end-"+name, ip) })
}

// address gives a device of this namespace an address.
func address(device, ip string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(ip)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
}

// relay passes on connections from the node to the API server, which listens at the same address of this
// process's network namespace, until its listener is closed.
func relay(l net.Listener, to string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			s, err := net.Dial("tcp", to)
			if err != nil {
				return // the API server is down
			}
			defer s.Close()
			go func() {
				defer s.Close()
				_, _ = io.Copy(s, c) // either end closes both
			}()
			_, _ = io.Copy(c, s)
		}()
	}
}

// usage of the agent's process: none before the agent starts, and an error if it has ended.
func (s *solo) usage() (usage, error) {
	if s == nil {
		return usage{}, nil
	}
	u, err := usageOf(s.agent.Process.Pid)
	if err != nil || u.mib == 0 {
		text, _ := os.ReadFile(s.log)
		return u, fmt.Errorf("the agent of %s has ended: %s", soloNode, strings.TrimSpace(string(text)))
	}
	return u, nil
}

// sampleMemory measures the agent's memory twice a second until the function that it returns is called, which tells the
// mean and the most, in MiB: 0 if no agent runs yet.
func (s *solo) sampleMemory() func() (mean, most float64) {
	if s == nil {
		return func() (float64, float64) { return 0, 0 }
	}
	var all []float64
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			if u, err := s.usage(); err == nil { // measure tells of an agent that has ended
				all = append(all, u.mib)
			}
			select {
			case <-tick.C:
			case <-end:
				return
			}
		}
	}()
	return func() (float64, float64) {
		close(end)
		<-ended
		if len(all) == 0 {
			return 0, 0
		}
		mean, _ := stats.Mean(all)
		return mean, slices.Max(all)
	}
}

func (s *solo) stop() {
	if s.relay != nil {
		_ = s.relay.Close()
	}
	all := s.sleepers
	if s.agent != nil && s.agent.Process != nil {
		all = append([]*exec.Cmd{s.agent}, all...)
	}
	for _, cmd := range all {
		_ = cmd.Process.Kill() // or it has ended
		_ = cmd.Wait()
	}
}
