package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/test/kernels/report"
)

// TestExpectations checks that the file in the tree can be read, has no duplicates, and has
// a result for each machine.
func TestExpectations(t *testing.T) {
	all, err := readExpectations("expected.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[machine]bool)
	for _, e := range all {
		if seen[e.machine] || e.result == "" {
			t.Errorf("%s: twice, or without a result", e)
		}
		seen[e.machine] = true
	}
	for _, bad := range []string{"trixie accelerated", "trixie/mips accelerated", "/amd64 accelerated"} {
		file := filepath.Join(t.TempDir(), "expected")
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if all, err := readExpectations(file); err == nil {
			t.Errorf("%q is read as %v", bad, all)
		}
	}
}

func TestFindKernel(t *testing.T) {
	tree := t.TempDir()
	file := filepath.Join(tree, "usr/lib/modules/6.1/vmlinuz")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if found, err := findKernel(tree); found != file || err != nil {
		t.Errorf("%q, %v, want %s", found, err, file)
	}
	for _, tree := range []string{t.TempDir(), "["} {
		if found, err := findKernel(tree); err == nil {
			t.Errorf("%s: %q, want an error", tree, found)
		}
	}
}

func TestChoose(t *testing.T) {
	known := []expectation{{machine{"sid", "arm64", ""}, "accelerated"}, {machine{"sid", "amd64", "lockdown=confidentiality"}, "unsupported: so"}}
	for _, c := range []struct {
		names []string
		want  []expectation
	}{
		{nil, known},
		{[]string{"sid/amd64/lockdown=confidentiality"}, known[1:]},
		{[]string{"forky/arm64", "sid/arm64"}, []expectation{{machine: machine{"forky", "arm64", ""}}, known[0]}},
	} {
		got, err := choose(known, c.names)
		if err != nil || !cmp.Equal(got, c.want, cmp.AllowUnexported(expectation{}, machine{})) {
			t.Errorf("%q: %v, %v, want %v", c.names, got, err, c.want)
		}
	}
}

func TestResult(t *testing.T) {
	for want, r := range map[string]report.Report{
		"accelerated":               {Tests: []report.Test{{Name: "grammar"}}},
		"unsupported: it lacks tcx": {Unsupported: "it lacks tcx"},
		"failed: beside, policy":    {Tests: []report.Test{{Name: "beside", Error: "x"}, {Name: "grammar"}, {Name: "policy", Error: "y"}}},
		"failed: no tests ran":      {},
	} {
		if got := result(r, nil); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
	if got, want := result(report.Report{}, errors.New("so")), "failed: so"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestDependencies(t *testing.T) {
	record := []byte("Package: x\nPre-Depends: p\nDepends: a (= 1), b | c, d:any (>= 2)\nDescription: Depends: no\n")
	if diff := cmp.Diff([]string{"a", "b", "d"}, dependencies(record)); diff != "" {
		t.Error(diff)
	}
}

func FuzzDependencies(f *testing.F) {
	f.Add([]byte("Depends: a (= 1), , :any\n"))
	f.Fuzz(func(_ *testing.T, record []byte) { dependencies(record) })
}

// kernelModule returns an ELF file whose only content is a section .modinfo.
func kernelModule(info string) []byte {
	names := "\x00.modinfo\x00.shstrtab\x00"
	var b bytes.Buffer
	const head, section = 64, 64
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	put(elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: head, Ehsize: head, Shentsize: section, Shnum: 3, Shstrndx: 2,
	})
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: head + 3*section, Size: uint64(len(info))})
	put(elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: head + 3*section + uint64(len(info)), Size: uint64(len(names))})
	b.WriteString(info + names)
	return b.Bytes()
}

// TestLoad checks that modules are loaded once, after their dependencies.
func TestLoad(t *testing.T) {
	dir := t.TempDir()
	for file, info := range map[string]string{
		"nft-ct.ko":    "license=GPL\x00depends=nf-conntrack,nf_tables\x00",
		"nf_tables.ko": "depends=\x00", "nf_conntrack.ko": "depends=nf_tables,built_in\x00", "other.ko": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, file), kernelModule(info), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := findModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	load, err := all.load(t.Context(), []string{"nft_ct", "absent", "nf_tables"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range load {
		got = append(got, m.name)
	}
	if diff := cmp.Diff([]string{"nf_tables", "nf_conntrack", "nft_ct"}, got); diff != "" {
		t.Error(diff)
	}
}

func FuzzNeeded(f *testing.F) {
	f.Add(kernelModule("depends=a,b\x00"))
	f.Fuzz(func(_ *testing.T, content []byte) { _, _ = needed(content) })
}
