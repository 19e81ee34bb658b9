"""What a graphed callable keeps, and what it costs."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import Plain, X


def test_deepcopy(partitions: Any) -> None:
    import copy

    o = Plain(step=pygraph.graph(lambda x: x * 2))
    copy.deepcopy(o)


def test_graphed_method_is_collected(partitions: Any) -> None:
    import gc
    import weakref

    class Trainer:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 4)
            self.step = pygraph.graph(self._step)

        def _step(self, x: Any) -> Any:
            with torch.no_grad():
                return self.model(x)

    t = Trainer()
    for _ in range(8):
        t.step(X)
    alive = weakref.ref(t.model.weight)
    del t
    partitions.all.clear()
    gc.collect()
    assert alive() is None


def test_replaced_parameters_are_freed(partitions: Any) -> None:
    import gc
    import weakref

    m = torch.nn.Linear(4, 4)
    graphed = pygraph.graph(torch.no_grad()(lambda x: m(x)))
    old = []
    for _ in range(6):
        for _ in range(6):
            graphed(X)
        old.append(weakref.ref(m.weight))
        m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
    for _ in range(6):
        graphed(X)
    partitions.all.clear()
    gc.collect()
    assert sum(r() is not None for r in old) == 0


def test_resting_is_cheap(partitions: Any, monkeypatch: Any) -> None:
    from pygraph.callables.host import host_state

    walks = []
    real = host_state.reachable_from
    monkeypatch.setattr(host_state, "reachable_from", lambda *a: walks.append(1) or real(*a))
    o = Plain(n=0.0)
    graphed = pygraph.graph(lambda x: x * o.n)
    for i in range(30):
        o.n = float(i)
        graphed(X)
    walks.clear()
    for i in range(10):
        o.n = float(100 + i)
        graphed(X)
    assert not walks


def test_keys_of_refused_calls_do_not_pile_up(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x, lr: x * lr)
    for i in range(300):
        graphed(X, float(i))
    assert len(graphed._variants) < 100
