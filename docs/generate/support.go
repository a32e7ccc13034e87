//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// answer says whether something works, and names what shows it: a test, as its package and name, or a command of this repository. If
// nobody has tried, it is empty.
type answer struct{ text, by string }

func yes(by string) answer { return answer{"yes", by} }

// environment is a row of the page support.md.
type environment struct {
	kind, name                    string
	install, measure, steer, fast answer
}

// testFolders has the folder of each package that the tests of environments are in.
var testFolders = map[string]string{
	"cluster":  "./test/cluster",
	"fastpath": "./internal/fastpath",
	"hosts":    "./internal/place/hosts",
	"install":  "./test/install",
	"lab":      "./internal/place/lab",
	"test":     "./test",
	"worker":   "./internal/worker",
}

// taggedTests are those that need a build tag.
var taggedTests = map[string]string{"cluster.TestPeers": "peers"}

// environments has the rows that are not of test/kernels. What is not certain to be in a test is left out.
var environments = []environment{
	{kind: "network", name: "a cluster: flannel with VXLAN, kube-proxy with nftables", measure: yes("cluster.TestThirdCluster/Run"), steer: yes("cluster.TestThirdCluster/Run"), fast: yes("cluster.TestThirdCluster/Agent")},
	{kind: "network", name: "a cluster: flannel with host-gw, or with VXLAN and DirectRouting", fast: yes("cluster.TestFlannelThatRoutes")},
	{kind: "network", name: "a cluster: VXLAN in the shape of Calico's, kube-proxy with iptables", measure: yes("cluster.TestSharedCluster/TwoClusters")},
	{kind: "network", name: "a cluster: Cilium, routed or VXLAN, without kube-proxy; routed with kube-proxy; chained to flannel", measure: yes("cluster.TestPeers"), fast: answer{"no, and the policy says why", "cluster.TestPeers"}},
	{kind: "network", name: "a cluster: nodes that run Windows", measure: answer{"the nodes' own network only, which a run says", "cluster.TestControlPlaneThatDies/CannotRun"}},
	{kind: "network", name: "a lab: VXLAN as flannel configures it", measure: yes("test.TestRun"), steer: yes("test.TestRun"), fast: yes("fastpath.TestFastPath")},
	{kind: "network", name: "a lab: VXLAN as Calico configures it", measure: yes("test.TestProtocols"), fast: yes("fastpath.TestFastPath")},
	{kind: "network", name: "a lab: Calico's VXLANCrossSubnet", fast: yes("fastpath.TestCrossSubnet")},
	{kind: "network", name: "a lab: routed, as flannel host-gw, Calico without overlay, kubenet and clouds", measure: answer{"traffic passes", "lab.TestPaths"}, fast: yes("fastpath.TestFastPath")},
	{kind: "network", name: "a lab: pods of one node, on a bridge or routed", measure: yes("test.TestBridge"), steer: yes("test.TestBridge"), fast: yes("fastpath.TestLocal")},
	{kind: "network", name: "a lab: a Service by iptables, nftables or eBPF", measure: yes("test.TestServices"), fast: answer{"over IPv4, by nftables", "fastpath.TestService"}},
	{kind: "network", name: "a lab: eBPF, UDP and VXLAN by flow", measure: answer{"traffic passes", "lab.TestPaths"}},
	{kind: "network", name: "namespaces made by iproute2 and nft: flannel's and Calico's VXLAN, kube-proxy's rules", fast: yes("test.TestForeignLabs")},
	{kind: "network", name: "programs of Cilium's name beside another network", fast: answer{"no, at the links that have them", "fastpath.TestChainedCilium"}},
	{kind: "network", name: "Calico's nftables data plane with its flowtable, or another flowtable at the devices of pods", fast: answer{"no, and the status names it", "make kernels"}},
	{kind: "network", name: "a flowtable at other devices, to which a rule adds connections of pods", fast: answer{"yes since Linux 7.2, no before", "make kernels"}},
	{kind: "network", name: "WireGuard", fast: answer{"no", "fastpath.TestRouters"}},
	{kind: "network", name: "hosts over SSH, as root or by sudo", measure: yes("hosts.TestExperiment"), steer: yes("hosts.TestExperiment")},
	{kind: "network", name: "hosts over SSH that run Windows (Wine)", measure: yes("hosts.TestWindows"), steer: answer{"no, and a run says so", "hosts.TestWindowsUp"}, fast: answer{"no", "worker.TestWindows"}},

	{kind: "system", name: "Debian with systemd, from the deb", install: answer{"install, upgrade, remove", "install.TestDebUnderSystemd"}, steer: yes("install.TestDebUnderSystemd")},
	{kind: "system", name: "Debian without systemd, from the deb", install: answer{"install, upgrade, remove", "install.TestDebWithoutSystemd"}, steer: yes("install.TestDebWithoutSystemd")},
	{kind: "system", name: "Debian, from the rpm, by Debian's rpm", install: answer{"install, upgrade, remove", "install.TestRPM"}, steer: yes("install.TestRPM")},
	{kind: "system", name: "Debian, from the archive", install: yes("install.TestArchive")},
	{kind: "system", name: "Debian with git, make and Go only, from the sources", install: yes(".ci/fresh"), measure: yes(".ci/fresh")},
	{kind: "system", name: "Linux, macOS and Windows, from krew's manifest", install: answer{"yes; runs on Linux only", "install.TestKrew"}},
	{kind: "system", name: "a registry, for the image and the chart", install: yes("install.TestRegistry")},
	{kind: "system", name: "macOS and Windows, to start runs and to read results", install: answer{"it compiles", "make portable"}},
}

