"""A 64-bit hash of a tensor's bits, computed where the tensor is and without memory to speak of."""

from __future__ import annotations

import functools
from typing import Any

import torch

_FACTOR = -7046029254386353131  # 2**64 / golden ratio, as a signed integer: odd
_BLOCK = 4096
_CHUNK = 1 << 20
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all elements' bits, each weighted by its position, modulo 2**64.

    Returns a 0-d int64 tensor on the tensor's device; nothing waits for the device. Equal for equal
    bits whatever the order of the additions. Reads non-contiguous tensors through a copy.
    """
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return result
    flat = _flatten(as_integers(tensor.detach()))
    if flat.is_cuda:
        grid = ((flat.numel() + _BLOCK - 1) // _BLOCK,)
        _kernel()[grid](flat, result, flat.numel(), _FACTOR, _BLOCK)
        return result
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        result += (part * _weights(start, part.numel())).sum()
    return result


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's bits as integers of the same size; complex gains a dimension of two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def _weights(start: int, count: int) -> torch.Tensor:
    mixed = torch.arange(start + 1, start + count + 1) * _FACTOR
    return mixed ^ (mixed >> 29)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, without a copy where the memory is dense."""
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return dense.view(-1) if dense.is_contiguous() else tensor.reshape(-1)


@functools.cache
def _kernel() -> Any:
    from pygraph._fingerprint_kernel import fingerprint_kernel

    return fingerprint_kernel
