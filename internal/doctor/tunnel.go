package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Tunnel is a VXLAN tunnel between two machines. On each of them it is in a temporary network namespace.
type Tunnel struct {
	Local, Remote netip.Addr
	Port          uint16
	VNI           int
	// Server means that this end receives.
	Server bool
	// Key distinguishes the data of one probe from those of any other.
	Key []byte
}

// Offload is the amount of sending work that is left to the layers below the tunnel's device.
type Offload int

// Offloads, from the most to the least.
const (
	// OffloadAll offloads checksums and segmentation.
	OffloadAll Offload = iota
	// OffloadChecksum offloads only checksums: the kernel segments before it encapsulates.
	OffloadChecksum
	// OffloadNothing makes the kernel compute checksums, too.
	OffloadNothing
)

func (o Offload) String() string {
	return [...]string{"checksums and segmentation offloaded", "segmentation in the kernel", "checksums and segmentation in the kernel"}[o]
}

// Transfer is the result of a transfer through a tunnel.
type Transfer struct {
	// Why explains the failure; it is empty if all the data arrived unchanged.
	Why string
	// Took is the duration of the transfer.
	Took time.Duration
}

// transferBytes is the size of a transfer, and transferTime the longest that it may take: together 3 Mbit/s.
const (
	transferBytes = 1 << 20
	transferTime  = 3 * time.Second
)

// TunnelSender sends through a tunnel whose other end another machine has opened.
type TunnelSender interface {
	SendThroughTunnel(context.Context, Tunnel, Offload) (Transfer, error)
}

// TunnelOpener opens the server's end of a tunnel until it is released.
type TunnelOpener func(context.Context, Tunnel) (release func(), err error)

// Try is one transfer.
type Try struct {
	Offload Offload
	Transfer
}

// ProbeOffload finds out whether encapsulated data arrives, whether the kernel or a device segments it and
// computes the checksums. The tunnel uses the first VXLAN port that is not blocked, so Explore has to run
// before.
func (p *Path) ProbeOffload(ctx context.Context, from netip.Addr, client TunnelSender, open TunnelOpener) error {
	for _, v := range p.VXLAN {
		if v.Blocked {
			continue
		}
		tunnel := Tunnel{Local: from, Remote: p.To, Port: v.Port, VNI: newVNI(), Key: newKey()}
		far := tunnel
		far.Local, far.Remote, far.Server = p.To, from, true
		release, err := open(ctx, far)
		if err == nil {
			err = p.sendThrough(ctx, client, tunnel)
			release()
		}
		if err == nil || ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p.Unprobed = err.Error()
	}
	return nil
}

// sendThrough offloads less and less, until a transfer succeeds. Then it repeats the last transfer that failed, so that
// one lost packet is not a finding.
func (p *Path) sendThrough(ctx context.Context, client TunnelSender, t Tunnel) error {
	p.Tries, p.Unprobed = nil, ""
	for _, offload := range []Offload{OffloadAll, OffloadChecksum, OffloadNothing} {
		transfer, err := client.SendThroughTunnel(ctx, t, offload)
		if err != nil {
			return err
		}
		p.Tries = append(p.Tries, Try{offload, transfer})
		if transfer.Why != "" {
			continue
		}
		if offload == OffloadAll {
			return nil
		}
		again, err := client.SendThroughTunnel(ctx, t, offload-1)
		p.Tries = append(p.Tries, Try{offload - 1, again})
		return err
	}
	return nil
}

// fault returns the offload with which transfers succeed, and false if no fault is proved.
func (p Path) fault() (without Offload, ok bool) {
	n := len(p.Tries)
	if n < 3 || p.Tries[n-1].Why == "" || p.Tries[n-2].Why != "" {
		return 0, false
	}
	return p.Tries[n-2].Offload, true
}

func offloadFault(p Path) []Finding {
	without, ok := p.fault()
	if !ok {
		return nil
	}
	name, set := "Segmentation", "tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off"
	cost := "Connections between pods on the two open, and transfers hang or crawl: what is segmented below the overlay's device does not arrive."
	if without == OffloadNothing {
		name, set = "The checksum", "tx-checksum-ip-generic off"
		cost = "Pods on the two can ping each other, and no TCP connection between them opens: what has its checksum computed below the overlay's device does not arrive."
	}
	device := p.Sent.Device
	f := Finding{
		Severity: Serious,
		What:     fmt.Sprintf("%s of VXLAN packets that %s sends is wrong if it is offloaded to %s.", name, p.Client, device),
		Cost:     cost,
		Do:       fmt.Sprintf("ethtool -K %s %s   # on %s; or on the overlay's own device: ethtool -K flannel.1 tx-checksum-ip-generic off. Then a newer driver, firmware or hypervisor", device, set, p.Client),
	}
	for _, t := range p.Tries {
		value := fmt.Sprintf("all of %d kB arrived within %s", transferBytes>>10, t.Took.Round(time.Millisecond))
		if t.Why != "" {
			value = fmt.Sprintf("%d kB did not arrive within %s: %s", transferBytes>>10, transferTime, strings.TrimSpace(t.Why))
		}
		f.Evidence = append(f.Evidence, evidence("a transfer by VXLAN, "+t.Offload.String(), "%s", value))
	}
	return []Finding{f}
}
