package kube

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Anybody who may label an object can make it look like a run's. So labels are how
// objects are found, and never why they are removed: that takes what no label
// changes, a name that follows from the run's, the form of the object, and that the
// API server has noted this program among those that wrote it.

// manager is what the API server notes as the writer of what a run makes.
const manager = "slipstream"

var creation = metav1.CreateOptions{FieldManager: manager}

// runID is the form of a run's name: eight letters and digits of base 32.
var runID = regexp.MustCompile(`^[a-z2-7]{8}$`)

// made tells why an object is not one that a run made, by what all of them have;
// empty if it may be one.
func made(m metav1.ObjectMeta) string {
	id := m.Labels[labelRun]
	switch {
	case m.Labels[labelName] != appName || m.Labels[labelComponent] != runComponent || !runID.MatchString(id):
		return "it does not have the labels of a run"
	case !slices.ContainsFunc(m.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == manager }):
		return "the API server has not noted slipstream among those that wrote it"
	}
	return ""
}

func named(m metav1.ObjectMeta, names ...string) string {
	if why := made(m); why != "" {
		return why
	}
	if !slices.Contains(names, m.Name) {
		return "a run does not name it so"
	}
	return ""
}

func foreignNamespace(n *corev1.Namespace) string {
	r := newRun(n.Labels[labelRun])
	return named(n.ObjectMeta, r.namespace, r.nodes)
}

// podName is that of a run's pod, before the name of the run (see Pods.up).
var podName = regexp.MustCompile(`^(client|server)-(node|[0-9]+|[0-9]+-host)-$`)

func foreignPod(p *corev1.Pod) string {
	if why := made(p.ObjectMeta); why != "" {
		return why
	}
	prefix, ok := strings.CutSuffix(p.Name, p.Labels[labelRun])
	if !ok || !podName.MatchString(prefix) {
		return "a run does not name it so"
	}
	if !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool {
		return c.Name == container && slices.Equal(c.Command, []string{program}) && len(c.Args) > 1 && c.Args[0] == "worker"
	}) {
		return "it does not run a worker"
	}
	return ""
}

func foreignService(s *corev1.Service) string {
	if why := made(s.ObjectMeta); why != "" {
		return why
	}
	prefix, ok := strings.CutSuffix(s.Name, s.Labels[labelRun])
	if !ok || !podName.MatchString(prefix) || s.Spec.Selector[labelPod] != s.Name {
		return "it is not in front of a run's pod"
	}
	return ""
}

func foreignLease(m metav1.ObjectMeta) string {
	r := newRun(m.Labels[labelRun])
	return named(m, r.name("run"))
}

// Foreign is an object with a run's labels that no run made.
type Foreign struct{ Kind, Name, Why string }

func (f Foreign) String() string { return fmt.Sprintf("%s %s: %s", f.Kind, f.Name, f.Why) }

// only has a deletion refused where the object has become another since it was looked
// at.
func only(m metav1.ObjectMeta) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &m.UID}}
}
