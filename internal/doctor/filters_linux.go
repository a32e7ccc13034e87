package doctor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"slices"
	"strings"
	"unsafe"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/netns"
)

// filters holds what netfilter does with packets for this node and for pods.
type filters struct {
	chains []Chain
	// rules counts the rules of iptables, by "legacy" and "nft".
	rules     map[string]int
	kubeProxy string
	// unread says what was not read, and why.
	unread []Evidence
}

// filters reads the rules of nftables and of iptables. ours reports whether a packet of a pod may come from or go to a device
// with that name. What this process may not read is left out.
func (l looker) filters(ours func(string) bool) filters {
	f := filters{rules: make(map[string]int)}
	f.failed("nftables", f.readNFT(ours))
	f.failed("iptables-legacy", f.readLegacy(strings.Fields(kernelfs.Text(l.proc, own+"/net/ip_tables_names")), ours))
	return f
}

// failed notes that rules were not read. A chain may go away meanwhile, and the rest is read all the same.
func (f *filters) failed(of string, err error) {
	if err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EPERM) {
		f.unread = append(f.unread, evidence("rules of "+of+" were not read", "%v", err))
	}
}

// isKube reports whether kube-proxy, or the kubelet, makes chains with that name.
func isKube(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }

var nftFamilies = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyBridge: "bridge",
}

// readNFT reads the chains of nftables, and the rules of those that forwarded packets pass.
func (f *filters) readNFT(ours func(string) bool) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	chains, err := netns.Dump("chains of nftables", conn.ListChains)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a kernel without nftables
	}
	if err != nil {
		return err
	}
	counters, err := policyCounters()
	if err != nil {
		return err
	}
	for _, c := range chains {
		if isKube(c.Name) && f.kubeProxy == "" {
			f.kubeProxy = chainName(c)
		}
		if isIPTables(c) {
			rules, err := conn.GetRules(c.Table, c)
			f.failed(chainName(c), err)
			f.rules["nft"] += len(rules)
		}
		if _, known := nftFamilies[c.Table.Family]; !known || c.Hooknum == nil || c.Type != nftables.ChainTypeFilter {
			continue
		}
		hook, known := hooks[*c.Hooknum]
		if !known {
			continue
		}
		chain := Chain{Name: chainName(c), Hook: hook, Drops: c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop}
		chain.Dropped, chain.Counted = counters[chain.Name]
		if chain.RuleDropped, err = ruleDropped(conn, c.Table, c.Name, make(map[string]bool)); err != nil {
			f.failed(chain.Name, err)
			continue
		}
		if hook == hookForward {
			o := opening{conn, ours, make(map[string]bool)}
			end, err := o.walk(c.Table, c.Name)
			if err != nil {
				f.failed(chain.Name, err)
				continue
			}
			chain.Opens = end.opens
			if !chain.Drops && end.closes {
				chain.Drops, chain.ByRule, chain.Dropped, chain.Counted = true, true, end.dropped, end.counted
			}
		}
		f.chains = append(f.chains, chain)
	}
	return nil
}

// chainName returns a name that tells which tool shows a chain.
func chainName(c *nftables.Chain) string {
	return fmt.Sprintf("nft %s %s %s", nftFamilies[c.Table.Family], c.Table.Name, c.Name)
}

// hooks are the hooks of netfilter that packets for this node and for pods pass.
var hooks = map[nftables.ChainHook]string{
	*nftables.ChainHookPrerouting: "prerouting", *nftables.ChainHookInput: hookInput, *nftables.ChainHookForward: hookForward,
}

