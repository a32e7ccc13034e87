package spec

import (
	"encoding/json"
	"errors"
	"fmt"

	"slipstream.dev/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// policyFile is an AccelerationPolicy as written in a file. Of an object's metadata,
// only the name means anything outside a cluster.
type policyFile struct {
	APIVersion string                          `json:"apiVersion"`
	Kind       string                          `json:"kind"`
	Metadata   policyMetadata                  `json:"metadata"`
	Spec       v1alpha1.AccelerationPolicySpec `json:"spec"`
}

type policyMetadata struct {
	Name        string            `json:"name"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// ParsePolicy reads the policy of a host without a cluster: YAML with no unknown
// fields, then every default, then the checks. The file's name is for messages
// only. An error is of type Errors and holds all problems that were found.
func ParsePolicy(file string, data []byte) (*v1alpha1.AccelerationPolicy, error) {
	p, r := parsePolicy(file, data)
	if r.has("spec.all") {
		r.fail("spec.all", "selects nodes, but a policy file applies only to the machine that has it; leave it out")
	}
	if r.has("spec.rollout") {
		r.fail("spec.rollout", "is for several nodes, but a policy file applies only to the machine that has it; leave it out")
	}
	const noLabels = "selects by labels, which only a cluster has; leave it out"
	if p.Spec.NodeSelector != nil {
		r.fail("spec.nodeSelector", noLabels)
	}
	if p.Spec.Pods != nil {
		r.fail("spec.pods", noLabels)
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return p, nil
}

// CompletePolicy checks the policy of a cluster as ParsePolicy checks a file, and returns it
// with every default. The cluster has already checked it against its schema, which
// covers less.
func CompletePolicy(p *v1alpha1.AccelerationPolicy) (*v1alpha1.AccelerationPolicy, error) {
	data, err := json.Marshal(policyFile{v1alpha1.APIVersion, v1alpha1.KindAccelerationPolicy, policyMetadata{Name: p.Name}, p.Spec})
	if err != nil {
		return nil, fmt.Errorf("encode policy %s: %w", p.Name, err)
	}
	read, r := parsePolicy("", data)
	var problems []error
	for _, e := range r.errors {
		problems = append(problems, fmt.Errorf("%s: %s", e.Field, e.Problem)) // a line number in the JSON helps nobody
	}
	if p.Spec.Pods != nil {
		if _, err := metav1.LabelSelectorAsSelector(p.Spec.Pods); err != nil {
			problems = append(problems, fmt.Errorf("spec.pods: %w", err))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	out := p.DeepCopy()
	out.Spec = read.Spec
	return out, nil
}

func parsePolicy(file string, data []byte) (*v1alpha1.AccelerationPolicy, *reader) {
	p := &v1alpha1.AccelerationPolicy{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindAccelerationPolicy}}
	r := newReader(file)
	if len(data) > maxFile {
		r.fail("", "must be at most %d KiB, is %d", maxFile>>10, len(data)>>10)
		return p, r
	}
	root := r.parse(data, "")
	if root == nil {
		return p, r
	}
	r.nodes[""] = root
	if root.kind == null {
		r.fail("", "must be an %s, is empty", v1alpha1.KindAccelerationPolicy)
		return p, r
	}
	var f policyFile
	r.value(root, &f, "")
	r.malformed = len(r.errors)
	if root.kind == mapping {
		r.policy(&f)
	}
	p.ObjectMeta = metav1.ObjectMeta{Name: f.Metadata.Name, Labels: f.Metadata.Labels, Annotations: f.Metadata.Annotations}
	p.Spec = f.Spec
	return p, r
}

func (r *reader) policy(f *policyFile) {
	if r.given("apiVersion") {
		r.oneOf("apiVersion", f.APIVersion, v1alpha1.APIVersion)
	}
	if r.given("kind") {
		r.oneOf("kind", f.Kind, v1alpha1.KindAccelerationPolicy)
	}
	if r.given("metadata.name") {
		r.valid("metadata.name", f.Metadata.Name, validation.IsDNS1123Subdomain, "a DNS name: a-z, 0-9, - and . within, at most 253")
	}
	if r.given("spec.accelerate") {
		r.notEmpty("spec.accelerate", len(f.Spec.Accelerate), "accelerator")
	}
	for i, a := range f.Spec.Accelerate {
		oneKind(r, fmt.Sprintf("spec.accelerate[%d]", i), a)
	}
	if r.set("spec.rollout.stepPercent") {
		r.between("spec.rollout.stepPercent", f.Spec.Rollout.StepPercent, 1, 100)
	}
	if r.set("spec.rollout.pauseSeconds") {
		r.between("spec.rollout.pauseSeconds", f.Spec.Rollout.PauseSeconds, 1, 24*60*60)
	}
	accelerators(r, "spec", Path{}, f.Spec.Accelerate)
}
