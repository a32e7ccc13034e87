package test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/worker"
)

// TestRun is a small version of the most common run: every file exists, and their
// contents are consistent.
func TestRun(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	d, stdout, _ := ran(t, experiment(t))
	if !strings.Contains(stdout, filepath.Join(d.Path, "report.html")) {
		t.Errorf("does not say where the report is:\n%s", stdout)
	}
	for _, name := range []string{"experiment.yaml", "environment.json", "trials.jsonl", "summary.json", "summary.csv", "report.html"} {
		if info, err := os.Stat(filepath.Join(d.Path, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	all := measured(t, d)
	if len(all) != 2*9 {
		t.Fatalf("%d trials, want 18", len(all))
	}
	dead := make(map[int][]float64)
	for _, tr := range all {
		if tr.Status != record.StatusOK {
			t.Errorf("trial %d failed: %s", tr.Order, tr.Error)
			continue
		}
		dead[tr.Pairs] = append(dead[tr.Pairs], tr.Took-0.25)
		checkTrial(t, tr)
	}
	t.Logf("dead time of each trial, s: %v", dead)
	var summary stats.Summary
	decode(t, filepath.Join(d.Path, "summary.json"), &summary)
	for _, row := range summary.Rows {
		if row.N != 2 || row.CI95[0] > row.Mean || row.CI95[1] < row.Mean {
			t.Errorf("row %+v", row)
		}
		if (row.Versus == nil) != (row.Variant == "vxlan") && row.Metric == metrics.Throughput {
			t.Errorf("versus of %s: %+v", row.Variant, row.Versus)
		}
	}
}

// checkTrial checks that a trial's counters, which come from several processes,
// describe the same traffic.
func checkTrial(t *testing.T, tr record.Trial) {
	t.Helper()
	name := fmt.Sprintf("trial %d, %s %s × %d", tr.Order, tr.Variant, tr.Workload, tr.Pairs)
	if len(tr.PerPair) != tr.Pairs {
		t.Errorf("%s: %d pairs", name, len(tr.PerPair))
	}
	if len(tr.Hosts) != 1 {
		t.Fatalf("%s: %d hosts", name, len(tr.Hosts))
	}
	host := tr.Hosts[0]
	if host.Source != record.SoftirqEBPF {
		t.Errorf("%s: softirq time is from %s", name, host.Source)
	}
	for _, cpu := range host.CPUs {
		if cpu.Softirq > cpu.Busy+0.02 || cpu.Busy > host.Seconds+0.02 {
			t.Errorf("%s: CPU %d: softirq %.3f s, busy %.3f s of %.3f s", name, cpu.ID, cpu.Softirq, cpu.Busy, host.Seconds)
		}
	}
	overlay := uint64(0)
	for _, d := range tr.Devices {
		if strings.HasPrefix(d.Name, "flannel") {
			overlay += d.RxBytes
		}
	}
	if native := tr.Variant == "native"; native != (overlay < 10_000) {
		t.Errorf("%s: %d bytes over the overlay", name, overlay)
	}
	if tr.Workload == "stream" {
		var sent, received uint64
		for _, p := range tr.PerPair {
			sent += p.Client.Bytes
			received += p.Server.Bytes
		}
		if r := float64(received) / float64(sent); r < 0.8 || r > 1.25 {
			t.Errorf("%s: %d bytes sent, %d received in the window", name, sent, received)
		}
	}
	var mask, table, flows int
	for _, s := range tr.Settings {
		if s.Got != s.Want {
			t.Errorf("%s: %s of %s reads %q, not %q", name, s.Path, s.Place, s.Got, s.Want)
		}
		switch filepath.Base(s.Path) {
		case "rps_cpus":
			mask++
		case "rps_flow_cnt":
			flows++
		case "rps_sock_flow_entries":
			table++
		}
	}
	// rfs+ sets a mask and a flow count on the same queues, and the machine's flow
	// table.
	if tr.Variant == "rfs+" && (mask == 0 || mask != flows || table == 0) {
		t.Errorf("%s: settings %v", name, tr.Settings)
	}
	if tr.Variant != "rfs+" && len(tr.Settings) > 0 {
		t.Errorf("%s: settings %v", name, tr.Settings)
	}
}

// TestInterrupt interrupts a run: the run restores the machine, renders the
// trials so far, and can be resumed.
func TestInterrupt(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	p := start(t, nil, "run", experiment(t, "runs: 2", "runs: 20"), "--out", out)
	p.await(t, "Gb/s", 10)
	if err := p.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := p.exit(t); code != 1 {
		t.Errorf("exit %d\n%s", code, p.stderr())
	}
	d := results(t, out)
	if _, err := os.Stat(filepath.Join(d.Path, "report.html")); err != nil {
		t.Error("what there is was not rendered")
	}
	if !strings.Contains(p.stderr(), "--resume "+d.Path) {
		t.Errorf("does not say how to go on:\n%s", p.stderr())
	}
	if n := len(trials(t, d)); n < 10 || n >= 180 {
		t.Errorf("%d trials on record", n)
	}
}

// TestWantedStop: with --progress json, a run reports everything in lines of JSON. If it is asked to stop, it ends as after an
// interrupt.
func TestWantedStop(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	p := start(t, nil, "run", experiment(t, "runs: 2", "runs: 20"), "--out", out, "--progress", "json")
	p.await(t, `"event":"ends"`, 3)
	d := results(t, out)
	if err := d.Want(record.WantedStop); err != nil {
		t.Fatal(err)
	}
	if code := p.exit(t); code != 1 {
		t.Errorf("exit %d\n%s", code, p.stderr())
	}
	count := make(map[string]int)
	for line := range strings.Lines(p.stderr()) {
		var l struct{ Event, Folder, Text, Status string }
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Errorf("%v in %s", err, line)
		}
		if l.Event == "results" && (l.Folder != d.Path || count["begins"] > 0) {
			t.Errorf("results go to %s after %d trials", l.Folder, count["begins"])
		}
		if count[l.Event]++; l.Event == "error" && l.Text != "the run was stopped by slipstream serve" {
			t.Errorf("error %q", l.Text)
		}
	}
	if n := len(trials(t, d)); n < 3 || n >= 180 || count["ends"] != n || count["begins"] != n || count["results"] != 1 || count["error"] != 1 {
		t.Errorf("%d trials on record, events %v", n, count)
	}
	if _, err := os.Stat(filepath.Join(d.Path, "report.html")); err != nil {
		t.Error("what there is was not rendered")
	}
	if wanted, err := d.Wanted(); wanted != record.WantedOn || err != nil {
		t.Errorf("%q is still wanted, %v", wanted, err)
	}
}

// TestClosedOutput: a run whose output nobody reads any more completes, records its results and restores the machine.
func TestClosedOutput(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	shell := exec.Command("bash", "-c", `"$0" "$@" 2>&1 | head -n 1; echo "exit ${PIPESTATUS[0]}"`, program, "run", experiment(t), "--out", out)
	text, err := shell.CombinedOutput()
	if err != nil || !strings.Contains(string(text), "exit 141") {
		t.Errorf("%v\n%s", err, text)
	}
	d := results(t, out)
	if _, err := os.Stat(filepath.Join(d.Path, "report.html")); err != nil {
		t.Error(err)
	}
	if n := len(measured(t, d)); n != 2*9 {
		t.Errorf("%d trials on record, want 18", n)
	}
}

// TestInterruptTwice checks that a second interrupt skips the report, and still
// restores the machine.
func TestInterruptTwice(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	p := start(t, nil, "run", experiment(t, "runs: 2", "runs: 20"), "--out", out)
	p.await(t, "Gb/s", 3)
	for range 2 {
		if err := p.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		p.await(t, "interrupt again", 1) // two pending signals of the same kind are one
	}
	if code := p.exit(t); code != 1 {
		t.Errorf("exit %d\n%s", code, p.stderr())
	}
	if _, err := os.Stat(filepath.Join(results(t, out).Path, "report.html")); err == nil {
		t.Error("took its time for a report")
	}
}

// TestKilled kills a run eight times at random moments, and resumes it each time:
// no trial is lost or doubled, and the machine is as it was.
func TestKilled(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	const kills = 8
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	out := t.TempDir()
	args := []string{"run", experiment(t, "runs: 2", "runs: 4"), "--out", out}
	recorded := 0
	for range kills {
		p := start(t, nil, args...)
		// Kill it at a random moment within the next trials: after a line of progress,
		// and a random part of a trial's duration.
		p.await(t, "Gb/s", 1+rng.IntN(3))
		select {
		case <-p.ended:
		case <-time.After(time.Duration(rng.IntN(400)) * time.Millisecond):
		}
		_ = p.Process.Kill()
		<-p.ended
		d := results(t, out)
		all := trials(t, d)
		if len(all) < recorded {
			t.Fatalf("%d trials on record, and there were %d", len(all), recorded)
		}
		recorded = len(all)
		args = []string{"run", "--resume", d.Path}
	}
	code, _, stderr := finish(t, args...)
	if code != 0 {
		t.Fatalf("exit %d\n%s", code, stderr)
	}
	all := trials(t, results(t, out))
	for cell, n := range cells(all) {
		if n != 1 {
			t.Errorf("%s is on record %d times", cell, n)
		}
	}
	if n := len(cells(all)); n != 9*4 {
		t.Errorf("%d cells, want 36", n)
	}
	for i, tr := range all {
		if tr.Order != i+1 {
			t.Errorf("trial %d says it is number %d", i+1, tr.Order)
		}
	}
}

// TestWorkerKilled kills workers during trials: those trials fail and are
// repeated, and the run succeeds.
func TestWorkerKilled(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	p := start(t, nil, "run", experiment(t), "--out", out)
	p.await(t, "Gb/s", 2)
	pids := workers()
	if len(pids) == 0 {
		t.Fatal("no workers")
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if code := p.exit(t); code != 0 {
		t.Fatalf("exit %d\n%s", code, p.stderr())
	}
	all := trials(t, results(t, out))
	failed := 0
	for _, tr := range all {
		if tr.Status == record.StatusFailed {
			failed++
		}
	}
	if failed == 0 || len(cells(all)) != 18 {
		t.Errorf("%d trials failed, %d cells are on record", failed, len(cells(all)))
	}
}

// TestTwoRuns starts a run while another one is active.
func TestTwoRuns(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	first := start(t, nil, "run", experiment(t), "--out", t.TempDir())
	first.await(t, "Gb/s", 1)
	code, _, stderr := finish(t, "run", experiment(t), "--out", t.TempDir())
	if code != 1 || !strings.Contains(stderr, fmt.Sprintf("another run is in progress on this machine, and the two would disturb each other: wait for it, or stop it (process %d, ", first.Process.Pid)) {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	// Another run has this machine as one of its hosts, during a run in a lab and then before one.
	code, _, stderr = finish(t, "worker", "--remote", "--claim", "another/me@there")
	if code == 0 || !strings.Contains(stderr, fmt.Sprintf("another run (process %d, in a lab) is in progress on this host", first.Process.Pid)) {
		t.Errorf("a worker: exit %d\n%s", code, stderr)
	}
	if code := first.exit(t); code != 0 {
		t.Errorf("the first run: exit %d\n%s", code, first.stderr())
	}
	release, err := worker.Claim(false, "another", "me@there", func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	code, _, stderr = finish(t, "run", experiment(t), "--out", t.TempDir())
	if code != 1 || !strings.Contains(stderr, "another run (me@there) is in progress on this host") {
		t.Errorf("beside a worker: exit %d\n%s", code, stderr)
	}
}

// TestDiskFull fills the disk during a run.
func TestDiskFull(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	if err := syscall.Mount("tmpfs", out, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(out, syscall.MNT_DETACH) })
	code, _, stderr := finish(t, "run", experiment(t, "runs: 2", "runs: 50"), "--out", out)
	if code != 1 || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	if n := len(trials(t, results(t, out))); n == 0 {
		t.Error("what was on record is lost")
	}
}

// TestTools runs the drivers of other tools, including tools that misbehave.
func TestTools(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	const pingpong = "{name: pingpong, pingpong: {warmup: 50ms, duration: 200ms}, pairs: [1]}"
	iperf3 := []string{
		"{name: stream, stream: {warmup: 50ms, duration: 200ms}}", "{name: stream, stream: {warmup: 50ms, duration: 200ms, tool: iperf3}}",
		"runs: 2", "runs: 1", "  - {name: native, path: {native: {}}}\n", "",
		"  - {name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}\n", "",
	}
	file := experiment(t, append(iperf3, "  - "+pingpong+"\n", "")...)
	t.Run("good", func(t *testing.T) {
		all := experiment(t, append(iperf3, pingpong, "{name: pingpong, pingpong: {warmup: 500ms, duration: 1s, tool: sockperf}, pairs: [1]}\n"+
			"  - {name: http, http: {requests: 10000, duration: 1s, tool: ab}, pairs: [1]}")...)
		d, _, _ := ran(t, all)
		for _, tr := range measured(t, d) {
			if tr.Status != record.StatusOK {
				t.Errorf("%s failed: %s", tr.Workload, tr.Error)
				continue
			}
			// sockperf and ab cannot set congestion control, and the namespaces may not be
			// allowed to use it.
			for _, end := range []record.Endpoint{tr.PerPair[0].Client, tr.PerPair[0].Server} {
				if end.CongestionControl != "cubic" && (end.Place != tr.PerPair[0].Server.Place || tr.Workload != "http") {
					t.Errorf("%s: %s ran with congestion control %q, want cubic", tr.Workload, end.Place, end.CongestionControl)
				}
			}
			if tr.Workload == "pingpong" && (tr.Metrics[metrics.LatencyP50] <= 0 || tr.Metrics[metrics.LatencyP50] > tr.Metrics[metrics.LatencyP99]) {
				t.Errorf("latencies %v", tr.Metrics)
			}
		}
	})
	for name, script := range map[string]string{
		"prints rubbish": "case $1 in --version) echo iperf 3.12;; -s) echo 'Server listening'; sleep 60;; *) head -c 4096 /dev/urandom;; esac",
		"is refused":     "case $1 in --version) echo iperf 3.12;; *) echo 'unable to start listener' >&2; exit 1;; esac",
	} {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			if err := os.WriteFile(filepath.Join(bin, "iperf3"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			p := start(t, []string{"PATH=" + bin + ":" + os.Getenv("PATH")}, "run", file, "--out", t.TempDir())
			if code := p.exit(t); code != 1 || !strings.Contains(p.stderr(), "iperf3") {
				t.Errorf("exit %d\n%s", code, p.stderr())
			}
		})
	}
	t.Run("is not there", func(t *testing.T) {
		p := start(t, []string{"PATH=/nonexistent"}, "run", file, "--out", t.TempDir())
		if code := p.exit(t); code != 1 || !strings.Contains(p.stderr(), "iperf3") || strings.Contains(p.stderr(), "Gb/s") {
			t.Errorf("exit %d\n%s", code, p.stderr())
		}
	})
}

// TestUsage gives invalid input: the exit code is 2, the message explains the
// error and what is allowed, and nothing changes.
func TestUsage(t *testing.T) {
	unchanged(t)
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"no experiment":    {[]string{"run"}, []string{"--list"}},
		"no such preset":   {[]string{"run", "dmeo"}, []string{"dmeo", "--list"}},
		"no such file":     {[]string{"run", "nowhere/x.yaml"}, []string{"nowhere/x.yaml"}},
		"no such flag":     {[]string{"run", "demo", "--fast"}, []string{"--fast", "--help"}},
		"no such verb":     {[]string{"runn"}, []string{"runn"}},
		"misspelt field":   {[]string{"run", experiment(t, "baseline:", "baselin:")}, []string{":7:3:", "baselin", "baseline"}},
		"negative pairs":   {[]string{"run", experiment(t, "pairs: [1, 2]", "pairs: [1, -2]")}, []string{"pairs[1]", "-2"}},
		"wrong unit":       {[]string{"run", experiment(t, "duration: 200ms", "duration: 200")}, []string{"duration", "200"}},
		"no such tool":     {[]string{"run", "demo", "--set", "spec.workloads.stream.stream.tool=netperf"}, []string{"netperf", "iperf3"}},
		"zero runs":        {[]string{"run", "demo", "--runs", "0"}, []string{"runs"}},
		"resume nothing":   {[]string{"run", "--resume", t.TempDir()}, []string{"this is not a results folder"}},
		"report nothing":   {[]string{"report", t.TempDir()}, []string{"this is not a results folder"}},
		"no such variant":  {[]string{"accel", "plan", "demo", "warp"}, []string{"warp"}},
		"too many folders": {[]string{"compare", "a"}, []string{"--help"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := finish(t, c.args...)
			if code != 2 {
				t.Errorf("exit %d", code)
			}
			for _, want := range c.want {
				if !strings.Contains(stderr, want) {
					t.Errorf("does not mention %q:\n%s", want, stderr)
				}
			}
		})
	}
}

// TestProtocols runs TCP and UDP over IPv4 and IPv6, with both overlay shapes and
// both NIC profiles. It compares each variant with its own baseline.
func TestProtocols(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	file := experiment(t,
		"  - {name: vxlan}\n", "  - {name: vxlan, nic: {offload: none}}\n  - {name: calico, path: {vxlan: {shape: calico}}, nic: {rate: 2Gbit}}\n",
		"  - {name: native, path: {native: {}}}\n", "  - {name: native, path: {native: {}}, versus: calico}\n",
		"{name: stream, stream: {warmup: 50ms, duration: 200ms}}",
		"{name: stream, stream: {protocol: udp, ip: 6, size: 1000, connections: 2, warmup: 50ms, duration: 200ms}}\n"+
			"  - {name: tcp6, stream: {ip: 6, warmup: 50ms, duration: 200ms}}\n"+
			"  - {name: udp-pingpong, pingpong: {protocol: udp, warmup: 50ms, duration: 200ms}}\n"+
			"  - {name: loaded, connect: {ip: 6, warmup: 50ms, duration: 200ms}, beside: tcp6}",
		"pairs: [1, 2]", "pairs: [2]", "runs: 2", "runs: 1")
	d, _, _ := ran(t, file)
	for _, tr := range measured(t, d) {
		name := tr.Variant + " " + tr.Workload
		if tr.Status != record.StatusOK {
			t.Errorf("%s failed: %s", name, tr.Error)
			continue
		}
		loss, told := tr.Metrics[metrics.Loss]
		if udp := tr.Workload == "stream" || tr.Workload == "udp-pingpong"; told != udp || loss < 0 || loss > 1 {
			t.Errorf("%s: loss %v, told %t", name, loss, told)
		}
		jitter, told := tr.Metrics[metrics.Jitter]
		reorder := tr.Metrics[metrics.Reorder]
		if udp := tr.Workload == "stream"; told != udp || udp && !(jitter > 0 && jitter < 0.01) || reorder < 0 || reorder > 1 {
			t.Errorf("%s: jitter %v s, told %t; reorder %v", name, jitter, told, reorder)
		}
		// Data that piled up before the window, while a receiver waited for a CPU,
		// counts as received in the window.
		if got := tr.Metrics[metrics.Throughput]; tr.Variant == "calico" && got > 3e9 {
			t.Errorf("%s: %.2g bit/s through a NIC of 2 Gbit/s", name, got)
		}
		if tr.Workload == "tcp6" && tr.Metrics[metrics.Throughput] < 1e8 {
			t.Errorf("%s: %.2g bit/s", name, tr.Metrics[metrics.Throughput])
		}
		if beside, told := tr.Metrics[metrics.BesideThroughput]; told != (tr.Workload == "loaded") || told && (beside < 1e7 || tr.Metrics[metrics.Rate] < 10) {
			t.Errorf("%s: %v", name, tr.Metrics)
		}
	}
}

// TestBridge runs both ends of a pair in two pods of one node. The NIC carries
// none of their traffic.
func TestBridge(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	file := experiment(t,
		"path: {vxlan: {shape: flannel}}", "path: {bridge: {}}", "baseline: vxlan", "baseline: bridge", "{name: vxlan}", `{name: bridge}
  - {name: ebpf, path: {ebpf: {}, local: true}}
  - {name: calico, path: {vxlan: {shape: calico}, local: true}}
  - {name: service, path: {service: {mode: iptables, backends: 2}, local: true}}`,
		"devices: [nic, overlay, host-veth, pod]", "devices: [host-veth, pod]", "pairs: [1, 2]", "pairs: [1, 3]", "runs: 2", "runs: 1")
	d, _, _ := ran(t, file)
	for _, tr := range measured(t, d) {
		name := fmt.Sprintf("%s %s × %d", tr.Variant, tr.Workload, tr.Pairs)
		if tr.Status != record.StatusOK {
			t.Errorf("%s failed: %s", name, tr.Error)
			continue
		}
		var payload, nic uint64
		for _, p := range tr.PerPair {
			payload += p.Server.Bytes
			client, _, _ := strings.Cut(p.Client.Place, "/")
			server, _, _ := strings.Cut(p.Server.Place, "/")
			if together := client == server; together != (tr.Variant != "native") || p.Client.Place == p.Server.Place {
				t.Errorf("%s: a pair is in %s and %s", name, p.Client.Place, p.Server.Place)
			}
		}
		for _, d := range tr.Devices {
			if d.Name == "eth0" {
				nic += d.RxBytes
			}
		}
		if passes := nic > payload/2; passes != (tr.Variant == "native") {
			t.Errorf("%s: %d bytes of payload, and %d through the NICs", name, payload, nic)
		}
	}
}
