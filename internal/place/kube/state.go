package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/words"
)

// podState says why a pod is not running, as the predicate of a sentence about it; it is empty if the pod runs.
type podState struct {
	text string
	// A final state does not change by itself.
	final bool
	// The kubelet tries again what failed.
	retried bool
}

// of returns the whole sentence.
func (s podState) of(pod *corev1.Pod) error {
	return fmt.Errorf("pod %s/%s on node %s %s", pod.Namespace, pod.Name, nodeOf(pod), s.text)
}

func stateOf(p *corev1.Pod) podState {
	why := "by somebody other than this run"
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue { // such as by preemption
			why = join(c.Reason, c.Message)
		}
	}
	if p.DeletionTimestamp != nil {
		return podState{text: "is being deleted: " + why, final: true}
	}
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return podState{text: "has ended: " + cmp.Or(join(p.Status.Reason, p.Status.Message), "its container exited"), final: true}
	}
	for _, c := range p.Status.Conditions {
		if c.Type != corev1.PodScheduled || c.Status != corev1.ConditionFalse {
			continue
		}
		switch c.Reason {
		case corev1.PodReasonUnschedulable:
			return podState{text: "cannot be scheduled: " + c.Message + "; " + schedulable(p, c.Message), final: true}
		case corev1.PodReasonSchedulingGated:
			return podState{text: "is held back by " + gates(p) + ": ask whoever maintains the controller that set it, such as Kueue, to exempt the pods of a run, which have the label " + labelName + "=" + appName}
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.Name != container: // one that a webhook has added
		case c.State.Waiting != nil:
			return waitingState(c, p)
		case c.State.Terminated != nil:
			return podState{text: "ended: " + ending(c.State.Terminated), final: true}
		case c.State.Running != nil && len(p.Status.PodIPs) > 0:
			return podState{}
		}
	}
	return podState{text: "has not started yet"}
}

// schedulable returns what to do about a pod that cannot be scheduled, by what the scheduler says.
func schedulable(p *corev1.Pod, says string) string {
	switch {
	case strings.Contains(says, "Too many pods"):
		return "end some pods of the node, or name another node"
	case strings.Contains(says, "Insufficient"):
		return "request fewer resources, or name another node"
	case len(p.Spec.NodeSelector) > 0: // pods of a run have none of their own
		return fmt.Sprintf("its namespace or a webhook lets it run only on nodes with the labels %s: name such nodes", labels.FormatLabels(p.Spec.NodeSelector))
	}
	return "name another node"
}

// gates names the scheduling gates of a pod.
func gates(p *corev1.Pod) string {
	var all []string
	for _, g := range p.Spec.SchedulingGates {
		all = append(all, g.Name)
	}
	return "the scheduling gate " + words.And(all)
}

func waitingState(c corev1.ContainerStatus, pod *corev1.Pod) podState {
	w, last := c.State.Waiting, c.LastTerminationState.Terminated
	why, image := join(w.Reason, w.Message), remediesFor(pod)
	if w.Reason == "CrashLoopBackOff" && last != nil {
		why = ending(last)
	}
	switch {
	case strings.Contains(why, "exec format error"), strings.Contains(why, "no match for platform"):
		return podState{text: fmt.Sprintf("cannot run %s: %s. The image is for another CPU architecture than the node: name one that has both with %s, or choose nodes of one architecture", c.Image, why, image.flag), final: true}
	case rateLimited(w.Message):
		return podState{text: fmt.Sprintf("has no image: %s cannot be pulled: %s. The registry limits how often it is asked: try again later, or %s", c.Image, why, image.elsewhere), retried: true}
	case w.Reason == "CrashLoopBackOff" && last != nil && last.Reason == outOfMemory:
		return podState{text: "exits as soon as it starts: " + why, final: true}
	}
	switch w.Reason {
	case "ErrImageNeverPull":
		return podState{text: fmt.Sprintf("has no image: %s is not on the node, and the default image is never pulled. "+
			"Load it (make image; on the node: ctr -n k8s.io images import slipstream-image.tar), or push it to your registry (slipstream image push REGISTRY/NAME) and name it with --image", c.Image), final: true}
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName":
		return podState{text: fmt.Sprintf("has no image: %s cannot be pulled: %s. %s", c.Image, why, image.pull(w.Message)), final: permanent(w), retried: true}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return podState{text: fmt.Sprintf("cannot start: %s. The image must have %s", why, image.has), final: true}
	case "CrashLoopBackOff":
		return podState{text: fmt.Sprintf("exits as soon as it starts: %s. The image must have %s", why, image.runs), final: true}
	}
	return podState{text: "has not started yet: " + why}
}

