"""Plain training loops, whose ``optimizer.step()`` has graphs, on the CPU (frozen_world.py)."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph import options
from pygraph.callables import graphed, optimizer_steps
from pygraph.compile.backend import backend

from . import frozen_world
from .graphed_programs import assert_same, batches, reason, replays
from .graphed_world import Replaying, partitions_of

_optim: Any = torch.optim
_OPTIONS = options.Options()


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    optimizer_steps.install()
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


class Loop:
    """A model, its optimizer, and a plain loop around them."""

    def __init__(self, optimizer: Callable[..., Any], graphs: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        self.optimizer = optimizer(self.model.parameters())
        if graphs:
            optimizer_steps.note_program(self.model.parameters(), _OPTIONS)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


Train = Callable[[Loop], Any]


def plainly(loop: Loop) -> None:
    for x, y in batches(14):
        loop.step(x, y)


def assert_trains_alike(train: Train, optimizer: Callable[..., Any] = adamw) -> Loop:
    expected, loop = Loop(optimizer, graphs=False), Loop(optimizer)
    train(expected)
    train(loop)
    assert not hasattr(expected.optimizer.step, "pygraph_route")
    assert_same(loop.state(), expected.state())
    return loop


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("SGD", {"momentum": 0.9, "fused": True, "maximize": True}),
        ("Adam", {"fused": True, "weight_decay": 0.1}),
        ("AdamW", {"fused": True, "amsgrad": True}),
        ("Adagrad", {"fused": True}),
        *((name, {"capturable": True}) for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop")),
        *((name, {"capturable": True}) for name in ("Rprop", "ASGD", "Adadelta")),
    ],
)
def test_steps_are_replayed(partitions: Any, name: str, given: Any) -> None:
    loop = assert_trains_alike(plainly, lambda p: getattr(_optim, name)(p, lr=0.05, **given))
    assert replays(partitions) > 5, pygraph.stats()
    assert hasattr(loop.optimizer.step, "pygraph_route")


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor"]
)
def test_other_forms_run_as_they_are_and_say_why(partitions: Any, name: str) -> None:
    loop = assert_trains_alike(plainly, lambda p: getattr(_optim, name)(p, lr=0.05))
    assert partitions.all == []
    assert f"{name}.step.optimizer counts its steps on the CPU" in reason()
    del loop


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_is_followed(partitions: Any, early: bool) -> None:
    """Schedulers wrap an optimizer's step, before it has a graph or after."""

    def train(loop: Loop) -> None:
        make = lambda: torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # noqa: E731
        scheduler = make() if early else None
        for i, (x, y) in enumerate(batches(24)):
            if i == 5 and not early:
                scheduler = make()
            loop.step(x, y)
            if scheduler is not None:
                scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that misses the optimizer's steps
        assert_trains_alike(train)
    assert replays(partitions) > 10, pygraph.stats()


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_is_followed(partitions: Any, optimizer: Any, unscales: bool) -> None:
    def train(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        for i, (x, y) in enumerate(batches(20)):
            loop.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(loop.model(x * (torch.inf if i == 9 else 1)), y)).backward()
            if unscales:
                scaler.unscale_(loop.optimizer)
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            scaler.step(loop.optimizer)
            scaler.update()
            assert not hasattr(loop.optimizer, "found_inf")

    assert_trains_alike(train, optimizer)
    assert replays(partitions) > 8, pygraph.stats()


def test_gradients_are_accumulated(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(40)):
            loop.backward(x, y)
            if i % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad(set_to_none=i % 8 == 3)

    assert_trains_alike(train)
    assert replays(partitions) > 3, pygraph.stats()


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_are_clipped(partitions: Any, clip: str) -> None:
    def train(loop: Loop) -> None:
        for x, y in batches(14):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            getattr(torch.nn.utils, clip)(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    assert_trains_alike(train)
    assert replays(partitions) > 5


def test_a_group_is_added_midway(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        torch.manual_seed(1)
        head = torch.nn.Linear(4, 3)
        for i, (x, y) in enumerate(batches(28)):
            if i == 10:
                loop.optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(x) + head(x), y).backward()
            loop.optimizer.step()
        loop.model.append(head)

    assert_trains_alike(train)
    assert replays(partitions) > 12


@pytest.mark.parametrize("copies", [False, True])
def test_a_checkpoint_is_loaded_midway(partitions: Any, copies: bool) -> None:
    def train(loop: Loop) -> None:
        saved: Any = None
        for i, (x, y) in enumerate(batches(30)):
            if i == 5:
                saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
            if i == 15:
                model, optimizer = copy.deepcopy(saved) if copies else saved
                loop.model.load_state_dict(model)
                loop.optimizer.load_state_dict(optimizer)
            loop.step(x, y)

    assert_trains_alike(train)
    assert replays(partitions) > 12


def test_two_optimizers_have_graphs_of_their_own(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        first, second = loop.model[0], loop.model[2]
        optimizers = [adamw(first.parameters()), sgd(second.parameters())]
        for x, y in batches(16):
            loop.model.zero_grad()
            loop.backward(x, y)
            for optimizer in optimizers:
                optimizer.step()

    assert_trains_alike(train)
    assert len(partitions.all) == 2 and all(p.replays > 5 for p in partitions.all)


def test_parameters_are_frozen_midway(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(30)):
            loop.model[0].requires_grad_(not 8 <= i < 18)
            loop.step(x, y)

    assert_trains_alike(train)
    assert len(partitions.all) >= 2 and replays(partitions) > 12


def test_other_numbers_have_graphs_of_their_own(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(24)):
            loop.optimizer.param_groups[0]["weight_decay"] = 0.0 if i < 12 else 0.1
            loop.step(x, y)

    assert_trains_alike(train)
    assert len(partitions.all) == 2


def test_a_rate_that_moves_and_cannot_be_followed_runs_as_it_is(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        for x, y in batches(20):
            loop.step(x, y)
            scheduler.step()

    loop = assert_trains_alike(train, sgd)
    assert replays(partitions) == 0 and "make SGD with fused=True" in reason()
    del loop


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
            optimizer_steps.note_program(model.parameters(), _OPTIONS)
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


@pytest.mark.parametrize("asked", [{"optimizers": "off"}, {"select": "never"}])
def test_programs_may_do_without(partitions: Any, asked: Any) -> None:
    assert optimizer_steps.is_wanted(options.own({}))
    assert not optimizer_steps.is_wanted(options.own(asked))


def test_programs_do_without_until_it_has_run_on_a_gpu(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYGRAPH_UNTESTED_GRAPH")
    assert not optimizer_steps.is_wanted(options.own({}))


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
    compiled: Any = torch.compile(loop.model, backend=backend)
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
    forward = torch.compile(loop.model.forward, backend=backend)
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
