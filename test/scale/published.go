//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/gonum/stat"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"slipstream.dev/internal/report/draw"
)

// published is a scale test of 1,000 nodes from "Azure CNI with Cilium: Most scalable and performant container networking in the
// Cloud" (Microsoft, Azure blog, 2023), and what that text says about Cilium's agent in it.
type published struct {
	name string
	// podsPerNode is the number of pods that each node has in the end. The figures hold once it has from of them.
	podsPerNode, from int
	policies          int // NetworkPolicies
	// podsPerService is 0 without services. There are as many services as nodes: 1,000.
	podsPerService  int
	millicores, mib float64
}

// allPublished are its three tests.
var allPublished = []published{
	{name: "pods", podsPerNode: 100, from: 20, millicores: 100, mib: 500},
	{name: "policies", podsPerNode: 100, from: 20, policies: 2000, millicores: 150, mib: 1024},
	{name: "services", podsPerNode: 60, from: 60, policies: 2000, podsPerService: 60, millicores: 200, mib: 1024},
}

func publishedOf(name string) (published, error) {
	var names []string
	for _, p := range allPublished {
		if p.name == name {
			return p, nil
		}
		names = append(names, p.name)
	}
	return published{}, fmt.Errorf("the scenario must be one of %s, is %q", strings.Join(names, ", "), name)
}

// steps is the number of phases in which the pods are created. The published text begins with the second of five.
const steps = 10

// scenarios returns the phases of the test.
func (t published) scenarios() []scenario {
	all := []scenario{{"start", start, nil}, {"policy with pods", policyWithPods(0), nil}}
	if t.policies > 0 {
		all = append(all, scenario{"network policies", t.createPolicies, nil})
	}
	for step := range steps {
		all = append(all, scenario{fmt.Sprintf("to %d pods per node", t.podsPerNode*(step+1)/steps), t.grow, growthLimits})
	}
	return all
}

// growthLimits checks the real agent against the limits that it has while the pods of a block are created.
func growthLimits(_ *fleet, p phase) []string {
	if p.Seconds < 60 {
		return nil // it depends on when the agent returns memory
	}
	return soloUse(p)
}

// createPolicies creates policies that all select the pods of the test.
func (t published) createPolicies(ctx context.Context, f *fleet) ([]time.Duration, error) {
	indices := make([]int, t.policies)
	for i := range indices {
		indices[i] = i
	}
	policies := f.admin.NetworkingV1().NetworkPolicies(metav1.NamespaceDefault)
	return nil, inParallel(indices, func(i int) error {
		port := intstr.FromInt(1024 + i)
		_, err := policies.Create(ctx, &networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("policy-%d", i)},
			Spec: networkingv1.NetworkPolicySpec{
				PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
				Ingress: []networkingv1.NetworkPolicyIngressRule{{
					From:  []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "client"}}}},
					Ports: []networkingv1.NetworkPolicyPort{{Port: &port}},
				}},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create a network policy: %w", err)
		}
		return nil
	})
}

// grow creates the pods of a phase, and adds them to their services at its end, as the controller of endpoints does in batches.
func (t published) grow(ctx context.Context, f *fleet) ([]time.Duration, error) {
	if err := f.addPods(ctx, t.podsPerNode/steps*f.size()); err != nil || t.podsPerService == 0 {
		return nil, err
	}
	services := make([]int, f.size())
	for i := range services {
		services[i] = i
	}
	return nil, inParallel(services, func(i int) error { return f.writeService(ctx, i, f.created == t.podsPerNode/steps*f.size()) })
}

// writeService creates a service, if it is new, and writes its endpoints. Pods are created on all nodes in turn, and the service has
// one pod of each turn. It has no selector, because the cluster has no controller of endpoints.
func (f *fleet) writeService(ctx context.Context, number int, isNew bool) error {
	name := fmt.Sprintf("service-%d", number)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: new(int32(80))}},
	}
	for turn := range f.created / f.size() {
		pod := turn*f.size() + (number+turn)%f.size() // on another node in each turn
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{podIP(pod)}})
	}
	slices := f.admin.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	if !isNew {
		_, err := slices.Update(ctx, slice, metav1.UpdateOptions{})
		return err
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	if _, err := f.admin.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, service, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create a service: %w", err)
	}
	_, err := slices.Create(ctx, slice, metav1.CreateOptions{})
	return err
}