// remedies are what to do about the image of a pod, which has this program or lacks it.
type remedies struct {
	flag string // names another image
	// has is what it must have to start, and runs to go on.
	has, runs string
	// elsewhere says how to get it from another registry, and otherwise what to do if nothing is known.
	elsewhere, otherwise string
}

func remediesFor(pod *corev1.Pod) remedies {
	if program := programOf(pod); program != copied {
		return remedies{"--image", "slipstream at " + program, "this version of slipstream at " + program,
			"push the image to another registry (slipstream image push REGISTRY/NAME) and name it with --image", "Name another with --image"}
	}
	const elsewhere = "name a copy of this image in a registry that the node reaches with --base-image, or push the image of slipstream to yours (slipstream image push REGISTRY/NAME) and name it with --image"
	return remedies{"--base-image", "/bin/sh", "sleep, and the node must not mount volumes of pods noexec", elsewhere, "If the node does not reach that registry, " + elsewhere}
}

// pull returns what to do about an image that cannot be pulled, by what the container runtime says.
func (r remedies) pull(says string) string {
	switch {
	case unauthorized.MatchString(says):
		return "The registry wants credentials, or does not have that image: correct the name, or name with -n a namespace whose default service account has the credentials (imagePullSecrets)"
	case strings.Contains(says, "x509: certificate has expired or is not yet valid"):
		return "The certificate of the registry has expired or is not valid yet, by the node's clock: correct that clock, have the certificate renewed, or " + r.elsewhere
	case strings.Contains(says, "x509: "):
		return "The node does not trust the certificate of the registry: make it trust that, or " + r.elsewhere
	case strings.Contains(says, "server gave HTTP response to HTTPS client"):
		return "The registry does not speak TLS, and the node insists on it: permit that in the node's container runtime, or " + r.elsewhere
	}
	return r.otherwise
}

// unauthorized matches how container runtimes say that a registry lets them pull nothing.
var unauthorized = regexp.MustCompile(`(?i)unauthorized|authorization failed|no basic auth credentials|authentication required|access denied|403 forbidden`)

// permanent reports whether another attempt to pull an image would fail, too. A registry that does not answer, or answers that
// there are too many requests, may do better in a moment.
func permanent(w *corev1.ContainerStateWaiting) bool {
	return w.Reason == "InvalidImageName" || slices.ContainsFunc([]string{"not found", "no such host", "denied", "unauthorized", "authorization failed", "no basic auth", "x509: ", "server gave http response"},
		func(why string) bool { return strings.Contains(strings.ToLower(w.Message), why) })
}

// rateLimited reports whether a registry refuses a pull because there were too many (HTTP 429; "toomanyrequests" in the protocol of registries).
func rateLimited(message string) bool {
	message = strings.ToLower(message)
	return strings.Contains(message, "toomanyrequests") || strings.Contains(message, "429 too many requests")
}

// outOfMemory is the termination reason of a container that the kernel killed because it used too much memory.
const outOfMemory = "OOMKilled"

func ending(t *corev1.ContainerStateTerminated) string {
	text := join(cmp.Or(t.Reason, "exited"), cmp.Or(strings.TrimSpace(t.Message), fmt.Sprintf("exit code %d", t.ExitCode)))
	if t.Reason == outOfMemory {
		text += ": set more memory in spec.target.kubernetes.resources, or take fewer connections"
	}
	return text
}

func join(reason, message string) string {
	if reason != "" && message != "" {
		return reason + ": " + message
	}
	return reason + message
}

// patience limits how long the API server may fail to answer, or workers may fail to start in a pod, before the run is lost. A
// control plane takes less time to elect a leader, or to notice that a node is dead.
const patience = 45 * time.Second

// diagnose finds out what happened to a pod after a stream to it broke. The error is place.ErrLost if
// no trial can succeed in it any more.
func (p *Pods) diagnose(ctx context.Context, pod *corev1.Pod, broke error) error {
	name := pod.Namespace + "/" + pod.Name
	if err := p.isLost(pod); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var silence error
	for {
		got, err := p.cluster.api.Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		switch {
		case err == nil:
			return p.judge(ctx, got, pod, broke)
		case apierrors.IsNotFound(err):
			return p.lose(pod, p.deleted(ctx, pod, fmt.Errorf("pod %s is gone: somebody deleted it", name)))
		case !unreachable(err):
			return p.lose(pod, fmt.Errorf("get pod %s: %w", name, explain(err)))
		}
		if silence == nil || ctx.Err() == nil { // a request that had no time left says nothing about the server
			silence = err
		}
		if pause(ctx) != nil {
			if context.Cause(ctx) == context.DeadlineExceeded {
				return p.lose(nil, fmt.Errorf("the API server has not answered for %s: %w", patience, silence))
			}
			return fmt.Errorf("the API server does not answer: %w", silence)
		}
		if err := p.isLost(pod); err != nil {
			return err // another call has waited already
		}
	}
}

