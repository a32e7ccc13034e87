package spec

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/words"
)

// This file fills in defaults and checks what a file means, from the top down. It fills in a default only if the file
// does not set the field, so that it still sees an explicit zero, and refuses it.

var (
	cellName       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9+/._-]*$`)
	imageName      = regexp.MustCompile(`^[a-z0-9][A-Za-z0-9._:/@-]*[A-Za-z0-9]$`)
	cpuAmount      = regexp.MustCompile(`^([1-9][0-9]{0,5}m?|[0-9]{1,4}\.[0-9]{0,2}[1-9])$`)
	memAmount      = regexp.MustCompile(`^[1-9][0-9]{0,14}([KMGT]i|[kMGT])?$`)
	hostName       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	loginName      = regexp.MustCompile(`^[^-\s][^\s]*$`)
	parameterName  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
	parameterValue = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/@:-]*$`)
	sysctlName     = regexp.MustCompile(`^[a-z0-9_-]{1,15}$`) // TCP_CA_NAME_MAX, less the final 0
)

// MaxPairs is the maximum number of pairs of a trial.
const MaxPairs = 64

// ValidName reports whether a variant or a workload can have a name.
func ValidName(name string) bool { return cellName.MatchString(name) }

func fill[T any](r *reader, path string, to *T, value T) {
	if r.learned != nil {
		r.rule(path).Defaults = []string{written(value)}
	}
	if !r.has(path) {
		*to = value
	}
}

// malformedNear reports whether decoding found a problem in, at or around a field.
func (r *reader) malformedNear(path string) bool {
	within := func(inner, outer string) bool {
		rest, ok := strings.CutPrefix(inner, outer)
		return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
	}
	return slices.ContainsFunc(r.errors[:r.malformed], func(e *Error) bool {
		return within(e.Field, path) || within(path, e.Field)
	})
}

// given reports whether the file has a required field that could be decoded. It records a problem if the field is
// missing.
func (r *reader) given(path string) bool {
	r.rule(path).Required = true
	if !r.has(path) && !r.malformedNear(parent(path)) {
		r.missing(path)
	}
	return r.has(path) && !r.malformedNear(path)
}

// set reports whether the file sets a field to something that could be decoded.
func (r *reader) set(path string) bool { return r.has(path) && !r.malformedNear(path) }

func (r *reader) between(path string, got, low, high int) {
	r.rule(path).Low, r.rule(path).High = low, high
	switch {
	case got < low:
		r.fail(path, "must be at least %d, is %d", low, got)
	case got > high:
		r.fail(path, "must be at most %d, is %d", high, got)
	}
}

func (r *reader) oneOf(path, got string, allowed ...string) {
	r.rule(path).Enum = allowed
	if r.set(path) && !slices.Contains(allowed, got) {
		r.fail(path, "must be %s, is %q", words.Or(allowed), got)
	}
}

func (r *reader) matches(path, got string, want *regexp.Regexp, text string) {
	r.rule(path).Pattern, r.rule(path).Text = want.String(), text
	if !want.MatchString(got) {
		r.fail(path, "must be %s, is %q", text, got)
	}
}

// valid works like matches, but with one of Kubernetes' own checks.
func (r *reader) valid(path, got string, faults func(string) []string, text string) {
	r.rule(path).Text = text
	if len(faults(got)) > 0 {
		r.fail(path, "must be %s, is %q", text, got)
	}
}

// share checks a ratio's distance from 1, such as a margin.
func (r *reader) share(path string, got float64) {
	r.rule(path).Text, r.rule(path).Below = "above 0 and below 0.5", 0.5
	if !(got > 0 && got < 0.5) {
		r.fail(path, "must be above 0 and below 0.5, is %g", got)
	}
}

// notEmpty checks that a list has an element.
func (r *reader) notEmpty(path string, n int, text string) {
	r.rule(path).Some = true
	if n == 0 {
		r.fail(path, "must have at least one %s, is empty", text)
	}
}

// choice is a field of a one-of.
type choice struct {
	name string
	set  bool
}

func (t Target) choices() []choice {
	return []choice{{"lab", t.Lab != nil}, {"kubernetes", t.Kubernetes != nil}, {"hosts", t.Hosts != nil}, {"imported", t.Imported != nil}}
}

// chosen returns the names of the fields that are set.
func chosen(choices []choice) (names []string) {
	for _, c := range choices {
		if c.set {
			names = append(names, c.name)
		}
	}
	return names
}

func (r *reader) exactlyOne(path string, choices ...choice) {
	var names []string
	for _, c := range choices {
		names = append(names, c.name)
	}
	r.rule(path).OneOf = names
	switch set := chosen(choices); {
	case len(set) == 1 || r.malformedNear(path):
	case len(set) == 0:
		r.fail(path, "must have one of %s, has none", words.Or(names))
	default:
		r.fail(path, "must have only one of %s, has %s", words.Or(names), strings.Join(set, " and "))
	}
}

// unique adds a name to seen, or records a problem if it is there already. It ignores case, because names of files and
// hosts are not case-sensitive everywhere.
func (r *reader) unique(path, name string, seen map[string]string) {
	key := strings.ToLower(name)
	if first, ok := seen[key]; ok {
		r.fail(path, "must be unique, %q is %s too", name, first)
		return
	}
	seen[key] = path
}

func (r *reader) experiment(e *Experiment) {
	r.identity(e)
	r.defaults(e)
	s := &e.Spec
	r.target(s)
	r.pairs("spec.pairs", s.Pairs)
	r.mesh("spec.mesh", e)
	r.runs("spec.runs", s.Runs)
	if r.set("spec.margin") {
		r.share("spec.margin", s.Margin)
	}
	if r.set("spec.precision") && (!positive(s.Precision) || s.Precision <= 1) {
		r.fail("spec.precision", "must be a number above 1, is %g", s.Precision)
	}
	r.workloads(e)
	r.variants(e)
	r.clusters("spec.target.kubernetes.clusters", e)
	r.balanced(e)
	r.endpoints(e)
	r.parameters("spec.parameters", e)
	r.switched(e)
	if r.given("spec.baseline") {
		if v := r.reference("spec.baseline", s.Baseline, s.Variants); v != nil && v.Versus != "" {
			r.fail("spec.baseline", "must be a variant without versus, %q has %q", v.Name, v.Versus)
		}
	}
	for i, x := range s.Expect {
		r.expectation(fmt.Sprintf("spec.expect[%d]", i), s, x)
	}
	var published []Published
	for i, p := range s.Published {
		if !r.replaced(s, p) {
			r.published(fmt.Sprintf("spec.published[%d]", i), s, p)
			published = append(published, p)
		}
	}
	s.Published = published
	r.series(e)
}

// identity checks what kind of object an experiment is, and its name.
func (r *reader) identity(e *Experiment) {
	if r.given("apiVersion") {
		r.oneOf("apiVersion", e.APIVersion, v1alpha1.APIVersion)
	}
	if r.given("kind") {
		r.oneOf("kind", e.Kind, KindExperiment)
	}
	if r.given("metadata.name") {
		r.valid("metadata.name", e.Metadata.Name, validation.IsDNS1123Label, "a DNS label: a-z, 0-9 and - within, at most 63")
	}
}

// defaults fills in what an experiment leaves out.
func (r *reader) defaults(e *Experiment) {
	s := &e.Spec
	fill(r, "spec.target", &s.Target, Target{Lab: &Lab{}})
	switch {
	case s.Target.Imported != nil: // results of other programs: their defaults are unknown
	case s.Target.Kubernetes != nil:
		fill(r, "spec.path", &s.Path, Path{Pod: &Plain{}})
		r.nameClusters(s)
	case s.Target.Hosts != nil:
		fill(r, "spec.path", &s.Path, Path{Native: &Plain{}})
	default:
		fill(r, "spec.path", &s.Path, Path{VXLAN: &VXLAN{}})
	}
	if s.Mesh == nil {
		fill(r, "spec.pairs", &s.Pairs, []int{1})
	}
	if e.Switches() {
		fill(r, "spec.runs", &s.Runs, Runs{N: periods})
		fill(r, "spec.trialsPerPeriod", &s.TrialsPerPeriod, 3)
	} else {
		fill(r, "spec.runs", &s.Runs, Runs{Auto: true, Max: autoMax, Width: autoWidth})
	}
	fill(r, "spec.margin", &s.Margin, 0.02)
	if r.has("spec.published") {
		fill(r, "spec.precision", &s.Precision, 1.5)
	}
}

