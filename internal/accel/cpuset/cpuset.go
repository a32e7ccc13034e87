// Package cpuset implements sets of CPUs. It reads and writes the kernel's lists and masks, and
// resolves the CPUs that an accelerator names.
package cpuset

import (
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/api/v1alpha1"
)

// maxCPUs is the largest CONFIG_NR_CPUS of any architecture. A larger number is a typing error, and must not cost memory.
const maxCPUs = 8192

// Set is a set of CPUs. The zero value is empty.
type Set struct {
	// words hold 32 CPUs each, the lowest first, as the groups of a kernel mask
	// do. The last word is never 0, so that equal sets are equal slices.
	words []uint32
}

// New returns the set of cpus, each from 0 to 8191; others are left out.
func New(cpus ...int) Set {
	var s Set
	for _, cpu := range cpus {
		s.add(cpu)
	}
	return s
}

func (s *Set) add(cpu int) {
	if cpu < 0 || cpu >= maxCPUs {
		return
	}
	if n := cpu/32 + 1; n > len(s.words) {
		s.words = append(s.words, make([]uint32, n-len(s.words))...)
	}
	s.words[cpu/32] |= 1 << (cpu % 32)
}

func (s Set) trimmed() Set {
	for len(s.words) > 0 && s.words[len(s.words)-1] == 0 {
		s.words = s.words[:len(s.words)-1]
	}
	return s
}

// Empty reports whether no CPU is in s.
func (s Set) Empty() bool { return len(s.words) == 0 }

// Equal reports whether s and t hold the same CPUs.
func (s Set) Equal(t Set) bool { return slices.Equal(s.words, t.words) }

// CPUs lists s in rising order.
func (s Set) CPUs() []int {
	var cpus []int
	for i, w := range s.words {
		for ; w != 0; w &= w - 1 {
			cpus = append(cpus, 32*i+bits.TrailingZeros32(w))
		}
	}
	return cpus
}

// Minus returns the CPUs of s that are not in t.
func (s Set) Minus(t Set) Set {
	d := Set{words: slices.Clone(s.words)}
	for i := range min(len(s.words), len(t.words)) {
		d.words[i] &^= t.words[i]
	}
	return d.trimmed()
}

// Union returns the CPUs that are in s or in t.
func (s Set) Union(t Set) Set {
	if len(s.words) < len(t.words) {
		s, t = t, s
	}
	u := Set{words: slices.Clone(s.words)}
	for i, w := range t.words {
		u.words[i] |= w
	}
	return u
}

// last returns a set with only the highest CPU of s.
func (s Set) last() Set {
	if s.Empty() {
		return Set{}
	}
	top := len(s.words) - 1
	return New(32*top + bits.Len32(s.words[top]) - 1)
}

// String formats s as the kernel's lists do: "0-3,8". The empty set is "".
func (s Set) String() string {
	var b strings.Builder
	cpus := s.CPUs()
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(cpus[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(cpus[j]))
		}
		i = j + 1
	}
	return b.String()
}

// Mask formats s as a kernel mask: hexadecimal groups of 32 CPUs, the highest
// first, with commas between (bitmap_parse in lib/bitmap-str.c). The empty set
// is "0", which switches RPS off.
func (s Set) Mask() string {
	if s.Empty() {
		return "0"
	}
	var b strings.Builder
	for i, w := range slices.Backward(s.words) {
		if i == len(s.words)-1 {
			fmt.Fprintf(&b, "%x", w)
		} else {
			fmt.Fprintf(&b, ",%08x", w)
		}
	}
	return b.String()
}

// MaskLike formats s with as many digits and groups as model, a mask that the kernel printed. The kernel prints one digit for
// every four possible CPUs, so a mask written in that form reads back byte for byte.
func (s Set) MaskLike(model string) string {
	mask, places := s.Mask(), 0
	for _, group := range strings.Split(model, ",") {
		places += len(group)
	}
	groups := strings.Split(mask, ",")
	digits := len(groups[0]) + 8*(len(groups)-1)
	if digits >= places {
		return mask
	}
	all := strings.Repeat("0", places-digits) + strings.ReplaceAll(mask, ",", "")
	var b strings.Builder
	for i, d := range all {
		if i > 0 && (places-i)%8 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	return b.String()
}

// ParseList parses a list such as "0-3,8", with or without a trailing newline.
func ParseList(list string) (Set, error) {
	var s Set
	list = strings.TrimSpace(list)
	if list == "" {
		return s, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		lo, err := parseCPU(first)
		hi := lo
		if err == nil && isRange {
			hi, err = parseCPU(last)
		}
		if err != nil {
			return Set{}, fmt.Errorf("CPU list %q: %w", list, err)
		}
		if hi < lo {
			return Set{}, fmt.Errorf("CPU list %q: %q runs backwards", list, part)
		}
		for cpu := lo; cpu <= hi; cpu++ {
			s.add(cpu)
		}
	}
	return s, nil
}

func parseCPU(text string) (int, error) {
	cpu, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is not a CPU number", text)
	}
	if cpu >= maxCPUs {
		return 0, fmt.Errorf("CPU %d is beyond %d, the highest number that a kernel supports", cpu, maxCPUs-1)
	}
	return int(cpu), nil
}

