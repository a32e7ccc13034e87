package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Duration is a length of time, written with its unit: "30s", "500ms", "1m30s".
type Duration time.Duration

// UnmarshalText reads what time.ParseDuration does.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("must be a length of time such as 30s or 500ms, is %q", text)
	}
	*d = Duration(v)
	return nil
}

// MarshalText writes the shortest text that reads back the same.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Bytes is a size: a number, or one with a decimal (k, M) or binary (KiB, MiB)
// unit. 1k is 1000, 1KiB is 1024.
type Bytes int

var byteUnits = []struct {
	suffix string
	bytes  int
}{{"MiB", 1 << 20}, {"KiB", 1 << 10}, {"M", 1e6}, {"k", 1e3}}

// UnmarshalText reads "64", "64KiB", "1MiB", "128k" and "1M".
func (b *Bytes) UnmarshalText(text []byte) error {
	digits, unit := string(text), 1
	for _, u := range byteUnits {
		if number, ok := strings.CutSuffix(digits, u.suffix); ok {
			digits, unit = number, u.bytes
			break
		}
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n > math.MaxInt/unit || n < math.MinInt/unit {
		return fmt.Errorf("must be a number of bytes such as 64, 128k or 64KiB, is %q", text)
	}
	*b = Bytes(n * unit)
	return nil
}

// UnmarshalJSON reads a number, or a string as UnmarshalText does.
func (b *Bytes) UnmarshalJSON(data []byte) error {
	text := string(data)
	if text == "null" {
		return nil
	}
	if text[0] == '"' {
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
	}
	return b.UnmarshalText([]byte(text))
}

// MarshalJSON writes a number, or a string if a unit divides the size.
func (b Bytes) MarshalJSON() ([]byte, error) {
	if s := b.String(); s != strconv.Itoa(int(b)) {
		return json.Marshal(s)
	}
	return json.Marshal(int(b))
}

// String prefers the decimal unit, because 128000 is more likely 128k than 125KiB.
func (b Bytes) String() string {
	for _, i := range []int{2, 3, 0, 1} {
		if u := byteUnits[i]; b != 0 && int(b)%u.bytes == 0 {
			return strconv.Itoa(int(b)/u.bytes) + u.suffix
		}
	}
	return strconv.Itoa(int(b))
}

// BitRate is a rate in decimal units: "10Gbit", "2.5Gbit", "500Mbit". Empty means no
// limit.
type BitRate string

var bitRate = regexp.MustCompile(`^([0-9]{1,6}(?:\.[0-9]{1,3})?)([kMG]?)bit$`)

// BitsPerSecond returns the rate in bit/s, 0 for no limit.
func (r BitRate) BitsPerSecond() (uint64, error) {
	if r == "" {
		return 0, nil
	}
	m := bitRate.FindStringSubmatch(string(r))
	if m == nil {
		return 0, fmt.Errorf("must be a rate such as 10Gbit or 500Mbit, is %q", string(r))
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, err // not reached: the expression lets only numbers pass
	}
	bits := uint64(math.Round(n * map[string]float64{"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[m[2]]))
	if bits == 0 {
		return 0, errors.New("must be above 0")
	}
	return bits, nil
}

// Price is an amount of money, with the currency's ISO 4217 code: "0.085 USD". Empty
// means no price.
type Price string

var price = regexp.MustCompile(`^([0-9]{1,9}(?:\.[0-9]{1,6})?) ([A-Z]{3})$`)

// Amount returns the price as a number, 0 for none, and its currency.
func (p Price) Amount() (amount float64, currency string, err error) {
	if p == "" {
		return 0, "", nil
	}
	m := price.FindStringSubmatch(string(p))
	if m == nil {
		return 0, "", fmt.Errorf("must be an amount and its currency such as 0.085 USD, is %q", string(p))
	}
	if amount, err = strconv.ParseFloat(m[1], 64); err != nil {
		return 0, "", err // not reached: the expression lets only numbers pass
	}
	if amount == 0 {
		return 0, "", errors.New("must be above 0; what has no price is left out of the comparison")
	}
	return amount, m[2], nil
}

// Measure is a number above 0 with its unit, in the form that publications use: "4118
// Mb/s", "12.5 MB/s", "72.9 µs".
type Measure string

var measure = regexp.MustCompile(`^([0-9]{1,12}(?:\.[0-9]{1,6})?) (\S(?:.{0,30}\S)?)$`)

// baseUnits maps the units of a Measure to the units of metrics in results, each with the
// factor between the two.
var baseUnits = map[string]struct {
	unit  string
	times float64
}{
	"bit/s": {"bit/s", 1}, "kbit/s": {"bit/s", 1e3}, "Mbit/s": {"bit/s", 1e6}, "Gbit/s": {"bit/s", 1e9},
	"b/s": {"bit/s", 1}, "kb/s": {"bit/s", 1e3}, "Mb/s": {"bit/s", 1e6}, "Gb/s": {"bit/s", 1e9},
	"B/s": {"bit/s", 8}, "kB/s": {"bit/s", 8e3}, "KB/s": {"bit/s", 8e3}, "MB/s": {"bit/s", 8e6}, "GB/s": {"bit/s", 8e9},
	"s": {"s", 1}, "ms": {"s", 1e-3}, "µs": {"s", 1e-6}, "us": {"s", 1e-6}, "ns": {"s", 1e-9},
	"1/s": {"1/s", 1}, "k/s": {"1/s", 1e3}, "s/GB": {"s/GB", 1},
}

// Amount returns the number in a unit of results, such as bit/s, and the factor from the
// measure's own unit to that unit.
func (m Measure) Amount() (amount float64, unit string, times float64, err error) {
	parts := measure.FindStringSubmatch(string(m))
	if parts == nil {
		return 0, "", 0, fmt.Errorf("must be a number and its unit such as 4118 Mb/s or 72.9 µs, is %q", string(m))
	}
	if amount, err = strconv.ParseFloat(parts[1], 64); err != nil {
		return 0, "", 0, err // not reached: the expression lets only numbers pass
	}
	if amount == 0 {
		return 0, "", 0, errors.New("must be above 0")
	}
	base, ok := baseUnits[parts[2]]
	if !ok {
		return 0, "", 0, fmt.Errorf("no metric is in %s; units are %s", parts[2], strings.Join(slices.Sorted(maps.Keys(baseUnits)), ", "))
	}
	return amount * base.times, base.unit, base.times, nil
}

// Limits of Runs with Auto.
const (
	// AutoFirstBlocks is the number of blocks that run before the first look at the
	// intervals.
	AutoFirstBlocks = 8
	autoMax         = 40
	autoWidth       = 0.02
)

// Runs is the number of blocks: a number, or "auto", or {auto: {max: 40, width: 0.02}},
// in which both fields are optional.
type Runs struct {
	// Auto adds blocks until the intervals are narrow enough; N is 0 then.
	Auto bool
	// N is the number of blocks, unless Auto is set.
	N int
	// Max is the maximum number of blocks with Auto, at least AutoFirstBlocks.
	Max int
	// Width is the half-width of a ratio's 95% interval that Auto aims at: 0.02
	// is ±2 %.
	Width float64
}

// decode reads any of the three forms.
func (r *Runs) decode(rd *reader, n *node, path string) {
	auto := Runs{Auto: true, Max: autoMax, Width: autoWidth}
	switch {
	case n.kind == mapping:
		var form struct {
			Auto *struct {
				Max   int     `json:"max"`
				Width float64 `json:"width"`
			} `json:"auto"`
		}
		rd.value(n, &form, path)
		if form.Auto == nil {
			rd.missing(join(path, "auto"))
			return
		}
		if rd.has(join(path, "auto.max")) {
			auto.Max = form.Auto.Max
		}
		if rd.has(join(path, "auto.width")) {
			auto.Width = form.Auto.Width
		}
		*r = auto
	case n.kind == scalar && n.text == "auto":
		*r = auto
	default:
		v, err := strconv.Atoi(n.text)
		if n.kind != scalar || err != nil {
			rd.fail(path, "must be a whole number, auto, or {auto: {max: %d, width: %g}}, is %s", autoMax, autoWidth, n)
		}
		*r = Runs{N: v}
	}
}

// UnmarshalJSON reads any of the three forms.
func (r *Runs) UnmarshalJSON(data []byte) error {
	rd := newReader("runs")
	if n := rd.parse(data, ""); n != nil {
		rd.value(n, r, "")
	}
	return rd.err()
}

// MarshalJSON writes a number, or {"auto": …} with both limits.
func (r Runs) MarshalJSON() ([]byte, error) {
	if !r.Auto {
		return json.Marshal(r.N)
	}
	return fmt.Appendf(nil, `{"auto":{"max":%d,"width":%s}}`, r.Max, strconv.FormatFloat(r.Width, 'g', -1, 64)), nil
}
