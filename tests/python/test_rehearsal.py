"""Runs on copies of a call's inputs, where there is little memory for them; on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pygraph import runtime
from pygraph.gpu.clones import clone_shared_storages
from pygraph.record.recorder import Recording
from pygraph.verify import rehearsal, verify
from pygraph.verify.rehearsal import Rehearsal

from .fake_engine import FakeGraph, Function, StandIns, add_one
from .stand_ins import verify_on_the_cpu


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_on_the_cpu(monkeypatch)


class _Greedy(FakeGraph):
    """A graph whose result takes the memory of its input, as a backward's do."""

    def __init__(self, is_short_of_memory: bool = False) -> None:
        super().__init__(self._take, donated=[0])
        self.is_short_of_memory = is_short_of_memory

    def _take(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.is_short_of_memory:
            self.is_short_of_memory = False
            raise torch.OutOfMemoryError("no room")
        return [args[0].add_(1) if self.gave_away[-1] else args[0] + 1]


def _check(rehearsal: Rehearsal, suspects: list[int]) -> verify.Verification:
    if suspects:
        return verify.thorough_check(rehearsal, suspects)
    return verify.quick_check(rehearsal)


def _rehearsal(graph: FakeGraph, function: Function = add_one, *given_away: int) -> Rehearsal:
    recording = Recording(graph, StandIns(), [], given_away=frozenset(given_away))
    return Rehearsal(function, [torch.ones(4)], recording, frozenset())


@pytest.mark.parametrize("suspects", [[], [0]])
@pytest.mark.parametrize("step", ["copies", "replay"])
@pytest.mark.parametrize("held", [False, True])
def test_where_memory_is_short_inputs_wait_on_the_host(
    monkeypatch: pytest.MonkeyPatch, suspects: list[int], step: str, held: bool
) -> None:
    """What somebody else holds cannot be moved; then the call is uncaptured."""
    moves: list[torch.device] = []

    def clone(
        args: list[torch.Tensor], positions: list[int], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        if device is not None:
            moves.append(device)
        elif step == "copies":
            raise torch.OutOfMemoryError("no room")
        return clone_shared_storages(args, positions, device)

    monkeypatch.setattr(rehearsal, "clone_shared_storages", clone)
    group = SimpleNamespace(positions=[0])
    monkeypatch.setattr(runtime.engine(), "given_away", lambda args: [] if held else [group])
    graph = _Greedy(is_short_of_memory=step == "replay")
    result = _check(_rehearsal(graph, add_one, 0), suspects)
    assert torch.equal(result.outputs[0], torch.full((4,), 2.0))
    if held:
        assert result.failure == "verification ran out of memory"
        assert moves == []
    else:
        assert result.failure == "" and not result.suspects
        assert len(moves) >= 3  # to the host, back for each run, and for the call


@pytest.mark.parametrize("suspects", [[], [0]])
@pytest.mark.parametrize("has_room", [False, True])
def test_much_that_is_overwritten_waits_on_the_host_if_that_has_room(
    monkeypatch: pytest.MonkeyPatch, suspects: list[int], has_room: bool
) -> None:
    clones: list[torch.device | None] = []

    def clone(
        args: list[torch.Tensor], positions: list[int], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        clones.append(device)
        return clone_shared_storages(args, positions, device)

    monkeypatch.setattr(rehearsal, "clone_shared_storages", clone)
    monkeypatch.setattr(rehearsal.allocator, "is_scarce", lambda wanted: wanted > 8)
    monkeypatch.setattr(rehearsal.allocator, "give_back", lambda after: None)
    monkeypatch.setattr(rehearsal.host_memory, "has_room", lambda wanted: wanted == 16 and has_room)
    group = SimpleNamespace(positions=[0])
    monkeypatch.setattr(runtime.engine(), "given_away", lambda args: [group])
    result = _check(_rehearsal(_Greedy(), add_one, 0), suspects)
    assert torch.equal(result.outputs[0], torch.full((4,), 2.0))
    assert result.failure == "" and not result.suspects
    assert (None in clones) is not has_room  # copies beside the originals
    assert (len(clones) >= 3 and None not in clones) is has_room


def test_what_fingerprints_keep_goes_before_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lies in a piece that a run has left."""
    events: list[str] = []
    monkeypatch.setattr(rehearsal.allocator, "give_back", lambda after: events.append("give back"))
    monkeypatch.setattr(rehearsal.allocator, "is_scarce", lambda wanted: True)
    monkeypatch.setattr(rehearsal, "forget", lambda: events.append("forget"))
    subject = _rehearsal(FakeGraph())
    verify.quick_check(subject)
    subject.timer(FakeGraph())
    assert events == ["forget", "give back"] * 3  # before the replay, the call, and timed replays


def test_free_memory_is_asked_for_once_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def is_scarce(wanted: int) -> bool:
        asked.append(wanted)
        return False

    monkeypatch.setattr(rehearsal.allocator, "is_scarce", is_scarce)
    _rehearsal(FakeGraph(output_bytes=5)).run_uncaptured([0])
    assert asked == [5]


def test_runs_keep_the_cache_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(rehearsal.allocator, "give_back", lambda after: events.append("give back"))
    monkeypatch.setattr(rehearsal.allocator, "is_scarce", lambda wanted: False)
    verify.thorough_check(_rehearsal(FakeGraph()), [0])
    assert events == ["give back"]  # before the call


@pytest.mark.parametrize("suspects", [[], [0]])
def test_the_calls_own_pieces_stay_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch, suspects: list[int]
) -> None:
    """Memory is given back before the call, not once its results exist: a later call would take its
    temporary memory from the piece that the results have left."""
    events: list[str] = []
    monkeypatch.setattr(rehearsal.allocator, "give_back", lambda after: events.append("give back"))
    monkeypatch.setattr(rehearsal.allocator, "free_library_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1, 2))
    monkeypatch.setattr(rehearsal.allocator, "reserved_bytes", lambda device=None: 1)

    def function(args: list[torch.Tensor]) -> list[torch.Tensor]:
        events.append("run")
        return [args[0] + 1]

    assert verify.verify(_rehearsal(FakeGraph(), function), suspects).failure == ""
    assert events[-2:] == ["give back", "run"]


@pytest.mark.parametrize("has_room", [False, True])
def test_other_graphs_keep_no_memory_during_the_call_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    other = FakeGraph(add_one)
    entries = {b"": SimpleNamespace(graph=other), b"refused": SimpleNamespace(graph=None)}
    holder = SimpleNamespace(entries=entries)
    monkeypatch.setattr(runtime, "all_partitions", lambda: [holder])
    monkeypatch.setattr(rehearsal.allocator, "make_room", lambda wanted: has_room)
    released: list[int] = []

    def call(args: list[torch.Tensor]) -> list[torch.Tensor]:
        released.append(other.released)
        return add_one(args)

    verify.quick_check(_rehearsal(FakeGraph(add_one), call))
    assert released == [0 if has_room else 1]


def test_inputs_stay_on_the_device_where_emptying_the_cache_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More may have to be copied than the graph's outputs and donated inputs: what is written, too."""
    room = [20]  # for copies, beside the allocator's cache

    def clone(
        args: list[torch.Tensor], positions: list[int], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        assert device is None, "moved to host memory"
        return clone_shared_storages(args, positions)

    monkeypatch.setattr(rehearsal, "clone_shared_storages", clone)
    monkeypatch.setattr(rehearsal.allocator, "is_scarce", lambda wanted: wanted > room[0])
    monkeypatch.setattr(rehearsal.allocator, "give_back", lambda after: room.__setitem__(0, 1000))
    monkeypatch.setattr(rehearsal.host_memory, "has_room", lambda wanted: True)
    group = SimpleNamespace(positions=[0, 1])
    monkeypatch.setattr(runtime.engine(), "given_away", lambda args: [group])
    recording = Recording(_Greedy(), StandIns(), [], given_away=frozenset({0, 1}))
    args = [torch.ones(4), torch.ones(8)]
    result = verify.quick_check(Rehearsal(add_one, args, recording, frozenset({1})))
    assert result.failure == "" and not result.suspects
