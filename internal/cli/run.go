package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/examples"
	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/history"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/command"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
)

type runOptions struct {
	out, duration, resume string
	runs                  string
	label                 map[string]string
	set                   []string
	dryRun, list, yes     bool
	on                    string
	clusters              []string
	kube                  kubeOptions
	hosts                 hostOptions
	format, progress      outputFormat
	stdin                 io.Reader
}

func runCommand(p Process) *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:        "run [PRESET|FILE|-]",
		SuggestFor: []string{"start", "bench", "benchmark", "measure"},
		Short:      "Run an experiment, report what it proves, and restore the machine",
		Long: `Run the experiment of a preset or file, report what it proves, and restore the
machine. In a lab, variants that this machine cannot apply are left out, and the
report says why; the run fails if --set or an expectation names one of them, or
if nothing is left to compare. After Ctrl-C the run stops, restores the machine,
and reports what it has measured.`,
		Example: `  slipstream run demo                 what VXLAN costs here, and what RPS, RFS and the fast path give back
  slipstream run --list               the presets
  slipstream run demo --dry-run       the plan, and how long it takes
  slipstream run my.yaml --runs 10 --set spec.pairs=[1,8]
  slipstream run kubernetes --client-node a --server-node b --image registry.example/slipstream:v1
  slipstream run kubernetes-short --base-image registry.example/busybox:1.37
  slipstream run rps-rfs --on kubernetes --image registry.example/slipstream:v1
  slipstream run cni --clusters a,b        two clusters, by their contexts
  slipstream run my.yaml --on hosts:a,b     on two machines, by their names in ~/.ssh/config
  slipstream run demo --label branch=main --label commit=$(git rev-parse HEAD)
  slipstream run --resume results/demo-20260102T150405Z`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if o.list {
				if len(args) > 0 {
					return usage(fmt.Errorf("--list lists all presets; for what %s does: slipstream run %[1]s --dry-run", args[0]))
				}
				return listPresets(p.Out, o.format)
			}
			o.stdin = p.Stdin
			if o.format != asText && !o.dryRun {
				return usage(errors.New("--format is for --list and --dry-run; a run writes summary.json into its results folder"))
			}
			if o.progress == asJSON {
				return runForProgram(c.Context(), p, o, args)
			}
			return run(c.Context(), p, o, args)
		},
	}
	f := c.Flags()
	f.StringVar(&o.out, "out", resultsDir, "folder in which to create the results folder")
	f.StringVar(&o.runs, "runs", "", "number of blocks, each of which runs every variant; or auto")
	f.StringToStringVar(&o.label, "label", nil, "keep KEY=VALUE with the result, for history, trend and compare --against; more than one: branch=main,commit=1a2b3c")
	f.StringVar(&o.duration, "duration", "", "measurement window of every trial, such as 5s")
	f.StringArrayVar(&o.set, "set", nil, "override a field of the experiment: spec.pairs=[1,4]")
	f.BoolVar(&o.dryRun, "dry-run", false, "print the plan and how long it takes, check what a cluster or hosts lack, and change nothing")
	f.StringVar(&o.resume, "resume", "", "resume the interrupted run of this results folder")
	f.BoolVar(&o.yes, "yes", false, "with --resume: run the commands and the image of a results folder that may be somebody else's")
	f.BoolVar(&o.list, "list", false, "list the presets and how long each takes")
	f.StringSliceVar(&o.clusters, "clusters", nil, "run every variant in each of these clusters, and compare them: contexts of the kubeconfig, or NAME=CONTEXT")
	f.StringVar(&o.on, "on", "", "replace the target of the experiment: lab, kubernetes (its pod network replaces VXLAN) or hosts:CLIENT,SERVER (each host is [USER@]NAME[:PORT], and gets the labels and price of the experiment's host in the same place)")
	o.format.addFlag(f)
	o.progress = asText
	f.Var(&o.progress, "progress", "what stderr gets: text, or json for programs, a line for each event")
	o.kube.addFlags(f)
	o.hosts.addFlags(f)
	c.ValidArgsFunction = completePresets
	return c
}

