//go:build linux

package collect

import (
	"strings"
	"testing"
	"testing/fstest"
)

// kvpPool is a pool as the KVP daemon writes it.
func kvpPool(pairs ...string) (pool []byte) {
	for i, s := range pairs {
		size := kvpKey
		if i%2 == 1 {
			size = kvpValue
		}
		pool = append(pool, s...)
		pool = append(pool, make([]byte, size-len(s))...)
	}
	return pool
}

func TestPhysicalHost(t *testing.T) {
	full := kvpPool("HostName", "host.example", "PhysicalHostName", "RACK7-12", "VirtualMachineName", "east1")
	for _, test := range []struct {
		name, want string
		pool       []byte
	}{
		{"as the daemon writes it", "RACK7-12", full},
		{"written in part", "", full[:kvpKey+kvpValue+kvpKey+100]},
		{"without the key", "", kvpPool("HostName", "host.example")},
		{"full fields without a zero", strings.Repeat("v", kvpValue), kvpPool(strings.Repeat("k", kvpKey), "x", "PhysicalHostName", strings.Repeat("v", kvpValue))},
		{"empty", "", nil},
	} {
		proc := fstest.MapFS{
			bootID: {Data: []byte("x\n")}, "sys/kernel/osrelease": {Data: []byte("6.1\n")},
			hostFacts: {Data: test.pool},
		}
		n, err := Describe(t.Context(), proc, fstest.MapFS{})
		if err != nil || n.PhysicalHost != test.want {
			t.Errorf("%s: %q, error %v, want %q", test.name, n.PhysicalHost, err, test.want)
		}
		if h := (&Collector{proc: proc}).Host(Snapshot{}, Snapshot{}); h.PhysicalHost != test.want {
			t.Errorf("%s: %q in a window, want %q", test.name, h.PhysicalHost, test.want)
		}
	}
}

func FuzzKVP(f *testing.F) {
	f.Add(kvpPool("PhysicalHostName", "RACK7-12"), "PhysicalHostName")
	f.Fuzz(func(t *testing.T, pool []byte, key string) {
		if v := kvp(pool, key); len(v) > kvpValue || strings.ContainsRune(v, 0) {
			t.Errorf("%q", v)
		}
	})
}