// target checks the target, and the path on it.
func (r *reader) target(s *Spec) {
	r.exactlyOne("spec.target", s.Target.choices()...)
	if s.Target.Lab != nil {
		r.lab("spec.target.lab", s.Target.Lab)
	}
	if s.Target.Kubernetes != nil {
		r.kubernetes("spec.target.kubernetes", s.Target.Kubernetes)
	}
	if s.Target.Hosts != nil {
		r.hosts("spec.target.hosts", s.Target.Hosts)
	}
	if s.Target.Imported == nil || r.has("spec.path") {
		r.path("spec.path", s.Target, &s.Path)
	}
}

func (r *reader) workloads(e *Experiment) {
	s := &e.Spec
	if r.given("spec.workloads") {
		r.notEmpty("spec.workloads", len(s.Workloads), "workload")
	}
	seen := map[string]string{}
	for i := range s.Workloads {
		path := fmt.Sprintf("spec.workloads[%d]", i)
		r.name(path+".name", s.Workloads[i].Name, seen)
		r.workload(path, s.Target, &s.Workloads[i])
		if t := s.Workloads[i].Traffic(); t != nil {
			r.toolFits(path+"."+s.Workloads[i].Kind()+".tool", t.Tool, e, t)
		}
	}
	for i, w := range s.Workloads {
		if path := fmt.Sprintf("spec.workloads[%d].beside", i); r.set(path) && r.namesWorkload(path, w.Beside, s.Workloads) {
			r.beside(path, e, w)
		}
	}
}

// beside checks that the traffic of two workloads can share the pairs and the window of one.
func (r *reader) beside(path string, e *Experiment, w Workload) {
	named := e.BesideOf(Variant{}, w)
	if named.Traffic() == nil || w.Traffic() == nil { // an error of its own
		return
	}
	own, other := w.Traffic(), named.Traffic()
	apart := func(a, b int) bool { return a == 0 || b == 0 || max(a, b)-min(a, b) >= slices.Max(e.PairsOf(w)) }
	switch {
	case named.Name == w.Name:
		r.fail(path, "must be another workload than %s", w.Name)
	case named.Beside != "":
		r.fail(path, "%s has a workload beside it itself; name %s", named.Name, named.Beside)
	case other.Tool != ToolNative:
		r.fail(path, "%s is made by %s, and only the tool %s can run beside another workload", named.Name, other.Tool, ToolNative)
	case own.Counted() || other.Counted():
		r.fail(path, "needs a window of a fixed duration at both workloads: leave out requests and iterations")
	case own.IP != other.IP:
		r.fail(path, "%s has IPv%d and %s IPv%d: the two ends of a pair have addresses of one version", w.Name, own.IP, named.Name, other.IP)
	case e.Spec.Mesh != nil || e.Spec.Target.Imported != nil:
		r.fail(path, "is neither for a mesh nor imported")
	case !apart(own.Port, other.Port):
		r.fail(path, "the servers of %s and %s would listen on the same ports: leave %d apart", w.Name, named.Name, slices.Max(e.PairsOf(w)))
	case slices.ContainsFunc(e.Spec.Variants, func(v Variant) bool {
		p := e.PathOf(v)
		return p.Service != nil || p.Balancer != nil
	}):
		r.fail(path, "is not for the paths service and balancer, whose address leads to the server of one workload")
	}
}

func (r *reader) variants(e *Experiment) {
	s := &e.Spec
	if r.given("spec.variants") {
		r.notEmpty("spec.variants", len(s.Variants), "variant")
	}
	seen := map[string]string{}
	for i := range s.Variants {
		path := fmt.Sprintf("spec.variants[%d]", i)
		r.name(path+".name", s.Variants[i].Name, seen)
		r.variant(path, e, &s.Variants[i])
	}
}

func (r *reader) expectation(path string, s *Spec, x Expectation) {
	if r.given(path + ".variant") {
		r.reference(path+".variant", x.Variant, s.Variants)
	}
	r.exactlyOne(path, choice{"faster", x.Faster != ""}, choice{"notSlower", x.NotSlower != ""}, choice{"same", x.Same != ""})
	for field, than := range map[string]string{"faster": x.Faster, "notSlower": x.NotSlower, "same": x.Same} {
		if than == "" {
			continue
		}
		if v := r.reference(path+"."+field, than, s.Variants); v != nil && than == x.Variant {
			r.fail(path+"."+field, "must be another variant than %s", x.Variant)
		}
	}
	r.metric(path, x.Metric, x.Workload, s.Workloads)
}

// metric checks that a named metric exists and that the workload gives it. If no workload is named, one of all
// workloads must give it.
func (r *reader) metric(path, metric, workload string, workloads []Workload) {
	if known := metrics.Comparable(); r.set(path+".metric") && !slices.Contains(known, metric) {
		if why := metrics.Get(metric).NotComparedBecause; why != "" {
			r.fail(path+".metric", "%s is compared with nothing: %s", metric, why)
		} else {
			r.fail(path+".metric", "there is no metric %q; %s", metric, Suggest(metric, known))
		}
		metric = ""
	}
	var giving []string
	for _, w := range workloads {
		// One without traffic is an error of its own.
		if w.Traffic() == nil || metric == "" || w.Gives(metric) {
			giving = append(giving, w.Name)
		}
	}
	switch {
	case !r.namesWorkload(path+".workload", workload, workloads):
	case workload != "" && !slices.Contains(giving, workload):
		r.fail(path+".metric", "%s gives no %s", workload, metric)
	case len(giving) == 0:
		r.fail(path+".metric", "no workload gives %s", metric)
	}
}

// namesWorkload checks that a field, if it is set, names a workload. It returns false if the field does not, or if that
// cannot be told.
func (r *reader) namesWorkload(path, workload string, workloads []Workload) bool {
	var names []string
	for _, w := range workloads {
		names = append(names, w.Name)
	}
	if r.malformedNear("spec.workloads") || len(names) == 0 {
		return false
	}
	if r.set(path) && !slices.Contains(names, workload) {
		r.fail(path, "no workload has the name %q; %s", workload, Suggest(workload, names))
		return false
	}
	return true
}

// replaced reports whether a figure is of a variant or workload that an override has replaced by others. That is no
// mistake, and the figure is left out.
func (r *reader) replaced(s *Spec, p Published) bool {
	lacks := func(name string) bool { return name != "" && named(name, s.Variants) == nil }
	if r.overridden("spec.published") {
		return false
	}
	if r.overridden("spec.variants") && (lacks(p.Variant) || lacks(p.Versus)) {
		return true
	}
	return r.overridden("spec.workloads") && !slices.ContainsFunc(s.Workloads, func(w Workload) bool {
		return w.Name == p.Workload && w.Traffic() != nil && (p.Cores != nil || w.Gives(p.Metric))
	})
}

// overridden reports whether an override, and not the file, has set a field.
func (r *reader) overridden(path string) bool {
	return r.nodes[path] != nil && r.nodes[path].pos.override != ""
}

// published checks one figure. Its pairs need not be among those of the experiment, so that
// a shorter run of a preset keeps its figures.
func (r *reader) published(path string, s *Spec, p Published) {
	for field, text := range map[string]string{"source": p.Source, "figure": p.Figure} {
		if r.given(path+"."+field) && strings.TrimSpace(text) == "" {
			r.fail(path+"."+field, "must not be empty")
		}
	}
	if r.given(path + ".variant") {
		r.reference(path+".variant", p.Variant, s.Variants)
	}
	if r.given(path + ".pairs") {
		r.between(path+".pairs", p.Pairs, 1, MaxPairs)
	}
	r.given(path + ".metric")
	r.given(path + ".workload")
	if r.set(path + ".cores") {
		r.publishedCores(path, s, p)
		return
	}
	r.metric(path, p.Metric, p.Workload, s.Workloads)
	switch {
	case r.malformedNear(path):
	case r.has(path+".value") && r.has(path+".ratio"):
		r.fail(path+".ratio", "must not be set with a value: a figure is one or the other")
	case !r.has(path+".value") && !r.has(path+".ratio") && !r.has(path+".interval"):
		r.fail(path, "must have a value, a ratio, cores or, for a range of ratios, an interval, has none")
	}
	r.rule(path + ".value").Pattern = measure.String()
	r.publishedValue(path, p)
	if r.set(path+".ratio") && !positive(p.Ratio) {
		r.fail(path+".ratio", "must be a number above 0, is %g", p.Ratio)
	}
	r.publishedVersus(path+".versus", s.Variants, p)
	r.publishedInterval(path+".interval", p)
}

