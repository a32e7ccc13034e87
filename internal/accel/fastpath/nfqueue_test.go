//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
)

// judge decides on the packets that rules queue to it, as kube-network-policies does.
type judge struct {
	judged atomic.Int64
	denies atomic.Bool
}

// Numbers of nfnetlink_queue (include/uapi/linux/netfilter/nfnetlink_queue.h).
const (
	nfqMsgVerdict, nfqMsgConfig                 = 1, 2
	nfqaPacketHeader, nfqaVerdictHeader         = 1, 2
	nfqaConfigCommand, nfqaConfigParams         = 1, 2
	nfqCommandBind, nfqCopyMeta, nfDrop, nfPass = 1, 1, 0, 1
)

// judge begins to decide on what is queued to a number on a node.
func (w *world) judge(node string, queue uint16) *judge {
	w.Helper()
	j := new(judge)
	fd := -1
	request := func(kind int, attribute int, data []byte) error {
		r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_QUEUE<<8|kind, 0)
		r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0, ResId: queue<<8 | queue>>8})
		r.AddData(nl.NewRtAttr(attribute, data))
		return unix.Sendto(fd, r.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	w.in(node, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}),
			request(nfqMsgConfig, nfqaConfigCommand, []byte{nfqCommandBind, 0, 0, 0}),
			request(nfqMsgConfig, nfqaConfigParams, []byte{0, 0, 0, 0, nfqCopyMeta}),
		)
	})
	var over atomic.Bool
	done := make(chan struct{})
	w.Cleanup(func() { over.Store(true); <-done; unix.Close(fd) })
	go func() {
		defer close(done)
		for buf := make([]byte, 1<<16); !over.Load(); {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOBUFS) {
				continue
			}
			messages, parse := syscall.ParseNetlinkMessage(buf[:max(n, 0)])
			if err = errors.Join(err, parse); err != nil {
				w.Errorf("receive what is queued: %v", err)
				return
			}
			for _, m := range messages {
				attributes, err := nl.ParseRouteAttr(m.Data[min(nl.SizeofNfgenmsg, len(m.Data)):])
				if err != nil || len(attributes) == 0 || attributes[0].Attr.Type != nfqaPacketHeader || len(attributes[0].Value) < 4 {
					w.Errorf("a message of type %d has %v: %v", m.Header.Type, attributes, err)
					return
				}
				j.judged.Add(1)
				verdict := uint32(nfPass)
				if j.denies.Load() {
					verdict = nfDrop
				}
				id := attributes[0].Value[:4]
				if err := request(nfqMsgVerdict, nfqaVerdictHeader, append(binary.BigEndian.AppendUint32(nil, verdict), id...)); err != nil {
					w.Errorf("decide on what is queued: %v", err)
				}
			}
		}
	}()
	return j
}

// TestNFQueue has a program decide on packets that rules queue to it, beneath connections that are
// carried: it is asked of each new connection, and what it denies is denied. What is there goes on
// where a rule lets established ones pass, as kube-network-policies writes it; else it ends when
// the program denies it, which nobody announces, within a second.
func TestNFQueue(t *testing.T) {
	const accept = "-A POSTROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
	for _, tt := range []struct {
		name, accept, established string
	}{
		{"new ones", accept, through},
		{"all", "", silence},
	} {
		for _, with := range []string{"without", "with"} {
			t.Run(tt.name+" "+with, func(t *testing.T) {
				w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
				j := w.judge("n1", 100)
				w.restore("n1", "iptables-nft", "*mangle\n"+tt.accept+"-A POSTROUTING -d 10.244.1.2 -j NFQUEUE --queue-num 100 --queue-bypass\nCOMMIT\n")
				limit := soon
				if with == "with" {
					w.start()
					limit = within
				}
				c := w.dialogue()
				c.carried(c.connect().back())
				const n = 10
				before := j.judged.Load()
				for range n {
					if fresh := c.fresh(); fresh != through {
						t.Errorf("a connection that is opened sees %s", fresh)
					}
				}
				asked := j.judged.Load() - before
				t.Logf("it was asked %d times of %d connections and what was carried meanwhile", asked, n)
				if asked < n || tt.accept != "" && asked > n {
					t.Errorf("it was asked %d times, want %d", asked, n)
				}
				j.denies.Store(true)
				set := time.Now()
				if fresh := c.fresh(); fresh != silence {
					t.Errorf("a connection that is denied sees %s", fresh)
				}
				c.eventually("what was carried is over", func() { time.Sleep(time.Millisecond) }, func() bool { return time.Since(set) > limit })
				if established := c.established(); established != tt.established {
					t.Errorf("one that is there sees %s, want %s", established, tt.established)
				}
				j.denies.Store(false)
				c.eventually("all goes on", func() { time.Sleep(time.Millisecond) }, func() bool { return c.established() == through && c.fresh() == through })
			})
		}
	}
}
