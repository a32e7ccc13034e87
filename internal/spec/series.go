package spec

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
)

// axes returns the axes that a series can run over.
func axes() []string {
	return []string{AxisBackends, AxisPolicies, AxisRate, AxisPrice, AxisSize, AxisConnections, AxisPairs}
}

// OfVariants reports whether the values of an axis differ between variants.
func OfVariants(axis string) bool {
	return axis == AxisBackends || axis == AxisPolicies || axis == AxisRate || axis == AxisPrice
}

// ValueOn returns where the trials of a variant lie on an axis, for a workload and a number of pairs. It is 0
// if they have no place on the axis.
func (e *Experiment) ValueOn(axis string, v Variant, w Workload, pairs int) float64 {
	switch axis {
	case AxisBackends:
		switch p := e.PathOf(v); {
		case p.Balancer != nil:
			return float64(p.Balancer.Backends)
		case p.Service != nil:
			return float64(p.Service.Backends)
		}
	case AxisPolicies:
		if p := e.PathOf(v).Policies; p != nil {
			return float64(p.Count)
		}
	case AxisRate:
		rate, _ := e.NICOf(v).Rate.BitsPerSecond() // checked by Parse
		return float64(rate)
	case AxisPrice:
		price, _ := e.PriceOf(v)
		return price
	case AxisPairs:
		return float64(pairs)
	case AxisSize, AxisConnections:
		if t := w.Traffic(); t != nil && axis == AxisSize {
			return float64(t.Size)
		} else if t != nil {
			return float64(t.Connections)
		}
	}
	return 0
}

// Alike reports whether two workloads are the same except for their place on an axis.
func Alike(axis string, a, b Workload) bool {
	s, t := a.Traffic(), b.Traffic()
	if s == nil || t == nil || a.Kind() != b.Kind() {
		return false
	}
	x, y := *s, *t
	switch axis {
	case AxisSize:
		x.Size, y.Size = 0, 0
	case AxisConnections:
		x.Connections, y.Connections = 0, 0
	default:
		return a.Name == b.Name
	}
	return x == y
}

// series checks all series. If an override has replaced the variants, a series keeps those that are left, and
// it is no mistake that others are missing.
func (r *reader) series(e *Experiment) {
	s := &e.Spec
	// Values follow from the rest of the experiment. If that has mistakes, a value may be missing: a
	// variant whose labels no host has, has no price.
	valued := len(r.errors) == 0
	replaced := r.overridden("spec.variants") && !r.overridden("spec.series")
	seen := map[string]string{}
	for i, line := range s.Series {
		path := fmt.Sprintf("spec.series[%d]", i)
		r.name(path+".name", line.Name, seen)
		if r.given(path + ".axis") {
			r.oneOf(path+".axis", line.Axis, axes()...)
		}
		if r.given(path + ".of") {
			r.notEmpty(path+".of", len(line.Of), "variant")
		}
		r.members(path+".of", e, line, replaced)
		if valued {
			r.values(path+".of", e, line)
		}
		if r.set(path + ".versus") {
			r.seriesVersus(path+".versus", line, s.Series)
		}
	}
	if replaced {
		s.Series = s.RemainingSeries()
	}
}

// RemainingSeries returns the series that have variants left, without the variants that are gone.
func (s *Spec) RemainingSeries() []Series {
	var out []Series
	for _, line := range s.Series {
		line.Of = slices.DeleteFunc(slices.Clone(line.Of), func(name string) bool { return named(name, s.Variants) == nil })
		if len(line.Of) > 0 {
			out = append(out, line)
		}
	}
	for i, line := range out {
		if !slices.ContainsFunc(out, func(o Series) bool { return o.Name == line.Versus }) {
			out[i].Versus = ""
		}
	}
	return out
}

// named returns the variant with a name, or nil if there is none.
func named(name string, variants []Variant) *Variant {
	if i := slices.IndexFunc(variants, func(v Variant) bool { return v.Name == name }); i >= 0 {
		return &variants[i]
	}
	return nil
}

// members checks the variants of a series. If an override has replaced the variants, some of them may be
// gone.
func (r *reader) members(path string, e *Experiment, line Series, replaced bool) {
	if !slices.Contains(axes(), line.Axis) || r.malformedNear(path) {
		return // reported already
	}
	if len(line.Of) > 1 && !OfVariants(line.Axis) {
		r.fail(path, "must be one variant, as the %s do not differ from variant to variant, is %d: make a series of each",
			map[string]string{AxisSize: "sizes", AxisConnections: "connections", AxisPairs: "pairs"}[line.Axis], len(line.Of))
		return
	}
	for i, name := range line.Of {
		field := fmt.Sprintf("%s[%d]", path, i)
		if replaced && named(name, e.Spec.Variants) == nil {
			continue
		}
		if r.reference(field, name, e.Spec.Variants) != nil && slices.Contains(line.Of[:i], name) {
			r.fail(field, "is variant %s again", name)
		}
	}
}

// values checks that the variants of a series have different values on its axis.
func (r *reader) values(path string, e *Experiment, line Series) {
	if !OfVariants(line.Axis) {
		return
	}
	at := map[float64]string{}
	for i, name := range line.Of {
		v := named(name, e.Spec.Variants)
		if v == nil || slices.Contains(line.Of[:i], name) {
			continue // reported already, or replaced
		}
		field := fmt.Sprintf("%s[%d]", path, i)
		x := e.ValueOn(line.Axis, *v, Workload{}, 0)
		switch first, taken := at[x]; {
		case x == 0:
			r.fail(field, "variant %s has no %s%s", name, line.Axis, map[string]string{
				AxisBackends: ": its path is " + e.PathOf(*v).String(), AxisPolicies: " on its path", AxisRate: " of its NIC",
			}[line.Axis])
		case taken:
			r.fail(field, "variant %s has the same %s as %s: %s", name, line.Axis, first, strconv.FormatFloat(x, 'f', -1, 64))
		}
		at[x] = cmp.Or(at[x], name)
	}
}

func (r *reader) seriesVersus(path string, line Series, all []Series) {
	var names []string
	for _, other := range all {
		if other.Name != line.Versus {
			names = append(names, other.Name)
			continue
		}
		switch {
		case other.Name == line.Name:
			r.fail(path, "must be another series, is the same")
		case other.Axis != line.Axis:
			r.fail(path, "must be a series over %s, %q is over %s", line.Axis, other.Name, other.Axis)
		}
		return
	}
	r.fail(path, "no series has the name %q; %s", line.Versus, Suggest(line.Versus, names))
}