// mostCores is the number of CPUs that Linux can have (NR_CPUS).
const mostCores = 8192

// publishedCores checks shares of cores, which exclude the other kinds of figures.
func (r *reader) publishedCores(path string, s *Spec, p Published) {
	if r.set(path+".metric") && p.Metric != CoreSoftirq && p.Metric != CoreIdle {
		r.fail(path+".metric", "must be %s or %s with cores, is %q", CoreSoftirq, CoreIdle, p.Metric)
	}
	r.namesWorkload(path+".workload", p.Workload, s.Workloads)
	for _, field := range []string{"value", "ratio", "versus", "interval", "oneWay"} {
		if r.has(path + "." + field) {
			r.fail(path+"."+field, "cannot be combined with cores")
		}
	}
	if len(p.Cores) < 1 || len(p.Cores) > mostCores {
		r.fail(path+".cores", "must be 1 to %d shares, are %d", mostCores, len(p.Cores))
	}
	for i, share := range p.Cores {
		if !(share >= 0 && share <= 100) {
			r.fail(fmt.Sprintf("%s.cores[%d]", path, i), "must be 0 to 100%%, is %g", share)
		}
	}
}

// publishedValue checks that a value has a unit of its metric.
func (r *reader) publishedValue(path string, p Published) {
	if r.set(path + ".value") {
		_, unit, _, err := p.Value.Amount()
		switch {
		case err != nil:
			r.fail(path+".value", "%s", err)
		case slices.Contains(metrics.Comparable(), p.Metric) && unit != metrics.Get(p.Metric).Unit:
			r.fail(path+".value", "must be in %s, as %s is, or a multiple of it, is %q", metrics.Get(p.Metric).Unit, p.Metric, string(p.Value))
		}
	}
	if p.OneWay && (p.IsRatio() || !strings.HasPrefix(p.Metric, "latency_")) {
		r.fail(path+".oneWay", "is for the value of a latency")
	}
}

func (r *reader) publishedVersus(path string, variants []Variant, p Published) {
	switch {
	case r.malformedNear(parent(path)):
	case !r.has(path) && p.IsRatio() && (p.Ratio != 0 || p.Interval != nil):
		r.missing(path)
	case r.has(path) && !p.IsRatio():
		r.fail(path, "is for a ratio; a value is relative to nothing")
	case r.has(path):
		if v := r.reference(path, p.Versus, variants); v != nil && v.Name == p.Variant {
			r.fail(path, "must be another variant than %s", p.Variant)
		}
	}
}

// publishedInterval checks that there are two ends, in order, around the figure. A range of ratios may begin at 0: then only
// its upper end was published.
func (r *reader) publishedInterval(path string, p Published) {
	if !r.set(path) {
		return
	}
	bound := len(p.Interval) == 2 && p.Interval[0] == 0 && p.IsRatio() && p.Ratio == 0
	if len(p.Interval) != 2 || !positive(p.Interval[0]) && !bound || !positive(p.Interval[1]) || p.Interval[0] > p.Interval[1] {
		r.fail(path, "must be two numbers above 0, the lower one first, is %v", p.Interval)
		return
	}
	at := p.Ratio
	if amount, _, times, err := p.Value.Amount(); err == nil {
		at = amount / times
	}
	const rounding = 1e-9 // of a unit
	if positive(at) && (at < p.Interval[0]*(1-rounding) || at > p.Interval[1]*(1+rounding)) {
		r.fail(path, "must be around %g, is %g to %g", at, p.Interval[0], p.Interval[1])
	}
}

// positive reports whether a measurement can have given a number: it must be above 0 and finite.
func positive(x float64) bool { return x > 0 && !math.IsInf(x, 1) }

func (r *reader) name(path, name string, seen map[string]string) {
	if r.given(path) {
		r.matches(path, name, cellName, "of A-Z, a-z, 0-9 and + / . _ -, the first a letter or digit")
		r.unique(path, name, seen)
	}
}

// reference returns the variant with a name. If there is none, it records a problem and returns nil.
func (r *reader) reference(path, name string, variants []Variant) *Variant {
	if v := named(name, variants); v != nil {
		return v
	}
	var names []string
	for _, v := range variants {
		names = append(names, v.Name)
	}
	if !r.malformedNear("spec.variants") && len(names) > 0 {
		r.fail(path, "no variant has the name %q; %s", name, Suggest(name, names))
	}
	return nil
}

func (r *reader) lab(path string, l *Lab) {
	fill(r, path+".nodes", &l.Nodes, 2)
	fill(r, path+".nic.offload", &l.NIC.Offload, OffloadFull)
	fill(r, path+".nic.mtu", &l.NIC.MTU, 1500)
	fill(r, path+".congestionControl", &l.CongestionControl, "cubic")
	if r.set(path + ".nodes") {
		r.between(path+".nodes", l.Nodes, 2, 16)
	}
	r.nic(path+".nic", l.NIC)
	r.matches(path+".congestionControl", l.CongestionControl, sysctlName, "the name of a congestion control, such as cubic")
}

func (r *reader) nic(path string, n NIC) {
	r.oneOf(path+".offload", n.Offload, OffloadFull, OffloadNone)
	if r.set(path + ".mtu") {
		// IPv6 inside the overlay needs 1280, and the tunnel takes 70.
		r.between(path+".mtu", n.MTU, 1350, 9000)
	}
	r.rate(path+".rate", n.Rate)
	r.price(path+".price", n.Price)
}

func (r *reader) rate(path string, rate BitRate) {
	r.rule(path).Pattern = bitRate.String()
	if _, err := rate.BitsPerSecond(); err != nil {
		r.fail(path, "%s", err)
	}
}

// price checks that a text is a price, and in the currency of the prices before it.
func (r *reader) price(path string, p Price) {
	r.rule(path).Pattern = price.String()
	_, currency, err := p.Amount()
	switch {
	case err != nil:
		r.fail(path, "%s", err)
	case currency == "":
	case r.currency == "":
		r.currency, r.currencyOf = currency, path
	case currency != r.currency:
		r.fail(path, "must be in %s, as %s is, is in %s: slipstream does not convert currencies", r.currency, r.currencyOf, currency)
	}
}

func (r *reader) baseImage(at, base, image string) {
	if !r.set(at) {
		return
	}
	r.matches(at, base, imageName, "a reference to an image, such as registry.example/busybox:1.37")
	if image != "" {
		r.fail(at, "cannot be set beside image, which has this program in it: leave one of the two out")
	}
}

func (r *reader) kubernetes(path string, k *Kubernetes) {
	for name, node := range map[string]string{"clientNode": k.ClientNode, "serverNode": k.ServerNode} {
		if at := path + "." + name; r.set(at) {
			r.valid(at, node, validation.IsDNS1123Subdomain, "the name of a node, as kubectl get nodes shows it")
		}
	}
	if at := path + ".serverNode"; r.set(at) && k.ServerNode == k.ClientNode {
		r.fail(at, "must be another node than clientNode, is the same: traffic within a node does not cross an overlay")
	}
	r.spread(path, k)
	r.selector(path+".nodeSelector", k.NodeSelector)
	r.selector(path+".clientSelector", k.ClientSelector)
	r.selector(path+".serverSelector", k.ServerSelector)
	if r.set(path + ".image") {
		r.matches(path+".image", k.Image, imageName, "a reference to an image, such as registry.example/slipstream:v1")
	}
	r.baseImage(path+".baseImage", k.BaseImage, k.Image)
	if r.set(path + ".resources.cpu") {
		r.matches(path+".resources.cpu", k.Resources.CPU, cpuAmount, "CPUs, such as 2, 1.5 or 500m")
	}
	if r.set(path + ".resources.memory") {
		r.matches(path+".resources.memory", k.Resources.Memory, memAmount, "bytes, such as 256Mi")
	}
	r.observe(path+".observe", k.Observe, k, map[string]string{})
}

