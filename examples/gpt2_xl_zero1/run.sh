#!/usr/bin/env bash
# One trn1.32xlarge: ./run.sh [FP32|BF16|MIXED] [further options of train.py]
# With PRECOMPILE=1 it compiles the graphs of the training first, and only that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

precision=${1:-MIXED}
flags="--model-type transformer --distribution-strategy llm-training --auto-cast none"
case $precision in
  FP32 | BF16) ;;  # BF16: ZeRO-1 keeps float32 master weights, so no update is rounded away
  MIXED) flags+=" --enable-mixed-precision-accumulation" ;;
  *) echo "run.sh: the precision is FP32, BF16 or MIXED, not $precision" >&2; exit 2 ;;
esac

cache=${CACHE:-neuron_cache}
launch=(
  neuron-accel launch --nproc-per-node "${NPROC:-32}"
  --cache-dir "$cache" --retry-failed-compilation --compiler-flags "$flags"
  train.py --precision "$precision" "${@:2}"
)
if [[ ${PRECOMPILE:-0} == 1 ]]; then
  exec neuron-accel precompile --max-steps 10 --cache-dir "$cache" -- "${launch[@]}"
fi
exec "${launch[@]}"
