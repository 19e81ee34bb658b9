"""What one process learns of a partition shortens the verification in the next one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.partition.signature import State
from pygraph.select import decision_cache

from . import recorded_world
from .recorded_world import Gpu, Program, World


class _Rounding:
    """The GPU adds in another order each time, so a result is rounded in another way."""

    def __init__(self, gpu: Gpu) -> None:
        self.runs = 0
        self._compute = gpu.compute

    def __call__(self, args: list[Any], *of: Any, **others: Any) -> list[torch.Tensor]:
        self.runs += 1
        return [result * (1 + self.runs % 7 * 2**-20) for result in self._compute(args, *of, **others)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World(monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: "name")
    return world


def _call_until(program: Program, state: State, begin: int = 0) -> int:
    """Calls the program until its signature has that state. Returns the number of calls, with the
    ``begin`` ones before."""
    for number in range(begin, 30):
        result = program.call(number)
        assert torch.allclose(result, program.expected(number), rtol=1e-4)
        if program.entry.state is state:
            return number + 1
    raise AssertionError(program.entry)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_graph_that_was_selected_is_used_after_two_calls(
    world: World, monkeypatch: pytest.MonkeyPatch, is_exact: bool
) -> None:
    """Also where results differ from run to run, for which the first process needs one call more."""
    if not is_exact:
        monkeypatch.setattr(world.gpu, "compute", _Rounding(world.gpu))
    first = world.program(select="auto")
    calls = _call_until(first, State.MEASURING)
    assert calls == (2 if is_exact else 3)
    _call_until(first, State.CAPTURED, calls)
    assert _call_until(world.program(select="auto"), State.CAPTURED) == 2


def test_a_graph_that_is_wrong_in_a_later_process_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gpu, "compute", _Rounding(world.gpu))
    _call_until(world.program(select="auto"), State.CAPTURED)
    later = world.program(select="auto")
    world.gpu.extra = 1.0  # that graphs do not add
    for number in range(2):
        assert torch.allclose(later.call(number), later.expected(number, extra=1.0), rtol=1e-4)
    assert later.entry.state is State.REFUSED
    assert "verification failed" in later.entry.reason


def test_a_process_that_does_not_verify_decides_nothing_for_those_that_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs have no branches, whatever the number of lanes."""
    names: list[str] = []
    monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: names.append(program))
    monkeypatch.setattr(recorded_world, "_INFO", dataclasses.replace(recorded_world._INFO, program="p"))
    for options in ({}, {"verify": False}, {"lanes": 1}):
        world.program(select="auto", **options).call(0)
    assert len(names) == 3
    assert names[0] != names[1] == names[2]
