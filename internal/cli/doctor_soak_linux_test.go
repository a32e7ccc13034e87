//go:build soak

package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/doctor"
	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

var (
	looks  = flag.Int("looks", 100, "how often TestSoakHealthyLooks looks")
	rounds = flag.Int("rounds", 8, "how many periods TestSoakCosts measures of each fault, and how often TestSoakLosses sends")
)

// upLab makes a lab of two nodes with a pod each.
func upLab(t *testing.T, name, offload, shape string) *lab.Lab {
	t.Helper()
	testenv.NeedRoot(t)
	l, err := lab.Up(t.Context(), lab.Config{
		Name: name, Nodes: 2, Pods: 1, NIC: spec.NIC{Offload: offload, MTU: 1500}, Shape: shape,
	}, lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// ofMachine has the rules about the whole machine, which other programs affect too.
var ofMachine = []string{"backlog-full", "flow-limit", "squeezed", "throttled"}

// rulesFound examines a lab, and returns the names of the rules that found something, each once. It only logs rules
// about the whole machine, except the wanted one.
func rulesFound(ctx context.Context, t *testing.T, l *lab.Lab, o doctorOptions, wanted string) (rules []string, err error) {
	var d diagnosis
	if err := o.probeLab(ctx, &d, l); err != nil {
		return nil, err
	}
	for _, f := range d.Findings {
		t.Logf("%s %s %s: %s %v", f.Severity, f.Rule, f.Where, f.What, f.Evidence)
		if f.Rule == wanted || !slices.Contains(ofMachine, f.Rule) {
			rules = append(rules, f.Rule)
		}
	}
	slices.Sort(rules)
	return slices.Compact(rules), nil
}

// TestSoakHealthyLooks examines healthy labs of both shapes, one under traffic, the paths between their nodes, and this
// machine, many times each. It finds nothing. It ends in time for the timeout of the test.
func TestSoakHealthyLooks(t *testing.T) {
	end, limited := t.Deadline()
	many := func(t *testing.T, look func() ([]doctor.Finding, error)) {
		n, found := 0, make(map[doctor.Severity]int)
		for ; n < *looks && (!limited || time.Until(end) > 20*time.Second); n++ {
			findings, err := look()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range findings {
				if slices.Contains(ofMachine, f.Rule) {
					t.Logf("%s %s %s: %s %v", f.Severity, f.Rule, f.Where, f.What, f.Evidence)
					continue
				}
				t.Errorf("invented: %s %s %s: %s %v", f.Severity, f.Rule, f.Where, f.What, f.Evidence)
				found[f.Severity]++
			}
		}
		t.Logf("%d looks: %v", n, found)
	}
	o := doctorOptions{window: 100 * time.Millisecond, probe: true}
	for _, shape := range []string{spec.ShapeFlannel, spec.ShapeCalico} {
		t.Run(shape, func(t *testing.T) {
			l := upLab(t, "looks", spec.OffloadFull, shape)
			if shape == spec.ShapeFlannel {
				defer keepSending(t, l, "looks")()
			}
			many(t, func() ([]doctor.Finding, error) {
				var d diagnosis
				err := o.probeLab(t.Context(), &d, l)
				return d.Findings, err
			})
		})
	}
	t.Run("this machine", func(t *testing.T) {
		testenv.NeedRoot(t)
		many(t, func() ([]doctor.Finding, error) {
			d, err := doctorOptions{window: time.Second}.diagnose(t.Context(), Process{}, nil)
			return d.Findings, err
		})
	})
}

// keepSending sends megabytes by TCP and a datagram each millisecond from the pod of a lab's first node to that of the second,
// until it is stopped.
func keepSending(t *testing.T, l *lab.Lab, name string) (stop func()) {
	t.Helper()
	client, server, to := namespaceOf(name, "n0p0"), namespaceOf(name, "n1p0"), placeOf(l, "node1/pod0")
	datagrams := sendDatagrams(t, client, to)
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ended:
				return
			default:
				arrives(t, client, server, to, 1<<20)
			}
		}
	}()
	return func() {
		close(ended)
		<-done
		datagrams()
	}
}

// in runs a script in a place of a lab, or on the machine if the place is empty.
func in(ctx context.Context, l *lab.Lab, place, script string) error {
	argv := []string{"sh", "-ec", script}
	if place == "" {
		out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", script, err, out)
		}
		return nil
	}
	code, err := l.Run(ctx, place, argv, nil, os.Stderr, os.Stderr)
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d", code)
	}
	if err != nil {
		return fmt.Errorf("%s in %s: %w", script, place, err)
	}
	return nil
}

