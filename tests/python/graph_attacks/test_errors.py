"""Errors of the program's objects, and calls that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import Plain, X, replays


def test_getattr_that_answers_all(partitions: Any) -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return None

    o = Anything()
    graphed = pygraph.graph(lambda x: x * 2 if o.y is None else x)
    for _ in range(4):
        graphed(X)


def test_getattr_that_raises(partitions: Any) -> None:
    class Closed:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    o = Plain(connection=Closed(), scale=2.0)
    graphed = pygraph.graph(lambda x: x * o.scale)
    for _ in range(4):
        graphed(X)


def test_key_whose_repr_raises(partitions: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    d = {Key(): 1.0}
    graphed = pygraph.graph(lambda x: x * sum(d.values()))
    for _ in range(4):
        graphed(X)


def test_refusals_of_one_mode_do_not_count_for_another(partitions: Any) -> None:
    import random

    o = Plain(training=True)
    graphed = pygraph.graph(lambda x: x * random.random() if o.training else x * 2)
    for _ in range(5):
        graphed(X)
    o.training = False
    for _ in range(8):
        graphed(X)
    assert replays(partitions) > 0


def test_failing_calls_are_no_strangers(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x: x.view(4))
    for _ in range(10):
        with pytest.raises(RuntimeError):
            graphed(torch.ones(3))
    for _ in range(8):
        graphed(X)
    assert replays(partitions) > 0


def test_interrupted_rehearsal(partitions: Any) -> None:
    m = torch.nn.Linear(4, 4)
    o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    n = []
    stop = Plain(at=-1)

    def f(x: Any) -> Any:
        n.append(0) if False else None
        m(x).sum().backward()
        if stop.at == 1:
            raise KeyboardInterrupt
        o.step()
        o.zero_grad()

    graphed = pygraph.graph(f)
    for _ in range(5):
        graphed(X)
    pointers = [p.data_ptr() for p in m.parameters()]
    stop.at = 1
    with pytest.raises(KeyboardInterrupt):
        graphed(X)
    stop.at = -1
    assert pointers == [p.data_ptr() for p in m.parameters()]
    assert type(o.param_groups[0]["lr"]) is float


def test_a_step_with_a_warm_up(partitions: Any) -> None:
    o = Plain(n=0)

    def f(x: Any) -> Any:
        if o.n < 6:
            o.n += 1
        return x * 2

    graphed = pygraph.graph(f)
    for _ in range(20):
        graphed(X)
    assert replays(partitions) > 3


def test_an_error_of_a_probe(partitions: Any) -> None:
    class Closing:
        def __init__(self) -> None:
            self.left = 6

        def __length_hint__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("closed")
            return 3

    o = Plain(stream=Closing())
    graphed = pygraph.graph(lambda x: x * (1 if o.stream else 2))
    for _ in range(12):
        graphed(X)


def test_a_property_of_the_program_is_not_asked(partitions: Any) -> None:
    asked = []

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    o = Plain(lazy=Lazy())
    graphed = pygraph.graph(lambda x: x * (1 if o.lazy else 2))
    for _ in range(6):
        graphed(X)
    assert not asked
