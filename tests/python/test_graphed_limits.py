"""What a graphed callable leaves alone, keeps, and lets go."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.callables import serving

from .graphed_programs import reason


def test_a_function_that_counts_its_calls_is_named(partitions: Any) -> None:
    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        function.calls += 1
        return x + 1

    function.calls = 0
    for _ in range(9):
        function(torch.ones(1))
    assert function.calls == 9 and partitions.all == []
    assert "function.calls" in reason()


class _Odd:
    """Its attributes cannot be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("odd")


def test_what_cannot_be_looked_at_is_left_alone(partitions: Any) -> None:
    odd = _Odd()
    function = pygraph.graph(lambda x: x + (odd is not None))
    for _ in range(4):
        assert function(torch.ones(1)).item() == 2.0
    assert "odd" in reason() and partitions.all == []


def test_arguments_of_all_kinds_do_not_fill_the_memory(partitions: Any) -> None:
    function = pygraph.graph(lambda x, number: x * number)
    for number in range(500):
        assert function(torch.ones(1), float(number)).item() == number
    assert len(function._variants) <= 64 and len(function._refused) <= 256


def test_a_graphed_callable_is_copied_and_collected(partitions: Any) -> None:
    def use() -> Any:
        model = torch.nn.Linear(2, 2)
        function = pygraph.graph(torch.no_grad()(lambda x: model(x)))
        for _ in range(5):
            function(torch.ones(1, 2))
        assert torch.equal(copy.deepcopy(function)(torch.ones(1, 2)), function(torch.ones(1, 2)))
        return weakref.ref(model)

    weak = use()
    partitions.all.clear()
    gc.collect()
    assert weak() is None


def test_unknown_options_and_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown option 'transforms'"):
        pygraph.graph(lambda: None, transforms="none")
    with pytest.raises(ValueError, match="lanes"):
        pygraph.graph(lambda: None, lanes=0)
    with pytest.raises(TypeError, match="takes a callable"):
        pygraph.graph(3)  # type: ignore[arg-type]


def test_calls_that_another_mode_must_see_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert serving.may_be_served()
    with torch.device("cpu"):  # a mode of __torch_function__
        assert not serving.may_be_served()
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(serving.may_be_served()), x)[1])(torch.ones(2))
    assert seen == [False]
