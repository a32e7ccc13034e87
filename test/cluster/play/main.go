//go:build linux

// Command play starts clusters, and takes them down when it is interrupted. make
// cluster runs it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"slipstream.dev/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	nodes := flag.Int("nodes", 2, "how many nodes each cluster has, 2 to 5")
	networks := flag.String("cni", cluster.Flannel, "the networks of one cluster each, with commas between them. A network is flannel, flannel-direct, flannel-host-gw or routed; after make peers also "+
		"cilium, cilium-vxlan, cilium-kube-proxy or cilium-chained; and /nftables (the default) or /iptables for the mode of kube-proxy")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: play [-nodes N] [-cni NETWORK,...] [ARCHIVE OF AN IMAGE]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(ctx, stop, *nodes, strings.Split(*networks, ","), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "play:", err)
		os.Exit(1)
	}
}

// run starts the clusters one after another, and waits until the context ends. The context of a cluster in the kubeconfig has the name of
// its network.
func run(ctx context.Context, stop func(), nodes int, networks, images []string) (err error) {
	all := map[string]*cluster.Cluster{}
	defer func() {
		for _, c := range all {
			err = errors.Join(err, c.Down(context.WithoutCancel(ctx)))
		}
	}()
	for _, network := range networks {
		name := strings.ReplaceAll(network, "/", "-")
		if all[name] != nil {
			return fmt.Errorf("-cni has %s twice: name each network once", network)
		}
		cni, proxy, _ := strings.Cut(network, "/")
		c, err := cluster.Up(ctx, cluster.Config{Nodes: nodes, CNI: cni, Proxy: proxy, Images: images, Log: os.Stderr})
		if err != nil {
			return err
		}
		all[name] = c
	}
	parts, err := cluster.Parts(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "slipstream-play")
	if err != nil {
		return fmt.Errorf("make folder of the kubeconfig: %w", err)
	}
	defer os.RemoveAll(dir)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := cluster.WriteKubeconfig(kubeconfig, all); err != nil {
		return err
	}
	fmt.Printf(`
Up: %s. In another shell:

	export KUBECONFIG=%s PATH=%s:$PATH
	kubectl get nodes -o wide%s

Ctrl-C takes everything down.
`, strings.Join(networks, ", "), kubeconfig, parts, map[bool]string{true: " --context NETWORK"}[len(all) > 1])
	<-ctx.Done()
	stop() // a second interrupt ends this process at once; the next one to start cleans up
	return nil
}
