# The commands behind these rows, on two NVIDIA H200; the commit is in every row.
for policy in kvpop kvpop_mlp streaming_llm_plus; do
  kvbench train --policy $policy --model ref --recipe ref --out runs/$policy   # kvpop on one GPU, the others on the second
done
# The folders' checkpoints are those in policies/kvbench_policies/checkpoints/ref.
for shard in 1 2 3 4 5 6 7 8 9 10; do   # five processes a GPU
  CUDA_VISIBLE_DEVICES=$((shard % 2)) kvbench run --suite reference-v1 --shard $shard/10 --out results/reference-v1/shard-$shard &
done; wait
kvbench table results/reference-v1/shard-* --format md > results/reference-v1/table.md
kvbench table results/reference-v1/shard-* --format csv > results/reference-v1/table.csv
