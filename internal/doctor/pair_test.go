package doctor

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// TestManyPairs compares 500 nodes with 100 pods each in a time that a user waits for, and finds the one whose overlay has another
// MAC address than the others have stored, in each pair.
func TestManyPairs(t *testing.T) {
	const nodes, pods, wrong = 500, 100, 7
	mac := func(i int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255) }
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 77, byte(i >> 8), byte(i)}) }
	var peers []Peer
	for i := range nodes {
		overlay := Device{Link: record.Link{Name: "flannel.1", Kind: "vxlan"}, VNI: 1, VXLANPort: 8472, MAC: mac(i)}
		if i == wrong {
			overlay.MAC = "02:00:00:00:ff:ff"
		}
		for j := range nodes {
			if j != i {
				overlay.FDB = append(overlay.FDB, FDBEntry{mac(j), address(j)})
			}
		}
		network := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + i>>8), byte(i), 1}), 24)
		f := Facts{Devices: []Device{overlay, {Link: record.Link{Name: "eth0"}, Addresses: []netip.Prefix{netip.PrefixFrom(address(i), 16)}},
			{Link: record.Link{Name: "cni0", Kind: "bridge"}, Addresses: []netip.Prefix{network}}}}
		for range pods {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "v", Kind: "veth", Class: v1alpha1.DeviceHostVeth}, Master: "cni0", Pod: &PodEnd{}})
		}
		peers = append(peers, NewPeer(fmt.Sprintf("node%03d", i), f))
	}
	began, found := time.Now(), 0
	for i, client := range peers {
		for j, server := range peers {
			if i != j {
				found += len(ExaminePair(client, server))
			}
		}
	}
	if took := time.Since(began); found != nodes-1 || took > 20*time.Second {
		t.Errorf("%d findings in %s", found, took)
	}
	t.Logf("%d pairs in %s", nodes*(nodes-1), time.Since(began))
}
