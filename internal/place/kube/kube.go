// Package kube creates the places of an experiment as pods: one pod for each end of each pair, on two
// nodes of a cluster or more, and on each node a privileged one that samples counters and applies accelerators.
// It opens streams to workers in the pods (by exec) and finds out why a stream ended. What a worker
// does is up to internal/worker, and what runs in the places to internal/experiment.
//
// All objects carry labels, by which Runs finds what a dead run has left. own.go tells them from
// objects that somebody else has labelled alike.
package kube

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// Config of a run's pods.
type Config struct {
	// Spec names the nodes (see Cluster.ChooseAll).
	Spec spec.Kubernetes
	// Mesh: a node that is lost does not end the run.
	Mesh bool
	// Rest bounds how long pods may still take to start once half of them run; 0 does not. Then a mesh goes on with any node that
	// has started.
	Rest time.Duration
	// Repository of the default image: "", or where a release has published it. Version of the program is its tag.
	Repository, Version string
	// Binaries are builds of the program, beside those that build.Find finds, to copy into pods whose image lacks it.
	Binaries []string
	// Programs says what needs programs besides this one in the pods' image, such as "iperf3 of workload bulk"; "" if nothing does.
	Programs string
	// Pools are the labels by which variants choose their nodes, if they do.
	Pools []spec.Ends
	// Pods on each node.
	Pods int
	// Accelerate, Pod, Service and Native say whether some variant has accelerators, or one of those paths.
	Accelerate, Pod, Service, Native bool
	// Need says what needs addresses of an IP version, such as 4: "workload stream".
	Need map[int]string
	// Switch: commands of the experiment change the nodes, so what accelerates them may be what it measures.
	Switch bool
	// Backends are the numbers of backends, above one, of services in front of each server.
	Backends []int
	// LinuxClient and LinuxServer say what needs Linux on the nodes of clients and of servers, such as
	// "http of workload page", and Windows what needs Windows on both; "" if nothing does.
	LinuxClient, LinuxServer, Windows string
	// Note prints a line for the user.
	Note func(string)

	// Tests set the builds that there are.
	builds []build.Build
}

// Pods are the places of a run, until Close.
type Pods struct {
	cluster *Cluster
	config  Config
	run
	places []place.Place
	// traffic and control are the pods whose workers act in each place, by its name. host are the pods
	// of native traffic, by the name of the place that they stand in for.
	traffic, control, host map[string]*corev1.Pod
	// systems are the operating systems of the nodes, by name; windows are those that run Windows.
	systems map[string]string
	windows map[string]bool

	// fitting are the builds of the program for nodes, by name, unfit why a node has none, and packed the builds compressed, by sum.
	fitting map[string]build.Build
	unfit   map[string]error
	packed  map[string][]byte

	since        time.Time // of its lease
	stopRenewing context.CancelFunc
	renewing     sync.WaitGroup

	mu sync.Mutex
	// lost has the reasons why no trial can succeed any more, by node in a mesh. The node "" stands for all.
	lost map[string]error
	// silent has the time since which no worker could be started, by pod.
	silent map[string]time.Time
}

// upTime bounds how long pods may take to start: an image may have to be pulled.
const upTime = 3 * time.Minute

// newPods names the pods of a run, and creates none.
func newPods(c *Cluster, config Config) *Pods {
	p := &Pods{
		cluster: c, config: config, silent: make(map[string]time.Time), lost: make(map[string]error), systems: make(map[string]string),
		traffic: make(map[string]*corev1.Pod), control: make(map[string]*corev1.Pod), host: make(map[string]*corev1.Pod),
		stopRenewing: func() {},
	}
	p.run = *newRun(strings.ToLower(rand.Text())[:8])
	p.spec = config.Spec
	p.image, p.pull = imageOf(config)
	if c.namespace != "" {
		p.namespace, p.nodes, p.inNamedNamespace = c.namespace, c.namespace, true
	}
	return p
}

