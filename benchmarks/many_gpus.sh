#!/usr/bin/env bash
# What one GPU cannot show, on two, four or eight of one machine, in under ten minutes:
#
#     bash benchmarks/many_gpus.sh OUT
#
# Each part has a log and a limit of its own, so that one that hangs costs the others nothing; what it found lies beside
# the log. NCCL's variables are left as they are.
set -u
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?where to: a folder}")
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD/benchmarks/stalls:$PWD/benchmarks/stalls/third${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=8 OUT=$out out
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
ranks() { python3 -m torch.distributed.run --standalone --nproc-per-node "$@"; }

part() { # NAME SECONDS COMMAND…
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  echo "$name: $([ $? = 0 ] && echo done || echo FAILED) in $((SECONDS - began)) s" | tee -a "$out/parts.txt"
}
export -f ranks

echo "$gpus GPUs, $(date -u +%FT%TZ), $(git rev-parse --short HEAD 2>/dev/null)" | tee "$out/parts.txt"
part collectives 70 bash -c "ranks $gpus benchmarks/collectives.py --out $out/collectives.json"
part spread 190 bash -c "ranks $gpus benchmarks/runtime/spread.py --out $out/spread.json"
part accumulate_ddp 45 bash -c "ranks $gpus benchmarks/runtime/accumulate.py --wrapper ddp --out $out/accumulate_ddp.json"
part accumulate_fsdp 45 bash -c "ranks $gpus benchmarks/runtime/accumulate.py --wrapper fsdp --out $out/accumulate_fsdp.json"
part agree 40 bash -c "ranks $gpus benchmarks/runtime/agree.py"
if [ "$gpus" -ge 4 ]; then # each program on the GPUs that it is for; the pairs of two run side by side
  recorded() { # GPUS RANKS NAME…
    CUDA_VISIBLE_DEVICES=$1 python3 benchmarks/record_stallbench.py record --cases benchmarks/stalls/virtual_ranks \
      --out "$out/ranks" --ranks "$2" --only "${@:3}"
  }
  export -f recorded
  part ranks_of_two 80 bash -c "recorded 0,1 2 rank1_larger_batch gather_in_line & recorded 2,3 2 two_losses_backward \
    healthy_ddp_micro & wait"
  part ranks_of_four 50 bash -c "recorded 0,1,2,3 4 rank2_tokenizes"
fi
cp docs/course/h200.json "$out/course.json"
part course 65 python3 benchmarks/course_on_gpu.py --out "$out/course.json" 5 6
cat "$out/parts.txt"