// costly is a fault that makes traffic between pods slower.
type costly struct {
	name, rule, inject, heal string
	mtu                      int // of the NICs
	// free: in a lab the fault has no proven cost, and doctor reports it as a note.
	free bool
}

var costlyFaults = []costly{
	{"mtu-too-large", "mtu-too-large", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500", 1500, false},
	{"mtu-small", "mtu-small", "ip link set flannel.1 mtu 1450", "ip link set flannel.1 mtu 8950", 9000, true},
	{"gro-off", "offload-off", "ethtool -K flannel.1 gro off >/dev/null", "ethtool -K flannel.1 gro on >/dev/null", 1500, true},
	{"checksums-off", "offload-off", "ethtool -K flannel.1 tx-checksum-ip-generic off >/dev/null", "ethtool -K flannel.1 tx-checksum-ip-generic on >/dev/null", 1500, false},
	{"throttled", "throttled", "", "", 1500, false}, // by a cgroup of the pods' workers
}

// TestSoakCosts switches each fault on and off in a lab, in periods of an experiment. doctor must find it each time,
// and nothing else. Streams must be slower with it, if packets are segmented before the wire and the finding is not
// a note.
func TestSoakCosts(t *testing.T) {
	testenv.NeedRoot(t)
	for _, offload := range []string{spec.OffloadNone, spec.OffloadFull} {
		for _, f := range costlyFaults {
			t.Run(offload+"/"+f.name, func(t *testing.T) { measureCost(t, offload, f) })
		}
	}
}

func measureCost(t *testing.T, offload string, f costly) {
	text := fmt.Sprintf(`
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: doctor}
spec:
  seed: 1
  target: {lab: {nic: {offload: %s, mtu: %d}}}
  path: {vxlan: {shape: flannel}}
  workloads:
  - {name: stream, stream: {warmup: 200ms, duration: 800ms}}
  - {name: pingpong, pingpong: {warmup: 100ms, duration: 400ms}}
  pairs: [1]
  runs: %d
  trialsPerPeriod: 1
  baseline: healthy
  variants:
  - {name: healthy}
  - {name: faulty, switch: {to: [inject], back: [heal]}}
`, offload, f.mtu, *rounds)
	exp, err := spec.Parse("doctor", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	at, err := openSite(t.Context(), thisProcess(), runOptions{}, exp, func(text string) { t.Log(text) })
	if err != nil {
		t.Fatal(err)
	}
	defer at.release()
	site := &faultySite{labTarget: at.target.(*labTarget), t: t, fault: f, group: limitedGroup(t)}
	dir, err := record.Create(t.TempDir(), exp.Metadata.Name, time.Now(), []byte(text), record.Environment{})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	r, err := experiment.Start(t.Context(), experiment.New(exp), site, site.run, t.Name(), nil, func(experiment.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	trials, err := r.Measure(t.Context(), dir)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range summary.Rows {
		v := row.Versus
		if v == nil || !slices.Contains([]string{metrics.Throughput, metrics.LatencyP50, metrics.LatencyP99}, row.Metric) {
			continue
		}
		t.Logf("| %s | %s | %s %s | %.3f (%.3f–%.3f) | %d | %s |", f.name, offload, row.Workload, row.Metric, v.Ratio, v.CI95[0], v.CI95[1], v.N, v.Verdict)
		slower := v.Verdict == stats.Slower || f.free || offload == spec.OffloadFull
		if row.Metric == metrics.Throughput && (v.Verdict == stats.Faster && !f.free || !slower) {
			t.Errorf("streams are not slower")
		}
	}
	if f.rule == "throttled" {
		checkThrottled(t, trials)
	}
}

// checkThrottled checks that trials of throttled processes have the warning that the finding names, and no others
// do.
func checkThrottled(t *testing.T, trials []record.Trial) {
	for _, trial := range trials {
		warned := slices.ContainsFunc(trial.Warnings, func(w record.Warning) bool { return w.Code == record.WarnThrottled })
		if warned != (trial.Variant == "faulty") {
			t.Errorf("block %d, %s %s: warned of a CPU limit: %v", trial.Block, trial.Variant, trial.Workload, warned)
		}
	}
}

// faultySite is a lab whose nodes can have a fault.
type faultySite struct {
	*labTarget
	t     *testing.T
	fault costly
	group string
	lab   *lab.Lab
	// limited: the workers of pods start with a CPU limit.
	limited bool
}

func (s *faultySite) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	n, err := s.labTarget.Network(ctx, fabric)
	if err != nil {
		return nil, err
	}
	s.lab = n.(*labNetwork).Lab
	return &faultyNetwork{n.(*labNetwork), s}, nil
}

// run executes the command of a switch: "inject" or "heal".
func (s *faultySite) run(ctx context.Context, argv []string) error {
	script := map[string]string{"inject": s.fault.inject, "heal": s.fault.heal}[argv[0]]
	for _, node := range []string{"node0", "node1"} {
		if err := in(ctx, s.lab, node, script); err != nil {
			return err
		}
	}
	s.limited = argv[0] == "inject" && s.fault.rule == "throttled"
	if argv[0] == "heal" {
		return nil
	}
	if s.limited {
		stop, err := s.beBusy(ctx)
		if err != nil {
			return err
		}
		defer stop()
	}
	rules, err := rulesFound(ctx, s.t, s.lab, doctorOptions{window: 300 * time.Millisecond}, s.fault.rule)
	if err == nil && !slices.Equal(rules, []string{s.fault.rule}) {
		s.t.Errorf("found %q", rules)
	}
	return err
}

// beBusy keeps a CPU busy within the limited cgroup.
func (s *faultySite) beBusy(ctx context.Context) (stop func(), err error) {
	busy := exec.CommandContext(ctx, "sh", "-ec", "echo $$ > "+s.group+"/cgroup.procs; echo; while :; do :; done")
	out, err := busy.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := busy.Start(); err != nil {
		return nil, err
	}
	_, err = out.Read(make([]byte, 1))
	return func() {
		_ = busy.Process.Kill()
		_ = busy.Wait()
	}, err
}

// faultyNetwork starts the workers of pods in the limited cgroup. The next switch ends them.
type faultyNetwork struct {
	*labNetwork
	site *faultySite
}

func (n *faultyNetwork) Worker(ctx context.Context, p place.Place, use place.Use) (experiment.Worker, error) {
	w, err := n.labNetwork.Worker(ctx, p, use)
	if err != nil || !n.site.limited || p.Kind != place.Pod {
		return w, err
	}
	ns, err := os.Stat(namespaceOf("run-1", strings.NewReplacer("node", "n", "/pod", "p").Replace(p.Name)))
	if err != nil {
		return nil, err
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	for _, process := range processes {
		if at, statErr := os.Stat(process + "/ns/net"); statErr == nil && os.SameFile(ns, at) {
			err = errors.Join(err, os.WriteFile(n.site.group+"/cgroup.procs", []byte(filepath.Base(process)), 0))
		}
	}
	return w, err
}

// namespaceOf returns the file of a network namespace of a lab.
func namespaceOf(name, place string) string { return "/run/netns/slip-" + name + "-" + place }

// limitedGroup makes a cgroup that is limited to 0.1 CPUs.
func limitedGroup(t *testing.T) string {
	group, file, limit := "/sys/fs/cgroup/cpu/slipstream-doctor-soak", "cpu.cfs_quota_us", "10000"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		group, file, limit = "/sys/fs/cgroup/slipstream-doctor-soak", "cpu.max", "10000 100000"
		if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+cpu"), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, 5*time.Second, "the end of the cgroup", func() string {
			if err := os.Remove(group); err != nil {
				return err.Error()
			}
			return ""
		})
	})
	if err := os.WriteFile(filepath.Join(group, file), []byte(limit), 0); err != nil {
		t.Fatal(err)
	}
	return group
}

