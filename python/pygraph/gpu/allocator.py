"""Releases the cache of PyTorch's allocator between phases that need pieces of different sizes
(docs/explanation/memory.md)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.undoing import Undo

if TYPE_CHECKING:
    from pygraph import _engine

# Bytes that a graph works with, from which on it is worth a pause.
MUCH = 1 << 25
# The inverse of the share of the device's free memory up to which copies may lie on the device.
_SHARE = 16
# The share of a device's memory up to which graphs hold internal memory that their launches else
# allocate, and the share that has to be free.
_HELD_SHARE = 0.02
_PLENTY = 0.25

_is_due = False  # whether the next call gives memory back; a race costs or saves one time


def bytes_on_gpu(args: Iterable[Any]) -> int:
    """The bytes of all GPU tensors among ``args``."""
    return sum(arg.nbytes for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda)


def give_back(after: int) -> None:
    """Empties the allocator's cache after a phase that worked with ``after`` bytes, if these are many.
    Never raises: PyTorch may refuse it while another thread captures."""
    if after > MUCH:
        give_back_all()


def give_back_at_next_call(after: int) -> None:
    """Like :func:`give_back`, at the next call, when this call's results are gone."""
    global _is_due
    _is_due |= after > MUCH


def give_back_if_due() -> None:
    """Does what :func:`give_back_at_next_call` asked for. Called at the beginning of a call."""
    global _is_due
    if _is_due:
        _is_due = False
        give_back_all()


def make_room(wanted: int) -> bool:
    """Empties the allocator's cache if fewer than ``wanted`` bytes are free. Returns whether there is
    room. Never raises."""
    if wanted <= MUCH:
        return True
    with contextlib.suppress(RuntimeError):
        if free_bytes() < wanted:
            give_back_all()
            return free_bytes() >= wanted
    return True


def is_scarce(wanted: int) -> bool:
    """Whether ``wanted`` bytes are many, and no small part of what the current device has left. Never
    raises."""
    if wanted <= MUCH:
        return False
    with contextlib.suppress(RuntimeError):
        return wanted * _SHARE > free_bytes()
    return True


def free_bytes() -> float:
    """Bytes that the allocator may still take from the current device."""
    return _memory_of(None)[0]


def _memory_of(device: int | None) -> tuple[float, float]:
    """Bytes that the allocator may still take from a device, and may have in all. None: the current
    device."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free, allowed - reserved_bytes(device)), allowed


def reserved_bytes(device: int | None = None) -> int:
    """``torch.cuda.memory_reserved``, by default of the current device. That flattens and sorts all
    statistics."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics["reserved_bytes"]["all"]["current"]) if statistics else 0


def lift_limit(undo: Undo) -> None:
    """Lifts the process's memory limit on the current device for stand-ins, which PyTorch's allocator
    counts as memory. (Allocations of other threads are not limited meanwhile.)"""
    fraction = torch.cuda.get_per_process_memory_fraction()
    if fraction < 1.0:
        undo.append(functools.partial(torch.cuda.set_per_process_memory_fraction, fraction))
        torch.cuda.set_per_process_memory_fraction(1.0)


def give_back_all() -> None:
    """Empties the allocator's cache, as PyTorch's graphs do at each recording. Never raises."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def free_library_workspaces() -> None:
    """Frees this thread's cuBLAS workspace of the default stream: 32 MiB on an H200. Graphs have a
    workspace of their own. Uncaptured products allocate it again."""
    runtime.engine().free_blas_workspaces()


def defragment_workspace(graph: _engine.CapturedGraph) -> None:
    """Moves the workspace of a selected graph to its final place. Never raises: if there is no room, or
    PyTorch refuses, the next replay allocates it."""
    with contextlib.suppress(RuntimeError):
        graph.defragment_workspace()


def hold_blocks(graph: _engine.CapturedGraph, device: int) -> None:
    """Lets a selected graph hold the internal memory that its launches allocate, if memory is plentiful
    and as long as it is (docs/decisions/0037). Never raises."""
    if graph.block_bytes == 0 or os.environ.get("PYGRAPH_HOLD_MEMORY") == "0":
        return
    with contextlib.suppress(RuntimeError):
        if torch.cuda.get_allocator_backend() != "native":
            return  # others need not tell what they have reserved
        free, allowed = _memory_of(device)
        spare = free - allowed * _PLENTY
        if graph.block_bytes <= spare:
            most_reserved = reserved_bytes(device) + spare
            graph.hold_blocks(int(allowed * _HELD_SHARE), int(most_reserved))


def drop_blocks(device: int) -> None:
    """Frees what graphs of a device hold for their launches, because memory is short. They hold nothing
    from now on. Never raises."""
    with contextlib.suppress(RuntimeError):
        runtime.engine().drop_blocks(device)
