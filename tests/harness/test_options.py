from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from kvbench.core.budget import Budget
from kvbench.core.errors import KvbenchError
from kvbench.harness.options import Checked, Requested, RunOptions, Shard, check
from kvbench.plugins import load_registry

PLAIN = RunOptions(policies=("tova",), crs=("7/8",))


def checked(options: RunOptions) -> Checked:
    return check(options, load_registry())


def test_defaults() -> None:
    made = checked(PLAIN)
    assert made.tasks == ("chain", "codebook", "ledger", "program", "recurrence", "stack")
    assert (made.gen_lens, made.limit, made.samples, made.seeds, made.model) == ((1024,), 32, 1, (0,), "ref")
    assert made.budgets == (Requested(Fraction(7, 8), "7/8"),)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policies": ("tovaa",)}, "no policy named 'tovaa'; did you mean 'tova'"),
        ({"policies": ()}, "no policy; give --policy"),
        ({"tasks": ("recurence",)}, "no task named 'recurence'; did you mean 'recurrence'"),
        ({"crs": ("-0.1",)}, "outside 0 <= cr < 1"),
        ({"crs": ("1",)}, "outside 0 <= cr < 1"),
        ({"crs": ("88%",)}, "not a number"),
        ({"crs": ()}, "no budget; give --cr"),
        ({"budgets": (64,)}, "Both --cr and --budget"),
        ({"crs": (), "budgets": (0,)}, "--budget is 0; it has to be at least 1"),
        ({"gen_lens": (0,)}, "--gen-len is 0"),
        ({"decode_path": "fast"}, "--decode-path is 'fast'; it can be auto, plain, graph, kernels"),
        ({"limit": 0}, "--limit is 0"),
        ({"samples": 0}, "--samples is 0"),
        ({"seeds": (-1,)}, "--seed is -1"),
        ({"reference_length": 0}, "--reference-length is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"rows": "many"}, "--rows is 'many'"),
        ({"rows": "0"}, "--rows is '0'"),
        ({"device": "tpu"}, "--device is 'tpu'; it can be auto, cpu, cuda"),
        ({"dtype": "int8"}, "--dtype is 'int8'"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"policy_args": ("sinks",)}, "'sinks' is not name=value"),
        ({"suite": "reference-v2"}, "no suite named 'reference-v2'"),
        ({"shard": "0/2"}, "not i/n with 1 <= i <= n"),
        ({"shard": "3/2"}, "not i/n"),
        ({"shard": "half"}, "not i/n"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(KvbenchError) as error:
        checked(replace(PLAIN, **changes))  # type: ignore[arg-type]  # any option
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_only_the_dense_model_needs_no_budget() -> None:
    assert checked(RunOptions(policies=("full",))).budgets == ()


def test_names_and_numbers_are_taken_once() -> None:
    made = checked(replace(PLAIN, policies=("streaming-llm", "streaming_llm"), gen_lens=(512, 512)))
    assert made.policies == ("streaming_llm",)
    assert made.gen_lens == (512,)


def test_the_shipped_suite() -> None:
    made = checked(RunOptions(suite="reference-v1"))
    static = ("full", "random", "streaming_llm", "streaming_llm_plus", "tova")
    assert made.policies == (*static, "dms", "dms_topk", "kvpop_linear", "kvpop_mlp", "kvpop")
    assert [requested.text for requested in made.budgets] == ["0.75", "7/8", "15/16"]
    assert (made.gen_lens, made.limit, len(made.tasks)) == ((1024, 2048), 200, 6)


def test_a_suite_gives_a_task_a_length_of_its_own() -> None:
    made = checked(RunOptions(suite="needles-smollm2"))
    assert (made.model, made.gen_lens, made.lengths, made.limit) == ("smollm2", (1024,), (("longtext", 2048),), 50)
    assert [requested.text for requested in made.budgets] == ["0.5", "0.75", "7/8"]
    assert checked(RunOptions(suite="needles-smollm2", gen_lens=(512,))).lengths == ()
    assert checked(RunOptions(suite="needles-smollm2", tasks=("needle-single",))).lengths == ()


def test_tasks_of_lm_eval_keep_their_spelling() -> None:
    made = checked(replace(PLAIN, tasks=("lm-eval:a-b_C",), data=("lm_eval:a-b_C=there",)))
    assert (made.tasks, made.data) == (("lm_eval:a-b_C",), (("lm_eval:a-b_C", "there"),))


def test_the_command_line_wins_over_the_suite() -> None:
    made = checked(RunOptions(suite="reference-v1", budgets=(64,), limit=4, policies=("all",), seeds=(3,)))
    assert made.budgets == (Requested(slots=64),)
    assert (made.limit, made.seeds, made.everything) == (4, (3,), True)
    assert "tova" in made.policies


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("policies = [", "is not TOML"),
        ("polices = ['tova']", "no key of a suite"),
        ("policies = 'tova'", "has to be a list of str"),
        ("limit = '4'", "of type int"),
        ("limit = true", "of type int"),
        ("gen_lens = [1.5]", "a list of int"),
        ("lengths = {longtext = '8'}", "a table of int"),
        ("crs = ['0.5']\nbudgets = [4]", "both crs and budgets"),
    ],
)
def test_a_wrong_suite_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(KvbenchError, match=sentence):
        checked(replace(PLAIN, suite=str(path)))


