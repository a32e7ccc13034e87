//go:build linux

package programs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Services holds the programs that translate addresses of Services to those of backends for the sockets of a cgroup, and their
// maps: see service.c.
type Services struct {
	objects serviceObjects
	// known is the number of Services, and so the ID of the next one.
	known uint32
}

// Backends is a Service and its backends.
type Backends struct {
	// Service is the address of the Service, of the same IP version as its backends. Protocol is a number such as
	// unix.IPPROTO_TCP.
	Service  netip.AddrPort
	Protocol uint8
	Backends []netip.AddrPort
}

// LoadServices loads the programs, with room for this many Services, and this many backends in total.
func LoadServices(services, backends int) (*Services, error) {
	s := new(Services)
	if err := loadSized(loadService, map[string]int{serviceMapServices: services, serviceMapBackends: backends}, &s.objects); err != nil {
		return nil, fmt.Errorf("load programs of services: %w", err)
	}
	return s, nil
}

// Add adds a Service.
func (s *Services) Add(b Backends) error {
	slots := make([]serviceSlot, len(b.Backends))
	addresses := make([]serviceAddress, len(b.Backends))
	for i, backend := range b.Backends {
		slots[i] = serviceSlot{Service: s.known, Number: uint32(i)}
		addresses[i] = serviceAddressOf(backend, b.Protocol)
	}
	if _, err := s.objects.serviceMaps.Backends.BatchUpdate(slots, addresses, nil); err != nil && len(slots) > 0 {
		return fmt.Errorf("add %d backends of service %s: %w", len(slots), b.Service, err)
	}
	// Add the Service last, so that programs that find it also find its backends.
	value := serviceService{Id: s.known, Backends: uint32(len(slots))}
	if err := s.objects.serviceMaps.Services.Put(serviceAddressOf(b.Service, b.Protocol), value); err != nil {
		return fmt.Errorf("add service %s: %w", b.Service, err)
	}
	s.known++
	return nil
}

// ServiceBackends is the map of backends that the programs attached to a cgroup use.
type ServiceBackends struct {
	backends *ebpf.Map
}

// OpenServiceBackends opens the map of the programs attached to a cgroup, which is given as for Attach.
func OpenServiceBackends(cgroup int) (*ServiceBackends, error) {
	attached, err := link.QueryPrograms(link.QueryOptions{Target: cgroup, Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil {
		return nil, fmt.Errorf("list programs of the cgroup: %w", err)
	}
	for _, p := range attached.Programs {
		m, err := mapOf(p.ID, serviceMapBackends)
		if err != nil || m != nil {
			return &ServiceBackends{m}, err
		}
	}
	return nil, errors.New("the cgroup has no programs of services")
}

// mapOf opens the map with this name that a program uses, or returns nil.
func mapOf(id ebpf.ProgramID, name string) (*ebpf.Map, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open program %d: %w", id, err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("read about program %d: %w", id, err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("open map %d: %w", id, err)
		}
		if info, err := m.Info(); err == nil && info.Name == name {
			return m, nil
		}
		m.Close()
	}
	return nil, nil
}

// Replace replaces the nth backend of a Service, given by its number in the order of Add.
func (s *ServiceBackends) Replace(service, n int, to netip.AddrPort, protocol uint8) error {
	if err := s.backends.Update(serviceSlot{Service: uint32(service), Number: uint32(n)}, serviceAddressOf(to, protocol), ebpf.UpdateExist); err != nil {
		return fmt.Errorf("replace backend %d of service %d: %w", n, service, err)
	}
	return nil
}

// Close closes the map.
func (s *ServiceBackends) Close() error { return s.backends.Close() }

// Attach attaches the programs to a cgroup, given by a file descriptor of its cgroup v2 directory. They outlive Close, and stay
// until the cgroup is removed.
func (s *Services) Attach(cgroup int) error {
	for _, hook := range []struct {
		name    string
		program *ebpf.Program
		attach  ebpf.AttachType
	}{
		{"connect4", s.objects.Connect4, ebpf.AttachCGroupInet4Connect},
		{"sendmsg4", s.objects.Sendmsg4, ebpf.AttachCGroupUDP4Sendmsg},
		{"recvmsg4", s.objects.Recvmsg4, ebpf.AttachCGroupUDP4Recvmsg},
		{"getpeername4", s.objects.Getpeername4, ebpf.AttachCgroupInet4GetPeername},
		{"connect6", s.objects.Connect6, ebpf.AttachCGroupInet6Connect},
		{"sendmsg6", s.objects.Sendmsg6, ebpf.AttachCGroupUDP6Sendmsg},
		{"recvmsg6", s.objects.Recvmsg6, ebpf.AttachCGroupUDP6Recvmsg},
		{"getpeername6", s.objects.Getpeername6, ebpf.AttachCgroupInet6GetPeername},
	} {
		// Programs of parent cgroups continue to run.
		const allowMulti = 1 << 1 // BPF_F_ALLOW_MULTI
		if err := link.RawAttachProgram(link.RawAttachProgramOptions{
			Target: cgroup, Program: hook.program, Attach: hook.attach, Flags: allowMulti,
		}); err != nil {
			return fmt.Errorf("attach %s to the cgroup: %w", hook.name, err)
		}
	}
	return nil
}

// Close closes programs and maps.
func (s *Services) Close() error { return s.objects.Close() }

// serviceAddressOf returns an address as the programs expect it: in network byte order, with IPv4 mapped into IPv6.
func serviceAddressOf(a netip.AddrPort, protocol uint8) serviceAddress {
	out := serviceAddress{Protocol: uint16(protocol)}
	ip := a.Addr().As16()
	for i := range out.Ip {
		out.Ip[i] = binary.NativeEndian.Uint32(ip[4*i:])
	}
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], a.Port())
	out.Port = binary.NativeEndian.Uint16(port[:])
	return out
}
