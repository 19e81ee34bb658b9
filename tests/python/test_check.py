"""``pygraph.check``: three series of steps from one state, which is put back after each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pygraph

from .graphed_programs import Training, adamw, batches, sgd
from .graphed_world import Replaying


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_a_step_that_is_right_has_equal_bits(partitions: Any, optimizer: Any) -> None:
    at = Training(optimizer)
    found = pygraph.check(at.step, batches(3))
    assert found.is_equal and found.differences == [] and found.reasons == []
    assert found.steps == 12 and sum(partition.replays for partition in partitions.all) >= 5
    assert "equal bits" in str(found)


@pytest.mark.parametrize("calls_before", [0, 3])
def test_the_program_is_as_it_was(partitions: Any, calls_before: int) -> None:
    at, other = Training(adamw), Training(adamw)
    for training in (at, other):
        for x, y in batches(calls_before):
            training.step(x, y)
    pygraph.check(pygraph.graph(at.step), batches(2))
    torch.manual_seed(3)
    for training in (at, other):
        for x, y in batches(4):
            training.step(x, y)
    for a, b in zip(at.state(), other.state(), strict=True):
        assert torch.equal(a, b)


def test_what_differs_is_told_beside_the_chance(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that freezes a number."""
    at = Training(sgd)
    replay = Replaying.callable

    def wrong(self: Replaying, inputs: list[Any]) -> Any:
        outputs = replay(self, inputs)
        if self.replays > 0:
            with torch.no_grad():
                at.model[0].weight.add_(1e-3)
        return outputs

    monkeypatch.setattr(Replaying, "callable", wrong)
    found = pygraph.check(at.step, batches(3))
    assert not found.is_equal
    weight = next(d for d in found.differences if d.path.endswith("model.0.weight"))
    assert weight.graphed > 1e-3 and weight.uncaptured == 0
    assert "model.0.weight" in str(found)


def test_a_step_without_a_graph_tells_why(partitions: Any) -> None:
    counter = SimpleNamespace(calls=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        return x * 2

    found = pygraph.check(step, [torch.ones(2)])
    assert found.is_equal and found.replays == 0
    assert any("counter.calls" in reason for reason in found.reasons)
    assert counter.calls == 0  # put back


def test_chance_is_told() -> None:
    numbers = iter(float(i) for i in range(100))  # which are not put back
    found = pygraph.check(lambda x: x + next(numbers), [torch.zeros(1)])
    assert {d.uncaptured for d in found.differences} == {12.0}


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        pygraph.check(lambda: None, [])


def test_batches_that_the_step_writes_to_are_as_they_were(partitions: Any) -> None:
    w = torch.nn.Parameter(torch.ones(4))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (x.mul_(0.5) * w).sum().backward()
        return y + x

    given = [(torch.full((4,), float(i)), torch.ones(4)) for i in range(1, 4)]
    found = pygraph.check(step, given)
    assert found.is_equal and found.differences == []
    assert [float(x[0]) for x, _ in given] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["expanded", "inference", "sparse"])
def test_tensors_that_cannot_be_written_to(partitions: Any, kind: str) -> None:
    w = torch.nn.Parameter(torch.ones(4))
    with torch.inference_mode(kind == "inference"):
        mask = torch.ones(1).expand(4) if kind == "expanded" else torch.ones(4)
    holder = [mask.to_sparse() if kind == "sparse" else mask]

    def step(x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (x * w).sum().backward()
        with torch.no_grad():
            return x * (holder[0].to_dense() if kind == "sparse" else holder[0])

    found = pygraph.check(step, [torch.ones(4)])
    assert found.is_equal and found.differences == []


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"pygraph\.check takes a callable, not int"):
        pygraph.check(5, [torch.ones(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pygraph\.check takes the arguments of each call"):
        pygraph.check(lambda x: x, None)  # type: ignore[arg-type]
