"""What a program does between the calls of its step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch

from .loops import SETTINGS, Loop
from .models import Layer, Scale


def _layer(p: Loop) -> Layer:
    return p.r.choice(p.of.model.layers)


def train_or_eval(p: Loop) -> None:
    p.of.model.train(not p.of.model.training)


def one_layers_mode(p: Loop) -> None:
    of = _layer(p)
    of.train(not of.training)


def freeze(p: Loop) -> None:
    _layer(p).requires_grad_(p.r.random() < 0.6)


def freeze_one(p: Loop) -> None:
    of = p.r.choice(p.of.model.every_parameter())
    of.requires_grad_(not of.requires_grad)


def rate(p: Loop) -> None:
    for group in p.of.optimizer.param_groups:
        value = p.r.choice((0.1, 0.01, 0.03))
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def numbers(p: Loop) -> None:
    group = p.r.choice(p.of.optimizer.param_groups)
    for name, values in {
        "momentum": (0.5, 0.9), "weight_decay": (0.0, 0.1), "betas": ((0.9, 0.99), (0.5, 0.9)),
        "eps": (1e-8, 1e-3), "nesterov": (False,), "maximize": (False, True),
    }.items():  # fmt: skip
        if name in group and p.r.random() < 0.5:
            group[name] = p.r.choice(values)


def new_group(p: Loop) -> None:
    groups = p.of.optimizer.param_groups
    if len(groups) == 1 and len(groups[0]["params"]) > 1:
        last = groups[0]["params"].pop()
        p.of.optimizer.add_param_group({"params": [last], "lr": groups[0]["lr"]})
    elif len(groups) > 1:
        groups[0]["params"] += groups.pop()["params"]
        p.scheduler = p.of.scheduler = None


def load_optimizer(p: Loop) -> None:
    p.of.optimizer.load_state_dict(copy.deepcopy(p.of.optimizer.state_dict()))


def forget_moments(p: Loop) -> None:
    if p.r.random() < 0.5:
        p.of.optimizer.state.clear()
    else:
        for of in p.of.optimizer.state.values():
            for value in of.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def load_model(p: Loop) -> None:
    state = {k: v + 0.01 if v.is_floating_point() else v for k, v in p.of.model.state_dict().items()}
    p.of.model.load_state_dict(state, assign=p.r.random() < 0.5)


def save_and_load(p: Loop) -> None:
    file = io.BytesIO()
    torch.save(p.of.model.state_dict(), file)
    file.seek(0)
    p.of.model.load_state_dict(torch.load(file))


def other_optimizer(p: Loop) -> None:
    p.scheduler = p.of.scheduler = None
    p.make_optimizer()


def other_memory(p: Loop) -> None:
    of = p.r.choice(p.of.model.every_parameter())
    of.data = of.data.clone() * 0.9


def replace_parameter(p: Loop) -> None:
    p.of.model.head.weight = torch.nn.Parameter(p.of.model.head.weight.detach() * 0.9)


def write_parameter(p: Loop) -> None:
    with torch.no_grad():
        p.r.choice(p.of.model.every_parameter()).mul_(0.9)


def flag(p: Loop) -> None:
    of = _layer(p)
    of.flag = not of.flag


def expert(p: Loop) -> None:
    of = _layer(p)
    of.expert = 1 - of.expert


def gain(p: Loop) -> None:
    _layer(p).gain = p.r.choice((1.0, 0.5, 2))


def option(p: Loop) -> None:
    of = _layer(p)
    if p.r.random() < 0.5:
        of.options["slope"] = p.r.choice((0.1, 0.2))
    else:
        of.options = {"slope": 0.1, "act": p.r.choice(("relu", "tanh"))}


def buffer(p: Loop) -> None:
    of = _layer(p)
    if p.r.random() < 0.5:
        of.mean = of.mean + 0.1
    else:
        of.seen.fill_(p.r.choice((0.0, 0.5)))


def swap_layers(p: Loop) -> None:
    p.of.model.layers.reverse()


def skip(p: Loop) -> None:
    p.of.model.skip ^= {p.r.randrange(len(p.of.model.layers))}


def class_state(p: Loop) -> None:
    Scale.factor = p.r.choice((1.0, 2.0))


def setting(p: Loop) -> None:
    SETTINGS["smoothing"] = p.r.choice((0.0, 0.1))


def closure(p: Loop) -> None:
    p.of.set_scale(p.r.choice((1.0, 0.5)))


def configuration(p: Loop) -> None:
    if p.r.random() < 0.5:
        p.of.config.weight = p.r.choice((1.0, 0.3))
    else:
        p.of.config.clip = p.r.choice(("norm", "value", "none", "own"))


def other_configuration(p: Loop) -> None:
    p.of.config = copy.copy(p.of.config)
    p.of.config.norm = p.r.choice((1.0, 0.01))


def sizes(p: Loop) -> None:
    p.size, p.chunks = p.r.choice((6, 6, 3)), p.r.choice((1, 1, 2))


def modes(p: Loop) -> None:
    p.context = p.r.choice((torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)))


def gradients(p: Loop) -> None:
    for of in p.of.model.every_parameter():
        choice = p.r.random()
        if choice < 0.2:
            of.grad = None
        elif choice < 0.4:
            of.grad = torch.full_like(of, 0.1)
        elif choice < 0.5 and of.grad is not None:
            of.grad = of.grad.clone()


def shared_gradients(p: Loop) -> None:
    """Gradients in one flat tensor."""
    parameters = list(dict.fromkeys(p.of.model.every_parameter()))
    flat = torch.zeros(sum(of.numel() for of in parameters), dtype=parameters[0].dtype)
    at = 0
    for of in parameters:
        of.grad = flat[at : at + of.numel()].view_as(of)
        at += of.numel()
    p.kept = [flat]


def keep_gradient(p: Loop) -> None:
    of = p.r.choice(p.of.model.every_parameter())
    p.kept = [] if of.grad is None else [of.grad]


def hook(p: Loop) -> None:
    log = p.of.log
    if p.hooks:
        p.hooks.pop().remove()
    elif p.of.model.head.weight.requires_grad:
        kind = p.r.randrange(4)
        if kind == 0:
            p.hooks.append(p.of.model.head.weight.register_hook(lambda g: g * 2))
        elif kind == 1:
            p.hooks.append(p.of.model.head.register_forward_hook(lambda m, a, out: out * 0.5))
        elif kind == 2:
            p.hooks.append(p.of.model.head.register_forward_hook(lambda m, a, out: log.append(1)))
        else:
            p.hooks.append(p.of.model.head.weight.register_hook(lambda g: log.append(2)))


def hook_of_optimizer(p: Loop) -> None:
    log = p.of.log
    if p.hooks:
        p.hooks.pop().remove()
    else:
        p.hooks.append(p.of.optimizer.register_step_pre_hook(lambda o, a, k: log.append(3)))


def tie(p: Loop) -> None:
    p.of.model.layers[-1].weight = p.of.model.layers[0].weight


def copy_model(p: Loop) -> None:
    """Of a graphed step; a graphed model stays what it is."""
    if p.kind == "step":
        p.of.model = copy.deepcopy(p.of.model)
        other_optimizer(p)


def other_dtype(p: Loop) -> None:
    if p.kind == "step":
        dtype = p.r.choice((torch.float32, torch.float64))
        for of in (p.of.model, *[e for layer in p.of.model.layers for e in layer.experts]):
            of.to(dtype)
        p.of.ema = None
        other_optimizer(p)


ACTIONS: tuple[Callable[[Any], None], ...] = tuple(
    of
    for name, of in list(globals().items())
    if getattr(of, "__module__", "") == __name__ and callable(of) and name[0] != "_"
)
