"""The program gives tensors other memory between a forward and its backward. Autograd has then kept
the old memory of what it has saved as another tensor (a view), and sees the new one of what it has
saved as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .gradient_programs import Pair, inputs, reasons, replays
from .test_graphed_gradient_calls import Module, both

FORWARDS: dict[str, Any] = {
    "a parameter": lambda self, x: (x @ self.w).sin(),
    "a view of a parameter": lambda self, x: (x @ self.w.t()).sin(),
    "both": lambda self, x: (x @ self.w + x @ self.w.t()).sin(),
    "an argument": lambda self, x: (x * self.b).sin(),
    "a view of an argument": lambda self, x: x.view(4, 3).t() * self.w[:3] * self.b,
    "both of an argument": lambda self, x: x.view(4, 3).t() * self.w[:3] * self.b + x * self.b,
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("of", ["parameters", "the argument"])
def test_memory_is_exchanged(gradients: Any, name: str, of: str) -> None:
    pair = Pair(Module(FORWARDS[name]))
    pair.steps(12, 3, 4)
    leaves = [x.clone().requires_grad_() for x in inputs(1, 3, 4, seed=3) * 2]
    before = replays(gradients, "forward")
    losses = [run(x).sum() for run, x in zip((pair.plain, pair.run), leaves, strict=True)]
    assert replays(gradients, "forward") == before + 1 and both(gradients), reasons(gradients)
    for module, x, loss in zip((pair.plain, pair.graphed), leaves, losses, strict=True):
        for tensor in module.parameters() if of == "parameters" else (x,):
            tensor.data = tensor.data * 3
        loss.backward()
    pair.compare()
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
