package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// dryRun makes the API server check an object as it would for a run, admission included, without storing it.
var dryRun = metav1.CreateOptions{FieldManager: manager, DryRun: []string{metav1.DryRunAll}}

// existing is the namespace in which a dry run asks about pods, if the run would create namespaces of its own.
const existing = metav1.NamespaceDefault

// oneOfEach returns one pod of each kind that admission may tell apart.
func oneOfEach(pods []*corev1.Pod) (kinds []*corev1.Pod) {
	alike := func(a, b *corev1.Pod) bool {
		return a.Namespace == b.Namespace && a.Spec.HostNetwork == b.Spec.HostNetwork && a.Spec.HostPID == b.Spec.HostPID &&
			programOf(a) == programOf(b)
	}
	for _, pod := range pods {
		if !slices.ContainsFunc(kinds, func(other *corev1.Pod) bool { return alike(pod, other) }) {
			kinds = append(kinds, pod)
		}
	}
	return kinds
}

// prepare finds out whether pods can be created and reach each other, before any of them is created. asked are those whose rejection
// ends the run.
func (p *Pods) prepare(ctx context.Context, all, asked []*corev1.Pod) (notes []string, err error) {
	if err := p.hasRoom(ctx, all); err != nil {
		return nil, err
	}
	note, err := p.isolated(ctx)
	if err != nil {
		return nil, err
	}
	for _, note := range []string{note, p.meshed(ctx)} {
		if note != "" {
			notes = append(notes, note)
		}
	}
	changes, err := p.dryRunPods(ctx, asked)
	return append(notes, changes...), err
}

// dryRunPods asks the API server about pods before any of them is created. The error says why it rejects one, and notes say what it
// would change in them.
func (p *Pods) dryRunPods(ctx context.Context, pods []*corev1.Pod) (notes []string, err error) {
	for _, pod := range oneOfEach(pods) {
		got, err := p.create(ctx, pod, dryRun)
		switch {
		case err == nil:
			notes = append(notes, altered(pod, got)...)
			if err := p.barred(ctx, pod, got); err != nil {
				return notes, err
			}
		case !strings.Contains(err.Error(), "does not support dry run"): // a webhook with side effects; then only creation shows it
			return notes, err
		}
	}
	return notes, nil
}

// admits says what would make the API server reject the pods of a run, and what it would change in them. It creates nothing.
func (p *Pods) admits(ctx context.Context) (lacks, notes []string) {
	control, traffic := p.makePods()
	if !p.inNamedNamespace {
		for _, n := range p.namespaceObjects() {
			if err := p.createNamespace(ctx, n, dryRun); err != nil && !deniedByRBAC(err) {
				lacks = append(lacks, err.Error())
			}
		}
	}
	if err := p.hasRoom(ctx, slices.Concat(control, traffic)); err != nil {
		lacks = append(lacks, err.Error())
	}
	if err := p.cluster.hasPodRoom(ctx, slices.Concat(control, traffic)); err != nil {
		lacks = append(lacks, err.Error())
	}
	note, err := p.isolated(ctx)
	if err != nil {
		lacks = append(lacks, err.Error())
	}
	notes = append(notes, note, p.meshed(ctx), p.copyNote(len(control)+len(traffic)))
	for i, pods := range [][]*corev1.Pod{control, traffic} {
		changes, err := p.dryRunIn(ctx, pods)
		notes = append(notes, changes...)
		switch {
		case err == nil:
		case i == 0 && !p.needsNodePods():
			notes = append(notes, notSampled(err))
		default:
			lacks = append(lacks, err.Error())
		}
	}
	return lacks, notes
}

// dryRunIn asks about pods in the namespace that the user named, or else in one that exists. It leaves out rejections that are
// due to that existing namespace.
func (p *Pods) dryRunIn(ctx context.Context, pods []*corev1.Pod) (notes []string, err error) {
	if p.inNamedNamespace {
		notes, err = p.dryRunPods(ctx, pods)
	} else {
		var elsewhere []*corev1.Pod
		for _, pod := range oneOfEach(pods) {
			pod = pod.DeepCopy()
			pod.Namespace = existing
			elsewhere = append(elsewhere, pod)
		}
		if _, err = p.dryRunPods(ctx, elsewhere); err != nil && ofNamespace(err) {
			err = nil
		}
		if err != nil {
			err = fmt.Errorf("%w (asked in namespace %s, because those of the run do not exist yet)", err, existing)
		}
	}
	if deniedByRBAC(err) { // the permissions say so
		err = nil
	}
	return notes, err
}

