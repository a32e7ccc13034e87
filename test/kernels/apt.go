package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// archive gives access to the packages of one Debian suite for one architecture. apt uses
// separate settings and state for it, so that the machine's stay unchanged.
type archive struct{ dir, config string }

// openArchive downloads the package list of a suite.
func openArchive(ctx context.Context, dir, mirror, suite, arch string) (*archive, error) {
	a := &archive{dir: dir, config: filepath.Join(dir, "apt.conf")}
	// Proxies and the like are the same as the machine's.
	machine, err := command(ctx, "", nil, "apt-config", "dump", "Acquire")
	if err != nil {
		return nil, err
	}
	var settings strings.Builder
	for line := range strings.Lines(string(machine)) {
		if !strings.HasPrefix(line, "Acquire::IndexTargets") {
			settings.WriteString(line)
		}
	}
	fmt.Fprintf(&settings, `
Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "%[1]s/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State "%[1]s/state";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s/cache";
APT::Architecture "%[2]s";
APT::Architectures { "%[2]s"; };
APT::Sandbox::User "root";
`, dir, arch)
	for _, d := range []string{"state/lists/partial", "cache/archives/partial", "packages"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	for name, content := range map[string]string{
		"apt.conf": settings.String(), "status": "", "sources.list": fmt.Sprintf("deb %s %s main\n", mirror, suite),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return nil, err
		}
	}
	_, err = a.apt(ctx, "", "apt-get", "-q", "update", "--error-on=any")
	return a, err
}

// machineMirror returns the mirror from which this machine gets Debian's packages.
func machineMirror(ctx context.Context) (string, error) {
	out, err := command(ctx, "", nil, "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
	if err != nil {
		return "", err
	}
	first, _, _ := strings.Cut(string(out), "\n")
	if first == "" {
		return "", fmt.Errorf("apt knows no mirror of Debian here: name one with -mirror")
	}
	return first, nil
}

// fetch downloads packages, and those of their dependencies whose names match, and unpacks
// them into one folder. It reuses the folder if the versions are the same.
func (a *archive) fetch(ctx context.Context, follow *regexp.Regexp, names ...string) (tree string, err error) {
	all, err := a.closure(ctx, follow, names...)
	if err != nil {
		return "", err
	}
	var files []string
	for _, name := range all {
		// apt-get prints the URI only if the file does not exist yet.
		out, err := a.apt(ctx, "", "apt-get", "-q", "download", "--print-uris", name)
		if err != nil {
			return "", err
		}
		fields := strings.Fields(string(out)) // 'URI' file size sum
		if len(fields) < 2 {
			return "", fmt.Errorf("apt-get does not say where %s is: %q", name, out)
		}
		files = append(files, filepath.Join(a.dir, "packages", fields[1]))
	}
	if _, err := a.apt(ctx, "packages", append([]string{"apt-get", "-q", "download"}, all...)...); err != nil {
		return "", err
	}
	tree = filepath.Join(a.dir, "tree-"+strings.TrimSuffix(filepath.Base(files[0]), ".deb"))
	if _, err := os.Stat(tree); err == nil {
		return tree, nil
	}
	part := tree + ".part"
	if err := os.RemoveAll(part); err != nil {
		return "", err
	}
	for _, file := range files {
		if _, err := command(ctx, "", nil, "dpkg-deb", "-x", file, part); err != nil {
			return "", err
		}
	}
	return tree, os.Rename(part, tree)
}

// closure returns packages with their dependencies, direct and indirect, whose names match.
func (a *archive) closure(ctx context.Context, follow *regexp.Regexp, names ...string) (all []string, err error) {
	for todo := names; len(todo) > 0; todo = todo[1:] {
		if slices.Contains(all, todo[0]) {
			continue
		}
		all = append(all, todo[0])
		record, err := a.apt(ctx, "", "apt-cache", "show", "--no-all-versions", todo[0])
		if err != nil {
			return nil, err
		}
		for _, name := range dependencies(record) {
			if follow.MatchString(name) {
				todo = append(todo, name)
			}
		}
	}
	return all, nil
}

// dependencies returns the packages in a package's Depends field. Of alternatives it takes
// the first.
func dependencies(record []byte) (names []string) {
	for line := range bytes.Lines(record) {
		list, found := bytes.CutPrefix(line, []byte("Depends:"))
		if !found {
			continue
		}
		for each := range bytes.SplitSeq(list, []byte(",")) {
			if fields := bytes.Fields(each); len(fields) > 0 {
				name, _, _ := strings.Cut(string(fields[0]), ":") // strip the architecture
				names = append(names, name)
			}
		}
	}
	return names
}

func (a *archive) apt(ctx context.Context, dir string, argv ...string) ([]byte, error) {
	return command(ctx, filepath.Join(a.dir, dir), map[string]string{"APT_CONFIG": a.config}, argv...)
}

// command runs a program and returns its output.
func command(ctx context.Context, dir string, env map[string]string, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "LC_ALL=C")
	for _, k := range slices.Sorted(maps.Keys(env)) {
		cmd.Env = append(cmd.Env, k+"="+env[k])
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return out, nil
}
