package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/target"
)

// podState is why a pod is not running, as the predicate of a sentence about it; empty if it is. A
// final state does not change by itself.
type podState struct {
	text  string
	final bool
}

func stateOf(p *corev1.Pod) podState {
	if p.DeletionTimestamp != nil {
		return podState{"is being deleted, but not by this run", true}
	}
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return podState{"has ended: " + cmp.Or(join(p.Status.Reason, p.Status.Message), "its container exited"), true}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return podState{"cannot be scheduled: " + c.Message + "; request fewer resources, or name another node", true}
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.State.Waiting != nil:
			return waitingState(c, p.Spec.Containers[0].Command[0])
		case c.State.Terminated != nil:
			return podState{"ended: " + ending(c.State.Terminated), true}
		case c.State.Running != nil && len(p.Status.PodIPs) > 0:
			return podState{}
		}
	}
	return podState{"has not started yet", false}
}

func waitingState(c corev1.ContainerStatus, program string) podState {
	w := c.State.Waiting
	why := join(w.Reason, w.Message)
	switch w.Reason {
	case "ErrImageNeverPull":
		return podState{fmt.Sprintf("has no image: %s is not on the node, and the default image is never pulled. "+
			"Load it (make image; on the node: ctr -n k8s.io images import slipstream-image.tar), or push it to your registry and name it with --image", c.Image), true}
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName":
		return podState{fmt.Sprintf("has no image: %s cannot be pulled: %s. Name another with --image", c.Image, why), true}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return podState{fmt.Sprintf("cannot start: %s. The image must have slipstream at %s", why, program), true}
	case "CrashLoopBackOff":
		if t := c.LastTerminationState.Terminated; t != nil {
			why = ending(t)
		}
		return podState{fmt.Sprintf("exits as soon as it starts: %s. The image must have this version of slipstream at %s", why, program), true}
	}
	return podState{"has not started yet: " + why, false}
}

func ending(t *corev1.ContainerStateTerminated) string {
	return join(cmp.Or(t.Reason, "exited"), cmp.Or(strings.TrimSpace(t.Message), fmt.Sprintf("exit code %d", t.ExitCode)))
}

func join(reason, message string) string {
	if reason != "" && message != "" {
		return reason + ": " + message
	}
	return reason + message
}

// A run is lost if for so long its API server does not answer, or no worker can be started in a pod.
// It is longer than a control plane takes to elect a leader, or to notice that a node is dead.
const patience = 45 * time.Second

// diagnose finds out what happened to a pod after a stream to it broke. The error is target.ErrLost if
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
			return p.lose(pod, fmt.Errorf("pod %s is gone: somebody deleted it, or its namespace", name))
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
	case got.DeletionTimestamp != nil, got.Status.Phase == corev1.PodFailed:
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
		p.lost[node] = &target.LostError{Why: why}
	}
	return p.lost[node]
}

// isLost says why a pod is lost, or the whole run, nil if neither is.
func (p *Pods) isLost(pod *corev1.Pod) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.lost[""]; err != nil || pod == nil {
		return err
	}
	return p.lost[nodeOf(pod)]
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
	if time.Since(since) > patience && !errors.Is(why, target.ErrLost) {
		return p.lose(pod, fmt.Errorf("no worker could be started in pod %s/%s for %s: %w", pod.Namespace, pod.Name, patience, why))
	}
	return why
}

func (p *Pods) answered(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.silent, pod.Name)
}
