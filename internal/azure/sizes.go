package azure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"

	"slipstream.dev/internal/spec"
)

// size describes a size of virtual machine, as the list of resource SKUs does.
type size struct {
	name        string
	accelerated Fact
	family      string
	vcpus       string
	restricted  bool // this subscription may not use it in this location
}

func (of *clients) skuPager(location string) *runtime.Pager[armcompute.ResourceSKUsClientListResponse] {
	filter := "location eq '" + location + "'"
	return of.skus.NewListPager(&armcompute.ResourceSKUsClientListOptions{Filter: &filter})
}

func skuPage(p armcompute.ResourceSKUsClientListResponse) []*armcompute.ResourceSKU { return p.Value }

// sizes returns the sizes of a location, by lower-case location/name.
func (of *clients) sizes(ctx context.Context, location string) (map[string]*size, error) {
	skus, err := all(ctx, of.skuPager(location), skuPage)
	sizes := make(map[string]*size)
	for _, k := range skus {
		addSize(sizes, k)
	}
	return sizes, err
}

func addSize(sizes map[string]*size, k *armcompute.ResourceSKU) {
	if !strings.EqualFold(value(k.ResourceType), "virtualMachines") {
		return
	}
	s := &size{name: value(k.Name), accelerated: No, family: value(k.Family)}
	for _, c := range k.Capabilities {
		switch v := value(c.Value); value(c.Name) {
		case "AcceleratedNetworkingEnabled":
			if strings.EqualFold(v, "True") {
				s.accelerated = Yes
			}
		case "vCPUs":
			s.vcpus = v
		}
	}
	for _, x := range k.Restrictions {
		s.restricted = s.restricted || value(x.Type) == armcompute.ResourceSKURestrictionsTypeLocation
	}
	for _, l := range k.Locations {
		sizes[strings.ToLower(value(l)+"/"+s.name)] = s
	}
}

// SizeAudit tells whether a size supports Accelerated Networking, and which others of its family do.
type SizeAudit struct {
	Version      int       `json:"version"` // of this format: 1
	Time         time.Time `json:"time"`
	Subscription string    `json:"subscription"`
	Location     string    `json:"location"`
	Family       string    `json:"family"`
	Size         Size      `json:"size"`
	// Others are the other sizes of the family in this location, by number of vCPUs and name.
	Others []Size `json:"others"`
}

// Size is a size of virtual machine in a location.
type Size struct {
	Name string `json:"name"`
	// VCPUs is 0 if the list does not have the number.
	VCPUs    int  `json:"vcpus"`
	Possible Fact `json:"possible"`
	// Restricted means that this subscription may not use the size in this location.
	Restricted bool `json:"restricted"`
}

// ErrNoSize is the error for a size or location that the list of sizes does not have.
var ErrNoSize = errors.New("no such size")

// AuditSize reads the list of sizes of a location, and nothing else of the subscription. If it lacks the size, the error
// wraps ErrNoSize and names the nearest ones.
func (c *Cloud) AuditSize(ctx context.Context, name, location string) (*SizeAudit, error) {
	if len(c.order) != 1 {
		return nil, errors.New("the list of sizes is that of one subscription: name one")
	}
	location = strings.ToLower(strings.ReplaceAll(location, " ", "")) // the portal shows "West Europe"
	sizes, err := c.of[strings.ToLower(c.order[0])].sizes(ctx, location)
	if err != nil {
		return nil, failed("list sizes of "+location, err)
	}
	found := sizes[location+"/"+strings.ToLower(name)]
	if found == nil {
		return nil, fmt.Errorf("%w: %s", ErrNoSize, without(sizes, name, location))
	}
	a := &SizeAudit{Version: auditVersion, Time: time.Now().UTC().Truncate(time.Second), Subscription: c.order[0], Location: location,
		Family: found.family, Size: found.public(), Others: []Size{}}
	for at, s := range sizes {
		if s != found && found.family != "" && s.family == found.family && strings.HasPrefix(at, location+"/") {
			a.Others = append(a.Others, s.public())
		}
	}
	slices.SortFunc(a.Others, func(x, y Size) int { return cmp.Or(cmp.Compare(x.VCPUs, y.VCPUs), cmp.Compare(x.Name, y.Name)) })
	return a, nil
}

func (s *size) public() Size {
	vcpus, _ := strconv.Atoi(s.vcpus)
	return Size{Name: s.name, VCPUs: vcpus, Possible: s.accelerated, Restricted: s.restricted}
}

// short returns the name of a size without the prefix that nearly all share, which would make all names near each other.
func short(name string) string {
	const prefix = "standard_"
	if len(name) > len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
		return name[len(prefix):]
	}
	return name
}

// without explains that a location lacks a size.
func without(sizes map[string]*size, name, location string) string {
	names := make(map[string]string) // by their short form
	for at, s := range sizes {
		if strings.HasPrefix(at, location+"/") {
			names[short(s.name)] = s.name
		}
	}
	if len(names) == 0 {
		return fmt.Sprintf("the subscription has no sizes in location %s (az account list-locations --query [].name shows the names of locations)", location)
	}
	near := spec.Near(short(name), slices.Sorted(maps.Keys(names)))
	if len(near) == 0 {
		return fmt.Sprintf("location %s has no size %s, and %d others (az vm list-skus --location %s --resource-type virtualMachines lists them)", location, name, len(names), location)
	}
	near = near[:min(len(near), 5)]
	for i := range near {
		near[i] = names[near[i]]
	}
	return fmt.Sprintf("location %s has no size %s; near it: %s", location, name, strings.Join(near, ", "))
}

// SizeFormats holds the writers of the output formats of a SizeAudit, by name.
var SizeFormats = map[string]func(io.Writer, *SizeAudit) error{"text": writeSizeText, "json": writeSizeJSON, "csv": writeSizeCSV}

func writeSizeJSON(w io.Writer, a *SizeAudit) error { return encode(w, a) }

// writeSizeCSV writes a line for each size of the family, the requested size first.
func writeSizeCSV(w io.Writer, a *SizeAudit) error {
	rows := [][]string{{"subscription", "location", "family", "size", "vcpus", "possible", "restricted"}}
	for _, s := range append([]Size{a.Size}, a.Others...) {
		rows = append(rows, []string{a.Subscription, a.Location, a.Family, s.Name, strconv.Itoa(s.VCPUs), string(s.Possible), strconv.FormatBool(s.Restricted)})
	}
	return writeRows(w, rows)
}

func writeSizeText(w io.Writer, a *SizeAudit) error {
	supports := map[Fact]string{Yes: "supports", No: "does not support"}[a.Size.Possible]
	fmt.Fprintf(w, "%s %s Accelerated Networking (%s, family %s)\n", a.Size.Name, supports, a.Location, cmp.Or(a.Family, "unknown"))
	if a.Size.Restricted {
		fmt.Fprintf(w, "this subscription may not use it in %s\n", a.Location)
	}
	if len(a.Others) == 0 {
		_, err := fmt.Fprintln(w, "its family has no other sizes here")
		return err
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "OTHERS OF THE FAMILY\tVCPUS\tPOSSIBLE\tRESTRICTED")
	for _, s := range a.Others {
		restricted := No
		if s.Restricted {
			restricted = Yes
		}
		fmt.Fprintf(tw, "%s\t%d\t%s\t%s\n", s.Name, s.VCPUs, s.Possible, restricted)
	}
	return tw.Flush()
}