// ruleDropped adds up the counters of the rules that drop or reject packets, in a chain and those that it jumps to. It leaves out
// chains that programs make for network policies, which drop on purpose, and rules without counters.
func ruleDropped(conn *nftables.Conn, table *nftables.Table, chain string, seen map[string]bool) (n uint64, err error) {
	if seen[chain] || isPolicy(chain) {
		return 0, nil
	}
	seen[chain] = true
	rules, err := conn.GetRules(table, &nftables.Chain{Name: chain, Table: table})
	if err != nil {
		return 0, fmt.Errorf("list rules of nftables: %w", err)
	}
	for _, r := range rules {
		var packets uint64
		for _, e := range r.Exprs {
			switch e := e.(type) {
			case *expr.Counter:
				packets = e.Packets
			case *expr.Reject:
				n += packets
			case *expr.Target:
				if e.Name == "REJECT" {
					n += packets
				}
			case *expr.Verdict:
				switch e.Kind {
				case expr.VerdictDrop:
					n += packets
				case expr.VerdictJump, expr.VerdictGoto:
					more, err := ruleDropped(conn, table, e.Chain, seen)
					if err != nil {
						return 0, err
					}
					n += more
				}
			}
		}
	}
	return n, nil
}

// isPolicy reports whether a program makes chains with that name for its network policies or services.
func isPolicy(chain string) bool {
	return slices.ContainsFunc([]string{"KUBE-", "cali-", "CILIUM_", "WEAVE-NPC", "ANTREA-", "AZURE-NPM"}, func(prefix string) bool { return strings.HasPrefix(chain, prefix) })
}

// isIPTables reports whether iptables-nft made a base chain: it has one of iptables' names.
func isIPTables(c *nftables.Chain) bool {
	return c.Hooknum != nil && c.Table.Family == nftables.TableFamilyIPv4 && slices.Contains([]string{"filter", "nat", "mangle", "raw"}, c.Table.Name) && c.Name == strings.ToUpper(c.Name)
}

// policyCounters returns how many packets met the policies of base chains, by the chains' names. Only chains that
// iptables-nft makes, and those with a counter in their definition, have one.
func policyCounters() (map[string]uint64, error) {
	messages, err := netns.Dump("chains of nftables", func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_UNSPEC, Version: nl.NFNETLINK_V0})
		return request.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err != nil {
		return nil, err
	}
	all := make(map[string]uint64)
	for _, m := range messages {
		if name, packets, ok := policyCounter(m); ok {
			all[name] = packets
		}
	}
	return all, nil
}

// policyCounter parses a message about a chain; ok is false if the chain has no counter.
func policyCounter(message []byte) (name string, packets uint64, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return "", 0, false
	}
	a, err := mdlayher.NewAttributeDecoder(message[nl.SizeofNfgenmsg:])
	if err != nil {
		return "", 0, false
	}
	var table, chain string
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_CHAIN_TABLE:
			table = a.String()
		case unix.NFTA_CHAIN_NAME:
			chain = a.String()
		case unix.NFTA_CHAIN_COUNTERS:
			a.Nested(func(c *mdlayher.AttributeDecoder) error {
				c.ByteOrder = binary.BigEndian
				for c.Next() {
					if c.Type() == unix.NFTA_COUNTER_PACKETS {
						packets, ok = c.Uint64(), true
					}
				}
				return nil
			})
		}
	}
	if a.Err() != nil {
		return "", 0, false
	}
	return fmt.Sprintf("nft %s %s %s", nftFamilies[nftables.TableFamily(message[0])], table, chain), packets, ok
}

// opening finds out whether rules of nftables accept new connections of pods, before a rule that drops all others.
type opening struct {
	conn *nftables.Conn
	ours func(string) bool
	seen map[string]bool
}

// outcome is the effect of rules on packets that open connections of pods: the rules accept some of them, or drop all
// that remain.
type outcome struct {
	opens, closes bool
	// dropped counts the packets that met the rule which closes, if it is counted.
	dropped uint64
	counted bool
}