// Up creates the pods of a run, with services in front of the servers if the run has them, and returns when all pods
// are running. ReachServices waits for the services. If Up fails, or ctx ends, it leaves nothing behind.
func (c *Cluster) Up(ctx context.Context, config Config) (*Pods, error) {
	p := newPods(c, config)
	if err := lacksPrograms(config); err != nil {
		return nil, err
	}
	if err := c.check(ctx, c.permissions(config)); err != nil {
		return nil, err
	}
	if err := c.busy(ctx, nil, nodesOf(config.Spec)...); err != nil {
		return nil, err
	}
	mixed, err := p.readNodes(ctx, nodesOf(config.Spec))
	if err != nil {
		return nil, err
	}
	if err := c.canObserve(ctx, config.Spec.Observe, nodesOf(config.Spec)); err != nil {
		return nil, err
	}
	notes, err := c.accelerated(ctx, config, nodesOf(config.Spec))
	if err != nil {
		return nil, err
	}
	for _, note := range append(notes, mixed) {
		if note != "" {
			config.Note(note)
		}
	}
	limit := 3*upTime + p.endpointsTime() + p.copyTime()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the pods are not up after %s", limit))
	defer cancel()
	if err := p.up(ctx); err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		down, stop := context.WithTimeout(context.WithoutCancel(ctx), downTime+p.endpointsTime())
		defer stop()
		return nil, errors.Join(err, p.Close(down))
	}
	return p, nil
}

// permissions that a run needs.
func (c *Cluster) permissions(config Config) []permission {
	var all []permission
	need := func(group, resource, subresource string, verbs ...string) {
		for _, verb := range verbs {
			p := permission{verb, group, resource, subresource, c.namespace}
			if p.clusterScoped() {
				p.namespace = ""
			}
			all = append(all, p)
		}
	}
	if c.namespace == "" {
		need("", "namespaces", "", "get", "create", "delete")
	}
	need("", "nodes", "", "get")
	if config.Spec.NodeNames == nil && (config.Spec.ClientNode == "" || config.Spec.ServerNode == "") {
		need("", "nodes", "", "list")
	}
	need("", "pods", "", "get", "list", "create", "delete")
	need("", "pods", "exec", "create")
	need("coordination.k8s.io", "leases", "", "list", "create", "patch", "delete")
	if config.Service {
		need("", "services", "", "list", "create", "delete")
	}
	if len(config.Backends) > 0 {
		need("discovery.k8s.io", "endpointslices", "", "list", "create", "delete")
	}
	if c.namespace != "" { // otherwise it may list pods everywhere
		for _, name := range config.Spec.Observe {
			namespace, _, _ := strings.Cut(name, "/")
			if list := (permission{"list", "", "pods", "", namespace}); !slices.Contains(all, list) {
				all = append(all, list)
			}
		}
	}
	return all
}

// nodePods reports whether the run has privileged pods.
func (p *Pods) nodePods() bool { return !p.spec.Unprivileged }

// busy returns an error if another run measures on the same nodes. own is the run that asks, once it has a lease: then runs
// with a newer lease do not count, because they will see this one's and stop.
func (c *Cluster) busy(ctx context.Context, own *Pods, nodes ...string) error {
	runs, _, err := c.Runs(ctx)
	if err != nil {
		return nil // it takes permissions that a run does not need
	}
	for _, r := range runs {
		if !r.Alive || own != nil && (r.ID == own.id || r.Since.After(own.since)) {
			continue
		}
		for _, node := range nodes {
			if slices.Contains(r.Nodes, node) {
				return fmt.Errorf("run %s of %s is in progress on node %s, and the two would disturb each other: wait for it, name other nodes, or end it with slipstream cleanup --all",
					r.ID, r.Holder, node)
			}
		}
	}
	return nil
}

