package kube

import (
	"cmp"
	"context"
	"net/url"

	authv1 "k8s.io/api/authentication/v1"
	authzv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"slipstream.dev/api/v1alpha1"
)

// api is the part of the Kubernetes API that a run and doctor use. client-go's clientset would do too, but links
// every kind of every group: 40 MB of program, most of which each worker would keep in memory.
type api interface {
	Nodes() objects[*corev1.Node, *corev1.NodeList]
	Namespaces() objects[*corev1.Namespace, *corev1.NamespaceList]
	ConfigMaps(namespace string) objects[*corev1.ConfigMap, *corev1.ConfigMapList]
	Pods(namespace string) objects[*corev1.Pod, *corev1.PodList]
	Services(namespace string) objects[*corev1.Service, *corev1.ServiceList]
	EndpointSlices(namespace string) objects[*discoveryv1.EndpointSlice, *discoveryv1.EndpointSliceList]
	Leases(namespace string) objects[*coordinationv1.Lease, *coordinationv1.LeaseList]
	// Quotas and NetworkPolicies limit what a namespace that the user names admits.
	Quotas(namespace string) objects[*corev1.ResourceQuota, *corev1.ResourceQuotaList]
	NetworkPolicies(namespace string) objects[*networkingv1.NetworkPolicy, *networkingv1.NetworkPolicyList]
	Events(namespace string) objects[*corev1.Event, *corev1.EventList]
	// Accelerations returns the states of agents.
	Accelerations(context.Context) (*v1alpha1.NodeAccelerationList, error)
	Policies(context.Context) (*v1alpha1.AccelerationPolicyList, error)
	// Allowed asks whether the user may do something; Self, who the user is.
	Allowed(context.Context, *authzv1.SelfSubjectAccessReview) (*authzv1.SelfSubjectAccessReview, error)
	Self(context.Context) (*authv1.SelfSubjectReview, error)
	// Exec returns the URL of a command in a pod.
	Exec(*corev1.Pod, *corev1.PodExecOptions) *url.URL
}

// objects accesses all objects of a kind, in one namespace if the kind is namespaced.
type objects[T, L any] interface {
	Get(context.Context, string, metav1.GetOptions) (T, error)
	List(context.Context, metav1.ListOptions) (L, error)
	Create(context.Context, T, metav1.CreateOptions) (T, error)
	Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (T, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// restAPI is the api of a real server.
type restAPI struct{ core, discovery, coordination, networking, authorization, authentication, own rest.Interface }

// kinds are the kinds that api uses, and parameters encodes options into URLs.
var kinds = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, coordinationv1.AddToScheme, networkingv1.AddToScheme, authzv1.AddToScheme, authv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err) // two kinds of one name: a bug in this file
		}
	}
	return s
}()

var parameters = runtime.NewParameterCodec(kinds)

func newAPI(config *rest.Config) (api, error) {
	client := func(gv schema.GroupVersion, path string) (rest.Interface, error) {
		c := rest.CopyConfig(config)
		c.GroupVersion, c.APIPath = &gv, path
		c.NegotiatedSerializer = serializer.NewCodecFactory(kinds).WithoutConversion()
		return rest.RESTClientFor(c)
	}
	var a restAPI
	var errs [7]error
	a.core, errs[0] = client(corev1.SchemeGroupVersion, "/api")
	a.coordination, errs[1] = client(coordinationv1.SchemeGroupVersion, "/apis")
	a.authorization, errs[2] = client(authzv1.SchemeGroupVersion, "/apis")
	a.authentication, errs[3] = client(authv1.SchemeGroupVersion, "/apis")
	a.own, errs[4] = client(v1alpha1.GroupVersion, "/apis")
	a.discovery, errs[5] = client(discoveryv1.SchemeGroupVersion, "/apis")
	a.networking, errs[6] = client(networkingv1.SchemeGroupVersion, "/apis")
	return a, cmp.Or(errs[:]...) // each says the same
}

func (a restAPI) Nodes() objects[*corev1.Node, *corev1.NodeList] {
	return client[corev1.Node, corev1.NodeList, *corev1.Node, *corev1.NodeList]{a.core, "nodes", ""}
}

func (a restAPI) Namespaces() objects[*corev1.Namespace, *corev1.NamespaceList] {
	return client[corev1.Namespace, corev1.NamespaceList, *corev1.Namespace, *corev1.NamespaceList]{a.core, "namespaces", ""}
}

func (a restAPI) ConfigMaps(namespace string) objects[*corev1.ConfigMap, *corev1.ConfigMapList] {
	return client[corev1.ConfigMap, corev1.ConfigMapList, *corev1.ConfigMap, *corev1.ConfigMapList]{a.core, "configmaps", namespace}
}

func (a restAPI) Pods(namespace string) objects[*corev1.Pod, *corev1.PodList] {
	return client[corev1.Pod, corev1.PodList, *corev1.Pod, *corev1.PodList]{a.core, "pods", namespace}
}

