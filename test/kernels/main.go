// Command kernels boots Debian's kernels in QEMU. It prints on which of them the fast path works,
// and what the others lack. Package guest runs inside.
//
//	kernels [SUITE/ARCHITECTURE[/OPTION]]...
//
// OPTION is a parameter of the kernel's command line. Without arguments the command boots all
// machines of expected.txt. It fails if a result differs from that file.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"slipstream.dev/test/kernels/report"
)

var (
	// The packages that hold the kernel and its modules, without those that install it.
	kernelPackages = regexp.MustCompile(`^linux-(image|binary|modules)-`)
	// The packages of iptables, without those that set it up.
	toolPackages = regexp.MustCompile(`^(iptables|lib.*|gcc-.*-base)$`)
)

// machine is a kernel, and the option to boot it with.
type machine struct{ suite, arch, options string }

func (m machine) String() string {
	return strings.TrimSuffix(m.suite+"/"+m.arch+"/"+m.options, "/")
}

func parseMachine(s string) (m machine, err error) {
	parts := strings.SplitN(s, "/", 3)
	if len(parts) < 2 || parts[0] == "" {
		return m, fmt.Errorf("%q is not a machine: write SUITE/ARCHITECTURE, like trixie/arm64", s)
	}
	m.suite, m.arch = parts[0], parts[1]
	if len(parts) > 2 {
		m.options = parts[2]
	}
	if _, known := architectures[m.arch]; !known {
		return m, fmt.Errorf("%q: unknown architecture %q: use amd64 or arm64", s, m.arch)
	}
	return m, nil
}

// expectation is the expected result for a machine.
type expectation struct {
	machine
	result string
}

func readExpectations(file string) (all []expectation, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(content)) {
		name, result, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "" || name[0] == '#' {
			continue
		}
		m, err := parseMachine(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, expectation{m, strings.TrimSpace(result)})
	}
	return all, nil
}

// runner builds images and boots them.
type runner struct {
	mirror, dir, suite string
	limit              time.Duration
	// tools maps each architecture to the image with the files that all its machines share.
	tools map[string]string
}

func main() {
	r := runner{tools: make(map[string]string)}
	flag.StringVar(&r.mirror, "mirror", "", "mirror of Debian (default that of this machine's apt)")
	flag.StringVar(&r.dir, "dir", "bin/kernels", "folder for packages, images and consoles")
	flag.StringVar(&r.suite, "tools", "trixie", "suite of the machines' iptables")
	flag.DurationVar(&r.limit, "limit", 45*time.Minute, "time limit of a machine")
	expected := flag.String("expected", "test/kernels/expected.txt", "file with the expected result of each machine")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := r.all(ctx, os.Stdout, *expected, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "kernels:", err)
		os.Exit(1)
	}
}