// deleted says why somebody has deleted a pod: with its namespace, or as an event tells; otherwise it returns what is known.
func (p *Pods) deleted(ctx context.Context, pod *corev1.Pod, known error) error {
	if err := p.namespaceDeleted(ctx, pod.Namespace); err != nil {
		return err
	}
	if err := p.nodeLeaves(ctx, pod); err != nil {
		return err
	}
	for _, e := range p.events(ctx, pod) {
		if slices.Contains([]string{"Preempted", "Evicted", "TaintManagerEviction"}, e.Reason) {
			return fmt.Errorf("pod %s/%s is gone: %s", pod.Namespace, pod.Name, join(e.Reason, e.Message))
		}
	}
	return known
}

// events returns the events about a pod. A run needs no permission to list them.
func (p *Pods) events(ctx context.Context, pod *corev1.Pod) []corev1.Event {
	list, err := p.cluster.api.Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("involvedObject.name", pod.Name).String()})
	if err != nil {
		return nil
	}
	return list.Items
}

// warned returns the last warning about a pod, as the continuation of a sentence; "" if there is none. What keeps a kubelet from starting
// a pod, such as a network plugin without addresses, is in no status.
func (p *Pods) warned(ctx context.Context, pod *corev1.Pod) string {
	var last corev1.Event
	for _, e := range p.events(ctx, pod) {
		if e.Type == corev1.EventTypeWarning && !e.LastTimestamp.Before(&last.LastTimestamp) {
			last = e
		}
	}
	if last.Type == "" {
		return ""
	}
	return "; its last event is " + join(last.Reason, last.Message)
}

// nodeLeaves returns an error if the node of a pod is gone, or loses its pods.
func (p *Pods) nodeLeaves(ctx context.Context, pod *corev1.Pod) error {
	name := nodeOf(pod)
	n, err := p.cluster.api.Nodes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nodeGone(name)
	case err == nil && leaves(n) != "":
		return fmt.Errorf("node %s loses its pods, as %s: somebody other than this run drains it, such as an autoscaler: %s", name, leaves(n), keepNode)
	}
	return nil
}

func nodeGone(name string) error {
	return fmt.Errorf("node %s is gone: somebody has removed it, such as an autoscaler: %s", name, keepNode)
}

const keepNode = "name nodes that stay, or keep this one until the run has ended"

// namespaceDeleted returns an error if a namespace of the run is being deleted, or is gone.
func (p *Pods) namespaceDeleted(ctx context.Context, name string) error {
	n, err := p.cluster.api.Namespaces().Get(ctx, name, metav1.GetOptions{})
	if err == nil && n.DeletionTimestamp == nil || err != nil && !apierrors.IsNotFound(err) {
		return nil
	}
	remedy := "exempt namespaces with the label " + labelName + "=" + appName + " from it, or name an existing one with -n"
	if p.inNamedNamespace {
		remedy = "name another one with -n"
	}
	return fmt.Errorf("namespace %s was deleted by somebody other than this run, such as a controller that removes what it does not know: %s", name, remedy)
}

// Slow returns an error if the API server answers slowly, which is then why a trial has taken too long.
func (p *Pods) Slow(ctx context.Context) error {
	asked := time.Now()
	_, err := p.cluster.api.Leases(p.namespace).Get(ctx, p.name("run"), metav1.GetOptions{})
	if why := slow(time.Since(asked)); why != "" {
		return errors.New(why)
	}
	if err != nil && unreachable(err) {
		return explain(err)
	}
	return nil
}