// observe checks the names of DaemonSets. seen has the paths of those that are observed already.
func (r *reader) observe(path string, names []string, k *Kubernetes, seen map[string]string) {
	if !r.set(path) {
		return
	}
	if len(names) > 0 && k.Unprivileged {
		r.fail(path, "needs a privileged pod on each node, which unprivileged excludes")
	}
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", path, i)
		r.valid(at, name, notDaemonSet, "the namespace and the name of a DaemonSet, such as kube-system/cilium")
		r.unique(at, name, seen)
	}
}

// notDaemonSet returns what is wrong with namespace/name.
func notDaemonSet(name string) []string {
	namespace, name, _ := strings.Cut(name, "/")
	return append(validation.IsDNS1123Label(namespace), validation.IsDNS1123Subdomain(name)...)
}

// spread checks the number of nodes, and their names.
func (r *reader) spread(path string, k *Kubernetes) {
	named := k.ClientNode != "" || k.ServerNode != ""
	if at := path + ".nodes"; r.set(at) {
		r.between(at, k.Nodes, 2, 2*MaxPairs)
		if named && k.Nodes != 2 {
			r.fail(at, "must be 2 with clientNode and serverNode, is %d: name the nodes in nodeNames", k.Nodes)
		}
	}
	at := path + ".nodeNames"
	if !r.set(at) {
		return
	}
	if len(k.NodeNames) < 2 || len(k.NodeNames) > 2*MaxPairs {
		r.fail(at, "must be 2 to %d nodes, are %d", 2*MaxPairs, len(k.NodeNames))
	}
	if named {
		r.fail(at, "cannot be combined with clientNode and serverNode, which are the first two names")
	}
	if r.set(path+".nodes") && k.Nodes != len(k.NodeNames) {
		r.fail(path+".nodes", "must be %d, as many as nodeNames, is %d", len(k.NodeNames), k.Nodes)
	}
	r.nodeNames(at, k.NodeNames)
}

// nodeNames checks that names are those of nodes, each once.
func (r *reader) nodeNames(path string, names []string) {
	seen := map[string]string{}
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", path, i)
		r.valid(at, name, validation.IsDNS1123Subdomain, "the name of a node, as kubectl get nodes shows it")
		r.unique(at, name, seen)
	}
}

// selector checks labels that select nodes.
func (r *reader) selector(path string, labels map[string]string) {
	for key, value := range labels {
		if at := join(path, key); len(validation.IsQualifiedName(key)) > 0 {
			r.fail(at, "must have the name of a node label as key, is %q", key)
		} else {
			r.valid(at, value, validation.IsValidLabelValue, "the value of a label")
		}
	}
}

func (r *reader) hosts(path string, hosts []Host) {
	if len(hosts) < 2 {
		r.fail(path, "must have at least two hosts, one for clients and one for servers, has one")
	}
	seen := map[string]string{}
	for i, h := range hosts {
		at := fmt.Sprintf("%s[%d]", path, i)
		if r.given(at + ".name") {
			what := "of letters, digits and . _ -, the first a letter or digit"
			if strings.Contains(h.Name, ":") {
				what += " (a port and an IPv6 address have fields of their own, port and address)"
			}
			r.matches(at+".name", h.Name, hostName, what)
			r.unique(at+".name", h.Name, seen)
		}
		for field, text := range map[string]string{"address": h.Address, "user": h.User} {
			if r.set(at + "." + field) {
				r.matches(at+"."+field, text, loginName, "without spaces or a leading -")
			}
		}
		if r.set(at + ".port") {
			r.between(at+".port", h.Port, 1, 65535)
		}
		for key, value := range h.Labels {
			r.matches(join(at+".labels", key), key, hostName, "of letters, digits and . _ -, the first a letter or digit")
			r.valid(join(at+".labels", key), value, validation.IsValidLabelValue, "the value of a label")
		}
		r.price(at+".price", h.Price)
		for name, address := range h.Addresses {
			r.matches(join(at+".addresses", name), name, cellName, "of A-Z, a-z, 0-9 and + / . _ -, the first a letter or digit")
			if ip, err := netip.ParseAddr(address); err != nil || ip.Zone() != "" || ip.IsUnspecified() {
				r.fail(join(at+".addresses", name), "must be an IP address of the host, is %q", address)
			}
		}
	}
}

// ends checks which hosts a variant runs on, and that they have the addresses of its path.
func (r *reader) ends(path string, e *Experiment, v *Variant) {
	hosts := e.Spec.Target.Hosts
	switch {
	case v.Hosts != nil && e.Spec.Target.Kubernetes != nil:
		r.pool(path+".hosts", e, *v.Hosts)
		return
	case v.Hosts != nil && hosts == nil:
		r.fail(path+".hosts", "is for the targets hosts and kubernetes")
		return
	case len(hosts) < 2 || r.malformedNear("spec.target.hosts") || r.malformedNear(path+".hosts"):
		return
	}
	client, server, missing := v.ends().among(hosts)
	if client < 0 {
		r.fail(path+".hosts", "needs one host with the labels of client and another with those of server; one with %s is missing", labels.FormatLabels(missing))
		return
	}
	name := e.PathOf(*v).Address
	if name == "" {
		return
	}
	at := path + ".path.address"
	if v.Path == nil {
		at = "spec.path.address"
	}
	ends := []Host{hosts[client], hosts[server]}
	if e.Spec.Mesh != nil {
		ends = hosts
	}
	for _, h := range ends {
		if h.Addresses[name] == "" {
			r.fail(at, "host %s must have %q among its addresses, has %s", h.Name, name, cmp.Or(strings.Join(slices.Sorted(maps.Keys(h.Addresses)), ", "), "none"))
		}
	}
}

func (r *reader) path(path string, on Target, p *Path) {
	r.exactlyOne(path, choice{"native", p.Native != nil}, choice{"vxlan", p.VXLAN != nil},
		choice{"vxlan-flow", p.VXLANFlow != nil}, choice{"udp", p.UDP != nil}, choice{"routed", p.Routed != nil}, choice{"ebpf", p.EBPF != nil}, choice{"bridge", p.Bridge != nil},
		choice{"pod", p.Pod != nil}, choice{"service", p.Service != nil}, choice{"balancer", p.Balancer != nil}, choice{"address", p.Address != ""})
	switch {
	case len(chosen(on.choices())) > 1: // reported already
	case p.Address != "" && on.Hosts == nil:
		r.fail(path+".address", "is for the target hosts: it names one of each host's addresses")
	case p.Native == nil && p.Address == "" && on.Hosts != nil:
		name, _, _ := strings.Cut(p.String(), "/")
		r.fail(path+"."+name, "hosts have no such path; they have native, and address for their further addresses")
	case p.Service != nil:
		r.service(path+".service", on, p.Service)
	case (p.VXLAN != nil || p.Shape() != "" || p.Balancer != nil) && on.Kubernetes != nil:
		name, _, _ := strings.Cut(p.String(), "/")
		r.fail(path+"."+name, "is for a lab; a cluster has a network of its own, and the paths pod, service and native")
	case p.Pod != nil && on.Lab != nil:
		r.fail(path+".pod", "is for kubernetes; a lab has the paths native, vxlan, vxlan-flow, udp, routed, ebpf, bridge, service and balancer")
	case p.Native != nil && on.Kubernetes != nil && on.Kubernetes.Unprivileged:
		r.fail(path+".native", "needs the host network, which unprivileged pods cannot use")
	}
	if p.VXLAN != nil {
		fill(r, path+".vxlan.shape", &p.VXLAN.Shape, ShapeFlannel)
		r.oneOf(path+".vxlan.shape", p.VXLAN.Shape, ShapeFlannel, ShapeCalico)
	}
	if p.UDP != nil {
		fill(r, path+".udp.shape", &p.UDP.Shape, ShapeFlannel)
		r.oneOf(path+".udp.shape", p.UDP.Shape, ShapeFlannel, ShapeWeave)
	}
	if p.Balancer != nil {
		r.balancer(path+".balancer", p.Balancer)
	}
	if p.Local && (on.Lab == nil || p.VXLAN == nil && p.Routed == nil && p.EBPF == nil && p.Service == nil) {
		r.fail(path+".local", "is for the paths vxlan, routed, ebpf and service of a lab; on the path bridge both pods are on one node anyway")
	}
	if p.Policies != nil {
		r.policies(path+".policies", on, *p)
	}
}

