package kube

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"slipstream.dev/internal/spec"
)

// Labels of everything that a run creates, by which cleanup finds it.
const (
	labelName      = "app.kubernetes.io/name"
	labelComponent = "app.kubernetes.io/component"
	labelRun       = "slipstream.dev/run"
	// labelPod is different for each pod, so that a service can select one.
	labelPod = "slipstream.dev/pod"

	appName, runComponent = "slipstream", "run"
	// annotationNodes names the nodes that a run measures, on its lease.
	annotationNodes = "slipstream.dev/nodes"

	// selector matches the objects of all runs.
	selector = labelName + "=" + appName + "," + labelComponent + "=" + runComponent
)

// The program, in every image that has it: on a Windows node, containerd mounts a container's files at C:\hpc.
const program, windowsProgram = "/slipstream", `C:\hpc\slipstream.exe`

// The program in a pod whose image lacks it, in a volume of the pod. Unlike the container's own files, it may be written to, and outlives
// a container that is restarted.
const copyDir, copied = "/opt/slipstream", "/opt/slipstream/slipstream"

// await is the first process of such a pod: it becomes the program, its argument 0, once that is there. Without the trap, the first
// process of a container ignores SIGTERM.
var await = []string{"/bin/sh", "-c", `trap exit TERM; until [ -x "$0" ]; do sleep 1 || exit; done; exec "$0" "$@"`, copied}

// Ports of a server pod behind a service: that of the workload, and one that answers as soon as the
// service works.
const (
	trafficPort = 7465
	probePort   = 7466
)

// Name of the container of every pod.
const container = "slipstream"

// run has what all objects of a run share.
type run struct {
	id    string
	spec  spec.Kubernetes
	image string
	pull  corev1.PullPolicy
	// namespace has the pods for traffic, and nodes those that need privileges.
	namespace, nodes string
	// inNamedNamespace: the user named the namespace, so the run neither creates nor deletes it.
	inNamedNamespace bool
	// tolerations of the pods on each node.
	tolerations map[string][]corev1.Toleration
}

func newRun(id string) *run {
	return &run{id: id, namespace: "slipstream-" + id, nodes: "slipstream-" + id + "-nodes"}
}

func (r *run) labels() map[string]string {
	return map[string]string{labelName: appName, labelComponent: runComponent, labelRun: r.id}
}

func (r *run) meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: r.labels()}
}

// name returns a name for an object that no other run uses: runs may share a namespace.
func (r *run) name(parts ...any) string {
	var b strings.Builder
	for _, p := range parts {
		fmt.Fprintf(&b, "%v-", p)
	}
	return b.String() + r.id
}

// within returns a name for an object that belongs to the named one.
func (r *run) within(name string, part any) string {
	return fmt.Sprintf("%s%v-%s", strings.TrimSuffix(name, r.id), part, r.id)
}

// namespaceObject is a namespace in which the API server enforces a Pod Security Standard.
func (r *run) namespaceObject(name, level string) *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: r.meta("", name)}
	for _, mode := range []string{"enforce", "audit", "warn"} {
		n.Labels["pod-security.kubernetes.io/"+mode] = level
	}
	return n
}

func (r *run) lease(holder string, nodes []string, seconds int32, now metav1.MicroTime) *coordinationv1.Lease {
	l := &coordinationv1.Lease{ObjectMeta: r.meta(r.namespace, r.name("run")), Spec: coordinationv1.LeaseSpec{
		HolderIdentity: &holder, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now,
	}}
	l.Annotations = map[string]string{annotationNodes: strings.Join(nodes, ",")}
	return l
}

// pod returns what all pods have in common: a container in which workers are started by exec, on one node.
func (r *run) pod(namespace, name, node string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: r.meta(namespace, name), Spec: corev1.PodSpec{
		// By affinity, as DaemonSets do it, and not by nodeName: the scheduler
		// then heeds taints and resources, and says why a pod does not fit.
		Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}},
		}},
		Tolerations:                   r.tolerations[node],
		AutomountServiceAccountToken:  new(bool),
		EnableServiceLinks:            new(bool),
		TerminationGracePeriodSeconds: new(int64(5)),
		Containers: []corev1.Container{{
			Name: container, Image: r.image, ImagePullPolicy: r.pull,
			Command: []string{program}, Args: []string{"worker", "--hold"},
			TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError, Resources: r.resources(),
		}},
	}}
	if r.spec.BaseImage != "" {
		c := &p.Spec.Containers[0]
		c.Command = await
		c.VolumeMounts = []corev1.VolumeMount{{Name: "program", MountPath: copyDir}}
		p.Spec.Volumes = []corev1.Volume{{Name: "program", VolumeSource: corev1.VolumeSource{
			EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: new(resource.MustParse("256Mi"))},
		}}}
	}
	p.Labels[labelPod] = name
	p.Annotations = map[string]string{"karpenter.sh/do-not-disrupt": "true"} // as Karpenter evicts pods without a controller
	return p
}

