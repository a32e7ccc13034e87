package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

var (
	// datagrams are all UDP datagrams that reached UDP, those in error included.
	datagrams = []string{"Udp.InDatagrams", "Udp.InErrors", "Udp.NoPorts", "Udp6InDatagrams", "Udp6InErrors", "Udp6NoPorts"}
	segments  = []string{"Tcp.InSegs"}
	received  = []string{"Ip.InReceives", "Ip6InReceives"}
)

const senderOffload = "On the SENDER, for a trial: ethtool -K OVERLAY tx-checksum-ip-generic off   # OVERLAY: flannel.1, vxlan.calico …; if the counter here stops, keep it there. " +
	"To find out which offload is faulty: slipstream doctor hosts:SENDER,THIS --probe"

// stackLoss describes packets that a stack lost, and the counters that show it.
type stackLoss struct {
	// lost are counters of lost packets. all are counters of all packets, the lost ones included; nil if the kernel has
	// none.
	lost, all []string
	// beside are counters that say more about the lost packets, which they count again.
	beside []string
	// most is the highest severity.
	most Severity
	// node leaves out the pods.
	node           bool
	what, cost, do string
	// unless returns true if another rule reports these packets of a stack, or if they are no fault.
	unless func(Facts, Stack) bool
}

// judge judges the counters of a stack. If the kernel does not count all such packets, 10 lost ones are a warning,
// because their share is unknown.
func (l stackLoss) judge(s Stack) (Severity, bool) {
	lost := s.sum(l.lost...)
	if l.all == nil {
		severity, many := loss(lost, s.sum(received...))
		return cmp.Or(severity, Warning), many || lost >= 10
	}
	return loss(lost, s.sum(l.all...))
}

// find judges the counters of all stacks. The finding has the worst severity, and the largest counters as its evidence.
func (l stackLoss) find(f Facts) []Finding {
	finding := Finding{Severity: Note, What: l.what, Cost: l.cost, Do: l.do}
	type of struct {
		Evidence
		lost uint64
	}
	var read []of
	for _, s := range f.Stacks {
		severity, lost := l.judge(s)
		if !lost || l.node && s.Pod != "" || l.unless != nil && l.unless(f, s) {
			continue
		}
		finding.Severity = worse(finding.Severity, severity)
		in := ""
		if s.Pod != "" {
			in = " of the pod behind " + s.Pod
		}
		for _, name := range slices.Concat(l.lost, l.beside) {
			if n := s.Counts[name]; n > 0 {
				source, counter := sourceOf(name)
				e := evidence(source+in+", "+counter+", in "+f.window(), "%d", n)
				if l.all != nil {
					e.Value += fmt.Sprintf(", of %d in all", s.sum(l.all...))
				}
				read = append(read, of{e, n})
			}
		}
	}
	if read == nil {
		return nil
	}
	if worse(l.most, finding.Severity) != l.most {
		finding.Severity = l.most
	}
	slices.SortStableFunc(read, func(a, b of) int { return cmp.Compare(b.lost, a.lost) })
	const most = 5
	for _, r := range read[:min(len(read), most)] {
		finding.Evidence = append(finding.Evidence, r.Evidence)
	}
	if more := len(read) - most; more > 0 {
		finding.Evidence = append(finding.Evidence, evidence("others", "%d more counters", more))
	}
	return []Finding{finding}
}