func (p *Pods) up(ctx context.Context) error {
	if err := p.makeNamespaces(ctx); err != nil {
		return err
	}
	if err := p.takeLease(ctx); err != nil {
		return err
	}
	// Another run may have begun since the first check. If two began in the same second, both stop.
	if err := p.cluster.busy(ctx, p, nodesOf(p.spec)...); err != nil {
		return err
	}
	control, traffic := p.makePods()
	asked := traffic
	if p.needsNodePods() {
		asked = slices.Concat(traffic, control)
	}
	notes, err := p.prepare(ctx, slices.Concat(control, traffic), asked)
	if err != nil {
		return err
	}
	for _, note := range append(notes, p.copyNote(len(control)+len(traffic))) {
		if note != "" {
			p.config.Note(note)
		}
	}
	if err := p.start(ctx, control); err != nil {
		if p.needsNodePods() || ctx.Err() != nil || !rejected(err) {
			return err
		}
		p.config.Note(notSampled(err))
		clear(p.control)
		if err := p.remove(ctx, control); err != nil {
			return err
		}
	}
	if err := p.start(ctx, traffic); err != nil {
		return err
	}
	if err := p.makePlaces(ctx); err != nil {
		return err
	}
	return p.addBackends(ctx)
}

// needsNodePods reports whether the run fails without its pods on the nodes. One that only samples with them does not.
func (p *Pods) needsNodePods() bool {
	return p.config.Accelerate || p.config.Native || len(p.spec.Observe) > 0
}

// makePods makes the pods of the run, and creates none: those on the nodes, and those for traffic.
func (p *Pods) makePods() (control, traffic []*corev1.Pod) {
	nodes := nodesOf(p.spec)
	for i, node := range nodes {
		role := roleOf(nodes, i)
		if p.nodePods() && !p.windows[node] {
			pod := p.nodePod(p.name(role, "node"), node)
			p.control[node] = pod
			control = append(control, pod)
		}
		for j := range p.config.Pods {
			place := placeOf(nodes, i, j)
			name := p.name(role, j)
			if p.windows[node] {
				p.host[place] = p.windowsPod(name, node)
				traffic = append(traffic, p.host[place])
				continue
			}
			p.traffic[place] = p.serverPod(name, node, p.config.Service && turn(nodes, i, j)%2 == 1)
			traffic = append(traffic, p.traffic[place])
			if p.config.Native {
				p.host[place] = p.hostPod(p.name(role, j, "host"), node)
				traffic = append(traffic, p.host[place])
			}
			p.control[place] = p.control[node]
		}
	}
	return control, traffic
}

// roleOf names the pods of node i: of two nodes one has the clients and the other the servers.
func roleOf(nodes []string, i int) string {
	if len(nodes) == 2 {
		return []string{"client", "server"}[i]
	}
	return fmt.Sprintf("n%d", i)
}

// placeOf is the name of pod j of node i.
func placeOf(nodes []string, i, j int) string {
	if len(nodes) == 2 {
		return fmt.Sprintf("%s/%s-%d", nodes[i], roleOf(nodes, i), j)
	}
	return fmt.Sprintf("%s/pod-%d", nodes[i], j)
}

// turn returns the turn of pod j of node i, as target/topology gives turns to pairs: a client has an even turn, and its
// server the next one.
func turn(nodes []string, i, j int) int { return j*len(nodes) + i }