func (o opening) walk(table *nftables.Table, chain string) (outcome, error) {
	if o.seen[chain] {
		return outcome{}, nil
	}
	o.seen[chain] = true
	rules, err := o.conn.GetRules(table, &nftables.Chain{Name: chain, Table: table})
	if err != nil {
		return outcome{}, fmt.Errorf("list rules of nftables: %w", err)
	}
	for _, r := range rules {
		if end := closing(r.Exprs); end.closes {
			return end, nil
		}
		verdict, ok := o.verdict(r.Exprs, isKube(chain))
		if !ok {
			continue
		}
		switch verdict.Kind {
		case expr.VerdictAccept:
			return outcome{opens: true}, nil
		case expr.VerdictJump, expr.VerdictGoto:
			end, err := o.walk(table, verdict.Chain)
			if end.opens || end.closes && unconditional(r.Exprs) || err != nil {
				return end, err
			}
		case expr.VerdictReturn:
			if unconditional(r.Exprs) {
				return outcome{}, nil
			}
		}
	}
	return outcome{}, nil
}

// unconditional reports whether a rule applies to every packet.
func unconditional(exprs []expr.Any) bool {
	return !slices.ContainsFunc(exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Counter, *expr.Log, *expr.Verdict, *expr.Reject, *expr.Target:
			return false
		case *expr.Match:
			return e.Name != "comment"
		}
		return true
	})
}

// closing reports whether a rule drops or rejects every packet that it meets.
func closing(exprs []expr.Any) (end outcome) {
	if !unconditional(exprs) {
		return end
	}
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Counter:
			end.dropped, end.counted = e.Packets, true
		case *expr.Reject:
			end.closes = true
		case *expr.Target:
			end.closes = end.closes || e.Name == "REJECT"
		case *expr.Verdict:
			end.closes = end.closes || e.Kind == expr.VerdictDrop
		}
	}
	return end
}

// verdict returns what a rule does with a packet that opens a connection of a pod; ok is false if it does nothing with such
// packets. Where a rule compares a mark, it matters whose it is: Kubernetes marks only packets that it translated, other
// programs those that their policies allow.
func (o opening) verdict(exprs []expr.Any, kube bool) (v *expr.Verdict, ok bool) {
	var name string // of the device that the next comparison is about
	state := false
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Meta:
			name = ""
			switch e.Key {
			case expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME:
				name = "name"
			case expr.MetaKeyMARK:
				if kube && !e.SourceRegister {
					return nil, false
				}
			}
		case *expr.Cmp:
			if name != "" && e.Op == expr.CmpOpEq && !o.ours(unix.ByteSliceToString(e.Data)) {
				return nil, false
			}
			name = ""
		case *expr.Ct:
			if e.Key == expr.CtKeySTATUS { // such as that of translated packets
				return nil, false
			}
			state = e.Key == expr.CtKeySTATE
		case *expr.Bitwise:
			const isNew = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW)
			if state && len(e.Mask) == 4 && binary.NativeEndian.Uint32(e.Mask)&isNew == 0 {
				return nil, false
			}
			state = false
		case *expr.Match:
			if (e.Name == "conntrack" || e.Name == "state") && !matchesNew(e.Info) || kube && e.Name == "mark" {
				return nil, false
			}
		case *expr.Lookup:
			if e.IsDestRegSet { // a map of verdicts
				return &expr.Verdict{Kind: expr.VerdictAccept}, true
			}
		case *expr.Queue:
			return &expr.Verdict{Kind: expr.VerdictAccept}, true
		case *expr.Verdict:
			return e, true
		}
	}
	return nil, false
}

// matchesNew reports whether a match of connections' states includes new ones. An unknown kind of match might.
func matchesNew(info xt.InfoAny) bool {
	const isNew = 1 << 3
	switch m := info.(type) {
	case *xt.ConntrackMtinfo1:
		return m.StateMask&isNew != 0
	case *xt.ConntrackMtinfo2:
		return m.StateMask&isNew != 0
	case *xt.ConntrackMtinfo3:
		return m.StateMask&isNew != 0
	}
	return true
}

