"""Whose memory a graph's constants are: what the compiled code reaches by itself."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph.partition.tuple_arguments import unpacked_function
from pygraph.record import owned_memory


def _compiled_function(**constants: Any) -> Callable[..., Any]:
    """As Inductor's code: constants are globals of a module of its own."""
    scope: dict[str, Any] = {"torch": torch, **constants}
    exec("def partition_0(args):\n    return [constant0]", scope)
    return scope["partition_0"]  # type: ignore[no-any-return]


def _ids(tensors: list[torch.Tensor]) -> set[int]:
    return {id(tensor) for tensor in tensors}


def test_constants_of_compiled_code_are_found() -> None:
    constant, other = torch.ones(3), torch.nn.Parameter(torch.ones(4))
    function = _compiled_function(constant0=constant, other=other, number=5)
    assert _ids(owned_memory.held_tensors(function)) == {id(constant), id(other)}


def test_through_wrappers() -> None:
    constant = torch.ones(3)
    function = _compiled_function(constant0=constant)
    wrappers = [
        unpacked_function(function, (None, 2)),
        functools.partial(function),
        lambda args: function(args),
    ]
    for wrapper in wrappers:
        assert id(constant) in _ids(owned_memory.held_tensors(wrapper))


def test_closures_hold_tensors_in_containers() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    held = {"a": [one, (two,)]}

    def function(args: list[Any]) -> list[Any]:
        return [held, three, *args]

    assert _ids(owned_memory.held_tensors(function)) == {id(one), id(two), id(three)}


def test_a_closure_that_refers_to_itself_ends() -> None:
    def function(args: list[Any]) -> Any:
        return function(args)

    assert owned_memory.held_tensors(function) == []


def test_blocks_that_are_in_use_are_found_in_their_segments(monkeypatch: Any) -> None:
    state = {(0, 7): [("active_allocated", 512), ("inactive", 1024), ("active_allocated", 2048)]}

    def snapshot(pool: tuple[int, int], include_traces: bool) -> list[dict[str, Any]]:
        blocks = [{"state": kind, "size": size} for kind, size in state[pool]]
        return [{"address": 4096, "total_size": 3584, "blocks": blocks}]

    class Pool:
        id = (0, 7)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    pool: Any = Pool()
    assert owned_memory.still_held(pool) == [(4096, 512), (4096 + 1536, 2048)]
    state[0, 7] = [("inactive", 3584)]
    assert owned_memory.still_held(pool) == []


def test_asking_for_a_pools_memory_leaves_its_numbers_alone() -> None:
    """PyTorch 2.11 takes a reference to each at every call, which frees them in the end."""
    pool = (int("123456789012"), int("123456789013"))
    before = [sys.getrefcount(number) for number in pool]
    for _ in range(10):
        with contextlib.suppress(RuntimeError):  # without a GPU
            owned_memory._segments(pool)
    assert [sys.getrefcount(number) for number in pool] == before


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="False is not counted")
def test_asking_for_a_pools_memory_leaves_false_alone() -> None:
    """It is the third item of what PyTorch 2.11 takes references from; without any, Python ends."""
    before = sys.getrefcount(False)
    for _ in range(1000):
        with contextlib.suppress(RuntimeError):  # without a GPU
            owned_memory._segments((0, 0))
    assert sys.getrefcount(False) > before - 500  # others use it, too
