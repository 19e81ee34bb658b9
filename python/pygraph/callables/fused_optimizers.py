"""Fused optimizers whose learning rate may move between the calls of a step.

A captured launch holds the numbers that Python gave it. For fused Adam, AdamW and SGD the rate can be a
tensor on the GPU instead. Either form gives the same bits for parameters of at most 32 bits, as the
kernels compute in float32 then (tests/gpu/test_graph_steps.py). So the tensor takes the float's place
while the step is recorded, and becomes one more input of the graph; the program and its schedulers go
on with floats.

A capture of Adam also asks for ``capturable``, which fused kernels do not use: it is set for recordings
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_RATE = torch.float32  # as the kernels take it
_Group = dict[str, Any]


def fused_groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[_Group]:
    """The groups of parameters of fused Adam, AdamW and SGD."""
    return [
        group
        for optimizer in optimizers
        if type(optimizer) in _FUSED
        for group in optimizer.param_groups
        if group.get("fused") is True
    ]


def followed_groups(groups: Iterable[_Group]) -> list[_Group]:
    """Those whose rate may be a tensor without a change of results."""
    return [
        group
        for group in groups
        if isinstance(group["lr"], float)
        and all(p.dtype in (torch.float32, torch.bfloat16, torch.float16) for p in group["params"])
    ]


class Rates:
    """The learning rates that a graph follows, as tensors. Not thread-safe."""

    def __init__(self, groups: list[_Group], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._values: list[float] = []
        self._tensors: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._groups)

    def tensors(self) -> list[torch.Tensor]:
        """The rates as they are now. One that has moved gets new memory, because launches that are
        under way may still read the old one."""
        values = [group["lr"] for group in self._groups]
        if values != self._values:
            self._tensors = [
                torch.full((), value, dtype=_RATE, device=self._device) for value in values
            ]
            self._values = values
        return list(self._tensors)

    def are_floats(self) -> bool:
        """Whether the program still has floats there."""
        return all(isinstance(group["lr"], float) for group in self._groups)


@contextlib.contextmanager
def capturable(groups: list[_Group], rates: list[_Group], given: list[torch.Tensor]) -> Iterator[None]:
    """Makes the fused groups capturable, and gives those of ``rates`` tensors as learning rates."""
    kept = [
        (group, key, group[key]) for group in groups for key in ("lr", "capturable") if key in group
    ]
    try:
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
        for group, rate in zip(rates, given, strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, key, value in kept:
            group[key] = value