// stackLosses are the rules about counters of stacks.
var stackLosses = map[string]stackLoss{
	"udp-checksums": {
		lost: []string{"Udp.InCsumErrors", "Udp6InCsumErrors", "UdpLite.InCsumErrors"}, all: datagrams, most: Serious,
		what: "UDP packets arrive with wrong checksums, and the kernel drops them.",
		cost: "VXLAN packets are UDP: if a sender's kernel, driver or hypervisor computes their outer checksums wrongly, pods on the two nodes do not reach each other, or only through addresses that are not translated. " + lostPackets,
		do:   senderOffload,
	},
	"tcp-checksums": {
		lost: []string{"Tcp.InCsumErrors"}, all: segments, most: Serious,
		what: "TCP segments arrive with wrong checksums, and the kernel drops them.",
		cost: "The sender's checksum offload, its hypervisor, or a device on the path damages packets. " + lostPackets,
		do:   senderOffload,
	},
	"udp-buffer-full": {
		lost: []string{"Udp.RcvbufErrors", "Udp6RcvbufErrors"}, all: datagrams, most: Serious,
		what: "Receive buffers of UDP sockets overflow: programs read more slowly than datagrams arrive.",
		cost: "The datagrams are lost after they crossed the whole network: DNS queries, QUIC, tunnels of programs. No accelerator changes that.",
		do:   "ss -uampn   # the socket whose skmem has a growing d (drops); give its program more CPU time, or a larger SO_RCVBUF (sysctl net.core.rmem_max limits it)",
	},
	"udp-memory": {
		lost: []string{"Udp.MemErrors", "Udp6MemErrors"}, all: datagrams, most: Serious,
		what: "All UDP sockets together have used up the memory that net.ipv4.udp_mem allows.",
		cost: "Datagrams to every UDP socket of the machine are lost, VXLAN's excepted.",
		do:   "cat /proc/net/sockstat; sysctl net.ipv4.udp_mem   # first find the socket that does not read: ss -uampn; then raise the limit if it is too small",
	},
	"udp-send-full": {
		lost: []string{"Udp.SndbufErrors", "Udp6SndbufErrors"}, all: []string{"Udp.OutDatagrams", "Udp.SndbufErrors", "Udp6OutDatagrams", "Udp6SndbufErrors"}, most: Warning,
		what: "UDP sockets cannot send: their send buffers, or the queues of the devices below, are full.",
		cost: "The program gets an error (ENOBUFS, EAGAIN), and most programs lose the datagram.",
		do:   "tc -s qdisc show; ss -uamn   # which queue is full; then a slower sender, or a larger SO_SNDBUF (sysctl net.core.wmem_max limits it)",
	},
	"accept-queue-full": {
		lost: []string{"TcpExt.ListenDrops"}, beside: []string{"TcpExt.ListenOverflows", "TcpExt.TCPReqQFullDrop"}, all: []string{"Tcp.PassiveOpens", "TcpExt.ListenDrops"}, most: Serious,
		what: "Accept queues overflow: programs accept connections more slowly than clients open them.",
		cost: "The client's SYN is dropped, and it tries again after 1, 3, 7 s: connections that take seconds to open.",
		do:   "ss -ltn   # the listener whose Recv-Q is at its Send-Q; give its program more CPU time, or a longer queue (the backlog of listen; sysctl net.core.somaxconn limits it)",
	},
	"tcp-queue-full": {
		lost: []string{"TcpExt.TCPBacklogDrop", "TcpExt.TCPRcvQDrop", "TcpExt.RcvPruned", "TcpExt.OfoPruned", "TcpExt.TCPZeroWindowDrop", "TcpExt.PFMemallocDrop"}, all: segments, most: Serious,
		what: "TCP sockets drop segments because their queues or the memory for them are full.",
		cost: lostPackets,
		do:   "ss -tmn; cat /proc/net/sockstat; sysctl net.ipv4.tcp_mem net.ipv4.tcp_rmem   # the sockets that do not read, then the limits",
	},
	"tcp-memory": {
		lost: []string{"TcpExt.TCPAbortOnMemory"}, most: Serious,
		what: "The kernel resets TCP connections for lack of memory: all TCP sockets together have used up net.ipv4.tcp_mem, or too many are closed and not yet empty (net.ipv4.tcp_max_orphans).",
		cost: "Connections of every program break, and the kernel logs \"TCP: out of memory -- consider tuning tcp_mem\". All network namespaces of the machine share the limits.",
		do:   "cat /proc/net/sockstat; ss -tanm   # the sockets with large queues, whose programs do not read; then sysctl net.ipv4.tcp_mem net.ipv4.tcp_max_orphans, if they are too small",
	},
	"conntrack-drops": {
		// Some kernels count an insert_failed, too, where two packets raced and both were accepted.
		lost: []string{"nf_conntrack.drop", "nf_conntrack.early_drop"}, beside: []string{"nf_conntrack.insert_failed"}, most: Serious,
		what: "Conntrack drops packets, or entries of connections.",
		cost: "drop: an insert race (insert_failed grows too), or the table was full. In such a race two packets open one flow, and one is dropped: a resolver that sends two queries at once from one port waits 5 s. " +
			"early_drop: an entry was deleted to make room, and its connection may stop.",
		do: "conntrack -S; for insert_failed: a DNS cache on each node (NodeLocal DNSCache), or options single-request-reopen in resolv.conf; for drop and early_drop: sysctl net.netfilter.nf_conntrack_max, and what opens so many connections: conntrack -L",
	},
	"conntrack-invalid": {
		lost: []string{"nf_conntrack.invalid"}, all: received, most: Note,
		what: "Conntrack classifies packets as invalid.",
		cost: "Their addresses are not translated, and rules may drop them. In connections through services, the other end then answers with a reset: connections that break under load. After a connection has ended, a few such packets are normal.",
		do:   "conntrack -S   # while the connections break; for a trial: sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1",
	},
	"reassembly": {
		lost: []string{"Ip.ReasmFails", "Ip6ReasmFails"}, all: []string{"Ip.ReasmReqds", "Ip6ReasmReqds"}, most: Serious,
		what: "Fragments arrive that cannot be put together.",
		cost: "A packet is lost if one of its fragments is, or if the memory for fragments is full (ipfrag_high_thresh). Fragments of an overlay's packets mean that its MTU is too large.",
		do:   "slipstream doctor hosts:SENDER,THIS   # whether large packets get through; sysctl net.ipv4.ipfrag_high_thresh; a smaller MTU of the sender's overlay",
	},
	"fragmented": {
		lost: []string{"Ip.FragFails", "Ip6FragFails"}, all: []string{"Ip.OutRequests", "Ip.ForwDatagrams", "Ip6OutRequests", "Ip6OutForwDatagrams"}, most: Serious,
		what: "Packets are too large for the device that should send them, and may not be fragmented: the kernel drops them.",
		cost: "Where ICMP \"fragmentation needed\" does not reach the sender, connections open, and hang at the first large transfer.",
		do:   "ip link; ip route   # MTUs of the devices that packets come from and go to; then the smaller MTU in the configuration of the CNI",
		unless: func(f Facts, _ Stack) bool {
			return len(podMTU(f))+len(mtuTooLarge(f)) > 0
		},
	},
	"no-route": {
		// Not Ip.OutNoRoutes, which counts each connect to IPv4 in a pod without it.
		lost: []string{"IpExt.InNoRoutes", "Ip6InNoRoutes"}, all: received, most: Serious,
		what: "Packets have no route.",
		cost: "They are lost. Packets of pods to other nodes have no route if the CNI's daemon does not run, or if its overlay is down or gone.",
		do:   "ip route; ip -s link   # which destinations have none; the log of the CNI's daemon on this node",
		unless: func(f Facts, _ Stack) bool {
			return len(overlayDown(f))+len(overlayGone(f)) > 0
		},
	},
	"not-for-us": {
		lost: []string{"Ip.InAddrErrors", "Ip6InAddrErrors"}, all: received, most: Serious,
		what: "Packets arrive that are not for this network namespace, and that it does not forward.",
		cost: "They are lost. Either forwarding is off on the device that receives them, or another machine sends packets to this one by mistake: a stale route or neighbour entry.",
		do:   "sysctl -a | grep -w forwarding; on the senders: ip route; ip neigh",
		unless: func(f Facts, _ Stack) bool {
			return len(ipForward(f))+len(overlayDown(f))+len(overlayGone(f)) > 0
		},
	},
	"ttl": {
		lost: []string{"Ip.InHdrErrors", "Ip6InHdrErrors"}, all: received, most: Serious,
		what: "Packets arrive whose TTL has expired, or whose header is damaged.",
		cost: "A TTL that expires on a node means that packets loop between nodes: two nodes have routes for the same addresses to each other. The packets are lost, and each crosses the network up to 64 times.",
		do:   "ip route get ADDRESS   # on each of the nodes, for the address of a pod that is not reached: the routes must not point at each other",
	},
	"unknown-protocol": {
		lost: []string{"Ip.InUnknownProtos", "Ip6InUnknownProtos"}, all: received, most: Serious,
		what: "IP packets arrive whose protocol nothing here handles.",
		cost: "They are lost. IPIP (protocol 4), GRE (47) and ESP (50) need a tunnel device or a security association on this node: another node sends through an overlay that this one lacks.",
		do:   "tcpdump -ni any 'not tcp and not udp and not icmp'   # which protocol, from which node; then the CNI's daemon on this node",
	},
	"ip-discards": {
		// Ip6InDiscards counts all that a device without IPv6 receives of it (ip6_rcv_core).
		lost: []string{"Ip.InDiscards", "Ip.OutDiscards", "Ip6OutDiscards"}, all: slices.Concat(received, []string{"Ip.OutRequests", "Ip6OutRequests"}), most: Serious,
		what: "The kernel discards IP packets that have no fault of their own.",
		cost: "Memory is short, a rule of the output hook or an eBPF program forbids them, or a queue is full. " + lostPackets,
		do:   "nft list ruleset; iptables-save -c; tc -s qdisc show; perf trace -e skb:kfree_skb   # the reason of each drop",
		unless: func(_ Facts, s Stack) bool { // the messages about packets that are too large
			return s.sum("Ip.InDiscards") == 0 && s.sum("Ip.OutDiscards", "Ip6OutDiscards") <= s.sum("Ip.FragFails", "Ip6FragFails")
		},
	},
	"no-listener": {
		lost: []string{"Udp.NoPorts", "Udp6NoPorts"}, all: datagrams, most: Warning, node: true,
		what: "UDP datagrams arrive at ports where nothing listens, and this node sends by VXLAN and receives nothing.",
		cost: "They are lost. If they are VXLAN packets, another node sends to another port than this one has, and pods on the two do not reach each other. Otherwise they are late replies or scans, and nothing is wrong.",
		do:   "tcpdump -ni any udp and port 4789 or udp and port 8472; ip -d link show type vxlan   # the dstport of all nodes must be the same; slipstream doctor hosts:THIS,OTHER compares them",
		unless: func(f Facts, s Stack) bool {
			_, deaf := f.deafVXLAN()
			return !deaf || s.sum("Udp.NoPorts", "Udp6NoPorts")*100 < s.sum(datagrams...)
		},
	},
	"ipsec": {
		lost: []string{
			"XfrmInError", "XfrmInBufferError", "XfrmInNoStates", "XfrmInStateProtoError", "XfrmInStateModeError", "XfrmInStateSeqError", "XfrmInStateExpired", "XfrmInStateMismatch", "XfrmInStateInvalid",
			"XfrmInTmplMismatch", "XfrmInNoPols", "XfrmInPolBlock", "XfrmOutError", "XfrmOutNoStates", "XfrmOutStateProtoError", "XfrmOutStateModeError", "XfrmOutStateSeqError", "XfrmOutStateExpired", "XfrmOutPolBlock",
		}, all: received, most: Serious,
		what: "IPsec drops packets.",
		cost: "Packets between nodes that encrypt their traffic are lost: a key is missing on one side (NoStates), differs (ProtoError), or has expired.",
		do:   "cat /proc/net/xfrm_stat; ip -s xfrm state   # on both nodes: the same SPIs; then the daemon that distributes the keys",
	},
}

