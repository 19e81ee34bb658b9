"""Values that are changed in place."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import Plain, X, assert_follows, served


def test_array_changed_in_place(partitions: Any) -> None:
    import array

    a = array.array("d", [2.0])
    assert_follows(partitions, lambda x: x * a[0], lambda: a.__setitem__(0, 3.0))


def test_bytearray(partitions: Any) -> None:
    a = bytearray(b"\2")
    assert_follows(partitions, lambda x: x * a[0], lambda: a.__setitem__(0, 3))


def test_thread_local(partitions: Any) -> None:
    import threading

    o = threading.local()
    o.scale = 2.0
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


def test_mapping_proxy(partitions: Any) -> None:
    import types

    d = {"scale": 2.0}
    p = types.MappingProxyType(d)
    o = Plain(p=p)
    f = lambda x: x * o.p["scale"]  # noqa: E731
    assert_follows(partitions, f, lambda: d.update(scale=3.0))


def test_a_set_in_rehearsals(partitions: Any) -> None:
    """What a rehearsal adds to a set, a deque, or an object with slots is put back."""
    seen: set[int] = set()
    o = Plain(on=False)

    class S:
        __slots__ = ("n",)

    s = S()
    s.n = 0

    def f(x: Any) -> Any:
        # Clean for some calls, then not: as a warm-up that ends.
        if o.on:
            seen.add(len(seen))
            s.n += 1
        return x * 2

    graphed = pygraph.graph(f)
    graphed(X)
    o.on = True
    for i in range(8):
        graphed(X)
        assert len(seen) == s.n == i + 1, f"{len(seen)} {s.n} {i + 1}"


def test_a_float_with_an_equality_of_its_own(partitions: Any) -> None:
    class Odd(float):
        def __eq__(self, other: Any) -> bool:
            return True

        __hash__ = float.__hash__

    o = Plain(scale=Odd(2.0))
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", Odd(3.0)))


def test_an_enum_with_a_value_that_changes(partitions: Any) -> None:
    import enum

    class Mode(enum.Enum):
        TRAIN = 1

    Mode.TRAIN.scale = 2.0
    assert_follows(
        partitions, lambda x: x * Mode.TRAIN.scale, lambda: setattr(Mode.TRAIN, "scale", 3.0)
    )


def test_a_float_subclass_in_a_list(partitions: Any) -> None:
    import collections

    d = collections.deque([1])
    i = torch.arange(4)
    f = lambda x: x * d[0]  # noqa: E731
    got, expected = served(f, lambda: (d.pop(), d.append(1.0)), i)
    assert got.dtype == expected.dtype


def test_numbers_of_a_context_variable(partitions: Any) -> None:
    import contextvars

    v: contextvars.ContextVar[float] = contextvars.ContextVar("v", default=2.0)
    o = Plain(v=v)
    assert_follows(partitions, lambda x: x * o.v.get(), lambda: v.set(3.0))


def test_an_lru_cache(partitions: Any) -> None:
    import functools

    o = Plain(n=2.0)

    @functools.lru_cache
    def scale() -> float:
        return o.n

    def change() -> None:
        o.n = 3.0
        scale.cache_clear()

    assert_follows(partitions, lambda x: x * scale(), change)


def test_queue_that_is_fed(partitions: Any) -> None:
    import queue

    q: Any = queue.SimpleQueue()
    graphed = pygraph.graph(lambda x: (q.put(1), x * 2)[1])
    for i in range(8):
        graphed(X)
        assert q.qsize() == i + 1, f"call {i + 1}: {q.qsize()}"
