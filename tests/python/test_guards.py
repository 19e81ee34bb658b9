"""Guards that cost less see whatever Dynamo's see."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph.torch_patches import method_guard
from pygraph.torch_patches.selection import ALL, EXACT
from tests.python.compiled_programs import ReducingBackend
from tests.python.patched_programs import FITTING, needs


def _guards_of(function: Callable[..., Any]) -> Any:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    return entry.guard_manager


def trees_checked_at_once(function: Callable[..., Any]) -> int:
    return str(_guards_of(function)).count("tag_safe=(True, True)")


def _events(check: Callable[[], bool]) -> list[str]:
    """What a profiler sees of Python while guards are checked."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(event))
    matches = check()
    sys.setprofile(None)
    assert matches
    return seen[1:]  # without the call of `check`


def test_no_python_runs_while_guards_are_checked() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for reduces in (True, False):
        torch._dynamo.reset()
        x = torch.ones(2)
        torch.compile(function, backend=ReducingBackend(reduces))(x)
        manager = _guards_of(function).root
        assert ("call" in _events(lambda manager=manager, x=x: manager.check({"x": x}))) != reduces


@pytest.mark.parametrize("reduces", [True, False])
def test_hooks_on_saved_tensors_are_guarded(reduces: bool) -> None:
    torch._dynamo.reset()
    backend = ReducingBackend(reduces)
    compiled = torch.compile(lambda x: (x * x).sum(), backend=backend)
    inlineable = torch.fx.symbolic_trace(lambda x: x + 0)
    seen: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    def gradient() -> torch.Tensor:
        x = torch.arange(3.0, requires_grad=True)
        compiled(x).backward()
        assert x.grad is not None
        return x.grad

    two_x = 2 * torch.arange(3.0)
    for _ in range(2):
        assert torch.equal(gradient(), two_x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert torch.equal(gradient(), two_x)
        assert backend.graphs == 1
    assert seen
    with torch.autograd.graph.saved_tensors_hooks(inlineable, inlineable):
        assert torch.equal(gradient(), two_x)
        assert backend.graphs == 2
    assert torch.equal(gradient(), two_x)
    assert backend.graphs == 2


class Block(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.BatchNorm1d(3))
        self.offset: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "before"):
            x = self.before(x)
        return self.layers(x) * self.scale + self.offset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Shifted(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 3


class NoLayers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def _replace_by_another_class(model: Model) -> None:
    model.blocks[1] = Shifted()


def _replace_layers(model: Model) -> None:
    model.blocks[2].layers = NoLayers()


def _append(model: Model) -> None:
    model.blocks.append(Block())


def _remove(model: Model) -> None:
    del model.blocks[0]


def _swap(model: Model) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def _train(model: Model) -> None:
    model.train()


def _set_number(model: Model) -> None:
    model.blocks[1].offset = 5.0


def _set_tensor(model: Model) -> None:
    model.blocks[1].offset = torch.ones(3)


def _hide_attribute_of_class(model: Model) -> None:
    model.blocks[0].scale = 7.0


def _add_module(model: Model) -> None:
    model.blocks[0].before = nn.Linear(3, 3)


def _replace_parameter(model: Model) -> None:
    model.blocks[0].layers[0].weight = nn.Parameter(torch.eye(3))


def _write_parameter(model: Model) -> None:
    model.blocks[0].layers[0].weight.data.fill_(2)


def _replace_function(model: Model) -> None:
    model.blocks[2].forward = lambda x: x + 1


def _hook(model: Model) -> None:
    model.blocks[2].register_forward_hook(lambda module, args, result: result * 2)


CHANGES = (
    *(_replace_by_another_class, _replace_layers, _append, _remove, _swap, _train, _set_number),
    *(_set_tensor, _hide_attribute_of_class, _add_module, _replace_parameter, _write_parameter),
    *(_replace_function, _hook),
)


@pytest.mark.parametrize("level", [EXACT, ALL])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_model_are_seen_where_dynamo_sees_them(
    change: Callable[[Model], None], level: str
) -> None:
    x = torch.arange(12.0).reshape(4, 3)

    def changed() -> Model:
        model = Model().eval()
        torch.manual_seed(1)
        change(model)
        return model

    expected = changed()(x)
    graphs, results = [], []
    for reduces in (False, True):
        torch._dynamo.reset()
        model, backend = Model().eval(), ReducingBackend(reduces, level)
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), Model().eval()(x))
        torch.manual_seed(1)
        change(model)
        results.append([compiled(x) for _ in range(3)])
        graphs.append(backend.graphs)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert graphs[0] == graphs[1]
    if change is not _hook:  # which Dynamo does not look for, by default
        torch.testing.assert_close(results[1][0], expected)


