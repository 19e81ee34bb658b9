"""Objects that are given another class, and classes that are given another one of theirs."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest

from .attacked import assert_follows, open_to_this


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


@open_to_this
def test_a_module_of_another_class(partitions: Any) -> None:
    class One(types.ModuleType):
        scale = property(lambda self: 2.0)

    class Other(types.ModuleType):
        scale = property(lambda self: 3.0)

    module: Any = types.ModuleType("module")
    module.__file__, module.__class__ = __file__, One
    assert_follows(partitions, lambda x: x * module.scale, lambda: setattr(module, "__class__", Other))


@open_to_this
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
