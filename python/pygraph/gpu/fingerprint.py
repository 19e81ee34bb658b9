"""A 64-bit hash of a tensor's bits, computed on the tensor's device with little memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_FACTOR = -7046029254386353131  # 2**64 / golden ratio, as a signed integer: odd
_CHUNK = 1 << 20  # elements taken at a time
_LARGE_CHUNK = 1 << 23
_LARGE = 1 << 28  # tensors beyond this are worth the memory of large chunks
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all elements' bits, each weighted by its place in memory, modulo 2**64.

    Returns a 0-d int64 tensor on the tensor's device; nothing waits for the device. Equal for equal
    bits whatever the order of the additions, in tensors of the same layout. Takes 16 MiB (128 for
    tensors of over 2**28 elements), half of it until :func:`forget`; reads tensors with gaps between
    their elements through a copy.

    Made of PyTorch's own operators: a kernel for it would take longer to compile than it saves.
    """
    flat = distinct(as_integers(tensor.detach())).reshape(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    chunk = _LARGE_CHUNK if flat.numel() > _LARGE else _CHUNK
    weights = _weights(tensor.device, chunk)
    result = (flat[:chunk] * weights[: flat.numel()]).sum()
    for part in torch.split(flat[chunk:], chunk) if flat.numel() > chunk else ():
        result = result * _FACTOR + (part * weights[: part.numel()]).sum()
    return result


def values_of(queued: Sequence[torch.Tensor]) -> list[int]:
    """The numbers in 0-d int64 tensors on any devices. Waits for each device once."""
    values = [0] * len(queued)
    for device in {tensor.device for tensor in queued}:
        places = [i for i, tensor in enumerate(queued) if tensor.device == device]
        found = torch.stack([queued[i] for i in places]).tolist()
        for i, value in zip(places, found, strict=True):
            values[i] = value
    return values


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's bits as integers of the same size; complex gains a dimension of two.

    The bits in memory, that is, before a conjugation or a negation that PyTorch leaves to the reader.
    """
    tensor = marked_as(tensor, tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def marked_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view that is conjugated and negated, by its reader, if ``like`` is. Of the tensor itself: the
    bits in memory."""
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def forget() -> None:
    """Frees the memory that fingerprints share between each other until the next one."""
    _weights.cache_clear()


@functools.cache
def _weights(device: torch.device, count: int) -> torch.Tensor:
    mixed = torch.arange(1, count + 1, device=device) * _FACTOR
    return mixed ^ (mixed >> 29)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same elements of memory, without repetitions: of a tensor that was expanded, or
    consists of windows that overlap. Few come twice.

    Tensors of one layout have views of one layout. A dense tensor's has one dimension, in the order of
    memory. Not for tensors that are still to be conjugated or negated.
    """
    if tensor.numel() == 0:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    sizes, strides = [1], [1]
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[0] > 0 and pair[1] > 1):
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = size, stride
        elif stride % strides[-1] == 0 and stride <= strides[-1] * sizes[-1]:
            # It goes on where the last one ends, or before.
            sizes[-1] += stride // strides[-1] * (size - 1)
        else:
            sizes.append(size)
            strides.append(stride)
    return tensor.as_strided(sizes[::-1], strides[::-1], tensor.storage_offset())
