# The commands behind these rows, on two NVIDIA H200 with four trainings at a time on each: 150 s for one on the fast path, 270 s on
# the plain one. The commit of the code is in every row; benchmarks/training/plain.py, which does what was done there, came after it.
settings="--policy kvpop --model ref --recipe ref-ablation --policy-arg decay=learned --set group=mean"
for seed in 0 1 2 3; do
  kvbench train $settings --seed $seed --out runs/ablation-paths/fast-$seed
  python -m benchmarks.training.plain train $settings --seed $seed --out runs/ablation-paths/plain-$seed
  for path in fast plain; do
    kvbench run --policy kvpop --checkpoint runs/ablation-paths/$path-$seed --no-dense --model ref --cr 7/8 --gen-len 1024 --limit 200 --out results/ablation-paths/$path-$seed
  done
done
python -m benchmarks.training.paths results/ablation/full results/ablation-paths/*/ > results/ablation-paths/table.md
kvbench table results/ablation/full results/ablation-paths/*/ --format csv > results/ablation-paths/table.csv
