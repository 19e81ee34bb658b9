"""What instances of Python's own classes hold beside their items and attributes."""

from __future__ import annotations

import collections
from typing import Any

from .attacked import Plain, assert_follows


def test_factory_of_a_defaultdict(partitions: Any) -> None:
    d: Any = collections.defaultdict(lambda: 2.0)

    def change() -> None:
        d.default_factory = lambda: 3.0

    assert_follows(partitions, lambda x: x * d.default_factory(), change)


def test_arguments_of_an_exception(partitions: Any) -> None:
    error = ValueError(2.0)

    def change() -> None:
        error.args = (3.0,)

    assert_follows(partitions, lambda x: x * error.args[0], change)


def test_cause_of_an_exception(partitions: Any) -> None:
    error = ValueError()
    f = lambda x: x * (3.0 if error.__cause__ else 2.0)  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(error, "__cause__", KeyError()))


def test_member_of_an_exception(partitions: Any) -> None:
    error = StopIteration()
    error.value = 2.0

    def change() -> None:
        error.value = 3.0

    assert_follows(partitions, lambda x: x * error.value, change)


def test_what_a_factory_reads(partitions: Any) -> None:
    scale = Plain(by=2.0)
    d: Any = collections.defaultdict(lambda: scale.by)
    assert_follows(partitions, lambda x: x * d.default_factory(), lambda: vars(scale).update(by=3.0))


def test_no_factory_any_more(partitions: Any) -> None:
    d: Any = collections.defaultdict(dict)
    f = lambda x: x * (2.0 if d.default_factory else 3.0)  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(d, "default_factory", None))


def test_class_of_an_object_with_slots(partitions: Any) -> None:
    class A:
        __slots__ = ("n",)
        scale = 2.0

    class B:
        __slots__ = ("n",)
        scale = 3.0

    a: Any = A()
    assert_follows(partitions, lambda x: x * a.scale, lambda: setattr(a, "__class__", B))


def test_a_slot_that_is_emptied(partitions: Any) -> None:
    class A:
        __slots__ = ("n",)

    a: Any = A()
    a.n = None
    f = lambda x: x * (2.0 if hasattr(a, "n") else 3.0)  # noqa: E731
    assert_follows(partitions, f, lambda: delattr(a, "n"))
