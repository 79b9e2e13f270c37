# The commands behind these rows, on two NVIDIA H200. Trainings ran at commit b1817b4; the table's commit is in its rows. The hashes
# of checkpoints and LM in the rows are those of the files that ship; a test compares them.
for policy in kvpop kvpop_linear streaming_llm_plus kvpop_mlp dms; do   # the first three at once on one GPU, the others on the second
  kvbench train --policy $policy --model ref --recipe ref --out runs/$policy --workers 5
done
# The folders' checkpoints are those in policies/kvbench_policies/checkpoints/ref.
for shard in 1 2 3 4 5 6 7 8 9 10 11 12; do   # six processes a GPU
  CUDA_VISIBLE_DEVICES=$((shard % 2)) kvbench run --suite reference-v1 --shard $shard/12 --out results/reference-v1/shard-$shard &
done; wait
kvbench table results/reference-v1/shard-* --format md > results/reference-v1/table.md
kvbench table results/reference-v1/shard-* --format csv > results/reference-v1/table.csv
