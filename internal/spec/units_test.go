package spec

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

func TestUnits(t *testing.T) {
	type file struct {
		Duration Duration `json:"duration"`
		Bytes    Bytes    `json:"bytes"`
		Runs     Runs     `json:"runs"`
	}
	for _, c := range []struct {
		text, canonical string
		want            file
	}{
		{`{"duration":"90s","bytes":64,"runs":20}`, `{"duration":"1m30s","bytes":64,"runs":20}`, file{Duration(90 * time.Second), 64, Runs{N: 20}}},
		{`{"duration":"2h","bytes":"128KiB","runs":"auto"}`, `{"duration":"2h","bytes":"128KiB","runs":{"auto":{"max":40,"width":0.02}}}`, file{Duration(2 * time.Hour), 131072, Runs{Auto: true, Max: 40, Width: 0.02}}},
		{`{"duration":"1m","bytes":"1MiB","runs":{"auto":{"width":0.01}}}`, `{"duration":"1m","bytes":"1MiB","runs":{"auto":{"max":40,"width":0.01}}}`, file{Duration(time.Minute), 1 << 20, Runs{Auto: true, Max: 40, Width: 0.01}}},
		{`{"duration":"10ms","bytes":"128k","runs":1}`, `{"duration":"10ms","bytes":"128k","runs":1}`, file{Duration(10 * time.Millisecond), 128000, Runs{N: 1}}},
		{`{"duration":"1h0m5s","bytes":"3M","runs":1}`, `{"duration":"1h0m5s","bytes":"3M","runs":1}`, file{Duration(time.Hour + 5*time.Second), 3e6, Runs{N: 1}}},
		{`{"duration":"0s","bytes":0,"runs":0}`, `{"duration":"0s","bytes":0,"runs":0}`, file{}},
	} {
		var fromJSON, fromYAML file
		if err := json.Unmarshal([]byte(c.text), &fromJSON); err != nil || fromJSON != c.want {
			t.Errorf("JSON %s: got %+v, %v, want %+v", c.text, fromJSON, err, c.want)
		}
		if err := yaml.UnmarshalWithOptions([]byte(c.text), &fromYAML, yaml.UseJSONUnmarshaler()); err != nil || fromYAML != c.want {
			t.Errorf("YAML %s: got %+v, %v, want %+v", c.text, fromYAML, err, c.want)
		}
		if got, err := json.Marshal(c.want); err != nil || string(got) != c.canonical {
			t.Errorf("marshal %+v: got %s, %v, want %s", c.want, got, err, c.canonical)
		}
	}
	for _, text := range []string{
		`{"duration":"30"}`, `{"duration":"half an hour"}`,
		`{"bytes":"64KB"}`, `{"bytes":"KiB"}`, `{"bytes":1.5}`, `{"bytes":"9223372036854775807k"}`,
		`{"runs":"some"}`, `{"runs":1.5}`, `{"runs":{"auto":{"least":3}}}`, `{"runs":{}}`,
	} {
		if err := json.Unmarshal([]byte(text), new(file)); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}

func TestBitsPerSecond(t *testing.T) {
	for rate, want := range map[BitRate]uint64{"": 0, "10Gbit": 10e9, "2.5Gbit": 2.5e9, "500Mbit": 500e6, "64kbit": 64e3, "9600bit": 9600} {
		if got, err := rate.BitsPerSecond(); err != nil || got != want {
			t.Errorf("%q: got %d, %v, want %d", rate, got, err, want)
		}
	}
	for _, rate := range []BitRate{"10", "10Gb", "10GBit", "-1Mbit", "0Gbit", "1e3bit", "10 Gbit", ".5Gbit"} {
		if got, err := rate.BitsPerSecond(); err == nil {
			t.Errorf("%q: got %d, want an error", rate, got)
		}
	}
}