// policies checks the policies of a path, and that its packets pass through them.
func (r *reader) policies(path string, on Target, of Path) {
	if r.given(path + ".count") {
		r.between(path+".count", of.Policies.Count, 1, 10000)
	}
	if r.given(path + ".mode") {
		r.oneOf(path+".mode", of.Policies.Mode, PolicyIPTables, PolicyIPSet, PolicyNFTables, PolicyEBPF)
	}
	switch {
	case on.Kubernetes != nil:
		r.fail(path, "are for a lab; a cluster has network policies of its own")
	case on.Hosts != nil || of.VXLAN == nil && of.Routed == nil && of.EBPF == nil && of.Bridge == nil && of.Service == nil:
		r.fail(path, "are for pods of a lab on the paths vxlan, routed, ebpf, bridge and service")
	case of.EBPF != nil && of.Policies.Mode != PolicyEBPF && r.set(path+".mode"):
		r.fail(path+".mode", "must be %s on the path ebpf, whose packets bypass netfilter", PolicyEBPF)
	}
}

func (r *reader) balancer(path string, b *Balancer) {
	if r.given(path + ".backends") {
		r.between(path+".backends", b.Backends, 1, MaxBackends)
	}
	r.oneOf(path+".proxy", b.Proxy, ProxyHAProxy, ProxyBuiltin)
	for _, role := range []string{RoleClient, RoleProxy, RoleBackend} {
		r.rate(path+".nics."+role+".rate", b.NICs.Of(role).Rate)
		r.price(path+".nics."+role+".price", b.NICs.Of(role).Price)
	}
}

// balanced checks that every balancer can distribute every workload over its backends.
func (r *reader) balanced(e *Experiment) {
	for i, w := range e.Spec.Workloads {
		at := fmt.Sprintf("spec.workloads[%d].%s", i, w.Kind())
		for _, v := range e.Spec.Variants {
			b := e.PathOf(v).Balancer
			if b == nil || w.Traffic() == nil {
				continue // a workload without traffic is a problem of its own
			}
			t := e.WorkloadFor(v, w).Traffic()
			// A workload that keeps its connections opens equally many to each backend, and the backend
			// waits for all of them.
			lasting := w.Connect == nil && w.HTTP == nil
			switch {
			case t.Protocol == "udp":
				r.fail(at+".protocol", "must be tcp if a variant has the path balancer, which distributes connections")
			case t.Tool != ToolNative && t.Tool != ToolAB:
				r.fail(at, "%s needs a single server, and the balancer of %s has several; choose native or ab", t.Tool, v.Name)
			case lasting && b.Backends > 0 && t.Connections%b.Backends != 0:
				r.fail(at+".connections", "must be a multiple of %d, the backends of %s, so that each has as many; is %d", b.Backends, v.Name, t.Connections)
			default:
				continue
			}
			break
		}
	}
}

// maxBackends is the maximum number of backends of a service, and maxEndpoints that of all services that a run creates in a
// cluster, whose API server has an object for each.
const (
	maxBackends  = 16000
	maxEndpoints = 32000
)

// endpoints checks how many endpoints a run would create in a cluster.
func (r *reader) endpoints(e *Experiment) {
	if e.Spec.Target.Kubernetes == nil {
		return
	}
	var sizes []int
	total := 0
	for i, v := range e.Spec.Variants {
		s := e.PathOf(v).Service
		if s == nil || s.Mode != "" || s.Backends < 2 || slices.Contains(sizes, s.Backends) {
			continue
		}
		if e.Spec.Mesh != nil {
			r.fail(fmt.Sprintf("spec.variants[%d]", i), "the services of a mesh have one backend each, not %d", s.Backends)
			return
		}
		if e.Nodes() > 2 {
			r.fail(fmt.Sprintf("spec.variants[%d]", i), "services with %d backends are for two nodes, and the experiment has %d", s.Backends, e.Nodes())
			return
		}
		sizes, total = append(sizes, s.Backends), total+s.Backends
	}
	pairs := 0
	for _, w := range e.Spec.Workloads {
		for _, n := range e.PairsOf(w) {
			pairs = max(pairs, n)
		}
	}
	if total*pairs > maxEndpoints {
		r.fail("spec.variants", "the services of %d pairs have %d backends in all, and a run creates at most %d: use fewer pairs, or fewer backends", pairs, total*pairs, maxEndpoints)
	}
}

func (r *reader) service(path string, on Target, s *Service) {
	if on.Kubernetes != nil {
		for _, field := range []string{"mode", "services", "otherBackends", "endpointChanges"} {
			if r.set(path + "." + field) {
				r.fail(path+"."+field, "is for a lab; in a cluster, only backends can be set")
			}
		}
		if r.set(path + ".backends") {
			r.between(path+".backends", s.Backends, 1, maxBackends)
		}
		return
	}
	if r.given(path + ".mode") {
		r.oneOf(path+".mode", s.Mode, ServiceIPTables, ServiceNFTables, ServiceEBPF)
	}
	fill(r, path+".backends", &s.Backends, 1)
	fill(r, path+".services", &s.Services, 1)
	if r.set(path + ".backends") {
		r.between(path+".backends", s.Backends, 1, maxBackends)
	}
	if r.set(path + ".services") {
		r.between(path+".services", s.Services, 1, 10000)
	}
	fill(r, path+".otherBackends", &s.OtherBackends, 1)
	if r.set(path + ".otherBackends") {
		r.between(path+".otherBackends", s.OtherBackends, 1, 250)
	}
	if r.set(path + ".endpointChanges") {
		r.between(path+".endpointChanges", s.EndpointChanges, 1, 100)
	}
}

func (r *reader) pairs(path string, pairs []int) {
	if r.set(path) {
		r.notEmpty(path, len(pairs), "number")
	}
	seen := map[string]string{}
	for i, n := range pairs {
		if at := fmt.Sprintf("%s[%d]", path, i); r.set(at) {
			r.between(at, n, 1, MaxPairs)
			r.unique(at, strconv.Itoa(n), seen)
		}
	}
}

// mesh checks that an experiment with a mesh has nothing that a mesh does not support, such as pairs of its own.
func (r *reader) mesh(path string, e *Experiment) {
	m := e.Spec.Mesh
	if m == nil {
		return
	}
	fill(r, path+".margin", &m.Margin, 0.1)
	if r.set(path + ".margin") {
		r.share(path+".margin", m.Margin)
	}
	const instead = "cannot be combined with spec.mesh, whose pairs are every node with every other one"
	if r.set("spec.pairs") {
		r.fail("spec.pairs", instead)
	}
	for i := range e.Spec.Workloads {
		if at := fmt.Sprintf("spec.workloads[%d].pairs", i); r.set(at) {
			r.fail(at, instead)
		}
	}
	if r.set("spec.series") {
		r.fail("spec.series", "cannot be combined with spec.mesh, which has no axis")
	}
	if e.Spec.Target.Imported != nil {
		r.fail(path, "is for a run; results of other programs are not imported as a mesh")
	}
	for i, v := range e.Spec.Variants {
		at := fmt.Sprintf("spec.variants[%d]", i)
		if p := e.PathOf(v); p.OneNode() || p.Balancer != nil || p.Service != nil {
			name, _, _ := strings.Cut(p.String(), "/")
			r.fail(path, "is for paths from node to node; variant %s has the path %s", v.Name, name)
		}
		if v.Hosts != nil {
			r.fail(at+".hosts", "cannot be combined with spec.mesh, which includes every host")
		}
	}
}

