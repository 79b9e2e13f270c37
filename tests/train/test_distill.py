from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvbench.models.source import LoadedModel
from kvbench.train import distill
from kvbench.train.attached import NAME
from kvbench.train.data import Problems, training_tasks
from kvbench.train.distill import Head, Top, divergence, head_as, output_head, student_loss, teacher_top
from kvbench.train.portion import Draw, Portion
from kvbench.train.recipe import Recipe
from kvbench.train.student import Dense
from kvbench.train.teacher import Teacher
from kvbench_policies.streaming_llm_plus import StreamingLlmPlus


@pytest.mark.parametrize("top", [3, 50])
def test_it_is_the_kl_over_the_teachers_top(top: int) -> None:
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    wanted, tokens = teacher.topk(top, -1) if top < 11 else (teacher, None)
    found = divergence(student, wanted, tokens)
    for row in range(2):
        for position in range(5):
            index = teacher[row, position].argsort(descending=True)[:top]
            p = teacher[row, position][index].double().softmax(-1)
            q = student[row, position].double().softmax(-1)[index]
            assert found[row, position].item() == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)


def test_a_model_from_itself_is_zero() -> None:
    logits = torch.randn(2, 5, 11)
    assert divergence(logits, logits).abs().max() < 1e-6


def _whole(student: Tensor, teacher: Tensor, real: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The same from whole matrices of logits."""
    wanted, tokens = teacher.topk(top, -1) if top < teacher.shape[-1] else (teacher, None)
    kl = divergence(student, wanted, tokens)
    return (kl * real).sum(), ((student.argmax(-1) == teacher.argmax(-1)) & real).sum()


@pytest.mark.parametrize("top", [8, 256])
@pytest.mark.parametrize("positions", [1, 7, 1000])
def test_chunks_are_the_whole_with_gradients_and_never_a_matrix_of_logits(
    make_tiny: Callable[[], LoadedModel], monkeypatch: pytest.MonkeyPatch, top: int, positions: int
) -> None:
    student, teacher = make_tiny().model, make_tiny().model
    vocabulary = teacher.config.vocab_size
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    student.requires_grad_(True)
    ids = torch.randint(4, 40, (2, 20))
    real = torch.rand(2, 20) < 0.8
    for model in (student, teacher):
        model.set_attn_implementation(NAME)
    inputs = {"input_ids": ids, "kvbench_step": Dense()}
    with torch.no_grad():
        wanted_logits = teacher(use_cache=False, **inputs).logits
    whole, same = _whole(student(use_cache=False, **inputs).logits, wanted_logits, real, top)
    wanted = torch.autograd.grad(whole, list(student.parameters()))

    most: list[int] = []
    plain = nn.Linear.forward

    def watched(self: nn.Linear, hidden: Tensor) -> Tensor:
        out = plain(self, hidden)
        if self in (output_head(student), output_head(teacher)):
            most.append(out.numel())
        return out

    monkeypatch.setattr(nn.Linear, "forward", watched)
    monkeypatch.setattr(distill, "_CHUNK", positions * vocabulary)
    given = teacher_top(teacher, top, **inputs)
    kl, agreed = student_loss(student, student, given, real, **inputs)
    torch.testing.assert_close(kl, whole, rtol=1e-5, atol=1e-6)
    assert agreed == same
    for mine, theirs in zip(torch.autograd.grad(kl, list(student.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert max(most) <= min(positions, 40) * vocabulary


def test_the_head_is_itself_again(tiny: LoadedModel) -> None:
    ids = torch.randint(4, 40, (1, 9))
    before = tiny.model(input_ids=ids).logits

    def broken(_: Head, hidden: Tensor) -> Tensor:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), head_as(tiny.model, broken):
        tiny.model(input_ids=ids)
    assert torch.equal(tiny.model(input_ids=ids).logits, before)


@pytest.fixture
def portion(tiny: LoadedModel, short: Recipe) -> Portion:
    rows = Problems(training_tasks(short.tasks), tiny.tokenizer, short, 0)
    draw = Draw(StreamingLlmPlus(), tiny.geometry, 16, 16)
    return draw.portions(rows[0], "a", 1, range(1))[0]


@pytest.mark.parametrize("top", [8, 256])
def test_what_the_teacher_said_is_read_back_as_it_was(
    tiny: LoadedModel, portion: Portion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    def teacher(cache: Path | None) -> Teacher:
        return Teacher(tiny, top, torch.device("cpu"), autocast=False, cache=cache)

    real = portion.batch.real()
    fresh = teacher(None)(portion)
    first = teacher(tmp_path)(portion)
    monkeypatch.setattr(Teacher, "_ask", None)
    again = teacher(tmp_path)(portion)
    for read in (first, again):
        assert torch.equal(read.logits[real], fresh.logits[real])
        assert (read.tokens is None) == (top == 256)
        if read.tokens is not None:
            assert fresh.tokens is not None
            assert torch.equal(read.tokens[real], fresh.tokens[real])
        assert torch.equal(Top.best(read)[real], fresh.best()[real])
