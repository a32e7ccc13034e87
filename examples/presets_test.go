package examples

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
)

func load(t *testing.T, name string) *spec.Experiment {
	t.Helper()
	data, ok := Preset(name)
	if !ok {
		t.Fatalf("no preset %q", name)
	}
	e, err := spec.Parse(name+".yaml", data, nil)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestPresets(t *testing.T) {
	if diff := cmp.Diff([]string{"an-linux", "an-vms", "an-windows", "applications", "cloud-2015", "cni", "demo", "endpoint-changes", "engine-parity", "fastpath-local", "fastpath-routed", "fastpath-tools", "fastpath", "instances-hosts", "instances", "kubernetes-short", "kubernetes", "load-balancer", "mesh", "message-sizes", "mixed", "mtu", "overlay-cost", "overlays-by-rate", "overlays", "page", "placement", "policies", "rps-rfs", "script", "service-routing-kubernetes", "service-routing-short", "service-routing", "tool-parity", "underload-parity", "zones"}, Names()); diff != "" {
		t.Fatalf("names (-want +got):\n%s", diff)
	}
	for _, name := range Names() {
		e := load(t, name)
		if e.Metadata.Name != name {
			t.Errorf("%s calls itself %q", name, e.Metadata.Name)
		}
		if d := Description(name); d == "" || strings.Contains(d, "\n") {
			t.Errorf("%s: description %q, want one line", name, d)
		}
		text, err := spec.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		again, err := spec.Parse(name+".yaml", text, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(e, again); diff != "" {
			t.Errorf("%s, resolved and read again (-want +got):\n%s", name, diff)
		}
	}
	if _, ok := Preset("none"); ok || Description("none") != "" {
		t.Error("there is a preset of no name")
	}
}

// TestTime checks that the presets take no longer than intended, with half a second of dead time for each trial.
func TestTime(t *testing.T) {
	for name, limit := range map[string]time.Duration{
		"demo": 270 * time.Second, "overlay-cost": 40 * time.Minute, "engine-parity": 30 * time.Minute, "rps-rfs": 390 * time.Minute,
		"overlays": 85 * time.Minute, "overlays-by-rate": 31 * time.Minute, "message-sizes": 20 * time.Minute, "underload-parity": 25 * time.Minute,
		"kubernetes": 20 * time.Minute, "kubernetes-short": 2 * time.Minute, "cni": 5 * time.Minute, "tool-parity": 35 * time.Minute, "service-routing": 410 * time.Minute, "service-routing-short": 105 * time.Minute, "service-routing-kubernetes": 52 * time.Minute,
		"load-balancer": 12 * time.Minute, "instances": 8 * time.Minute,
		"an-linux": 80 * time.Minute, "an-windows": 50 * time.Minute, "cloud-2015": 33 * time.Minute, "placement": 8 * time.Minute, "an-vms": 15 * time.Minute, "instances-hosts": 8 * time.Minute, "page": 12 * time.Minute, "script": 4 * time.Minute, "zones": 8 * time.Minute,
		"applications": 22 * time.Minute, "fastpath": 145 * time.Minute, "fastpath-local": 55 * time.Minute, "fastpath-routed": 18 * time.Minute, "fastpath-tools": 71 * time.Minute, "mixed": 8 * time.Minute, "mtu": 41 * time.Minute, "policies": 22 * time.Minute, "endpoint-changes": 23 * time.Minute,
	} {
		e := load(t, name)
		var total time.Duration
		for _, w := range e.Spec.Workloads {
			trial := time.Duration(w.Traffic().Warmup+w.Traffic().Duration) + 500*time.Millisecond
			total += trial * time.Duration(len(e.PairsOf(w))*len(e.Spec.Variants)*e.Spec.Runs.N*max(1, e.Spec.TrialsPerPeriod))
		}
		if total > limit || total < limit*3/4 {
			t.Errorf("%s takes %v, want a little under %v", name, total, limit)
		}
	}
}

// TestComparisons lists the baseline of each variant.
func TestComparisons(t *testing.T) {
	for name, want := range map[string]map[string]string{
		"demo": {"native": "vxlan", "vxlan": "", "rps": "vxlan", "rfs": "vxlan", "rfs+": "vxlan", "fastpath": "vxlan"},
		"overlay-cost": {
			"native/full": "", "flannel/full": "native/full", "calico/full": "native/full",
			"native/none": "", "flannel/none": "native/none", "calico/none": "native/none",
		},
		"rps-rfs": {
			"baseline": "", "rps": "baseline", "rps-7": "baseline", "rfs": "baseline",
			"rps+": "baseline", "rps-7+": "baseline", "rfs+": "baseline",
		},
		"kubernetes": {
			"baseline": "", "service": "baseline", "native": "baseline",
			"rps": "baseline", "rps+": "baseline", "rfs": "baseline", "rfs+": "baseline", "fastpath": "baseline",
		},
		"mixed":            {"vxlan": "", "fastpath": "vxlan"},
		"fastpath-local":   {"bridge": "", "bridge/fastpath": "bridge", "ebpf": "bridge", "calico": "", "calico/fastpath": "calico", "service": "", "service/fastpath": "service"},
		"fastpath-routed":  {"routed": "", "native": "routed", "fastpath": "routed", "ebpf": "routed"},
		"cni":              {"pod": "", "service": "pod"},
		"kubernetes-short": {"baseline": "", "service": "baseline", "native": "baseline", "fastpath": "baseline"},
		"service-routing": {
			"direct":     "iptables/1",
			"iptables/1": "", "iptables/100": "", "iptables/1000": "", "iptables/5000": "", "iptables/10000": "", "iptables/16000": "",
			"nftables/1": "iptables/1", "nftables/100": "iptables/100", "nftables/1000": "iptables/1000", "nftables/5000": "iptables/5000", "nftables/10000": "iptables/10000", "nftables/16000": "iptables/16000",
			"ebpf/1": "iptables/1", "ebpf/100": "iptables/100", "ebpf/1000": "iptables/1000", "ebpf/5000": "iptables/5000", "ebpf/10000": "iptables/10000", "ebpf/16000": "iptables/16000",
		},
		"service-routing-short": {
			"iptables/1": "", "iptables/100": "", "iptables/1000": "", "iptables/5000": "", "iptables/16000": "",
			"ebpf/1": "iptables/1", "ebpf/100": "iptables/100", "ebpf/1000": "iptables/1000", "ebpf/5000": "iptables/5000", "ebpf/16000": "iptables/16000",
		},
		"service-routing-kubernetes": {"1": "", "100": "1", "1000": "1", "5000": "1", "16000": "1"},
		"tool-parity":                {"native/tools": "", "native/engine": "native/tools", "vxlan/tools": "", "vxlan/engine": "vxlan/tools"},
		"overlays": {
			"native/full": "", "routed/full": "native/full", "vxlan/full": "native/full", "vxlan-flow/full": "native/full", "udp/full": "native/full", "weave/full": "native/full", "ebpf/full": "native/full",
			"native/none": "", "routed/none": "native/none", "vxlan/none": "native/none", "vxlan-flow/none": "native/none", "udp/none": "native/none", "weave/none": "native/none", "ebpf/none": "native/none",
		},
		"load-balancer": {
			"1/full": "", "2/full": "1/full", "4/full": "1/full", "8/full": "1/full",
			"1/none": "", "2/none": "1/none", "4/none": "1/none", "8/none": "1/none",
		},
		"applications": {"native": "", "vxlan": "native", "rps": "native", "rfs": "native", "fastpath": "native"},
		"an-linux":     {"off": "", "on": "off"}, "an-windows": {"off": "", "on": "off"}, "an-vms": {"off": "", "on": "off"},
		"placement": {"apart": "", "group": "apart"},
		"zones":     {"within": "", "between": "within"}, "instances-hosts": {"small": "", "large": "small"},
		"page":      {"direct": "", "balancer": "direct"},
		"script":    {"A0": "A2", "A2": "", "DigitalOcean": "A2"},
		"instances": {"small": "medium", "medium": "", "medium-old": "medium", "medium-soft": "medium", "large": "medium"},
		"fastpath": {
			"vxlan/full": "", "native/full": "vxlan/full", "rfs+/full": "vxlan/full", "fastpath/full": "vxlan/full", "fastpath-rfs/full": "vxlan/full",
			"vxlan/none": "", "native/none": "vxlan/none", "rfs+/none": "vxlan/none", "fastpath/none": "vxlan/none", "fastpath-rfs/none": "vxlan/none",
			"calico/full": "", "calico-fast/full": "calico/full",
		},
		"policies": {
			"vxlan/0": "", "vxlan/iptables/200": "vxlan/0", "vxlan/iptables/2000": "vxlan/0", "vxlan/ipset/200": "vxlan/0", "vxlan/ipset/2000": "vxlan/0",
			"vxlan/nftables/200": "vxlan/0", "vxlan/nftables/2000": "vxlan/0", "vxlan/ebpf/200": "vxlan/0", "vxlan/ebpf/2000": "vxlan/0",
			"routed/0": "vxlan/0", "routed/ipset/200": "vxlan/0", "routed/ipset/2000": "vxlan/0", "ebpf/0": "vxlan/0", "ebpf/200": "vxlan/0", "ebpf/2000": "vxlan/0",
			"fastpath/0": "vxlan/0", "fastpath/200": "vxlan/0", "fastpath/2000": "vxlan/0",
		},
		"message-sizes":    {"native": "", "vxlan": "native"},
		"mtu":              {"ebpf": "", "native": "ebpf", "ebpf/1450": "ebpf", "vxlan": "ebpf/1450", "fastpath": "ebpf/1450", "fastpath/1550": "ebpf"},
		"fastpath-tools":   {"native": "", "vxlan": "native", "fastpath": "native", "ebpf": "native"},
		"underload-parity": {"native/tools": "", "native/again/tools": "native/tools", "native/engine": "native/tools", "vxlan/tools": "", "vxlan/engine": "vxlan/tools"},
		"engine-parity":    {"native/tools": "", "native/engine": "native/tools", "vxlan/tools": "", "vxlan/engine": "vxlan/tools", "ebpf/tools": "", "ebpf/engine": "ebpf/tools"},
	} {
		e := load(t, name)
		got := map[string]string{}
		for _, v := range e.Spec.Variants {
			got[v.Name] = e.BaselineOf(v)
			if base := e.BaselineOf(v); strings.HasSuffix(base, "/none") != strings.HasSuffix(v.Name, "/none") && base != "" {
				t.Errorf("%s: %s is compared with %s, which has another NIC", name, v.Name, base)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestAsPublished checks that the presets match the publication: RFS has no mask, rps-7 leaves out the CPU of
// the interrupt, only "+" reaches into the pods, and rps-rfs accelerates only the servers.
func TestAsPublished(t *testing.T) {
	for _, name := range []string{"demo", "kubernetes", "rps-rfs"} {
		for _, v := range load(t, name).Spec.Variants {
			if side := map[bool]string{true: spec.SideServer}[name == "rps-rfs" && v.Accelerate != nil]; v.On != side {
				t.Errorf("%s: %s is on side %q, want %q", name, v.Name, v.On, side)
			}
			for _, a := range v.Accelerate {
				var devices []string
				cpus := map[bool]string{false: v1alpha1.CPUsAll, true: v1alpha1.CPUsAllButIRQ}[strings.HasPrefix(v.Name, "rps-7")]
				switch {
				case a.Fastpath != nil:
					continue
				case a.RFS != nil && a.RFS.CPUs == "":
					devices = a.RFS.Devices
				case a.RPS != nil && a.RPS.CPUs == cpus:
					devices = a.RPS.Devices
				default:
					t.Errorf("%s: %s has an unexpected mask", name, v.Name)
				}
				want := []string{v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth}
				if strings.HasSuffix(v.Name, "+") {
					want = append(want, v1alpha1.DevicePod)
				}
				if diff := cmp.Diff(want, devices); diff != "" {
					t.Errorf("%s: devices of %s (-want +got):\n%s", name, v.Name, diff)
				}
			}
		}
	}
}

// TestOverlays checks that a variant's name gives its path and NIC, and that nothing else differs.
func TestOverlays(t *testing.T) {
	e := load(t, "overlays")
	for _, v := range e.Spec.Variants {
		path, shape, _ := strings.Cut(e.PathOf(v).String(), "/")
		if shape == spec.ShapeWeave {
			path = shape
		}
		if name := path + "/" + e.NICOf(v).Offload; name != v.Name || v.Accelerate != nil || v.Tools != nil {
			t.Errorf("%s is %s", v.Name, name)
		}
	}
}

// TestOverlaysByRate checks that a variant's name gives its path and its rate in Mbit/s, that its baseline is
// native at that rate, and that the series of its path contains it.
func TestOverlaysByRate(t *testing.T) {
	e := load(t, "overlays-by-rate")
	rates := 0
	for _, s := range e.Spec.Series {
		if want := map[bool]string{false: "native"}[s.Name == "native"]; s.Axis != spec.AxisRate || s.Versus != want {
			t.Errorf("series %+v", s)
		}
		for _, name := range s.Of {
			i := slices.IndexFunc(e.Spec.Variants, func(v spec.Variant) bool { return v.Name == name })
			v := e.Spec.Variants[i]
			path, _, _ := strings.Cut(e.PathOf(v).String(), "/")
			bits, err := e.NICOf(v).Rate.BitsPerSecond()
			rate := strconv.FormatFloat(float64(bits)/1e6, 'f', -1, 64)
			base := map[bool]string{false: "native/" + rate}[path == "native"]
			if err != nil || name != path+"/"+rate || path != s.Name || e.BaselineOf(v) != base {
				t.Errorf("%s of series %s is %s at %s Mbit/s, compared with %q", name, s.Name, path, rate, e.BaselineOf(v))
			}
			rates++
		}
	}
	if rates != len(e.Spec.Variants) {
		t.Errorf("%d of %d variants are in a series", rates, len(e.Spec.Variants))
	}
}

// TestMessageSizes checks that a workload's name gives its kind and the size of its messages.
func TestMessageSizes(t *testing.T) {
	for _, w := range load(t, "message-sizes").Spec.Workloads {
		kind := strings.Replace(w.Kind(), "stream", "throughput", 1)
		if name := fmt.Sprintf("%s-%d", kind, w.Traffic().Size); name != w.Name || w.Traffic().Tool != spec.ToolNative {
			t.Errorf("%s is %s by %s", w.Name, name, w.Traffic().Tool)
		}
	}
}

// TestUnderLoadParity checks that both programs poll the clock, at the rate in the name.
func TestUnderLoadParity(t *testing.T) {
	e := load(t, "underload-parity")
	for _, v := range e.Spec.Variants {
		for _, w := range e.Spec.Workloads {
			u := e.WorkloadFor(v, w).UnderLoad
			want := map[bool]string{true: spec.ToolSockperf, false: spec.ToolNative}[strings.HasSuffix(v.Name, "/tools")]
			if u.Tool != want || !u.Busy || w.Name != fmt.Sprintf("rate-%d", u.Rate) {
				t.Errorf("%s %s is %+v", v.Name, w.Name, u)
			}
		}
	}
}

// TestParityTools checks that variants with the suffix /tools run the tools, and all others the engine.
func TestParityTools(t *testing.T) {
	for name, tools := range map[string][]string{
		"engine-parity": {spec.ToolIperf2, spec.ToolIperf3, spec.ToolSockperf},
		"tool-parity":   {spec.ToolQperf, spec.ToolQperf, spec.ToolAB, spec.ToolAB},
	} {
		e := load(t, name)
		for _, v := range e.Spec.Variants {
			want := tools
			if !strings.HasSuffix(v.Name, "/tools") {
				want = slices.Repeat([]string{spec.ToolNative}, len(tools))
			}
			var got []string
			for _, w := range e.Spec.Workloads {
				got = append(got, e.WorkloadFor(v, w).Traffic().Tool)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: tools of %s (-want +got):\n%s", name, v.Name, diff)
			}
		}
	}
}

// TestServiceRouting checks that a variant's name gives its mode, if it has one, and its backends, and that the series of its mode
// contains it.
func TestServiceRouting(t *testing.T) {
	for _, name := range []string{"service-routing", "service-routing-short", "service-routing-kubernetes"} {
		e := load(t, name)
		inSeries := map[string]string{}
		for _, s := range e.Spec.Series {
			for _, v := range s.Of {
				inSeries[v] = s.Name
			}
		}
		for _, v := range e.Spec.Variants {
			if v.Name == "direct" {
				continue
			}
			if got, want := e.PathOf(v).String(), "service/"+v.Name; got != want {
				t.Errorf("%s: %s has the path %s", name, v.Name, got)
			}
			mode, _, many := strings.Cut(v.Name, "/")
			if !many {
				mode = "service"
			}
			if inSeries[v.Name] != mode {
				t.Errorf("%s: %s is in the series %q", name, v.Name, inSeries[v.Name])
			}
		}
	}
}

// TestLoadBalancer checks that a variant's name gives its backends and NIC, that nothing else differs, and that
// each additional backend adds the price of one.
func TestLoadBalancer(t *testing.T) {
	e := load(t, "load-balancer")
	nics := e.Spec.Path.Balancer.NICs
	for _, v := range e.Spec.Variants {
		b := e.PathOf(v).Balancer
		if name := fmt.Sprintf("%d/%s", b.Backends, e.NICOf(v).Offload); name != v.Name || b.Proxy != "" || b.NICs != nics {
			t.Errorf("%s is %s, %+v", v.Name, name, b)
		}
		if price, currency := e.PriceOf(v); math.Abs(price-0.1-0.05*float64(b.Backends)) > 1e-9 || currency != "USD" {
			t.Errorf("%s costs %g %s", v.Name, price, currency)
		}
	}
}

// TestOnHosts checks that the presets for hosts name as many hosts as their variants need, and that a variant's
// name gives its hosts.
func TestOnHosts(t *testing.T) {
	for name, want := range map[string]map[string][2]string{
		"an-vms":          {"off": {"client", "server"}, "on": {"client", "server"}},
		"zones":           {"within": {"zone-a-1", "zone-a-2"}, "between": {"zone-a-1", "zone-b-1"}},
		"placement":       {"apart": {"apart-1", "apart-2"}, "group": {"group-1", "group-2"}},
		"instances-hosts": {"small": {"small-1", "small-2"}, "large": {"large-1", "large-2"}},
	} {
		e := load(t, name)
		got := map[string][2]string{}
		for _, v := range e.Spec.Variants {
			client, server := e.HostsOf(v)
			got[v.Name] = [2]string{e.Spec.Target.Hosts[client].Name, e.Spec.Target.Hosts[server].Name}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestANLinux checks that a workload's name gives its kind and the size of its messages, and that each runs
// sockperf over TCP for a minute.
func TestANLinux(t *testing.T) {
	for _, w := range load(t, "an-linux").Spec.Workloads {
		kind := strings.Replace(w.Kind(), "stream", "throughput", 1)
		if name := fmt.Sprintf("%s-%d", kind, w.Traffic().Size); name != w.Name || w.Traffic().Tool != spec.ToolSockperf ||
			w.Traffic().Protocol != "tcp" || w.Traffic().Rate != 0 || time.Duration(w.Traffic().Duration) != time.Minute {
			t.Errorf("%s is %+v", w.Name, w.Traffic())
		}
	}
}

// TestANWindows checks that a workload's name says when it ends and the size of its messages, and that each runs latte over TCP.
// It and an-linux choose nodes by the same labels.
func TestANWindows(t *testing.T) {
	e := load(t, "an-windows")
	for _, w := range e.Spec.Workloads {
		limit := "time"
		if w.Traffic().Iterations == 65100 {
			limit = "iterations"
		}
		if name := fmt.Sprintf("%s-%d", limit, w.Traffic().Size); name != w.Name || w.Traffic().Tool != spec.ToolLatte || w.PingPong == nil ||
			w.Traffic().Protocol != "tcp" || limit == "time" && time.Duration(w.Traffic().Duration) != time.Minute {
			t.Errorf("%s is %+v", w.Name, w.Traffic())
		}
	}
	if diff := cmp.Diff(load(t, "an-linux").Pools(), e.Pools()); diff != "" || len(e.Pools()) != 2 {
		t.Errorf("pools of an-linux and an-windows:\n%s", diff)
	}
}

// TestCloud2015 checks that a variant's name gives its path and machine, that each machine's NIC has one rate, at which a connection
// gets the published throughput, and that an overlay is compared with the same machine without one.
func TestCloud2015(t *testing.T) {
	e := load(t, "cloud-2015")
	natively := map[string]float64{} // bit/s, as published
	for _, p := range e.Spec.Published {
		if path, machine, _ := strings.Cut(p.Variant, "/"); path == "native" && p.Metric == metrics.Throughput {
			natively[machine], _, _, _ = p.Value.Amount()
		}
	}
	for _, v := range e.Spec.Variants {
		path, machine, _ := strings.Cut(v.Name, "/")
		if got, _, _ := strings.Cut(e.PathOf(v).String(), "/"); got != path {
			t.Errorf("%s has the path %s", v.Name, got)
		}
		if path != "native" && v.Versus != "native/"+machine {
			t.Errorf("%s is compared with %s", v.Name, v.Versus)
		}
		if machine == "A8" {
			continue // which has no figure
		}
		bits, err := e.NICOf(v).Rate.BitsPerSecond()
		if err != nil || math.Abs(float64(bits)*1448/1514/natively[machine]-1) > 0.002 {
			t.Errorf("%s has %d bit/s, %v; %g were published", v.Name, bits, err, natively[machine])
		}
		if price, _ := e.PriceOf(v); (price > 0) != (path == "native" && (machine[0] == 'A' || machine[:2] == "D1" || machine[:2] == "D2")) {
			t.Errorf("%s costs %g", v.Name, price)
		}
	}
	if len(natively) != 14 {
		t.Errorf("%d machines", len(natively))
	}
}

// TestInstances checks that each type has a rate and a price, and that an older type costs more than a later one
// with the same rate.
func TestInstances(t *testing.T) {
	e := load(t, "instances")
	price := make(map[string]float64)
	for _, v := range e.Spec.Variants {
		price[v.Name], _ = e.PriceOf(v)
		if nic := e.NICOf(v); nic.Rate == "" || price[v.Name] == 0 {
			t.Errorf("%s: rate %q, price %g", v.Name, nic.Rate, price[v.Name])
		}
	}
	later, older := e.Spec.Variants[1], e.Spec.Variants[2]
	if e.NICOf(older).Rate != e.NICOf(later).Rate || price[older.Name] <= price[later.Name] {
		t.Errorf("%s is no worse a bargain than %s", older.Name, later.Name)
	}
}

// TestPublishedFigures checks that rps-rfs has the figures of docs/results/published.md, and a ratio of every
// variant for every number of pairs.
func TestPublishedFigures(t *testing.T) {
	page, err := os.ReadFile("../docs/results/published.md")
	if err != nil {
		t.Fatal(err)
	}
	e := load(t, "rps-rfs")
	type at struct {
		variant string
		pairs   int
	}
	figures := map[at]spec.Published{}
	for _, p := range e.Spec.Published {
		if p.Cores == nil {
			figures[at{p.Variant, p.Pairs}] = p
		}
	}
	rows := regexp.MustCompile(`(?m)^\| (\d+) \| (\S+) \| (\d+) ± (\d+) \|.*\| ([\d.]+) \| (?:[\d.]+ \(([\d.]+)–([\d.]+)\) )?\|$`).FindAllStringSubmatch(string(page), -1)
	if len(rows) != 20 {
		t.Fatalf("the page has %d rows, want 20", len(rows))
	}
	for _, row := range rows {
		var n [8]float64
		for i, cell := range row {
			n[i], _ = strconv.ParseFloat(cell, 64)
		}
		got := figures[at{strings.ToLower(row[2]), int(n[1])}]
		want := spec.Published{Ratio: n[5], Interval: []float64{n[6], n[7]}}
		if row[2] == "Baseline" {
			want = spec.Published{Value: spec.Measure(row[3] + " Mb/s"), Interval: []float64{n[3] - n[4], n[3] + n[4]}}
		}
		if got.Value != want.Value || got.Ratio != want.Ratio || !slices.Equal(got.Interval, want.Interval) {
			t.Errorf("%s: %+v, want %+v", row[0], got, want)
		}
	}
	for _, v := range e.Spec.Variants {
		for _, n := range e.Spec.Pairs {
			if p := figures[at{v.Name, n}]; v.Name != e.Spec.Baseline && (p.Ratio == 0 || p.Versus != e.Spec.Baseline) {
				t.Errorf("%s has no published ratio at %d pairs", v.Name, n)
			}
		}
	}
}

// TestPublishedInDocuments checks that every published figure of a preset names its document, and is a number in
// a table of that document's section of docs/results/documents.md. A range of ratios is there as a share that is less.
func TestPublishedInDocuments(t *testing.T) {
	page, err := os.ReadFile("../docs/results/documents.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		for _, line := range strings.Split(text, "\n") {
			if strings.HasPrefix(line, "|") {
				sections[title] += line + "\n"
			}
		}
	}
	used := map[string]bool{}
	for _, name := range Names() {
		for _, p := range load(t, name).Spec.Published {
			title, _, cited := strings.Cut(p.Source, " (")
			text, ok := sections[title]
			if !cited || !ok {
				t.Errorf("%s: no section %q of source %q", name, title, p.Source)
				continue
			}
			used[title] = true
			if p.Cores != nil {
				var shares []string
				for _, share := range p.Cores {
					shares = append(shares, strconv.FormatFloat(share, 'f', 1, 64))
				}
				if cell := "| " + strings.Join(shares, ", ") + " |"; !strings.Contains(text, cell) {
					t.Errorf("%s: the section of %q does not have %q of %q", name, title, cell, p.Figure)
				}
				continue
			}
			number, _, _ := strings.Cut(string(p.Value), " ")
			numbers := []string{number}
			if p.IsRatio() {
				numbers = []string{strconv.FormatFloat(p.Ratio, 'f', 3, 64), strconv.FormatFloat(p.Ratio, 'g', -1, 64)}
			}
			switch {
			case p.IsRatio() && p.Ratio == 0 && p.Interval[0] == 0:
				numbers = []string{fmt.Sprintf("more than %g%%", 100*(1-p.Interval[1]))}
			case p.IsRatio() && p.Ratio == 0:
				numbers = []string{fmt.Sprintf("%.3g–%.3g%%", 100*(1-p.Interval[1]), 100*(1-p.Interval[0]))}
			}
			if !slices.ContainsFunc(numbers, func(n string) bool {
				return regexp.MustCompile(`(^|[ :])` + regexp.QuoteMeta(n) + `([ ,]|$)`).MatchString(text)
			}) {
				t.Errorf("%s: the section of %q does not have %v of %q", name, title, numbers, p.Figure)
			}
		}
	}
	if len(used) != 5 {
		t.Errorf("presets have figures of %d documents: %v", len(used), used)
	}
}
