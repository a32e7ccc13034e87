package record

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// Series has what a node counted in the course of the measured window. Its counters were read about every
// 100 ms. Its columns have a value for each interval between two readings.
type Series struct {
	// At has the times of the readings in µs since the planned start of the window. The first and the
	// last are at its edges. A late reading has the time at which it was made.
	At   []int64
	NICs []NICSeries
	CPUs []CPUSeries // by number; none if the machine's CPUs were sampled with another node
}

// NICSeries has the bytes of a NIC, or of the virtual function below one.
type NICSeries struct {
	Name   string
	Rx, Tx []uint64
}

// CPUSeries has the times of a CPU, in units of SeriesTick.
type CPUSeries struct {
	ID            int
	Idle, Softirq []uint64
}

// SeriesTick is the unit of CPU times, in seconds: the clock tick of /proc/stat.
const SeriesTick = 0.01

// A series has at most mostSeries bytes before compression, at most mostColumns NICs, and at most as many CPUs:
// more than any machine needs. A value takes at least a byte, so decoding any text needs less than 100 MB.
const (
	mostSeries  = 8 << 20
	mostColumns = 1 << 14
)

// EncodeSeries returns the text for Trial.Series: unsigned varints (encoding/binary), compressed by
// DEFLATE, in base64. The varints are the number of readings, and for each the µs since the one before; the
// number of NICs, and for each the length of its name, the name, and its columns rx and tx; the number of
// CPUs, and for each its number and its columns idle and softirq.
func EncodeSeries(s Series) string {
	var b []byte
	put := func(v uint64) { b = binary.AppendUvarint(b, v) }
	columns := func(all ...[]uint64) {
		for _, c := range all {
			for _, v := range c {
				put(v)
			}
		}
	}
	put(uint64(len(s.At)))
	last := int64(0)
	for _, at := range s.At {
		put(uint64(at - last))
		last = at
	}
	put(uint64(len(s.NICs)))
	for _, n := range s.NICs {
		put(uint64(len(n.Name)))
		b = append(b, n.Name...)
		columns(n.Rx, n.Tx)
	}
	put(uint64(len(s.CPUs)))
	for _, c := range s.CPUs {
		put(uint64(c.ID))
		columns(c.Idle, c.Softirq)
	}
	var packed bytes.Buffer
	w, _ := flate.NewWriter(&packed, flate.BestCompression) // the level is valid
	_, _ = w.Write(b)                                       // a Buffer takes everything
	_ = w.Close()
	return base64.StdEncoding.EncodeToString(packed.Bytes())
}

// DecodeSeries reads the text of EncodeSeries.
func DecodeSeries(text string) (Series, error) {
	packed, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return Series{}, fmt.Errorf("decode series: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), mostSeries+1))
	if err == nil && len(b) > mostSeries {
		err = fmt.Errorf("it has more than %d bytes", mostSeries)
	}
	var s Series
	if err == nil {
		s, err = parseSeries(b)
	}
	if err != nil {
		return Series{}, fmt.Errorf("decode series: %w", err)
	}
	return s, nil
}

func parseSeries(b []byte) (s Series, err error) {
	d := seriesDecoder{rest: b}
	n := d.count(mostSeries)
	if n > 0 {
		s.At = make([]int64, n)
	}
	at := uint64(0)
	for i := range s.At {
		// Both fit in 63 bits, so their sum does not wrap.
		if at += d.number(math.MaxInt64); at > math.MaxInt64 {
			return s, errors.New("a time is out of range")
		}
		s.At[i] = int64(at)
	}
	intervals := max(0, n-1)
	for range d.count(mostColumns) {
		nic := NICSeries{Name: d.name()}
		nic.Rx, nic.Tx = d.column(intervals), d.column(intervals)
		s.NICs = append(s.NICs, nic)
	}
	for range d.count(mostColumns) {
		cpu := CPUSeries{ID: int(d.number(math.MaxInt32))}
		cpu.Idle, cpu.Softirq = d.column(intervals), d.column(intervals)
		s.CPUs = append(s.CPUs, cpu)
	}
	if d.err == nil && len(d.rest) > 0 {
		d.err = fmt.Errorf("%d bytes follow it", len(d.rest))
	}
	return s, d.err
}

// seriesDecoder takes values from the start of rest. After the first error, all values are 0.
type seriesDecoder struct {
	rest []byte
	err  error
}

func (d *seriesDecoder) number(most uint64) uint64 {
	v, n := binary.Uvarint(d.rest)
	if d.err == nil && (n <= 0 || v > most) {
		d.err = fmt.Errorf("a number is missing or out of range, %d bytes before the end", len(d.rest))
	}
	if d.err != nil {
		return 0
	}
	d.rest = d.rest[n:]
	return v
}

// count returns a number of things that follow. It is at most the given number, and at most the number of
// remaining bytes.
func (d *seriesDecoder) count(most uint64) int {
	n := d.number(most)
	if d.err == nil && n > uint64(len(d.rest)) {
		d.err = fmt.Errorf("it ends before %d values", n)
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

func (d *seriesDecoder) name() string {
	n := d.count(mostSeries)
	name := d.rest[:n]
	d.rest = d.rest[n:]
	return string(name)
}

func (d *seriesDecoder) column(n int) []uint64 {
	if d.err == nil && n > len(d.rest) {
		d.err = errors.New("it ends in a column")
	}
	if d.err != nil {
		return nil
	}
	c := make([]uint64, n)
	for i := range c {
		c[i] = d.number(math.MaxUint64)
	}
	return c
}
