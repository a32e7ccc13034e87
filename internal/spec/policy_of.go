package spec

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"slipstream.dev/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// PolicyOf returns the policy that keeps the accelerators of a variant on. It does not select nodes
// yet. An error says why the variant has nothing that a policy could keep.
func (e *Experiment) PolicyOf(name string) (*v1alpha1.AccelerationPolicy, error) {
	v, err := e.VariantOf(name)
	if err != nil {
		return nil, err
	}
	base, err := e.VariantOf(e.BaselineOf(*v))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s is a baseline, which is compared with no other variant: there is nothing to apply", name)
	case !reflect.DeepEqual(e.PathOf(*v), e.PathOf(*base)):
		return nil, fmt.Errorf("%s has another path (%s) than %s (%s), and a policy cannot change the path", name, e.PathOf(*v), base.Name, e.PathOf(*base))
	case len(base.Accelerate) > 0:
		return nil, fmt.Errorf("%s is compared with %s, which has accelerators itself, so the result does not show what a policy would change: compare it with a variant without accelerators", name, base.Name)
	case len(v.Accelerate) == 0:
		return nil, fmt.Errorf("%s has no accelerators (accelerate: …): there is nothing to apply", name)
	case v.On != "":
		return nil, fmt.Errorf("%s accelerates the %s's side only (on: %s), and a policy would accelerate clients and servers alike, which was not measured: measure it without on", name, v.On, v.On)
	case !e.MeasuredAlike(*v, *base) || !reflect.DeepEqual(v.Switch, base.Switch):
		return nil, fmt.Errorf("%s also differs from %s in its NIC, hosts, tools or switch, so the result does not show the effect of its accelerators alone", name, base.Name)
	}
	p := &v1alpha1.AccelerationPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindAccelerationPolicy},
		ObjectMeta: metav1.ObjectMeta{Name: policyName(name)},
	}
	p.Spec.Accelerate = v1alpha1.ForPolicy(v.Accelerate...)
	if _, err := CompletePolicy(p); err != nil {
		return nil, fmt.Errorf("an agent rejects the accelerators of %s: %w", name, err)
	}
	return p, nil
}

// MeasuredAlike reports whether two variants run in the same cluster, on the same NIC and hosts, and with the same tools.
func (e *Experiment) MeasuredAlike(a, b Variant) bool {
	return a.Cluster == b.Cluster && reflect.DeepEqual(e.NICOf(a), e.NICOf(b)) && reflect.DeepEqual(a.Hosts, b.Hosts) && reflect.DeepEqual(a.Tools, b.Tools)
}

// VariantOf returns the variant with a name. If there is none, the error lists the names that exist.
func (e *Experiment) VariantOf(name string) (*Variant, error) {
	var names []string
	for i := range e.Spec.Variants {
		if e.Spec.Variants[i].Name == name {
			return &e.Spec.Variants[i], nil
		}
		names = append(names, e.Spec.Variants[i].Name)
	}
	return nil, fmt.Errorf("there is no variant %q: %s", name, Suggest(name, names))
}

var noLabel = regexp.MustCompile(`[^a-z0-9]+`)

// policyName turns a variant's name into a name for Kubernetes: rps+ into rps-plus.
func policyName(variant string) string {
	return strings.Trim(noLabel.ReplaceAllString(strings.ReplaceAll(variant, "+", "-plus"), "-"), "-")
}

// MarshalPolicy writes a policy as YAML. kubectl reads it, and so does ParsePolicy if the policy
// does not say which nodes.
func MarshalPolicy(p *v1alpha1.AccelerationPolicy) ([]byte, error) {
	return marshal(policyFile{v1alpha1.APIVersion, v1alpha1.KindAccelerationPolicy, policyMetadata{p.Name, p.Labels, p.Annotations}, p.Spec})
}

// ParseLabels reads labels in the form of a flag: KEY=VALUE[,KEY=VALUE…].
func ParseLabels(text string) (map[string]string, error) {
	all := map[string]string{}
	for _, label := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(label, "=")
		if !ok {
			return nil, fmt.Errorf("must be KEY=VALUE[,KEY=VALUE…], is %q", text)
		}
		if faults := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(faults) > 0 {
			return nil, fmt.Errorf("%q is no label: %s", label, strings.Join(faults, "; "))
		}
		all[key] = value
	}
	return all, nil
}
