"""Blocks of a benchmark on a CPU that no neighbour disturbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from benchmarks.quiet_cpu import QuietCpu


class _Machine:
    """CPUs whose loops take as long as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.bound = set(seconds)
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(self.bound))
        monkeypatch.setattr(os, "sched_setaffinity", self._bind)

    def _bind(self, thread: int, cpus: set[int]) -> None:
        self.bound = set(cpus)

    def loop(self) -> float:
        (cpu,) = self.bound
        return self.seconds[cpu]


@pytest.fixture
def made_on() -> list[int]:
    """The CPUs of a block's runs."""
    return []


def _block(
    machine: _Machine, made_on: list[int], then: Iterator[Callable[[], None]]
) -> Callable[[], int]:
    def block() -> int:
        made_on.extend(machine.bound)
        next(then, lambda: None)()
        return len(made_on)

    return block


def test_a_block_is_made_on_the_quietest_cpu(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 2.0, 1: 1.0, 2: 1.9})
    quiet = QuietCpu(machine.loop)
    assert quiet.make(_block(machine, made_on, iter(()))) == 1
    assert made_on == [1]
    assert machine.bound == {0, 1, 2}
    machine.seconds = {0: 1.0, 1: 2.0, 2: 1.9}  # the neighbours have moved
    assert quiet.make(_block(machine, made_on, iter(()))) == 2
    assert made_on == [1, 0]
    assert quiet.take_disturbed() == 0


def test_a_disturbed_block_is_made_again(monkeypatch: pytest.MonkeyPatch, made_on: list[int]) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 1.05})
    quiet = QuietCpu(machine.loop)
    disturb = iter([lambda: machine.seconds.update({0: 2.0})])
    assert quiet.make(_block(machine, made_on, disturb)) == 2
    assert made_on == [0, 1]
    assert quiet.take_disturbed() == 0


def test_a_block_is_kept_where_no_cpu_stays_quiet(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0})
    quiet = QuietCpu(machine.loop)
    quiet.make(_block(machine, made_on, iter(())))
    machine.seconds = {0: 2.0}
    before = len(made_on)
    quiet.make(_block(machine, made_on, iter(())))
    assert len(made_on) - before > 1
    assert quiet.take_disturbed() == 1
    assert quiet.take_disturbed() == 0


def test_the_thread_is_free_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 2.0})

    def block() -> None:
        raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        QuietCpu(machine.loop).make(block)
    assert machine.bound == {0, 1}


def test_the_loop_takes_time() -> None:
    allowed = os.sched_getaffinity(0)
    assert QuietCpu().make(lambda: os.sched_getaffinity(0) < allowed or len(allowed) == 1)
    assert os.sched_getaffinity(0) == allowed
