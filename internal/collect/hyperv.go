//go:build linux

package collect

import (
	"bytes"
	"io/fs"
)

// hostFacts is the file in which the KVP daemon stores what a Hyper-V host tells its guests about itself: the pool
// KVP_POOL_AUTO_EXTERNAL in /var/lib/hyperv (tools/hv/hv_kvp_daemon.c).
const hostFacts = "self/root/var/lib/hyperv/.kvp_pool_3"

// Sizes of a record: HV_KVP_EXCHANGE_MAX_KEY_SIZE and HV_KVP_EXCHANGE_MAX_VALUE_SIZE
// (include/uapi/linux/hyperv.h).
const (
	kvpKey   = 512
	kvpValue = 2048
)

// physicalHost returns the name of the machine on which this virtual machine runs, or "" if the hypervisor does not tell. proc
// is /proc.
func physicalHost(proc fs.FS) string {
	pool, _ := fs.ReadFile(proc, hostFacts)
	return kvp(pool, "PhysicalHostName")
}

// kvp returns a value of a KVP pool, which consists of records of a key and a value, each padded with zeros.
func kvp(pool []byte, key string) string {
	for ; len(pool) >= kvpKey+kvpValue; pool = pool[kvpKey+kvpValue:] {
		k, _, _ := bytes.Cut(pool[:kvpKey], []byte{0})
		v, _, _ := bytes.Cut(pool[kvpKey:kvpKey+kvpValue], []byte{0})
		if string(k) == key {
			return string(v)
		}
	}
	return ""
}
