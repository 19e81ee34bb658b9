"""The owners of a graph's constant addresses (include/pygraph/constants.h) that Python can find."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

Piece = tuple[int, int]  # address, bytes

_DEEPEST = 4  # of containers, closures and wrappers inside each other


def held_tensors(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Tensors that a compiled function holds: Inductor's constants, in its globals.

    The graph keeps references to them. Tensors that an operator holds are not included.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in _tensors_of(function, _DEEPEST):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            found[id(tensor)] = tensor
    return list(found.values())


def _tensors_of(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0:
        for part in _parts_of(value):
            yield from _tensors_of(part, depth - 1)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    code = getattr(value, "__code__", None)
    if code is None:
        return []
    # Of the globals, containers belong to the module, but functions may be anybody's.
    parts = [v for v in list(value.__globals__.values()) if isinstance(v, torch.Tensor)]
    for cell in value.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # nothing was assigned yet
            continue
    return parts


def cached_memory() -> list[Piece]:
    """Memory of PyTorch's allocator, whether in use or not: the allocator may reuse it."""
    return [(s["address"], s["total_size"]) for s in _segments((0, 0))]


def _segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of one pool of PyTorch's allocator, or of all pools: (0, 0)."""
    for item in (*pool, False):  # the last one: include_traces
        for _ in range(_references_taken()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    found = torch.cuda.memory_snapshot(pool, include_traces=False)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


@functools.cache
def _references_taken() -> int:
    """How many references a snapshot drops from each item of its argument (a pool's numbers, and a
    flag). It should drop none. PyTorch 2.11 drops one, because ``THCPModule_memorySnapshot`` treats the
    borrowed references of ``PyTuple_GetItem`` as its own. The numbers would be freed while the pool
    still uses them, and before Python 3.12 ``False`` itself after some thousand snapshots."""
    kept = [int("1000000007"), int("1000000009")]  # no constants of the code
    before = [sys.getrefcount(number) for number in kept]
    for number in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    with contextlib.suppress(RuntimeError):  # there is no such pool
        torch._C._cuda_memorySnapshot((kept[0], kept[1], False))
    after = [sys.getrefcount(number) for number in kept]
    return max(0, *(b + 1 - a for a, b in zip(after, before, strict=True)))


def still_held(pool: torch.cuda.MemPool) -> list[Piece]:
    """Memory of a recording's pool that is still in use after the results are gone."""
    pieces = _active(pool)
    if pieces:
        gc.collect()  # it may only be part of a cycle
        pieces = _active(pool)
    return pieces


def _active(pool: torch.cuda.MemPool) -> list[Piece]:
    pieces = []
    for segment in _segments(pool.id):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                pieces.append((address, block["size"]))
            address += block["size"]
    return pieces