// completePresets completes the name of a preset or file.
func completePresets(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var all []string
	for _, name := range examples.Names() {
		all = append(all, name+"\t"+examples.Description(name))
	}
	return all, cobra.ShellCompDirectiveDefault
}

// override is a field of the experiment that a flag sets. The flag is empty for --set, which errors
// name anyway.
type override struct{ flag, value, field string }

// load reads the experiment that a run names.
func (o runOptions) load(args []string) (*spec.Experiment, error) {
	if len(args) == 0 {
		return nil, fmt.Errorf("name a preset (slipstream run --list) or a file")
	}
	name := args[0]
	data, err := readSource(name, o.stdin)
	if err != nil {
		return nil, err
	}
	name = sourceName(name)
	flags, err := onOverrides(o.on, name, data)
	if err != nil {
		return nil, err
	}
	for _, field := range o.set { // which may change the target of --on
		flags = append(flags, override{field: field})
	}
	cluster, err := o.kube.overrides()
	if err != nil {
		return nil, err
	}
	forCluster := o.kube.accessFlags()
	for _, f := range cluster {
		forCluster = append(forCluster, f.flag)
	}
	if len(forCluster) > 0 {
		exp, err := parseWith(name, data, flags)
		if err == nil { // otherwise it is reported below
			if err := checkInCluster(forCluster[0], name, exp); err != nil {
				return nil, err
			}
		}
	}
	flags = append(flags, cluster...)
	if o.runs != "" {
		flags = append(flags, override{"--runs", o.runs, "spec.runs=" + o.runs})
	}
	exp, err := parseWith(name, data, flags)
	if _, ok := examples.Preset(name); err != nil && ok && o.on != "" && !runsOn(o.on, name) {
		return nil, refusedOn(o.on, name, err)
	}
	if err == nil && o.duration != "" {
		for _, w := range exp.Spec.Workloads {
			flags = append(flags, override{"--duration", o.duration, fmt.Sprintf("spec.workloads.%s.%s.duration=%s", w.Name, w.Kind(), o.duration)})
		}
		exp, err = parseWith(name, data, flags)
	}
	if err != nil || o.clusters == nil {
		return exp, err
	}
	across, err := acrossClusters(o.clusters, name, exp)
	if err != nil {
		return nil, err
	}
	return parseWith(name, data, append(flags, across...))
}

// checkInCluster returns an error if a flag is for runs in a cluster, and the experiment runs elsewhere.
func checkInCluster(flag, name string, exp *spec.Experiment) error {
	if exp.Spec.Target.Kubernetes != nil {
		return nil
	}
	where := "in a lab of this machine"
	if exp.Spec.Target.Hosts != nil {
		where = "on hosts"
	}
	return fmt.Errorf("%s is for runs in a cluster, and %s runs %s", flag, name, where)
}

// parseWith reads an experiment and applies flags in their order. Its errors name the flag, each once.
func parseWith(name string, data []byte, flags []override) (*spec.Experiment, error) {
	var all []string
	for _, f := range flags {
		all = append(all, f.field)
	}
	exp, err := spec.Parse(name, data, all)
	var problems spec.Errors
	if !errors.As(err, &problems) {
		return exp, err
	}
	for _, p := range problems {
		for _, f := range flags {
			if f.flag != "" && p.Override == f.field {
				p.Flag = f.flag + " " + f.value
			}
		}
	}
	return nil, slices.CompactFunc(problems, func(a, b *spec.Error) bool { return a.Flag != "" && a.Error() == b.Error() })
}

