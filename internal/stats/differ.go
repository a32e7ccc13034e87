package stats

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"slipstream.dev/internal/spec"
)

// otherTraffic returns the workloads that both results name but whose traffic differs, each with its differences. A
// ratio of the two would compare the traffic, not the networks. The length of a trial may differ, and so may the number
// of messages in imported results, where a time limit may have set it.
func otherTraffic(a, b Result, only Only) map[string]string {
	other := make(map[string]string)
	ignored := []string{"duration", "warmup"}
	if a.Experiment.Spec.Target.Imported != nil || b.Experiment.Spec.Target.Imported != nil {
		ignored = append(ignored, "requests", "iterations")
	}
	for _, now := range b.Experiment.Spec.Workloads {
		for _, was := range a.Experiment.Spec.Workloads {
			if was.Name != now.Name || !emptyOrHas(only.Workloads, now.Name) {
				continue
			}
			if differ := trafficDiffers(was, now, ignored); len(differ) > 0 {
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
