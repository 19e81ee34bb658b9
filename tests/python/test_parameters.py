"""Parameters that are loaded all at once are those that the model has at each call."""

from __future__ import annotations

import collections
import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import runtime
from pygraph.torch_patches import parameters
from pygraph.torch_patches.state import Attempt
from tests.python.compiled_programs import Backend, ReducingBackend, X

Y = X + 1  # another tensor: Dynamo passes the same one only once


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), scale))
        self.bias = nn.Parameter(torch.full((3,), scale / 8))
        self.register_buffer("offset", torch.full((3,), scale / 64))
        self.offset: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias + self.offset


class Model(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = Layer(scale)
        self.layers = nn.ModuleList([Layer(scale + i) for i in range(3)])
        self.tied = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) + y  # an argument among the parameters
        return x * self.tied


def _names_in_code(function: Any) -> list[str]:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    return [name for name in entry.code.co_names if name.startswith("__pygraph_parameters")]


def _compiled(model: nn.Module, reduces: bool = True) -> tuple[Any, Backend]:
    torch._dynamo.reset()
    backend = ReducingBackend(reduces)
    return torch.compile(model, backend=backend), backend


@pytest.mark.parametrize("reduces", [True, False])
def test_each_run_of_parameters_is_one_call(reduces: bool) -> None:
    model = Model()
    compiled, _ = _compiled(model, reduces)
    assert torch.equal(compiled(X, Y), model(X, Y))
    assert len(_names_in_code(Model.forward)) == 2 * reduces  # before `y` and after it


def test_a_few_parameters_are_loaded_as_ever() -> None:
    layer = Layer(2.0)
    compiled, _ = _compiled(layer)
    assert torch.equal(compiled(X), layer(X))
    assert not _names_in_code(Layer.forward)


