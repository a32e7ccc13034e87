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

	"slipstream.dev/internal/spec"
)

// queueHandler returns verdicts on queued packets, as kube-network-policies does.
type queueHandler struct {
	queued atomic.Int64
	denies atomic.Bool
	// holds delays the verdicts.
	holds atomic.Bool
}

// Constants of nfnetlink_queue (include/uapi/linux/netfilter/nfnetlink_queue.h).
const (
	nfqMsgVerdict, nfqMsgConfig                 = 1, 2
	nfqaPacketHeader, nfqaVerdictHeader         = 1, 2
	nfqaConfigCommand, nfqaConfigParams         = 1, 2
	nfqCommandBind, nfqCopyMeta, nfDrop, nfPass = 1, 1, 0, 1
)

func (w *world) handleQueue(node string, queue uint16) *queueHandler {
	w.Helper()
	j := new(queueHandler)
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
				w.Errorf("receive from the queue: %v", err)
				return
			}
			for _, m := range messages {
				// The kernel drops all queued packets of a network namespace when a netfilter hook
				// is detached (nf_queue_nf_hook_drop), as happens when the fast path ends. It
				// rejects a verdict on one of them.
				if m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4 && int32(binary.NativeEndian.Uint32(m.Data)) == -int32(unix.ENOENT) {
					continue
				}
				attributes, err := nl.ParseRouteAttr(m.Data[min(nl.SizeofNfgenmsg, len(m.Data)):])
				if err != nil || len(attributes) == 0 || attributes[0].Attr.Type != nfqaPacketHeader || len(attributes[0].Value) < 4 {
					w.Errorf("message of type %d with attributes %v: %v", m.Header.Type, attributes, err)
					return
				}
				j.queued.Add(1)
				for j.holds.Load() && !over.Load() {
					time.Sleep(time.Millisecond)
				}
				verdict := uint32(nfPass)
				if j.denies.Load() {
					verdict = nfDrop
				}
				id := attributes[0].Value[:4]
				if err := request(nfqMsgVerdict, nfqaVerdictHeader, append(binary.BigEndian.AppendUint32(nil, verdict), id...)); err != nil {
					w.Errorf("send a verdict: %v", err)
				}
			}
		}
	}()
	return j
}

// TestNFQueue lets a program decide on packets by NFQUEUE while connections are accelerated. The program must see each new
// connection and be able to deny it. Established connections continue if a rule accepts them, as with kube-network-policies. If
// the program denies them they must stop within a second, because the kernel sends no notification of its decision.
func TestNFQueue(t *testing.T) {
	t.Parallel()
	const accept = "-A POSTROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
	for _, tt := range []struct {
		name, accept, established string
	}{
		{"new connections", accept, through},
		{"all packets", "", silence},
	} {
		for _, with := range []string{"without", "with"} {
			t.Run(tt.name+" "+with, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
				j := w.handleQueue("n1", 100)
				w.restore("n1", "iptables-nft", "*mangle\n"+tt.accept+"-A POSTROUTING -d 10.244.1.2 -j NFQUEUE --queue-num 100 --queue-bypass\nCOMMIT\n")
				limit := soon
				if with == "with" {
					w.start()
					limit = within
				}
				c := w.dialogue()
				c.waitAccelerated(c.connect().back())
				const n = 10
				before, dials := j.queued.Load(), c.dials
				for range n {
					if fresh := c.fresh(through); fresh != through {
						t.Errorf("a new connection sees %s", fresh)
					}
				}
				queued, tried := j.queued.Load()-before, int64(c.dials-dials)
				t.Logf("%d packets were queued for %d new connections and the established ones", queued, n)
				if queued < n || tt.accept != "" && queued > tried {
					t.Errorf("%d packets were queued, want %d", queued, n)
				}
				j.denies.Store(true)
				set := time.Now()
				if fresh := c.fresh(silence); fresh != silence {
					t.Errorf("a denied connection sees %s", fresh)
				}
				c.eventually("the limit has passed", nil, func() bool { return time.Since(set) > limit })
				if established := c.established(tt.established); established != tt.established {
					t.Errorf("the established connection sees %s, want %s", established, tt.established)
				}
				j.denies.Store(false)
				c.eventually("all connections get through", nil, func() bool { return c.established(through) == through && c.fresh(through) == through })
			})
		}
	}
}
