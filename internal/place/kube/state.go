package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"slipstream.dev/internal/place"
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
	why := "by somebody else than this run"
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
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			remedy := "request fewer resources"
			if strings.Contains(c.Message, "Too many pods") {
				remedy = "end some pods of the node"
			}
			return podState{text: "cannot be scheduled: " + c.Message + "; " + remedy + ", or name another node", final: true}
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.Name != container: // one that a webhook has added
		case c.State.Waiting != nil:
			return waitingState(c, p.Spec.Containers[0].Command[0])
		case c.State.Terminated != nil:
			return podState{text: "ended: " + ending(c.State.Terminated), final: true}
		case c.State.Running != nil && len(p.Status.PodIPs) > 0:
			return podState{}
		}
	}
	return podState{text: "has not started yet"}
}

func waitingState(c corev1.ContainerStatus, program string) podState {
	w, last := c.State.Waiting, c.LastTerminationState.Terminated
	why := join(w.Reason, w.Message)
	if w.Reason == "CrashLoopBackOff" && last != nil {
		why = ending(last)
	}
	switch {
	case strings.Contains(why, "exec format error"), strings.Contains(why, "no match for platform"):
		return podState{text: fmt.Sprintf("cannot run %s: %s. The image is for another CPU architecture than the node: name one that has both with --image, as make image builds, or choose nodes of one architecture", c.Image, why), final: true}
	case rateLimited(w.Message):
		return podState{text: fmt.Sprintf("has no image: %s cannot be pulled: %s. The registry limits how often it is asked: try again later, or push the image to a registry of yours (slipstream image push REGISTRY/NAME) and name it with --image", c.Image, why), retried: true}
	case w.Reason == "CrashLoopBackOff" && last != nil && last.Reason == outOfMemory:
		return podState{text: "exits as soon as it starts: " + why, final: true}
	}
	switch w.Reason {
	case "ErrImageNeverPull":
		return podState{text: fmt.Sprintf("has no image: %s is not on the node, and the default image is never pulled. "+
			"Load it (make image; on the node: ctr -n k8s.io images import slipstream-image.tar), or push it to your registry (slipstream image push REGISTRY/NAME) and name it with --image", c.Image), final: true}
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName":
		return podState{text: fmt.Sprintf("has no image: %s cannot be pulled: %s. Name another with --image", c.Image, why), final: permanent(w), retried: true}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return podState{text: fmt.Sprintf("cannot start: %s. The image must have slipstream at %s", why, program), final: true}
	case "CrashLoopBackOff":
		return podState{text: fmt.Sprintf("exits as soon as it starts: %s. The image must have this version of slipstream at %s", why, program), final: true}
	}
	return podState{text: "has not started yet: " + why}
}

// permanent reports whether another attempt to pull an image would fail, too. A registry that does not answer, or answers that
// there are too many requests, may do better in a moment.
func permanent(w *corev1.ContainerStateWaiting) bool {
	return w.Reason == "InvalidImageName" || slices.ContainsFunc([]string{"not found", "no such host", "denied", "unauthorized", "authorization failed"},
		func(why string) bool { return strings.Contains(strings.ToLower(w.Message), why) })
}

// rateLimited reports whether a registry refuses a pull because there were too many (HTTP 429; "toomanyrequests" in the protocol of registries).
func rateLimited(message string) bool {
	message = strings.ToLower(message)
	return strings.Contains(message, "toomanyrequests") || strings.Contains(message, "429 too many requests")
}

// outOfMemory is the reason for which a container ended that the kernel killed for its memory.
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

// patience bounds how long the API server may not answer, or no worker can be started in a pod. After that, the run is lost. A
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
	events, err := p.cluster.api.Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("involvedObject.name", pod.Name).String()})
	if err != nil { // a run needs no permission to list them
		return known
	}
	for _, e := range events.Items {
		if slices.Contains([]string{"Preempted", "Evicted", "TaintManagerEviction"}, e.Reason) {
			return fmt.Errorf("pod %s/%s is gone: %s", pod.Namespace, pod.Name, join(e.Reason, e.Message))
		}
	}
	return known
}

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
	return fmt.Errorf("namespace %s was deleted by somebody else than this run, such as a controller that removes what it does not know: %s", name, remedy)
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
	node, err := p.cluster.api.Nodes().Get(ctx, got.Spec.NodeName, metav1.GetOptions{})
	if err == nil {
		if why := notReady(*node); why != "" {
			return p.lose(was, fmt.Errorf("node %s %s", node.Name, why))
		}
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
	return fmt.Errorf("the stream to pod %s broke, but the pod is running: %w", name, broke)
}

func restarts(p *corev1.Pod) (n int32) {
	for _, c := range p.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
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