// TestSoakLosses injects faults that stop traffic, one by one. doctor must find each, and nothing else. A message of
// 64 bytes and a transfer of 1 MB must arrive by TCP as the finding says, and always without the fault.
func TestSoakLosses(t *testing.T) {
	const pods = "p0"
	for _, c := range []struct {
		name, rule          string
		place, inject, heal string
		between             string // pods, or the nodes themselves if empty
		small               bool   // messages of 64 bytes arrive
	}{
		{"strict rp_filter, and another way back", "rp-filter", "node1",
			`net=$(ip route show dev flannel.1 | sed 's/ .*//'); ip route replace $net via 198.18.0.1 dev eth0
			for d in all flannel.1; do echo 1 > /proc/sys/net/ipv4/conf/$d/rp_filter; done`,
			`net=$(ip route show via 198.18.0.1 | sed 's/ .*//'); ip route replace $net via ${net%/*} dev flannel.1 onlink
			for d in all flannel.1; do echo 2 > /proc/sys/net/ipv4/conf/$d/rp_filter; done`, pods, false},
		{"no FDB entry", "device-drops", "node0",
			`bridge fdb del $(ip -4 neigh show dev flannel.1 | sed 's/.* lladdr \([^ ]*\).*/\1/') dev flannel.1 dst 198.18.0.2`,
			`bridge fdb add $(ip -4 neigh show dev flannel.1 | sed 's/.* lladdr \([^ ]*\).*/\1/') dev flannel.1 dst 198.18.0.2`, pods, false},
		{"UDP port 8472 blocked", "vxlan-blocked", "node1", "iptables -I INPUT -p udp --dport 8472 -j DROP", "iptables -D INPUT -p udp --dport 8472 -j DROP", pods, false},
		{"other ports blocked", "port-blocked", "node1",
			"for p in tcp udp; do iptables -I INPUT -p $p --dport 32768:60999 -j DROP; done",
			"for p in tcp udp; do iptables -D INPUT -p $p --dport 32768:60999 -j DROP; done", "", false},
		{"a switch that drops packets of more than 1,400 bytes", "path-mtu", "",
			"ip -n slip-losses-sw link set node1 mtu 1400", "ip -n slip-losses-sw link set node1 mtu 1500", pods, true},
	} {
		t.Run(c.rule, func(t *testing.T) {
			l := upLab(t, "losses", spec.OffloadNone, spec.ShapeFlannel)
			client, server := namespaceOf("losses", "n0"+c.between), namespaceOf("losses", "n1"+c.between)
			to := placeOf(l, strings.TrimSuffix("node1/"+strings.Replace(c.between, "p", "pod", 1), "/"))
			change := func(script string) {
				t.Helper()
				if err := in(t.Context(), l, c.place, script); err != nil {
					t.Fatal(err)
				}
			}
			sizes := []int{64, 1 << 20}
			var healthy, faulty [2]int
			for range *rounds {
				change(c.inject)
				if faulty == [2]int{} && healthy == [2]int{} {
					stop := sendDatagrams(t, client, to)
					rules, err := rulesFound(t.Context(), t, l, doctorOptions{window: 300 * time.Millisecond}, c.rule)
					stop()
					if err != nil || !slices.Equal(rules, []string{c.rule}) {
						t.Fatalf("with %s: found %q, %v", c.name, rules, err)
					}
				}
				for i, size := range sizes {
					faulty[i] += arrives(t, client, server, to, size)
				}
				change(c.heal)
				for i, size := range sizes {
					healthy[i] += arrives(t, client, server, to, size)
				}
			}
			t.Logf("| %s | %s | %d and %d of %d | %d and %d |", c.name, c.rule, faulty[0], faulty[1], *rounds, healthy[0], healthy[1])
			want := [2]int{0, 0}
			if c.small {
				want[0] = *rounds
			}
			if faulty != want || healthy != [2]int{*rounds, *rounds} {
				t.Errorf("arrived %v with the fault, %v without, of %d: want %v with it, and all without", faulty, healthy, *rounds, want)
			}
		})
	}
}

