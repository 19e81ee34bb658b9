"""Code and classes that are replaced in place."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, assert_follows


def test_code_of_a_function(partitions: Any) -> None:
    def helper(x: Any) -> Any:
        return x * 2

    def other(x: Any) -> Any:
        return x * 3

    def change() -> None:
        helper.__code__ = other.__code__

    assert_follows(partitions, lambda x: helper(x), change)


def test_defaults_of_a_function(partitions: Any) -> None:
    def helper(x: Any, k: float = 2.0) -> Any:
        return x * k

    def change() -> None:
        helper.__defaults__ = (3.0,)

    assert_follows(partitions, lambda x: helper(x), change)


def test_class_of_an_instance(partitions: Any) -> None:
    class A:
        def f(self) -> float:
            return 2.0

    class B:
        def f(self) -> float:
            return 3.0

    o = A()

    def change() -> None:
        o.__class__ = B

    assert_follows(partitions, lambda x: x * o.f(), change)


def test_staticmethod_and_metaclass_attribute(partitions: Any) -> None:
    class Meta(type):
        scale = 2.0

    class A(metaclass=Meta):
        pass

    assert_follows(partitions, lambda x: x * A.scale, lambda: setattr(Meta, "scale", 3.0))


def test_a_class_in_a_dunder_named_attribute(partitions: Any) -> None:
    class A:
        __scale__ = 2.0

    assert_follows(partitions, lambda x: x * A.__scale__, lambda: setattr(A, "__scale__", 3.0))


def test_a_classmethod(partitions: Any) -> None:
    class A:
        scale = 2.0

        @pygraph.graph
        @classmethod
        def f(cls, x: Any) -> Any:
            return x * cls.scale

    assert torch.equal(A.f(X), X * 2)
