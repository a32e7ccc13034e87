package collect

import (
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
	keyBoot      = `SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters`
	keyVersion   = `SOFTWARE\Microsoft\Windows NT\CurrentVersion`
	keyProcessor = `HARDWARE\DESCRIPTION\System\CentralProcessor\0`
	// keyGuest has what Hyper-V tells its guests, Azure's among them.
	keyGuest = `SOFTWARE\Microsoft\Virtual Machine\Guest\Parameters`
)

var (
	ntdll        = windows.NewLazySystemDLL("ntdll.dll")
	memoryStatus = windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")
)

// Describe returns the facts of this machine that affect a result, as Windows tells them. Facts that it
// does not tell are empty. The caller fills in Node.Name and Tools.
func Describe() (record.Node, error) {
	v := windows.RtlGetVersion()
	n := record.Node{
		Boot:         text(keyMachine, "MachineGuid"),
		Kernel:       fmt.Sprintf("%d.%d.%d", v.MajorVersion, v.MinorVersion, v.BuildNumber),
		Arch:         map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH],
		Distribution: distribution(),
		CPUModel:     strings.TrimSpace(text(keyProcessor, "ProcessorNameString")),
		CPUs:         "0-" + strconv.Itoa(runtime.NumCPU()-1),
		Clock:        "QueryPerformanceCounter",
		PhysicalHost: text(keyGuest, "PhysicalHostNameFullyQualified"),
	}
	if n.Boot == "" {
		return n, errors.New("describe this place: the registry has no MachineGuid")
	}
	if boot, ok := number(keyBoot, "BootId"); ok {
		n.Boot += "-" + strconv.FormatUint(boot, 10)
	}
	n.Hypervisor = n.PhysicalHost != ""
	// MEMORYSTATUSEX: its own length, a percentage, and seven sizes, the first that of the memory.
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

// distribution is the name of the product, or Wine's, whose figures are not those of Windows.
func distribution() string {
	product := text(keyVersion, "ProductName")
	wine := ntdll.NewProc("wine_get_version")
	if wine.Find() != nil {
		return product
	}
	version, _, _ := wine.Call()
	return fmt.Sprintf("Wine %s (as %s)", windows.BytePtrToString(*(**byte)(unsafe.Pointer(&version))), product)
}

// text is a value of the registry, "" if there is none.
func text(path, name string) string {
	k, err := registry.OpenKey(registry.LOCAL_MACHINE, path, registry.QUERY_VALUE)
	if err != nil {
		return ""
	}
	defer k.Close()
	s, _, _ := k.GetStringValue(name)
	return s
}

func number(path, name string) (n uint64, ok bool) {
	k, err := registry.OpenKey(registry.LOCAL_MACHINE, path, registry.QUERY_VALUE)
	if err != nil {
		return 0, false
	}
	defer k.Close()
	n, _, err = k.GetIntegerValue(name)
	return n, err == nil
}
