# The commands behind these rows, on one NVIDIA H200; the commit is in every row.
for policy in kvpop kvpop_mlp streaming_llm_plus; do
  kvbench train --policy $policy --model ref --recipe ref --out runs/$policy   # three at once on one GPU
done
# kvpop was stopped at step 930 by a time limit and went on from its state of step 750, by the same command.
# The folders' checkpoints are those in policies/kvbench_policies/checkpoints/ref.
for shard in 1 2 3 4 5; do
  kvbench run --suite reference-v1 --gen-len 1024 --shard $shard/5 --out results/reference-v1/shard-$shard &
done; wait
# The same with --gen-len 2048 was stopped by a time limit; its few rows are here and will be completed.
kvbench table results/reference-v1/shard-* --gen-len 1024 --format md > results/reference-v1/table.md
kvbench table results/reference-v1/shard-* --gen-len 1024 --format csv > results/reference-v1/table.csv
