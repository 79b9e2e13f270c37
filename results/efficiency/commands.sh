# The commands behind these rows, on one NVIDIA H200 each, two side by side; the commit is in every row. What follows --out in the rows
# is this folder; where they were measured it was another.
for part in steps policies whole "lengths qwen3-4b" largest; do
  OUT=results/efficiency bash benchmarks/efficiency.sh $part
done
kvbench table results/efficiency/*/ --format md > results/efficiency/table.md