func run(ctx context.Context, p Process, o runOptions, args []string) error {
	if o.resume != "" {
		changes, err := o.kube.overrides()
		if err != nil || len(changes) > 0 || len(args) > 0 || o.on != "" || o.clusters != nil || o.runs != "" || o.duration != "" || len(o.set) > 0 || len(o.label) > 0 {
			return usage(errors.New("--resume continues the experiment of its results folder: give it no preset or file, and no flag that changes the experiment or its labels"))
		}
		return resume(ctx, p, o)
	}
	if o.yes {
		return usage(errors.New("--yes is for --resume only: add --resume, or leave out --yes"))
	}
	exp, err := o.load(args)
	if err != nil {
		return usage(err)
	}
	if err := checkRunnable(exp); err != nil {
		return usage(err)
	}
	if exp.Spec.Seed == 0 {
		exp.Spec.Seed = rand.Uint64N(1<<53) + 1 // exact in JSON and YAML everywhere
	}
	unset := checkSet(exp)
	if o.dryRun {
		return asRun(dryRun(ctx, p, o, exp, experiment.New(exp).Outline()), unset)
	}
	if unset != nil {
		return usage(unset)
	}
	if err := checkNothingSwitched(o.out); err != nil {
		return err
	}
	progress := newProgress(p)
	at, err := openSite(ctx, p, o, exp, progress.note)
	if err != nil {
		return err
	}
	defer at.release()
	if err := checkWritable(o.out); err != nil {
		return err
	}
	leftOut, err := leaveOut(ctx, at, exp, o.set, progress.note)
	if err != nil {
		return err
	}
	resolved, err := spec.Marshal(exp)
	if err != nil {
		return err
	}
	measured := measuredBy(exp) // of the experiment that the folder gets
	create := func(env record.Environment) (*record.Dir, error) {
		env.Version, env.Started, env.Command, env.LeftOut = p.Version, time.Now().UTC(), shell.Join(p.Args), leftOut
		env.Experiment, env.Labels = measured, o.label
		dir, err := record.Create(o.out, exp.Metadata.Name, time.Now(), resolved, env)
		if err == nil {
			noteFuture(dir.Path, progress.note)
		}
		return dir, elsewhere(err)
	}
	return measure(ctx, p, at, exp, experiment.New(exp), nil, progress, create)
}

// noteFuture notes a result that counts as newer than the one at a path, which has just begun.
func noteFuture(path string, note func(string)) {
	all, _ := history.Names(filepath.Dir(path)) // a folder that cannot be read has no other results
	if len(all) > 0 && history.Started(all[0]).After(history.Started(filepath.Base(path))) {
		note(fmt.Sprintf("the name of %s has a time in the future: was this machine's clock set back? Until that time it counts as the newest result, also for %q", all[0], latest))
	}
}

// checkWritable makes the folder for results, and returns an error if no file can be written to it. Without this check,
// the run would fail only after the lab or the hosts are ready.
func checkWritable(out string) error {
	err := os.MkdirAll(out, 0o755)
	var f *os.File
	if err == nil {
		f, err = os.CreateTemp(out, ".slipstream-")
	}
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		return elsewhere(fmt.Errorf("create results folder: %w", err))
	}
	return nil
}

// elsewhere adds to an error how to choose another folder for results, if that helps.
func elsewhere(err error) error {
	if place.NoSpace(err) || errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%w (--out names another folder)", err)
	}
	return err
}

// checkRunnable returns an error if an experiment cannot be run.
func checkRunnable(exp *spec.Experiment) error {
	if exp.Spec.Target.Imported != nil {
		return fmt.Errorf("%s was imported: other programs have measured it, and there is nothing to run; slipstream report shows the result", exp.Metadata.Name)
	}
	return nil
}

// checkSet returns an error if a parameter of an experiment has no value.
func checkSet(exp *spec.Experiment) error {
	unset := exp.Unset()
	if len(unset) == 0 {
		return nil
	}
	var flags []string
	for _, name := range unset {
		flags = append(flags, "--set spec.parameters."+name+"=VALUE")
	}
	return fmt.Errorf("the commands of the switch need a value for {%s}: %s", strings.Join(unset, "}, {"), strings.Join(flags, " "))
}

