"""What a random step consists of: parts that read and write tensors of many kinds. p: the program."""

from __future__ import annotations

from typing import Any

import torch


def _write(to: torch.Tensor, x: torch.Tensor) -> None:
    to.data.mul_(0.5).add_(x)


_LIBRARY = torch.library.Library("served_fuzz", "DEF")
_LIBRARY.define("write(Tensor(a!) to, Tensor x) -> ()")
_LIBRARY.impl("write", _write, "CPU")
# Made before HostWatch looks: one that is made in a rehearsal is removed again, and PyTorch's own
# cache of it dangles then (tests/python/graph_attacks/test_operators_of_libraries.py).
WRITE = torch.ops.served_fuzz.write.default


class Dirty(torch.autograd.Function):
    """Writes without an operator, and says so."""

    @staticmethod
    def forward(ctx: Any, to: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(to)
        to.data.mul_(0.5)
        return to

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def count(p: Any, x: Any, y: Any) -> Any:
    p.model.count += 1
    return y + p.model.count


def lerp(p: Any, x: Any, y: Any) -> Any:
    p.model.mean.lerp_(x, 0.1)
    return y + p.model.mean


def ema(p: Any, x: Any, y: Any) -> Any:
    torch._foreach_lerp_(list(p.ema.parameters()), list(p.model.a.parameters()), 0.1)
    return y + p.ema(x)


def ema_of_data(p: Any, x: Any, y: Any) -> Any:
    for a, b in zip(p.ema.parameters(), p.model.a.parameters(), strict=True):
        a.data.mul_(0.9).add_(b.data, alpha=0.1)
    return y + p.ema.bias


def turned(p: Any, x: Any, y: Any) -> Any:
    return y @ p.model.turned


def part(p: Any, x: Any, y: Any) -> Any:
    p.part.add_(1)
    return y + p.part


def first_alias(p: Any, x: Any, y: Any) -> Any:
    p.alias.add_(1)
    return y + p.flat.sum()


def alias_last(p: Any, x: Any, y: Any) -> Any:
    y = y + p.flat.sum()
    p.alias.add_(1)
    return y


def detached(p: Any, x: Any, y: Any) -> Any:
    p.detached.mul_(0.9)
    return y + p.detached.sum()


def of_flat(p: Any, x: Any, y: Any) -> Any:
    p.flat[1:3].add_(1)
    p.flat.view(3, 4)[2].mul_(0.5)
    return y


def plain_data(p: Any, x: Any, y: Any) -> Any:
    p.plain.data.add_(1)
    return y + p.plain


def foreach(p: Any, x: Any, y: Any) -> Any:
    torch._foreach_add_([p.plain, p.other], 1)
    return y + p.other


def out(p: Any, x: Any, y: Any) -> Any:
    torch.mul(x, 2, out=p.other)
    return y


def custom(p: Any, x: Any, y: Any) -> Any:
    torch.ops.served_fuzz.write(p.cache, x)
    return y + p.cache


def told_then_custom(p: Any, x: Any, y: Any) -> Any:
    """As compiled programs do."""
    torch.autograd.graph.increment_version(p.written)
    torch.ops.served_fuzz.write(p.written, x)
    return y + p.written


def told(p: Any, x: Any, y: Any) -> Any:
    y = y + p.other
    torch.autograd.graph.increment_version(p.other)
    return y


def dirty(p: Any, x: Any, y: Any) -> Any:
    return y + Dirty.apply(p.cache)


def kept_versions(p: Any, x: Any, y: Any) -> Any:
    with torch.autograd._unsafe_preserve_version_counter(p.plain):
        p.plain.mul_(0.9)
    return y + p.plain


def inferred(p: Any, x: Any, y: Any) -> Any:
    return y + p.inferred


def conj(p: Any, x: Any, y: Any) -> Any:
    p.complex.mul_(0.9)
    return y + p.complex.imag


def sub(p: Any, x: Any, y: Any) -> Any:
    return y + p.sub.sum().as_subclass(torch.Tensor)


def exchange(p: Any, x: Any, y: Any) -> Any:
    """And back."""
    a, b = p.plain, p.other
    a.data, b.data = b.data, a.data
    a.add_(1)
    a.data, b.data = b.data, a.data
    return y + b


PARTS = [
    *(count, lerp, ema, ema_of_data, turned, part, first_alias, alias_last, detached, of_flat),
    *(plain_data, foreach, out, custom, told_then_custom, told, dirty, kept_versions, inferred),
    *(conj, sub, exchange),
]
