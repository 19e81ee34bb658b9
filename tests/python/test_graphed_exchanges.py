"""The program gives tensors other memory between a forward and its backward. Autograd has then kept
the old memory of what it has saved as another tensor (a view), and sees the new one of what it has
saved as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

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


def times_three(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3


def other_layout(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and contents, in the other order."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]


class InOneMemory(torch.nn.Module):
    """Its parameters lie in the memory of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.flat = torch.randn(20, generator=generator) / 4
        self.w = torch.nn.Parameter(self.flat[:16].view(4, 4))
        self.b = torch.nn.Parameter(self.flat[16:])

    def __deepcopy__(self, memo: Any) -> InOneMemory:
        return InOneMemory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).sin() * self.b


def exchange(gradients: Any, module: torch.nn.Module, names: tuple[str, ...], new: Any) -> None:
    """Compares the gradients where the program exchanges some memory before a backward."""
    pair = Pair(module, update=False)
    pair.steps(12, 3, 4)
    leaves = [x.clone().requires_grad_() for x in inputs(1, 3, 4, seed=3) * 2]
    losses = [run(x).sum() for run, x in zip((pair.plain, pair.run), leaves, strict=True)]
    assert both(gradients), reasons(gradients)
    for of, x, loss in zip((pair.plain, pair.graphed), leaves, losses, strict=True):
        for tensor in (x if name == "x" else getattr(of, name) for name in names):
            tensor.data = new(tensor.data)
        loss.backward()
    pair.compare()
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("w",), ("b",), ("w", "b")])
@pytest.mark.parametrize("new", [times_three, other_layout])
def test_parameters_in_one_memory_get_memory_of_their_own(
    gradients: Any, names: tuple[str, ...], new: Any
) -> None:
    exchange(gradients, InOneMemory(), names, new)


@pytest.mark.parametrize("names", [("w",), ("b",), ("x",), ("w", "b", "x")])
def test_memory_gets_another_layout(gradients: Any, names: tuple[str, ...]) -> None:
    exchange(gradients, Module(lambda self, x: (x @ self.w).sin() * self.b), names, other_layout)


def test_writes_to_each_parameter_in_one_memory_are_noticed(gradients: Any) -> None:
    """Parameters that were moved into one memory count their versions apart."""
    for name in ("w", "b"):
        module = Module(lambda self, x: (x @ self.w).sin() * self.b)
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        module.w.data, module.b.data = flat[:16].view(4, 4), flat[16:]
        run = pygraph.graph(module)
        for x in inputs(12, 3, 4):
            run(x.requires_grad_()).sum().backward()
        assert both(gradients), reasons(gradients)
        result = run(inputs(1, 3, 4)[0].requires_grad_())
        with torch.no_grad():
            getattr(module, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