// leaveOut removes the variants that the site cannot apply from an experiment, and notes each.
func leaveOut(ctx context.Context, at *site, exp *spec.Experiment, set []string, note func(string)) ([]record.LeftOut, error) {
	if at.probe == nil {
		return nil, nil
	}
	leftOut, err := experiment.LeaveOut(exp, namedBy(set, exp), at.probe(ctx), at.probePath)
	if ctx.Err() != nil { // which may be why a probe failed
		return nil, ctx.Err()
	}
	for _, l := range leftOut {
		note("left out here: " + l.String())
	}
	return leftOut, err
}

// namedBy maps the variants that --set names to the flag.
func namedBy(set []string, exp *spec.Experiment) map[string]string {
	named := map[string]string{}
	for _, text := range set {
		field := spec.FieldOf(text)
		for i, v := range exp.Spec.Variants {
			for _, element := range []string{v.Name, strconv.Itoa(i)} {
				if at := "spec.variants." + element; field == "spec.variants" || field == at || strings.HasPrefix(field, at+".") {
					named[v.Name] = "--set " + text
				}
			}
		}
	}
	return named
}

// survey is the result of a dry run in a cluster or on hosts.
type survey struct {
	// found is for JSON, and print shows it to a person.
	found any
	print func(io.Writer) error
	// missing says what would make a run fail, and what to do about it.
	missing []string
	// unchecked says what only a run can show.
	unchecked string
}

// dryRun shows a plan and, for a cluster or hosts, whether anything is missing for it.
func dryRun(ctx context.Context, p Process, o runOptions, exp *spec.Experiment, outline experiment.Outline) error {
	if o.format == asText {
		if err := outline.Print(p.Out); err != nil {
			return err
		}
	}
	var found *survey
	var err error
	switch {
	case exp.Spec.Target.Kubernetes != nil:
		found, err = surveyClusters(ctx, p, o.kube, o.hosts.binaries, exp)
	case exp.Spec.Target.Hosts != nil:
		found, err = surveyHosts(ctx, p, o.hosts, exp)
	}
	switch {
	case err != nil:
		return err
	case o.format == asJSON:
		err = found.writeJSON(p.Out, outline, exp.Unset())
	case found != nil:
		err = found.write(p.Out)
	}
	if err == nil && found != nil && len(found.missing) > 0 {
		err = errors.New("a run would fail. Missing:\n  " + strings.Join(found.missing, "\n  "))
	}
	return err
}

func (s *survey) write(w io.Writer) error {
	if err := s.print(w); err != nil || len(s.missing) > 0 {
		return err
	}
	_, err := fmt.Fprintf(w, "\nNothing is missing, as far as can be checked without %s.\n", s.unchecked)
	return err
}

// asRun adds to the result of a dry run the error, if any, with which a run would refuse the same command line, and makes it a
// usage error, as in a run.
func asRun(found, refused error) error {
	if refused != nil {
		return usage(errors.Join(found, refused))
	}
	return found
}

// writeJSON writes a plan, the parameters without a value, and what was found for the plan; s is nil in a lab.
func (s *survey) writeJSON(w io.Writer, plan experiment.Outline, unset []string) error {
	all := struct {
		Plan experiment.Outline `json:"plan"`
		// Unset are parameters of the experiment that need a value.
		Unset   []string `json:"unset,omitempty"`
		Found   any      `json:"found,omitempty"`
		Missing []string `json:"missing,omitempty"`
	}{Plan: plan, Unset: unset}
	if s != nil {
		all.Found, all.Missing = s.found, s.missing
	}
	return writeJSON(w, all)
}

