from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.kernels import check


@pytest.fixture(autouse=True)
def nothing_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_passed", set())


def test_a_kernel_that_answers_to_another_base_is_refused() -> None:
    plain = 3 * torch.randn(2, 4, 50)
    plain[:, :, 40:] = -torch.inf

    def expected(index: Tensor) -> Tensor:
        return plain[0][:, index]

    with pytest.raises(KvbenchError, match=r"^The kernel 'k' is wrong on cpu \(torch.float32, torch .*; use .*\.$"):
        check.once("k", plain / math.log(2), plain, expected)
    with pytest.raises(KvbenchError, match="off by inf"):
        check.once("k", plain.nan_to_num(neginf=0.0), plain, expected)
    with pytest.raises(KvbenchError, match="off by inf"):
        check.once("k", plain * torch.nan, plain, expected)
    check.once("k", plain + 1e-3, plain, expected)


def test_it_looks_once_a_backend_and_number_type() -> None:
    looked = []

    def expected(index: Tensor) -> Tensor:
        looked.append(index)
        return torch.zeros(1, len(index))

    zeros = torch.zeros(1, 1, 100)
    for like in (zeros, zeros, zeros.bfloat16()):
        check.once("k", zeros, like, expected)
    check.once("another", zeros, zeros, expected)
    assert len(looked) == 3
    assert looked[0][0] == 0
    assert looked[0][-1] == 99


def test_the_plain_form_computes_in_full_precision_where_the_model_does_not() -> None:
    queries, keys = (8 * torch.randn(1, 1, 50, 16) for _ in "qk")

    def expected(index: Tensor) -> Tensor:
        return (queries[0][:, index] @ keys[0].mT).logsumexp(-1)

    found = (queries @ keys.mT).logsumexp(-1)
    with torch.autocast("cpu", torch.bfloat16):
        check.once("k", found, queries, expected)
