//go:build linux

package testenv

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
)

// prngLibrary returns a bcryptprimitives.dll, which Go's runtime loads and Wine 8 lacks. It contains only the
// function that the runtime needs, ProcessPrng, and forwards that export to advapi32's SystemFunction036
// (RtlGenRandom), which has the same arguments. So the library needs no code ("PE Format", the .edata section).
func prngLibrary() []byte {
	const (
		headers, section     = 0x200, 0x1000 // where the section is in the file, and in memory
		directory            = 40            // bytes of the export directory
		functions            = section + directory
		names                = functions + 4
		ordinals             = names + 4
		library              = ordinals + 2
		name, forwarder, end = library + len("bcryptprimitives.dll") + 1, library + len("bcryptprimitives.dll") + 1 + len("ProcessPrng") + 1,
			library + len("bcryptprimitives.dll") + 1 + len("ProcessPrng") + 1 + len("ADVAPI32.SystemFunction036") + 1
	)
	optional := pe.OptionalHeader64{
		Magic: 0x20b, ImageBase: 0x6a000000, SectionAlignment: section, FileAlignment: headers,
		MajorOperatingSystemVersion: 6, MajorSubsystemVersion: 6, SizeOfImage: 2 * section, SizeOfHeaders: headers,
		SizeOfInitializedData: headers, Subsystem: pe.IMAGE_SUBSYSTEM_WINDOWS_CUI, NumberOfRvaAndSizes: 16,
	}
	optional.DataDirectory[pe.IMAGE_DIRECTORY_ENTRY_EXPORT] = pe.DataDirectory{VirtualAddress: section, Size: uint32(end - section)}
	const dos = 64
	var b bytes.Buffer
	start := make([]byte, dos)
	copy(start, "MZ")
	start[0x3c] = dos
	b.Write(start)
	b.WriteString("PE\x00\x00")
	for _, part := range []any{
		pe.FileHeader{
			Machine: pe.IMAGE_FILE_MACHINE_AMD64, NumberOfSections: 1, SizeOfOptionalHeader: uint16(binary.Size(optional)),
			Characteristics: pe.IMAGE_FILE_EXECUTABLE_IMAGE | pe.IMAGE_FILE_LARGE_ADDRESS_AWARE | pe.IMAGE_FILE_DLL,
		},
		optional,
		pe.SectionHeader32{
			Name: [8]uint8{'.', 'e', 'd', 'a', 't', 'a'}, VirtualSize: uint32(end - section), VirtualAddress: section,
			SizeOfRawData: headers, PointerToRawData: headers,
			Characteristics: pe.IMAGE_SCN_CNT_INITIALIZED_DATA | pe.IMAGE_SCN_MEM_READ,
		},
	} {
		_ = binary.Write(&b, binary.LittleEndian, part) // this cannot fail: it writes fixed sizes to memory
	}
	b.Write(make([]byte, headers-b.Len()))
	// The directory: its own name, the first ordinal, the number of functions and of names, and their offsets.
	for _, v := range []uint32{0, 0, 0, uint32(library), 1, 1, 1, functions, names, ordinals, uint32(forwarder), uint32(name)} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	b.WriteString("\x00\x00bcryptprimitives.dll\x00ProcessPrng\x00ADVAPI32.SystemFunction036\x00")
	b.Write(make([]byte, 2*headers-b.Len()))
	return b.Bytes()
}