// growth returns the phases in which pods were created, and how many pods a node had at the end of each.
func (r *result) growth() (phases []phase, podsPerNode []float64) {
	for _, p := range r.Phases {
		if p.Pods > 0 {
			phases, podsPerNode = append(phases, p), append(podsPerNode, float64(p.Pods)/float64(r.Nodes+1))
		}
	}
	return phases, podsPerNode
}

func millicores(p phase) float64 { return p.SoloMillicores }
func mib(p phase) float64        { return p.SoloMiB }

// slope returns by how much a figure of the real agent grows for each pod of its node.
func (r *result) slope(of func(phase) float64) float64 {
	phases, xs := r.growth()
	var ys []float64
	for _, p := range phases {
		ys = append(ys, of(p))
	}
	_, slope := stat.LinearRegression(xs, ys, nil, false)
	return slope
}

// drawResults draws the CPU time and the memory of the real agent, beside what was published of Cilium's, from the files of several
// scenarios.
func drawResults(prefix string, files []string) error {
	var all []result
	for _, file := range files {
		var r result
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &r)
		}
		if err != nil {
			return fmt.Errorf("read the result %s: %w", file, err)
		}
		all = append(all, r)
	}
	for _, figure := range []struct {
		name, unit string
		ours       func(phase) float64
		theirs     func(published) float64
	}{
		{"cpu", "millicores, mean of a minute", millicores, func(t published) float64 { return t.millicores }},
		{"memory", "MiB, mean of a minute", mib, func(t published) float64 { return t.mib }},
	} {
		lines, err := linesOf(all, figure.ours, figure.theirs)
		if err != nil {
			return err
		}
		lines.YTitle = figure.unit + "; Cilium's agent, which does more: as published"
		if err := os.WriteFile(prefix+"-"+figure.name+".svg", []byte(lines.Picture().SVG()), 0o644); err != nil {
			return fmt.Errorf("write a figure: %w", err)
		}
	}
	return nil
}

// linesOf returns a chart with two curves for each result: the real agent's, and Cilium's.
func linesOf(all []result, ours func(phase) float64, theirs func(published) float64) (draw.Lines, error) {
	l := draw.Lines{XTick: func(v float64) string { return fmt.Sprintf("%.0f", v) }}
	var cilium []draw.Curve
	var nodes []string
	for i, r := range all {
		t, err := publishedOf(r.Scenario)
		if err != nil {
			return l, err
		}
		nodes = append(nodes, strconv.Itoa(r.Nodes+1))
		style := draw.SeriesStyle(i)
		own := draw.Curve{Name: t.name, Style: style}
		phases, xs := r.growth()
		for j, p := range phases {
			own.Marks = append(own.Marks, draw.Mark{X: xs[j], Y: ours(p), Filled: true})
		}
		l.Curves = append(l.Curves, own)
		style.Dashed = true
		limit := draw.Curve{Name: "Cilium, " + t.name, Style: style}
		for _, x := range slices.Compact([]float64{float64(t.from), float64(t.podsPerNode)}) {
			limit.Marks = append(limit.Marks, draw.Mark{X: x, Y: theirs(t)})
			xs = append(xs, x)
		}
		cilium = append(cilium, limit)
		l.Xs = append(l.Xs, xs...)
	}
	slices.Sort(l.Xs)
	l.XTitle = fmt.Sprintf("pods per node (nodes: %s; Cilium: 1000)", strings.Join(slices.Compact(nodes), ", "))
	l.Xs, l.Curves = slices.Compact(l.Xs), append(l.Curves, cilium...)
	return l, nil
}
