"""Programs compiled without a GPU, by a backend that PyGraph knows as its own or by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph import torch_patches
from pygraph.torch_patches import selection
from pygraph.torch_patches.selection import EXACT

X = torch.arange(3.0)


class Backend:
    """Runs the graph as it is, and counts the graphs that Dynamo makes."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward


class ReducingBackend(Backend):
    """Applies patches to the programs that it compiles, as PyGraph's does, or leaves them."""

    def __init__(self, reduces: bool, patches: str = EXACT) -> None:
        """patches: as the option."""
        super().__init__()
        self.reduces = reduces
        self.patches = selection.parse("patches", patches)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.reduces:
            torch_patches.apply(gm, self.patches)
        return super().__call__(gm, inputs)


class OurBackend(Backend):
    def transforms_for(self) -> tuple[str, ...]:
        """By which PyGraph's backend is known."""
        return ()


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x * self.weight + plus
