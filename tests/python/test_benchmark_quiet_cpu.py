"""Blocks of a benchmark on a CPU that no neighbour disturbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from benchmarks import quiet_cpu
from benchmarks.quiet_cpu import QuietCpu


class _Machine:
    """CPUs whose loops take as long as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.bound = set(seconds)
        self.switches = 0
        self.loops = 0
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(self.bound))
        monkeypatch.setattr(os, "sched_setaffinity", self._bind)
        monkeypatch.setattr(quiet_cpu, "_switches", lambda: self.switches)

    def _bind(self, thread: int, cpus: set[int]) -> None:
        if not cpus <= set(self.seconds):
            raise OSError
        self.bound = set(cpus)

    def loop(self) -> float:
        self.loops += 1
        return min(self.seconds[cpu] for cpu in self.bound)


@pytest.fixture
def made_on() -> list[int]:
    """The CPUs of a block's runs."""
    return []


def _block(
    machine: _Machine, made_on: list[int], then: Sequence[Callable[[], None]] = ()
) -> Callable[[], int]:
    events = iter(then)

    def block() -> int:
        made_on.extend(machine.bound)
        next(events, lambda: None)()
        return len(made_on)

    return block


def _quiet(machine: _Machine) -> QuietCpu:
    """It has made a block, and knows what the loop takes."""
    quiet = QuietCpu(machine.loop)
    quiet.make(lambda: None)
    assert quiet.take_disturbed() == 0
    return quiet


def test_a_block_is_made_on_the_quietest_cpu(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 2.0, 1: 1.0, 2: 1.9})
    quiet = QuietCpu(machine.loop)
    assert quiet.make(_block(machine, made_on)) == 1
    assert made_on == [1]
    assert machine.bound == {0, 1, 2}
    machine.seconds = {0: 1.0, 1: 2.0, 2: 1.9}  # the neighbours have moved
    assert quiet.make(_block(machine, made_on)) == 2
    assert made_on == [1, 0]
    assert quiet.take_disturbed() == 0


def test_the_cpu_of_the_last_block_comes_first(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, dict.fromkeys(range(8), 1.0) | {5: 0.99})
    quiet = _quiet(machine)
    for _ in range(5):
        before = machine.loops
        quiet.make(_block(machine, made_on))
        assert machine.loops == before + 2
    assert set(made_on) == {5}


def test_a_disturbed_block_is_made_again(monkeypatch: pytest.MonkeyPatch, made_on: list[int]) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 1.05})
    quiet = _quiet(machine)
    disturb = [lambda: machine.seconds.update({0: 2.0})]
    assert quiet.make(_block(machine, made_on, disturb)) == 2
    assert made_on == [0, 1]
    assert quiet.take_disturbed() == 0


def test_a_block_is_made_again_where_another_thread_has_run(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 1.0})
    quiet = _quiet(machine)

    def switch() -> None:
        machine.switches += 9

    assert quiet.make(_block(machine, made_on, [switch, switch])) == 3
    assert quiet.take_disturbed() == 0
    quiet.make(_block(machine, made_on, [switch] * 99))
    assert quiet.take_disturbed() == 1
    assert quiet.take_disturbed() == 0


def test_cpus_that_stay_slow_are_quiet_again(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 1.1})
    quiet = _quiet(machine)
    machine.seconds = {0: 2.0, 1: 2.1}
    for _ in range(3):
        quiet.make(_block(machine, made_on))
    assert quiet.take_disturbed() == 0
    assert len(made_on) == 4  # the first block was made again


def test_a_block_is_kept_where_no_cpu_stays_quiet(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 1.0})
    quiet = _quiet(machine)

    def slower() -> None:
        machine.seconds = {cpu: 2 * seconds for cpu, seconds in machine.seconds.items()}

    assert quiet.make(_block(machine, made_on, [slower] * 99)) == len(made_on) > 1
    assert quiet.take_disturbed() == 1


def test_only_cpus_that_the_thread_may_use_are_taken(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 2.0, 2: 2.0})
    quiet = _quiet(machine)
    machine.bound = {1, 2}
    quiet.make(_block(machine, made_on))
    assert set(made_on) <= {1, 2}
    assert machine.bound == {1, 2}


def test_a_thread_that_cannot_be_bound_runs_where_it_is(
    monkeypatch: pytest.MonkeyPatch, made_on: list[int]
) -> None:
    machine = _Machine(monkeypatch, {0: 1.0})

    def refuse(thread: int, cpus: set[int]) -> None:
        raise OSError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    quiet = QuietCpu(machine.loop)
    assert quiet.make(_block(machine, made_on)) == 1
    assert quiet.take_disturbed() == 1


def test_the_thread_is_free_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(monkeypatch, {0: 1.0, 1: 2.0})

    def block() -> None:
        raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        QuietCpu(machine.loop).make(block)
    assert machine.bound == {0, 1}


def test_a_real_thread_is_bound_to_one_cpu() -> None:
    allowed = os.sched_getaffinity(0)
    assert QuietCpu().make(lambda: len(os.sched_getaffinity(0))) == 1
    assert os.sched_getaffinity(0) == allowed
