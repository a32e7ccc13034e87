package main

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// modules are the kernel modules that the fast path and its tests need. The image leaves
// out modules that a kernel has built in, or lacks.
var modules = []string{
	"veth", "bridge", "vxlan", "tun", "dummy", "8021q", "bonding", "macvlan",
	"nf_conntrack", "nf_conntrack_netlink", "nf_tables", "nft_ct", "nft_nat", "nft_masq", "nft_chain_nat", "nft_compat", "nft_limit", "nft_counter", "nft_meta_bridge",
	"nf_flow_table", "nf_flow_table_inet", "nft_flow_offload",
	"ip_tables", "iptable_filter", "iptable_raw", "iptable_mangle", "ip6_tables", "xt_tcpudp", "xt_conntrack",
	"ip_set", "ip_set_hash_ip", "xt_set", "xt_mark", "xt_comment", "xt_multiport", "xt_addrtype", "xt_physdev", "xt_limit", "ipt_rpfilter", "ipt_REJECT",
	"nfnetlink_log", "nft_log", "xt_NFLOG", "nfnetlink_queue", "xt_NFQUEUE", "br_netfilter",
	"sch_ingress", "sch_fq", "sch_fq_codel", "sch_tbf", "sch_htb", "cls_bpf", "act_bpf", "cls_matchall", "cls_u32",
}

// libraries maps the names of a kernel's modules, as dependencies use them, to their
// files.
type libraries map[string]string

func findModules(tree string) (libraries, error) {
	all := make(libraries)
	return all, filepath.WalkDir(tree, func(path string, _ fs.DirEntry, err error) error {
		if name, _, is := strings.Cut(filepath.Base(path), ".ko"); is {
			all[moduleName(name)] = path
		}
		return err
	})
}

// moduleName returns a module's name as the kernel spells it. Files and dependencies may
// spell it differently.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// module is a module in the format that the kernel loads.
type module struct {
	name    string
	content []byte
}

// load returns modules with their dependencies, in the order in which to load them.
func (l libraries) load(ctx context.Context, names []string) (all []module, err error) {
	done := make(map[string]bool)
	var visit func(name string) error
	visit = func(name string) error {
		path, there := l[name]
		if done[name] || !there {
			return nil
		}
		done[name] = true
		content, err := decompress(ctx, path)
		if err != nil {
			return err
		}
		needs, err := needed(content)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, n := range needs {
			if err := visit(n); err != nil {
				return err
			}
		}
		all = append(all, module{name, content})
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func decompress(ctx context.Context, path string) ([]byte, error) {
	for suffix, program := range map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"} {
		if strings.HasSuffix(path, suffix) {
			return command(ctx, "", nil, program, "-dc", path)
		}
	}
	return os.ReadFile(path)
}

// needed returns the modules that a module names as its dependencies.
func needed(content []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("it is no kernel module: there is no section .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for entry := range strings.SplitSeq(string(info), "\x00") {
		if list, is := strings.CutPrefix(entry, "depends="); is && list != "" {
			return strings.Split(moduleName(list), ","), nil
		}
	}
	return nil, nil
}

// cpio writes an archive in the format of the kernel's initramfs
// (Documentation/driver-api/early-userspace/buffer-format.rst). A file may contain several
// archives, one after another.
type cpio struct {
	io.Writer
	err   error
	at    int
	inode int
	there map[string]bool
}

func newCPIO(w io.Writer) *cpio { return &cpio{Writer: w, there: make(map[string]bool)} }

// add adds a file, and those of its parent folders that are missing.
func (c *cpio) add(name string, mode fs.FileMode, content []byte) {
	name = strings.TrimPrefix(filepath.Clean(name), "/")
	if c.there[name] {
		return
	}
	c.there[name] = true
	if above := filepath.Dir(name); above != "." {
		c.add(above, fs.ModeDir|0o755, nil)
	}
	c.inode++
	bits := uint32(mode.Perm())
	switch mode.Type() {
	case fs.ModeDir:
		bits |= 0o040000
	case fs.ModeSymlink:
		bits |= 0o120000
	default:
		bits |= 0o100000
	}
	// magic ino mode uid gid nlink mtime filesize maj min rmaj rmin namesize chksum
	c.print("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, bits, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0, name)
	c.pad()
	c.print("%s", content)
	c.pad()
}

// close ends the archive.
func (c *cpio) close() error {
	c.add("TRAILER!!!", 0, nil)
	return c.err
}

func (c *cpio) pad() { c.print("%s", make([]byte, -c.at&3)) }

func (c *cpio) print(format string, args ...any) {
	if c.err != nil {
		return
	}
	n, err := fmt.Fprintf(c, format, args...)
	c.at, c.err = c.at+n, err
}

// addTree adds the contents of a folder, except for those that skip names.
func (c *cpio) addTree(tree string, skip ...string) error {
	return filepath.WalkDir(tree, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(tree, path)
		if err != nil || name == "." {
			return err
		}
		if slices.ContainsFunc(skip, func(s string) bool { ok, _ := filepath.Match(s, name); return ok }) {
			return fs.SkipDir
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		var content []byte
		switch info.Mode().Type() {
		case fs.ModeSymlink:
			var to string
			to, err = os.Readlink(path)
			content = []byte(to)
		case 0:
			content, err = os.ReadFile(path)
		}
		c.add(name, info.Mode(), content)
		return err
	})
}

// addModules adds a kernel's modules, and a file that lists them in load order.
func (c *cpio) addModules(ctx context.Context, tree string) error {
	all, err := findModules(tree)
	if err != nil {
		return err
	}
	load, err := all.load(ctx, modules)
	if err != nil {
		return err
	}
	var order strings.Builder
	for _, m := range load {
		fmt.Fprintln(&order, m.name)
		c.add("modules/"+m.name, 0o644, m.content)
	}
	c.add("modules/order", 0o644, []byte(order.String()))
	return nil
}
