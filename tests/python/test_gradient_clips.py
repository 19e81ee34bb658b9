"""Plain training loops, whose ``clip_grad_norm_`` has graphs, on the CPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
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

from .graphed_programs import assert_same, batches
from .graphed_world import Replaying
from .optimizer_loops import OPTIONS, Loop, adamw, assert_trains_alike, loops, sgd

_AUTO = {"pygraph.optimizers": "auto", "pygraph.patches": "exact"}
Clip = Callable[[Loop, int], Any]


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def clips(partitions: type[Replaying]) -> list[int]:
    """The replays of each partition of a clip."""
    return [p.replays for p in partitions.all if p.info.name == "clip_grad_norm_"]


def train_alike(clip: Clip, optimizer: Any = sgd, steps: int = 14, also: Any = None) -> list[Any]:
    """Trains with graphs and without. Returns the clips' results, which are equal. also: is called
    before each step."""
    results: list[list[Any]] = []

    def train(loop: Loop) -> None:
        results.append(norms := [])
        for i, (x, y) in enumerate(batches(steps)):
            if also is not None:
                also(loop, i)
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            norms.append(clip(loop, i))
            loop.optimizer.step()

    assert_trains_alike(train, optimizer)
    for theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == ours.dtype and theirs.shape == ours.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return results[1]


@pytest.mark.parametrize(
    "given",
    [
        (0.1,),
        (1,),
        (0.1, 1),
        (0.1, torch.inf),
        (0.1, "inf"),
        (torch.inf,),
        (0.1, 2.0, False, True),
        (0.1, 2.0, False, False),
    ],
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_clips_are_replayed(partitions: Any, given: Any, optimizer: Any) -> None:
    norms = train_alike(lambda loop, _: clip_grad_norm_(loop.model.parameters(), *given), optimizer)
    assert clips(partitions) == [11] and not any(norm.requires_grad for norm in norms)
    assert len({norm.data_ptr() for norm in norms}) == len(norms)  # of all of them, which are kept


@pytest.mark.parametrize(
    "clip",
    [
        lambda loop, _: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1),
        lambda loop, _: torch.nn.utils.clip_grad.clip_grad_norm_(list(loop.model.parameters()), 0.1),
        lambda loop, _: clip_grad_norm_(parameters=tuple(loop.model.parameters()), max_norm=0.1),
        lambda loop, _: clip_grad_norm_((p for p in loop.model.parameters()), 0.1),
        lambda loop, _: clip_grad_norm_(dict(loop.model.named_parameters()).values(), 0.1),
        lambda loop, _: clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 0.1),
        lambda loop, _: clip_grad_norm_(loop.model[0].weight, 0.1),
    ],
)
def test_it_is_reached_by_any_name_and_with_any_iterable(partitions: Any, clip: Clip) -> None:
    train_alike(clip)
    assert clips(partitions) == [11]


def test_each_parameter_may_be_clipped(partitions: Any) -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        return torch.stack([clip_grad_norm_(p, 0.05) for p in loop.model.parameters()])

    train_alike(clip)
    assert clips(partitions) == [11] * 4


def test_another_norm_has_a_graph_of_its_own(partitions: Any) -> None:
    train_alike(lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 if i < 10 else 0.2))
    assert len(clips(partitions)) == 2 and min(clips(partitions)) >= 0


def test_a_norm_that_differs_in_each_call_runs_as_it_is_and_says_why(partitions: Any) -> None:
    train_alike(lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 + i), steps=20)
    assert sum(clips(partitions)) == 0
    assert any(
        row.name == "clip_grad_norm_" and "differs from call to call" in row.reason
        for row in pygraph.stats()
    )


def test_infinite_gradients_are_clipped_as_they_are(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        gradient = loop.model[0].weight.grad
        assert gradient is not None
        if i >= 10:
            gradient[0, 0] = torch.inf if i == 10 else torch.nan
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    norms = []

    def train(loop: Loop) -> None:
        norms.clear()
        for i, (x, y) in enumerate(batches(12)):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            norms.append(clip(loop, i))

    expected = Loop(sgd, graphs=False)
    train(expected)
    theirs = [*norms, *(p.grad for p in expected.model.parameters())]
    loop = Loop(sgd)
    train(loop)
    for a, b in zip([*norms, *(p.grad for p in loop.model.parameters())], theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert clips(partitions) == [9]


def test_non_finite_gradients_raise(partitions: Any) -> None:
    """What asks for an error reads the norm on the host, and has no graph."""
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
    loop.model[0].weight.grad[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
    assert clips(partitions) == []


def test_an_empty_generator_warns_at_the_programs_line(partitions: Any) -> None:
    for parameters in ((p for p in ()), iter(())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert clip_grad_norm_(parameters, 0.1) == 0.0
        is_generator = not hasattr(parameters, "__length_hint__")
        assert [w.filename for w in caught] == [__file__] * is_generator
        assert all("empty generator" in str(w.message) for w in caught)


@pytest.mark.parametrize("parameters", [[], (), [torch.nn.Parameter(torch.ones(2))]])
def test_nothing_to_clip(partitions: Any, parameters: Any) -> None:
    trained.note_program(parameters, OPTIONS)
    assert all(clip_grad_norm_(parameters, 0.1) == 0.0 for _ in range(8))
    assert clips(partitions) == []


def test_an_iterable_is_read_once(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        read = []

        def parameters() -> Iterator[torch.Tensor]:
            read.append(i)
            yield from loop.model.parameters()

        norm = clip_grad_norm_(parameters(), 0.1)
        assert len(read) == 1
        return norm

    train_alike(clip)


def test_an_exception_of_an_iterable_is_the_programs(partitions: Any) -> None:
    def parameters() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        clip_grad_norm_(parameters(), 0.1)


def test_wrong_arguments_raise_as_they_do(partitions: Any) -> None:
    loop = Loop(sgd)
    for x, y in batches(8):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        clip_grad_norm_(loop.model.parameters(), 0.1)
    with pytest.raises(TypeError, match="max_norm"):
        clip_grad_norm_(loop.model.parameters())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="could not convert"):
        clip_grad_norm_(loop.model.parameters(), 0.1, "two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterable"):
        clip_grad_norm_(7, 0.1)  # type: ignore[arg-type]


def test_missing_gradients(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i % 3 == 0:
            loop.model[0].bias.grad = None
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    train_alike(clip, steps=30)
    assert len(clips(partitions)) == 2 and sum(clips(partitions)) > 20


def test_parameters_are_frozen_midway(partitions: Any) -> None:
    def freeze(loop: Loop, i: int) -> None:
        loop.model[0].requires_grad_(not 8 <= i < 18)

    train_alike(
        lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1), adamw, steps=30, also=freeze
    )
    assert len(clips(partitions)) == 2 and sum(clips(partitions)) > 20


@pytest.mark.parametrize("is_twice", [False, True])
def test_parameters_with_one_gradient(partitions: Any, is_twice: bool) -> None:
    """One parameter that is passed twice, or two whose gradient is one tensor: it is scaled twice."""

    def clip(loop: Loop, _: int) -> torch.Tensor:
        first = loop.model[0].weight
        other = first if is_twice else torch.nn.Parameter(torch.zeros(5, 4))
        other.grad = first.grad
        return clip_grad_norm_([first, other, loop.model[0].bias], 0.1)

    train_alike(clip)
    assert clips(partitions) == [11]


def test_gradients_may_lie_in_one_bucket(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        bucket = torch.zeros(sum(p.numel() for p in loop.model.parameters()))
        start = 0
        for p in loop.model.parameters():
            p.grad = bucket[start : start + p.numel()].view_as(p)
            start += p.numel()
        for x, y in batches(14):
            loop.optimizer.zero_grad(set_to_none=False)
            loop.backward(x, y)
            clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    assert_trains_alike(train)
    assert clips(partitions) == [11]


def test_sparse_gradients_run_as_they_are(partitions: Any) -> None:
    def train(graphs: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 3, sparse=True)
        if graphs:
            trained.note_program(model.parameters(), OPTIONS)
        for _ in range(8):
            model.zero_grad()
            model(torch.arange(8).reshape(4, 2)).square().sum().backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
        assert model.weight.grad is not None
        return torch.stack([norm, *model.weight.grad.to_dense().flatten()])

    assert torch.equal(train(True), train(False)) and clips(partitions) == []


class _Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize("when", [0, 7])
def test_gradients_of_another_kind_run_as_they_are(partitions: Any, when: int) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i >= when:
            weight = loop.model[0].weight
            weight.grad = weight.grad.as_subclass(_Tensor)
        return clip_grad_norm_(loop.model.parameters(), 0.1).as_subclass(torch.Tensor)

    train_alike(clip)
    assert sum(clips(partitions)) == max(0, when - 3)


def test_gradients_of_two_kinds_of_numbers(partitions: Any) -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        other = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        other.grad = loop.model[2].bias.grad.double()
        return clip_grad_norm_([*loop.model.parameters(), other], 0.1)

    train_alike(clip)
    assert clips(partitions) == [11]


@pytest.mark.parametrize("what", ["max_norm", "norm_type"])
def test_numbers_in_tensors_are_read_at_each_call(partitions: Any, what: str) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        given: Any = {"max_norm": 0.1, what: torch.tensor(1.0 + i)}
        return clip_grad_norm_(loop.model.parameters(), **given)

    train_alike(clip)
    assert clips(partitions) == []


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
    partitions: Any, monkeypatch: pytest.MonkeyPatch
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
    partitions: Any, monkeypatch: pytest.MonkeyPatch, place: str
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
