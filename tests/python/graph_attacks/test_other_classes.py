"""Objects that are given another class, and classes that are given another one of theirs."""

from __future__ import annotations

import collections
import functools
import runpy
import types
from pathlib import Path
from typing import Any

import pytest

from .attacked import assert_follows


def _classes_of(base: type) -> tuple[Any, Any]:
    """Without dictionaries or members of their own."""
    return (
        type("A", (base,), {"__slots__": (), "scale": 2.0}),
        type("B", (base,), {"__slots__": (), "scale": 3.0}),
    )


@pytest.mark.parametrize("base", [object, set, list, dict, tuple, collections.defaultdict])
def test_another_class_without_members(partitions: Any, base: type) -> None:
    one, other = _classes_of(base)
    value = one()
    assert_follows(partitions, lambda x: x * value.scale, lambda: setattr(value, "__class__", other))


def test_a_named_tuple_with_other_names(partitions: Any) -> None:
    one, other = collections.namedtuple("one", "a b"), collections.namedtuple("other", "b a")
    value: Any = one(2.0, 3.0)
    assert_follows(partitions, lambda x: x * value.a, lambda: setattr(value, "__class__", other))


def test_another_metaclass(partitions: Any) -> None:
    class One(type):
        scale = property(lambda self: 2.0)

    class Other(type):
        scale = property(lambda self: 3.0)

    class Value(metaclass=One):
        pass

    assert_follows(partitions, lambda x: x * Value.scale, lambda: setattr(Value, "__class__", Other))


def test_a_module_of_another_class(partitions: Any) -> None:
    class One(types.ModuleType):
        scale = property(lambda self: 2.0)

    class Other(types.ModuleType):
        scale = property(lambda self: 3.0)

    module: Any = types.ModuleType("module")
    module.__file__, module.__class__ = __file__, One
    assert_follows(partitions, lambda x: x * module.scale, lambda: setattr(module, "__class__", Other))


def test_a_property_of_the_class_of_a_module(partitions: Any) -> None:
    state = {"scale": 2.0}

    class One(types.ModuleType):
        scale = property(lambda self: state["scale"])

    module: Any = types.ModuleType("module")
    module.__file__, module.__class__ = __file__, One
    assert_follows(partitions, lambda x: x * module.scale, lambda: state.update(scale=3.0))


def test_an_attribute_that_a_module_computes(partitions: Any) -> None:
    state = {"scale": 2.0}
    module: Any = types.ModuleType("module")
    module.__file__, module.__getattr__ = __file__, lambda name: state[name]
    assert_follows(partitions, lambda x: x * module.scale, lambda: state.update(scale=3.0))


def test_attributes_that_something_else_than_a_function_computes(partitions: Any) -> None:
    state = types.SimpleNamespace(scale=2.0)
    module: Any = types.ModuleType("module")
    module.__file__, module.__getattr__ = __file__, functools.lru_cache(lambda name: state)
    assert_follows(partitions, lambda x: x * module.state.scale, lambda: setattr(state, "scale", 3.0))


class _Lazy(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state = {"scale": 2.0}

    def __getattr__(self, name: str) -> float:
        return self.state[name]

    def get(self) -> float:
        return self.state["scale"]


lazy_module: Any = _Lazy("lazy_module")


@pytest.mark.parametrize("read", [lambda: lazy_module.scale, lambda: lazy_module.get()])
def test_what_the_class_of_a_global_module_reads_of_it(partitions: Any, read: Any) -> None:
    lazy_module.state["scale"] = 2.0
    assert_follows(partitions, lambda x: x * read(), lambda: lazy_module.state.update(scale=3.0))


@pytest.mark.parametrize("name", ["__getattribute__", "__dir__"])
def test_a_method_of_a_module(partitions: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module: Any = types.ModuleType("module")
    module.scale = 2.0
    monkeypatch.setitem(globals(), "lazy_module", module)
    reads: dict[str, Any] = {
        "__getattribute__": lambda: lazy_module.__getattribute__("scale"),
        "__dir__": lambda: len(lazy_module.__dir__()),
    }

    def change() -> None:
        module.scale, module.other = 3.0, 1

    assert_follows(partitions, lambda x: x * reads[name](), change)


def test_a_class_in_a_file_that_was_run(partitions: Any, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("class Settings:\n    values = {'scale': 2.0}\n")
    settings = runpy.run_path(str(tmp_path / "settings.py"), run_name="settings")["Settings"]
    assert_follows(
        partitions,
        lambda x: x * settings.values["scale"],
        lambda: settings.values.update(scale=3.0),
    )


def test_another_function_that_computes_attributes_of_a_module(partitions: Any) -> None:
    module: Any = types.ModuleType("module")
    module.__file__, module.__getattr__ = __file__, lambda name: 2.0
    assert_follows(
        partitions, lambda x: x * module.scale, lambda: setattr(module, "__getattr__", lambda name: 3.0)
    )


def test_attributes_that_the_class_of_a_module_computes(partitions: Any) -> None:
    state = {"scale": 2.0}

    class One(types.ModuleType):
        def __getattr__(self, name: str) -> float:
            return state[name]

    module: Any = One("module")
    module.__file__ = __file__
    assert_follows(partitions, lambda x: x * module.scale, lambda: state.update(scale=3.0))


def test_an_attribute_that_a_module_computes_and_passes_on(partitions: Any) -> None:
    """The chain of names goes on after an attribute that is not in the module's dictionary."""
    state = types.SimpleNamespace(scale=2.0)
    module: Any = types.ModuleType("module")
    module.__file__, module.__getattr__ = __file__, lambda name: state
    assert_follows(partitions, lambda x: x * module.state.scale, lambda: setattr(state, "scale", 3.0))


def test_slots_of_a_class_that_does_not_name_them_any_more(partitions: Any) -> None:
    class Value:
        __slots__ = ("scale",)

    value: Any = Value()
    value.scale = 2.0
    del Value.__slots__
    assert_follows(partitions, lambda x: x * value.scale, lambda: setattr(value, "scale", 3.0))


def test_a_slot_that_is_emptied(partitions: Any) -> None:
    class Value:
        __slots__ = ("scale",)

        def __getattr__(self, name: str) -> float:
            return 3.0

    value: Any = Value()
    value.scale = 2.0
    assert_follows(partitions, lambda x: x * value.scale, lambda: delattr(value, "scale"))
