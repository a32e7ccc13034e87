#!/bin/bash
# Compares the fast path of two builds of slipstream, and plain VXLAN, in one lab: two switch-back
# experiments, in whose periods the agents of one build run on both nodes, or none do. In a third, each build
# has one of the nodes, and the kernel times the programs of both.
#
#   compare.sh OLD NEW FOLDER [RUNS]     as root; OLD and NEW are the programs, NEW runs the experiments
set -euo pipefail
lab=run-1 # the name that a run gives its lab

# stop stops the agents. Their process IDs are in files in the folder.
stop() {
	local f pid
	for f in "$1"/*.pid; do
		[ -e "$f" ] || continue
		pid=$(<"$f")
		kill "$pid" 2>/dev/null || true
		timeout 30 tail --pid="$pid" -f /dev/null
		rm "$f"
	done
}

# start starts the agents of two builds, one on each node, and waits until both have a fast path.
start() { # FOLDER NEW BUILD0 BUILD1
	local n builds=("$3" "$4")
	for n in 0 1; do
		setsid "$2" lab exec $lab node$n -- "${builds[n]}" agent --policy "$1/policy.yaml" --journal "$1/journal$n" </dev/null >"$1/agent$n.log" 2>&1 &
		echo $! >"$1/$n.pid"
	done
	for n in 0 1; do
		timeout 30 "$2" lab exec $lab node$n -- bash -c 'until { exec 3<>/dev/tcp/127.0.0.1/9469; } 2>/dev/null &&
			printf "GET /metrics HTTP/1.0\r\n\r\n" >&3 && grep -q "^slipstream_fastpath_up 1" <&3; do sleep 0.1; done' ||
			{ echo "compare.sh: the fast path of node$n does not start:" >&2; cat "$1/agent$n.log" >&2; return 1; }
	done
}

# record appends how long the programs of both agents ran. An agent is the child of its "lab exec".
record() { # FOLDER NAME0 NAME1
	"$1/programtime" record "$1/programs.jsonl" "$2" "$(pgrep -P "$(<"$1/0.pid")")"
	"$1/programtime" record "$1/programs.jsonl" "$3" "$(pgrep -P "$(<"$1/1.pid")")"
}

case ${1-} in
start) start "${@:2}"; exit ;;
stop) stop "$2"; exit ;;
record) record "${@:2}"; stop "$2"; exit ;;
esac
[ $# = 3 ] || [ $# = 4 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
old=$(readlink -f "$1") new=$(readlink -f "$2") runs=${4-30}
mkdir -p "$3"
folder=$(readlink -f "$3") self=$(readlink -f "$0")
go build -C "$(dirname "$self")/programtime" -o "$folder/programtime" .
cat >"$folder/policy.yaml" <<-'POLICY'
	apiVersion: slipstream.dev/v1alpha1
	kind: AccelerationPolicy
	metadata: {name: fast}
	spec: {accelerate: [{fastpath: {}}]}
POLICY

# variant prints a variant. Its switch starts agents, and to stop them it calls this script with the last
# arguments.
variant() { # NAME BUILD0 BUILD1 COMMAND ARGUMENT...
	local back="${*:4}"
	echo "  - {name: $1, switch: {to: [$self, start, $folder, $new, $2, $3], back: [$self, ${back// /, }], settle: 1500ms}}"
}

# compare runs an experiment with only these workloads.
compare() { # NAME VARIANTS WORKLOAD...
	cat >"$folder/$1.yaml" <<-EXPERIMENT
		apiVersion: slipstream.dev/v1alpha1
		kind: Experiment
		metadata: {name: $1}
		spec:
		  target: {lab: {nodes: 2, nic: {offload: full, mtu: 1500}}}
		  path: {vxlan: {shape: flannel}}
		  baseline: old
		  pairs: [1]
		  runs: $runs
		  trialsPerPeriod: 4
		  variants:
		$2
		  workloads:
	EXPERIMENT
	printf '  - {name: %s, %s}\n' "${@:3}" >>"$folder/$1.yaml"
	"$new" run "$folder/$1.yaml" --out "$folder"
}

connect='connect: {warmup: 300ms, duration: 1s}'
stream='stream: {protocol: tcp, warmup: 300ms, duration: 1s}'
pingpong='pingpong: {protocol: tcp, size: 64, warmup: 300ms, duration: 1s}'
both="  - {name: vxlan}
$(variant old "$old" "$old" stop "$folder")
$(variant new "$new" "$new" stop "$folder")"

# While there are only short connections, no program is attached, so they are measured in a separate run.
compare short-connections "$both" connect "$connect"
compare long-connections "$both" pingpong "$pingpong" stream "$stream"

# Both builds run at the same time, so a slowdown of the machine affects both, and few periods suffice.
counted=$(sysctl -n kernel.bpf_stats_enabled)
trap 'sysctl -q kernel.bpf_stats_enabled="$counted"' EXIT
sysctl -q kernel.bpf_stats_enabled=1
rm -f "$folder/programs.jsonl"
compare programs "$(variant old "$old" "$new" record "$folder" old new)
$(variant reverse "$new" "$old" record "$folder" new old)" pingpong "$pingpong"
"$folder/programtime" report "$folder/programs.jsonl" old new
