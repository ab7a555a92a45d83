#!/usr/bin/env bash
# What a plan foretold of the fixes that `keepbusy run --fix` then made, and what came: needs a GPU.
#
#     PYTHONPATH=src bash benchmarks/fix_foretold.sh [CASE.py ...]
#
# Each case runs twice as its user would run it: recorded as it is, then with fixes, held against that recording. The
# default cases have something that `--fix` does, and end within seconds; STALLBENCH_STEPS says how many steps they take.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$here/stalls  # the networks that cases share
export STALLBENCH_STEPS=${STALLBENCH_STEPS:-200}
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
cases=("$@")
if test ${#cases[@]} = 0; then
  mapfile -t cases < <(grep -LE "distributed|DataLoader\(" "$here"/stalls/cases/*.py | grep -v common | head -8)
fi
for case in "${cases[@]}"; do
  echo "== $(basename "$case")"
  timeout 60 python -m keepbusy run --quiet --save "$kept/before.busy" "$case" >/dev/null 2>"$kept/said" || { tail -1 "$kept/said"; continue; }
  timeout 60 python -m keepbusy run --fix --against "$kept/before.busy" --quiet "$case" 2>"$kept/said" |
    grep -E "^(copies|late_numbers|draws|workers|batches|syncs|cache|garbage|gain)|foretold|switched off" || tail -1 "$kept/said"
done
