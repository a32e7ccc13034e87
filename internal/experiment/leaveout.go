package experiment

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// LeaveOut removes from an experiment the variants that its target cannot apply, so that the rest can
// be measured, and returns them. probe says why the target cannot apply an accelerator, and path why it cannot
// make a path; path is nil if it can make all.
//
// It is an error if nothing is left to compare, or if a removed variant is wanted by name: in named,
// which maps variants to where a person named them, or in an expectation.
func LeaveOut(exp *spec.Experiment, named map[string]string, probe func(v1alpha1.Accelerator) error, path func(spec.Path) error) ([]record.LeftOut, error) {
	why := map[string]string{}
	for _, v := range exp.Spec.Variants {
		if path != nil {
			if err := path(exp.PathOf(v)); err != nil {
				why[v.Name] = err.Error()
			}
		}
		for _, a := range v.Accelerate {
			if err := probe(a); err != nil && why[v.Name] == "" {
				why[v.Name] = err.Error()
			}
		}
	}
	if len(why) == 0 {
		return nil, nil
	}
	rest := without(exp, why)
	var out []record.LeftOut
	for _, v := range exp.Spec.Variants {
		if why[v.Name] != "" {
			out = append(out, record.LeftOut{Variant: v.Name, Why: why[v.Name]})
		}
	}
	if err := checkNotWanted(exp, named, out); err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(rest.Spec.Variants, func(v spec.Variant) bool { return rest.BaselineOf(v) != "" }) {
		return nil, fmt.Errorf("%s has nothing left to compare: %s", exp.Metadata.Name, strings.Join(texts(out), "; "))
	}
	*exp = rest
	return out, nil
}

// without returns exp without the variants in why, which it also removes from series and published figures. It leaves out two
// more kinds and adds them to why: variants whose baseline is gone, and baselines with which nothing is compared any more.
func without(exp *spec.Experiment, why map[string]string) spec.Experiment {
	for {
		rest := *exp
		rest.Spec.Variants = slices.DeleteFunc(slices.Clone(exp.Spec.Variants), func(v spec.Variant) bool { return why[v.Name] != "" })
		before := len(why)
		for _, v := range rest.Spec.Variants {
			switch baseline := exp.BaselineOf(v); {
			case why[baseline] != "":
				why[v.Name] = fmt.Sprintf("its baseline %s is left out", baseline)
			case rest.BaselineOf(v) != baseline:
				// It would be compared with the experiment's baseline, which its author did not ask for.
				why[v.Name] = "all variants that are compared with it are left out"
			}
		}
		if len(why) == before {
			rest.Spec.Published = slices.DeleteFunc(slices.Clone(exp.Spec.Published), func(p spec.Published) bool {
				return why[p.Variant] != "" || why[p.Versus] != ""
			})
			rest.Spec.Series = rest.Spec.RemainingSeries()
			return rest
		}
	}
}

// checkNotWanted returns an error if a variant that is left out is wanted by name.
func checkNotWanted(exp *spec.Experiment, named map[string]string, out []record.LeftOut) error {
	var errs []error
	for _, l := range out {
		where := named[l.Variant]
		for i, x := range exp.Spec.Expect {
			if slices.Contains([]string{x.Variant, x.Faster, x.NotSlower, x.Same}, l.Variant) {
				where = fmt.Sprintf("spec.expect[%d]", i)
			}
		}
		if where != "" {
			errs = append(errs, fmt.Errorf("%s names variant %s, which cannot be applied here: %s", where, l.Variant, l.Why))
		}
	}
	return errors.Join(errs...)
}

func texts(out []record.LeftOut) []string {
	all := make([]string, len(out))
	for i, l := range out {
		all[i] = l.String()
	}
	return all
}
