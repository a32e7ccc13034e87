package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

type policyOptions struct {
	out, selector     string
	all, host, anyway bool
}

func policyCommand(p Process) *cobra.Command {
	var o policyOptions
	c := &cobra.Command{
		Use:   "policy RESULT VARIANT",
		Short: "Write a policy that applies a variant proven faster",
		Long: `Write the AccelerationPolicy that applies the accelerators of a variant, with
the proof in its annotations. Choose where it applies: --host for a host without
Kubernetes (slipstream agent --policy FILE), --node-selector or --all for a
cluster.

Without --anyway, it writes no policy for a variant that is slower than its
baseline in a primary metric of any workload and number of pairs (exit code 3),
or that is faster in none (exit code 4). Primary metrics are the throughput of a
stream and the median latency of everything else (of a pingpong by qperf the
mean). For a variant without a finished trial it never writes one (exit code 4).`,
		Example: `  slipstream policy results/demo-20260102T150405Z fastpath --host -o policy.yaml
  slipstream policy results/kubernetes-20260102T150405Z fastpath --node-selector pool=net | kubectl apply -f -`,
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			return o.run(p, args[0], args[1])
		},
		ValidArgsFunction: completeVariants,
	}
	f := c.Flags()
	f.StringVarP(&o.out, "output", "o", "", "file to write (default standard output)")
	f.BoolVar(&o.host, "host", false, "for a host without Kubernetes")
	f.StringVar(&o.selector, "node-selector", "", "for the nodes of a cluster with these labels: KEY=VALUE[,KEY=VALUE…]")
	f.BoolVar(&o.all, "all", false, "for every node of a cluster")
	f.BoolVar(&o.anyway, "anyway", false, "write the policy even if the variant is slower somewhere, or not proven faster")
	return c
}

func (o policyOptions) run(p Process, folder, variant string) error {
	dir, err := openResult(folder)
	if err != nil {
		return err
	}
	defer dir.Close()
	exp, trials, err := readExperiment(dir)
	if err != nil {
		return err
	}
	summary, err := analyze(dir, exp, trials)
	if err != nil {
		return err
	}
	policy, err := exp.PolicyOf(variant)
	if err != nil {
		return usage(fmt.Errorf("%s: %w", folder, err))
	}
	if err := o.setNodes(policy); err != nil {
		return usage(err)
	}
	env, err := dir.Environment()
	if err != nil {
		return err
	}
	v, err := exp.VariantOf(variant)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(trials, func(t record.Trial) bool { return t.Variant == variant && t.Status == record.StatusOK }) {
		return exitError{code: exitInconclusive, err: fmt.Errorf("%s has no finished trial of %s, so there is nothing to base a policy on: continue the run (slipstream run --resume %s), or write a policy by hand",
			folder, variant, shell.Quote(dir.Path))}
	}
	proof := summary.Proof(exp, *v)
	code, doubt := reasonNotToKeep(proof)
	if doubt != "" && !o.anyway {
		return exitError{code: code, err: fmt.Errorf("%s; to write the policy nevertheless, add --anyway", doubt)}
	}
	policy.Annotations = annotations(dir, exp, env, proof)
	notes := o.notes(exp, proof)
	if doubt != "" {
		policy.Annotations[annotation+"despite"] = plain.Line(doubt)
	}
	if summary.Unfinished != "" {
		policy.Annotations[annotation+"unfinished"] = summary.Unfinished
		notes = append(notes, "the run is unfinished: "+summary.Unfinished)
	}
	text, err := spec.MarshalPolicy(policy)
	if err != nil {
		return err
	}
	for _, note := range notes {
		fmt.Fprintln(p.Err, "note:", plain.Line(note))
	}
	if o.out == "" {
		_, err := p.Out.Write(text)
		return err
	}
	if err := os.WriteFile(o.out, text, 0o644); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	next := "kubectl apply -f "
	if o.host {
		next = "slipstream agent --policy "
	}
	fmt.Fprintf(p.Err, "%s is written. Next: %s%s\n", o.out, next, shell.Quote(o.out))
	return nil
}

