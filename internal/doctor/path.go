package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Path holds the facts about the path from one machine to another.
type Path struct {
	Client, Server string
	// To is the server's address.
	To netip.Addr
	// Closed lists the transports whose traffic does not get from the client to a port that a run would use.
	Closed []Closed
	// Sent is the report of the client's kernel about the path. Datagrams is true if any datagram arrived.
	Sent      Sent
	Datagrams bool
	// MTU is the size in bytes of the largest packet that arrived; 0 if none did.
	MTU int
	// PodMTU is the MTU of the server's device, if the server is a pod: no larger packet has to arrive. It is 0 if the server is
	// none, or if the MTU is unknown.
	PodMTU int
	VXLAN  []VXLANPort
	// Tries are the transfers through VXLAN. Unprobed explains why there are none although they were requested.
	Tries    []Try
	Unprobed string
}

// Closed is a transport whose traffic does not get through.
type Closed struct {
	Protocol string
	Why      error
}

// Sent is a kernel's report about the datagrams that it was told to send.
type Sent struct {
	// Device is the device that sends the datagrams, and DeviceMTU its MTU.
	Device    string
	DeviceMTU int
	// Gateway is the gateway of the route, if it has one, and RouteMTU the MTU that the route is configured with, or 0. The
	// kernel sends no larger packets there, except for these datagrams.
	Gateway  netip.Addr
	RouteMTU int
	// ToldMTU is the path MTU that the kernel has learned from ICMP or a route.
	ToldMTU int
	// Refused explains why the kernel did not send the datagrams, if not because of their size: usually a rule
	// of its own firewall.
	Refused string
}

// most returns the size in bytes of the largest packet that the machine sends there.
func (s Sent) most() int {
	if s.RouteMTU > 0 {
		return min(s.DeviceMTU, s.RouteMTU)
	}
	return s.DeviceMTU
}

// Received holds the datagrams of a round that arrived.
type Received struct {
	// Complete means that the last datagram of the round, which is small, arrived.
	Complete bool
	// Sizes are the packet sizes in bytes, from the IP header on.
	Sizes []int
}

// VXLANPort tells whether VXLAN on a UDP port would get through.
type VXLANPort struct {
	Port uint16
	// Blocked means that datagrams to this port do not arrive, although others do.
	Blocked bool
	// Unknown explains why this could not be determined; it is empty if it could.
	Unknown string
	// Used means that the server has a VXLAN device with this port.
	Used bool
}

// Sender sends datagrams from a machine.
type Sender interface {
	// SendDatagrams sends packets of these sizes, in bytes from the IP header on. Each contains the key and the round. A
	// small packet follows as the last of the round. None of them may be fragmented.
	SendDatagrams(ctx context.Context, to netip.AddrPort, key []byte, round int, sizes []int) (Sent, error)
}

// Receiver receives on one machine the datagrams that SendDatagrams sends from another.
type Receiver interface {
	Port() uint16
	// Receive returns the datagrams of a round that have arrived. It waits up to a second for the last of the
	// round.
	Receive(round int) (Received, error)
	Close()
}

// OpenReceiver opens a Receiver at an address. For port 0 it chooses a free port.
type OpenReceiver func(ctx context.Context, at netip.AddrPort, key []byte) (Receiver, error)

// vxlanPorts are IANA's port (RFC 7348), and Linux's earlier default, which Flannel and Cilium use.
var vxlanPorts = []uint16{4789, 8472}

// Explore sends datagrams to find out which packet sizes, and which of the given VXLAN ports, get from a
// client to an address of a server. It fills in the results in the path.
func (p *Path) Explore(ctx context.Context, client Sender, open OpenReceiver, server Facts, ports []uint16) error {
	if err := p.explore(ctx, client, open, server, ports); err != nil {
		return fmt.Errorf("datagrams from %s to %s: %w", p.Client, p.Server, err)
	}
	return nil
}

func (p *Path) explore(ctx context.Context, client Sender, open OpenReceiver, server Facts, ports []uint16) error {
	c := crossing{to: p.To, client: client, key: newKey()}
	if err := p.measureMTU(ctx, c, open); err != nil || !p.Datagrams {
		return err
	}
	for _, port := range ports {
		v := VXLANPort{Port: port, Used: slices.ContainsFunc(server.Devices, func(d Device) bool { return d.VXLANPort == port })}
		at, err := open(ctx, netip.AddrPortFrom(p.To, port), c.key)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			v.Unknown = err.Error()
		default:
			v.Blocked, err = c.blocked(ctx, at)
			at.Close()
			if err != nil {
				return err
			}
		}
		p.VXLAN = append(p.VXLAN, v)
	}
	return nil
}

