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

// podState is what keeps a pod from running, for a sentence that begins with
// the pod; empty if nothing does. What is hopeless does not pass by itself.
type podState struct {
	text     string
	hopeless bool
}

func stateOf(p *corev1.Pod) podState {
	if p.DeletionTimestamp != nil {
		return podState{"is being deleted, and not by this run", true}
	}
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return podState{"has ended: " + cmp.Or(join(p.Status.Reason, p.Status.Message), "its container exited"), true}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return podState{"does not fit: " + c.Message + "; ask for fewer resources, or name another node", true}
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.State.Waiting != nil:
			return waitingState(c)
		case c.State.Terminated != nil:
			return podState{"ended: " + ending(c.State.Terminated), true}
		case c.State.Running != nil && len(p.Status.PodIPs) > 0:
			return podState{}
		}
	}
	return podState{"is not started yet", false}
}

func waitingState(c corev1.ContainerStatus) podState {
	w := c.State.Waiting
	why := join(w.Reason, w.Message)
	switch w.Reason {
	case "ErrImageNeverPull":
		return podState{fmt.Sprintf("has no image: the node does not have %s, and it is pulled from nowhere unless you say so. "+
			"Load it (make image; on the node: ctr -n k8s.io images import slipstream-image.tar), or push it to a registry of yours and name it with --image", c.Image), true}
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName":
		return podState{fmt.Sprintf("has no image, %s cannot be pulled: %s. Name another with --image", c.Image, why), true}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return podState{fmt.Sprintf("cannot be started: %s. The image must have this program at %s", why, program), true}
	case "CrashLoopBackOff":
		if t := c.LastTerminationState.Terminated; t != nil {
			why = ending(t)
		}
		return podState{fmt.Sprintf("ends as soon as it is started: %s. The image must have this version of the program at %s", why, program), true}
	}
	return podState{"is not started yet: " + why, false}
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

// A cluster that cannot be asked for patience, and a pod in which no worker can be
// started for as long, are lost. It is longer than a control plane takes to elect
// a leader, or a node to be found dead.
const patience = 45 * time.Second

// diagnose says what has become of a pod that a stream into was cut, and whether
// there is any hope for it: an error that is target.ErrLost says there is none.
func (p *Pods) diagnose(ctx context.Context, pod *corev1.Pod, cut error) error {
	name := pod.Namespace + "/" + pod.Name
	if err := p.hopeless(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var silence error
	for {
		got, err := p.cluster.api.Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		switch {
		case err == nil:
			return p.judge(ctx, got, pod, cut)
		case apierrors.IsNotFound(err):
			return p.lose(fmt.Errorf("pod %s is gone: somebody deleted it, or its namespace", name))
		case !unreachable(err):
			return p.lose(fmt.Errorf("look at pod %s: %w", name, explain(err)))
		}
		if silence == nil || ctx.Err() == nil { // a request that had no time left says nothing of the server
			silence = err
		}
		if pause(ctx) != nil {
			if context.Cause(ctx) == context.DeadlineExceeded {
				return p.lose(fmt.Errorf("the API server has not answered for %s: %w", patience, silence))
			}
			return fmt.Errorf("the API server does not answer: %w", silence)
		}
		if err := p.hopeless(); err != nil {
			return err // another has waited already
		}
	}
}

// judge a pod that a stream into was cut, as it is now.
func (p *Pods) judge(ctx context.Context, got, was *corev1.Pod, cut error) error {
	name := got.Namespace + "/" + got.Name
	if got.UID != was.UID {
		return p.lose(fmt.Errorf("pod %s is another than the run made", name))
	}
	node, err := p.cluster.api.Nodes().Get(ctx, got.Spec.NodeName, metav1.GetOptions{})
	if err == nil {
		if why := notReady(*node); why != "" {
			return p.lose(fmt.Errorf("node %s %s", node.Name, why))
		}
	}
	state := stateOf(got)
	switch {
	case got.DeletionTimestamp != nil, got.Status.Phase == corev1.PodFailed:
		return p.lose(fmt.Errorf("pod %s %s", name, state.text)) // nobody makes it again
	case state.text != "":
		return fmt.Errorf("pod %s %s", name, state.text) // it is restarted
	}
	for _, c := range got.Status.ContainerStatuses {
		if t := c.LastTerminationState.Terminated; t != nil && restarts(got) > restarts(was) {
			return fmt.Errorf("the container of pod %s was restarted: %s", name, ending(t))
		}
	}
	return fmt.Errorf("the stream into pod %s was cut, though it runs: %w", name, cut)
}

func restarts(p *corev1.Pod) (n int32) {
	for _, c := range p.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
}

// lose notes that nothing more can come of this run, for the first reason.
func (p *Pods) lose(why error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lost == nil {
		p.lost = &target.LostError{Why: why}
	}
	return p.lost
}

// hopeless is why nothing more can come of this run, nil if something can.
func (p *Pods) hopeless() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// unanswered notes that no worker could be started in a pod, and gives it up once
// that has lasted too long.
func (p *Pods) unanswered(pod *corev1.Pod, why error) error {
	p.mu.Lock()
	since, ok := p.silent[pod.Name]
	if !ok {
		since = time.Now()
		p.silent[pod.Name] = since
	}
	p.mu.Unlock()
	if time.Since(since) > patience && !errors.Is(why, target.ErrLost) {
		return p.lose(fmt.Errorf("no worker could be started in pod %s/%s for %s: %w", pod.Namespace, pod.Name, patience, why))
	}
	return why
}

func (p *Pods) answered(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.silent, pod.Name)
}