// checkNothingSwitched returns an error if a run in a folder below out has not undone its switch.
func checkNothingSwitched(out string) error {
	left, err := record.LeftSwitched(out)
	if err != nil || len(left) == 0 {
		return err
	}
	unfinished := fmt.Errorf("the run in %s has not undone its switch: if that run is in progress, wait for it; otherwise continue it with slipstream run --resume %[1]s, or undo the switch with slipstream cleanup %[1]s", shell.Quote(left[0]))
	dir, err := record.Open(left[0])
	if err != nil {
		return fmt.Errorf("%w, or move the folder away if it is not yours: %w", unfinished, err)
	}
	defer dir.Close()
	if err := dir.Foreign(); err != nil {
		return fmt.Errorf("%w. The folder may be somebody else's: %w. If it is not from a run on this machine, move it away", unfinished, err)
	}
	return unfinished
}

func resume(ctx context.Context, p Process, o runOptions) error {
	open := record.Resume
	if o.dryRun {
		open = record.OpenLocked
	}
	path, err := findResult(o.resume)
	if err != nil {
		return usage(err)
	}
	dir, err := open(path)
	if err != nil {
		return usage(err)
	}
	defer dir.Close()
	foreign := dir.Foreign() // before anything in the folder is read
	exp, trials, err := readExperiment(dir)
	if err != nil {
		return err
	}
	if err := checkRunnable(exp); err != nil {
		return usage(err)
	}
	now := record.Environment{Version: p.Version, Experiment: measuredBy(exp)}
	resumable := errors.Join(checkResumable(dir, now), checkSet(exp))
	plan := experiment.New(exp)
	if o.dryRun {
		outline := plan.Outline()
		outline.Done = experiment.Finished(trials)
		return asRun(dryRun(ctx, p, o, exp, outline), resumable)
	}
	if !o.yes {
		if err := checkPrograms(exp, foreign); err != nil {
			return err
		}
	}
	progress := newProgress(p)
	if err := undoSwitch(ctx, dir, exp, progress.note); err != nil {
		return err
	}
	if resumable != nil { // what was switched is undone all the same
		return usage(resumable)
	}
	at, err := openSite(ctx, p, o, exp, progress.note)
	if err != nil {
		return err
	}
	defer at.release()
	same := func(started record.Environment) (*record.Dir, error) {
		now.Nodes, now.Clusters = started.Nodes, started.Clusters
		if err := checkResumable(dir, now); err != nil {
			return nil, err
		}
		return dir, nil
	}
	return measure(ctx, p, at, exp, plan, trials, progress, same)
}

