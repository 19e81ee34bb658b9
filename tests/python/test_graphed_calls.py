"""Arguments, methods and memory of graphed callables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph

from .graphed_programs import Training, assert_same, batches, reason, replays, sgd


def test_parts_of_a_tensor_that_do_not_overlap_are_replayed(partitions: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    graphed = pygraph.graph(function)
    whole, expected = torch.zeros(8), torch.zeros(8)
    for i in range(12):
        split = 3 if i % 2 else 4
        got = graphed(whole[:3], whole[split : split + 3])
        assert torch.equal(got, function(expected[:3], expected[split : split + 3]))
    assert torch.equal(whole, expected) and replays(partitions) > 5
    before = replays(partitions)
    for start in (0, 1, 2):
        got = graphed(whole[:3], whole[start : start + 3])
        assert torch.equal(got, function(expected[:3], expected[start : start + 3]))
    assert torch.equal(whole, expected) and replays(partitions) == before


def test_arguments_that_share_memory_are_not_replayed(partitions: Any) -> None:
    function = pygraph.graph(lambda a, b: a.add_(1) + b)
    for _ in range(6):
        memory = torch.zeros(3)
        assert function(memory[:2], memory[1:]).tolist() == [2.0, 1.0]
    assert replays(partitions) == 0


def test_trees_values_and_keywords_of_all_kinds(partitions: Any) -> None:
    @pygraph.graph
    def function(batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["list"][0] * scale, "scale": scale, "none": None}

    for i in range(12):
        scale = float(i % 2)
        x = torch.full((2,), float(i))
        result = function({"a": x, "list": [x]}, scale=scale)
        assert result["scale"] == scale and result["none"] is None
        assert torch.equal(result["sum"], x + x * scale)
    assert len(partitions.all) == 2 and replays(partitions) >= 4


def test_a_model_may_be_passed(partitions: Any) -> None:
    at, uncaptured = Training(sgd), Training(sgd)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = pygraph.graph(step)
    for x, y in batches(8):
        step(uncaptured.model, uncaptured.optimizer, x, y)
        run(at.model, at.optimizer, x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 3


def test_a_method_is_bound(partitions: Any) -> None:
    class Thing:
        def __init__(self, scale: float) -> None:
            self.scale = torch.tensor(scale)

        @pygraph.graph(audit=100)
        def run(self, x: torch.Tensor) -> torch.Tensor:
            """Scales."""
            return x * self.scale

    things = [Thing(2.0), Thing(3.0)]
    for i in range(8):
        for thing in things:
            x = torch.full((2,), float(i))
            assert torch.equal(thing.run(x), x * thing.scale)
    assert len(partitions.all) == 2 and Thing.run.__doc__ == "Scales."
    assert all(partition.options.audit == 100 for partition in partitions.all)


def test_a_parameter_that_gets_other_memory_is_noticed(partitions: Any) -> None:
    model = torch.nn.Linear(4, 2)

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for turn in range(3):
        for x, _ in batches(5):
            with torch.no_grad():
                assert torch.equal(function(x), model(x))
        if turn == 0:
            model.weight.data = torch.randn(2, 4)
        else:
            model.load_state_dict(torch.nn.Linear(4, 2).state_dict(), assign=True)
    assert len(partitions.all) == 3


def test_tensors_that_dynamo_has_marked_are_replayed(partitions: Any) -> None:
    """A batch that another compiled function has seen with other sizes."""
    step = pygraph.graph(lambda x: x * 2)
    for i in range(8):
        x = torch.full((3,), float(i))
        x._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
        assert torch.equal(step(x), x * 2)
    assert replays(partitions) >= 5


def test_a_tensor_with_attributes_runs_as_it_is_and_says_why(partitions: Any) -> None:
    step = pygraph.graph(lambda x: x * x.scale)
    for i in range(8):
        x = torch.ones(3)
        x.scale = float(i)  # type: ignore[attr-defined]
        assert torch.equal(step(x), torch.full((3,), float(i)))
    assert "a tensor with attributes" in reason() and replays(partitions) == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_replays_may_overwrite_gradients_only_where_that_is_wanted(
    partitions: Any, reuse: bool
) -> None:
    model = torch.nn.Linear(3, 2)

    @pygraph.graph(reuse_gradients=reuse)
    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(6):
        step(torch.ones(4, 3))
    assert replays(partitions) > 0
    for partition in partitions.all:
        assert (partition.info.gradients is not None) == reuse
        if reuse:
            owners, first = partition.info.gradients
            assert {id(p) for p in owners} == {id(p) for p in model.parameters()}
            assert first == 1  # behind the result, None
