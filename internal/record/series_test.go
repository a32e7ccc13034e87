package record

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv"
)

// busySeries returns the series of a node that receives about 10 Gb/s on each NIC, with CPUs busy to
// different degrees.
func busySeries(readings, nics, cpus int) Series {
	r := rand.New(rand.NewPCG(1, 2))
	var s Series
	for i := range readings {
		s.At = append(s.At, int64(i)*100_000+r.Int64N(300))
	}
	for i := range nics {
		nic := NICSeries{Name: fmt.Sprint("eth", i)}
		for range readings - 1 {
			nic.Rx, nic.Tx = append(nic.Rx, 125_000_000+r.Uint64N(1e6)), append(nic.Tx, 400_000+r.Uint64N(1e5))
		}
		s.NICs = append(s.NICs, nic)
	}
	for id := range cpus {
		c := CPUSeries{ID: id}
		for range readings - 1 {
			idle := r.Uint64N(uint64(min(id, 9)) + 1)
			c.Idle, c.Softirq = append(c.Idle, idle), append(c.Softirq, (10-idle)/2)
		}
		s.CPUs = append(s.CPUs, c)
	}
	return s
}

func TestSeriesRoundTrip(t *testing.T) {
	for name, s := range map[string]Series{
		"none":     {},
		"one":      {At: []int64{7}},
		"no CPU":   {At: []int64{0, 1}, NICs: []NICSeries{{Name: "a:1", Rx: []uint64{1 << 63}, Tx: []uint64{0}}}},
		"two CPUs": busySeries(11, 1, 2),
	} {
		got, err := DecodeSeries(EncodeSeries(s))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(s, got, cmp.Transformer("empty", func(c []uint64) string { return fmt.Sprint(c) })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestSeriesIsCompact: for each node, a trial of a second takes a few hundred bytes, and a trial of 20 s on
// a large machine some ten kilobytes.
func TestSeriesIsCompact(t *testing.T) {
	for _, tt := range []struct{ readings, nics, cpus, most int }{
		{11, 1, 0, 200}, {11, 1, 2, 300}, {11, 1, 64, 1200}, {301, 1, 64, 30_000}, {201, 20, 128, 70_000},
	} {
		if n := len(EncodeSeries(busySeries(tt.readings, tt.nics, tt.cpus))); n > tt.most {
			t.Errorf("%d readings of %d NICs and %d CPUs have %d bytes, want at most %d", tt.readings, tt.nics, tt.cpus, n, tt.most)
		}
	}
}

// packed compresses bytes that need not be a valid series.
func packed(b []byte) string {
	var out bytes.Buffer
	w, _ := flate.NewWriter(&out, flate.BestCompression)
	_, _ = w.Write(b)
	_ = w.Close()
	return base64.StdEncoding.EncodeToString(out.Bytes())
}

func TestDecodeSeriesRefuses(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"%", "base64"},
		{"AAAA", "EOF"},
		{"", "EOF"},
		{packed(nil), "a number is missing"},
		{packed([]byte{2, 0, 1, 0}), "a number is missing"},
		{packed([]byte{2, 0, 1, 0, 0, 9}), "1 bytes follow it"},
		{packed([]byte{9, 0}), "ends before 9 values"},
		{packed([]byte{0, 1, 2, 'a'}), "ends before 2 values"},
		{packed([]byte("\x02\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x01\x00\x00")), "a time is out of range"},
		{packed([]byte{3, 0, 1, 1, 1, 1, 'a', 5}), "ends in a column"},
		{packed([]byte{0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 1}), "out of range"},
		{packed(append(binary.AppendUvarint([]byte{0}, mostColumns+1), make([]byte, mostColumns+1)...)), "out of range"},
		{packed(bytes.Repeat([]byte{1}, mostSeries+1)), "more than"},
	} {
		if _, err := DecodeSeries(tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%.40q: %v, want %q", tt.text, err, tt.want)
		}
	}
}

// TestDecodeSeriesNeedsLittle: a short text that unpacks to the maximum size takes little memory, and the
// error is about its first fault only.
func TestDecodeSeriesNeedsLittle(t *testing.T) {
	if testenv.Race {
		t.Skip("the race detector takes a minute and more memory")
	}
	const half = mostSeries / 2
	number := func(start []byte, n uint64) []byte { return binary.AppendUvarint(start, n) }
	for name, tt := range map[string]struct {
		b    []byte
		want string
	}{
		"times":   {append(number(nil, mostSeries-6), make([]byte, mostSeries-4)...), "<nil>"},
		"NICs":    {append(number([]byte{0}, mostSeries-6), make([]byte, mostSeries-5)...), fmt.Sprintf("out of range, %d bytes before the end", mostSeries-1)},
		"CPUs":    {append(number([]byte{0, 0}, mostSeries-6), make([]byte, mostSeries-6)...), fmt.Sprintf("out of range, %d bytes before the end", mostSeries-2)},
		"columns": {slices.Concat(number(nil, half), make([]byte, half), number(nil, mostColumns), make([]byte, half-10)), "decode series: it ends in a column"},
	} {
		text := packed(tt.b)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := DecodeSeries(text)
		runtime.ReadMemStats(&after)
		if message := fmt.Sprint(err); !strings.HasSuffix(message, tt.want) || strings.Contains(message, "\n") {
			t.Errorf("%s: %.100q, want %q", name, message, tt.want)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 100e6 {
			t.Errorf("%s: %d bytes of text took %d bytes", name, len(text), n)
		}
	}
}

// FuzzDecodeSeries: a decoded series has a value for each interval, in order, and encodes and decodes to the
// same again.
func FuzzDecodeSeries(f *testing.F) {
	for _, s := range []Series{{}, busySeries(3, 1, 2)} {
		text := EncodeSeries(s)
		f.Add(text)
		f.Add(text[:len(text)/2])
	}
	f.Add(packed([]byte{2, 0, 1, 1, 3, 'e', 't', 'h', 5, 6, 1, 7, 8, 9}))
	f.Fuzz(func(t *testing.T, text string) {
		s, err := DecodeSeries(text)
		if err != nil {
			return
		}
		intervals := max(0, len(s.At)-1)
		for i := range intervals {
			if s.At[i+1] < s.At[i] || s.At[0] < 0 {
				t.Fatalf("times %v", s.At)
			}
		}
		for _, n := range s.NICs {
			if len(n.Rx) != intervals || len(n.Tx) != intervals {
				t.Fatalf("%d intervals, %+v", intervals, n)
			}
		}
		for _, c := range s.CPUs {
			if c.ID < 0 || len(c.Idle) != intervals || len(c.Softirq) != intervals {
				t.Fatalf("%d intervals, %+v", intervals, c)
			}
		}
		again, err := DecodeSeries(EncodeSeries(s))
		if diff := cmp.Diff(s, again); err != nil || diff != "" {
			t.Fatalf("%v (-first +again):\n%s", err, diff)
		}
	})
}
