"""``pygraph.graph`` without a GPU (graphed_world.py): against the same code, called as it is."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph import runtime
from pygraph.callables import graphed

from . import graphed_world
from .graphed_world import Replaying


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    known = set(runtime.partitions)
    yield graphed_world.install(monkeypatch)
    for partition in set(runtime.partitions) - known:
        runtime.partitions.discard(partition)


def replays(partitions: type[Replaying]) -> int:
    return sum(partition.replays for partition in partitions.all)


def reason() -> str:
    return next((row.reason for row in pygraph.stats() if row.reason), "")


class Training:
    def __init__(self, optimizer: Callable[..., Any], zero_first: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        )
        self.optimizer = optimizer(self.model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if zero_first:
                self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if not zero_first:
                self.optimizer.zero_grad()
            return loss

        self.step = step

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), pygraph.stats()


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_step_trains_alike(partitions: Any, optimizer: Any, zero_first: bool) -> None:
    uncaptured, at = Training(optimizer, zero_first), Training(optimizer, zero_first)
    step = pygraph.graph(at.step)
    for x, y in batches(10):
        expected, loss = uncaptured.step(x, y), step(x, y)
        assert torch.equal(loss, expected) and not loss.requires_grad
        assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 5


def fused_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd])
def test_a_moving_rate_of_a_fused_optimizer_is_followed(partitions: Any, optimizer: Any) -> None:
    uncaptured, at = Training(optimizer), Training(optimizer)
    step = pygraph.graph(at.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(of.optimizer, 0.9) for of in (uncaptured, at)]
    for x, y in batches(10):
        uncaptured.step(x, y)
        step(x, y)
        for schedule in schedules:
            schedule.step()
    assert_same(at.state(), uncaptured.state())
    assert len(partitions.all) == 1 and replays(partitions) >= 5
    assert type(at.optimizer.param_groups[0]["lr"]) is float
    assert not at.optimizer.param_groups[0].get("capturable", False)


def test_a_rate_that_another_optimizer_freezes_is_part_of_the_signature(partitions: Any) -> None:
    uncaptured, at = Training(sgd), Training(sgd)
    step = pygraph.graph(at.step)
    for i, (x, y) in enumerate(batches(20)):
        for training in (uncaptured, at):
            training.optimizer.param_groups[0]["lr"] = 0.1 if i < 10 else 0.01
        uncaptured.step(x, y)
        step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert len(partitions.all) == 2 and all(p.replays > 3 for p in partitions.all)


def test_a_rate_that_moves_in_each_call_is_named(partitions: Any) -> None:
    uncaptured, at = Training(sgd), Training(sgd)
    step = pygraph.graph(at.step)
    for i, (x, y) in enumerate(batches(20)):
        for training in (uncaptured, at):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        uncaptured.step(x, y)
        step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) == 0 and "param_groups[0]['lr'] differs from call to call" in reason()


def test_a_schedule_inside_of_the_step_is_named(partitions: Any) -> None:
    at = Training(adamw)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(at.optimizer, 0.9)

    @pygraph.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        at.step(x, y)
        scheduler.step()

    for x, y in batches(8):
        step(x, y)
    assert "scheduler.last_epoch" in reason() and partitions.all == []


def test_gradients_are_accumulated(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = Training(adamw)

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(at.model(x), y).backward()

        run = pygraph.graph(accumulate) if graphs else accumulate
        for i, (x, y) in enumerate(batches(40)):
            run(x, y)
            if i % 4 == 3:
                at.optimizer.step()
                at.optimizer.zero_grad()
        return at.state()

    assert_same(train(True), train(False))
    assert replays(partitions) >= 15


def test_other_modes_of_a_model_have_graphs_of_their_own(partitions: Any) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    other = copy.deepcopy(model)
    for mode in (True, False, True, False):
        model.train(mode), other.train(mode)
        for x, _ in batches(5):
            with torch.no_grad():
                assert torch.equal(function(x), other(x))
    assert len(partitions.all) == 2
    assert_same(list(model.state_dict().values()), list(other.state_dict().values()))


def test_a_counter_in_the_step_is_named(partitions: Any) -> None:
    metrics = SimpleNamespace(seen=0)

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        metrics.seen += 1
        return x + 1

    for i in range(8):
        assert torch.equal(function(torch.full((2,), float(i))), torch.full((2,), i + 1.0))
    assert metrics.seen == 8
    assert "metrics.seen" in reason() and partitions.all == []


def test_what_is_printed_and_logged_is_named(
    partitions: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @pygraph.graph
    def prints(x: torch.Tensor) -> torch.Tensor:
        print("a step")
        return x + 1

    @pygraph.graph
    def logs(x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("program").error("a step")
        return x + 1

    for _ in range(9):
        prints(torch.ones(1)), logs(torch.ones(1))
    reasons = {row.name: row.reason for row in pygraph.stats()}
    assert "what is printed" in reasons["prints"] and "what is logged" in reasons["logs"]
    assert capsys.readouterr().out == 9 * "a step\n" and partitions.all == []


def test_state_that_the_first_call_makes_is_no_effect(partitions: Any) -> None:
    cache: dict[str, torch.Tensor] = {}

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(2.0)
        return x + cache["table"]

    for i in range(8):
        assert function(torch.full((2,), float(i))).tolist() == [i, i + 1.0]
    assert replays(partitions) >= 3


def test_numbers_that_are_drawn_on_the_cpu_are_noticed(partitions: Any) -> None:
    function = pygraph.graph(lambda x: x * random.random())
    for _ in range(4):
        function(torch.ones(2))
    assert "random numbers on the CPU" in reason() and partitions.all == []


def test_a_tensor_that_is_kept_is_noticed(partitions: Any) -> None:
    holder = [torch.zeros(2)]

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        holder[0] = x.exp()
        return x + 1

    for _ in range(8):
        function(torch.ones(2))
        assert torch.equal(holder[0], torch.ones(2).exp())
    assert "holder[0]" in reason() and partitions.all == []


def test_results_that_require_gradients_are_left_alone(partitions: Any) -> None:
    model = torch.nn.Linear(4, 2)
    function = pygraph.graph(lambda x: model(x))
    for x, _ in batches(5):
        function(x).sum().backward()
    assert model.weight.grad is not None
    assert "requires a gradient" in reason() and partitions.all == []


def test_only_results_whose_backward_was_run_are_detached(partitions: Any) -> None:
    first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    @pygraph.graph
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = first(x).sum()
        loss.backward()
        first.zero_grad()
        return loss, second(x).sum()

    for x, _ in batches(5):
        _, other = function(x)
        other.backward()
    assert second.weight.grad is not None and "requires a gradient" in reason()


def test_arguments_that_require_gradients_are_left_alone(partitions: Any) -> None:
    function = pygraph.graph(lambda x: (x * 2).sum())
    for _ in range(4):
        x = torch.ones(3, requires_grad=True)
        function(x).backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert "an argument requires a gradient" in reason()


def test_arguments_that_share_memory_are_not_replayed(partitions: Any) -> None:
    function = pygraph.graph(lambda a, b: a.add_(1) + b)
    for _ in range(6):
        memory = torch.zeros(3)
        assert function(memory[:2], memory[1:]).tolist() == [2.0, 1.0]
    assert replays(partitions) == 0


def test_trees_values_and_keywords_of_all_kinds(partitions: Any) -> None:
    @pygraph.graph
    def function(batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["list"][0] * scale, "scale": scale, "none": None}

    for i in range(12):
        scale = float(i % 2)
        x = torch.full((2,), float(i))
        result = function({"a": x, "list": [x]}, scale=scale)
        assert result["scale"] == scale and result["none"] is None
        assert torch.equal(result["sum"], x + x * scale)
    assert len(partitions.all) == 2 and replays(partitions) >= 4


def test_a_model_may_be_passed(partitions: Any) -> None:
    at, uncaptured = Training(sgd), Training(sgd)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = pygraph.graph(step)
    for x, y in batches(8):
        step(uncaptured.model, uncaptured.optimizer, x, y)
        run(at.model, at.optimizer, x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 3


def test_a_method_is_bound(partitions: Any) -> None:
    class Thing:
        def __init__(self, scale: float) -> None:
            self.scale = torch.tensor(scale)

        @pygraph.graph(audit=100)
        def run(self, x: torch.Tensor) -> torch.Tensor:
            """Scales."""
            return x * self.scale

    things = [Thing(2.0), Thing(3.0)]
    for i in range(8):
        for thing in things:
            x = torch.full((2,), float(i))
            assert torch.equal(thing.run(x), x * thing.scale)
    assert len(partitions.all) == 2 and Thing.run.__doc__ == "Scales."
    assert all(partition.options.audit == 100 for partition in partitions.all)


def test_a_parameter_that_gets_other_memory_is_noticed(partitions: Any) -> None:
    model = torch.nn.Linear(4, 2)

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for turn in range(3):
        for x, _ in batches(5):
            with torch.no_grad():
                assert torch.equal(function(x), model(x))
        if turn == 0:
            model.weight.data = torch.randn(2, 4)
        else:
            model.load_state_dict(torch.nn.Linear(4, 2).state_dict(), assign=True)
    assert len(partitions.all) == 3


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 6])
def test_an_exception_is_the_programs_and_changes_nothing(partitions: Any, calls: int) -> None:
    uncaptured, at = Training(adamw), Training(adamw)
    step = pygraph.graph(at.step)
    for x, y in batches(calls):
        uncaptured.step(x, y), step(x, y)
    for run in (uncaptured.step, step):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(torch.randn(6, 3), torch.zeros(6, dtype=torch.long))
    for x, y in batches(8):
        uncaptured.step(x, y), step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 1


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_rehearsal_that_fails_midway_is_undone(partitions: Any, error: BaseException) -> None:
    at = Training(adamw)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(at.model(x), y).backward()
        if at.optimizer.param_groups[0]["capturable"]:
            raise error
        at.optimizer.step()
        at.optimizer.zero_grad()

    run = pygraph.graph(step)
    for x, y in batches(3):
        run(x, y)
    before = at.state()
    function = partitions.all[0].function
    x, y = batches(1)[0]
    inputs = [t.clone() for t in [x, y, *function._state_tensors, torch.tensor(0.1)]]
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        function.rehearse(inputs)
    assert_same(at.state(), before)
    assert type(at.optimizer.param_groups[0]["lr"]) is float
    assert all(p.grad is None for p in at.model.parameters())
    assert torch._C._is_multithreading_enabled()  # type: ignore[attr-defined]


def test_results_that_replays_cannot_make_are_refused(partitions: Any) -> None:
    function = pygraph.graph(lambda x: SimpleNamespace(value=x + 1))
    for _ in range(4):
        assert function(torch.ones(2)).value.tolist() == [2.0, 2.0]
    assert "returns a SimpleNamespace" in reason() and partitions.all == []


def test_a_graphed_callable_inside_of_another_is_called_as_it_is(partitions: Any) -> None:
    inner = pygraph.graph(lambda x: x + 1)
    outer = pygraph.graph(lambda x: inner(x) * 2)
    for i in range(8):
        assert outer(torch.full((1,), float(i))).tolist() == [2.0 * i + 2]
    assert len(partitions.all) == 1


def test_something_that_is_always_different_ends_the_observations(
    partitions: Any, caplog: pytest.LogCaptureFixture
) -> None:
    holder = SimpleNamespace(number=0.0)
    calls = 0

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + holder.number

    function = pygraph.graph(body)
    with caplog.at_level(logging.WARNING):
        for calls in range(30):
            holder.number = float(calls)
            assert function(torch.zeros(1)).item() == calls
    assert "holder.number differs from call to call" in caplog.text
    assert len(partitions.all) <= 10


def test_a_reset_begins_anew(partitions: Any) -> None:
    function = pygraph.graph(lambda x: x + 1)
    for _ in range(5):
        function(torch.ones(2))
    function.reset()
    for _ in range(5):
        function(torch.ones(2))
    assert len(partitions.all) == 2


def test_threads_may_call(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The replays of this world are rehearsals; the engine's need no memory for themselves.
    monkeypatch.setattr(runtime, "capturing", contextlib.nullcontext)
    model = torch.nn.Linear(4, 2)

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    wrong: list[object] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(3, 4, generator=generator)
            with torch.no_grad():
                if not torch.equal(function(x), model(x)):
                    wrong.append(x)

    with torch.no_grad():  # as in the threads
        for _ in range(4):
            function(torch.ones(3, 4))
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and replays(partitions) >= 4 * 30


def test_without_a_gpu_the_function_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: "there is no CUDA GPU")
    function = pygraph.graph(lambda x: x + 1)
    assert function(torch.ones(1)).item() == 2.0
    assert [entry.reason for entry in function.entries.values()] == ["there is no CUDA GPU"]


def test_a_function_that_counts_its_calls_is_named(partitions: Any) -> None:
    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        function.calls += 1
        return x + 1

    function.calls = 0
    for _ in range(9):
        function(torch.ones(1))
    assert function.calls == 9 and partitions.all == []
    assert "function#attributes" in reason()


class _Odd:
    """Its attributes cannot be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("odd")


