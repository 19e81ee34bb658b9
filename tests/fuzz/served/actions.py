"""What a program may do to its tensors, modules and optimizer between calls of its step."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .programs import Doubling, Program, Sub


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