// keySize is the size in bytes of the key in a datagram.
const keySize = 16

func newKey() []byte {
	key := make([]byte, keySize)
	_, _ = rand.Read(key)
	return key
}

// newVNI returns a random VXLAN network identifier that is unlikely to be in use.
func newVNI() int {
	b := newKey()
	return 0xf00000 | int(b[0])<<8 | int(b[1])
}

// tries is how often a datagram is sent before it counts as blocked.
const tries = 3

// crossing sends rounds of datagrams to one address.
type crossing struct {
	to     netip.Addr
	client Sender
	key    []byte
	round  int
	sent   Sent
}

// send sends a round and returns the datagrams that arrived.
func (c *crossing) send(ctx context.Context, at Receiver, sizes ...int) (received Received, err error) {
	c.round++
	if c.sent, err = c.client.SendDatagrams(ctx, netip.AddrPortFrom(c.to, at.Port()), c.key, c.round, sizes); err != nil {
		return received, err
	}
	return at.Receive(c.round)
}

// blocked reports whether no datagram gets to a port.
func (c *crossing) blocked(ctx context.Context, at Receiver) (bool, error) {
	for range tries {
		received, err := c.send(ctx, at)
		if err != nil || received.Complete || len(received.Sizes) > 0 {
			return false, err
		}
	}
	return true, nil
}

// measureMTU finds the largest packet that arrives, up to the largest that the client sends.
func (p *Path) measureMTU(ctx context.Context, c crossing, open OpenReceiver) error {
	at, err := open(ctx, netip.AddrPortFrom(p.To, 0), c.key)
	if err != nil {
		return err
	}
	defer at.Close()
	blocked, err := c.blocked(ctx, at)
	p.Sent, p.Datagrams = c.sent, err == nil && !blocked
	if err != nil || blocked {
		return err
	}
	low, high := minimumMTU(p.To), min(c.sent.most(), largest)
	for range tries { // one loss is no finding
		received, err := c.send(ctx, at, high)
		if err != nil {
			return err
		}
		if slices.Contains(received.Sizes, high) {
			p.MTU, p.Sent = high, c.sent
			return nil
		}
	}
	for high-low > 1 {
		received, err := c.send(ctx, at, between(low, high)...)
		if err != nil {
			return err
		}
		if !received.Complete {
			return errors.New("datagrams arrive only sometimes")
		}
		for _, size := range between(low, high) {
			if !slices.Contains(received.Sizes, size) {
				high = size
				break
			}
			low = size
		}
	}
	p.MTU, p.Sent = low, c.sent
	return nil
}

// largest is the largest packet that is tried: a UDP datagram cannot be larger.
const largest = 65535

// minimumMTU is the packet size in bytes that every path carries: RFC 791 (the minimum for a host), RFC 8200.
func minimumMTU(to netip.Addr) int {
	if to.Is4() {
		return 576
	}
	return 1280
}

// between returns up to 8 sizes that divide an interval evenly, excluding its ends.
func between(low, high int) (sizes []int) {
	const parts = 9
	for i := 1; i < parts; i++ {
		if size := low + (high-low)*i/parts; size > low && (len(sizes) == 0 || size > sizes[len(sizes)-1]) {
			sizes = append(sizes, size)
		}
	}
	return sizes
}

// pathRules are the rules for paths, by name.
var pathRules = []struct {
	name string
	find func(Path) []Finding
}{
	{"port-blocked", portBlocked},
	{"path-mtu", pathMTU},
	{"vxlan-blocked", vxlanBlocked},
	{"offload-fault", offloadFault},
}

// Pair returns the name of a path in findings.
func Pair(client, server string) string { return client + " to " + server }

// ExaminePath applies all rules for paths.
func ExaminePath(p Path) (all []Finding) {
	for _, r := range pathRules {
		for _, found := range r.find(p) {
			found.Rule, found.Where = r.name, Pair(p.Client, p.Server)
			all = append(all, found)
		}
	}
	return all
}

