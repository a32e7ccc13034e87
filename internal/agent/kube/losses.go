package kube

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
)

// losses has a node's counters of packets, and of packets that were dropped or damaged.
type losses struct {
	links   map[int]counts // by index
	backlog uint64         // dropped from the CPUs' backlog queues
}

type counts struct{ packets, lost uint64 }

// readLosses reads the counters of the devices in the calling thread's network namespace, and of the
// machine's backlog queues.
func readLosses(proc string) (losses, error) {
	l := losses{links: make(map[int]counts)}
	links, err := netns.Dump("links", netlink.LinkList)
	if err != nil {
		return l, err
	}
	for _, link := range links {
		if s := link.Attrs().Statistics; s != nil {
			l.links[link.Attrs().Index] = counts{s.RxPackets + s.TxPackets, s.RxDropped + s.TxDropped + s.RxErrors + s.TxErrors}
		}
	}
	text, err := os.ReadFile(filepath.Join(proc, "net/softnet_stat"))
	if err != nil {
		return l, fmt.Errorf("read the backlog queues: %w", err)
	}
	l.backlog, err = backlogDrops(text)
	return l, err
}

// backlogDrops sums the second column of softnet_stat, which has a line per CPU
// (softnet_seq_show, net/core/net-procfs.c).
func backlogDrops(text []byte) (sum uint64, err error) {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		columns := bytes.Fields(lines.Bytes())
		if len(columns) < 2 {
			return 0, fmt.Errorf("read softnet_stat: a line has %d columns, want two at least", len(columns))
		}
		n, err := strconv.ParseUint(string(columns[1]), 16, 64)
		if err != nil {
			return 0, fmt.Errorf("read softnet_stat: %w", err)
		}
		sum += n
	}
	return sum, nil
}

// since returns the sums since an earlier reading, over the devices that are in both.
func (l losses) since(before losses) (all counts) {
	for index, now := range l.links {
		if was, ok := before.links[index]; ok && now.packets >= was.packets && now.lost >= was.lost {
			all.packets += now.packets - was.packets
			all.lost += now.lost - was.lost
		}
	}
	if l.backlog > before.backlog {
		all.lost += l.backlog - before.backlog
	}
	return all
}

func (c counts) share() float64 { return float64(c.lost) / float64(max(1, c.packets, c.lost)) }

// Losses have risen if their share exceeds twice the earlier share by 0.1 %. The factor is two
// because accelerated packets pass fewer devices, so fewer packets are counted. A few lost packets
// mean nothing.
const (
	lossRise  = 0.001
	lossFewer = 100
)

func risen(before, after counts) bool {
	return after.lost >= lossFewer && after.share() > 2*before.share()+lossRise
}
