"""Interrupts, exceptions, finalizers and threads in the middle of calls; leaks."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime

from .. import graphed_world
from ..graphed_world import partitions_of
from .attacked import Plain, X, adamw_step, replays


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Partitions whose replays run Python, so that they need no recording."""
    yield from partitions_of(lambda: graphed_world.install(monkeypatch))


def test_interrupts_in_every_run_of_the_function(running: Any) -> None:
    """In observed calls, in recordings, in compared calls: everything is put back."""
    p, optimizer, _ = adamw_step()

    class Hidden:
        """The test's own, at which PyGraph is not to look."""

        left = 0
        __module__ = "logging.hidden"

    at = Hidden()

    def place() -> None:
        at.left -= 1
        if at.left == 0:
            raise KeyboardInterrupt

    def f(x: Any) -> Any:
        place()
        (x * p).sum().backward()
        place()
        optimizer.step()
        place()
        optimizer.zero_grad()
        place()
        return x * 2

    interrupted = 0
    for left in range(1, 40):
        graphed = pygraph.graph(f)
        memory = p.data_ptr()
        at.left = left
        for _ in range(6):
            try:
                assert torch.equal(graphed(X), X * 2)
            except KeyboardInterrupt:
                interrupted += 1
            assert p.data_ptr() == memory and type(optimizer.param_groups[0]["lr"]) is float
    assert interrupted > 20


def test_exceptions_anywhere_match_plain(partitions: Any) -> None:
    """The program raises at random calls: parameters are those of the plain program."""

    def program(wrap: Any) -> Any:
        torch.manual_seed(0)
        p, opt, _ = adamw_step()

        def f(x: Any, place: Any) -> Any:
            if place == 1:
                raise ValueError
            (x * p).sum().backward()
            if place == 2:
                raise ValueError
            opt.step()
            if place == 3:
                raise ValueError
            opt.zero_grad()
            return x * 2

        g = wrap(f)
        r = random.Random(3)
        for i in range(80):
            place = r.choice([0, 0, 0, 0, 0, 0, 1, 2, 3])
            try:  # noqa: SIM105
                g(X + i, place)
            except ValueError:
                pass
        return p.detach().clone()

    assert torch.equal(program(lambda f: f), program(pygraph.graph))


def test_exceptions_by_flag(partitions: Any) -> None:
    def program(wrap: Any) -> Any:
        p, opt, _ = adamw_step()
        o = Plain(place=0)

        def f(x: Any) -> Any:
            if o.place == 1:
                raise ValueError
            (x * p).sum().backward()
            if o.place == 2:
                raise ValueError
            opt.step()
            if o.place == 3:
                raise ValueError
            opt.zero_grad()
            return x * 2

        g = wrap(f)
        r = random.Random(5)
        for i in range(120):
            o.place = r.choice([0] * 12 + [1, 2, 3])
            try:  # noqa: SIM105
                g(X + i)
            except ValueError:
                pass
        return p.detach().clone()

    assert torch.equal(program(lambda f: f), program(pygraph.graph))
    assert replays(partitions) > 3


