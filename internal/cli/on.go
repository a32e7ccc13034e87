package cli

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/examples"
	"slipstream.dev/internal/spec"
)

// onOverrides returns the overrides of the target for --on, none if --on is empty. Variants choose hosts by
// labels, so the hosts take the labels and prices of the hosts in the file, in order, or the labels of its nodes. In a cluster,
// the pod network takes the place of a lab's VXLAN.
func onOverrides(on, name string, data []byte) ([]override, error) {
	if on == "" {
		return nil, nil
	}
	exp, err := spec.Parse(name, data, nil)
	if err != nil {
		exp = new(spec.Experiment) // load reports it, unless other flags repair it
	}
	field := "spec.target="
	switch names, isHosts := strings.CutPrefix(on, "hosts:"); {
	case on == "lab", on == "kubernetes":
		field += "{" + on + ": {}}"
	case isHosts:
		hosts := exp.Spec.Target.Hosts
		if hosts == nil {
			hosts = labelled(exp.Pools())
		}
		field += "{hosts: " + hostList(names, hosts) + "}"
	default:
		return nil, fmt.Errorf("--on %s: must be lab, kubernetes or hosts:CLIENT,SERVER", on)
	}
	all := []override{{"--on", on, field}}
	if on == "kubernetes" {
		for _, at := range vxlanPaths(exp) {
			all = append(all, override{"--on", on, at + "={pod: {}}"})
		}
	}
	return all, nil
}

// labelled returns two hosts for each pool, with the labels of its client and of its server.
func labelled(pools []spec.Ends) (hosts []spec.Host) {
	for _, n := range pools {
		hosts = append(hosts, spec.Host{Labels: n.Client}, spec.Host{Labels: n.Server})
	}
	return hosts
}

// vxlanPaths returns the fields whose path is VXLAN. It returns none if the experiment compares shapes of VXLAN
// with each other, because a cluster has only its own.
func vxlanPaths(exp *spec.Experiment) (fields []string) {
	var shapes []string
	add := func(field string, p *spec.Path) {
		if p != nil && p.VXLAN != nil && p.Policies == nil && !p.Local {
			fields, shapes = append(fields, field), append(shapes, p.VXLAN.Shape)
		}
	}
	add("spec.path", &exp.Spec.Path)
	for _, v := range exp.Spec.Variants {
		add("spec.variants."+v.Name+".path", v.Path)
	}
	if len(slices.Compact(shapes)) > 1 {
		return nil
	}
	return fields
}

// refusedOn adds to an error about a preset the presets that the target can run.
func refusedOn(on, name string, err error) error {
	var others []string
	for _, other := range examples.Names() {
		if runsOn(on, other) {
			others = append(others, other)
		}
	}
	if len(others) == 0 { // for example, because the name of a host is invalid
		return err
	}
	// Presets of the same question have names that begin alike.
	slices.SortStableFunc(others, func(a, b string) int { return commonPrefix(b, name) - commonPrefix(a, name) })
	return fmt.Errorf("%w\n%s does not run with --on %s; presets that do: %s", err, name, on, likely(others, name))
}

// likely lists presets: all if they are few, otherwise demo, which is where most people begin, and those whose names begin like name.
func likely(all []string, name string) string {
	const demo, few, alike = "demo", 8, 3
	if len(all) <= few {
		return strings.Join(all, ", ")
	}
	named := []string{demo}
	for _, other := range all {
		if other != demo && len(named) < few && commonPrefix(other, name) >= alike {
			named = append(named, other)
		}
	}
	return fmt.Sprintf("%s, and %d others (slipstream run --list)", strings.Join(named, ", "), len(all)-len(named))
}

// runsOn reports whether a target can run a preset as it is.
func runsOn(on, preset string) bool {
	data, ok := examples.Preset(preset)
	if !ok {
		return false
	}
	flags, err := onOverrides(on, preset, data)
	if err != nil {
		return false
	}
	_, err = parseWith(preset, data, flags)
	return err == nil
}

// commonPrefix returns the length of the common prefix of two texts, in bytes.
func commonPrefix(a, b string) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}
