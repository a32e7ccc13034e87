package stats

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Fields of a workload in which two may differ and still be the same traffic.
var (
	notTraffic         = []string{"duration", "warmup"}
	notImportedTraffic = append(notTraffic[:2:2], "requests", "iterations")
)

// Traffic describes what a workload sends by the fields of its traffic, as the experiment file has them, and by its conditions if
// the result was imported. Results can be compared if these are the same.
func Traffic(exp *spec.Experiment, imported *record.Imported, w spec.Workload) map[string]string {
	ignored := notTraffic
	if exp.Spec.Target.Imported != nil {
		ignored = notImportedTraffic
	}
	fields := map[string]string{"kind": w.Kind()}
	for name, value := range fieldsOf(w.Traffic()) {
		if !slices.Contains(ignored, name) {
			fields[name] = orUnset(value)
		}
	}
	if with := beside(exp, w); with != "" {
		fields["beside"] = with
	}
	if imported != nil {
		maps.Copy(fields, imported.Conditions[w.Name])
	}
	return fields
}

// otherTraffic returns the workloads that both results name but whose traffic differs, each with its differences. A
// ratio of the two would compare the traffic, not the networks. The length of a trial may differ, and so may the number
// of messages in imported results, where a time limit may have set it.
func otherTraffic(a, b Result, only Only) map[string]string {
	other := make(map[string]string)
	ignored := notTraffic
	if a.Experiment.Spec.Target.Imported != nil || b.Experiment.Spec.Target.Imported != nil {
		ignored = notImportedTraffic
	}
	for _, now := range b.Experiment.Spec.Workloads {
		for _, was := range a.Experiment.Spec.Workloads {
			if was.Name != now.Name || !emptyOrHas(only.Workloads, now.Name) {
				continue
			}
			differ := slices.Concat(trafficDiffers(was, now, ignored), besideDiffers(a.Experiment, b.Experiment, was, now), conditionsDiffer(a.Imported, b.Imported, now.Name))
			if len(differ) > 0 {
				other[now.Name] = fmt.Sprintf("%s is other traffic in %s than in %s: %s", now.Name, b.Name, a.Name, strings.Join(differ, ", "))
			}
		}
	}
	return other
}

// trafficDiffers names the fields that differ between two workloads, except for ignored ones: "size 64 and 1048576".
func trafficDiffers(a, b spec.Workload, ignored []string) (differ []string) {
	if a.Kind() != b.Kind() {
		return []string{fmt.Sprintf("%s and %s", a.Kind(), b.Kind())}
	}
	x, y := fieldsOf(a.Traffic()), fieldsOf(b.Traffic())
	for _, name := range slices.Sorted(maps.Keys(merged(x, y))) {
		if slices.Contains(ignored, name) {
			continue
		}
		if was, now := orUnset(x[name]), orUnset(y[name]); was != now {
			differ = append(differ, fmt.Sprintf("%s %s and %s", name, was, now))
		}
	}
	return differ
}

// besideDiffers says how the traffic that runs beside two workloads differs.
func besideDiffers(a, b *spec.Experiment, was, now spec.Workload) []string {
	if before, after := beside(a, was), beside(b, now); before != after {
		return []string{fmt.Sprintf("beside %s and %s", cmp.Or(before, "unset"), cmp.Or(after, "unset"))}
	}
	return nil
}

// beside describes the traffic that runs beside a workload; empty if none does.
func beside(exp *spec.Experiment, w spec.Workload) string {
	for _, other := range exp.Spec.Workloads {
		if w.Beside != "" && other.Name == w.Beside {
			fields := fieldsOf(other.Traffic())
			maps.DeleteFunc(fields, func(name string, _ json.RawMessage) bool { return slices.Contains(notTraffic, name) })
			parts := []string{other.Kind()}
			for _, name := range slices.Sorted(maps.Keys(fields)) {
				parts = append(parts, name+" "+orUnset(fields[name]))
			}
			return strings.Join(parts, " ")
		}
	}
	return ""
}

// conditionsDiffer names the conditions of a workload that differ between two imports. What one of them does not know does not
// differ.
func conditionsDiffer(a, b *record.Imported, workload string) (differ []string) {
	if a == nil || b == nil {
		return nil
	}
	was, now := a.Conditions[workload], b.Conditions[workload]
	for _, name := range slices.Sorted(maps.Keys(was)) {
		if is, known := now[name]; known && is != was[name] {
			differ = append(differ, fmt.Sprintf("%s %s and %s", name, was[name], is))
		}
	}
	return differ
}

// fieldsOf returns the fields of traffic as the experiment file has them.
func fieldsOf(t *spec.Traffic) (fields map[string]json.RawMessage) {
	text, err := json.Marshal(t)
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	if err != nil {
		panic(err) // every Traffic is valid JSON
	}
	return fields
}

func merged(x, y map[string]json.RawMessage) map[string]json.RawMessage {
	all := maps.Clone(x)
	maps.Copy(all, y)
	return all
}

func orUnset(field json.RawMessage) string {
	if field == nil {
		return "unset"
	}
	return strings.Trim(string(field), `"`)
}