// deniedByRBAC reports whether the user lacks the permission to create an object, so that admission was not asked.
func deniedByRBAC(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "cannot create resource")
}

// denied reports whether a policy of the cluster, and no role, forbids something: some webhooks answer 403, some 400.
func denied(err error) bool {
	return err != nil && !deniedByRBAC(err) && (apierrors.IsForbidden(err) || strings.Contains(err.Error(), "denied the request"))
}

// ofNamespace reports whether a rejection comes from what the existing namespace has, and those of a run do not: a security standard,
// quotas, ranges, a service account, a policy against the use of that namespace.
func ofNamespace(err error) bool {
	return slices.ContainsFunc([]string{"violates PodSecurity", "quota", "usage per", "serviceaccount", "service account", "lets its pods run only on"},
		func(part string) bool { return strings.Contains(err.Error(), part) }) || aboutDefault.MatchString(err.Error())
}

var aboutDefault = regexp.MustCompile(`(?i)\bdefault\W{0,2} namespace\b|\bnamespace \W{0,2}default\W{0,2} is not allowed`)

// altered returns notes about what admission has changed in a pod, if it affects what is measured.
func altered(pod, got *corev1.Pod) (notes []string) {
	was := pod.Spec.Containers[0]
	var added []string
	for _, c := range got.Spec.Containers {
		if c.Name != was.Name {
			added = append(added, c.Name)
			continue
		}
		if limits := textOf(c.Resources.Limits); limits != "" && limits != textOf(was.Resources.Limits) {
			notes = append(notes, fmt.Sprintf("a LimitRange or webhook limits pod %s/%s to %s, which may throttle what is measured: set spec.target.kubernetes.resources, or name another namespace",
				pod.Namespace, pod.Name, limits))
		}
		if c.Image != was.Image {
			notes = append(notes, fmt.Sprintf("a webhook replaces the image of pod %s/%s by %s", pod.Namespace, pod.Name, c.Image))
		}
		if c.ImagePullPolicy == corev1.PullAlways && was.ImagePullPolicy == corev1.PullIfNotPresent {
			notes = append(notes, fmt.Sprintf("admission makes every node pull the image of pod %s/%s, even if the node has it (AlwaysPullImages)", pod.Namespace, pod.Name))
		}
	}
	if len(got.Spec.SchedulingGates) > 0 {
		notes = append(notes, fmt.Sprintf("a webhook holds pod %s/%s back by %s, until its controller removes that, such as Kueue: if it does not within %s, the run ends. Ask whoever maintains it to exempt pods with the label %s=%s",
			pod.Namespace, pod.Name, gates(got), upTime, labelName, appName))
	}
	for _, c := range got.Spec.InitContainers {
		added = append(added, c.Name)
	}
	if len(added) > 0 {
		notes = append(notes, fmt.Sprintf("a webhook adds to pod %s/%s the containers %s, and what is measured may pass through them: exempt the namespace from it to measure the network alone",
			pod.Namespace, pod.Name, strings.Join(added, ", ")))
	}
	if class := got.Spec.RuntimeClassName; class != nil && pod.Spec.RuntimeClassName == nil {
		notes = append(notes, fmt.Sprintf("a webhook gives pod %s/%s the runtime class %s, whose network stack may be another", pod.Namespace, pod.Name, *class))
	}
	return notes
}

