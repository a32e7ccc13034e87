package kube

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Anybody who may label an object can make it look like one of a run. So cleanup finds objects by
// their labels, but removes them only if three other things agree: the name, which follows from the
// run's, the form of the object, and its managedFields, in which the API server records this program.

// manager is the field manager of all that a run creates.
const manager = "slipstream"

var creation = metav1.CreateOptions{FieldManager: manager}

// runID is the form of a run's name: eight letters and digits of base 32.
var runID = regexp.MustCompile(`^[a-z2-7]{8}$`)

// foreign says why no run can have created an object; "" if one may have. It checks what all objects
// of a run have in common.
func foreign(m metav1.ObjectMeta) string {
	id := m.Labels[labelRun]
	switch {
	case m.Labels[labelName] != appName || m.Labels[labelComponent] != runComponent || !runID.MatchString(id):
		return "it does not have the labels of a run"
	case !slices.ContainsFunc(m.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == manager }):
		return "slipstream is not among its field managers"
	}
	return ""
}

func foreignName(m metav1.ObjectMeta, names ...string) string {
	if why := foreign(m); why != "" {
		return why
	}
	if !slices.Contains(names, m.Name) {
		return "its name is not one that a run gives"
	}
	return ""
}

func foreignNamespace(n *corev1.Namespace) string {
	r := newRun(n.Labels[labelRun])
	return foreignName(n.ObjectMeta, r.namespace, r.nodes)
}

// podName matches the name of a run's pod up to the name of the run (see Pods.up).
var podName = regexp.MustCompile(`^(client|server|n[0-9]+)-(node|[0-9]+|[0-9]+-host)-$`)

// named reports whether the name of an object consists of a given form and the name of its run.
func named(m metav1.ObjectMeta, form *regexp.Regexp) bool {
	prefix, ok := strings.CutSuffix(m.Name, m.Labels[labelRun])
	return ok && form.MatchString(prefix)
}

func foreignPod(p *corev1.Pod) string {
	if why := foreign(p.ObjectMeta); why != "" {
		return why
	}
	if !named(p.ObjectMeta, podName) {
		return "its name is not one that a run gives"
	}
	if !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool {
		return c.Name == container && runsWorker(c)
	}) {
		return "it does not run a worker"
	}
	return ""
}

// runsWorker reports whether a container runs this program, at once or after it has been copied there.
func runsWorker(c corev1.Container) bool {
	started := len(c.Command) == 1 && (c.Command[0] == program || c.Command[0] == windowsProgram)
	awaited := len(c.Command) == len(await) && c.Command[len(await)-1] == copied
	return (started || awaited) && len(c.Args) > 1 && c.Args[0] == "worker"
}

func foreignService(s *corev1.Service) string {
	if why := foreign(s.ObjectMeta); why != "" {
		return why
	}
	if len(s.Spec.Selector) == 0 && named(s.ObjectMeta, backendName) {
		return ""
	}
	if !named(s.ObjectMeta, podName) || s.Spec.Selector[labelPod] != s.Name {
		return "it does not select a pod of the run"
	}
	return ""
}

func foreignLease(m metav1.ObjectMeta) string {
	r := newRun(m.Labels[labelRun])
	return foreignName(m, r.name("run"))
}

// Foreign is an object with the labels of a run that no run created.
type Foreign struct{ Kind, Name, Why string }

func (f Foreign) String() string { return fmt.Sprintf("%s %s: %s", f.Kind, f.Name, f.Why) }

// only returns the options with which a deletion fails if another object has taken the name since this one was read.
func only(m metav1.ObjectMeta) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &m.UID}}
}
