"""Plain training loops: steps that run as they are, and whose optimizers have graphs."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph import options
from pygraph.callables import graphed, trained
from pygraph.compile.backend import backend

from .graphed_programs import assert_same, batches, replays
from .graphed_world import Replaying
from .optimizer_loops import OPTIONS, Loop, adamw, assert_trains_alike, loops, plainly, sgd

_optim: Any = torch.optim
_AUTO = {"pygraph.optimizers": "auto", "pygraph.patches": "exact"}


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def test_closures_run_as_they_are(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for x, y in batches(8):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                loop.optimizer.zero_grad()
                return loop.backward(x, y)

            assert loop.optimizer.step(closure) is not None

    assert_trains_alike(train)
    assert partitions.all == []


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_run_at_each_step(partitions: Any, when: str, of_all: bool) -> None:
    calls = []

    def train(loop: Loop) -> None:
        hook = lambda *_: calls.append(0)  # noqa: E731
        owner = sys.modules["torch.optim.optimizer"] if of_all else loop.optimizer
        register = getattr(owner, f"register_{'optimizer_' if of_all else ''}step_{when}_hook")
        plainly(loop)
        handle = register(hook)
        plainly(loop)
        handle.remove()

    assert_trains_alike(train)
    assert len(calls) == 28


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_is_an_optimizer_of_its_own(partitions: Any, copied: Any) -> None:
    loop = Loop(adamw)
    plainly(loop)
    assert replays(partitions) > 5
    other = copied(loop.optimizer)
    assert "step" not in other.__dict__
    before = [p.detach().clone() for p in loop.model.parameters()]
    for p, q in zip(
        loop.model.parameters(), (q for g in other.param_groups for q in g["params"]), strict=True
    ):
        q.grad = torch.ones_like(p)
    other.step()
    assert_same([p.detach() for p in loop.model.parameters()], before)


def test_an_exception_is_the_programs(partitions: Any) -> None:
    loop = Loop(adamw)
    plainly(loop)
    state = loop.optimizer.state[loop.model[0].weight]
    kept = state.pop("exp_avg")
    with pytest.raises(KeyError):
        loop.step(*batches(1)[0])
    assert all(p.grad is not None for p in loop.model.parameters())
    state["exp_avg"] = kept
    plainly(loop)


def test_sparse_gradients_run_as_they_are(partitions: Any) -> None:
    def train(graphs: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 3, sparse=True)
        if graphs:
            trained.note_program(model.parameters(), OPTIONS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(12):
            optimizer.zero_grad()
            model(torch.arange(8).reshape(4, 2) + i % 3).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(train(True), train(False)) and partitions.all == []


def test_an_optimizers_own_step_is_kept(partitions: Any) -> None:
    """A program that counts the steps by a function of its own in place of the method."""
    calls = []

    def train(loop: Loop) -> None:
        own = loop.optimizer.step

        def counted() -> None:
            calls.append(0)
            own()

        loop.optimizer.step = counted
        plainly(loop)

    assert_trains_alike(train)
    assert len(calls) == 28


def test_optimizers_of_other_models_are_left_alone(partitions: Any) -> None:
    loop = Loop(adamw, graphs=False)
    plainly(loop)
    assert partitions.all == [] and "step" not in loop.optimizer.__dict__


def test_a_step_inside_of_a_graphed_callable_is_part_of_it(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        loop = Loop(adamw, graphs)
        step = pygraph.graph(loop.step) if graphs else loop.step
        for x, y in batches(20):
            step(x, y)
        return loop.state()

    assert_same(train(True), train(False))
    assert replays(partitions) > 8 and len(partitions.all) == 1


def test_an_optimizer_and_its_graphs_are_freed(partitions: Any) -> None:
    loop = Loop(adamw)
    plainly(loop)
    assert replays(partitions) > 5
    gone = weakref.ref(loop.model[0].weight), weakref.ref(loop.optimizer)
    del loop
    partitions.all.clear()
    gc.collect()
    assert [of() for of in gone] == [None, None]


@pytest.mark.parametrize(
    "asked", [{}, {"optimizers": "off"}, {"optimizers": "auto", "select": "never"}]
)
def test_programs_do_without_unless_they_ask(partitions: Any, asked: Any) -> None:
    assert trained.is_wanted(options.own({"optimizers": "auto"}))
    assert not trained.is_wanted(options.own(asked))


def test_the_option_names_its_values() -> None:
    with pytest.raises(ValueError, match="auto, off"):
        options.own({"optimizers": "yes"})


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_gradients_may_lie_in_one_bucket(partitions: Any, optimizer: Any) -> None:
    """As small ones from a graph of a backward do, and those of DistributedDataParallel."""

    def train(loop: Loop) -> None:
        bucket = torch.zeros(sum(p.numel() for p in loop.model.parameters()))
        start = 0
        for p in loop.model.parameters():
            p.grad = bucket[start : start + p.numel()].view_as(p)
            start += p.numel()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # a fused step writes to gradients
        for x, y in batches(14):
            loop.optimizer.zero_grad(set_to_none=False)
            scaler.scale(F.cross_entropy(loop.model(x), y)).backward()
            scaler.step(loop.optimizer)
            scaler.update()

    assert_trains_alike(train, optimizer)
    assert replays(partitions) > 5


def test_a_step_in_the_backward_runs_as_it_is(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        optimizers = {p: adamw([p]) for p in loop.model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for x, y in batches(10):
            loop.backward(x, y)

    assert_trains_alike(train)
    assert partitions.all == []


def test_a_step_may_be_compiled(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        plainly(loop)
        compiled = torch.compile(lambda: loop.optimizer.step(), backend="eager")
        for x, y in batches(6):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            compiled()

    torch._dynamo.reset()
    assert_trains_alike(train, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch._dynamo.reset()


def test_a_program_that_the_backend_compiles_for_training_has_them(
    partitions: Any, patched: None
) -> None:
    torch._dynamo.reset()
    loop = Loop(adamw, graphs=False)
    other = Loop(adamw, graphs=False)
    compiled: Any = torch.compile(loop.model, backend=backend, options=_AUTO)
    loop.model = compiled  # in place, `compile()` does nothing for modules of torch.nn in PyTorch 2.11
    plainly(loop)
    plainly(other)
    torch._dynamo.reset()
    assert hasattr(loop.optimizer.step, "pygraph_route")
    assert not hasattr(other.optimizer.step, "pygraph_route")
    (row,) = [row for row in pygraph.status().patches if row.name == "optimizer_steps"]
    assert row.state == "active"
    assert replays(partitions) > 5


def test_a_program_for_inference_has_no_part_in_it(partitions: Any) -> None:
    torch._dynamo.reset()
    loop = Loop(adamw, graphs=False)
    forward = torch.compile(loop.model.forward, backend=backend, options=_AUTO)
    for x, _ in batches(3):
        with torch.no_grad():
            forward(x)
    torch._dynamo.reset()
    plainly(loop)
    assert not hasattr(loop.optimizer.step, "pygraph_route")


def test_an_error_of_pygraphs_own_does_not_reach_the_program(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(10)):
            if i == 6:
                monkeypatch.setattr(graphed, "take_apart", lambda *_: 1 / 0)
            loop.step(x, y)
        monkeypatch.undo()

    expected, loop = Loop(adamw, graphs=False), Loop(adamw)
    plain = batches(10)
    for x, y in plain:
        expected.step(x, y)
    train(loop)
    assert_same(loop.state(), expected.state())


@pytest.mark.parametrize("how", [lambda o: o.step(None), lambda o: o.step(closure=None)])
def test_no_closure_may_be_passed(partitions: Any, how: Any) -> None:
    def train(loop: Loop) -> None:
        for x, y in batches(14):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            how(loop.optimizer)

    assert_trains_alike(train)
    assert replays(partitions) > 5


def test_a_class_whose_step_is_replaced_midway(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def train(loop: Loop) -> None:
        plainly(loop)
        own = torch.optim.AdamW.step

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(0)
            return own(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", counted)
            plainly(loop)

    assert_trains_alike(train)
    assert len(calls) == 28


def test_a_step_that_is_wrapped_for_each_call(partitions: Any) -> None:
    """As accelerate does around a scaler's step, to see whether it was skipped."""

    def train(loop: Loop) -> None:
        original, calls = loop.optimizer.step, []

        def patched(*args: Any) -> Any:
            calls.append(0)
            return original(*args)

        for x, y in batches(14):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step = patched
            loop.optimizer.step()
            loop.optimizer.step = original
        assert len(calls) == 14

    assert_trains_alike(train)


def test_state_that_the_program_changes_is_used(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        weight = loop.model[0].weight
        for i, (x, y) in enumerate(batches(30)):
            if i == 12:
                loop.optimizer.state[weight]["exp_avg"].zero_()
            if i == 18:
                loop.optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
            if i == 24:
                weight.data = weight.data + 0.5
            loop.step(x, y)

    assert_trains_alike(train)
    assert replays(partitions) > 12


def test_gradients_that_are_missing_now_and_then(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(30)):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            if i % 3 == 0:
                loop.model[0].bias.grad = None
            loop.optimizer.step()
            assert (loop.model[0].bias.grad is None) == (i % 3 == 0)

    assert_trains_alike(train)
    assert len(partitions.all) == 2 and replays(partitions) > 12


def test_a_moving_momentum_is_followed(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 0.1, 30)
        for x, y in batches(24):
            loop.step(x, y)
            scheduler.step()

    assert_trains_alike(train)
    assert replays(partitions) > 10
    assert "AdamW.param_groups[0]['betas']" in partitions.all[-1].info.followed