// ParseMask parses a kernel mask such as "3" or "ff,ffffffff", with or without
// a trailing newline.
func ParseMask(mask string) (Set, error) {
	mask = strings.TrimSpace(mask)
	groups := strings.Split(mask, ",")
	if len(groups) > maxCPUs/32 {
		return Set{}, fmt.Errorf("CPU mask: %d groups are more than the %d of %d CPUs", len(groups), maxCPUs/32, maxCPUs)
	}
	s := Set{words: make([]uint32, len(groups))}
	for i, group := range groups {
		w, err := strconv.ParseUint(group, 16, 32)
		if err != nil || len(group) > 8 {
			return Set{}, fmt.Errorf("CPU mask %q: %q is not a group of up to 8 hexadecimal digits", mask, group)
		}
		s.words[len(groups)-1-i] = uint32(w)
	}
	return s.trimmed(), nil
}

// MachineCPUs are the CPUs of a machine.
type MachineCPUs struct {
	Online Set
	// Isolated are the CPUs that the kernel removes from every RPS mask: those of isolcpus= and nohz_full=
	// (rps_cpumask_housekeeping in net/core/net-sysfs.c).
	Isolated Set
}

// Machine reads devices/system/cpu below sys.
func Machine(sys *os.Root) (MachineCPUs, error) {
	read := func(name string) (Set, error) {
		b, err := sys.ReadFile("devices/system/cpu/" + name)
		if err != nil {
			return Set{}, fmt.Errorf("read %s CPUs: %w", name, err)
		}
		// nohz_full reads "(null)" if the kernel supports it but was booted without it.
		if text := strings.TrimSpace(string(b)); text != "(null)" {
			return ParseList(text)
		}
		return Set{}, nil
	}
	var c MachineCPUs
	var err error
	if c.Online, err = read("online"); err != nil {
		return MachineCPUs{}, err
	}
	for _, name := range []string{"isolated", "nohz_full"} {
		s, err := read(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return MachineCPUs{}, err
		}
		c.Isolated = c.Isolated.Union(s)
	}
	return c, nil
}

// Resolve turns the CPUs that an accelerator names into a set, which is never empty. spec is "all", "all-but-irq" or a list.
// node holds the node's CPUs; if it is empty, they are those of the machine. irq holds the CPUs that take the NIC's interrupts;
// if it is empty, that is the node's last usable CPU. A list may contain CPUs outside the node, but no offline or isolated
// ones: the kernel would reject them or silently leave them out.
func Resolve(spec string, machine MachineCPUs, node, irq Set) (Set, error) {
	if node.Empty() {
		node = machine.Online
	}
	offline := node.Minus(machine.Online)
	usable := node.Minus(offline).Minus(machine.Isolated)
	switch spec {
	case v1alpha1.CPUsAll:
		if usable.Empty() {
			return Set{}, fmt.Errorf("cpus all: none of %s is online and not isolated", node)
		}
		return usable, nil
	case v1alpha1.CPUsAllButIRQ:
		if irq.Empty() {
			irq = usable.last()
		}
		rest := usable.Minus(irq)
		if rest.Empty() {
			return Set{}, fmt.Errorf("cpus all-but-irq: no CPU of %q is left beside %s, which take the NIC's interrupts; use all, or a list", usable, irq)
		}
		return rest, nil
	}
	list, err := ParseList(spec)
	switch {
	case err != nil:
		return Set{}, fmt.Errorf("cpus: want all, all-but-irq or a list: %w", err)
	case list.Empty():
		return Set{}, errors.New("cpus: want all, all-but-irq or a list; it is empty")
	}
	if off := list.Minus(machine.Online); !off.Empty() {
		return Set{}, fmt.Errorf("cpus %s: %s not online; online are %s", spec, off, machine.Online)
	}
	if kept := list.Minus(list.Minus(machine.Isolated)); !kept.Empty() {
		return Set{}, fmt.Errorf("cpus %s: %s isolated, the kernel takes such CPUs out of any RPS mask", spec, kept)
	}
	return list, nil
}
