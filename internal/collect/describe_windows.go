package collect

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/windows"
	"golang.org/x/sys/windows/registry"

	"slipstream.dev/internal/record"
)

// Keys of the registry, below HKEY_LOCAL_MACHINE.
const (
	keyMachine   = `SOFTWARE\Microsoft\Cryptography`
	keyVersion   = `SOFTWARE\Microsoft\Windows NT\CurrentVersion`
	keyProcessor = `HARDWARE\DESCRIPTION\System\CentralProcessor\0`
	// keyGuest holds what a Hyper-V host, for example in Azure, tells its guests.
	keyGuest = `SOFTWARE\Microsoft\Virtual Machine\Guest\Parameters`
)

var (
	ntdll        = windows.NewLazySystemDLL("ntdll.dll")
	memoryStatus = windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")
)

// Describe returns the facts about this machine that affect a result. Unknown facts are empty. The caller fills in Node.Name
// and Tools.
func Describe() (record.Node, error) {
	v := windows.RtlGetVersion()
	n := record.Node{
		Kernel:       fmt.Sprintf("%d.%d.%d", v.MajorVersion, v.MinorVersion, v.BuildNumber),
		Arch:         map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH],
		Distribution: distribution(),
		CPUModel:     strings.TrimSpace(text(keyProcessor, "ProcessorNameString")),
		CPUs:         "0-" + strconv.Itoa(runtime.NumCPU()-1),
		Clock:        "QueryPerformanceCounter",
		PhysicalHost: text(keyGuest, "PhysicalHostNameFullyQualified"),
	}
	var err error
	if n.Boot, err = boot(); err != nil {
		return n, fmt.Errorf("describe this place: %w", err)
	}
	n.Hypervisor = n.PhysicalHost != ""
	// MEMORYSTATUSEX: its own length, a percentage, and seven sizes, of which the first is that of the memory.
	status := struct {
		length, load uint32
		sizes        [7]uint64
	}{}
	status.length = uint32(unsafe.Sizeof(status))
	if ok, _, _ := memoryStatus.Call(uintptr(unsafe.Pointer(&status))); ok != 0 {
		n.MemoryByte = status.sizes[0]
	}
	links, err := net.Interfaces()
	if err != nil {
		return n, fmt.Errorf("describe this place: %w", err)
	}
	for _, l := range links {
		n.Links = append(n.Links, record.Link{Name: l.Name, MTU: l.MTU})
	}
	return n, nil
}

// boot identifies a machine until it restarts. It is a hash, because the parts would reveal the machine and its owner. The
// MachineGuid alone is not enough, because cloned machines share it.
func boot() (string, error) {
	id := text(keyMachine, "MachineGuid")
	if id == "" {
		return "", errors.New("the registry has no MachineGuid")
	}
	name, err := windows.ComputerName()
	if err != nil {
		return "", fmt.Errorf("read the computer's name: %w", err)
	}
	// SYSTEM_TIMEOFDAY_INFORMATION, in units of 100 ns. Setting the clock moves the boot time and the bias by the same amount.
	var at struct {
		boot, current, zone int64
		zoneID, _           uint32
		bias, sleepBias     int64
	}
	if err := windows.NtQuerySystemInformation(windows.SystemTimeOfDayInformation, unsafe.Pointer(&at), uint32(unsafe.Sizeof(at)), nil); err != nil {
		return "", fmt.Errorf("read the time of the boot: %w", err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %d", id, name, at.boot-at.bias))
	return hex.EncodeToString(sum[:16]), nil
}

// distribution returns the name of the product, and names Wine if that runs this program: its figures are not those of Windows.
func distribution() string {
	product := text(keyVersion, "ProductName")
	wine := ntdll.NewProc("wine_get_version")
	if wine.Find() != nil {
		return product
	}
	version, _, _ := wine.Call()
	return fmt.Sprintf("Wine %s (as %s)", windows.BytePtrToString(*(**byte)(unsafe.Pointer(&version))), product)
}

// text returns a value of the registry, or "".
func text(path, name string) string {
	k, err := registry.OpenKey(registry.LOCAL_MACHINE, path, registry.QUERY_VALUE)
	if err != nil {
		return ""
	}
	defer k.Close()
	s, _, _ := k.GetStringValue(name)
	return s
}
