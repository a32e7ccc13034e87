//go:build linux

// Command play starts a cluster, and takes it down when it is interrupted: make
// cluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"slipstream.dev/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	config := cluster.Config{Log: os.Stderr}
	flag.IntVar(&config.Nodes, "nodes", 2, "how many, 2 to 5")
	flag.StringVar(&config.CNI, "cni", cluster.Flannel, "how pods are connected: flannel, flannel-direct, flannel-host-gw or routed; after make peers also cilium, cilium-vxlan, cilium-kube-proxy or cilium-chained")
	flag.StringVar(&config.Proxy, "proxy", "", "mode of kube-proxy: nftables (the default) or iptables; none with cilium and cilium-vxlan")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: play [-nodes N] [-cni SHAPE] [-proxy MODE] [ARCHIVE OF AN IMAGE]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	config.Images = flag.Args()
	if err := run(ctx, stop, config); err != nil {
		fmt.Fprintln(os.Stderr, "play:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, stop func(), config cluster.Config) error {
	c, err := cluster.Up(ctx, config)
	if err != nil {
		return err
	}
	parts, err := cluster.Parts(ctx)
	if err != nil {
		return errors.Join(err, c.Down(context.WithoutCancel(ctx)))
	}
	fmt.Printf(`
The cluster is up. In another shell:

	export KUBECONFIG=%s PATH=%s:$PATH
	kubectl get nodes -o wide

Ctrl-C takes it down.
`, c.Kubeconfig(), parts)
	<-ctx.Done()
	stop() // a second interrupt ends this process at once; the next one to start cleans up
	return c.Down(context.WithoutCancel(ctx))
}
