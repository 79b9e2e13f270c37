# The commands behind these rows, each on one NVIDIA H200 with random weights. Steps and passes name their commit. Prefill ran at
# 0ab79b7 and the checks at 9226d20, before rows of this benchmark had a commit.
python -m benchmarks.training --only steps --out steps         # results.jsonl of each: steps.jsonl, ...
python -m benchmarks.training --only passes --out passes
python -m benchmarks.training --only prefill --out prefill
python -m benchmarks.training --only correctness --out checks
cd results/training-cost && python -m benchmarks.training --table steps.jsonl passes.jsonl prefill.jsonl checks.jsonl > table.md
