package kube

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"slipstream.dev/internal/doctor"
)

const (
	// ciliumAgent is the container of an agent, whatever its DaemonSet is called: cilium, or anetd in GKE.
	ciliumAgent = "cilium-agent"
	// ciliumConfig is the ConfigMap of Cilium's chart, of AKS and of GKE.
	ciliumConfig = "cilium-config"
)

// ciliumOf describes Cilium by a pod of its agent; nil if it is no such pod.
func ciliumOf(p corev1.Pod) *doctor.Cilium {
	daemon := metav1.GetControllerOf(&p)
	if daemon == nil || daemon.Kind != "DaemonSet" || p.DeletionTimestamp != nil {
		return nil
	}
	for _, c := range p.Spec.Containers {
		if c.Name == ciliumAgent {
			return &doctor.Cilium{DaemonSet: p.Namespace + "/" + daemon.Name, Version: tagOf(c.Image, "cilium"), ConfigMap: p.Namespace + "/" + ciliumConfig}
		}
	}
	return nil
}

// cilium looks for Cilium among the pods that the user may list, and reads its settings. If the user may not list pods, only
// the settings tell that there is a Cilium: denied says that the user may not read them either.
func (c *Cluster) cilium(ctx context.Context, pods []corev1.Pod, mayList bool) (found *doctor.Cilium, denied bool, err error) {
	for _, p := range pods {
		if found = ciliumOf(p); found != nil {
			break
		}
	}
	if found == nil && mayList {
		return nil, false, nil
	}
	if found == nil {
		found = &doctor.Cilium{ConfigMap: metav1.NamespaceSystem + "/" + ciliumConfig}
	}
	namespace, _, _ := strings.Cut(found.ConfigMap, "/")
	config, err := c.api.ConfigMaps(namespace).Get(ctx, ciliumConfig, metav1.GetOptions{})
	switch {
	case err == nil:
		if found.Settings = config.Data; found.Settings == nil {
			found.Settings = make(map[string]string)
		}
		return found, false, nil
	case !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err):
		return nil, false, fmt.Errorf("get ConfigMap %s: %w", found.ConfigMap, explain(err))
	case !mayList:
		return nil, apierrors.IsForbidden(err), nil
	case apierrors.IsNotFound(err):
		found.Unread = "there is no ConfigMap " + found.ConfigMap
	default:
		found.Unread = "you may not " + readsCilium(namespace).String()
	}
	return found, false, nil
}

// readsCilium is the permission to read Cilium's settings.
func readsCilium(namespace string) permission {
	return permission{verb: "get", resource: "configmaps", namespace: namespace}
}

// isKubeProxy reports whether a pod is a kube-proxy: of a DaemonSet, or a static pod.
func isKubeProxy(p corev1.Pod) bool {
	return strings.HasPrefix(p.Name, "kube-proxy") && p.DeletionTimestamp == nil && p.Status.Phase != corev1.PodFailed && p.Status.Phase != corev1.PodSucceeded
}
