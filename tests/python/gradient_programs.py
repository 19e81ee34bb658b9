"""A differentiated program with and without a graph of the callable inside of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pygraph

from .graphed_world import Replaying


def replays(partitions: type[Replaying], kind: str) -> int:
    """Of forwards, or of backwards."""
    return sum(partition.replays for partition in partitions.all if partition.info.kind == kind)


def reasons(partitions: type[Replaying]) -> str:
    """Why calls have no graph."""
    entries = [entry.reason for partition in partitions.all for entry in partition.entries.values()]
    return "; ".join({*entries, *(row.reason for row in pygraph.stats())} - {""})


def inputs(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def weigh(results: Any) -> torch.Tensor:
    """A loss that tells results apart."""
    tensors = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
    needing = [r for r in tensors if r.requires_grad]
    return sum(((r * (i + 1)).sin().sum() for i, r in enumerate(needing)), torch.zeros(()))


class Pair:
    """A module, and a copy of it that is graphed. Each step is made with both, and compared in bits:
    results, gradients of parameters and arguments, and the module's buffers."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any], torch.Tensor] = weigh,
        call: Callable[..., Any] = lambda run, *args: run(*args),
        update: bool = True,
    ) -> None:
        self.plain, self.graphed = module, copy.deepcopy(module)
        self.run = pygraph.graph(self.graphed)
        self._loss, self._call = loss, call
        self._optimizers = []
        for of in (self.plain, self.graphed):
            parameters = list(of.parameters())
            if parameters and update:
                self._optimizers.append(torch.optim.SGD(parameters, lr=0.05))

    def step(self, *args: Any, needs: Sequence[int] = (0,)) -> Any:
        """needs: which arguments require gradients."""
        found = []
        for run, module in ((self.plain, self.plain), (self.run, self.graphed)):
            leaves = [
                a.clone().requires_grad_(i in needs) if isinstance(a, torch.Tensor) else a
                for i, a in enumerate(args)
            ]
            torch.manual_seed(len(args))
            results = self._call(run, *leaves)
            loss = self._loss(results)
            if loss.requires_grad:
                loss.backward()
            found.append((results, leaves, module))
        (a, plain_leaves, _), (b, leaves, _) = found
        assert_alike(a, b)
        for x, y in zip(plain_leaves, leaves, strict=True):
            if isinstance(x, torch.Tensor):
                assert_alike(x.grad, y.grad)
        self.compare()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return b

    def compare(self) -> None:
        ours, theirs = dict(self.plain.named_parameters()), dict(self.graphed.named_parameters())
        for name, parameter in ours.items():
            assert_alike(parameter.grad, theirs[name].grad, name)
            assert_alike(parameter, theirs[name], name)
        for (name, x), y in zip(self.plain.named_buffers(), self.graphed.buffers(), strict=True):
            assert_alike(x, y, name)

    def steps(self, count: int, *shape: int, needs: Sequence[int] = (0,)) -> None:
        for x in inputs(count, *shape):
            self.step(x, needs=needs)


def assert_alike(a: Any, b: Any, what: str = "a result") -> None:
    """Of results or gradients: bits, layout, and whether they require gradients."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    assert len(ours) == len(theirs), what
    for x, y in zip(ours, theirs, strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y, what
            continue
        assert x.dtype == y.dtype and x.shape == y.shape and x.requires_grad == y.requires_grad, what
        is_same = torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        assert is_same, f"{what}: {x} for {y}"