// pool checks the labels of a variant's nodes in a cluster. Each pool has two nodes of its own.
func (r *reader) pool(path string, e *Experiment, n Ends) {
	k := e.Spec.Target.Kubernetes
	r.selector(path+".client", n.Client)
	r.selector(path+".server", n.Server)
	if k.ClientNode != "" || k.ServerNode != "" || k.Nodes != 0 || k.ClientSelector != nil || k.ServerSelector != nil {
		r.fail(path, "cannot be combined with clientNode, serverNode, nodes, clientSelector and serverSelector: each variant chooses its nodes by labels")
	}
	if names := len(k.NodeNames); names > 0 && names != 2*len(e.Pools()) {
		r.fail("spec.target.kubernetes.nodeNames", "must be %d, two for each selection of labels by variants, are %d", 2*len(e.Pools()), names)
	}
}

// MaxBlocks is the largest number of blocks of an experiment: years of trials.
const MaxBlocks = 100_000

func (r *reader) runs(path string, n Runs) {
	switch {
	case !r.set(path):
	case !n.Auto:
		if n.N < 1 || n.N > MaxBlocks {
			r.fail(path, "must be 1 to %d, or auto, is %d", MaxBlocks, n.N)
		}
	default:
		if n.Max < AutoFirstBlocks {
			r.fail(path+".auto.max", "must be at least %d, the blocks of the pilot, is %d", AutoFirstBlocks, n.Max)
		}
		if n.Max > MaxBlocks {
			r.fail(path+".auto.max", "must be at most %d, is %d", MaxBlocks, n.Max)
		}
		r.share(path+".auto.width", n.Width)
	}
}

// toolsOf returns the tools that can make the traffic of a kind, the default first.
func toolsOf(kind string) []string {
	switch kind {
	case "stream":
		return []string{ToolNative, ToolIperf3, ToolIperf2, ToolSockperf, ToolQperf}
	case "pingpong":
		return []string{ToolNative, ToolSockperf, ToolQperf, ToolLatte}
	case "underload":
		return []string{ToolNative, ToolSockperf}
	case "http":
		return []string{ToolNative, ToolAB, ToolNginx}
	case "application":
		return []string{ToolRedis, ToolPostgres, ToolMemcached, ToolGRPC}
	}
	return []string{ToolNative}
}

// maxDatagram is the largest payload of UDP over IPv4: 65535 bytes less the headers.
const maxDatagram = 65507

// sizesOf returns the smallest and largest message, in bytes, that a tool can send.
func sizesOf(kind, tool string, t *Traffic) (low, high int) {
	low, high = 1, 1<<20 // iperf3's MAX_BLOCKSIZE
	if t.Protocol == "udp" {
		high = maxDatagram
		if t.IP == 6 {
			high = 65487
		}
	}
	switch {
	case tool == ToolSockperf:
		low, high = 14, min(high, maxDatagram) // its header and its MAX_PAYLOAD_SIZE
	case kind == "underload":
		low = 8 // the time at which it was due
	case kind == "stream" && t.Protocol == "udp":
		low = 16 // its number and the time at which it was sent; iperf3 has the same
	}
	return low, high
}

func (r *reader) workload(path string, on Target, w *Workload) {
	r.exactlyOne(path, choice{"stream", w.Stream != nil}, choice{"pingpong", w.PingPong != nil},
		choice{"underload", w.UnderLoad != nil}, choice{"connect", w.Connect != nil},
		choice{"http", w.HTTP != nil}, choice{"application", w.Application != nil})
	r.pairs(path+".pairs", w.Pairs)
	for _, of := range []struct {
		kind string
		*Traffic
	}{{"stream", w.Stream}, {"pingpong", w.PingPong}, {"underload", w.UnderLoad}, {"connect", w.Connect}, {"http", w.HTTP}, {"application", w.Application}} {
		switch {
		case of.Traffic == nil:
		case on.Imported != nil && of.kind == "application":
			r.fail(path+".application", "is not imported: results of applications' clients are not read")
		case on.Imported != nil:
			r.importedTraffic(path+"."+of.kind, of.kind, of.Traffic)
		default:
			r.traffic(path+"."+of.kind, of.kind, of.Traffic)
		}
	}
}

func (r *reader) traffic(path, kind string, t *Traffic) {
	fill(r, path+".protocol", &t.Protocol, "tcp")
	fill(r, path+".ip", &t.IP, 4)
	fill(r, path+".connections", &t.Connections, 1)
	if kind == "application" {
		r.given(path + ".tool")
		fill(r, path+".pipeline", &t.Pipeline, 1)
	} else {
		fill(r, path+".tool", &t.Tool, toolsOf(kind)[0])
	}
	size, warmup := Bytes(64), Duration(500e6)
	if kind == "stream" {
		size, warmup = 128<<10, Duration(1e9)
		if t.Protocol == "udp" {
			size = 1400
		}
	}
	if t.Page {
		size = 200e3
	}
	if t.Tool != ToolPostgres {
		fill(r, path+".size", &t.Size, size)
	}
	fill(r, path+".warmup", &t.Warmup, warmup)

	r.oneOf(path+".protocol", t.Protocol, "tcp", "udp")
	if (kind == "connect" || kind == "http" || kind == "application") && t.Protocol == "udp" {
		r.fail(path+".protocol", "must be tcp, is udp, which has no connections")
	}
	r.oneOf(path+".ip", strconv.Itoa(t.IP), "4", "6")
	r.oneOf(path+".tool", t.Tool, toolsOf(kind)...)
	if t.Tool == ToolPostgres && r.set(path+".size") {
		r.fail(path+".size", "is not for postgres, whose rows have the sizes of pgbench")
	} else if t.Tool != ToolPostgres && !r.malformedNear(path+".size") {
		low, high := sizesOf(kind, t.Tool, t)
		r.between(path+".size", int(t.Size), low, high)
	}
	if r.set(path + ".connections") {
		r.between(path+".connections", t.Connections, 1, 1024)
	}
	switch {
	case t.Rate < 0:
		r.fail(path+".rate", "must not be negative, is %d", t.Rate)
	case t.Rate > 0 && kind != "underload" && !t.Page:
		r.fail(path+".rate", "is for underload and pages only; %s sends as fast as it can", kind)
	}
	r.http(path, kind, t)
	r.io(path, kind, t)
	r.iterations(path, kind, t)
	if r.set(path + ".port") {
		r.between(path+".port", t.Port, 1, maxPort)
	}
	r.application(path, kind, t)
	if t.Busy && (kind != "underload" || t.Rate == 0) {
		r.fail(path+".busy", "is only for underload with a rate: no other workload waits for the clock")
	}
	if r.given(path + ".duration") {
		r.positive(path+".duration", t.Duration)
	}
	if r.set(path + ".warmup") {
		r.positive(path+".warmup", t.Warmup)
	}
}

// maxPort leaves room for the ports of further pairs.
const maxPort = 65535 - 2*MaxPairs

// iterations checks a number of round trips.
func (r *reader) iterations(path, kind string, t *Traffic) {
	if !r.set(path + ".iterations") {
		return
	}
	switch {
	case kind != "pingpong":
		r.fail(path+".iterations", "is for pingpong only: %s has no round trips to count", kind)
	case t.Tool == ToolNative && t.IO == IOEpoll:
		r.fail(path+".iterations", "is not for the io %s; choose %s", IOEpoll, IOBlocking)
	}
	r.between(path+".iterations", t.Iterations, 1, 100_000_000)
}

// io checks how the engine reads and writes, and fills in the default if the engine has a choice.
func (r *reader) io(path, kind string, t *Traffic) {
	why := ""
	switch {
	case kind == "connect":
		why = "is not for connect, which always has a thread for each connection"
	case t.Page:
		why = "is not for a page: each user has a connection, and the server an event loop"
	case t.Tool != ToolNative && t.Tool != ToolAB: // the engine answers ab
		why = fmt.Sprintf("is only for the traffic engine: %s reads and writes in its own way", t.Tool)
	}
	if why != "" {
		if r.set(path + ".io") {
			r.fail(path+".io", "%s", why)
		}
		return
	}
	way := IOBlocking
	if kind == "http" {
		way = IOEpoll
	}
	fill(r, path+".io", &t.IO, way)
	r.oneOf(path+".io", t.IO, IOBlocking, IOEpoll)
}

