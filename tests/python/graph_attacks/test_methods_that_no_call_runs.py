"""Methods of the program's classes that a step does not call, and what they name."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_replays_follow, reasons, replays


class _Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.handle = 0

    def record(self) -> None:
        pass


def _whole_step(trainer: Any, x: Any) -> Any:
    loss = trainer.model(x).pow(2).mean()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss


def _model_of(trainer: Any) -> None:
    trainer.model = torch.nn.Linear(4, 2)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), fused=True)


def test_a_trainer_whose_loop_records_events(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)

    class Trainer:
        def __init__(self) -> None:
            _model_of(self)
            self.start, self.end = _Event(enable_timing=True), _Event(enable_timing=True)
            self.graphed = pygraph.graph(self.step)

        def step(self, x: Any) -> Any:
            return _whole_step(self, x)

        def fit(self, batches: Any) -> None:
            for batch in batches:
                self.start.record()
                self.graphed(batch)
                self.end.record()

    Trainer().fit([torch.randn(3, 4) for _ in range(12)])
    assert replays(partitions) > 0, reasons()


def test_a_trainer_that_reports_its_memory(partitions: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            _model_of(self)

        def step(self, x: Any) -> Any:
            return _whole_step(self, x)

        def report(self) -> int:
            return sum(p.untyped_storage().nbytes() for p in self.model.parameters())

    graphed = pygraph.graph(Trainer().step)
    for _ in range(12):
        graphed(torch.randn(3, 4))
    assert replays(partitions) > 0, reasons()


def test_a_thread_for_each_call(partitions: Any) -> None:
    class Service:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 2)

        def log(self, message: str) -> None:
            print(threading.current_thread().name, message)

        @torch.no_grad()
        def serve(self, x: Any) -> Any:
            return self.model(x)

    graphed, x = pygraph.graph(Service().serve), torch.randn(3, 4)
    for _ in range(24):
        thread = threading.Thread(target=graphed, args=(x,))
        thread.start()
        thread.join()
    assert replays(partitions) > 0, reasons()


def _names_it(trainer: Any, x: Any) -> Any:
    return trainer.report() * 0 + _whole_step(trainer, x)


def _computes_its_name(trainer: Any, x: Any) -> Any:
    return getattr(trainer, "re" + trainer.suffix)() * 0 + _whole_step(trainer, x)


def _calls_it_by_a_text(trainer: Any, x: Any) -> Any:
    return operator.methodcaller("report")(trainer) * 0 + _whole_step(trainer, x)


def _looks_it_up_by_a_path(trainer: Any, x: Any) -> Any:
    return operator.attrgetter("own.report")(trainer)() * 0 + _whole_step(trainer, x)


@pytest.mark.parametrize(
    "step", [_names_it, _computes_its_name, _calls_it_by_a_text, _looks_it_up_by_a_path]
)
def test_a_method_that_a_call_may_run_is_judged(partitions: Any, step: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.suffix, self.own = "port", self
            _model_of(self)

        def report(self) -> int:
            return sum(p.untyped_storage().nbytes() for p in self.model.parameters())

        def step(self, x: Any) -> Any:
            return step(self, x)

    graphed = pygraph.graph(Trainer().step)
    for _ in range(12):
        graphed(torch.randn(3, 4))
    assert replays(partitions) == 0
    assert any("untyped_storage" in reason for reason in reasons())


def test_a_method_that_a_librarys_base_calls_is_judged(partitions: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * x._version

    graphed = pygraph.graph(Model())
    for _ in range(12):
        graphed(X)
    assert replays(partitions) == 0
    assert any("_version" in reason for reason in reasons())


def test_what_a_method_reads_that_no_code_names_is_watched(partitions: Any) -> None:
    """It may be called by a name that is computed in a way that is not seen."""
    scales = {"a": 2.0}

    class Scaled:
        def scaled(self, x: Any) -> Any:
            return x * scales["a"]

    scaled, find = Scaled(), Scaled.__getattribute__
    step = lambda x: find(scaled, "".join(("sca", "led")))(x)  # noqa: E731
    assert_replays_follow(partitions, step, lambda: scales.update(a=3.0))
