"""Plain loops around a compiled model, for tests of graphs that their optimizers and clips have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .graph_training import adamw, batches, normed
from .support import captured

STEPS = 30
Train = Callable[["Loop"], Any]


class Loop:
    """The model is compiled in either case; ``optimizers`` is the option under test."""

    def __init__(self, optimizer: Callable[..., Any], optimizers: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = normed().cuda()
        self.optimizer: Any = optimizer(self.model.parameters())
        # In place, `compile()` does nothing for modules of torch.nn itself in PyTorch 2.11.
        options = {"pygraph.optimizers": optimizers}
        self.call: Any = torch.compile(self.model, backend="pygraph", options=options)
        self.norms: list[torch.Tensor] = []  # that clips returned

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.call(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients, *self.norms]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def plainly(loop: Loop) -> None:
    for x, y in batches(STEPS):
        loop.step(x, y)


def step_replays() -> int:
    return sum(row.replays for row in captured() if row.name.endswith(".step"))


def clip_replays() -> int:
    return sum(row.replays for row in captured() if row.name == "clip_grad_norm_")


def clipping(clip: Callable[[Loop, int], torch.Tensor], steps: int = STEPS, also: Any = None) -> Train:
    """A loop that clips. also: is called before each step."""

    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(steps)):
            if also is not None:
                also(loop, i)
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x), y).backward()
            loop.norms.append(clip(loop, i))
            loop.optimizer.step()

    return train


def assert_trains_alike(train: Train, optimizer: Callable[..., Any] = adamw) -> Loop:
    expected = Loop(optimizer, "off")
    train(expected)
    state = expected.state()
    assert step_replays() == 0 and clip_replays() == 0
    loop = Loop(optimizer, "auto")
    train(loop)
    for a, b in zip(loop.state(), state, strict=True):  # where a step was skipped, with infinities
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return loop
