package azure

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"slipstream.dev/internal/plain"
)

// Finding names something wrong with a machine or scale set.
type Finding string

// Findings.
const (
	// NotWanted means that the size supports Accelerated Networking, and a NIC does not have it enabled.
	NotWanted Finding = "not-wanted"
	// NotPossible means that a NIC has it enabled, and the size does not support it.
	NotPossible Finding = "not-possible"
	// NotUsed means that every NIC has it enabled, and packets do not use the virtual function.
	NotUsed Finding = "not-used"
	// UsedUnwanted means that packets use the virtual function, although no NIC has it enabled: the machine has not
	// been deallocated since that changed.
	UsedUnwanted Finding = "used-unwanted"
	// BehindModel means that an instance differs from the model of its scale set.
	BehindModel Finding = "behind-model"
)

// findings derives the findings from the three facts. An unknown fact is no finding: Complete reports it.
func findings(possible, wanted, used Fact) (all []Finding) {
	if possible == Yes && (wanted == No || wanted == Mixed) {
		all = append(all, NotWanted)
	}
	if possible == No && (wanted == Yes || wanted == Mixed) {
		all = append(all, NotPossible)
	}
	if wanted == Yes && used == No && possible != No {
		all = append(all, NotUsed)
	}
	if wanted == No && used == Yes {
		all = append(all, UsedUnwanted)
	}
	return all
}

func judge(a *Audit) {
	for i := range a.Machines {
		m := &a.Machines[i]
		m.Findings = findings(m.Possible, m.Wanted, m.Used)
		if m.Behind {
			m.Findings = append(m.Findings, BehindModel)
		}
	}
	for i := range a.ScaleSets {
		s := &a.ScaleSets[i]
		s.Findings = findings(s.Possible, s.Wanted, NotLooked)
		if s.Behind > 0 {
			s.Findings = append(s.Findings, BehindModel)
		}
	}
}

// Complete reports whether everything was read, so that an audit without findings means that nothing is wrong. It
// ignores whether packets take the virtual function, because most machines have no agent.
func (a *Audit) Complete() bool {
	return len(a.NotRead) == 0 && !slices.ContainsFunc(a.Machines, func(m Machine) bool { return m.Possible == Unknown || m.Wanted == Unknown })
}

// Found reports whether any machine or scale set has a finding.
func (a *Audit) Found() bool {
	return slices.ContainsFunc(a.Machines, func(m Machine) bool { return len(m.Findings) > 0 }) ||
		slices.ContainsFunc(a.ScaleSets, func(s ScaleSet) bool { return len(s.Findings) > 0 })
}

// ReadAudit reads an audit from a JSON file.
func ReadAudit(path string) (*Audit, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	a := new(Audit)
	if err := json.Unmarshal(data, a); err != nil {
		return nil, fmt.Errorf("%s is not a file of slipstream azure audit -o json: %w", path, err)
	}
	if len(a.Subscriptions) == 0 {
		return nil, fmt.Errorf("%s is not an audit of machines (slipstream azure audit -o json, without --size)", path)
	}
	if a.Version != auditVersion {
		return nil, fmt.Errorf("%s has version %d of the format, and this program reads version %d", path, a.Version, auditVersion)
	}
	return a, nil
}

// Drift is a change between two audits.
type Drift struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	What   string `json:"what"` // possible, wanted, used, size or behind; machine or scale set if it is new or gone
	Before string `json:"before"`
	Now    string `json:"now"`
}

// Since lists what changed since an earlier audit. A machine counts as gone only if this audit read its resource
// group, and as new only if the earlier one did: what one of them could not read has not changed.
func (a *Audit) Since(before *Audit) (all []Drift) {
	type thing struct {
		kind, name, group, subscription string
		facts                           [][2]string
	}
	things := func(a *Audit) map[string]thing {
		found := make(map[string]thing)
		for _, m := range a.Machines {
			found[m.ID] = thing{"machine", m.ResourceGroup + "/" + m.Name, m.ResourceGroup, m.Subscription, [][2]string{
				{"size", m.Size}, {"possible", string(m.Possible)}, {"wanted", string(m.Wanted)}, {"used", string(m.Used)}, {"behind", fmt.Sprint(m.Behind)}}}
		}
		for _, s := range a.ScaleSets {
			found[s.ID] = thing{"scale set", s.ResourceGroup + "/" + s.Name, s.ResourceGroup, s.Subscription, [][2]string{
				{"size", s.Size}, {"possible", string(s.Possible)}, {"wanted", string(s.Wanted)}}}
		}
		return found
	}
	then, now := things(before), things(a)
	for id, t := range then {
		n, ok := now[id]
		if !ok {
			if a.covers(t.subscription, t.group) {
				all = append(all, Drift{ID: id, Name: t.name, What: t.kind, Before: "there", Now: "gone"})
			}
			continue
		}
		for i, f := range t.facts {
			// A fact that one of the audits does not know has not changed.
			b, c := Fact(f[1]), Fact(n.facts[i][1])
			if b != c && !slices.Contains([]Fact{Unknown, NotLooked}, b) && !slices.Contains([]Fact{Unknown, NotLooked}, c) {
				all = append(all, Drift{ID: id, Name: n.name, What: f[0], Before: f[1], Now: n.facts[i][1]})
			}
		}
	}
	for id, n := range now {
		if _, ok := then[id]; !ok && before.covers(n.subscription, n.group) {
			all = append(all, Drift{ID: id, Name: n.name, What: n.kind, Before: "not there", Now: "there"})
		}
	}
	slices.SortFunc(all, func(x, y Drift) int { return strings.Compare(x.Name+x.ID+x.What, y.Name+y.ID+y.What) })
	return all
}