// placeOf returns the address of a place.
func placeOf(l *lab.Lab, name string) netip.Addr {
	for _, p := range l.Places() {
		if p.Name == name {
			return p.IPv4
		}
	}
	return netip.Addr{}
}

// sendDatagrams sends one datagram each millisecond from a network namespace until it is stopped: some faults show
// only in traffic.
func sendDatagrams(t *testing.T, from string, to netip.Addr) (stop func()) {
	t.Helper()
	var conn net.Conn
	if err := netns.DoAt(from, func() (err error) {
		conn, err = net.Dial("udp", netip.AddrPortFrom(to, 9).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	each, ended := time.NewTicker(time.Millisecond), make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-each.C:
				_, _ = conn.Write([]byte("x")) // an error means that nobody listens
			case <-ended:
				return
			}
		}
	}()
	return func() {
		each.Stop()
		close(ended)
		<-done
		conn.Close()
	}
}

// arrives sends bytes by TCP from one network namespace to an address in another. It returns 1 if all of them arrive
// within 2 s, otherwise 0.
func arrives(t *testing.T, client, server string, to netip.Addr, size int) int {
	t.Helper()
	deadline := time.Now().Add(2 * time.Second)
	var listener net.Listener
	if err := netns.DoAt(server, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(deadline)
		if n, err := io.Copy(io.Discard, conn); err == nil && n == int64(size) {
			_, _ = conn.Write([]byte("all"))
		}
	}()
	var conn net.Conn
	if err := netns.DoAt(client, func() (err error) {
		conn, err = (&net.Dialer{Deadline: deadline}).Dial("tcp", listener.Addr().String())
		return err
	}); err != nil {
		return 0
	}
	defer conn.Close()
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Write(make([]byte, size)); err != nil {
		return 0
	}
	_ = conn.(*net.TCPConn).CloseWrite()
	answer, _ := io.ReadAll(conn)
	if !bytes.Equal(answer, []byte("all")) {
		return 0
	}
	return 1
}