// importedTraffic checks traffic that other programs measured, as far as their output describes it.
func (r *reader) importedTraffic(path, kind string, t *Traffic) {
	tools := toolsOf(kind)[1:]
	r.oneOf(path+".protocol", t.Protocol, "tcp", "udp")
	r.oneOf(path+".ip", strconv.Itoa(t.IP), "4", "6")
	r.oneOf(path+".tool", t.Tool, tools...)
	for field, n := range map[string]int{"size": int(t.Size), "connections": t.Connections, "rate": t.Rate, "requests": t.Requests, "iterations": t.Iterations, "port": t.Port, "warmup": int(t.Warmup)} {
		if n < 0 {
			r.fail(path+"."+field, "must not be negative, is %d", n)
		}
	}
	if r.given(path + ".duration") {
		r.positive(path+".duration", t.Duration)
	}
}

// application checks the fields that only applications have.
func (r *reader) application(path, kind string, t *Traffic) {
	if kind != "application" {
		for field, set := range map[string]bool{"operation": t.Operation != "", "pipeline": t.Pipeline != 0} {
			if set {
				r.fail(path+"."+field, "is for application only")
			}
		}
		return
	}
	if r.given(path+".operation") && operationsOf(t.Tool) != nil {
		r.oneOf(path+".operation", t.Operation, operationsOf(t.Tool)...)
	}
	if r.set(path + ".pipeline") {
		r.between(path+".pipeline", t.Pipeline, 1, 1024)
	}
	switch t.Tool {
	case ToolPostgres, ToolMemcached:
		if t.Pipeline > 1 {
			r.fail(path+".pipeline", "must be 1, is %d: the client of %s waits for each answer", t.Pipeline, t.Tool)
		}
	}
	if t.Tool == ToolMemcached {
		if t.IP == 6 {
			r.fail(path+".ip", "must be 4, is 6, which memcached's client memcaslap does not know")
		}
		if n := t.Connections * int(t.Size); n > memcachedMost {
			r.fail(path+".size", "must be at most %d for %d connections, is %d: memcaslap sets 1024 keys a connection first", memcachedMost/max(t.Connections, 1), t.Connections, t.Size)
		}
	}
}

// memcachedMost bounds the product of size and connections, so that the values that are set first fit into memcached's
// 64 MiB.
const memcachedMost = 64 << 10

// operationsOf returns the operations that an application supports, nil for another tool.
func operationsOf(tool string) []string {
	switch tool {
	case ToolRedis, ToolMemcached:
		return []string{OperationGet, OperationSet}
	case ToolPostgres:
		return []string{OperationSelect, OperationTPCB}
	case ToolGRPC:
		return []string{OperationUnary}
	}
	return nil
}

// http checks the fields that only http has.
func (r *reader) http(path, kind string, t *Traffic) {
	if kind != "http" {
		for field, set := range map[string]bool{"keepAlive": t.KeepAlive, "requests": t.Requests != 0, "page": t.Page, "image": t.Image != 0} {
			if set {
				r.fail(path+"."+field, "is for http only")
			}
		}
		return
	}
	if r.set(path + ".requests") {
		r.between(path+".requests", t.Requests, 1, 100_000_000)
	}
	if r.set(path + ".image") {
		r.between(path+".image", int(t.Image), 1, 1<<20)
	}
	if !t.Page {
		if t.Image != 0 {
			r.fail(path+".image", "is for a page only")
		}
		return
	}
	if t.Rate == 0 && !r.malformedNear(path+".rate") {
		r.fail(path, "must have a rate, the users of the page that arrive in a second")
	}
	for field, set := range map[string]bool{
		"keepAlive": r.set(path+".keepAlive") && !t.KeepAlive, "requests": t.Requests != 0,
		"connections": t.Connections > 1,
	} {
		if set {
			r.fail(path+"."+field, "is not for a page: each user loads it over one connection")
		}
	}
}

func (r *reader) positive(path string, d Duration) {
	if d <= 0 {
		r.fail(path, "must be above 0s, is %s", d)
	}
}

func (r *reader) variant(path string, e *Experiment, v *Variant) {
	target := e.Spec.Target
	if v.Path != nil {
		r.path(path+".path", target, v.Path)
	}
	if v.NIC != nil {
		r.nic(path+".nic", *v.NIC)
		switch {
		case target.Kubernetes != nil:
			r.fail(path+".nic", "is for a lab; slipstream cannot change the NICs of a cluster")
		case target.Hosts != nil:
			r.fail(path+".nic", "is for a lab; slipstream cannot change the NICs of hosts")
		}
	}
	r.ends(path, e, v)
	r.inCluster(path+".cluster", e, v)
	if len(v.Accelerate) > 0 && target.Kubernetes != nil && target.Kubernetes.Unprivileged {
		r.fail(path+".accelerate", "needs a privileged pod on each node, which unprivileged excludes")
	}
	for i := range v.Accelerate {
		oneKind(r, fmt.Sprintf("%s.accelerate[%d]", path, i), v.Accelerate[i])
	}
	if r.set(path + ".on") {
		r.oneOf(path+".on", v.On, SideClient, SideServer)
		if len(v.Accelerate) == 0 {
			r.fail(path+".on", "is for accelerators, and the variant has none")
		}
	}
	accelerators(r, path, e.PathOf(*v), v.Accelerate)
	r.tools(path+".tools", e, e.PathOf(*v), v.Tools)
	for _, w := range e.Spec.Workloads {
		if t := w.Traffic(); t != nil && v.Tools[w.Name] == "" {
			r.toolServed(path, t.Tool, e, e.PathOf(*v), t)
		}
	}
	if r.set(path + ".versus") {
		r.versus(path+".versus", e, v)
	}
	if v.Switch != nil {
		r.change(path+".switch", v.Switch)
	}
}

func (r *reader) change(path string, s *Switch) {
	fill(r, path+".timeout", &s.Timeout, Duration(10*time.Minute))
	for name, argv := range map[string][]string{"to": s.To, "back": s.Back, "verify": s.Verify} {
		at := path + "." + name
		switch {
		case name != "verify" && !r.given(at), name == "verify" && !r.set(at):
		case len(argv) == 0 || argv[0] == "":
			r.fail(at, "must be a program and its arguments, such as [ethtool, -K, eth0, gro, off], and has no program")
		}
	}
	if r.set(path + ".settle") {
		r.positive(path+".settle", s.Settle)
	}
	if r.set(path + ".timeout") {
		r.positive(path+".timeout", s.Timeout)
	}
}

// parameters checks the parameters of commands, and inserts their values into the commands. A shell may read a command, so a
// value has no character that is special to a shell.
func (r *reader) parameters(path string, e *Experiment) {
	values := map[string]string{}
	for name, value := range e.Spec.Parameters {
		at := join(path, name)
		r.matches(at, name, parameterName, "of a-z, 0-9 and - within")
		if name == SideClient || name == SideServer {
			r.fail(at, "must have another name: {%s} is the name of a variant's host", name)
		}
		if value != "" {
			r.matches(at, value, parameterValue, "of letters, digits and . _ - / @ :, the first a letter or digit")
			values[name] = value
		}
	}
	if len(r.errors) > 0 {
		return
	}
	for name := range e.Spec.Parameters {
		if at := join(path, name); r.overridden(at) && !e.refersTo(name) {
			r.fail(at, "no command of a switch refers to {%s}", name)
		}
	}
	for _, v := range e.Spec.Variants {
		if v.Switch == nil {
			continue
		}
		if hosts := e.Spec.Target.Hosts; len(hosts) > 0 {
			client, server := e.HostsOf(v)
			values[SideClient], values[SideServer] = hosts[client].Name, hosts[server].Name
		}
		for _, argv := range [][]string{v.Switch.To, v.Switch.Back, v.Switch.Verify} {
			for i := range argv {
				argv[i] = inserted(argv[i], values)
			}
		}
	}
}

// refersTo reports whether a command of a switch has {name}.
func (e *Experiment) refersTo(name string) bool {
	return slices.ContainsFunc(e.Spec.Variants, func(v Variant) bool {
		return v.Switch != nil && slices.ContainsFunc(slices.Concat(v.Switch.To, v.Switch.Back, v.Switch.Verify), func(arg string) bool {
			return strings.Contains(arg, "{"+name+"}")
		})
	})
}