// measuredBy returns a hash of the parts of an experiment that determine a trial. It leaves out the number of trials,
// and how they are judged.
func measuredBy(exp *spec.Experiment) string {
	measured := *exp
	s := &measured.Spec
	s.Runs, s.Margin, s.Precision, s.Expect, s.Published, s.Series = spec.Runs{}, 0, 0, nil, nil, nil
	text, err := json.Marshal(measured)
	if err != nil {
		panic(err) // every Experiment is valid JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// checkResumable returns an error if a run must not be resumed in its current environment, because its trials would be
// pooled with those of another program, kernel or experiment.
func checkResumable(dir *record.Dir, now record.Environment) error {
	was, err := dir.Environment()
	if err != nil {
		return err
	}
	if was.Version != now.Version {
		return fmt.Errorf("the run was begun by slipstream %s, and this is %s: resume it with that version, or start a new run", was.Version, now.Version)
	}
	if was.Experiment != "" && was.Experiment != now.Experiment {
		return fmt.Errorf("%s has changed since the run began, so its trials cannot be pooled with new ones: undo the change, or start a new run", filepath.Join(dir.Path, "experiment.yaml"))
	}
	for _, n := range was.Nodes {
		i := slices.IndexFunc(now.Nodes, func(other record.Node) bool { return other.Name == n.Name })
		// A node of a mesh that does not answer has no kernel.
		if i >= 0 && n.Kernel != "" && now.Nodes[i].Kernel != "" && now.Nodes[i].Kernel != n.Kernel {
			return fmt.Errorf("%s had the kernel %s when the run began, and has %s now: its trials cannot be pooled with new ones, so start a new run", n.Name, n.Kernel, now.Nodes[i].Kernel)
		}
	}
	return checkSameNetworks(was.Clusters, now.Clusters)
}

// undoSwitch undoes the switch of a run that was killed.
func undoSwitch(ctx context.Context, dir *record.Dir, exp *spec.Experiment, note func(string)) error {
	variant, err := dir.SwitchedVariant()
	if err != nil || variant == "" {
		return err
	}
	return experiment.UndoSwitch(ctx, exp, variant, command.Run, dir, note)
}

// site is where an experiment runs.
type site struct {
	target experiment.Target
	// probe returns a function that returns an error if the site cannot apply an accelerator. It is nil
	// for a cluster and hosts, where the first trial shows it.
	probe func(context.Context) func(v1alpha1.Accelerator) error
	// probePath returns an error if the site cannot make a path. It is nil if the site can make all
	// paths, or if the first trial shows it.
	probePath func(spec.Path) error
	// restore reverts the settings that dead workers have left.
	restore func(context.Context) error
	release func()
}

// openSite reserves the site for this process, and fills in the parts of the experiment that depend on the site.
func openSite(ctx context.Context, p Process, o runOptions, exp *spec.Experiment, note func(string)) (*site, error) {
	if exp.Spec.Target.Kubernetes != nil {
		t, err := newKubeTargets(ctx, p, o.kube, o.hosts.binaries, exp, note)
		if err != nil {
			return nil, err
		}
		// The pods on the nodes restore settings.
		return &site{target: t, restore: func(context.Context) error { return nil }, release: func() {}}, nil
	}
	if exp.Spec.Target.Hosts != nil {
		// A network of hosts restores their settings.
		return &site{target: newHostTarget(p, o.hosts, exp, note), restore: func(context.Context) error { return nil }, release: func() {}}, nil
	}
	return openLab(ctx, p, exp)
}

// measure runs a plan, restores the machine, and reports the trials, even if the plan was not finished.
func measure(ctx context.Context, p Process, at *site, exp *spec.Experiment, plan *experiment.Plan, done []record.Trial, progress progress, open func(record.Environment) (*record.Dir, error)) error {
	defer context.AfterFunc(ctx, func() {
		progress.note("stopping: restoring settings and reporting what was measured; interrupt again to skip the report")
	})()
	r, err := experiment.Start(ctx, plan, at.target, command.Run, fmt.Sprintf("run %s, pid %d", exp.Metadata.Name, os.Getpid()), done, progress.show)
	if err != nil {
		return err
	}
	var trials []record.Trial
	dir, err := open(r.Environment())
	if err == nil {
		defer dir.Close()
		progress.results(dir.Path)
		trials, err = r.Measure(ctx, dir)
	}
	unfinished := err != nil && !errors.Is(err, experiment.ErrMissing)
	progress.end()
	if dir != nil {
		if variant, _ := dir.SwitchedVariant(); variant != "" {
			err = errors.Join(err, fmt.Errorf("the switch of %s could not be undone; to try again: slipstream cleanup %s", variant, shell.Quote(dir.Path)))
		}
	}
	// The journal has the machine-wide settings of a dead worker.
	if restoreErr := errors.Join(r.Close(), at.restore(context.WithoutCancel(ctx))); restoreErr != nil {
		err = errors.Join(err, fmt.Errorf("restore settings: %w", restoreErr))
	}
	if dir == nil {
		return err
	}
	select {
	case <-p.Hurry:
		return err
	default:
	}
	var m *report.Model
	if len(trials) > 0 && !errors.Is(err, record.ErrRemoved) {
		var failed error
		m, failed = render(dir, p)
		err = errors.Join(err, failed)
	}
	switch {
	case errors.Is(err, record.ErrRemoved): // there is nothing to resume
	case place.NoSpace(err):
		progress.note("once there is space: slipstream run --resume " + shell.Quote(dir.Path))
	case unfinished:
		progress.note("to resume: slipstream run --resume " + shell.Quote(dir.Path))
	case m != nil:
		printNext(dir, m, p)
		if err == nil {
			err = checkExpectations(m)
		}
	}
	return err
}