// kernelNames has the kernels of Debian's suites.
var kernelNames = map[string]string{
	"bullseye":         "Linux 5.10 (Debian bullseye)",
	"bookworm":         "Linux 6.1 (Debian bookworm)",
	"trixie":           "Linux 6.12 (Debian trixie)",
	"trixie-backports": "the newest of Debian's backports (7.3 in November 2026)",
}

// kernels returns the rows of the machines of test/kernels.
func kernels() (rows []environment, err error) {
	text, err := os.ReadFile("test/kernels/expected.txt")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		machine, result, _ := strings.Cut(strings.TrimSpace(line), " ")
		if machine == "" || machine[0] == '#' {
			continue
		}
		parts := strings.SplitN(machine, "/", 3)
		name, ok := kernelNames[parts[0]]
		if !ok || len(parts) < 2 {
			return nil, fmt.Errorf("test/kernels/expected.txt has %s, whose kernel is not known here", machine)
		}
		if name += ", " + parts[1]; parts[1] != "amd64" {
			name += " (QEMU emulates its one CPU)"
		}
		if len(parts) == 3 {
			name += ", `" + parts[2] + "`"
		}
		fast := answer{"yes", "make kernels KERNELS=" + machine}
		if why, unsupported := strings.CutPrefix(result, "unsupported: "); unsupported {
			for _, where := range []string{"try the fast path: ", "start the fast path: ", "load programs of the fast path: ", "make a node: "} {
				why = strings.TrimPrefix(why, where)
			}
			fast.text = "no: " + why
		}
		rows = append(rows, environment{kind: "kernel", name: name, fast: fast})
	}
	return rows, nil
}

// supportPage writes one table of what works where, and a table of the tests that it names.
func supportPage(b *bytes.Buffer) error {
	rows, err := kernels()
	if err != nil {
		return err
	}
	rows = append(rows, environments...)
	head(b, "What works where", "docs/generate/support.go and test/kernels/expected.txt", `The table says for each kernel, network and system what works, and which test shows it. The tests of continuous integration run on every
change, those of kernels every week, and those of Cilium by `+"`sudo make peers`"+`. A cell without a test is empty: that may work, but no test of this
repository shows it. None of the tests runs in a cloud or with a distribution of Kubernetes: see [what is expected there](../how-to/clusters.md).`)
	b.WriteString("\n| | environment | install | measure | RPS, RFS | fast path |\n|---|---|---|---|---|---|\n")
	for _, row := range rows {
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", row.kind, row.name, row.install, row.measure, row.steer, row.fast)
	}
	b.WriteString("\n## The tests\n\nMost of them need root, and change only network namespaces of their own.\n\n| test | command |\n|---|---|\n")
	for _, name := range testsOf(rows) {
		command, err := commandOf(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(b, "| %s | `%s` |\n", name, command)
	}
	return nil
}

func (a answer) String() string {
	switch {
	case a.by == "":
		return ""
	case strings.ContainsAny(a.by, " /") && !strings.Contains(a.by, ".Test"):
		return escape(a.text) + ": `" + a.by + "`"
	}
	return escape(a.text) + ": " + a.by
}

// testsOf returns the names of the tests of rows, without those that are commands.
func testsOf(rows []environment) (names []string) {
	for _, row := range rows {
		for _, a := range []answer{row.install, row.measure, row.steer, row.fast} {
			if strings.Contains(a.by, ".Test") {
				names = append(names, a.by)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// commandOf returns the command that runs a test. It returns an error if the test's package has no test of that name.
func commandOf(name string) (string, error) {
	pkg, path, _ := strings.Cut(name, ".")
	function, sub, _ := strings.Cut(path, "/")
	folder, ok := testFolders[pkg]
	if !ok {
		return "", fmt.Errorf("%s: the package is not known", name)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		return "", err
	}
	var text []byte
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		text = append(text, data...)
	}
	if !bytes.Contains(text, []byte("\nfunc "+function+"(")) || sub != "" && !bytes.Contains(text, []byte(`"`+sub+`"`)) {
		return "", fmt.Errorf("%s: there is no such test in %s", name, folder)
	}
	command := "go test "
	if tag := taggedTests[name]; tag != "" {
		command += "-tags " + tag + " "
	}
	command += folder + " -run '^" + function + "$"
	if sub != "" {
		command += "/^" + sub + "$"
	}
	return command + "'", nil
}
