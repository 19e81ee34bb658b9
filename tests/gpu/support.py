"""What the GPU tests share."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.undoing import Undo, settle

# Runs a test twice: with graphs that are used as soon as they are verified, and with what users get.
also_as_shipped = pytest.mark.parametrize(
    "as_shipped", [False, True], indirect=True, ids=["at once", "as shipped"]
)

# Two calls before the recording, 18 of a trial, and four trials, one after the other.
_CALLS_AS_SHIPPED = 100
_is_shipped = False  # set for each test


def calls(few: int) -> int:
    """So many calls of one kind, or, as shipped, enough for all graphs of a small program."""
    return max(few, _CALLS_AS_SHIPPED) if _is_shipped else few


def assert_used(graphs: int = 1) -> None:
    """So many graphs, and each is used; as shipped, a trial may have decided against it, or still
    be under way. None was refused."""
    refused = refusals()
    assert not refused, refused
    states = [row.state for row in pygraph.stats()]
    used = ("captured", "not selected", "measuring") if _is_shipped else ("captured",)
    assert sum(state in used for state in states) >= graphs, pygraph.stats()
    if _is_shipped:
        assert states.count("captured") + states.count("not selected") > 0, "no trial has ended"


def compiled(function: Any, **kwargs: Any) -> Any:
    return torch.compile(function, backend="pygraph", **kwargs)


def captured() -> list[pygraph.GraphStats]:
    return [row for row in pygraph.stats() if row.state == "captured"]


def refusals() -> list[str]:
    return [row.reason for row in pygraph.stats() if row.state == "refused"]


def randn(*size: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*size, device="cuda", **kwargs)


def assert_same(actual: Any, expected: Any) -> None:
    """Same structure, same metadata, bitwise equal."""
    if isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert actual.stride() == expected.stride() and actual.device == expected.device
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


@contextmanager
def uncaptured() -> Iterator[None]:
    """PyGraph records nothing in this context: programs run the same compiled code, uncaptured."""
    undo: Undo = []
    try:
        assert runtime.record_lock.take(undo)
        yield
    finally:
        settle(undo)


@contextmanager
def at_most(memory: float) -> Iterator[None]:
    """No more than so many bytes for PyTorch's allocator, all that it holds already included."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(memory / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_inference(
    function: Callable[..., Any],
    make_inputs: Callable[[], tuple[Any, ...]],
    few_calls: int = 5,
    graphs: int = 1,
) -> None:
    """Calls the function uncaptured and captured on equal inputs; compares all results at the end, so
    that a result overwritten by a later call shows."""
    model = compiled(function)
    inputs = [make_inputs() for _ in range(calls(few_calls))]

    def run() -> list[Any]:
        copies = [tuple(_copy(x) for x in args) for args in inputs]
        with torch.no_grad():
            results = [model(*args) for args in copies]
        return [*results, *copies]

    with uncaptured():
        expected = run()
    assert captured() == []
    assert_same(run(), expected)
    assert_used(graphs)
    if not _is_shipped:
        rows = captured()
        assert len(rows) == graphs, pygraph.stats()
        assert all(row.replays >= 1 for row in rows)


def _copy(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage().clone()
    copy = torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, x.storage_offset(), x.size(), x.stride()
    )
    return copy.conj() if x.is_conj() else copy


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Ends the process with all tracebacks, instead of a test run that hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
