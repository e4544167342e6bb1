#!/usr/bin/env bash
# Writes run.slurm and compile.slurm: ./make_slurm.sh [number of trn1.32xlarge]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

flags="--model-type transformer --distribution-strategy llm-training --auto-cast none"
exec neuron-accel launch --nnodes "${1:-4}" --nproc-per-node 32 --instance trn1.32xlarge \
  --cache-dir neuron_cache --retry-failed-compilation \
  --compiler-flags "$flags --enable-mixed-precision-accumulation" --slurm "${2:-.}" train.py --precision MIXED