// setNodes sets the nodes of a policy.
func (o policyOptions) setNodes(p *v1alpha1.AccelerationPolicy) (err error) {
	if said := slices.DeleteFunc([]bool{o.host, o.all, o.selector != ""}, func(b bool) bool { return !b }); len(said) != 1 {
		return errors.New(`choose where the policy applies, by one of
  --host                       a host without Kubernetes
  --node-selector KEY=VALUE    the nodes of a cluster that have the label
  --all                        every node of a cluster`)
	}
	p.Spec.All = o.all
	if o.selector != "" {
		if p.Spec.NodeSelector, err = spec.ParseLabels(o.selector); err != nil {
			return fmt.Errorf("--node-selector: %w", err)
		}
	}
	return nil
}

// reasonNotToKeep returns the reason against applying a variant, if there is one, with its exit code.
func reasonNotToKeep(p stats.Proof) (code int, why string) {
	switch {
	case len(p.Slower) > 0:
		return exitSlower, fmt.Sprintf("%s is slower than %s: %s", p.Variant, p.Baseline, says(p.Slower))
	case len(p.All) == 0:
		return exitInconclusive, fmt.Sprintf("not proven: %s was not compared with %s in any trial", p.Variant, p.Baseline)
	case len(p.Faster) == 0:
		best := p.Best()
		return exitInconclusive, fmt.Sprintf("not proven: no comparison shows %s to be faster than %s; the best is %s (%s); more blocks may settle it (slipstream run … --runs 20)",
			p.Variant, p.Baseline, report.Describe(best), verdictWords[best.Versus.Verdict])
	}
	return exitGood, ""
}

var verdictWords = map[stats.Verdict]string{stats.Same: "no difference within the margin", stats.Inconclusive: "inconclusive"}

func says(rows []*stats.Row) string {
	var all []string
	for _, r := range rows {
		all = append(all, report.Describe(r))
	}
	return strings.Join(all, ", ")
}

// annotation is the prefix of the annotations with a policy's proof.
const annotation = v1alpha1.AnnotationPrefix

// annotations returns the measurements that a policy is based on, for people who find it
// later.
func annotations(dir *record.Dir, exp *spec.Experiment, env record.Environment, p stats.Proof) map[string]string {
	var kernels, cells []string
	for _, n := range env.Nodes {
		kernels = append(kernels, n.Kernel)
	}
	slices.Sort(kernels)
	for _, r := range p.All {
		cells = append(cells, fmt.Sprintf("%s (%s)", report.Describe(r), r.Versus.Verdict))
	}
	place := "lab"
	switch {
	case exp.Spec.Target.Kubernetes != nil:
		place = "kubernetes"
	case exp.Spec.Target.Hosts != nil:
		place = "hosts"
	}
	all := map[string]string{
		"result": folderName(dir), "measured": env.Started.UTC().Format(time.RFC3339), "measured-in": place,
		"variant": p.Variant, "baseline": p.Baseline,
		"proof": cmp.Or(strings.Join(cells, "; "), "none"),
	}
	if r := p.Best(); r != nil {
		all["workload"] = r.Workload
		all["pairs"] = strconv.Itoa(r.Pairs)
		all["metric"] = r.Metric
		all["ratio"] = fmt.Sprintf("%.3f", r.Versus.Ratio)
		all["interval"] = fmt.Sprintf("%.3f-%.3f", r.Versus.CI95[0], r.Versus.CI95[1])
		all["blocks"] = strconv.Itoa(r.Versus.N)
	}
	out := map[string]string{v1alpha1.AnnotationKernel: plain.Line(strings.Join(slices.Compact(kernels), v1alpha1.KernelSeparator))}
	for name, value := range all {
		out[annotation+name] = plain.Line(value)
	}
	return out
}

// notes returns remarks for a user who applies the variant.
func (o policyOptions) notes(exp *spec.Experiment, p stats.Proof) []string {
	var all []string
	if len(p.Costs) > 0 {
		all = append(all, p.Variant+" is worse in other metrics: "+says(p.Costs))
	}
	if len(p.Missing) > 0 && len(p.All) > 0 {
		all = append(all, "no comparison was measured for "+strings.Join(p.Missing, ", "))
	}
	if !o.host && exp.Spec.Target.Lab != nil {
		all = append(all, "this was measured in a lab, not in your cluster; to measure in the cluster: slipstream run kubernetes")
	}
	return all
}

// completeVariants completes a results folder, then its variants.
func completeVariants(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	dir, err := openResult(args[0])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer dir.Close()
	exp, err := experimentOf(dir)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, v := range exp.Spec.Variants {
		if _, err := exp.PolicyOf(v.Name); err == nil {
			names = append(names, v.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
