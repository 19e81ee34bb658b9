"""Training loops with a clip of gradients, with and without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .graphed_programs import batches
from .graphed_world import Replaying
from .optimizer_loops import Loop, assert_trains_alike, sgd

Clip = Callable[[Loop, int], Any]


def clips(partitions: type[Replaying]) -> list[int]:
    """The replays of each partition of a clip."""
    return [p.replays for p in partitions.all if p.info.name == "clip_grad_norm_"]


def train_alike(clip: Clip, optimizer: Any = sgd, steps: int = 14, also: Any = None) -> list[Any]:
    """Trains with graphs and without. Returns the clips' results, which are equal. also: is called
    before each step."""
    results: list[list[Any]] = []

    def train(loop: Loop) -> None:
        results.append(norms := [])
        for i, (x, y) in enumerate(batches(steps)):
            if also is not None:
                also(loop, i)
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            norms.append(clip(loop, i))
            loop.optimizer.step()

    assert_trains_alike(train, optimizer)
    for theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == ours.dtype and theirs.shape == ours.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return results[1]
