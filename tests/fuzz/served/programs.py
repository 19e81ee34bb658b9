"""Random steps over tensors of many kinds, and what a program may do to these between the calls."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def _write(to: torch.Tensor, x: torch.Tensor) -> None:
    to.data.mul_(0.5).add_(x)


_LIBRARY = torch.library.Library("served_fuzz", "DEF")
_LIBRARY.define("write(Tensor(a!) to, Tensor x) -> ()")
_LIBRARY.impl("write", _write, "CPU")
# Made before HostWatch looks: one that is made in a rehearsal is removed again, and PyTorch's own
# cache of it dangles then (tests/python/graph_attacks/test_operators_of_libraries.py).
WRITE = torch.ops.served_fuzz.write.default


class Sub(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("turned", torch.randn(4, 4).t())
        self.register_buffer("count", torch.zeros(()))
        self.more = nn.ParameterList([torch.randn(4) for _ in range(3)])


class Program:
    """One instance is called as it is, the others graphed: all do the same with the same seed."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        torch.manual_seed(seed)
        r = self.r
        self.model = m = Model()
        self.ema = copy.deepcopy(m.a).requires_grad_(False)
        self.flat = torch.zeros(12)
        self.part = self.flat[4:8]
        self.alias = self.flat.data
        self.detached = self.flat.detach()
        self.plain = torch.ones(4)
        self.other = torch.zeros(4)
        self.cache = torch.zeros(4)
        self.written = torch.zeros(4)
        self.complex = torch.randn(4, dtype=torch.complex64)
        self.sub = torch.ones(4).as_subclass(Sub)
        with torch.inference_mode():
            self.inferred = torch.ones(4)
        if r.random() < 0.3:
            m.b.weight = m.a.weight
        if r.random() < 0.2:
            parametrize.register_parametrization(m.b, "bias", Doubling())
        kinds: list[Callable[[Any], Any]] = [
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        ]
        self.trains = r.random() < 0.6
        self.optimizer = r.choice(kinds)(m.parameters()) if self.trains else None
        self.zeroes = r.choice(("before", "after", "to zero", "never"))
        self.parts = r.sample(PARTS, r.randint(1, 8))
        self.kept: list[Any] = []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        with torch.set_grad_enabled(self.trains):
            m = self.model
            if self.trains:
                if self.zeroes == "before":
                    self.optimizer.zero_grad()
                elif self.zeroes == "to zero":
                    self.optimizer.zero_grad(set_to_none=False)
                h = m.norm(m.b(m.a(x.expand(3, 4) * torch.arange(1.0, 4.0)[:, None]).relu()))
                loss = (h * sum(m.more)).square().sum()
                loss.backward()
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                self.optimizer.step()
                if self.zeroes == "after":
                    self.optimizer.zero_grad()
                y = y + loss.detach()
        with torch.no_grad():
            for part in self.parts:
                y = part(self, x, y)
        return y.clamp(-1000, 1000)

    def call(self, i: int) -> Any:
        return self.run(torch.full((4,), float(i % 5)))

    def keep_finite(self) -> None:
        for tensor in self.tensors().values():
            if not tensor.is_complex() and tensor.layout == torch.strided:
                tensor.data.clamp_(-100, 100)

    run: Callable[..., Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for module, name in ((self.model, "model"), (self.ema, "ema")):
            found |= {f"{name}.{k}": v for k, v in module.state_dict(keep_vars=True).items()}
        found |= {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        for k, p in self.model.named_parameters():
            if p.grad is not None:
                found[f"{k}.grad"] = p.grad
            if self.optimizer is not None:
                state = self.optimizer.state.get(p, {})
                found |= {f"{k}.{n}": v for n, v in state.items() if isinstance(v, torch.Tensor)}
        return found

    def some(self) -> torch.Tensor:
        found = self.tensors()
        return found[self.r.choice(sorted(found))]


# Parts of a step.
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


# What the program does between calls.
def _parameters(p: Program) -> list[Any]:
    return list(p.model.parameters())


def set_data(p: Program) -> None:
    t = p.some()
    t.data = t.data.clone()


def same_data(p: Program) -> None:
    t = p.some()
    t.data = t.data


def turned_data(p: Program) -> None:
    t = p.some()
    if t.dim() == 2:
        t.data = t.data.t()


def set_(p: Program) -> None:
    with torch.no_grad():
        t = p.some()
        t.set_(t.detach().clone())


def set_same(p: Program) -> None:
    with torch.no_grad():
        t = p.some()
        t.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())


def t_(p: Program) -> None:
    with torch.no_grad():
        t = p.some()
        t.t_()


def t_t_(p: Program) -> None:
    with torch.no_grad():
        t = p.some()
        t.t_()
        t.t_()


def offset(p: Program) -> None:
    with torch.no_grad():
        p.part.as_strided_((4,), (1,), p.r.choice((0, 4, 8)))


def resize(p: Program) -> None:
    with torch.no_grad():
        t = p.r.choice((p.plain, p.other, p.cache))
        t.resize_(p.r.choice((0, 4, 1)))
        t.resize_(4).fill_(1)


def storage(p: Program) -> None:
    t = p.r.choice((p.plain, p.other, p.cache))
    n = t.untyped_storage().nbytes()
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(n)
    t.data.fill_(1)


def requires_grad(p: Program) -> None:
    t = p.some()
    t.requires_grad_(not t.requires_grad)


def there_and_back(p: Program) -> None:
    t = p.some()
    t.requires_grad_(not t.requires_grad).requires_grad_(not t.requires_grad)


def gone_hook(p: Program) -> None:
    t = p.r.choice(_parameters(p))
    t.register_hook(lambda g: g).remove()


def hook(p: Program) -> None:
    t = p.r.choice(_parameters(p))
    p.kept.append(t.register_hook(lambda g: 2 * g))


def remove_hook(p: Program) -> None:
    for kept in p.kept:
        kept.remove()
    p.kept.clear()


def no_hooks(p: Program) -> None:
    p.some()._backward_hooks = None


def post_hook(p: Program) -> None:
    t = p.r.choice(_parameters(p))
    p.kept.append(t.register_post_accumulate_grad_hook(lambda q: q.grad.mul_(0.5)))


def gone_post_hook(p: Program) -> None:
    t = p.r.choice(_parameters(p))
    t.register_post_accumulate_grad_hook(lambda q: None).remove()


def gradient(p: Program) -> None:
    t = p.some()
    t.grad = p.r.choice((None, torch.full_like(t, 0.1)))


def retain(p: Program) -> None:
    p.some().retain_grad()


def sparse_gradient(p: Program) -> None:
    t = p.model.a.weight
    t.grad = torch.full_like(t, 0.1).detach().to_sparse()


def other_parameter(p: Program) -> None:
    p.model.a.bias = nn.Parameter(p.model.a.bias.detach() * p.r.choice((1, 0.5)))


def same_memory(p: Program) -> None:
    p.model.a.bias = nn.Parameter(p.model.a.bias.data)


def deleted(p: Program) -> None:
    kept = p.model.a.bias
    del p.model.a.bias
    gc.collect()
    p.model.a.bias = nn.Parameter(kept.detach().clone())


def moved(p: Program) -> None:
    a, b = p.model.a, p.model.b
    if not parametrize.is_parametrized(b):
        a.bias, b.bias = b.bias, a.bias


def modules(p: Program) -> None:
    p.model.a, p.model.b = p.model.b, p.model.a


def load(p: Program) -> None:
    state = {k: v + 0.01 for k, v in p.model.state_dict().items() if v.is_floating_point()}
    p.model.load_state_dict(state, strict=False, assign=p.r.random() < 0.5)


def copied(p: Program) -> None:
    p.ema = copy.deepcopy(p.ema)


def dtype(p: Program) -> None:
    p.ema.double().float()


def negative(p: Program) -> None:
    t = p.r.choice((p.plain, p.model.mean, p.model.turned))
    t.data = torch._neg_view(t.data)


def conjugate(p: Program) -> None:
    p.complex.data = p.complex.data.conj()


def values(p: Program) -> None:
    t = p.some()
    with torch.no_grad():
        p.r.choice((lambda: t.mul_(0.9), lambda: t.data.mul_(0.9)))()


def dictionary(p: Program) -> None:
    of = p.r.choice((p.model, p.model.a, p.model.more))
    name = p.r.choice(("_parameters", "_buffers", "_modules", "_forward_hooks"))
    choice = p.r.randrange(4)
    if choice == 0:
        getattr(of, name).tag = 1
    elif choice == 1:
        setattr(of, name, type(getattr(of, name))(getattr(of, name)))
    elif choice == 2:
        getattr(of, name).__dict__ = {}
    else:
        setattr(of, name, dict(getattr(of, name)))


class Negated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def class_(p: Program) -> None:
    p.ema.__class__ = p.r.choice((nn.Linear, Negated))


def parametrized(p: Program) -> None:
    if parametrize.is_parametrized(p.ema):
        parametrize.remove_parametrizations(p.ema, "bias")
    else:
        parametrize.register_parametrization(p.ema, "bias", Doubling())


def swapped_names(p: Program) -> None:
    p.plain, p.other = p.other, p.plain


def grown(p: Program) -> None:
    p.flat = torch.cat([p.flat, p.flat])[:12]


def memory_of_other(p: Program) -> None:
    p.other.data = p.plain.data


def optimizer_state(p: Program) -> None:
    if p.optimizer is not None:
        p.optimizer.load_state_dict(copy.deepcopy(p.optimizer.state_dict()))


def frozen(p: Program) -> None:
    p.model.more[0].requires_grad_(p.r.random() < 0.5)


def mode(p: Program) -> None:
    p.model.train(not p.model.training)


def collect(p: Program) -> None:
    gc.collect()


def attribute(p: Program) -> None:
    p.some().tag = 1


def sub_class(p: Program) -> None:
    p.sub.__class__ = p.r.choice((Sub, torch.Tensor))


def detach_(p: Program) -> None:
    p.some().detach_()


ACTIONS = [
    *(set_data, same_data, turned_data, set_, set_same, t_, t_t_, offset, resize, storage),
    *(requires_grad, there_and_back, gone_hook, hook, remove_hook, no_hooks, post_hook, gone_post_hook),
    *(gradient, retain, sparse_gradient, other_parameter, same_memory, deleted, moved, modules, load),
    *(copied, dtype, values, dictionary, class_, parametrized),
    *(swapped_names, grown, memory_of_other, optimizer_state, frozen, mode, collect, attribute),
    *(sub_class, detach_),
]


def laid_out_gradient(p: Program) -> None:
    t = p.model.a.weight
    t.grad = p.r.choice((torch.arange(16.0).reshape(4, 4).t(), torch._neg_view(torch.ones(4, 4))))


# Python's path does not see these (tests/python/graph_attacks: test_bits_of_tensors.py,
# test_layouts_of_gradients.py).
KNOWN = [negative, conjugate, laid_out_gradient]
