//go:build linux

package fastpath

import (
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/testenv"
)

// closeInvalidator closes an invalidator, and fails the test if that fails.
func closeInvalidator(t *testing.T, c *invalidator) {
	t.Helper()
	c.close()
	if err := c.release(); err != nil {
		t.Error(err)
	}
}

// addManyRules makes more notifications than a socket's buffer holds.
func addManyRules(t *testing.T, ns netns.Handle) {
	t.Helper()
	nft(t, ns, "add table ip a\nadd chain ip a c\n"+strings.Repeat("add rule ip a c ip daddr 192.0.2.1 counter accept\n", 5000))
}

// addChainAtDevice adds what only a scan of the devices finds.
func addChainAtDevice(t *testing.T, ns netns.Handle) {
	t.Helper()
	nft(t, ns, "add table netdev a\nadd chain netdev a c { type filter hook ingress device lo priority 0; }\n")
}

// TestChainIsLostAmongRules adds a chain at a device while the socket's buffer is full of notifications about other rules, so
// that the notification about the chain is lost. The devices must be scanned nevertheless.
func TestChainIsLostAmongRules(t *testing.T) {
	testenv.NeedRoot(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	full, scan := make(chan struct{}), make(chan struct{}, 1)
	c, err := newInvalidator(ns, func(_ uint32, devices bool) {
		<-full
		if devices {
			select {
			case scan <- struct{}{}:
			default:
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer closeInvalidator(t, c)
	addManyRules(t, ns)
	addChainAtDevice(t, ns)
	close(full)
	select {
	case <-scan:
	case <-time.After(10 * time.Second):
		t.Error("the devices are not scanned")
	}
}

// nft applies a rule set of nftables in a network namespace.
func nft(t *testing.T, ns netns.Handle, text string) {
	t.Helper()
	if err := netns.Do(ns, func() error {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestChangeWhileBufferIsEmptied adds a chain at a device as soon as the loss of notifications has caused a scan. If the socket's
// buffer is not empty then, the kernel drops the notification about the chain and reports no second error. The devices must be
// scanned nevertheless.
func TestChangeWhileBufferIsEmptied(t *testing.T) {
	testenv.NeedRoot(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	full, lost, changed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	scans := make(chan struct{}, 100)
	var once sync.Once
	c, err := newInvalidator(ns, func(_ uint32, devices bool) {
		<-full
		if devices {
			once.Do(func() {
				close(lost)
				<-changed
			})
			scans <- struct{}{}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer closeInvalidator(t, c)
	addManyRules(t, ns)
	close(full)
	<-lost
	addChainAtDevice(t, ns)
	close(changed)
	for range 2 { // the scan after the overrun, and the one for the chain
		select {
		case <-scans:
		case <-time.After(10 * time.Second):
			t.Fatal("the devices are not scanned again")
		}
	}
}
