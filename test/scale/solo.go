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
	"slipstream.dev/test/cluster"
)

const (
	// soloNode is the name of the real agent's node.
	soloNode = "node-solo"
	// soloPods is the default limit of pods per kubelet, and soloVeths the number of other veths on the node.
	soloPods  = 110
	soloVeths = 1000
)

// solo is a node that runs the program that users install. It has its own network namespace, with a NIC, with pods that
// each have a process and an address, and with veths that do not belong to pods of the cluster.
type solo struct {
	agent *exec.Cmd
	// sleepers are processes, one in each namespace. The namespaces and devices end with them.
	sleepers []*exec.Cmd
	relay    net.Listener
	log      string
}

// startSolo creates the node and starts its agent.
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

// kubeconfig writes a kubeconfig for the agent, which connects as in a pod: with a token that is renewed.
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

// namespace starts a process in a new network namespace, as a pod has.
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

// devices creates a NIC, the veths of pods, and the other veths, in the network namespace of the calling thread. Every
// each-th pod of the cluster belongs to this node: the agent matches veths to pods by address.
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

// veth creates a veth whose peer is in the namespace of a process. The peer gets an address unless ip is empty.
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

// relay forwards connections from the node to the API server, which listens at the same address in this process's
// network namespace. It ends when its listener is closed.
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

// usage returns the usage of the agent's process. It is zero before the agent starts, and an error if the agent has
// ended.
func (s *solo) usage() (cluster.Usage, error) {
	if s == nil {
		return cluster.Usage{}, nil
	}
	u, err := cluster.UsageOf(s.agent.Process.Pid)
	if err != nil {
		text, _ := os.ReadFile(s.log)
		return u, fmt.Errorf("the agent of %s has ended: %s", soloNode, strings.TrimSpace(string(text)))
	}
	return u, nil
}

// sampleMemory measures the agent's memory twice a second until the returned function is called, which returns the mean
// and the maximum in MiB. They are 0 if no agent runs yet.
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
			if u, err := s.usage(); err == nil { // measure reports an agent that has ended
				all = append(all, u.MiB)
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
		_ = cmd.Process.Kill() // an error means that it has ended
		_ = cmd.Wait()
	}
}