// all boots machines one after another, and prints the result of each.
func (r *runner) all(ctx context.Context, out io.Writer, expected string, names []string) (err error) {
	known, err := readExpectations(expected)
	if err != nil {
		return err
	}
	machines, err := choose(known, names)
	if err != nil {
		return err
	}
	if r.dir, err = filepath.Abs(r.dir); err != nil {
		return err
	}
	if r.mirror == "" {
		if r.mirror, err = machineMirror(ctx); err != nil {
			return err
		}
	}
	failed := 0
	for _, e := range machines {
		begin := time.Now()
		rep, err := r.boot(ctx, e.machine)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		got := result(rep, err)
		fmt.Fprintf(out, "%-44s %-34s %5.0f s  %s\n", e, rep.Release, time.Since(begin).Seconds(), got)
		for _, t := range rep.Tests {
			fmt.Fprintf(out, "  %-42s %-34s %5d s  %3d tests\n", t.Name, t.Error, t.Seconds, t.Passed)
		}
		switch {
		case e.result == "":
			fmt.Fprintf(out, "  add the expected result to %s\n", expected)
			failed++
		case e.result != got:
			fmt.Fprintf(out, "  expected: %s\n", e.result)
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d machines differ from what is expected", failed, len(machines))
	}
	return nil
}

// choose returns the machines with these names, or all known ones if there are no names.
func choose(known []expectation, names []string) (all []expectation, err error) {
	if len(names) == 0 {
		return known, nil
	}
	for _, name := range names {
		m, err := parseMachine(name)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(known, func(e expectation) bool { return e.machine == m })
		if i < 0 {
			all = append(all, expectation{machine: m})
			continue
		}
		all = append(all, known[i])
	}
	return all, nil
}

// result formats the result of a machine in one line.
func result(r report.Report, err error) string {
	if err != nil {
		return "failed: " + err.Error()
	}
	if r.Unsupported != "" {
		return "unsupported: " + r.Unsupported
	}
	var failed []string
	for _, t := range r.Tests {
		if t.Error != "" {
			failed = append(failed, t.Name)
		}
	}
	switch {
	case failed != nil:
		return "failed: " + strings.Join(failed, ", ")
	case r.Tests == nil:
		return "failed: no tests ran"
	}
	return "accelerated"
}

// boot fetches a machine's kernel, builds its image, and boots it.
func (r *runner) boot(ctx context.Context, m machine) (rep report.Report, err error) {
	tools, err := r.toolsFor(ctx, m.arch)
	if err != nil {
		return rep, err
	}
	dir := filepath.Join(r.dir, m.suite+"-"+m.arch)
	packages, err := openArchive(ctx, dir, r.mirror, m.suite, m.arch)
	if err != nil {
		return rep, err
	}
	tree, err := packages.fetch(ctx, kernelPackages, "linux-image-cloud-"+m.arch)
	if err != nil {
		return rep, err
	}
	kernel, err := findKernel(tree)
	if err != nil {
		return rep, err
	}
	image := filepath.Join(dir, "initramfs")
	if err := writeImage(image, tools, func(c *cpio) error { return c.addModules(ctx, tree) }); err != nil {
		return rep, err
	}
	console := filepath.Join(r.dir, strings.NewReplacer("/", "-", "=", "-").Replace(m.String())+".log")
	return architectures[m.arch].boot(ctx, kernel, image, m.options, console, r.limit)
}

// toolsFor builds the part that all images of an architecture share: init, tests, iptables.
func (r *runner) toolsFor(ctx context.Context, arch string) (string, error) {
	if r.tools[arch] != "" {
		return r.tools[arch], nil
	}
	dir := filepath.Join(r.dir, "tools-"+arch)
	packages, err := openArchive(ctx, dir, r.mirror, r.suite, arch)
	if err != nil {
		return "", err
	}
	tree, err := packages.fetch(ctx, toolPackages, "iptables")
	if err != nil {
		return "", err
	}
	programs := filepath.Join(dir, "programs")
	env := map[string]string{"GOOS": "linux", "GOARCH": arch, "CGO_ENABLED": "0"}
	for name, build := range map[string][]string{
		"init":           {"build", "./test/kernels/guest"},
		"tests/fastpath": {"test", "-c", "./internal/fastpath"},
		"tests/datapath": {"test", "-c", "./internal/fastpath/datapath"},
	} {
		argv := slices.Insert(slices.Clone(build), len(build)-1, "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(programs, name))
		if _, err := command(ctx, "", env, append([]string{"go"}, argv...)...); err != nil {
			return "", err
		}
	}
	image := filepath.Join(dir, "image")
	err = writeImage(image, "", func(c *cpio) error {
		// An installed system has these links. Programs need them to find their loader.
		for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
			c.add(d, os.ModeSymlink|0o777, []byte("usr/"+d))
		}
		return errors.Join(
			c.addTree(programs),
			c.addTree(tree, "usr/share", "usr/lib/*/gconv", "usr/include", "etc/init.d"),
		)
	})
	r.tools[arch] = image
	return image, err
}

// writeImage writes an archive with what fill adds. The archive in the file front comes first.
func writeImage(file, front string, fill func(*cpio) error) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if front != "" {
		other, err := os.Open(front)
		if err != nil {
			return err
		}
		defer other.Close()
		if _, err := io.Copy(f, other); err != nil {
			return err
		}
	}
	c := newCPIO(f)
	if err := fill(c); err != nil {
		return err
	}
	return c.close()
}
