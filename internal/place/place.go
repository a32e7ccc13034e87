// Package place defines what a place is: a node or pod in which a worker can be started. Each of its
// sub-packages creates the places of one kind of target; internal/experiment needs only the types here.
package place

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"
)

// Kind of a place.
type Kind string

// A place is a node or a pod on one.
const (
	Node Kind = "node"
	Pod  Kind = "pod"
)

// Place is somewhere that a worker can run.
type Place struct {
	// Name is unique in the target: "node0", "node0/pod3".
	Name string
	Kind Kind
	// Node is the name of the node that the place is, or is on.
	Node string
	// IPv4 and IPv6 are the addresses of its traffic.
	IPv4, IPv6 netip.Addr
	// Addresses are further addresses of a host, by name.
	Addresses map[string]netip.Addr
	// Service is the address of the service in front of a server in this place, if there is one; the
	// server then listens on Service.Port.
	Service Service
	// Services are further ones, by their number of backends, which are ports of the place. The server then
	// listens on Service.Ports ports.
	Services map[int]Service
	// Role of a node in a lab's balancer, one of the API's; otherwise empty. The proxy's Service is that
	// of the first pair; the other pairs use the ports after it.
	Role string
	// NICRate limits the NIC of a lab's node, in bit/s; 0 for no limit.
	NICRate uint64
	// Cores are the CPUs that a lab node's processes run on: CPUs or Affinity as numbers. Shared means that
	// processes of other nodes run there too.
	Cores  []int
	Shared bool
	// Unprivileged: a worker here may neither sample counters nor apply accelerators. For a pod, a worker
	// for control does it from the node; for a node, none does.
	Unprivileged bool
	// StandsFor is the pod that traffic on a node stands in for.
	StandsFor string
	// CPUs of the node, as a list ("0-3"); empty means all of the machine.
	CPUs string
	// Affinity are the CPUs that processes of the place run on, as a list; empty
	// means those of the node.
	Affinity string
	// IRQCPUs take the node's NIC's interrupts; empty means that the worker finds out.
	IRQCPUs string
}

// IP returns the place's address of IP version 4 or 6; invalid if it has none.
func (p Place) IP(version int) netip.Addr {
	if version == 6 {
		return p.IPv6
	}
	return p.IPv4
}

// Service is an address in front of a server.
type Service struct {
	IPv4, IPv6 netip.Addr
	Port       uint16
	// Everywhere: the service has backends at further addresses of the place, so the server listens at
	// all addresses.
	Everywhere bool
	// Ports is how many ports of the place the service has as its backends, from Port on; 0 is one.
	Ports int
}

// Position locates one end of a pair: the number of the node, and of the pod on it.
type Position struct {
	Node int `json:"node"`
	Pod  int `json:"pod"`
}

// Transport is the IP version and protocol of traffic through a service.
type Transport struct {
	// IP is 4 or 6, Protocol "tcp" or "udp".
	IP       int    `json:"ip"`
	Protocol string `json:"protocol"`
}

// Pair says where the ends of a pair are.
type Pair struct {
	Client Place
	// Servers has one server or, if Backends is set, the backends of a balancer, among which long-lived
	// connections are divided.
	Servers  []Place
	Backends bool
	// To is the address that the client connects to: that of its server, or of what is in front of it. If the
	// port is 0, the server chooses one.
	To netip.AddrPort
	// Everywhere means that what is in front of the server uses further addresses of the server's place.
	Everywhere bool
	// Ports is how many ports the server listens at, as the backends of what is in front of it; 0 is one.
	Ports int
}

// Listen returns where a server of the pair listens, for traffic of an IP version.
func (p Pair) Listen(server Place, ip int) netip.AddrPort {
	at := server.IP(ip)
	switch {
	case p.Everywhere && ip == 6:
		at = netip.IPv6Unspecified()
	case p.Everywhere:
		at = netip.IPv4Unspecified()
	}
	return netip.AddrPortFrom(at, p.To.Port())
}

// Setup describes a network as a whole.
type Setup struct {
	// Placement says in a sentence where the nodes' work runs.
	Placement string
	// CongestionControl that its traffic uses; the machine's if empty.
	CongestionControl string
	// Lead is the longest time that the start time of traffic takes to reach the workers.
	Lead time.Duration
}

// Served are the pods of a network that have services in front of them, and the transports of those.
type Served struct {
	Positions  []Position
	Transports []Transport
}

// AddrPort returns the service's address of IP version 4 or 6.
func (s Service) AddrPort(version int) netip.AddrPort {
	if version == 6 {
		return netip.AddrPortFrom(s.IPv6, s.Port)
	}
	return netip.AddrPortFrom(s.IPv4, s.Port)
}

// Use is the purpose of a worker.
type Use string

// A worker for traffic runs as an application would in its place. One for control samples counters and
// applies accelerators, and may have more privileges.
const (
	ForTraffic Use = "traffic"
	ForControl Use = "control"
)

// PrepareWait bounds how long the commands that prepare an application's server may take: a database for 1024 connections has 15 GB.
const PrepareWait = 5 * time.Minute

// RoomWait bounds how long a sampler waits until conntrack has room for the connections of a trial.
const RoomWait = 150 * time.Second

// Sampling says what a worker samples in its place, and when.
type Sampling struct {
	Place string
	// CPUs includes those of the machine.
	CPUs bool
	// Observe are pods on the node whose use of CPUs and memory is measured.
	Observe []Observed
	// Connections is how many the trial opens, if that is known. The worker is ready when conntrack has room for them.
	Connections      int
	Warmup, Duration time.Duration
	// Early ends the window when it is closed, if that comes before Duration has passed; it may be nil.
	Early <-chan struct{}
}

// Observed is a DaemonSet's pod on a node.
type Observed struct {
	DaemonSet string // namespace/name
	UID       string // of the pod
	// Containers are the IDs of its running containers, without the runtime's name.
	Containers []string
	// Missing says why there is no pod to observe; UID is then empty.
	Missing string
}

// ErrLost means that the target is unreachable, or nodes or pods of it are gone, so that no trial can succeed any
// more.
var ErrLost = errors.New("the target is lost")

// ErrNoSpace means that a file system on which a place writes is full, so that nothing was changed there and no trial
// can succeed until there is space.
var ErrNoSpace = errors.New("a disk is full")

// NoSpace reports whether an error means that a disk is full, here or in a place.
func NoSpace(err error) bool {
	return errors.Is(err, ErrNoSpace) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// ChangedError means that somebody else changed settings while accelerators were applied, and says which. Their values stay, and the
// other settings are restored.
type ChangedError string

func (e ChangedError) Error() string {
	return "somebody else changed settings that the variant had set: " + string(e)
}

// LostError is an ErrLost with its reason.
type LostError struct{ Why error }

func (e *LostError) Error() string { return fmt.Sprintf("%v: %v", ErrLost, e.Why) }

// Unwrap returns ErrLost and the reason.
func (e *LostError) Unwrap() []error { return []error{ErrLost, e.Why} }