// neighbourFull finds that the table of neighbours was full.
func neighbourFull(f Facts) (found []Finding) {
	for _, name := range []string{"arp_cache", "ndisc_cache"} {
		n := f.NeighbourFulls[name]
		if n == 0 {
			continue
		}
		family := map[string]string{"arp_cache": "ipv4", "ndisc_cache": "ipv6"}[name]
		setting := "net." + family + ".neigh.default.gc_thresh3"
		found = append(found, Finding{
			Severity: Serious,
			Fault:    name,
			What:     "The table of neighbours is full: the kernel cannot send to addresses that are not in it.",
			Evidence: []Evidence{
				evidence("/proc/net/stat/"+name+", table_fulls, in "+f.window(), "%d", n),
				evidence("/proc/sys/"+strings.ReplaceAll(setting, ".", "/"), "%s", settingOr(f.Settings[setting])),
			},
			Cost: "Packets to other addresses are dropped, and the kernel logs \"neighbour: arp_cache: neighbor table overflow!\". All network namespaces of the machine share the table.",
			Do:   fmt.Sprintf("sysctl -w %s=%s   # and gc_thresh2 below it, and gc_thresh1; in /etc/sysctl.d too", setting, quadruple(f.Settings[setting])),
		})
	}
	return found
}

func settingOr(value string) string {
	if value == "" {
		return "not visible in this network namespace"
	}
	return value
}