func (p *Pods) makeNamespaces(ctx context.Context) error {
	if p.inNamedNamespace {
		return p.cluster.checkNamespace(ctx, p.namespace)
	}
	for _, n := range p.namespaceObjects() {
		if err := p.createNamespace(ctx, n, creation); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pods) createNamespace(ctx context.Context, n *corev1.Namespace, options metav1.CreateOptions) error {
	_, err := p.cluster.api.Namespaces().Create(ctx, n, options)
	switch {
	case err == nil:
		return nil
	case denied(err):
		return fmt.Errorf("create namespace %s: %w: a policy of the cluster forbids it: name an existing namespace with -n, or ask whoever maintains the policy to exempt namespaces with the label %s=%s", n.Name, err, labelName, appName)
	}
	return fmt.Errorf("create namespace %s: %w", n.Name, explain(err))
}

// namespaceObjects are the namespaces of the run. There are two, so that Pod Security Admission enforces the strictest standard on the
// pods for traffic, whatever the others need.
func (p *Pods) namespaceObjects() []*corev1.Namespace {
	all := []*corev1.Namespace{p.namespaceObject(p.namespace, "restricted")}
	if p.nodePods() {
		all = append(all, p.namespaceObject(p.nodes, "privileged"))
	}
	return all
}

// start creates pods and the services in front of them, and waits until they run and have the program.
func (p *Pods) start(ctx context.Context, pods []*corev1.Pod) error {
	for i, pod := range pods {
		created, err := p.create(ctx, pod, creation)
		if err != nil {
			return err
		}
		pods[i].UID = created.UID
		if listens(pod) {
			if _, err := p.cluster.api.Services(pod.Namespace).Create(ctx, p.service(pod.Name), creation); err != nil {
				return fmt.Errorf("create service %s/%s: %w", pod.Namespace, pod.Name, explain(err))
			}
		}
	}
	if err := p.waitRunning(ctx, pods); err != nil {
		return err
	}
	return p.copyPrograms(ctx, pods)
}

func (p *Pods) create(ctx context.Context, pod *corev1.Pod, options metav1.CreateOptions) (*corev1.Pod, error) {
	for {
		created, err := p.cluster.api.Pods(pod.Namespace).Create(ctx, pod, options)
		switch {
		case err == nil:
			return created, nil
		case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "serviceaccount") && !p.inNamedNamespace && pod.Namespace != existing:
			// The controller that creates a new namespace's default service account lags a little.
			if err := pause(ctx); err != nil {
				return nil, fmt.Errorf("create pod %s/%s: %w", pod.Namespace, pod.Name, err)
			}
		case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			return nil, &rejectedError{pod, err}
		default:
			return nil, fmt.Errorf("create pod %s/%s: %w", pod.Namespace, pod.Name, explain(err))
		}
	}
}

// pollTime is the interval at which the cluster is polled. A list is cheap, and unlike a watch needs no
// second permission.
const pollTime = 300 * time.Millisecond

func pause(ctx context.Context) error {
	timer := time.NewTimer(pollTime)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// list returns the run's pods by namespace and name.
func (p *Pods) list(ctx context.Context) (map[string]*corev1.Pod, error) {
	all := make(map[string]*corev1.Pod)
	namespaces := []string{p.namespace}
	if p.nodes != p.namespace && p.nodePods() {
		namespaces = append(namespaces, p.nodes)
	}
	for _, namespace := range namespaces {
		list, err := p.cluster.api.Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: labelRun + "=" + p.id})
		if err != nil {
			return nil, fmt.Errorf("list pods of %s: %w", namespace, explain(err))
		}
		for i := range list.Items {
			all[namespace+"/"+list.Items[i].Name] = &list.Items[i]
		}
	}
	return all, nil
}

// retryTime bounds how long a kubelet may retry what failed. By then it has tried twice.
const retryTime = 15 * time.Second

// waitRunning waits until pods run, and fills in their status. It gives up on a pod that cannot run any more, and after
// upTime, or the time for the rest, on all that do not run yet.
func (p *Pods) waitRunning(ctx context.Context, pods []*corev1.Pod) error {
	began, all := time.Now(), len(pods)
	var half time.Time // when half of them ran
	late, cancel := context.WithTimeoutCause(ctx, upTime, fmt.Errorf("not running after %s", upTime))
	defer cancel()
	for {
		now, err := p.list(ctx)
		if err != nil && !unreachable(err) {
			return err
		}
		if err == nil {
			if pods, err = p.waiting(pods, now, time.Since(began)); err != nil || len(pods) == 0 {
				return err
			}
			if half.IsZero() && 2*len(pods) <= all {
				half = time.Now()
			}
			if rest := p.config.Rest; rest > 0 && !half.IsZero() && time.Since(half) >= rest {
				return p.giveUpAll(ctx, pods, fmt.Errorf("not running %s after half of the pods", rest))
			}
		}
		if end := pause(late); end != nil {
			return p.giveUpAll(ctx, pods, end)
		}
	}
}