// judge compares a pod after a stream to it broke with the pod before.
func (p *Pods) judge(ctx context.Context, got, was *corev1.Pod, broke error) error {
	name := got.Namespace + "/" + got.Name
	if got.UID != was.UID {
		return p.lose(was, fmt.Errorf("pod %s was replaced by another of that name", name))
	}
	node, err := p.cluster.api.Nodes().Get(ctx, nodeOf(was), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return p.lose(was, nodeGone(nodeOf(was)))
	case err == nil && notReady(*node) != "":
		return p.lose(was, fmt.Errorf("node %s %s", node.Name, notReady(*node)))
	}
	state := stateOf(got)
	switch {
	case got.DeletionTimestamp != nil:
		return p.lose(was, p.deleted(ctx, was, fmt.Errorf("pod %s %s", name, state.text)))
	case got.Status.Phase == corev1.PodFailed:
		return p.lose(was, fmt.Errorf("pod %s %s", name, state.text)) // nobody creates it again
	case state.text != "":
		return fmt.Errorf("pod %s %s", name, state.text) // it is restarted
	}
	for _, c := range got.Status.ContainerStatuses {
		if t := c.LastTerminationState.Terminated; t != nil && restarts(got) > restarts(was) {
			return fmt.Errorf("the container of pod %s restarted: %s", name, ending(t))
		}
	}
	return fmt.Errorf("%s: %w", cmp.Or(notStarted(was, broke), "the stream to pod "+name+" broke, but the pod is running"), broke)
}

// notStarted says why a command could not be started in a pod, by the error of exec; "" if it does not tell.
func notStarted(pod *corev1.Pod, err error) string {
	switch {
	case execForbidden(err):
		return fmt.Sprintf("a role or a policy of the cluster forbids you to run commands in pod %s/%s, as kubectl exec does: ask who maintains it to permit that in pods with the label %s=%s",
			pod.Namespace, pod.Name, labelName, appName)
	case strings.Contains(err.Error(), "error dialing backend") && strings.Contains(err.Error(), "x509: certificate has expired or is not yet valid"):
		return fmt.Sprintf("the certificate of the kubelet of node %s has expired or is not valid yet, by the API server's clock, so kubectl exec and kubectl logs fail too: renew it, or correct the clock of the node or of the API server", nodeOf(pod))
	case strings.Contains(err.Error(), "error dialing backend") && (strings.Contains(err.Error(), "tls: ") || strings.Contains(err.Error(), "x509: ")):
		return fmt.Sprintf("the API server and the kubelet of node %s do not agree on the kubelet's certificate, so kubectl exec and kubectl logs fail too: is its signing request waiting for approval (kubectl get certificatesigningrequests)?", nodeOf(pod))
	case strings.Contains(err.Error(), "error dialing backend"):
		return fmt.Sprintf("the API server does not reach the kubelet of node %s, so kubectl exec and kubectl logs fail too: let it through to the kubelet's port, 10250, or repair its tunnel to the nodes (konnectivity)", nodeOf(pod))
	}
	return ""
}

func restarts(p *corev1.Pod) (n int32) {
	for _, c := range p.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
}

// execForbidden reports whether the API server lets the user start no command in a pod. Over SPDY its error has no type.
func execForbidden(err error) bool {
	return apierrors.IsForbidden(err) || strings.Contains(err.Error(), " is forbidden: ") || strings.Contains(err.Error(), "denied the request")
}

// lose marks the run as lost, or in a mesh the node of a pod; the first reason stays.
func (p *Pods) lose(pod *corev1.Pod, why error) error {
	node := ""
	if p.config.Mesh && pod != nil {
		node = nodeOf(pod)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lost[node] == nil {
		p.lost[node] = &place.LostError{Why: why}
	}
	return p.lost[node]
}

// isLost says why a pod is lost, or the whole run, nil if neither is.
func (p *Pods) isLost(pod *corev1.Pod) error {
	if pod == nil {
		return p.isLostNode("")
	}
	return p.isLostNode(nodeOf(pod))
}

// isLostNode says why a node is lost, or the whole run, nil if neither is.
func (p *Pods) isLostNode(node string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.lost[""]; err != nil {
		return err
	}
	return p.lost[node]
}

// unanswered records that no worker could be started in a pod, and loses the run once that has lasted
// too long.
func (p *Pods) unanswered(pod *corev1.Pod, why error) error {
	p.mu.Lock()
	since, ok := p.silent[pod.Name]
	if !ok {
		since = time.Now()
		p.silent[pod.Name] = since
	}
	p.mu.Unlock()
	if time.Since(since) > patience && !errors.Is(why, place.ErrLost) {
		return p.lose(pod, fmt.Errorf("no worker could be started in pod %s/%s for %s: %w", pod.Namespace, pod.Name, patience, why))
	}
	return why
}

func (p *Pods) answered(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.silent, pod.Name)
}