// programOf returns the path of the program in a pod.
func programOf(pod *corev1.Pod) string {
	command := pod.Spec.Containers[0].Command
	return command[len(command)-1]
}

// trafficPod returns a pod for traffic. Like an application, it has no privileges.
func (r *run) trafficPod(name, node string) *corev1.Pod {
	p := r.pod(r.namespace, name, node)
	p.Spec.SecurityContext = &corev1.PodSecurityContext{
		RunAsNonRoot: new(true), RunAsUser: new(int64(65532)), RunAsGroup: new(int64(65532)),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	c := &p.Spec.Containers[0]
	c.SecurityContext = &corev1.SecurityContext{
		AllowPrivilegeEscalation: new(bool), ReadOnlyRootFilesystem: new(true),
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
	return p
}

// resources returns the resources of every pod.
func (r *run) resources() (all corev1.ResourceRequirements) {
	amounts := corev1.ResourceList{}
	if cpu := r.spec.Resources.CPU; cpu != "" {
		amounts[corev1.ResourceCPU] = resource.MustParse(cpu) // api/v1alpha1 has checked it
	}
	if memory := r.spec.Resources.Memory; memory != "" {
		amounts[corev1.ResourceMemory] = resource.MustParse(memory)
	}
	if len(amounts) > 0 {
		all.Requests, all.Limits = amounts, amounts
	}
	return all
}

// serverPod returns a traffic pod that can be reached through a service.
func (r *run) serverPod(name, node string, service bool) *corev1.Pod {
	p := r.trafficPod(name, node)
	if service {
		c := &p.Spec.Containers[0]
		c.Args = append(c.Args, "--listen", fmt.Sprintf(":%d", probePort))
	}
	return p
}

// listens reports whether a pod is behind a service.
func listens(pod *corev1.Pod) bool { return slices.Contains(pod.Spec.Containers[0].Args, "--listen") }

// hostPod returns a traffic pod in the node's network namespace, for the native path. It does not differ
// otherwise.
func (r *run) hostPod(name, node string) *corev1.Pod {
	p := r.trafficPod(name, node)
	p.Namespace = r.nodes
	p.Spec.HostNetwork = true
	return p
}

// windowsPod is a hostPod on a Windows node: a host-process container, the only kind there that shares the
// node's network. It needs no base image of the node's version of Windows.
func (r *run) windowsPod(name, node string) *corev1.Pod {
	p := r.pod(r.nodes, name, node)
	p.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
	p.Spec.HostNetwork = true
	p.Spec.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{
		HostProcess: new(true), RunAsUserName: new(`NT AUTHORITY\LocalService`), // the least of the accounts that need no password
	}}
	c := &p.Spec.Containers[0]
	c.Command = []string{windowsProgram}
	return p
}

// runDir holds the node's journal of what accelerators have changed.
const runDir = "/run/slipstream"

// nodePod samples counters and applies accelerators, on its node and in the pods there. It is
// privileged, and runs no traffic.
func (r *run) nodePod(name, node string) *corev1.Pod {
	p := r.pod(r.nodes, name, node)
	p.Spec.HostNetwork, p.Spec.HostPID = true, true
	p.Spec.TerminationGracePeriodSeconds = new(int64(30)) // for restoring what a dead worker has left
	p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64), RunAsGroup: new(int64)}
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "journal", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: runDir, Type: new(corev1.HostPathDirectoryOrCreate)},
	}})
	c := &p.Spec.Containers[0]
	c.Args = append(c.Args, "--node")
	c.SecurityContext = &corev1.SecurityContext{Privileged: new(true), ReadOnlyRootFilesystem: new(true)}
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "journal", MountPath: runDir})
	return p
}

// service is in front of one server pod, dual-stack if the cluster is.
func (r *run) service(pod string) *corev1.Service {
	return &corev1.Service{ObjectMeta: r.meta(r.namespace, pod), Spec: corev1.ServiceSpec{
		Selector:       map[string]string{labelPod: pod},
		IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack),
		Ports: []corev1.ServicePort{
			servicePort("tcp", corev1.ProtocolTCP, trafficPort),
			servicePort("udp", corev1.ProtocolUDP, trafficPort),
			servicePort("probe", corev1.ProtocolTCP, probePort),
		},
	}}
}

func servicePort(name string, protocol corev1.Protocol, number int32) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: protocol, Port: number, TargetPort: intstr.FromInt32(number)}
}

// unpublished is the repository of images that are only where they were loaded.
const unpublished = "slipstream.dev/slipstream"

// imageOf returns the image of the pods, and when to pull it: only an image that the user named or a release has published may
// be pulled.
func imageOf(c Config) (string, corev1.PullPolicy) {
	if named := cmp.Or(c.Spec.Image, c.Spec.BaseImage); named != "" {
		return named, corev1.PullIfNotPresent
	}
	repository, tag := cmp.Or(c.Repository, unpublished), cmp.Or(c.Version, "devel")
	if repository == unpublished {
		return repository + ":" + tag, corev1.PullNever
	}
	return repository + ":" + tag, corev1.PullIfNotPresent
}
