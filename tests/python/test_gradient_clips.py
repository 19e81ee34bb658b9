"""Plain training loops, whose ``clip_grad_norm_`` has graphs, on the CPU: what it is called with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import pygraph
from pygraph.callables import trained

from .clip_loops import Clip, clips, train_alike
from .graphed_programs import batches
from .graphed_world import Replaying
from .optimizer_loops import OPTIONS, Loop, adamw, loops, sgd


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


@pytest.mark.parametrize(
    "given",
    [
        (0.1,),
        (1,),
        (0.1, 1),
        (0.1, torch.inf),
        (0.1, "inf"),
        (torch.inf,),
        (0.1, 2.0, False, True),
        (0.1, 2.0, False, False),
    ],
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_clips_are_replayed(partitions: Any, given: Any, optimizer: Any) -> None:
    norms = train_alike(lambda loop, _: clip_grad_norm_(loop.model.parameters(), *given), optimizer)
    assert clips(partitions) == [11] and not any(norm.requires_grad for norm in norms)
    assert len({norm.data_ptr() for norm in norms}) == len(norms)  # of all of them, which are kept


@pytest.mark.parametrize(
    "clip",
    [
        lambda loop, _: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1),
        lambda loop, _: torch.nn.utils.clip_grad.clip_grad_norm_(list(loop.model.parameters()), 0.1),
        lambda loop, _: clip_grad_norm_(parameters=tuple(loop.model.parameters()), max_norm=0.1),
        lambda loop, _: clip_grad_norm_((p for p in loop.model.parameters()), 0.1),
        lambda loop, _: clip_grad_norm_(dict(loop.model.named_parameters()).values(), 0.1),
        lambda loop, _: clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 0.1),
        lambda loop, _: clip_grad_norm_(loop.model[0].weight, 0.1),
    ],
)
def test_it_is_reached_by_any_name_and_with_any_iterable(partitions: Any, clip: Clip) -> None:
    train_alike(clip)
    assert clips(partitions) == [11]


def test_each_parameter_may_be_clipped(partitions: Any) -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        return torch.stack([clip_grad_norm_(p, 0.05) for p in loop.model.parameters()])

    train_alike(clip)
    assert clips(partitions) == [11] * 4


def test_another_norm_has_a_graph_of_its_own(partitions: Any) -> None:
    train_alike(lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 if i < 10 else 0.2))
    assert len(clips(partitions)) == 2 and min(clips(partitions)) >= 0


def test_a_norm_that_differs_in_each_call_runs_as_it_is_and_says_why(partitions: Any) -> None:
    train_alike(lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 + i), steps=20)
    assert sum(clips(partitions)) == 0
    assert any(
        row.name == "clip_grad_norm_" and "differs from call to call" in row.reason
        for row in pygraph.stats()
    )


def test_infinite_gradients_are_clipped_as_they_are(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        gradient = loop.model[0].weight.grad
        assert gradient is not None
        if i >= 10:
            gradient[0, 0] = torch.inf if i == 10 else torch.nan
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    norms = []

    def train(loop: Loop) -> None:
        norms.clear()
        for i, (x, y) in enumerate(batches(12)):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            norms.append(clip(loop, i))

    expected = Loop(sgd, graphs=False)
    train(expected)
    theirs = [*norms, *(p.grad for p in expected.model.parameters())]
    loop = Loop(sgd)
    train(loop)
    for a, b in zip([*norms, *(p.grad for p in loop.model.parameters())], theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert clips(partitions) == [9]


def test_non_finite_gradients_raise(partitions: Any) -> None:
    """What asks for an error reads the norm on the host, and has no graph."""
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
    loop.model[0].weight.grad[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
    assert clips(partitions) == []


def test_an_empty_generator_warns_at_the_programs_line(partitions: Any) -> None:
    for parameters in ((p for p in ()), iter(())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert clip_grad_norm_(parameters, 0.1) == 0.0
        is_generator = not hasattr(parameters, "__length_hint__")
        assert [w.filename for w in caught] == [__file__] * is_generator
        assert all("empty generator" in str(w.message) for w in caught)


@pytest.mark.parametrize("parameters", [[], (), [torch.nn.Parameter(torch.ones(2))]])
def test_nothing_to_clip(partitions: Any, parameters: Any) -> None:
    trained.note_program(parameters, OPTIONS)
    assert all(clip_grad_norm_(parameters, 0.1) == 0.0 for _ in range(8))
    assert clips(partitions) == []


def test_an_iterable_is_read_once(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        read = []

        def parameters() -> Iterator[torch.Tensor]:
            read.append(i)
            yield from loop.model.parameters()

        norm = clip_grad_norm_(parameters(), 0.1)
        assert len(read) == 1
        return norm

    train_alike(clip)


def test_an_exception_of_an_iterable_is_the_programs(partitions: Any) -> None:
    def parameters() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        clip_grad_norm_(parameters(), 0.1)


def test_wrong_arguments_raise_as_they_do(partitions: Any) -> None:
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1)
    with pytest.raises(TypeError, match="max_norm"):
        clip_grad_norm_(loop.model.parameters())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="could not convert"):
        clip_grad_norm_(loop.model.parameters(), 0.1, "two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterable"):
        clip_grad_norm_(7, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["max_norm", "norm_type"])
def test_numbers_in_tensors_are_read_at_each_call(partitions: Any, what: str) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        given: Any = {"max_norm": 0.1, what: torch.tensor(1.0 + i)}
        return clip_grad_norm_(loop.model.parameters(), **given)

    train_alike(clip)
    assert clips(partitions) == []
