"""Arguments that a rehearsal works on in place of the given ones, on the same memory.

An alias has a storage of its own, which does not hold the memory. A reference to an alias that is left
after a run shows that the callable keeps its argument; it does not keep the argument's memory alive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables.saved_tensors import IN_ARGUMENT, address_of, place_of
from pygraph.gpu.fingerprint import marked_as


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory with a storage of its own, which does not hold the memory."""
    memory = runtime.engine().memory_of(tensor)
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes
    )
    layout = (storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return marked_as(alias.set_(*layout), tensor)


def is_held(memory: torch.Tensor) -> bool:
    """Whether anything but this tensor, and the Python object that is made here, has its storage."""
    return bool(torch._C._storage_Use_Count(memory.untyped_storage()._cdata) > 2)


def users_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """How many have each tensor, and its storage."""
    return [
        (sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
        for tensor in tensors
    ]


def moved_onto(
    leaves: Sequence[Any], used: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
) -> list[Any]:
    """Results that are arguments, or in their memory, on the arguments that were given."""
    numbers = {address_of(tensor): i for i, tensor in enumerate(used)}
    numbers.pop(0, None)
    found = list(leaves)
    for position, leaf in enumerate(leaves):
        number = numbers.get(address_of(leaf))
        if number is None or leaf.requires_grad:
            continue
        if any(leaf is tensor for tensor in used):
            found[position] = own[number]
        else:
            place = place_of(leaf, (IN_ARGUMENT, number, 0), used)
            found[position] = place.view_of(own[number].detach())
    return found
