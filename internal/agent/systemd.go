package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// Systemd notifies systemd that the agent has started. If the unit has WatchdogSec, it also keeps telling systemd that the
// agent is healthy; systemd restarts it otherwise. Without systemd it does nothing.
func (a *Agent) Systemd(ctx context.Context) error {
	if err := notifySystemd("READY=1"); err != nil {
		return err
	}
	micros, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	if err != nil || micros <= 0 {
		return nil
	}
	// Notify at half of the limit, as sd_watchdog_enabled(3) advises.
	tick := time.NewTicker(time.Duration(micros) * time.Microsecond / 2)
	go func() {
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				_ = notifySystemd("STOPPING=1")
				return
			case <-tick.C:
			}
			if err := a.Healthy(); err != nil {
				a.options.Log.Error("not healthy; systemd gets no watchdog notification", "error", err)
			} else if err := notifySystemd("WATCHDOG=1"); err != nil {
				a.options.Log.Warn("notify systemd", "error", err)
			}
		}
	}()
	return nil
}

// notifySystemd implements sd_notify(3).
func notifySystemd(state string) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	// A name that begins with @ is abstract; net uses the same notation.
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