func (a restAPI) Services(namespace string) objects[*corev1.Service, *corev1.ServiceList] {
	return client[corev1.Service, corev1.ServiceList, *corev1.Service, *corev1.ServiceList]{a.core, "services", namespace}
}

func (a restAPI) EndpointSlices(namespace string) objects[*discoveryv1.EndpointSlice, *discoveryv1.EndpointSliceList] {
	return client[discoveryv1.EndpointSlice, discoveryv1.EndpointSliceList, *discoveryv1.EndpointSlice, *discoveryv1.EndpointSliceList]{a.discovery, "endpointslices", namespace}
}

func (a restAPI) Leases(namespace string) objects[*coordinationv1.Lease, *coordinationv1.LeaseList] {
	return client[coordinationv1.Lease, coordinationv1.LeaseList, *coordinationv1.Lease, *coordinationv1.LeaseList]{a.coordination, "leases", namespace}
}

func (a restAPI) Quotas(namespace string) objects[*corev1.ResourceQuota, *corev1.ResourceQuotaList] {
	return client[corev1.ResourceQuota, corev1.ResourceQuotaList, *corev1.ResourceQuota, *corev1.ResourceQuotaList]{a.core, "resourcequotas", namespace}
}

func (a restAPI) NetworkPolicies(namespace string) objects[*networkingv1.NetworkPolicy, *networkingv1.NetworkPolicyList] {
	return client[networkingv1.NetworkPolicy, networkingv1.NetworkPolicyList, *networkingv1.NetworkPolicy, *networkingv1.NetworkPolicyList]{a.networking, "networkpolicies", namespace}
}

func (a restAPI) Events(namespace string) objects[*corev1.Event, *corev1.EventList] {
	return client[corev1.Event, corev1.EventList, *corev1.Event, *corev1.EventList]{a.core, "events", namespace}
}

func (a restAPI) Policies(ctx context.Context) (*v1alpha1.AccelerationPolicyList, error) {
	out := new(v1alpha1.AccelerationPolicyList)
	return out, a.own.Get().Resource("accelerationpolicies").Do(ctx).Into(out)
}

func (a restAPI) Accelerations(ctx context.Context) (*v1alpha1.NodeAccelerationList, error) {
	out := new(v1alpha1.NodeAccelerationList)
	return out, a.own.Get().Resource("nodeaccelerations").Do(ctx).Into(out)
}

func (a restAPI) Allowed(ctx context.Context, review *authzv1.SelfSubjectAccessReview) (*authzv1.SelfSubjectAccessReview, error) {
	out := new(authzv1.SelfSubjectAccessReview)
	return out, a.authorization.Post().Resource("selfsubjectaccessreviews").Body(review).Do(ctx).Into(out)
}

func (a restAPI) Self(ctx context.Context) (*authv1.SelfSubjectReview, error) {
	out := new(authv1.SelfSubjectReview)
	return out, a.authentication.Post().Resource("selfsubjectreviews").Body(new(authv1.SelfSubjectReview)).Do(ctx).Into(out)
}

func (a restAPI) Exec(pod *corev1.Pod, options *corev1.PodExecOptions) *url.URL {
	return a.core.Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").VersionedParams(options, parameters).URL()
}

// pointer constrains a type to pointers to objects.
type pointer[T any] interface {
	*T
	runtime.Object
}

// client accesses the objects of one kind in a namespace; if that is empty, in all, or the kind is
// cluster-scoped.
type client[T, L any, PT pointer[T], PL pointer[L]] struct {
	rest                rest.Interface
	resource, namespace string
}

func (c client[T, L, PT, PL]) to(r *rest.Request) *rest.Request {
	return r.NamespaceIfScoped(c.namespace, c.namespace != "").Resource(c.resource)
}

func (c client[T, L, PT, PL]) Get(ctx context.Context, name string, o metav1.GetOptions) (PT, error) {
	out := PT(new(T))
	return out, c.to(c.rest.Get()).Name(name).VersionedParams(&o, parameters).Do(ctx).Into(out)
}

func (c client[T, L, PT, PL]) List(ctx context.Context, o metav1.ListOptions) (PL, error) {
	out := PL(new(L))
	return out, c.to(c.rest.Get()).VersionedParams(&o, parameters).Do(ctx).Into(out)
}

func (c client[T, L, PT, PL]) Create(ctx context.Context, object PT, o metav1.CreateOptions) (PT, error) {
	out := PT(new(T))
	return out, c.to(c.rest.Post()).VersionedParams(&o, parameters).Body(object).Do(ctx).Into(out)
}

func (c client[T, L, PT, PL]) Patch(ctx context.Context, name string, kind types.PatchType, patch []byte, o metav1.PatchOptions, subresources ...string) (PT, error) {
	out := PT(new(T))
	return out, c.to(c.rest.Patch(kind)).Name(name).SubResource(subresources...).VersionedParams(&o, parameters).Body(patch).Do(ctx).Into(out)
}

func (c client[T, L, PT, PL]) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	return c.to(c.rest.Delete()).Name(name).Body(&o).Do(ctx).Error()
}