// manageQueues has the queueing disciplines that drop packets on purpose, to slow senders down.
var manageQueues = []string{"fq_codel", "codel", "cake", "pie", "fq_pie", "red", "sfb"}

// qdiscDrops finds queueing disciplines that drop. Those of clsact and ingress are left out: filters drop there, by policy.
func qdiscDrops(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		for _, q := range d.Qdiscs {
			severity, lost := loss(q.Dropped, q.Dropped+q.Sent)
			if !lost || q.Kind == "clsact" || q.Kind == "ingress" {
				continue
			}
			finding := Finding{
				Severity: severity,
				Fault:    q.Kind,
				What:     fmt.Sprintf("The queue of %s (qdisc %s) drops packets.", d.Name, q.Kind),
				Evidence: []Evidence{evidence("tc -s qdisc show dev "+d.Name+", "+q.Kind+" "+q.Handle+", dropped, in "+f.window(), "%d, beside %d packets sent", q.Dropped, q.Sent)},
				Cost:     "The device, or a rate that the qdisc sets, is slower than the sender. " + lostPackets,
				Do:       "tc -s qdisc show dev " + d.Name + "   # a rate (tbf, htb: the CNI's bandwidth annotation), a limit that is too small, or a full link",
			}
			if slices.Contains(manageQueues, q.Kind) {
				finding.Severity = Note
				finding.Cost = "This qdisc drops to tell TCP to slow down, which is how it keeps latency low. UDP loses packets."
			}
			found = append(found, finding)
		}
	}
	return found
}

