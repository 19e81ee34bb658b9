"""What is inside of objects and containers."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import Plain, X, assert_follows


def test_attributes_of_a_dict_subclass(partitions: Any) -> None:
    class Config(dict):
        pass

    c = Config()
    c.scale = 2.0
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(c, "scale", 3.0))


def test_attributes_of_a_list_subclass(partitions: Any) -> None:
    class Config(list):
        pass

    c = Config()
    c.scale = 2.0
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(c, "scale", 3.0))


def test_objects_in_a_deque(partitions: Any) -> None:
    import collections

    o = Plain(scale=2.0)
    d = collections.deque([o])
    assert_follows(partitions, lambda x: x * d[0].scale, lambda: setattr(o, "scale", 3.0))


def test_slots_contents(partitions: Any) -> None:
    class S:
        __slots__ = ("config",)

    s = S()
    s.config = {"scale": 2.0}
    assert_follows(partitions, lambda x: x * s.config["scale"], lambda: s.config.update(scale=3.0))


def test_private_slots(partitions: Any) -> None:
    class S:
        __slots__ = ("__scale",)

        def put(self, v: float) -> None:
            self.__scale = v

        def get(self) -> float:
            return self.__scale

    s = S()
    s.put(2.0)
    assert_follows(partitions, lambda x: x * s.get(), lambda: s.put(3.0))


def test_function_attribute(partitions: Any) -> None:
    def helper() -> float:
        return helper.scale

    helper.scale = 2.0
    assert_follows(partitions, lambda x: x * helper(), lambda: setattr(helper, "scale", 3.0))


def test_attribute_of_the_graphed_itself(partitions: Any) -> None:
    def step(x: Any) -> Any:
        return x * step.scale

    step = pygraph.graph(step)
    step.scale = 2.0
    for _ in range(8):
        step(X)
    step.scale = 3.0
    assert torch.equal(step(X), X * 3.0)


def test_clean_for_two_calls(partitions: Any) -> None:
    """A counter that starts after the first calls, kept where the snapshot cannot see it."""

    class Log:
        __slots__ = ("entries",)

    log = Log()
    log.entries = []

    def f(x: Any) -> Any:
        log.entries.append(1)
        return x * 2

    graphed = pygraph.graph(f)
    for i in range(8):
        graphed(X)
        assert len(log.entries) == i + 1, f"call {i + 1}: {len(log.entries)}"


def test_an_append_to_a_list_in_a_tensor_attribute(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    p.log = []

    def f(x: Any) -> Any:
        p.log.append(1)
        return (x * p).detach()

    graphed = pygraph.graph(f)
    for i in range(10):
        graphed(X)
        assert len(p.log) == i + 1, f"call {i + 1}: {len(p.log)}"


def test_appended_through_a_local_list(partitions: Any) -> None:

    class Meter(dict):
        total = 0

        def update_(self, n: int) -> None:
            self.__dict__["count"] = self.__dict__.get("count", 0) + n

    m = Meter()
    graphed = pygraph.graph(lambda x: (m.update_(1), x * 2)[1])
    for i in range(8):
        graphed(X)
        assert m.count == i + 1, f"call {i + 1}: {m.count}"
