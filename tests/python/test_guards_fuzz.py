"""Random models that change at random between calls: call by call, results and recompilations are those
of plain Dynamo.

PYGRAPH_FUZZ_MODELS and PYGRAPH_FUZZ_SEED make it more, and another one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import config

from pygraph.torch_patches.selection import EXACT
from tests.python.compiled_programs import Backend, ReducingBackend

MODELS = int(os.environ.get("PYGRAPH_FUZZ_MODELS", "12"))
SEED = int(os.environ.get("PYGRAPH_FUZZ_SEED", "0"))
CHANGES_PER_MODEL = 6


class Settings:
    """Reads its attributes in Python, as configurations do."""

    of_class = 1.5

    def __init__(self) -> None:
        self.own = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def new_classes() -> dict[str, Any]:
    """Of one model alone, because they will be changed."""
    outer = {"scale": 1.25}
    held = torch.full((3,), 0.5)

    class ItsSettings(Settings):
        pass

    class Leaf(nn.Module):
        table = torch.arange(3.0)
        number = np.float64(0.75)
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))
            self.bias = nn.Parameter(torch.rand(3))
            self.register_buffer("shift", torch.rand(3))
            self.own = 1.0
            self.array = np.float32(1.5)
            self.values = {"a": 1.0, "b": [2.0, torch.ones(3)]}
            self.settings = ItsSettings()

        @property
        def computed(self) -> Any:
            return self.own * 2

        def forward(self, x: torch.Tensor, gain: float = 1.0, rest: Any = 0.5) -> torch.Tensor:
            x = x * self.weight + self.bias + self.shift
            x = x * self.factor + self.computed * gain
            return x + rest if hasattr(self, "own") else x

    class ByClass(Leaf):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = super().forward(x)
            if type(self).forward is ByClass.forward:
                x = x + self.table
            return x * float(self.number)

    class WithValues(Leaf):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = super().forward(x) + self.values["a"]
            return x + self.values["b"][1] * self.values["b"][0] * self.array

    class WithSettings(Leaf):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = x * getattr(self.settings, "own", 3.0) + getattr(self.settings, "missing", 0.0)
            return super().forward(x) * self.settings.of_class * outer["scale"] + held

    class Block(nn.Module):
        def __init__(self, children: list[nn.Module]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(children)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if hasattr(self, "before"):
                x = self.before(x)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) if self.training is False else x

    return {
        "leaves": [Leaf, ByClass, WithValues, WithSettings],
        "block": Block,
        "settings": ItsSettings,
        "outer": outer,
    }


def new_model(rng: random.Random) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(rng.randrange(1000))
    classes = new_classes()

    def block(depth: int) -> nn.Module:
        children = [
            block(depth - 1) if depth and rng.random() < 0.3 else rng.choice(classes["leaves"])()
            for _ in range(rng.randint(1, 3))
        ]
        return nn.Sequential(*children) if rng.random() < 0.3 else classes["block"](children)

    model = classes["block"]([block(1) for _ in range(rng.randint(1, 2))])
    return model.eval(), classes


Change = Callable[[nn.Module, dict[str, Any], random.Random], Any]


def _leaf(model: nn.Module, rng: random.Random) -> Any:
    return rng.choice([m for m in model.modules() if hasattr(m, "settings")])


def _any(model: nn.Module, rng: random.Random) -> Any:
    return rng.choice(list(model.modules()))


def set_number(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).own = rng.choice([1.0, 3.0, 4])


def hide_class_attribute(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(["factor", "table", "number"])
    setattr(_leaf(model, rng), name, rng.choice([2.5, torch.ones(3), np.float64(3.0)][:1]))


def change_class(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    kind = rng.choice(classes["leaves"])
    name, value = rng.choice(
        [("factor", 3.0), ("table", torch.ones(3)), ("number", np.float64(1.25)), ("added", 1)]
    )
    setattr(kind, name, value)


def replace_method(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    amount = rng.choice([1.0, 2.0])
    rng.choice(classes["leaves"]).forward = lambda self, x, *_: x + self.weight * amount


def delete_method(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    kind = rng.choice(classes["leaves"][1:])
    if "forward" in vars(kind):
        del kind.forward


def delete_iteration(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    classes["block"].before = rng.choice([lambda self, x: x * 2, lambda self, x: x - 1])


def change_property(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    classes["leaves"][0].computed = property(lambda self: self.own * 3 + 1)


def change_defaults(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    function = classes["leaves"][0].forward
    if function.__defaults__:
        function.__defaults__ = rng.choice([(2.0, 0.5), (1.0, torch.ones(3)), (1.0, 0.25)])


def change_closure(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    classes["outer"]["scale"] = rng.choice([1.25, 1.5])


def change_settings(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    settings = _leaf(model, rng).settings
    if rng.random() < 0.3:
        settings.__dict__.pop("own", None)
    else:
        setattr(settings, rng.choice(["own", "missing", "of_class"]), rng.choice([4.0, 5.0]))


def change_class_of_settings(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    setattr(classes["settings"], rng.choice(["of_class", "missing"]), rng.choice([6.0, 7.0]))


def give_getattr(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    def found(self: Any, name: str) -> Any:
        if name == "missing":
            return 8.0
        raise AttributeError(name)

    classes["settings"].__getattr__ = found


def change_values(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    leaf = _leaf(model, rng)
    if rng.random() < 0.5:
        leaf.values = copy.deepcopy(leaf.values)
    leaf.values["a"] = rng.choice([1.0, 2.0])
    leaf.values["b"][1] = torch.rand(3)


def set_array(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).array = rng.choice([np.float32(2.5), np.float64(2.5), np.int64(2)])


def replace_parameter(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    setattr(_leaf(model, rng), rng.choice(["weight", "bias"]), nn.Parameter(torch.rand(3)))


def write_parameter(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).weight.data = torch.rand(3)


def replace_buffer(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    leaf = _leaf(model, rng)
    leaf.shift = rng.choice([torch.rand(3), torch.rand(3, dtype=torch.float64), leaf.shift])


def tie(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).weight = _leaf(model, rng).bias


def swap_modules(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    owner = _any(model, rng)
    names = list(owner._modules)
    if names:
        owner._modules[rng.choice(names)] = (
            rng.choice(classes["leaves"])() if "norm" not in names else nn.Identity()
        )


def replace_dict(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> Any:
    leaf = _leaf(model, rng)
    old = leaf.__dict__
    leaf.__dict__ = copy.deepcopy(old)
    with torch.no_grad():
        leaf.weight.add_(1)
    return old


def replace_class(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).__class__ = rng.choice(classes["leaves"])


def train_or_eval(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _any(model, rng).train(rng.random() < 0.5)


def add_module(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    owner = _any(model, rng)
    if type(owner) is classes["block"]:
        owner.__dict__.pop("before", None)
        owner.add_module("before", nn.Identity()) if not hasattr(owner, "before") else None


def replace_forward(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    amount = rng.choice([1.0, 2.0])
    _leaf(model, rng).forward = lambda x: x * amount


def hook(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    _leaf(model, rng).register_forward_hook(lambda module, args, result: result * 2)


def nothing(model: nn.Module, classes: dict[str, Any], rng: random.Random) -> None:
    pass


CHANGES: tuple[Change, ...] = (
    *(set_number, hide_class_attribute, change_class, replace_method, delete_method),
    *(delete_iteration, change_property, change_defaults, change_closure, change_settings),
    *(change_class_of_settings, give_getattr, change_values, set_array, replace_parameter),
    *(write_parameter, replace_buffer, tie, swap_modules, replace_dict, replace_class),
    *(train_or_eval, add_module, replace_forward, hook, nothing),
)


def history(seed: int, backend: Backend) -> list[tuple[str, Any, int]]:
    """Of each call: the change before it, the result or kind of error, and the count of graphs."""
    torch._dynamo.reset()
    rng = random.Random(seed)
    model, classes = new_model(rng)
    full = rng.random() < 0.5
    kept: list[Any] = []  # an old dictionary is not freed, nor its place used again
    found: list[tuple[str, Any, int]] = []
    tags = config.use_recursive_dict_tags_for_guards and not full
    with config.patch(use_recursive_dict_tags_for_guards=tags, skip_nnmodule_hook_guards=not full):
        compiled = torch.compile(model, backend=backend)
        x = torch.rand(2, 3)
        for step in range(CHANGES_PER_MODEL + 1):
            has_leaves = any(hasattr(module, "settings") for module in model.modules())
            change = rng.choice(CHANGES) if step and has_leaves else nothing
            kept.append(change(model, classes, rng))
            mode = rng.choice([torch.no_grad, torch.enable_grad, contextlib.nullcontext])
            for _ in range(2):
                with mode():
                    found.append((change.__name__, _outcome(compiled, x), backend.graphs))
    return found


def _outcome(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    try:
        return call(x).tolist()
    except Exception as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(SEED, SEED + MODELS))
def test_random_changes_are_noticed_where_dynamo_notices_them(seed: int) -> None:
    plain = history(seed, Backend())
    ours = history(seed, ReducingBackend(True, EXACT))
    assert ours == plain


def test_most_calls_give_a_result() -> None:
    outcomes = [outcome for seed in range(3) for _, outcome, _ in history(seed, Backend())]
    assert sum(isinstance(outcome, list) for outcome in outcomes) > len(outcomes) / 2
