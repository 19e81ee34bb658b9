"""Graphs at fixed addresses, for functions that cannot be relocated.

A custom operator may hide an address where no relocation finds it, in device memory for example. Its
function is then recorded as one that works on copies:

    copies = [input.clone() for input in inputs]         memory of the graph's own
    results = function(copies)                           all at the same addresses in both recordings
    return [result.clone() for result in results]        fresh memory at each call, as ever

To the linker everything between the copies is constant. The copies are nodes of the graph, whose one
changing address is relocated, so this is an ordinary graph to whoever replays it.

Inputs that should keep their address, such as parameters, are used where they are; the graph serves
calls that have them there. Inputs that the function writes are copied, and copied back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph.clones import clone_shared_storages, view_of


@dataclasses.dataclass(frozen=True)
class CopiedInputs:
    """fixed: positions of inputs that are used where they are. written: of those that copies go back
    to. No position is in both."""

    fixed: frozenset[int]
    written: frozenset[int]

    def call(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        stand_ins: list[Any],
        is_fixed: Callable[[torch.Tensor], bool],
        fixed_memory: contextlib.AbstractContextManager[None],
    ) -> Sequence[Any]:
        """Calls ``function`` on copies while recording; returns copies of its results.

        is_fixed: whether a tensor lies in memory that was allocated within ``fixed_memory``.
        """
        copied = [i for i, arg in enumerate(stand_ins) if i not in self.fixed and _is_on_gpu(arg)]
        with fixed_memory:
            copies = clone_shared_storages(stand_ins, copied)
            written = {i: copies[i] for i in copied if i in self.written}
            originals = {_storage(copies[i]): stand_ins[i] for i in copied}
            returned = function(copies)
        for i, copy in written.items():
            _elements(stand_ins[i]).copy_(_elements(copy))
        # An output that is a view of an input, or one itself, is the same of the call's own input.
        results = [
            _same_of(originals[_storage(result)], result)
            if _is_on_gpu(result) and _storage(result) in originals
            else result
            for result in returned
        ]
        fresh = [i for i, result in enumerate(results) if _is_on_gpu(result) and is_fixed(result)]
        return clone_shared_storages(results, fresh)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of an expanded one."""
    parts = (slice(1 if stride == 0 else None) for stride in tensor.stride())
    return tensor[tuple(parts)]


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.numel() > 0


def _same_of(original: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What the result, a view of the original's copy, is of the original."""
    same = view_of(original.untyped_storage(), result)
    layouts = [(t.dtype, t.storage_offset(), t.size(), t.stride()) for t in (original, same)]
    return original if layouts[0] == layouts[1] else same


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Stays another one's than any later storage's, even if this one is freed."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def allocating_from(
    pool: torch.cuda.MemPool, instead_of: torch.cuda.MemPool, device: int
) -> Iterator[None]:
    """While this thread captures with one pool, lets it allocate from another one."""
    torch._C._cuda_endAllocateToPool(device, instead_of.id)
    try:
        with torch.cuda.use_mem_pool(pool, device):
            yield
    finally:
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, instead_of.id)
        torch._C._cuda_releasePool(device, instead_of.id)  # counted twice now
