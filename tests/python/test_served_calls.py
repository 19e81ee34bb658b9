"""Calls of graphed callables that the engine makes without Python: like one that a graph has served."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph
from pygraph import runtime

from .graphed_programs import Training, adamw, assert_same, batches, fused_sgd, replays

pytestmark = pytest.mark.skipif(
    os.environ.get("PYGRAPH_SHORT_CHECKS") == "0", reason="all calls are left to Python"
)
Pair = collections.namedtuple("Pair", "a b")


def served(graphed: Any) -> int:
    """Calls without Python since this was asked last."""
    return runtime.engine().take_served_count(graphed._served)


def begun(function: Callable[..., Any], *args: Any) -> Any:
    """Graphed, and called until the engine makes its calls."""
    graphed = pygraph.graph(function)
    for _ in range(8):
        graphed(*args)
    assert served(graphed)
    return graphed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: (x * 2, x + 1),
        lambda x: [x * 2, 3],
        lambda x: {"a": x * 2, "b": None},
        lambda x: None,
        lambda x: (),
        lambda x: Pair(x * 2, x + 1),
        lambda x: [x * 2] * 2,
        lambda x: (x, x + 1),
        lambda x: {"a": [x * 2, (x + 1, None, "text", 1.5)]},
    ],
)
def test_results_are_those_of_python(partitions: Any, function: Any) -> None:
    graphed = begun(function, torch.ones(2))
    for i in range(5):
        x = torch.full((2,), float(i))
        got, expected = graphed(x), function(x)
        assert type(got) is type(expected)
        leaves, spec = torch.utils._pytree.tree_flatten(got)
        others, other_spec = torch.utils._pytree.tree_flatten(expected)
        assert spec == other_spec
        for leaf, other in zip(leaves, others, strict=True):
            is_tensor = isinstance(other, torch.Tensor)
            assert torch.equal(leaf, other) if is_tensor else leaf == other
            assert (leaf is x) == (other is x) and (leaf is leaves[0]) == (other is others[0])
    assert served(graphed) == 5


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd])
@pytest.mark.parametrize("zero_first", [False, True])
def test_steps_whose_rates_move(partitions: Any, optimizer: Any, zero_first: bool) -> None:
    ours, theirs = Training(optimizer, zero_first), Training(optimizer, zero_first)
    graphed = pygraph.graph(ours.step)
    for i, (x, y) in enumerate(batches(20)):
        for training in (ours, theirs):
            training.optimizer.param_groups[0]["lr"] = (0.1, 0.0, -0.0, 0.05 / (i + 1))[i % 4]
        assert torch.equal(graphed(x, y), theirs.step(x, y))
        assert_same(ours.state(), theirs.state())
    assert optimizer is fused_sgd or served(graphed) >= 10


def test_autograd_is_told_what_is_written(partitions: Any) -> None:
    at = torch.zeros(2)
    graphed = begun(lambda x: (x.add_(1), at.add_(1))[0], torch.zeros(2))
    x, version = torch.zeros(2), at._version
    assert graphed(x) is x and served(graphed) == 1
    assert x._version > 0 and at._version > version and at.tolist() == [9.0, 9.0]


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def _transform() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    yield
    torch._C._functorch._vmap_decrement_nesting()


def _same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    "context",
    [
        *(_Dispatch, _Function, _hook, _transform, parametrize.cached, forward_ad.dual_level),
        *(torch.autograd.detect_anomaly, torch.no_grad, torch.inference_mode),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_surroundings_that_leave_calls_to_python(partitions: Any, context: Any) -> None:
    x = torch.ones(2)
    graphed = begun(lambda x: x * 2, x)
    with context():
        assert torch.equal(graphed(x), torch.full((2,), 2.0))
    assert served(graphed) == 0
    for _ in range(2):  # the first one makes the engine know the call again, if it has to
        graphed(x)
    assert served(graphed)


def test_what_is_new_is_left_to_python(partitions: Any) -> None:
    at = {"scale": 2.0}
    graphed = begun(lambda x, more=0: x * at["scale"] + more, torch.ones(2))
    at["scale"] = 3.0
    assert torch.equal(graphed(torch.ones(2)), torch.full((2,), 3.0)) and served(graphed) == 0
    assert torch.equal(graphed(torch.ones(2), 1), torch.full((2,), 4.0)) and served(graphed) == 0


def test_kinds_of_calls_that_alternate(partitions: Any) -> None:
    at = torch.nn.Dropout(0.0)
    graphed = pygraph.graph(lambda x, by=1.0: at(x) * by + at.training)
    for turn in range(20):
        at.train(turn % 2 == 0)
        for by in (1.0, 2.0, 3.0):
            x = torch.full((2,), float(turn))
            assert torch.equal(graphed(x, by), x * by + at.training)
    assert served(graphed) > 30


def test_calls_inside_of_another_run_as_they_are(partitions: Any) -> None:
    inner = begun(lambda x: x * 2, torch.ones(2))
    outer = begun(lambda x: inner(x) + 1, torch.ones(2))
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 3.0))
    assert served(outer) == 1 and served(inner) == 0


def test_each_thread_is_known_to_python_first(partitions: Any) -> None:
    graphed = begun(lambda x: x * 2, torch.ones(2))
    counts = []

    def work() -> None:
        for _ in range(3):
            graphed(torch.ones(2))
            counts.append(served(graphed))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [0, 1, 1]


def test_served_calls_end_a_row_of_calls_that_no_variant_fits(partitions: Any) -> None:
    graphed = begun(lambda x, by=0: x * by, torch.ones(2), -1)
    for by in range(30):
        graphed(torch.ones(2), by)
        for _ in range(2):
            graphed(torch.ones(2), -1)
    assert not graphed.has_given_up and served(graphed)
    for by in range(30, 40):
        graphed(torch.ones(2), by)
    assert graphed.has_given_up


def test_a_reset_forgets_them(partitions: Any) -> None:
    graphed = begun(lambda x: x * 2, torch.ones(2))
    before = replays(partitions)
    for reset in (graphed.reset, pygraph.reset):
        reset()
        graphed(torch.ones(2))
        assert replays(partitions) == before and served(graphed) == 0


def test_circles_are_collected(partitions: Any) -> None:
    class Model(torch.nn.Linear):
        run: Any

    def gone() -> list[weakref.ref[Any]]:
        model = Model(2, 2)
        model.run = begun(torch.no_grad()(lambda x: model.weight * x), torch.ones(2))
        return [weakref.ref(of) for of in (model, model.weight, model.run)]

    references = gone()
    partitions.all.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_nothing_is_kept_of_a_call(partitions: Any) -> None:
    training = Training(adamw)
    x, y = batches(1)[0]
    graphed = begun(training.step, x, y)
    objects = (x, y, None, True, False, graphed, graphed._served, *training.model.parameters())

    def counts() -> list[int]:
        for _ in range(100):
            graphed(x, y)
        gc.collect()
        return [sys.getrefcount(of) for of in objects]

    counts()
    before = counts()
    assert max(abs(a - b) for a, b in zip(counts(), before, strict=True)) < 50
    assert served(graphed) == 300


def test_they_can_be_switched_off() -> None:
    code = """
import pytest, torch, pygraph
from tests.python import graphed_world
from pygraph import runtime
with pytest.MonkeyPatch.context() as patch:
    world = graphed_world.install(patch)
    graphed = pygraph.graph(lambda x: x * 2)
    for _ in range(8):
        graphed(torch.ones(2))
    print(world.all[0].replays, runtime.engine().take_served_count(graphed._served))
"""
    counts = []
    for value in ("0", "1"):
        given = {**os.environ, "PYGRAPH_SHORT_CHECKS": value}
        run = subprocess.run([sys.executable, "-c", code], env=given, text=True, capture_output=True)
        counts.append([int(word) for word in run.stdout.split()])
    (replayed, none), (as_many, some) = counts
    assert replayed == as_many > some > none == 0
