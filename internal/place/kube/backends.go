package kube

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/place"
)

// A service with many backends has no selector. Its endpoints are ports of one server pod, each in an EndpointSlice
// of its own, because the ports of a slice need different names and a port of a service forwards to one name.

// endpointPort is the first of these ports, and that of the service. Ports of clients begin at 32768.
const endpointPort = 10000

// requestsAtOnce bounds how many slices are created or deleted at the same time.
const requestsAtOnce = 16

// endpointTime limits what each of thousands of endpoints adds to the time for loading rules, or for removing objects. With
// 16,000 endpoints and kube-proxy's iptables-nft, two nodes on two busy CPUs took two minutes from the first to an answer.
const endpointTime = 20 * time.Millisecond

// endpointsTime is endpointTime for all endpoints of the run.
func (p *Pods) endpointsTime() time.Duration {
	total := 0
	for _, n := range p.config.Backends {
		total += n * p.config.Pods
	}
	return time.Duration(total) * endpointTime
}

// addBackends creates the services with many backends in front of each server, and waits until the API server has all
// of their endpoints.
func (p *Pods) addBackends(ctx context.Context) error {
	for i := range p.places {
		at := &p.places[i]
		if at.Service.Port == 0 || p.isLost(p.traffic[at.Name]) != nil {
			continue
		}
		at.Services = make(map[int]place.Service)
		for _, n := range p.config.Backends {
			s, err := p.serviceOf(ctx, *at, n)
			if err != nil {
				return err
			}
			at.Services[n] = s
		}
	}
	return nil
}

// serviceOf creates a service with n backends in front of a server.
func (p *Pods) serviceOf(ctx context.Context, server place.Place, n int) (place.Service, error) {
	s := p.backendService(p.traffic[server.Name].Name, n)
	created, err := p.cluster.api.Services(p.namespace).Create(ctx, s, creation)
	if err != nil {
		return place.Service{}, fmt.Errorf("create service %s/%s: %w", p.namespace, s.Name, explain(err))
	}
	g, in := errgroup.WithContext(ctx)
	g.SetLimit(requestsAtOnce)
	front := place.Service{Port: endpointPort, Ports: n}
	front.IPv4, front.IPv6 = ips(created.Spec.ClusterIPs)
	var addresses []netip.Addr
	for _, version := range []int{4, 6} {
		if at := server.IP(version); at.IsValid() && front.AddrPort(version).IsValid() {
			addresses = append(addresses, at)
		}
	}
	for _, at := range addresses {
		for i := range n {
			g.Go(func() error {
				return p.createSlice(in, p.slice(s.Name, "tcp", netip.AddrPortFrom(at, uint16(endpointPort+i))))
			})
		}
	}
	if err := g.Wait(); err != nil {
		return place.Service{}, err
	}
	// What watches slices sees them in the order of their creation, so whoever gets an answer from these has the others.
	for _, at := range addresses {
		if err := p.createSlice(ctx, p.slice(s.Name, "probe", netip.AddrPortFrom(at, probePort))); err != nil {
			return place.Service{}, err
		}
	}
	return front, nil
}

func (p *Pods) createSlice(ctx context.Context, s *discoveryv1.EndpointSlice) error {
	if _, err := p.cluster.api.EndpointSlices(p.namespace).Create(ctx, s, creation); err != nil {
		return fmt.Errorf("create endpointslice %s/%s: %w", p.namespace, s.Name, explain(err))
	}
	return nil
}

// backendService is in front of n ports of a server pod, dual-stack if the cluster is.
func (r *run) backendService(pod string, n int) *corev1.Service {
	s := r.service(pod)
	s.Name = r.within(pod, n)
	s.Spec.Selector = nil
	s.Spec.Ports = []corev1.ServicePort{servicePort("tcp", corev1.ProtocolTCP, endpointPort), servicePort("probe", corev1.ProtocolTCP, probePort)}
	return s
}

// slice has one endpoint of a service's port.
func (r *run) slice(service, name string, at netip.AddrPort) *discoveryv1.EndpointSlice {
	family := discoveryv1.AddressTypeIPv4
	if at.Addr().Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: r.meta(r.namespace, r.within(r.within(service, at.Port()), strings.ToLower(string(family)))), AddressType: family,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{at.Addr().String()}}},
		Ports:     []discoveryv1.EndpointPort{{Name: &name, Protocol: new(corev1.ProtocolTCP), Port: new(int32(at.Port()))}},
	}
	s.Labels[discoveryv1.LabelServiceName] = service
	s.Labels[discoveryv1.LabelManagedBy] = manager // so that no controller takes it for its own
	return s
}

// backendName matches the name of a service with many backends up to the name of the run, and sliceName that of its slices.
var (
	backendName = regexp.MustCompile(`^(server|n[0-9]+)-[0-9]+-[0-9]+-$`)
	sliceName   = regexp.MustCompile(`^(server|n[0-9]+)-[0-9]+-[0-9]+-[0-9]+-ipv[46]-$`)
)

// backendsOf returns the number of backends in the name of a service; 0 if it is a service of another kind.
func backendsOf(m metav1.ObjectMeta) int {
	if !named(m, backendName) {
		return 0
	}
	words := strings.Split(m.Name, "-")
	n, _ := strconv.Atoi(words[2]) // the pattern admits digits only
	return n
}

func foreignSlice(s *discoveryv1.EndpointSlice) string {
	if why := foreign(s.ObjectMeta); why != "" {
		return why
	}
	if !named(s.ObjectMeta, sliceName) || s.Labels[discoveryv1.LabelManagedBy] != manager {
		return "its name is not one that a run gives"
	}
	return ""
}

// removeSlices removes a run's slices from a namespace that the run did not create. services are those of the run.
func (c *Cluster) removeSlices(ctx context.Context, namespace, id string, services []corev1.Service) error {
	api := c.api.EndpointSlices(namespace)
	all, err := api.List(ctx, metav1.ListOptions{LabelSelector: labelRun + "=" + id + "," + discoveryv1.LabelManagedBy + "=" + manager})
	if apierrors.IsForbidden(err) && !slices.ContainsFunc(services, func(s corev1.Service) bool { return backendsOf(s.ObjectMeta) > 0 }) {
		return nil // a run without such services does not need the permission
	}
	if err != nil {
		return fmt.Errorf("list endpointslices of %s: %w", namespace, explain(err))
	}
	ours := slices.DeleteFunc(all.Items, func(s discoveryv1.EndpointSlice) bool { return foreignSlice(&s) != "" })
	g, in := errgroup.WithContext(ctx)
	g.SetLimit(requestsAtOnce)
	for _, s := range ours {
		g.Go(func() error {
			if err := api.Delete(in, s.Name, only(s.ObjectMeta)); err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("delete endpointslice %s/%s: %w", namespace, s.Name, explain(err))
			}
			return nil
		})
	}
	return g.Wait()
}
