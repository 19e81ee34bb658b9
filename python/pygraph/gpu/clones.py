"""Copies of a call's arguments, for runs that may overwrite them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.gpu.fingerprint import marked_as


def clone_shared_storages(
    args: Sequence[Any], positions: Sequence[int], device: torch.device | None = None
) -> list[Any]:
    """``args`` with the tensors at ``positions``, and all that share their memory, on clones.

    device: where the clones are to be; where the tensors are if None.

    Whole storages are cloned, so that tensors which overlap still do, at the same offsets. The list
    gives the clones away, as calls do. So no Python object may ever exist for their storages: PyTorch
    keeps it, and its reference, for as long as the storage lives.
    """
    result = list(args)
    addresses = {i: _address(arg) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    users = Counter(addresses.values())
    clones: dict[int, torch.Tensor] = {}  # the bytes, by address of the storage
    for i in positions:
        address = addresses.get(i)
        if address is None:
            continue
        if users[address] == 1 and _is_all_of_its_storage(args[i], device):
            result[i] = args[i].detach().clone()
        elif address not in clones:
            storage = args[i].untyped_storage()
            clones[address] = _bytes_of(storage, device or storage.device)
    for i, address in addresses.items() if clones else ():
        clone = clones.get(address)
        if clone is not None:
            result[i] = _view_of(clone.view(args[i].dtype), args[i])
    return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_all_of_its_storage(tensor: torch.Tensor, device: torch.device | None) -> bool:
    """Whether PyTorch's copy of a tensor, on ``device``, has the bytes of its whole storage at the same
    places. It takes a third of the operators."""
    if device not in (None, tensor.device) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return False
    return bool(tensor.storage_offset() == 0 < tensor.nbytes == tensor.untyped_storage().nbytes())


def sharing_storages(args: Sequence[Any], positions: Iterable[int]) -> set[int]:
    """``positions``, and the positions of all tensors that share memory with these. Makes no Python
    objects for storages."""
    memory_of = runtime.engine().memory_of
    tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    addresses = {i: memory_of(tensor).data_ptr() for i, tensor in tensors.items()}
    shared = {addresses[i] for i in positions if i in addresses}
    return set(positions).union(i for i, address in addresses.items() if address in shared)


def _view_of(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout and dtype of ``like``, on the memory of another tensor of that dtype."""
    tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
    layout = (like.storage_offset(), like.size(), like.stride())
    return marked_as(tensor.set_(memory, *layout), like)  # type: ignore[call-overload]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """A copy of all bytes, and as many more as numbers of any type need."""
    count = storage.nbytes()
    original = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))
    copy = torch.empty(-(-count // 16) * 16, dtype=torch.uint8, device=device)
    copy[:count].copy_(original)
    return copy