def test_threads(partitions: Any) -> None:
    o = Plain(scale=2.0)
    g = pygraph.graph(lambda x: x * o.scale)
    for _ in range(8):
        g(X)
    errors = []

    def run(seed: Any) -> Any:
        r = random.Random(seed)
        for i in range(150):
            x = torch.full((4,), float(r.randrange(100)))
            try:
                if not torch.equal(g(x), x * 2):
                    errors.append((seed, i))
            except Exception as e:
                errors.append(repr(e))

    ts = [threading.Thread(target=run, args=(s,)) for s in range(6)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        [t.start() for t in ts]
        [t.join(60) for t in ts]
    finally:
        sys.setswitchinterval(old)
    assert not errors, errors[:3]


def test_finalizer_calls(partitions: Any) -> None:
    """Finalizers that run during calls, and call it."""
    g = pygraph.graph(lambda x, k: x * k)
    seen = []

    class D:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> Any:
            seen.append(bool(torch.equal(g(X, 3.0), X * 3)))

    old = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(40):
            D()
            assert torch.equal(g(X, 2.0), X * 2)
    finally:
        gc.set_threshold(*old)
    gc.collect()
    assert seen and all(seen)


def test_gc_changes_arguments(partitions: Any) -> None:
    g = pygraph.graph(lambda b: b["x"] * 2)
    old = gc.get_threshold()
    state = Plain(batch=None, n=0)

    def on_gc(phase: Any, info: Any) -> Any:
        b = state.batch
        if b is not None and phase == "start":
            state.n += 1
            b["more"].clear()
            b["more"].extend(range(state.n % 5))
            b["d"].clear()
            b["d"][state.n] = 1

    gc.callbacks.append(on_gc)
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(200):
            state.batch = b = {"x": X, "more": [1, 2, [3], (4,)], "d": {"a": [1], "b": {}}}
            try:
                g(b)
            except Exception:
                raise
            state.batch = None
    finally:
        gc.callbacks.remove(on_gc)
        gc.set_threshold(*old)


def test_key_of_dict_with_eq_that_mutates(partitions: Any) -> None:
    d = {}

    class Key:
        def __init__(self, v: Any) -> None:
            self.v = v
            self.armed = False

        def __hash__(self) -> Any:
            if self.armed:
                d.pop(self.v, None)
            return 7

        def __eq__(self, other: Any) -> Any:
            return self is other

    keys = [Key(i) for i in range(5)]
    for k in keys:
        d[k] = True
    g = pygraph.graph(lambda x: x * len(d))
    for _ in range(8):
        g(X)
    for k in keys:
        k.armed = True
    assert torch.equal(g(X), X * len(d))


def test_bool_keys_with_raising_eq(partitions: Any) -> None:
    class Key:
        on = False

        def __hash__(self) -> Any:
            return 7

        def __eq__(self, other: Any) -> Any:
            if Key.on:
                raise RuntimeError("eq")
            return self is other

    d = {Key(): True, Key(): False}
    f = lambda x: x * len(d) * random.random()  # refused, with switches  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(6):
        g(X)
    Key.on = True
    for _ in range(6):
        g(X)


def rss() -> Any:
    with open("/proc/self/statm") as s:
        return int(s.read().split()[1]) * 4096


def leak(call: Any, warm: Any = 3000, n: Any = 30000) -> Any:
    """By how many bytes and objects the process grows. What it takes once only is no leak."""
    for _ in range(warm):
        call()
    found = _growth(call, n)
    return found if found[0] < 1 << 20 else min(found, _growth(call, n))


def _growth(call: Any, n: int) -> tuple[int, int]:
    gc.collect()
    a, objects = rss(), len(gc.get_objects())
    for _ in range(n):
        call()
    gc.collect()
    return rss() - a, len(gc.get_objects()) - objects


def test_leak_served(partitions: Any) -> None:
    m = torch.nn.Linear(4, 4)
    o = Plain(scale=2.0)
    g = pygraph.graph(torch.no_grad()(lambda b, k: m(b["x"]) * o.scale * k))
    b = {"x": X, "l": [X, (X,)], "n": 1.0, "s": "a"}
    grown, objects = leak(lambda: g(b, 2.0))
    assert grown < 4 << 20 and objects < 100, (grown, objects)


def test_leak_forms(partitions: Any) -> None:
    from pygraph.callables.signature import Forms, take_apart

    forms, args = Forms(), ({"x": X, "l": [X, (X,)], "n": 1.0, "s": "a", "o": object()},)
    a = take_apart(args, {})
    counts = lambda: (sys.getrefcount(X), sys.getrefcount(args[0]["o"]), sys.getrefcount(args[0]))  # noqa: E731

    def call() -> Any:
        forms.add(a, args, {})
        forms.take_apart(args, {})
        forms.take_apart((1,), {})

    call()
    before = counts()
    grown, objects = leak(call, 10000, 100000)
    assert all(now - then < 10 for now, then in zip(counts(), before, strict=True))
    assert grown < 4 << 20 and objects < 50, (grown, objects)


def test_leak_watch(partitions: Any) -> None:
    from pygraph.callables.host.host_state import HostState

    m = torch.nn.Linear(4, 4)
    d = {"a": 1.5, "l": [1, 2]}
    f = lambda x: m(x) * d["a"]  # noqa: E731
    h = HostState({"f": f})

    def call() -> Any:
        d["a"] = float("2.5")
        h.holds()
        h.restore()
        assert h.holds()

    grown, objects = leak(call, 5000, 50000)
    assert grown < 4 << 20 and objects < 50, (grown, objects)


def test_leak_changing_host(partitions: Any) -> None:
    o = Plain(scale=2.0)
    g = pygraph.graph(lambda x: x * o.scale)

    def call() -> Any:
        o.scale = random.random()
        g(X)

    grown, objects = leak(call, 1000, 8000)
    assert grown < 4 << 20 and objects < 500, (grown, objects)


def test_leak_changing_arguments(partitions: Any) -> None:
    g = pygraph.graph(lambda x, k: x * k)

    def call() -> Any:
        g(X, random.random())

    grown, objects = leak(call, 1000, 8000)
    assert grown < 6 << 20 and objects < 3000, (grown, objects)


def test_leak_set_gradients(partitions: Any) -> None:
    e = runtime.engine()
    ps = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    gs = [torch.ones(4) for _ in range(3)]

    def call() -> Any:
        e.set_gradients(ps, gs, 0)
        e.gradient_pattern(ps)
        e.gradients_of(ps)
        e.clear_gradients(ps)

    call()
    before = [sys.getrefcount(x) for x in ps + gs]
    grown, objects = leak(call, 5000, 50000)
    assert [sys.getrefcount(x) for x in ps + gs] == before
    assert grown < 4 << 20 and objects < 50