@pytest.mark.parametrize("is_stored", [False, True])
def test_code_that_is_stored_is_left_alone(is_stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(parameters, "_runs", lambda arguments, _: changed.append(arguments) or [])
    output = SimpleNamespace(shape_env=SimpleNamespace(specializations=[]))
    with dynamo_config.patch(caching_precompile=is_stored):
        parameters.apply(torch.fx.symbolic_trace(lambda x: x), output, Attempt("parameter_loader"))
    assert bool(changed) != is_stored


def _replace(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.full((3,), 7.0))


def _replace_in_dictionary(model: Model) -> None:
    model.first._parameters["bias"] = nn.Parameter(torch.full((3,), 8.0))


def _replace_buffer(model: Model) -> None:
    model.layers[1].offset = torch.full((3,), 9.0)


def _load_by_assignment(model: Model) -> None:
    model.load_state_dict(Model(11.0).state_dict(), assign=True)


def _load(model: Model) -> None:
    model.load_state_dict(Model(12.0).state_dict())


def _swap_layer(model: Model) -> None:
    model.layers[2] = Layer(13.0)


def _swap_layers(model: Model) -> None:
    model.layers = nn.ModuleList([Layer(14.0 + i) for i in range(3)])


def _change_data(model: Model) -> None:
    model.tied.data = torch.full((3,), 15.0)


def _write(model: Model) -> None:
    with torch.no_grad():
        model.tied.add_(1)


def _tie(model: Model) -> None:
    model.first.bias = model.tied


def _make_anew(model: Model) -> None:
    del model.first.weight
    model.first.register_parameter("weight", nn.Parameter(torch.full((3,), 17.0)))


def _update_dictionary(model: Model) -> None:
    model.first.__dict__.update(copy.deepcopy(Layer(18.0).__dict__))


CHANGES = (
    _replace,
    _replace_in_dictionary,
    _replace_buffer,
    _load_by_assignment,
    _load,
    _swap_layer,
    _swap_layers,
    _change_data,
    _write,
    _tie,
    _make_anew,
    _update_dictionary,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_is_seen_at_the_next_call(change: Callable[[Model], None]) -> None:
    model = Model()
    compiled, _ = _compiled(model)
    before = model(X, Y)
    for _ in range(2):
        assert torch.equal(compiled(X, Y), before)
    change(model)
    assert not torch.equal(model(X, Y), before)
    for _ in range(2):
        assert torch.equal(compiled(X, Y), model(X, Y))


def test_what_is_gone_is_missed() -> None:
    model = Model()
    compiled, _ = _compiled(model)
    compiled(X, Y)
    del model.first.weight
    with pytest.raises(AttributeError, match="weight"):
        compiled(X, Y)


def test_two_models_take_turns() -> None:
    torch._dynamo.reset()
    models = [Model(1.0), Model(2.0)]
    backend = ReducingBackend(True)
    compiled = [torch.compile(model, backend=backend) for model in models]
    for _ in range(2):
        for model, call in zip(models, compiled, strict=True):
            assert torch.equal(call(X, Y), model(X, Y))
    assert _debug_get_cache_entry_list(Model.forward.__code__)  # type: ignore[attr-defined]


def test_gradients_go_to_the_parameters() -> None:
    model = Model()
    compiled, _ = _compiled(model)
    for _ in range(2):
        model.zero_grad()
        compiled(X, Y).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(X, Y).sum().backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            assert gradient is not None and parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)


def test_parameters_of_a_functional_call() -> None:
    torch._dynamo.reset()
    model, other = Model(1.0), Model(2.0)
    backend = ReducingBackend(True)
    compiled = torch.compile(lambda x: model(x, Y), backend=backend)  # found in a cell
    theirs = dict(other.named_parameters())

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> Any:
            return compiled(x)

    holder = Holder()
    named = {f"model.{name}": parameter for name, parameter in theirs.items()}
    for _ in range(2):
        assert torch.equal(compiled(X), model(X, Y))
        expected = torch.func.functional_call(model, theirs, (X, Y))
        assert torch.equal(torch.func.functional_call(holder, named, (X,)), expected)
    assert not torch.equal(expected, model(X, Y))


def test_nothing_is_kept_alive() -> None:
    model = Model()
    compiled, _ = _compiled(model)
    compiled(X, Y)
    code = Model.forward.__code__
    assert _debug_get_cache_entry_list(code)  # type: ignore[attr-defined]
    tensors = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    gc.collect()
    assert all(tensor() is None for tensor in tensors)


# The engine's function by itself: `model.a.weight`, `model.weight`, in this order.
def _loader() -> Callable[[Any], tuple[Any, ...]]:
    return runtime.engine().parameter_loader(
        [(0, "_modules"), (1, "_parameters"), (0, "_parameters")],
        [(0, "a"), (1, "weight"), (2, "weight")],
        [2, 3],
    )


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class Parent(Child):
    def __init__(self) -> None:
        super().__init__()
        self.a = Child()

    @property
    def expected(self) -> tuple[Any, Any]:
        return self.a.weight, self.weight


def _same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("keeps_dictionary", [False, True])
def test_a_model_in_a_freed_ones_place(keeps_dictionary: bool) -> None:
    load = _loader()
    kept = []
    places = set()
    for _ in range(20):
        model = Parent()
        places.add(id(model))
        if keeps_dictionary:
            kept.append(model.__dict__)
        for _ in range(2):
            assert _same(load(model), model.expected)
        del model
    assert len(places) < 20


def test_children_that_move() -> None:
    load = _loader()
    model, other = Parent(), Parent()
    for _ in range(2):
        assert _same(load(model), model.expected)
    model.a, other.a = other.a, model.a
    for each in (model, other, model):
        assert _same(load(each), each.expected)
    model.a.register_buffer("unrelated", torch.zeros(1))
    assert _same(load(model), model.expected)


def test_modules_that_look_up_attributes_in_their_own_way_are_asked() -> None:
    seen = []

    class Asked(Parent):
        def __getattribute__(self, name: str) -> Any:
            if name == "_parameters":
                seen.append(name)
            return super().__getattribute__(name)

    load = _loader()
    model = Asked()
    for _ in range(3):
        seen.clear()
        found = load(model)
        assert seen == ["_parameters"]
        assert _same(found, model.expected)


def test_a_property_comes_before_the_dictionary() -> None:
    weight = nn.Parameter(torch.ones(1))

    class Computed(Child):
        pass

    model = Parent()
    model.a = Computed()
    Computed._parameters = property(lambda _: {"weight": weight})  # type: ignore[assignment]
    load = _loader()
    for _ in range(2):
        assert _same(load(model), (weight, model.weight))


def test_dictionaries_of_other_kinds_are_asked() -> None:
    class Counted(collections.OrderedDict[str, Any]):
        count = 0

        def __getitem__(self, key: str) -> Any:
            self.count += 1
            return super().__getitem__(key)

    load = _loader()
    model = Parent()
    model._parameters = Counted(model._parameters)
    for calls in range(1, 4):
        assert _same(load(model), (model.a.weight, model._parameters.get("weight")))
        assert model._parameters.count == calls


def test_errors_are_those_of_looking_up() -> None:
    load = _loader()
    model = Parent()
    load(model)
    del model.a.weight
    with pytest.raises(KeyError, match="weight"):
        load(model)
    with pytest.raises(AttributeError, match="_modules"):
        load(object())  # type: ignore[arg-type]
    model.a.weight = nn.Parameter(torch.zeros(1))
    assert _same(load(model), model.expected)


@pytest.mark.parametrize(
    ("containers", "items", "results"),
    [
        ([(1, "_modules")], [(0, "a")], [1]),
        ([(0, "_modules")], [(1, "a")], [1]),
        ([(0, "_modules")], [(0, "a")], [2]),
    ],
)
def test_paths_out_of_order_are_refused(containers: Any, items: Any, results: Any) -> None:
    with pytest.raises(ValueError, match="found later"):
        runtime.engine().parameter_loader(containers, items, results)
