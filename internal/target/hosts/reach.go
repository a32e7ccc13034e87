package hosts

import (
	"context"
	"errors"
	"fmt"

	"slipstream.dev/internal/worker"
)

// reach has a message go each way that traffic is to go, there and back, as in a trial.
func (h *Hosts) reach(ctx context.Context) error {
	for _, w := range h.config.Ways {
		if err := h.Reach(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// Reach has a message go one way, there and back, as in a trial. Its error names the hosts and what to do.
func (h *Hosts) Reach(ctx context.Context, w Way) error {
	client, server := h.find(w.Client), h.find(w.Server)
	to := server.address(w.Address)
	if !to.IsValid() || to.Is4() != (w.IP == 4) {
		return nil // the trial says that there is no such address
	}
	port, err := worker.Exchange(ctx, client.first, server.first, to, w.Transport, h.lead)
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case errors.Is(err, worker.ErrServe):
		return fmt.Errorf("host %s cannot receive traffic at its address %s (path %s): %w", server.name, to, w.Address, err)
	}
	return fmt.Errorf("host %s cannot reach host %s at %s, %s port %d (path %s): %w. Is there a firewall between them? Let the ports of net.ipv4.ip_local_port_range (32768 to 60999) through it, by TCP and UDP",
		client.name, server.name, to, w.Protocol, port, w.Address, err)
}