def test_what_cannot_be_looked_at_is_left_alone(partitions: Any) -> None:
    odd = _Odd()
    function = pygraph.graph(lambda x: x + (odd is not None))
    for _ in range(4):
        assert function(torch.ones(1)).item() == 2.0
    assert "odd" in reason() and partitions.all == []


def test_arguments_of_all_kinds_do_not_fill_the_memory(partitions: Any) -> None:
    function = pygraph.graph(lambda x, number: x * number)
    for number in range(500):
        assert function(torch.ones(1), float(number)).item() == number
    assert len(function._variants) <= 64 and len(function._refused) <= 256


def test_a_graphed_callable_is_copied_and_collected(partitions: Any) -> None:
    def use() -> Any:
        model = torch.nn.Linear(2, 2)
        function = pygraph.graph(torch.no_grad()(lambda x: model(x)))
        for _ in range(5):
            function(torch.ones(1, 2))
        assert torch.equal(copy.deepcopy(function)(torch.ones(1, 2)), function(torch.ones(1, 2)))
        return weakref.ref(model)

    weak = use()
    partitions.all.clear()
    gc.collect()
    assert weak() is None


def test_what_has_not_run_on_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("PYGRAPH_UNTESTED_GRAPH", raising=False)
    function = pygraph.graph(lambda x: x + 1)
    assert not graphed._may_be_served() and function(torch.ones(1)).item() == 2.0
    (reason,) = [entry.reason for entry in function.entries.values()]
    assert "PYGRAPH_UNTESTED_GRAPH=1" in reason
    monkeypatch.setenv("PYGRAPH_UNTESTED_GRAPH", "1")
    assert graphed._may_be_served()


def test_unknown_options_and_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown option 'transforms'"):
        pygraph.graph(lambda: None, transforms="none")
    with pytest.raises(ValueError, match="lanes"):
        pygraph.graph(lambda: None, lanes=0)
    with pytest.raises(TypeError, match="takes a callable"):
        pygraph.graph(3)  # type: ignore[arg-type]


def test_calls_that_another_mode_must_see_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("PYGRAPH_UNTESTED_GRAPH", "1")
    assert graphed._may_be_served()
    with torch.device("cpu"):  # a mode of __torch_function__
        assert not graphed._may_be_served()
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(graphed._may_be_served()), x)[1])(torch.ones(2))
    assert seen == [False]