// covers reports whether the audit read a resource group.
func (a *Audit) covers(subscription, group string) bool {
	has := func(all []string, s string) bool {
		return slices.ContainsFunc(all, func(x string) bool { return strings.EqualFold(x, s) })
	}
	return has(a.Subscriptions, subscription) && (len(a.Groups) == 0 || has(a.Groups, group)) && len(a.NotRead) == 0
}

// Formats holds the writers of the output formats, by name. The drift is nil unless the user asked for it.
var Formats = map[string]func(io.Writer, *Audit, []Drift) error{"text": writeText, "json": writeJSON, "csv": writeCSV}

func writeJSON(w io.Writer, a *Audit, drift []Drift) error {
	return encode(w, struct {
		*Audit
		Drift []Drift `json:"drift,omitempty"`
	}{a, drift})
}

func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// writeCSV writes a line for each NIC, and one line for each machine whose NICs are not known.
func writeCSV(w io.Writer, a *Audit, _ []Drift) error {
	rows := [][]string{{"subscription", "resource_group", "machine", "scale_set", "cluster", "pool", "location", "size", "nic", "possible", "wanted", "used", "used_reason", "behind", "findings"}}
	for _, m := range a.Machines {
		nics := m.NICs
		if len(nics) == 0 {
			nics = []NIC{{Wanted: Unknown}}
		}
		var codes []string
		for _, f := range m.Findings {
			codes = append(codes, string(f))
		}
		for _, n := range nics {
			rows = append(rows, []string{m.Subscription, m.ResourceGroup, m.Name, m.ScaleSet, m.Cluster, m.Pool, m.Location, m.Size, n.Name,
				string(m.Possible), string(n.Wanted), string(m.Used), m.UsedReason, fmt.Sprint(m.Behind), strings.Join(codes, " ")})
		}
	}
	return writeRows(w, rows)
}

func writeRows(w io.Writer, rows [][]string) error {
	for _, row := range rows {
		for i := range row {
			row[i] = plain.Cell(row[i])
		}
	}
	return csv.NewWriter(w).WriteAll(rows)
}

// writeText writes a line for each virtual machine and scale set, and for each instance that differs from its
// scale set.
func writeText(w io.Writer, a *Audit, drift []Drift) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "NAME\tPOOL\tSIZE\tPOSSIBLE\tWANTED\tUSED\tFINDINGS")
	row := func(name, cluster, pool, size string, possible, wanted Fact, used string, all []Finding) {
		where := "-"
		if cluster != "" || pool != "" {
			where = strings.Trim(cluster+"/"+pool, "/")
		}
		var codes []string
		for _, f := range all {
			codes = append(codes, string(f))
		}
		if len(codes) == 0 {
			codes = []string{"-"}
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", name, where, size, possible, wanted, used, strings.Join(codes, ", "))
	}
	for _, s := range a.ScaleSets {
		row(s.ResourceGroup+"/"+s.Name, s.Cluster, s.Pool, s.Size, s.Possible, s.Wanted, "model", s.Findings)
	}
	same := 0
	for _, m := range a.Machines {
		if m.ScaleSet != "" && len(m.Findings) == 0 && m.Possible != Unknown && m.Wanted != Unknown {
			same++
			continue
		}
		used := string(m.Used)
		if m.UsedReason != "" {
			used += " (" + m.UsedReason + ")"
		}
		row(m.ResourceGroup+"/"+m.Name, m.Cluster, m.Pool, m.Size, m.Possible, m.Wanted, used, m.Findings)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if same > 0 {
		fmt.Fprintf(w, "%d instances of scale sets match their models and have no finding (-o csv lists them)\n", same)
	}
	if len(a.NotRead) > 0 {
		fmt.Fprintln(w, "\nCould not be read:")
		for _, n := range a.NotRead {
			fmt.Fprintf(w, "  %s\n", n)
		}
	}
	if drift != nil {
		fmt.Fprintf(w, "\n%d changes since the earlier audit\n", len(drift))
		for _, d := range drift {
			fmt.Fprintf(w, "  %s: %s %s, was %s\n", d.Name, d.What, d.Now, d.Before)
		}
	}
	return nil
}