def test_shards_deal_every_cell_once() -> None:
    keys = [f"{number:016x}" for number in range(50)]
    dealt = [[key for key in keys if Shard(index, 3).holds(key)] for index in (1, 2, 3)]
    assert sorted(key for part in dealt for key in part) == keys


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("paper-table1", ("aime24", "aime25", "hmmt_feb25", "hmmt_nov25")),
        ("paper-ood", ("gpqa_diamond", "livecodebench_v6")),
    ],
)
def test_the_papers_protocol_is_a_file(name: str, tasks: tuple[str, ...]) -> None:
    made = checked(RunOptions(suite=name))
    assert made.tasks == tasks
    assert [Budget.from_cr(requested.cr, 16384).slots for requested in made.budgets if requested.cr] == [4096, 2048]
    assert (made.reference_length, made.samples, made.seeds) == (16384, 16, (0,))
    assert (made.temperature, made.top_p, made.top_k) == (0.6, 0.95, 20)
    assert set(made.policies) == {"full", "streaming_llm", "streaming_llm_plus", "tova", "dms", "kvpop_mlp", "kvpop"}
    assert made.everything
    assert not checked(RunOptions(suite=name, policies=("kvpop",))).everything


def test_a_suites_copies_and_checkpoints_lie_beside_it(tmp_path: Path) -> None:
    suite = tmp_path / "mine.toml"
    suite.write_text(
        'policies = ["tova"]\ncrs = ["1/2"]\ntasks = ["aime24", "aime25"]\ncheckpoints = ["trained"]\n'
        '[data]\naime24 = "a.jsonl"\naime25 = "/b.jsonl"\n',
        encoding="utf-8",
    )
    made = checked(RunOptions(suite=str(suite)))
    assert made.data == (("aime24", str(tmp_path / "a.jsonl")), ("aime25", "/b.jsonl"))
    assert made.checkpoints == (tmp_path / "trained",)
    made = checked(RunOptions(suite=str(suite), tasks=("aime25",), data=("aime25=c.jsonl",)))
    assert made.data == (("aime25", "c.jsonl"),)


@pytest.mark.parametrize("line", ['data = "x"', "[data]\naime24 = 1", 'checkpoints = "x"', "leave_out_untrained = 1"])
def test_a_suite_of_another_shape_is_refused(tmp_path: Path, line: str) -> None:
    suite = tmp_path / "mine.toml"
    suite.write_text(line, encoding="utf-8")
    with pytest.raises(KvbenchError, match="it has to be"):
        checked(RunOptions(suite=str(suite)))