// waiting returns the pods that do not run yet, without those that it gives up on.
func (p *Pods) waiting(pods []*corev1.Pod, now map[string]*corev1.Pod, waited time.Duration) (left []*corev1.Pod, err error) {
	for _, pod := range pods {
		state := podState{text: "is gone: somebody deleted it, or took its label " + labelRun + " away", final: true}
		if got := now[pod.Namespace+"/"+pod.Name]; got != nil {
			state = stateOf(got)
			pod.Status, pod.Spec.SchedulingGates = got.Status, got.Spec.SchedulingGates
		}
		if state.final || state.retried && waited > retryTime {
			if err := p.giveUp(pod, state.of(pod)); err != nil {
				return nil, err
			}
		}
		if state.text != "" && p.isLost(pod) == nil {
			left = append(left, pod)
		}
	}
	return left, nil
}

// giveUpAll gives up on pods that do not run yet, as there is no more time; if the run ends, on the first of them.
func (p *Pods) giveUpAll(ctx context.Context, pods []*corev1.Pod, end error) error {
	for _, pod := range pods {
		why := fmt.Errorf("%w: %w%s", end, stateOf(pod).of(pod), p.warned(ctx, pod))
		if ctx.Err() != nil {
			return why
		}
		if err := p.giveUp(pod, why); err != nil {
			return err
		}
	}
	return nil
}

// giveUp returns why a pod does not start, which ends the run. A mesh loses the pod's node instead, as long as enough others are
// left.
func (p *Pods) giveUp(pod *corev1.Pod, why error) error {
	if p.isLost(pod) != nil {
		return nil
	}
	others := 0
	for _, node := range nodesOf(p.spec) {
		if node != nodeOf(pod) && p.isLostNode(node) == nil {
			others++
		}
	}
	if !p.config.Mesh || others < p.leastNodes() {
		return why
	}
	p.config.Note(fmt.Sprintf("the mesh goes on without node %s: %v", nodeOf(pod), why))
	_ = p.lose(pod, why)
	return nil
}

// leastNodes is how many nodes a mesh needs: two, or one if there is a time for the rest.
func (p *Pods) leastNodes() int {
	if p.config.Rest > 0 {
		return 1
	}
	return 2
}

// nodeOf returns the node that a pod is assigned to.
func nodeOf(pod *corev1.Pod) string {
	return pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
}

// makePlaces sets p.places, once the pods have addresses.
func (p *Pods) makePlaces(ctx context.Context) error {
	addresses := func(pod *corev1.Pod) (v4, v6 netip.Addr) {
		var all []string
		for _, ip := range pod.Status.PodIPs {
			all = append(all, ip.IP)
		}
		return ips(all)
	}
	services := make(map[string]corev1.Service)
	if p.config.Service {
		list, err := p.cluster.api.Services(p.namespace).List(ctx, metav1.ListOptions{LabelSelector: labelRun + "=" + p.id})
		if err != nil {
			return fmt.Errorf("list services of %s: %w", p.namespace, explain(err))
		}
		for _, s := range list.Items {
			services[s.Name] = s
		}
	}
	nodes := nodesOf(p.spec)
	for _, name := range nodes {
		place := place.Place{Name: name, Kind: place.Node, Node: name, Unprivileged: p.control[name] == nil}
		node, err := p.cluster.api.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get node %s: %w", name, explain(err))
		}
		p.systems[name] = node.Status.NodeInfo.OSImage
		var all []string
		for _, a := range node.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				all = append(all, a.Address)
			}
		}
		place.IPv4, place.IPv6 = ips(all)
		p.places = append(p.places, place)
	}
	for i, node := range nodes {
		for j := range p.config.Pods {
			place := place.Place{
				Name: placeOf(nodes, i, j), Kind: place.Pod, Node: node, Unprivileged: true,
			}
			pod := p.traffic[place.Name]
			if p.windows[node] {
				pod = p.host[place.Name]
			}
			place.IPv4, place.IPv6 = addresses(pod)
			if p.isLost(pod) != nil { // it may have no address, and no traffic goes there
				place.IPv4, place.IPv6 = p.places[i].IPv4, p.places[i].IPv6
			}
			if s, ok := services[pod.Name]; ok {
				place.Service.IPv4, place.Service.IPv6 = ips(s.Spec.ClusterIPs)
				place.Service.Port = trafficPort
			}
			p.places = append(p.places, place)
		}
	}
	return nil
}