// barred returns an error if admission has changed a pod so that it cannot run.
func (p *Pods) barred(ctx context.Context, pod, got *corev1.Pod) error {
	was := pod.Spec.Containers[0]
	for _, c := range got.Spec.Containers {
		if c.Name == was.Name && c.Image == was.Image && was.ImagePullPolicy == corev1.PullNever && c.ImagePullPolicy != corev1.PullNever {
			return fmt.Errorf("admission makes every node pull the images of its pods (AlwaysPullImages), and no registry has %s: push it to your registry (slipstream image push REGISTRY/NAME) and name it with --image", was.Image)
		}
	}
	selector := labels.SelectorFromSet(got.Spec.NodeSelector)
	if selector.Empty() {
		return nil
	}
	node, err := p.cluster.api.Nodes().Get(ctx, nodeOf(pod), metav1.GetOptions{})
	if err != nil || selector.Matches(labels.Set(node.Labels)) { // whoever needs the node reports the error
		return nil
	}
	return fmt.Errorf("namespace %s, or a webhook, lets its pods run only on nodes with the labels %s, and node %s lacks them: name nodes that have them (--selector), or leave out -n",
		pod.Namespace, labels.FormatLabels(got.Spec.NodeSelector), node.Name)
}

// textOf returns amounts as "cpu=500m, memory=256Mi".
func textOf(amounts corev1.ResourceList) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(amounts)) {
		amount := amounts[name]
		all = append(all, fmt.Sprintf("%s=%s", name, amount.String()))
	}
	return strings.Join(all, ", ")
}

// notSampled says that a run goes on without the pods that only sample.
func notSampled(err error) string { return fmt.Sprintf("CPU use is not measured: %v", err) }

// rejectedError is the error of the API server that rejects a pod.
type rejectedError struct {
	pod *corev1.Pod
	err error
}

func (e *rejectedError) Error() string {
	text := fmt.Sprintf("the API server rejects pod %s/%s: %v", e.pod.Namespace, e.pod.Name, e.err)
	if remedy := e.remedy(); remedy != "" {
		text += ": " + remedy
	}
	return text
}

// remedy returns what to do about a rejection, by what it says; "" if nothing is known.
func (e *rejectedError) remedy() string {
	const resources = "spec.target.kubernetes.resources"
	says := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(strings.ToLower(e.err.Error()), part) })
	}
	const unprivileged = "leave out accelerators and the native path (unprivileged: true)"
	switch {
	case says("security context constraint"): // OpenShift grants them to users, and to service accounts
		if e.pod.Spec.HostNetwork {
			return "an administrator can permit you such pods (oc adm policy add-scc-to-user privileged USER), or " + unprivileged
		}
		return "an administrator can permit you such pods, which have no privileges and a user of their own (oc adm policy add-scc-to-user nonroot-v2 USER)"
	case says("gke warden"): // which nobody can exempt from
		return "GKE Autopilot admits no such pods: " + unprivileged
	case says("podsecurity"):
		return "the namespace enforces a Pod Security Standard that forbids this pod: leave out -n, so that the run creates its own namespaces, or " + unprivileged
	case says("must specify limits", "must specify requests"):
		return "a quota wants to know what the pods need: --set " + resources + "='{cpu: \"1\", memory: 256Mi}'"
	case says("exceeded quota"):
		return "give the pods less with " + resources + ", free some of the quota, or leave out -n, so that the run creates its own namespaces"
	case says("usage per container", "usage per pod"):
		return "set " + resources + " to what the namespace's LimitRange admits"
	case says("denied the request", "denied request", "validatingadmissionpolicy"):
		namespace := "namespace " + e.pod.Namespace
		if e.pod.Namespace == existing || strings.Contains(e.pod.Namespace, e.pod.Labels[labelRun]) {
			namespace = "namespaces with the label " + labelName + "=" + appName // those of a run have a new name each time
		}
		remedy := "this is a policy of the cluster: ask whoever maintains it to exempt " + namespace
		if says("image", "digest", "registr", "tag") {
			remedy += ", or name an image that it admits with " + remediesFor(e.pod).flag + ", such as one with its digest (…@sha256:…)"
		}
		if e.pod.Spec.HostNetwork {
			remedy += ", or " + unprivileged
		}
		return remedy
	}
	return ""
}

func (e *rejectedError) Unwrap() error { return e.err }

func rejected(err error) bool { return errors.As(err, new(*rejectedError)) }