// Offsets and sizes of the structures of iptables (include/uapi/linux/netfilter_ipv4/ip_tables.h and x_tables.h). The kernel
// aligns them to 8 bytes.
const (
	ipEntrySize   = 112
	ipEntriesHead = 40
	matchHead     = 32
	ruleMinimum   = ipEntrySize + matchHead

	soGetInfo    = 64 // IPT_SO_GET_INFO
	soGetEntries = 65 // IPT_SO_GET_ENTRIES
)

// getInfo is struct ipt_getinfo.
type getInfo struct {
	name              [32]byte
	validHooks        uint32
	hooks, underflows [5]uint32
	entries, size     uint32
}

const forwardHook = 2 // NF_INET_FORWARD

// readLegacy reads tables of iptables-legacy. They must exist: the kernel creates a table when somebody reads it.
func (f *filters) readLegacy(names []string, ours func(string) bool) error {
	if len(names) == 0 {
		return nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open a raw socket for iptables: %w", err)
	}
	defer unix.Close(fd)
	for _, name := range names {
		var info getInfo
		copy(info.name[:], name)
		if err := getsockopt(fd, soGetInfo, unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info))); err != nil {
			return fmt.Errorf("read table %s of iptables: %w", name, err)
		}
		// Each hook has an entry for its policy, and the table one for its end.
		f.rules["legacy"] += max(0, int(info.entries)-bits.OnesCount32(info.validHooks)-1)
		b := make([]byte, ipEntriesHead+int(info.size))
		copy(b, name)
		binary.NativeEndian.PutUint32(b[32:], info.size)
		if err := getsockopt(fd, soGetEntries, b); err != nil {
			if errors.Is(err, unix.EAGAIN) { // somebody changes it now
				continue
			}
			return fmt.Errorf("read table %s of iptables: %w", name, err)
		}
		t := legacyTable(b[ipEntriesHead:])
		if kube := t.kubeChain(); kube != "" && f.kubeProxy == "" {
			f.kubeProxy = "iptables-legacy -t " + name + " " + kube
		}
		if name != "filter" {
			continue
		}
		chain := Chain{Name: "iptables-legacy FORWARD", Hook: hookForward, Counted: true}
		if policy, ok := t.rule(int(info.underflows[forwardHook])); ok {
			chain.Drops, chain.Dropped = policy.verdict == dropVerdict, policy.packets
		}
		closes := 0
		chain.Opens, closes = t.opens(int(info.hooks[forwardHook]), ours, make(map[int]bool))
		if r, ok := t.rule(closes); ok && !chain.Drops && closes != int(info.underflows[forwardHook]) && r.rejects() {
			chain.Drops, chain.ByRule, chain.Dropped = true, true, r.packets
		}
		f.chains = append(f.chains, chain)
	}
	return nil
}