func portBlocked(p Path) (found []Finding) {
	for _, c := range p.Closed {
		found = append(found, Finding{
			Severity: Serious,
			What:     fmt.Sprintf("No traffic reaches %s by %s.", p.To, c.Protocol),
			Evidence: []Evidence{evidence("a message and its reply, as in a trial", "%v", c.Why)},
			Cost:     "A run between the two fails before its first block.",
			Do:       "Let the ports of net.ipv4.ip_local_port_range (32768 to 60999) through every firewall between them, for TCP and UDP; to see the machines' own rules: nft list ruleset; iptables-save",
		})
	}
	if !p.Datagrams && len(p.Closed) == 0 {
		found = append(found, Finding{
			Severity: Serious,
			What:     fmt.Sprintf("No datagram arrives at %s.", p.To),
			Evidence: append([]Evidence{evidence("UDP datagrams of less than 100 bytes", "%d sent, none arrived", tries)}, p.refused()...),
			Cost:     "Workloads over UDP fail, and so does a VXLAN overlay between the two.",
			Do:       "Let UDP through every firewall between them; to see the machines' own rules: nft list ruleset; iptables-save",
		})
	}
	return found
}

func (p Path) refused() []Evidence {
	if p.Sent.Refused == "" {
		return nil
	}
	return []Evidence{evidence("the kernel of "+p.Client, "%s", p.Sent.Refused)}
}

func pathMTU(p Path) []Finding {
	t := p.Sent
	if !p.Datagrams || p.MTU >= min(t.most(), largest) || p.PodMTU > 0 && p.MTU >= p.PodMTU {
		return nil
	}
	told := t.ToldMTU <= p.MTU
	route := fmt.Sprintf("ip route replace %s dev %s", p.To, t.Device)
	if t.Gateway.IsValid() {
		route = fmt.Sprintf("ip route replace %s via %s dev %s", p.To, t.Gateway, t.Device)
	}
	finding := Finding{
		Severity: Serious,
		What:     fmt.Sprintf("Packets of more than %d bytes vanish, and %s sends up to %d.", p.MTU, t.Device, t.most()),
		Evidence: []Evidence{
			evidence("datagrams that may not be fragmented", "%d bytes arrive, %d do not", p.MTU, p.MTU+1),
			evidence("/sys/class/net/"+t.Device+"/mtu of "+p.Client, "%d", t.DeviceMTU),
			evidence("path MTU that the kernel of "+p.Client+" knows", "%d", t.ToldMTU),
		},
		Cost: "The sender does not learn of it (ICMP \"fragmentation needed\" does not arrive): connections open, and hang at the first large transfer, unless both ends announce a smaller MSS. Packets of an overlay are lost.",
		Do: fmt.Sprintf("%s mtu %d   # on %s, and smaller MTUs for its overlay devices, by the headers that they add; if no path from %[4]s carries more: ip link set %[4]s mtu %[2]d; or a larger MTU on every switch and router between the two",
			route, p.MTU, p.Client, t.Device),
	}
	if t.RouteMTU > 0 {
		finding.Evidence = append(finding.Evidence, evidence("ip route get fibmatch "+p.To.String()+" of "+p.Client, "mtu %d", t.RouteMTU))
	}
	if told {
		finding.Severity = Warning
		finding.What = fmt.Sprintf("The path carries packets of up to %d bytes, and %s sends up to %d.", p.MTU, t.Device, t.most())
		finding.Cost = "ICMP tells the sender, which then sends smaller packets. Packets of an overlay are fragmented, which costs CPU time at both ends, or dropped."
	}
	if p.PodMTU > 0 { // a smaller MTU of the node's NIC would leave no room for the headers of an overlay
		finding.Evidence = append(finding.Evidence, evidence("MTU of the device of "+p.Server, "%d", p.PodMTU))
		finding.Do = fmt.Sprintf("Set MTU %d in the configuration of the CNI, and create the pods again; or a larger MTU on every device between the two", p.MTU)
	}
	return []Finding{finding}
}

func vxlanBlocked(p Path) (found []Finding) {
	for _, v := range p.VXLAN {
		if !v.Blocked {
			continue
		}
		finding := Finding{
			Severity: Note,
			What:     fmt.Sprintf("UDP port %d, which VXLAN overlays use, is blocked.", v.Port),
			Evidence: append([]Evidence{evidence(fmt.Sprintf("datagrams to UDP port %d", v.Port), "%d sent, none arrived; datagrams to another port arrive", tries)}, p.refused()...),
			Cost:     "The receiving host has no overlay on that port now. A new one would deliver nothing from node to node.",
			Do:       fmt.Sprintf("Let UDP port %d through every firewall between them, if an overlay is to use it.", v.Port),
		}
		if v.Used {
			finding.Severity = Serious
			finding.Cost = "Pods on the two do not reach each other through the overlay."
			finding.Do = fmt.Sprintf("Let UDP port %d through every firewall between them; to see the machines' own rules: nft list ruleset; iptables-save", v.Port)
		}
		found = append(found, finding)
	}
	return found
}
