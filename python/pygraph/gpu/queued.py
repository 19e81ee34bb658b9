"""Reads small results that were queued on devices, with one wait for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def read(queued: Sequence[torch.Tensor]) -> list[list[Any]]:
    """The numbers in each of some flat tensors of one dtype, on any devices. One wait each."""
    numbers: list[list[Any]] = [[] for _ in queued]
    for device in {tensor.device for tensor in queued}:
        places = [i for i, tensor in enumerate(queued) if tensor.device == device]
        found = iter(torch.cat([queued[i] for i in places]).tolist())
        for i in places:
            numbers[i] = [next(found) for _ in range(queued[i].numel())]
    return numbers