// reachTime bounds the time until a new service works, apart from that of its endpoints. After the API server was down, kube-proxy waits
// up to a minute before it asks for services again (client-go's reflector: 30 s and as much jitter).
const reachTime = 75 * time.Second

// ReachServices waits until every client reaches its server through the service, or its worker gives up (--reach). Whatever
// implements services programs them with a delay, and only traffic shows when it has.
func (p *Pods) ReachServices(ctx context.Context) error {
	within := reachTime + p.endpointsTime()
	limit := upTime + p.endpointsTime()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer after %s", limit))
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	nodes := nodesOf(p.spec)
	for k, server := range p.places {
		if server.Service.Port == 0 {
			continue
		}
		k -= len(nodes) // its number among the pods
		before := turn(nodes, k/p.config.Pods, k%p.config.Pods) - 1
		client := placeOf(nodes, before%len(nodes), before/len(nodes))
		for _, s := range append(slices.Collect(maps.Values(server.Services)), server.Service) {
			for _, version := range []int{4, 6} {
				probe := s.AddrPort(version)
				if !probe.IsValid() || !server.IP(version).IsValid() {
					continue
				}
				probe = netip.AddrPortFrom(probe.Addr(), probePort)
				wg.Go(func() {
					if err := p.reachService(ctx, client, probe, netip.AddrPortFrom(server.IP(version), probePort), within); err != nil {
						mu.Lock()
						defer mu.Unlock()
						errs = append(errs, err)
					}
				})
			}
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// directTime bounds the time in which one pod reaches another.
const directTime = 5 * time.Second

// reachService connects from a pod to a service. If that fails, its error says whether the pod behind the service is reached.
func (p *Pods) reachService(ctx context.Context, client string, service, direct netip.AddrPort, within time.Duration) error {
	err := p.reach(ctx, client, service, within)
	switch {
	case err == nil || errors.As(err, new(execError)):
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("%s cannot reach service %s: %w", client, service, err)
	}
	if closed := p.reach(ctx, client, direct, directTime); closed != nil {
		return fmt.Errorf("%s cannot reach service %s, nor the pod behind it at %s: are they kept apart by a network policy, possibly a cluster-wide one (Calico, Cilium, AdminNetworkPolicy), or by a firewall between the nodes? %w",
			client, service, direct, closed)
	}
	return fmt.Errorf("%s cannot reach service %s: does the cluster run kube-proxy or a replacement? %w", client, service, err)
}

// reach connects from a pod to an address, and tries again for some time.
func (p *Pods) reach(ctx context.Context, client string, to netip.AddrPort, within time.Duration) error {
	s := p.exec(p.traffic[client], "worker", "--reach", to.String(), "--within", within.String())
	defer s.Close()
	select {
	case <-s.done:
		return s.ended()
	case <-ctx.Done():
		_ = s.ended() // which ends it
		return context.Cause(ctx)
	}
}

// Places returns the nodes, the clients' first, and then the pods of each.
func (p *Pods) Places() []place.Place { return p.places }

// System returns the operating system of a node, which its pods cannot see.
func (p *Pods) System(node string) string { return p.systems[node] }

// Placement says in a sentence where the pods are.
func (p *Pods) Placement() string {
	text := fmt.Sprintf("Clients run on node %s, servers on node %s, in pods of namespace %s.", p.spec.ClientNode, p.spec.ServerNode, p.namespace)
	if len(p.spec.NodeNames) > 0 {
		text = fmt.Sprintf("Pods run on the nodes %s, in namespace %s.", strings.Join(p.spec.NodeNames, ", "), p.namespace)
	}
	if len(p.packed) > 0 {
		text += fmt.Sprintf(" They started from %s, with a copy of this program (SHA-256 %s).", p.spec.BaseImage, words.And(slices.Sorted(maps.Keys(p.packed))))
	}
	return text
}

// holder identifies this process in the lease, and to other runs on a node.
func holder() string {
	name, err := os.Hostname()
	if err != nil {
		name = "unknown"
	}
	return fmt.Sprintf("%s, process %d", name, os.Getpid())
}
