"""Inputs of every layout: where a tensor of a given shape lies in its storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Make = Callable[[list[int]], torch.Tensor]  # a contiguous tensor of a shape


def lay_out(layout: str, shape: Sequence[int], make: Make) -> torch.Tensor:
    """A tensor of the shape; of another layout than asked for where the shape has none like it."""
    size = list(shape)
    count = 1
    for n in size:
        count *= n
    if layout == "transposed" and len(size) > 1:
        return make(size[::-1]).permute(*reversed(range(len(size))))
    if layout == "strided" and size:
        return make([*size[:-1], 2 * size[-1]])[..., ::2]
    if layout == "expanded" and size:
        return make([1, *size[1:]]).expand(size)
    if layout == "offset":
        return make([count + 64])[64:].view(size)
    if layout == "misaligned":
        return make([count + 1])[1:].view(size)
    return make(size)
