"""The values that a program under construction has, as tensors without data; what statements pick from.

Whether a statement fits is asked of PyTorch itself, on the ``meta`` device, once per size that the
program is called with; so operators need no shape functions here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from .program import Input, Program, Statement, meta_inputs, namespace

Maker = Callable[["Scope"], Statement | None]
MAKERS: list[Maker] = []
WEIGHTS: list[float] = []
_MOST_ELEMENTS = 1 << 22


def operator(weight: float = 1.0) -> Callable[[Maker], Maker]:
    """Registers what makes statements of one kind, or None where no value fits."""

    def register(maker: Maker) -> Maker:
        MAKERS.append(maker)
        WEIGHTS.append(weight)
        return maker

    return register


class Scope:
    """Names, and what is known of their values."""

    def __init__(
        self, rng: random.Random, inputs: list[Input], sizes: list[int], is_compiled: bool
    ) -> None:
        self.is_compiled = is_compiled
        self.rng = rng
        self.varies = len(sizes) > 1
        shell = Program(0, "", "", inputs, [], [], [], sizes)
        self._globals = namespace("meta")
        self._values = [{**self._globals, **meta_inputs(shell, size)} for size in sizes]
        self.names = [i.name for i in inputs]
        self.inputs = set(self.names)
        self._count = 0

    def tensor(self, name: str) -> torch.Tensor:
        """The value at the first size, for what does not depend on the size."""
        return self._values[0][name]

    def always(self, name: str, fits: Callable[[torch.Tensor], bool]) -> bool:
        """Whether the value fits at each size. A tensor of one element is contiguous and overlaps
        nothing, however it is laid out; one of the same layout with more elements may not be."""
        return all(fits(values[name]) for values in self._values)

    def fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """The name of a random value that fits at each size; late ones more often, so that programs
        grow deep."""
        found = [name for name in self.names if self.always(name, fits)]
        if not found:
            return None
        return self.rng.choice(found[-4:] if self.rng.random() < 0.6 else found)

    def is_never_empty(self, name: str) -> bool:
        """At no size: indices into nothing end the process on a GPU."""
        return self.always(name, lambda t: t.numel() > 0)

    def floating(self, dims: int | None = None) -> str | None:
        return self.pick(lambda t: t.is_floating_point() and (dims is None or t.dim() == dims))

    def like(self, name: str) -> str | None:
        """Another value of the same shape and dtype, if there is one."""
        t = self.tensor(name)
        return self.pick(lambda o: o.shape == t.shape and o.dtype == t.dtype)

    def broadcastable(self, name: str) -> str | None:
        t = self.tensor(name)
        return self.pick(lambda o: o.is_floating_point() and _expands(o.shape, t.shape))

    def share(self, a: str, b: str) -> bool:
        """Whether two values lie in one storage, at any size."""
        pairs = ((values[a].untyped_storage(), values[b].untyped_storage()) for values in self._values)
        return any(first._cdata == second._cdata for first, second in pairs)

    def writable(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """Without elements that lie in one place: who writes it last is left to chance."""
        return self.pick(lambda t: fits(t) and t.numel() > 0 and _are_apart(t))

    def result(self, template: str, *args: str, count: int = 1, **kwargs: Any) -> Statement:
        """A statement with fresh outputs."""
        return Statement([self.fresh() for _ in range(count)], template, list(args), **kwargs)

    def add(self, statement: Statement) -> bool:
        """Makes the statement's values, if it fits for all sizes."""
        try:
            code = compile(statement.source(on_meta=True), "statement", "exec")
            for values in self._values:
                exec(code, values)
                made = [values[name] for name in statement.outputs]
                if not all(isinstance(t, torch.Tensor) and _is_moderate(t) for t in made):
                    raise ValueError("not a tensor, or too large")
        except Exception:
            for values in self._values:
                for name in statement.outputs:
                    values.pop(name, None)
            return False
        self.names += statement.outputs
        return True


def _are_apart(t: torch.Tensor) -> bool:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places.unique().numel() == places.numel()


def _is_moderate(t: torch.Tensor) -> bool:
    return t.is_meta and t.numel() <= _MOST_ELEMENTS and t.layout == torch.strided


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(n in (1, m) for n, m in pairs)