@needs("method_guard")
def test_a_model_is_checked_at_once() -> None:
    counts = []
    for reduces in (True, False):
        torch._dynamo.reset()
        torch.compile(Model().eval(), backend=ReducingBackend(reduces, ALL))(torch.ones(4, 3))
        counts.append(trees_checked_at_once(Model.forward))
    assert counts == [1, 9]  # all blocks; without: each layer of each block


@pytest.mark.skipif("method_guard" in FITTING, reason="PyTorch checks trees at once")
def test_trees_are_not_checked_at_once_where_pytorch_does_not() -> None:
    """PyTorch has switched that off because of crashes; PyGraph leaves it so."""
    before = dynamo_config.use_recursive_dict_tags_for_guards
    for reduces in (True, False):
        torch._dynamo.reset()
        torch.compile(Model().eval(), backend=ReducingBackend(reduces, ALL))(torch.ones(4, 3))
        assert trees_checked_at_once(Model.forward) == 0
    assert before is dynamo_config.use_recursive_dict_tags_for_guards is False


@needs("method_guard")
def test_the_model_itself_is_kept_apart() -> None:
    """Programs set attributes of it, and Dynamo checks all of a tree once it has changed."""
    torch._dynamo.reset()
    torch.compile(Model().eval(), backend=ReducingBackend(True, ALL))(torch.ones(4, 3))
    (model,) = re.findall(r"source=L\['self'\], .*tag_safe=(.*)", str(_guards_of(Model.forward)))
    assert model == "(False, False)"


@needs("method_guard")
def test_a_model_that_changes_itself_is_checked_in_parts() -> None:
    torch._dynamo.reset()
    model = Counting().eval()
    compiled = torch.compile(model, backend=ReducingBackend(True, ALL))
    for _ in range(3):
        compiled(torch.ones(4, 3))
    assert model.calls == 3
    entries = _debug_get_cache_entry_list(Counting.forward.__code__)  # type: ignore[attr-defined]
    assert entries
    assert all(str(entry.guard_manager).count("tag_safe=(True, True)") == 9 for entry in entries)


class Late(nn.Module):
    """Has an attribute that depends on another."""

    @property
    def shift(self) -> float:
        return self.amount * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift if hasattr(self, "shift") else x


def test_a_property_may_come_late() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Late())
    compiled = torch.compile(model, backend=ReducingBackend(True, ALL))
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    model[0].amount = 4
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))


def test_only_methods_stand_for_their_class() -> None:
    layers, late = nn.Sequential(), Late()
    assert method_guard._is_method(layers, "__iter__")
    assert not method_guard._is_method(late, "shift")
    late.__dict__["forward"] = lambda x: x
    assert not method_guard._is_method(late, "forward")
    assert not method_guard._is_method(layers, "missing")
    assert not method_guard._is_method([], "__iter__")


def test_what_is_not_a_module_is_guarded_as_always() -> None:
    class Settings:
        def __iter__(self) -> Any:
            return iter(())

    settings = Settings()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if hasattr(settings, "__iter__") else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=ReducingBackend(True, ALL))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    del Settings.__iter__
    assert torch.equal(compiled(torch.ones(2)), torch.zeros(2))


@needs("method_guard")
def test_guards_that_miss_changes_are_not_the_default() -> None:
    torch._dynamo.reset()
    torch.compile(Model().eval(), backend=ReducingBackend(True))(torch.ones(4, 3))
    assert trees_checked_at_once(Model.forward) == 9