// netem finds devices with a qdisc that delays or drops packets on purpose. A failure test may have left it behind.
func netem(f Facts) (found []Finding) {
	add := func(name, remedy string) {
		found = append(found, Finding{
			Severity: Warning,
			What:     fmt.Sprintf("A qdisc of the kind netem delays, drops or damages packets of %s on purpose.", name),
			Evidence: []Evidence{evidence("tc qdisc show dev "+name, "netem")},
			Cost:     "The delay or loss that it is set to. A failure test may have left it behind (Chaos Mesh, LitmusChaos, a script).",
			Do:       remedy + "   # unless somebody tests with it now",
		})
	}
	for _, d := range f.Devices {
		if d.Emulates {
			add(d.Name, "tc qdisc show dev "+d.Name+"; tc qdisc del dev "+d.Name+" root")
		}
		if d.Pod != nil && d.Pod.Emulates {
			add(d.Pod.Device+" of the pod behind "+d.Name, fmt.Sprintf("nsenter -t PID -n tc qdisc show dev %s; nsenter -t PID -n tc qdisc del dev %s root", d.Pod.Device, d.Pod.Device))
		}
	}
	return found
}

// linkFlaps finds NICs whose link went down in the window, and devices that went away.
func linkFlaps(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.NIC == nil || d.CarrierDowns == 0 {
			continue
		}
		found = append(found, Finding{
			Severity: Serious,
			What:     fmt.Sprintf("The link of %s went down.", d.Name),
			Evidence: []Evidence{evidence("/sys/class/net/"+d.Name+"/carrier_down_count, in "+f.window(), "%d", d.CarrierDowns)},
			Cost:     "Packets are lost until the link is up, and routes and neighbour entries of the device are learned again.",
			Do:       "dmesg | grep " + d.Name + "   # the cable, the port of the switch, or the host that moves or removes the virtual function",
		})
	}
	if len(f.Gone) > 0 {
		found = append(found, Finding{
			Severity: Warning,
			What:     "A NIC went away, or was replaced, while doctor looked: " + some(slices.Clone(f.Gone)) + ".",
			Evidence: []Evidence{evidence("ip link, at both ends of "+f.window(), "another index, or none")},
			Cost:     "A host that removes a virtual function moves its traffic to the paravirtual device, and resets connections of programs that used it directly.",
			Do:       "dmesg | tail   # what removed it: live migration, servicing of the host, a driver",
		})
	}
	return found
}
