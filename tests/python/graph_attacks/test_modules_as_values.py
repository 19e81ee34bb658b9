"""Modules that a callable reaches as objects, so that any attribute may be read."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from .attacked import Plain, assert_follows


def _module(**attributes: Any) -> Any:
    """One of the program's own."""
    module = types.ModuleType("module")
    module.__file__ = __file__
    vars(module).update(attributes)
    return module


def test_a_function_is_replaced(partitions: Any) -> None:
    module = _module(f=lambda x: x * 2)
    holder = Plain(module=module)
    assert_follows(
        partitions, lambda x: holder.module.f(x), lambda: setattr(module, "f", lambda x: x * 3)
    )


@pytest.mark.parametrize("reach", ["attribute", "item", "name", "import"])
def test_what_a_function_reads(partitions: Any, monkeypatch: Any, reach: str) -> None:
    state = {"scale": 2.0}
    module = _module(f=lambda x: x * state["scale"])
    holder, modules = Plain(module=module), [module]
    monkeypatch.setitem(sys.modules, "module_of_a_test", module)

    def imported(x: torch.Tensor) -> Any:
        import module_of_a_test  # type: ignore[import-not-found]

        return module_of_a_test.f(x)

    calls: dict[str, Any] = {
        "attribute": lambda x: holder.module.f(x),
        "item": lambda x: modules[0].f(x),
        "name": lambda x: getattr(module, "f")(x),  # noqa: B009
        "import": imported,
    }
    assert_follows(partitions, calls[reach], lambda: state.update(scale=3.0))


def test_what_a_function_reads_that_is_found_among_the_globals(
    partitions: Any, monkeypatch: Any
) -> None:
    state = {"scale": 2.0}
    monkeypatch.setitem(globals(), "scaled", lambda x: x * state["scale"])
    assert_follows(partitions, lambda x: globals()["scaled"](x), lambda: state.update(scale=3.0))


def test_an_attribute_of_a_class(partitions: Any) -> None:
    class Settings:
        scale = 2.0

    holder = Plain(module=_module(Settings=Settings))
    assert_follows(
        partitions,
        lambda x: x * holder.module.Settings.scale,
        lambda: setattr(Settings, "scale", 3.0),
    )


def test_an_attribute_of_a_module_inside(partitions: Any) -> None:
    inside = _module(scale=2.0)
    holder = Plain(module=_module(inside=inside))
    assert_follows(
        partitions, lambda x: x * holder.module.inside.scale, lambda: setattr(inside, "scale", 3.0)
    )


def test_an_attribute_that_was_missing(partitions: Any) -> None:
    module = _module()
    holder = Plain(module=module)
    assert_follows(
        partitions,
        lambda x: x * getattr(holder.module, "scale", 2.0),
        lambda: setattr(module, "scale", 3.0),
    )


def test_an_attribute_that_is_computed(partitions: Any) -> None:
    state = {"scale": 2.0}
    holder = Plain(module=_module(__getattr__=lambda name: state[name]))
    assert_follows(partitions, lambda x: x * holder.module.scale, lambda: state.update(scale=3.0))


def test_a_function_of_a_library_is_replaced(partitions: Any, monkeypatch: Any) -> None:
    holder = Plain(module=functional)
    assert_follows(
        partitions,
        lambda x: holder.module.relu(x),
        lambda: monkeypatch.setattr(functional, "relu", lambda x: x * 3),
    )


def test_what_a_replaced_function_of_a_library_reads(partitions: Any, monkeypatch: Any) -> None:
    state = {"scale": 2.0}
    monkeypatch.setattr(functional, "relu", lambda x: x * state["scale"])
    holder = Plain(module=functional)
    assert_follows(partitions, lambda x: holder.module.relu(x), lambda: state.update(scale=3.0))
