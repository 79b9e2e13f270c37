#!/usr/bin/env bash
# The published rows of what a step costs, on one GPU: bash benchmarks/efficiency.sh PART, rows in $OUT (here if unset).
# Each part ends within minutes; one that was stopped goes on where it was.
set -euo pipefail
out=${OUT:-kvbench-efficiency}

measure() { kvbench efficiency --device cuda --dtype bfloat16 "$@"; }

case "${1:-}" in
steps)    # time a step beside the floor at batch 1, 16 and 64; KVpop against StreamingLLM; dense and stock
    measure --shape qwen3-4b --policy kvpop --policy streaming_llm --cr 0.75 --reference-length 16384 --gen-len 16384 \
        --batch 1 --batch 16 --batch 64 --recipe qwen3-4b --out "$out/qwen3-4b-steps" ;;
policies) # every kind of policy at batch 1 and 16
    measure --shape qwen3-4b --policy kvpop --policy kvpop_mlp --policy dms --policy tova --policy h2o --cr 0.75 \
        --reference-length 16384 --gen-len 16384 --batch 1 --batch 16 --recipe qwen3-4b --no-stock --out "$out/qwen3-4b-policies" ;;
whole)    # generations in full against the sum of their steps: slots to spare, and full from half the length on
    for grid in "--budget 4096 --gen-len 1024 --points 4" "--budget 1024 --gen-len 2048 --points 8"; do
        # shellcheck disable=SC2086 # options, to be split
        measure --shape qwen3-4b --policy kvpop $grid --batch 64 --whole --recipe qwen3-4b \
            --no-dense --no-stock --no-scoring --prompt-len 16 --out "$out/qwen3-4b-whole"
    done ;;
lengths)  # memory and latency up to 131k generated tokens, where full begins to cost more: lengths SHAPE (qwen3-4b or qwen3-8b)
    measure --shape "$2" --policy dms --policy kvpop --cr 0.75 --reference-length 16384 --gen-len 6144 --gen-len 8192 \
        --gen-len 12288 --gen-len 16384 --gen-len 32768 --gen-len 65536 --gen-len 131072 --batch 1 --recipe "$2" --no-scoring --out "$out/$2-lengths"
    kvbench plot-efficiency "$out/$2-lengths" --out "$out/$2-lengths.svg" ;;
largest)  # throughput at the largest batch against dense at its own, at full length and over whole generations
    measure --shape qwen3-4b --policy kvpop --cr 7/8 --gen-len 32768 --largest --points 8 --recipe qwen3-4b --no-stock \
        --no-scoring --out "$out/qwen3-4b-largest" ;;
*) echo "usage: OUT=DIR bash benchmarks/efficiency.sh steps|policies|whole|lengths SHAPE|largest" >&2; exit 2 ;;
esac
