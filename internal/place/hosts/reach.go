package hosts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"slipstream.dev/internal/worker"
)

// reach tests each path that traffic is to take: see Reach.
func (h *Hosts) reach(ctx context.Context) error {
	for _, p := range h.config.Paths {
		if err := h.Reach(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// Reach sends a message along a path and back, as a trial does. The error names the hosts and says what to do.
func (h *Hosts) Reach(ctx context.Context, p Path) error {
	client, server := h.find(p.Client), h.find(p.Server)
	to := server.address(p.Address)
	if !to.IsValid() || to.Is4() != (p.IP == 4) {
		return nil // the trial says that there is no such address
	}
	port, err := worker.Exchange(ctx, client.first, server.first, netip.AddrPortFrom(to, p.Port), p.Transport, h.lead)
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case errors.Is(err, worker.ErrServe):
		return fmt.Errorf("host %s cannot receive traffic at its address %s (path %s): %w", server.name, to, p.Address, err)
	}
	ports := "the ports of net.ipv4.ip_local_port_range (32768 to 60999)"
	switch {
	case p.Port != 0:
		ports = "the port, and those after it for further pairs,"
	case server.windows:
		ports = "the dynamic ports of Windows (49152 to 65535)"
	}
	return fmt.Errorf("host %s cannot reach host %s at %s, %s port %d (path %s): %w. Is there a firewall between them? Let %s through it, by TCP and UDP",
		client.name, server.name, to, p.Protocol, port, p.Address, err, ports)
}
