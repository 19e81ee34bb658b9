"""PyTorch's allocator between phases that work in pieces of different sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime

if TYPE_CHECKING:
    from pygraph import _engine

# Bytes that a graph works with, from which on it is worth a pause.
MUCH = 1 << 25

_is_due = False  # whether the next call gives memory back; a race costs or saves one time


def bytes_on_gpu(args: Iterable[Any]) -> int:
    """Of all tensors among ``args``."""
    return sum(arg.nbytes for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda)


def give_back(after: int) -> None:
    """Lets the allocator give back what it keeps, if ``after`` so many bytes that matters.

    Kept pieces of other sizes would add up to twice the memory that any phase needs. Never raises:
    PyTorch may refuse it while another thread captures.
    """
    if after > MUCH:
        give_back_all()


def give_back_at_next_call(after: int) -> None:
    """As :func:`give_back`, once this call's results are gone. While they are alive, their pieces would
    be all that is left, to be broken up by whatever is needed before tensors of their size."""
    global _is_due
    _is_due |= after > MUCH


def give_back_if_due() -> None:
    """At the beginning of a call."""
    global _is_due
    if _is_due:
        _is_due = False
        give_back_all()


def make_room(wanted: int) -> bool:
    """Whether the device has room for so many bytes more. Where it has none, the allocator first gives
    back what it keeps.

    Two ways to run a program, by turns, take their memory in other orders, and may break up pieces that
    the other one needs; where there is room, it gets new ones. Never raises.
    """
    if wanted <= MUCH:
        return True
    with contextlib.suppress(RuntimeError):
        if _room() < wanted:
            give_back_all()
            return _room() >= wanted
    return True


def _room() -> float:
    """Bytes that the allocator may take from the device."""
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free, allowed - torch.cuda.memory_reserved())


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """No limit to the process's memory on the current device, if there is one, for what PyTorch's
    allocator takes for memory and is none. (Another thread's allocations are not limited either.)"""
    fraction = torch.cuda.get_per_process_memory_fraction()
    if fraction == 1.0:
        yield
        return
    try:
        torch.cuda.set_per_process_memory_fraction(1.0)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)


def give_back_all() -> None:
    """Lets the allocator give back all that it keeps, as PyTorch's graphs do at each recording. Never
    raises."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def free_library_workspaces() -> None:
    """Frees what uncaptured matrix products on the default stream keep: 32 MiB on an H200 for each
    thread that calls cuBLAS. Graphs have a workspace of their own. Whoever needs one later gets one
    again."""
    runtime.engine().free_blas_workspaces()


def defragment_workspace(graph: _engine.CapturedGraph) -> None:
    """Moves the workspace of a graph that is to stay to its place. Never raises: where there is no
    room, or PyTorch refuses, the next replay asks for it."""
    with contextlib.suppress(RuntimeError):
        graph.defragment_workspace()
