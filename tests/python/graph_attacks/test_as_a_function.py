"""What programs do with functions: copy, pickle, read attributes, call them from themselves."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import torch

import pygraph

from .attacked import Plain, X, open_to_this


def test_pickle_module_level(partitions: Any) -> None:
    g = pickle.loads(pickle.dumps(module_step))
    assert torch.equal(g(X), X * 2)


@pygraph.graph
def module_step(x: Any) -> Any:
    return x * 2


def test_deepcopy_is_self(partitions: Any) -> None:
    g = copy.deepcopy(module_step)
    assert torch.equal(g(X), X * 2)


def test_deepcopy_with_attribute(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x * 2

    g = pygraph.graph(f)
    g.scale = 2.0
    assert copy.deepcopy(g).scale == 2.0


class Trainer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(4, 4)
        self.run = pygraph.graph(self.step)

    @torch.no_grad()
    def step(self, x: Any) -> Any:
        return self.l(x)


def test_deepcopy_bound(partitions: Any) -> None:
    t = Trainer()
    for _ in range(8):
        t.run(X)
    u = copy.deepcopy(t)
    with torch.no_grad():
        u.l.weight.add_(1)
    for _ in range(8):
        assert torch.equal(u.run(X), u.step(X))
    assert torch.equal(t.run(X), t.step(X))
    v = pickle.loads(pickle.dumps(t))
    assert torch.equal(v.run(X), t.step(X))


class WithMethod:
    s = 2.0

    @pygraph.graph
    def step(self, x: Any) -> Any:
        return x * self.s


def test_pickle_bound_method(partitions: Any) -> None:
    m = pickle.loads(pickle.dumps(WithMethod().step))
    assert torch.equal(m(X), X * 2)


def test_wraps(partitions: Any) -> None:
    def f(x: int, k: Any = 2) -> Any:
        "doc"
        return x

    f.tag = 1
    g = pygraph.graph(f)
    assert g.__name__ == "f" and g.__doc__ == "doc" and inspect.signature(g) == inspect.signature(f)
    assert g.__annotations__ == f.__annotations__
    assert g.tag == 1


def test_attr_of_function_before_graph(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x * f.scale

    f.scale = 2.0
    f = pygraph.graph(f)
    assert torch.equal(f(X), X * 2)


def test_generator_function(partitions: Any) -> None:
    def f(x: Any) -> Any:
        yield x * 2
        yield x * 3

    g = pygraph.graph(f)
    for _ in range(8):
        assert [torch.equal(a, X * b) for a, b in zip(g(X), (2, 3), strict=False)] == [True] * 2


def test_coroutine_function(partitions: Any) -> None:

    async def f(x: Any) -> Any:
        await asyncio.sleep(0)
        return x * 2

    g = pygraph.graph(f)
    for _ in range(8):
        assert torch.equal(asyncio.run(g(X)), X * 2)


def test_iterator_argument(partitions: Any) -> None:
    f = lambda it: next(it) * 2  # noqa: E731
    g = pygraph.graph(f)
    for i in range(12):
        assert torch.equal(g(iter([X + i])), (X + i) * 2)
    it = (X + j for j in range(20))
    for i in range(12):
        assert torch.equal(g(it), (X + i) * 2)


def test_reentrant(partitions: Any) -> None:

    def f(x: Any, n: Any) -> Any:
        return x * 2 if n == 0 else g(x, n - 1) + 1

    g = pygraph.graph(f)
    for _ in range(10):
        assert torch.equal(g(X, 3), X * 2 + 3)
        assert torch.equal(g(X, 0), X * 2)


def test_mutual(partitions: Any) -> None:
    a = pygraph.graph(lambda x: b(x) + 1)
    b = pygraph.graph(lambda x: x * 2)
    for _ in range(10):
        assert torch.equal(a(X), X * 2 + 1) and torch.equal(b(X), X * 2)


def test_reset_inside(partitions: Any) -> None:
    o = Plain(on=False)

    def f(x: Any) -> Any:
        if o.on:
            g.reset()
        return x * 2

    g = pygraph.graph(f)
    for i in range(20):
        o.on = i % 4 == 3
        assert torch.equal(g(X), X * 2)


def test_pygraph_reset_inside(partitions: Any) -> None:
    def f(x: Any) -> Any:
        pygraph.reset()
        return x * 2

    g = pygraph.graph(f)
    for _ in range(10):
        assert torch.equal(g(X), X * 2)


def test_stats_inside(partitions: Any) -> None:
    def f(x: Any) -> Any:
        pygraph.stats()
        return x * 2

    g = pygraph.graph(f)
    for _ in range(10):
        assert torch.equal(g(X), X * 2)


def test_gc_collect_inside(partitions: Any) -> None:
    def f(x: Any) -> Any:
        gc.collect()
        return x * 2

    g = pygraph.graph(f)
    for _ in range(10):
        assert torch.equal(g(X), X * 2)


def test_builtin_callable(partitions: Any) -> None:
    g = pygraph.graph(torch.relu)
    for _ in range(8):
        assert torch.equal(g(X), X)
    g = pygraph.graph(torch.nn.functional.relu)
    for _ in range(8):
        assert torch.equal(g(X), X)
    g = pygraph.graph(torch.nn.ReLU())
    for _ in range(8):
        assert torch.equal(g(X), X)


def test_class_callable(partitions: Any) -> None:
    class C:
        def __init__(self, x: Any) -> None:
            self.x = x * 2

    g = pygraph.graph(C)
    for _ in range(8):
        assert torch.equal(g(X).x, X * 2)


def test_result_is_state(partitions: Any) -> None:
    s = X.clone()
    g = pygraph.graph(lambda x: (s.add_(x), s)[1])
    for i in range(10):
        assert g(X) is s, i


def test_result_constant_list(partitions: Any) -> None:
    l = [1, 2]  # noqa: E741
    g = pygraph.graph(lambda x: (x * 2, l))
    for i in range(10):
        assert g(X)[1] is l, i


def test_fresh_containers(partitions: Any) -> None:
    g = pygraph.graph(lambda x: {"a": [x * 2], "b": ()})
    outs = [g(X) for _ in range(10)]
    assert len({id(o) for o in outs}) == 10 and len({id(o["a"]) for o in outs}) == 10


@open_to_this
def test_weakly_held_objects_die(partitions: Any) -> None:
    """What the program holds weakly is not kept by the graph."""
    p = Plain(scale=2.0)
    r = weakref.ref(p)
    o = Plain(r=r)
    f = lambda x: x * (2 if o.r() is not None else 3)  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    del p
    gc.collect()
    assert r() is None
    assert torch.equal(g(X), X * 3)