// getsockopt reads a socket option. The buffer holds the request, and then the answer.
func getsockopt(fd, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, uintptr(option), uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// legacyTable is the content of a table of iptables: rules of different sizes, one after another.
type legacyTable []byte

// Verdicts of a standard target: the negated number of the verdict, less 1 (NF_DROP 0, NF_ACCEPT 1). From 0 on it is the
// offset of a chain.
const (
	dropVerdict   = -1
	acceptVerdict = -2
)

type legacyRule struct {
	in, out string
	// notIn and notOut mean that the rule applies to packets of all other devices.
	notIn, notOut bool
	matches       []string
	target        string // "" is the standard target, which has the verdict
	verdict       int
	text          []byte // what follows the target's head
	packets       uint64
	size          int
	every         bool // applies to every packet
}

// rule parses the rule at an offset.
func (t legacyTable) rule(at int) (r legacyRule, ok bool) {
	if at < 0 || at+ruleMinimum > len(t) {
		return r, false
	}
	b := t[at:]
	target, next := int(binary.NativeEndian.Uint16(b[88:])), int(binary.NativeEndian.Uint16(b[90:]))
	if target < ipEntrySize || next < target+matchHead || next > len(b) {
		return r, false
	}
	r.in, r.out = interfaceOf(b[16:32], b[48:64]), interfaceOf(b[32:48], b[64:80])
	const invertedIn, invertedOut = 1, 2 // IPT_INV_VIA_IN, IPT_INV_VIA_OUT
	r.notIn, r.notOut = b[83]&invertedIn != 0, b[83]&invertedOut != 0
	r.every = len(bytes.Trim(b[:83], "\x00")) == 0 && target == ipEntrySize // without the flag of goto
	r.packets, r.size = binary.NativeEndian.Uint64(b[96:]), next
	for m := ipEntrySize; m+matchHead <= target; {
		size := int(binary.NativeEndian.Uint16(b[m:]))
		if size < matchHead || m+size > target {
			return r, false
		}
		r.matches = append(r.matches, unix.ByteSliceToString(b[m+2:m+31]))
		m += size
	}
	r.target, r.text = unix.ByteSliceToString(b[target+2:target+31]), b[target+matchHead:next]
	if r.target == "" && len(r.text) >= 4 {
		r.verdict = int(int32(binary.NativeEndian.Uint32(r.text)))
	}
	return r, true
}

// interfaceOf returns the name of a device in a rule. If the mask covers only its beginning, * follows.
func interfaceOf(name, mask []byte) string {
	n := bytes.IndexByte(mask, 0)
	switch {
	case n == 0:
		return ""
	case n < 0 || name[n-1] == 0: // the whole name
		return unix.ByteSliceToString(name)
	}
	return unix.ByteSliceToString(name[:n]) + "*"
}

// rejects reports whether a rule drops or rejects every packet that it meets.
func (r legacyRule) rejects() bool {
	return r.every && (r.target == "REJECT" || r.target == "" && r.verdict == dropVerdict)
}

// opens reports whether the rules from an offset on, up to the end of their chain, accept new connections of pods. If they do
// not, last is the offset of the rule that ends the chain for all packets. See opening.verdict about marks.
func (t legacyTable) opens(at int, ours func(string) bool, seen map[int]bool) (opens bool, last int) {
	kube := isKube(t.chainAt(at))
	for !seen[at] {
		seen[at] = true
		r, ok := t.rule(at)
		if !ok || r.target == "ERROR" {
			return false, at
		}
		this := at
		at += r.size
		applies := (r.in == "" || r.notIn || ours(r.in)) && (r.out == "" || r.notOut || ours(r.out)) &&
			!slices.Contains(r.matches, "state") && !slices.Contains(r.matches, "conntrack") && !(kube && slices.Contains(r.matches, "mark"))
		if applies && r.target == "" && r.verdict == acceptVerdict {
			return true, this
		}
		if applies && r.target == "" && r.verdict >= 0 && r.verdict != at {
			if opens, last := t.opens(r.verdict, ours, seen); opens {
				return true, last
			}
		}
		if r.rejects() || r.every && r.target == "" && r.verdict < 0 {
			return false, this // the chain's policy, its return, or a rule for all other packets
		}
	}
	return false, at
}

// kubeChain returns the name of a chain that Kubernetes makes; "" if there is none. A chain begins with a target ERROR that
// has its name.
func (t legacyTable) kubeChain() string {
	for at := 0; ; {
		r, ok := t.rule(at)
		if !ok {
			return ""
		}
		if name := unix.ByteSliceToString(r.text); r.target == "ERROR" && isKube(name) {
			return name
		}
		at += r.size
	}
}

// chainAt returns the name of the chain whose rules begin at an offset; "" for a base chain.
func (t legacyTable) chainAt(at int) string {
	const size = ipEntrySize + matchHead + 32 // struct ipt_error, aligned
	if r, ok := t.rule(at - size); ok && r.size == size && r.target == "ERROR" {
		return unix.ByteSliceToString(r.text)
	}
	return ""
}
