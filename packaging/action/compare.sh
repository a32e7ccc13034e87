#!/usr/bin/env bash
# Measures two commits of a repository in one lab, interleaved, and fails if the second is proven slower. action.yml explains the
# variables. It runs in other pipelines too, in a checkout of the head:
#
#   EXPERIMENT=bench.yaml BASE=main PROGRAM=bin/slipstream packaging/action/compare.sh
set -euo pipefail

: "${EXPERIMENT:?is the experiment file}" "${BASE:?is the commit to compare with}"
gate=${GATE:-slower} expect=${EXPECT-[{variant: head, notSlower: base\}]}
if [[ $gate != slower && $gate != strict ]]; then
	echo "GATE=$gate: must be slower or strict" >&2
	exit 2
fi
mkdir -p "${OUT:=slipstream-results}"
out=$(mktemp -d "$OUT/run-XXXXXX")

work=$(mktemp -d)
export BASE_DIR=$work/base HEAD_DIR=$PWD # for the commands of switches
# A lab needs root, which a runner has by sudo.
as_root=()
if ((EUID != 0)); then
	as_root=(sudo "PATH=$PATH" "BASE_DIR=$BASE_DIR" "HEAD_DIR=$HEAD_DIR")
fi

trap 'git worktree remove --force "$BASE_DIR" 2>/dev/null || true; rm -rf "$work"' EXIT
git rev-parse --quiet --verify "$BASE^{commit}" >/dev/null || git fetch --quiet --depth=1 origin "$BASE"
git worktree add --quiet --detach "$BASE_DIR" "$(git rev-parse --verify --quiet "$BASE^{commit}" || echo FETCH_HEAD)"
if [[ -n ${PREPARE:-} ]]; then
	for checkout in "$BASE_DIR" "$HEAD_DIR"; do
		(cd "$checkout" && bash -euo pipefail -c "$PREPARE")
	done
fi
program=${PROGRAM:-}
if [[ -z $program ]]; then
	program=$work/slipstream
	CGO_ENABLED=0 go build -C "$(dirname "$(readlink -f "$0")")/../.." -trimpath -o "$program" ./cmd/slipstream
fi

code=0
"${as_root[@]}" "$program" run "$EXPERIMENT" --out "$out" ${RUNS:+--runs "$RUNS"} ${expect:+--set "spec.expect=$expect"} || code=$?

output() { echo "$1=$2" >>"${GITHUB_OUTPUT:-/dev/null}"; }
if "$program" report "$out/latest" --format md >"$work/summary.md"; then
	cat "$work/summary.md" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
	"$program" report "$out/latest" --bundle "$OUT/slipstream.zip"
	output bundle "$OUT/slipstream.zip"
fi
case $code in
0) output outcome met ;;
3)
	output outcome slower
	echo "::error title=slipstream::head is slower than base, or another expectation failed"
	;;
4)
	output outcome inconclusive
	echo "::warning title=slipstream::inconclusive: more runs, or a machine with less noise, would tell"
	[[ $gate == strict ]] || code=0
	;;
*)
	output outcome error
	echo "::error title=slipstream::the run failed with exit code $code"
	;;
esac
exit "$code"
