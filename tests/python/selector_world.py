"""What a selector works with, made up: engine, graphs, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pygraph import runtime
from pygraph.gpu import allocator, current
from pygraph.partition import timed_calls
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, Kind, PartitionInfo, State
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Sample

from .fake_engine import FakeGraph


class FakePartition:
    """What a selector needs of a partition."""

    def __init__(self, kind: Kind = "forward", runs_program: bool = False) -> None:
        self.info = PartitionInfo(
            name=kind,
            kind=kind,
            device=0,
            argument_count=1,
            counts_numbers=True,
            program="program",
            runs_program=runs_program,
        )
        self.entries: dict[bytes, Entry] = {}
        self.callable = object()
        self.installed: list[Any] = []
        self.refused = ""

    def uncaptured(self, args: list[Any]) -> list[Any]:
        return [args[0], UNCAPTURED]

    def install(self, graph: Any, calls_per_recheck: int) -> None:
        self.installed.append((graph, calls_per_recheck))

    def note_trial(self, entry: Entry) -> None:
        pass

    def refuse(self, entry: Entry, reason: str, calls_until_retry: int = 0) -> None:
        self.refused = reason
        entry.refuse(reason, calls_until_retry)

    written: frozenset[int] = frozenset({2, 1})
    draws = True
    has_run_here = True


def made_graph() -> FakeGraph:
    """A graph whose results say that they are a replay's."""
    return FakeGraph(lambda args: [args[0], REPLAYED], workspace_bytes=100)


def graph_of(entry: Entry) -> FakeGraph:
    assert isinstance(entry.graph, FakeGraph)
    return entry.graph


class Busy(RuntimeError):
    """The engine's StreamNotReady."""


class Kept(RuntimeError):
    """The engine's NotGivenAway."""


class World:
    """The clock: seconds that each variant takes, on the host and on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {UNCAPTURED: (5e-3, 1e-3), REPLAYED: (1e-4, 1e-3)}
        self.disk: dict[str, Decision] = {}
        self.without_graph: list[int] = []
        self.removed: list[Any] = []
        self.workspaces_freed = self.blocks_dropped = 0
        self.caches_emptied = 0
        self.is_profiled = False
        engine = SimpleNamespace(
            StreamNotReady=Busy,
            NotGivenAway=Kept,
            add_uncaptured_decision=lambda callable, args, looks: self.without_graph.append(looks),
            clear_uncaptured_decisions=lambda callable: None,
            remove_graph=lambda callable, graph: self.removed.append(graph),
            needs_new_executable=lambda: self.is_profiled,
            drop_blocks=self._drop_blocks,
        )
        monkeypatch.setattr(runtime, "engine", lambda: engine)
        monkeypatch.setattr(timed_calls, "timed", self._timed)
        monkeypatch.setattr(allocator, "free_library_workspaces", self._free_workspaces)
        monkeypatch.setattr(allocator, "give_back_all", self._empty_cache)
        monkeypatch.setattr(current, "use_device", lambda index, undo: None)
        monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: "key")
        monkeypatch.setattr(decision_cache, "load", self.disk.get)
        monkeypatch.setattr(decision_cache, "save", self.disk.__setitem__)
        monkeypatch.setattr(decision_cache, "forget", lambda key: self.disk.pop(key, None))

    def _free_workspaces(self) -> None:
        self.workspaces_freed += 1

    def _drop_blocks(self, device: int) -> None:
        self.blocks_dropped += 1

    def _empty_cache(self) -> None:
        self.caches_emptied += 1

    def _timed(self, run: Callable[[], list[Any]], sleep: float) -> tuple[list[Any], Sample]:
        result = run()
        host, device = self.times[result[1]]
        if sleep > 0:
            return result, Sample(host, device=device)
        return result, Sample(host, latency=max(host, device))


def captured(
    mode: str = "auto", kind: Kind = "forward", runs_program: bool = False
) -> tuple[FakePartition, Selector, Entry]:
    """A partition whose one signature has just been captured."""
    partition = FakePartition(kind, runs_program)
    subject = Selector(partition, mode, lanes=8)  # type: ignore[arg-type]
    entry = partition.entries[b"key"] = Entry(graph=made_graph(), state=State.CAPTURED)
    subject.load_decision(b"key", entry)
    subject.begin_trial_or_install(entry)
    return partition, subject, entry


def try_to_the_end(subject: Selector, entry: Entry) -> int:
    for calls in range(100):
        if entry.state is not State.MEASURING:
            return calls
        assert subject.run_trial_call(b"key", entry, [calls])[0] == calls
    raise AssertionError("no decision")
