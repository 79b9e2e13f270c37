from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.efficiency.heads import head_lengths, measured_heads


@pytest.mark.parametrize("mean", [20, 64, 300, 1000])
def test_the_mean_is_the_budget(mean: int) -> None:
    lengths = head_lengths(6, 4, mean, least=20, most=1000)
    flat = [length for layer in lengths for length in layer]
    assert (len(lengths), len(lengths[0])) == (6, 4)
    assert sum(flat) == mean * len(flat)
    assert 20 <= min(flat) <= max(flat) <= 1000
    assert len(set(flat)) > 12 or mean in (20, 1000)
    assert lengths == head_lengths(6, 4, mean, least=20, most=1000)


def test_a_measured_shape_is_scaled_to_the_model() -> None:
    flat = sorted(n for layer in head_lengths(2, 4, 100, 1, 10_000, (1.0, 3.0)) for n in layer)
    assert flat == [50] * 4 + [150] * 4


def test_lengths_are_read_from_lists_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text(json.dumps([[4, 2], [3, 1]]))
    assert measured_heads(path) == (1.0, 2.0, 3.0, 4.0)
    for text, sentence in (
        ("[[0]]", "not all numbers above 0"),
        ("3", "holds no head lengths"),
        ("{", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(KvbenchError, match=sentence):
            measured_heads(path)
