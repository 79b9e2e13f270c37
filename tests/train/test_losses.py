from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.core.ranking import ranks, running_cutoff
from kvbench.train.losses import Sample, boundary_loss, distillation, sample_queries

SINKS, WINDOW, LONG = 2, 4, 5


def _slow_boundary(student: Tensor, teacher: Tensor, sample: Sample, margin: float, temperature: float) -> float:
    """One pair at a time, from sorted lists."""
    total, count = 0.0, 0
    for row in range(teacher.shape[0]):
        for head in range(teacher.shape[1]):
            mine, wanted = student[row, head].tolist(), teacher[row, head].tolist()
            for query, valid in zip(sample.queries[row].tolist(), sample.valid[row].tolist(), strict=True):
                if not valid:
                    continue
                count += 1
                newcomer = query - WINDOW
                eligible = sorted(range(SINKS, query - WINDOW), key=lambda t: (wanted[t], t), reverse=True)
                incumbent = eligible[LONG - 1]
                kept = (wanted[newcomer], newcomer) > (wanted[incumbent], incumbent)
                weight = 1 - math.exp(-abs(wanted[newcomer] - wanted[incumbent]) / margin)
                difference = (mine[newcomer] - mine[incumbent]) / temperature
                total += weight * math.log1p(math.exp(-difference if kept else difference))
    return total / count


@pytest.mark.parametrize(("margin", "temperature"), [(0.5, 1.0), (2.0, 0.7)])
def test_boundary_loss_is_the_loop_over_pairs(margin: float, temperature: float) -> None:
    student, teacher = torch.randn(3, 2, 60), torch.randn(3, 2, 60)
    # Half of the teacher's scores tie with another.
    teacher[..., ::2] = teacher[..., ::2].round()
    lengths = torch.tensor([60, 40, 9])
    first = SINKS + WINDOW + LONG
    sample = sample_queries(lengths, first, 5, 24, torch.Generator().manual_seed(1))
    assert sample.valid.sum(1).tolist() == [24, 24, 0]
    rank = ranks(teacher)
    cutoff = running_cutoff(rank, SINKS, WINDOW, LONG)
    loss = boundary_loss(student, teacher, rank, cutoff, sample, WINDOW, margin=margin, temperature=temperature)
    assert loss.item() == pytest.approx(_slow_boundary(student, teacher, sample, margin, temperature), rel=1e-5)


def test_the_first_sampled_query_is_the_first_that_evicts() -> None:
    rank = ranks(torch.randn(1, 1, 40))
    cutoff = running_cutoff(rank, SINKS, WINDOW, LONG)[0, 0]
    first = SINKS + WINDOW + LONG
    # Before it everything eligible is kept, so there is no incumbent that could lose.
    assert cutoff[first - 2] == 40
    assert cutoff[first - 1] < 40


def test_a_perfect_student_loses_less_than_its_opposite() -> None:
    teacher = 5 * torch.randn(2, 2, 80)
    sample = sample_queries(torch.tensor([80, 80]), SINKS + WINDOW + LONG, 5, 40, torch.Generator().manual_seed(0))
    rank = ranks(teacher)
    cutoff = running_cutoff(rank, SINKS, WINDOW, LONG)
    for balance in (False, True):
        good = boundary_loss(teacher, teacher, rank, cutoff, sample, WINDOW, balance=balance)
        bad = boundary_loss(-teacher, teacher, rank, cutoff, sample, WINDOW, balance=balance)
        assert good < 0.3 < bad


def test_queries_stay_inside_each_row() -> None:
    lengths = torch.tensor([200, 90, 30])
    sample = sample_queries(lengths, 40, 20, 500, torch.Generator().manual_seed(3))
    for row, (low, high) in enumerate([(40, 180), (40, 70)]):
        assert sample.valid[row].all()
        assert sample.queries[row].min() >= low
        assert sample.queries[row].max() <= high
        # Both ends come up.
        assert sample.queries[row].min() <= low + 3
        assert sample.queries[row].max() >= high - 3
    assert not sample.valid[2].any()
    uniform, later = sample.queries[0, :250].float().mean(), sample.queries[0, 250:].float().mean()
    assert uniform + 10 < later


def test_queries_follow_from_the_generator() -> None:
    def draw() -> Tensor:
        return sample_queries(torch.tensor([100]), 10, 5, 20, torch.Generator().manual_seed(7)).queries

    assert torch.equal(draw(), draw())


@pytest.mark.parametrize("top", [3, 50])
def test_distillation_is_the_kl_over_the_teachers_top(top: int) -> None:
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    values = []
    for row, position in mask.nonzero().tolist():
        index = teacher[row, position].argsort(descending=True)[:top]
        wanted = teacher[row, position][index].double().softmax(-1)
        given = student[row, position].double().softmax(-1)[index]
        values.append(float((wanted * (wanted / given).log()).sum()))
    assert distillation(student, teacher, mask, top).item() == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_distillation_of_a_model_from_itself_is_zero() -> None:
    logits = torch.randn(2, 5, 11)
    assert distillation(logits, logits, torch.ones(2, 5, dtype=torch.bool)).item() == pytest.approx(0, abs=1e-6)
