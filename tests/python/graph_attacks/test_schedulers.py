"""Attacks on schedulers, whose contents are not compared because observed calls show their use."""

from __future__ import annotations

import copy
import operator
import pickle
import sys
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LRScheduler

import pygraph

from .attacked import Plain, X, assert_follows, replays


def exponential() -> ExponentialLR:
    p = torch.nn.Parameter(torch.ones(4))
    return ExponentialLR(torch.optim.SGD([p], lr=0.5), 0.5)


READS: dict[str, Any] = {
    "attribute": lambda s: s.last_epoch,
    "vars": lambda s: vars(s)["last_epoch"],
    "attrgetter": operator.attrgetter("last_epoch"),
    "copy": lambda s: copy.copy(s).last_epoch,
    "pickle": lambda s: len(pickle.dumps(s.__reduce_ex__(2)[2]["last_epoch"])) + s.last_epoch,
    "state_dict": lambda s: s.state_dict()["last_epoch"],
    "proxy": lambda s: weakref.proxy(s).last_epoch,
    "super": lambda s: super(ExponentialLR, s).get_last_lr()[0],
}


@pytest.mark.parametrize("how", READS)
def test_reads(partitions: Any, how: str) -> None:
    s, read = exponential(), READS[how]
    assert_follows(partitions, lambda x: x * read(s), s.step)


class Special(ExponentialLR):
    factor = 1.0
    table: ClassVar = {"a": 1.0}

    def __float__(self) -> float:
        return Special.factor

    def __len__(self) -> int:
        return len(LENGTHS)

    def __call__(self) -> float:
        return LENGTHS[0]


LENGTHS = [1.0]


def special() -> Special:
    p = torch.nn.Parameter(torch.ones(4))
    return Special(torch.optim.SGD([p], lr=0.5), 0.5)


CLASS_READS: dict[str, Any] = {
    "float": float,
    "len": len,
    "call": lambda s: s(),
    "class_attribute": lambda s: type(s).factor,
    "class_container": lambda s: type(s).table["a"],
}


@pytest.mark.parametrize("how", CLASS_READS)
def test_what_its_class_has(partitions: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, read = special(), CLASS_READS[how]

    def change() -> None:
        monkeypatch.setattr(Special, "factor", 3.0)
        monkeypatch.setitem(Special.table, "a", 3.0)
        monkeypatch.setattr(sys.modules[__name__], "LENGTHS", [3.0, 3.0])

    assert_follows(partitions, lambda x: x * read(s), change)


def test_an_attribute_that_is_deleted(partitions: Any) -> None:
    s: Any = exponential()

    def step(x: torch.Tensor) -> torch.Tensor:
        del s.flag
        return x * 2

    graphed = pygraph.graph(step)
    for _ in range(8):
        s.flag = 1
        graphed(X)
        assert not hasattr(s, "flag"), replays(partitions)


def test_a_container_of_schedulers(partitions: Any) -> None:
    s = exponential()
    chained = ChainedScheduler([s], optimizer=s.optimizer)
    assert_follows(partitions, lambda x: x * chained._schedulers[0].last_epoch, lambda: chained.step())


def test_a_bound_method(partitions: Any) -> None:
    s = exponential()
    get = s.get_last_lr
    assert_follows(partitions, lambda x: x * get()[0], s.step)


def test_the_scheduler_as_the_callable(partitions: Any) -> None:
    class Called(ExponentialLR):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.last_epoch

    p = torch.nn.Parameter(torch.ones(4))
    s: Any = Called(torch.optim.SGD([p], lr=0.5), 0.5)
    assert_follows(partitions, s, s.step)


def test_as_an_argument(partitions: Any) -> None:
    s = exponential()
    assert_follows(partitions, lambda x, s: x * s.last_epoch, s.step, X, s)
    o = Plain(s=exponential())
    assert_follows(partitions, lambda x, o: x * o.s.last_epoch, o.s.step, X, o)


def test_a_graphed_callable_inside(partitions: Any) -> None:
    s = exponential()
    inner = pygraph.graph(lambda x: x * s.last_epoch)
    assert_follows(partitions, lambda x: inner(x) + 1, s.step)


def test_a_thread_of_the_call(partitions: Any) -> None:
    s = exponential()

    def step(x: torch.Tensor) -> torch.Tensor:
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(s.last_epoch))
        other.start()
        other.join()
        return x * found[0]

    assert_follows(partitions, step, s.step)


def test_an_exception_leaves_the_class(partitions: Any) -> None:
    s = exponential()
    before = dict(vars(LRScheduler))

    def step(x: torch.Tensor) -> torch.Tensor:
        if s is not None and x is X:
            raise KeyboardInterrupt
        return x

    graphed = pygraph.graph(step)
    with pytest.raises(KeyboardInterrupt):
        graphed(X)
    assert dict(vars(LRScheduler)) == before


@pytest.mark.parametrize("first", ["compiled_before", "compiled_in_the_call"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_that_reads_one(partitions: Any, first: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    s = exponential()
    inner = torch.compile(lambda x: x * s.last_epoch, backend="eager", fullgraph=fullgraph)
    if first == "compiled_before":
        inner(X)
    assert_follows(partitions, lambda x: inner(x) + 1, s.step)


def test_a_backward_that_reads_one(gradients: Any) -> None:
    s = exponential()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * s.get_last_lr()[0]

    p = torch.nn.Parameter(torch.ones(4))
    graphed = pygraph.graph(lambda x: Scaled.apply(x * p))
    for _ in range(12):
        p.grad = None
        graphed(X).sum().backward()
        assert torch.equal(p.grad, X * s.get_last_lr()[0])
        s.step()


@pytest.mark.parametrize("first", [True, False])
def test_compiled_code_that_writes_to_one(partitions: Any, first: bool) -> None:
    torch._dynamo.reset()
    s: Any = exponential()

    def write(x: torch.Tensor) -> torch.Tensor:
        s.flag = 5
        return x * 2

    inner = torch.compile(write, backend="eager", fullgraph=True)
    if first:
        inner(X)
    graphed = pygraph.graph(lambda x: inner(x) + 1)
    for _ in range(8):
        s.flag = 1
        graphed(X)
        assert s.flag == 5, replays(partitions)
    assert "flag" in next(row.reason for row in pygraph.stats() if row.reason)


def test_code_that_is_compiled_in_an_observed_call_is_compiled_whole(partitions: Any) -> None:
    torch._dynamo.reset()
    s = exponential()
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    inner = torch.compile(lambda x: x * s.base_lrs[0], backend=backend, fullgraph=True)
    graphed = pygraph.graph(lambda x: inner(x) + 1)
    for _ in range(8):
        assert torch.equal(graphed(X), X * 0.5 + 1)
    assert partitions.all == [] and len(compiled) <= 2
