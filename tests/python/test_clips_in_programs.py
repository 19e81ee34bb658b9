"""Graphs of ``clip_grad_norm_`` in plain training loops, on the CPU: which programs have them, clips
within other calls, errors, threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import pygraph
from pygraph import options
from pygraph.callables import graphed, trained, variant
from pygraph.callables.gradient_clips import _seen
from pygraph.compile.backend import backend

from .clip_loops import clips, train_alike
from .graphed_programs import assert_same, batches
from .graphed_world import Replaying
from .optimizer_loops import OPTIONS, Loop, adamw, assert_trains_alike, loops, sgd

_AUTO = {"pygraph.optimizers": "auto", "pygraph.patches": "exact"}


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def test_parameters_of_other_models_are_left_alone(partitions: Any) -> None:
    loop = Loop(sgd, graphs=False)
    for i, (x, y) in enumerate(batches(16)):
        if i == 8:
            trained.note_program(loop.model.parameters(), OPTIONS)
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1)
        assert i >= 8 or clips(partitions) == []
    assert sum(clips(partitions)) > 2  # another program has parameters that were looked at


def test_programs_that_do_not_ask_for_the_patch_have_none(partitions: Any) -> None:
    loop = Loop(sgd, graphs=False)
    trained.note_program(loop.model.parameters(), options.own({"patches": "optimizer_steps"}))
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
    assert clips(partitions) == [] and hasattr(loop.optimizer.step, "pygraph_route")


def test_a_clip_in_the_backward_runs_as_it_is(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        def clip(parameter: torch.Tensor) -> None:
            clip_grad_norm_(parameter, 0.05)

        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        for x, y in batches(10):
            loop.step(x, y)

    assert_trains_alike(train)
    assert clips(partitions) == []


def test_a_clip_inside_of_a_graphed_callable_is_part_of_it(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        loop = Loop(adamw, graphs)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop.backward(x, y)
            clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()
            return loss

        called = pygraph.graph(step) if graphs else step
        for x, y in batches(20):
            called(x, y)
        return loop.state()

    assert_same(train(True), train(False))
    assert len(partitions.all) == 1 and partitions.all[0].replays > 8


def test_a_clip_may_be_compiled(partitions: Any) -> None:
    graphs = []

    def counted(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def clip(loop: Loop, i: int) -> torch.Tensor:
        call = clip_grad_norm_ if i < 8 else compiled
        return call(list(loop.model.parameters()), 0.1)

    torch._dynamo.reset()
    compiled: Any = torch.compile(clip_grad_norm_, backend=counted, fullgraph=True)
    train_alike(clip)
    torch._dynamo.reset()
    assert graphs and clips(partitions) == [5]


@pytest.mark.parametrize("name", ["_get_total_norm", "_clip_grads_with_norm_"])
def test_parts_that_a_program_replaces_are_called(
    partitions: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module: Any = sys.modules["torch.nn.utils.clip_grad"]
    own, calls = getattr(module, name), []

    def counted(*args: Any) -> Any:
        calls.append(0)
        return own(*args)

    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i == 8:
            monkeypatch.setattr(module, name, counted)
        norm = clip_grad_norm_(loop.model.parameters(), 0.1)
        if i == 11:
            monkeypatch.setattr(module, name, own)
        return norm

    train_alike(clip)
    assert len(calls) == 2 * 4 and clips(partitions) == [11 - 4]


def test_nothing_holds_gradients_after_a_clip(partitions: Any) -> None:
    """A graph may write gradients where the last ones were, if nobody else holds these."""
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        gradient = loop.model[0].weight.grad
        assert gradient is not None
        count = sys.getrefcount(gradient)
        clip_grad_norm_(loop.model.parameters(), 0.1)
        assert sys.getrefcount(gradient) == count
    assert clips(partitions) == [5]


def test_parameters_and_graphs_are_freed(partitions: Any) -> None:
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1)
    assert clips(partitions) == [5]
    first = loop.model[0].weight
    known, gone = len(_seen), [weakref.ref(first), weakref.ref(first.grad)]
    partition = weakref.ref(partitions.all[0])
    del loop, first
    partitions.all.clear()
    gc.collect()
    assert [of() for of in (*gone, partition)] == [None] * 3 and len(_seen) < known


def test_an_error_of_pygraphs_own_does_not_reach_the_program(
    partitions: Any, by_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it(loop: Loop, i: int) -> None:
        if i == 8 and hasattr(loop.optimizer.step, "pygraph_route"):
            monkeypatch.setattr(graphed, "take_apart", lambda *_: 1 / 0)
            monkeypatch.setattr(graphed.Forms, "take_apart", lambda *_: 1 / 0)

    train_alike(lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1), also=break_it)
    assert clips(partitions) == [5]


def test_an_error_after_the_clip_does_not_clip_again(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch's function has been called, its effect is there."""
    loop = Loop(sgd)
    loop.backward(*batches(1)[0])
    parameters = list(loop.model.parameters())
    kept = [p.grad.clone() for p in parameters]
    own: Any = graphed.Graphed._uncaptured
    monkeypatch.setattr(graphed.Graphed, "_uncaptured", lambda *given: (own(*given), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        clip_grad_norm_(parameters, 0.1)
    clipped = [p.grad for p in parameters]
    expected = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
    for p, gradient in zip(expected, kept, strict=True):
        p.grad = gradient
    clip_grad_norm_(expected, 0.1)
    assert_same(clipped, [p.grad for p in expected])


class _Timeout(Exception):
    """As a signal's handler raises it."""


@pytest.mark.parametrize("place", ["_tell_autograd", "call"])
def test_an_exception_after_a_replay_is_the_programs(
    partitions: Any, by_python: None, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The replay's effect is there: nothing is done twice."""
    loop, expected = Loop(sgd), Loop(sgd, False)
    for x, y in batches(8):
        for of in (loop, expected):
            of.optimizer.zero_grad()
            of.backward(x, y)
            clip_grad_norm_(of.model.parameters(), 0.1)
            of.optimizer.step()
    assert clips(partitions) != [0]
    own: Any = getattr(variant.Variant, place)

    def late(*given: Any) -> Any:
        own(*given)
        raise _Timeout

    for of in (loop, expected):
        of.optimizer.zero_grad()
        of.backward(*batches(1)[0])
    clip_grad_norm_(expected.model.parameters(), 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(variant.Variant, place, late)
        with pytest.raises(_Timeout):
            clip_grad_norm_(loop.model.parameters(), 0.1)
    assert_same(*([p.grad for p in of.model.parameters()] for of in (loop, expected)))
    expected.optimizer.step()
    with monkeypatch.context() as patched:
        patched.setattr(variant.Variant, place, late)
        with pytest.raises(_Timeout):
            loop.optimizer.step()
    assert_same(*(list(of.model.parameters()) for of in (loop, expected)))


def test_models_are_clipped_in_several_threads(partitions: Any) -> None:
    def train(graphs: bool) -> list[list[torch.Tensor]]:
        made = [Loop(sgd, graphs) for _ in range(4)]
        failures = []

        def run(loop: Loop) -> None:
            try:
                for x, y in batches(30):
                    loop.optimizer.zero_grad()
                    F.cross_entropy(loop.model(x), y).backward()
                    clip_grad_norm_(loop.model.parameters(), 0.1)
                    loop.optimizer.step()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(loop,)) for loop in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        return [loop.state() for loop in made]

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert_same(ours, theirs)


_SWITCHING = """
import weakref
import torch
from pygraph import options, runtime
from pygraph.compile import backend

wrapper = torch.nn.utils.clip_grad_norm_
parameter = torch.nn.Parameter(torch.ones(2))
runtime.unavailable_reason = lambda: None
for asked, is_replaced in (("none", False), ("optimizer_steps", False), ("exact", True)):
    given = {"pygraph.patches": asked, "pygraph.optimizers": "auto"}
    backend._note_training([weakref.ref(parameter)], options.parse(None, given))
    called = wrapper.__closure__[0].cell_contents
    assert (called is not wrapper.__wrapped__) == is_replaced, asked
"""


def test_the_function_stays_pytorchs_unless_a_program_asks_for_the_patch() -> None:
    subprocess.run([sys.executable, "-c", _SWITCHING], check=True, timeout=300)


def test_a_program_that_the_backend_compiles_for_training_has_them(
    partitions: Any, patched: None
) -> None:
    torch._dynamo.reset()
    loop, other = Loop(sgd, graphs=False), Loop(sgd, graphs=False)
    compiled: Any = torch.compile(loop.model, backend=backend, options=_AUTO)
    loop.model = compiled  # in place, `compile()` does nothing for modules of torch.nn in PyTorch 2.11
    for x, y in batches(14):
        for each in (loop, other):
            each.optimizer.zero_grad()
            each.backward(x, y)
            clip_grad_norm_(each.model.parameters(), 0.1)
    torch._dynamo.reset()
    assert clips(partitions) == [11]
    (row,) = [row for row in pygraph.status().patches if row.name == "gradient_clips"]
    assert row.state == "active"