// inserted replaces {name} by its value.
func inserted(text string, values map[string]string) string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(values)) {
		pairs = append(pairs, "{"+name+"}", values[name])
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// periods is the number of periods of each variant unless runs sets it. Six periods have as many degrees of freedom, n
// − 2, as five blocks, and so the same quantile of Student's distribution.
const periods = 6

// switched checks what depends on whether variants have a switch.
func (r *reader) switched(e *Experiment) {
	s := &e.Spec
	if r.set("spec.trialsPerPeriod") {
		r.between("spec.trialsPerPeriod", s.TrialsPerPeriod, 1, 1000)
	}
	switch {
	case r.malformedNear("spec.variants"):
	case !e.Switches():
		if r.set("spec.trialsPerPeriod") {
			r.fail("spec.trialsPerPeriod", "is %d, but no variant has a switch, so there are no periods: spec.runs says how often each trial runs", s.TrialsPerPeriod)
		}
		return
	case len(e.States()) == 1 && len(s.Variants) > 0:
		r.fail("spec.variants", "must have one without a switch or with another one: all have the same switch, so the experiment does not compare it with anything")
	}
	switch {
	case !r.set("spec.runs"):
	case s.Runs.Auto:
		r.fail("spec.runs", "must be an even number where a variant has a switch, is auto: its pilot alone takes %d periods of each variant", AutoFirstBlocks)
	case s.Runs.N%2 != 0:
		r.fail("spec.runs", "must be an even number where a variant has a switch, is %d: every second block has the periods of the one before in reverse order", s.Runs.N)
	}
}

// versus checks the variant that another one is compared with. It must be compared with nothing, or with the
// experiment's baseline: nobody could interpret a ratio to a ratio.
func (r *reader) versus(path string, e *Experiment, v *Variant) {
	target := r.reference(path, v.Versus, e.Spec.Variants)
	switch {
	case target == nil:
	case target.Name == v.Name:
		r.fail(path, "must be another variant, is the same")
	case target.Versus != "" && target.Versus != e.Spec.Baseline:
		r.fail(path, "must be a variant that is compared with nothing or the baseline, %q is compared with %q", target.Name, target.Versus)
	}
}

func (r *reader) devices(path string, on Path, devices []string, seen map[string]string) {
	if r.given(path) {
		r.notEmpty(path, len(devices), "class of devices")
	}
	for i, d := range devices {
		at := fmt.Sprintf("%s[%d]", path, i)
		r.oneOf(at, d, v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth, v1alpha1.DevicePod)
		switch {
		case (on.Native != nil && on.VXLAN == nil || on.Balancer != nil) && slices.Contains([]string{v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth, v1alpha1.DevicePod}, d):
			name, _, _ := strings.Cut(on.String(), "/")
			r.fail(at, "must be nic, is %s, which the path %s does not have", d, name)
		case on.Address != "" && d == v1alpha1.DevicePod:
			r.fail(at, "must not be pod, which hosts do not have")
		case on.OneNode() && d == v1alpha1.DeviceNIC, on.Local && d == v1alpha1.DeviceOverlay:
			r.fail(at, "must not be %s, which packets between pods of one node do not pass", d)
		case (on.Routed != nil || on.EBPF != nil || on.Bridge != nil) && d == v1alpha1.DeviceOverlay:
			r.fail(at, "must not be overlay, which the path %s does not have", on)
		}
		r.unique(at, d, seen)
	}
}

// entriesMax bounds the entries of RFS, for which the kernel takes up to 1<<29. A busy server has a million
// connections at most, and each device takes 12 bytes an entry.
const entriesMax = 1 << 20

// entries checks the size of the flow table. The kernel rounds it up to a power of two (rps_sock_flow_sysctl in
// net/core/sysctl_net_core.c), so another number would read back as a different one.
func (r *reader) entries(path string, n int) {
	if r.set(path) && (n < 1 || n > entriesMax || n&(n-1) != 0) {
		r.fail(path, "must be a power of two up to %d, is %d", entriesMax, n)
	}
}

func (r *reader) cpus(path, cpus string) {
	if cpus == v1alpha1.CPUsAll || cpus == v1alpha1.CPUsAllButIRQ {
		return
	}
	for _, part := range strings.Split(cpus, ",") {
		first, last, isRange := strings.Cut(part, "-")
		low, err := strconv.ParseUint(first, 10, 16)
		high := low
		if err == nil && isRange {
			high, err = strconv.ParseUint(last, 10, 16)
		}
		if err != nil || high < low {
			r.fail(path, "must be %s, %s or a list such as 0-3,8, is %q", v1alpha1.CPUsAll, v1alpha1.CPUsAllButIRQ, cpus)
			return
		}
	}
}

// toolFits checks that a tool works on a target, and with the traffic that the workload asks for.
func (r *reader) toolFits(path, tool string, e *Experiment, t *Traffic) {
	switch {
	case tool == ToolLatte && e.Spec.Target.Lab != nil:
		r.fail(path, "latte is for nodes that run Windows, and those of a lab run Linux; choose native, sockperf or qperf")
	case tool == ToolAB && t.Page:
		r.fail(path, "ab requests a single object, not a page; choose native")
	case tool == ToolNginx && t.Page:
		r.fail(path, "wrk requests a single object from nginx, not a page; choose native")
	case tool == ToolNginx && t.Requests > 0:
		r.fail(path, "wrk runs for a time, not for a number of requests; choose native or ab")
	case t.Iterations > 0 && tool != ToolNative && tool != ToolLatte:
		r.fail(path, "%s runs for a time, not for a number of iterations; choose native or latte", tool)
	}
}

// hasHTTP reports whether traffic is that of an http workload.
func (e *Experiment) hasHTTP(t *Traffic) bool {
	return slices.ContainsFunc(e.Spec.Workloads, func(w Workload) bool { return w.HTTP == t })
}

// toolServed checks that a tool works through a service, if the variant uses one.
func (r *reader) toolServed(path, tool string, e *Experiment, on Path, t *Traffic) {
	switch {
	case t.Port != 0 && (on.Service != nil || on.Balancer != nil):
		r.fail(path, "the port %d of the traffic cannot be had: a service or balancer has ports of its own; leave port out", t.Port)
	case on.Service == nil:
	case e.Spec.Target.Kubernetes != nil && on.Service.Mode == "" && on.Service.Backends > 1 && (tool != ToolNative && tool != ToolAB || t.IO != IOEpoll && !t.Page || !e.hasHTTP(t)):
		r.fail(path, "a service with %d backends in a cluster is for http of the tools native and ab with the io epoll, whose server listens at as many ports", on.Service.Backends)
	case tool == ToolQperf:
		r.fail(path, "qperf opens a second port on its server, which a service does not forward; choose another tool")
	case e.Spec.Target.Lab != nil && t.Protocol == "udp" && tool != ToolNative:
		r.fail(path, "%s answers datagrams from its pod's first address, not from that of the service's backend that was asked; choose %s", tool, ToolNative)
	}
}

func (r *reader) tools(path string, e *Experiment, on Path, tools map[string]string) {
	workloads := e.Spec.Workloads
	var names []string
	for _, w := range workloads {
		names = append(names, w.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(tools)) {
		at, tool := join(path, name), tools[name]
		i := slices.Index(names, name)
		if i < 0 {
			if len(names) > 0 && !r.malformedNear("spec.workloads") {
				r.fail(at, "no workload has the name %q; %s", name, Suggest(name, names))
			}
			continue
		}
		w := workloads[i]
		t := w.Traffic()
		if t == nil {
			continue // reported at the workload
		}
		r.oneOf(at, tool, toolsOf(w.Kind())...)
		r.toolFits(at, tool, e, t)
		r.toolServed(at, tool, e, on, t)
		low, high := sizesOf(w.Kind(), tool, t)
		ownLow, ownHigh := sizesOf(w.Kind(), t.Tool, t)
		size := int(t.Size)
		if wrong := size < ownLow || size > ownHigh; !wrong && (size < low || size > high) {
			r.fail(at, "%s sends %d to %d bytes a message, the workload has %s", tool, low, high, t.Size)
		}
	}
}
