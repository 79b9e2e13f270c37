# The commands behind these rows, on one NVIDIA H200; the commit is in every row.
for part in policies steps whole largest "lengths qwen3-4b" "lengths qwen3-8b"; do
  OUT=results/efficiency bash benchmarks/efficiency.sh $part
done
kvbench table results/efficiency/*/ --format md > results/efficiency/table.md
