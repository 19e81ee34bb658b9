"""Changing shapes: one graph per shape, a bound on their number, memory given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.partition import recording_policy
from pygraph.partition.partition import Partition

from .support import also_as_shipped, assert_used, calls, captured, compiled, randn


def _run(model: object, sizes: list[int]) -> None:
    with torch.no_grad():
        for size in sizes:
            x = randn(size, 64)
            torch.testing.assert_close(model(x), torch.relu(x @ x.t()) @ x, atol=0.5, rtol=0.01)


def _function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.t()) @ x


def test_one_graph_per_shape() -> None:
    _run(compiled(_function, dynamic=True), [16, 24, 32] * 4)
    rows = captured()
    assert len(rows) == 3
    assert all(row.replays >= 2 for row in rows)


@pytest.mark.parametrize("as_shipped", [True], indirect=True)
def test_shapes_that_vary_as_shipped() -> None:
    """They wait until a recording pays, are tried one after the other, and are right all along."""
    model = compiled(_function, dynamic=True)
    _run(model, [16, 24, 16, 32] * 1500)
    assert_used()


@also_as_shipped
def test_a_graph_per_shape_without_numbers() -> None:
    model = compiled(_function, dynamic=False)
    _run(model, [16, 24, 16, 24] * calls(2))
    assert_used(graphs=2)


def test_a_shape_that_comes_once_is_not_recorded() -> None:
    _run(compiled(_function, dynamic=True), list(range(16, 48, 4)))
    assert captured() == []


def test_the_least_recently_used_graph_is_dropped() -> None:
    model = compiled(_function, dynamic=True, options={"pygraph.max_graphs": 2})
    _run(model, [16, 16, 24, 24, 16, 32, 32, 16, 16])
    assert len(captured()) == 2
    _run(model, [24, 24, 24])
    assert len(captured()) == 2


def test_shapes_that_vary_are_recorded_only_when_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE_IF_DYNAMIC", 0)
    model = compiled(_function, dynamic=True)
    _run(model, [size for size in range(16, 80, 8) for _ in range(3)])
    assert captured() == []
    _run(model, [64] * 3000)
    assert len(captured()) == 1


def test_calls_that_wait_for_a_recording_are_made_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE_IF_DYNAMIC", 0)
    monkeypatch.setattr(recording_policy, "_ASSUMED_SECONDS", 0.1)  # over what 40 calls take
    asked: list[int] = []
    ask = Partition._miss

    def count(self: Partition, args: list[Any]) -> Sequence[Any]:
        asked.append(len(args))
        return ask(self, args)

    monkeypatch.setattr(Partition, "_miss", count)
    model = compiled(_function, dynamic=True)
    _run(model, [48] * 40)
    assert len(asked) == 1
    for _ in range(20):
        if not captured():
            _run(model, [48] * 1000)
    assert len(captured()) == 1


def test_memory_is_given_back() -> None:
    model = compiled(_function, dynamic=True)
    _run(model, [512, 512, 512])
    workspace = captured()[0].workspace_bytes
    assert workspace >= 512 * 512 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pygraph.reset()
    assert before - torch.cuda.memory_allocated() >= workspace
    _run(model, [512, 512, 512])
    assert len(captured()) == 1


def test_a_workspace_that_grows_leaves_no_hole() -> None:
    model = compiled(_function, dynamic=True)
    x, y = randn(2304, 64), randn(2816, 64)  # products of 20.25 and 30.25 MiB
    torch.cuda.empty_cache()
    holes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # of other tests
    with torch.no_grad():
        for argument in (x, x, y, y):
            model(argument)
        torch.cuda.empty_cache()
        model(x)
        result = model(y)
    small, large = sorted(row.workspace_bytes for row in captured())
    assert 20 << 20 < small < large
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < holes + small
    del result


def test_recording_leaves_no_reserved_memory_behind() -> None:
    x = randn(1 << 26)
    taken: list[int] = []
    for function in (torch.relu, torch.sigmoid, torch.tanh):
        model = compiled(lambda x, function=function: function(x + 1) * 2)
        with torch.no_grad():
            model(x)
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
            free_before, _ = torch.cuda.mem_get_info()
            model(x)
            torch.cuda.synchronize()
            free_after, _ = torch.cuda.mem_get_info()
        taken.append(free_before - free_after)
        assert len(captured()) == len(taken)
        assert torch.cuda.memory_reserved() - before <= 1 << 28
    # The smallest: another program may allocate meanwhile.
    assert min(taken) <= (1 << 28) + (64 << 20)


def test_all_graphs_share_one_workspace() -> None:
    model = compiled(_function, dynamic=True)
    _run(model, [256, 256, 256])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    _run(model, [128, 128, 128, 64, 64, 64])
    torch.cuda.synchronize()
    assert len(captured()) == 3
    assert torch.cuda.memory_allocated() == before
