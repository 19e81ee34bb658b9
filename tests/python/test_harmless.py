"""What makes calls cheaper, and what reports, may fail: the call's result is right all the same."""

from __future__ import annotations

import logging
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime, uncapturable
from pygraph.gpu import allocator
from pygraph.partition import selector as selector_module
from pygraph.partition import timed_calls
from pygraph.partition.attempt import Attempt
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, PartitionInfo, State
from pygraph.partition.unservable_calls import DonationState
from pygraph.select import decision_cache, trial
from pygraph.select.trial import Sample, Trial
from pygraph.uncapturable import Compilation

from . import audit_world
from .stand_ins import INFO


class Broken(Exception):
    """Of no kind that anybody expects."""


def _fail(*args: object, **kwargs: object) -> Any:
    raise Broken("injected")


def _x() -> list[Any]:
    return [torch.arange(4.0)]


class World(audit_world.World):
    """With trials, decisions on disk, and memory worth giving back."""

    replay_seconds = 1e-3  # the uncaptured run takes five times as long

    def timed(self, run: Any, sleep: float) -> tuple[Any, Sample]:
        before = self.calls
        result = run()
        seconds = 5e-3 if self.calls > before else self.replay_seconds
        if sleep > 0:
            return result, Sample(seconds / 2, device=seconds)
        return result, Sample(seconds / 2, latency=seconds)

    def partition(self, *args: Any, **own: Any) -> Partition:
        self._monkeypatch.setattr(audit_world, "INFO", INFO_ON_DISK)
        own.setdefault("select", "auto")
        real = audit_world.Options
        self._monkeypatch.setattr(
            audit_world, "Options", lambda select, **rest: real(**{**rest, **own})
        )
        self.graph = audit_world.Graph(self.function)
        self.engine.graphs.clear()
        return super().partition(_x, *args)


INFO_ON_DISK = PartitionInfo(**{**vars(INFO), "program": "program", "kind": "backward"})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[World]:
    runtime.partitions.clear()
    world = World(monkeypatch, lambda args: [args[0] + 1])
    monkeypatch.setattr(timed_calls, "timed", world.timed)
    monkeypatch.setattr(decision_cache, "_machine", lambda device: "machine")
    monkeypatch.setattr(decision_cache, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(allocator, "bytes_on_gpu", lambda args: 1 << 30)
    monkeypatch.setattr(selector_module, "_CALLS_PER_RECHECK", 5)
    yield world
    assert not runtime.record_lock.locked()


def _make_calls(partition: Partition, calls: int) -> None:
    for _ in range(calls):
        assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]


PLACES = [
    (allocator, "give_back_if_due"),
    (allocator, "give_back"),
    (allocator, "give_back_at_next_call"),
    (allocator, "give_back_all"),
    (allocator, "bytes_on_gpu"),
    (allocator, "make_room"),
    (allocator, "free_library_workspaces"),
    (allocator, "defragment_workspace"),
    (decision_cache, "key_of"),
    (decision_cache, "load"),
    (decision_cache, "save"),
    (decision_cache, "forget"),
    (decision_cache, "cache_dir"),
    (decision_cache, "_machine"),
    (DonationState, "note_misfit"),
    (Trial, "add"),
    (selector_module, "Trial"),
    (timed_calls, "timed"),
    (trial, "_summary"),
    (logging.Logger, "log"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_failure_beside_the_call_never_reaches_the_user(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """From the first call on; or once the graph is in use, audited, slower, then not fit for calls."""
    failures: list[str] = []

    def fail(*args: object, **kwargs: object) -> Any:
        failures.append(name)
        raise Broken("injected")

    for select in ("auto", "always"):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            _make_calls(world.partition(select=select), 40)
            assert pygraph.stats()
    partition = world.partition(audit=3)
    _make_calls(partition, 30)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        _make_calls(partition, 30)
        world.replay_seconds = 3e-3
        _make_calls(partition, 60)
    world.replay_seconds = 1e-3
    partition = world.partition(audit=3)
    _make_calls(partition, 30)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        world.graph.donated = [0]
        patch.setattr(world.graph, "gives_away", lambda arguments: False)
        _make_calls(partition, 30)
    assert failures


@pytest.mark.parametrize("content", ["", "{", '{"selected": 3, "timings": []}', "\x00" * 100])
def test_a_corrupt_selection_on_disk_is_none(world: World, content: str) -> None:
    key = decision_cache.key_of("program", b"key", 0)
    path = decision_cache._path(key)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    _make_calls(world.partition(), 30)


def test_a_file_in_the_place_of_the_folder(
    world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(decision_cache, "cache_dir", lambda: str(tmp_path / "file"))
    partition = world.partition()
    _make_calls(partition, 30)
    assert audit_world.only_entry(partition).selection.decision is not None


def test_a_full_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    partition = world.partition()
    _make_calls(partition, 30)
    assert audit_world.only_entry(partition).selection.decision is not None


def test_a_handler_that_raises(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Broken("a handler of the user's")

    handler = Handler(logging.DEBUG)
    runtime.log.addHandler(handler)
    monkeypatch.setattr(runtime.log, "level", logging.DEBUG)
    try:
        partition = world.partition(audit=3)
        _make_calls(partition, 30)
        world.graph.function = lambda args: [args[0] + 2]
        world.graph.audit_at = 0
        _make_calls(partition, 10)
    finally:
        runtime.log.removeHandler(handler)


def test_noting_an_operator_found_uncapturable_may_fail(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compilation, "note_uncapturable", _fail)
    partition = Partition(world.function, INFO, audit_world.Options(), Compilation(()))
    entry = Entry()
    partition._pipeline.conclude(entry, Attempt([], failure="no capture", operator="a::b"), 0.0, [])
    assert (entry.state, entry.reason) == (State.REFUSED, "no capture")


def test_a_guard_that_cannot_tell_holds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(())
    compilation.has_guard = True
    monkeypatch.setattr(Compilation, "_may_be_compiled_anew", lambda self: True)
    assert compilation.note_uncapturable("pygraph_test::cannot_tell", "")
    monkeypatch.setattr(Compilation, "_may_be_compiled_anew", _fail)
    assert compilation.is_current()
    uncapturable._found.clear()


def test_partitions_are_listed_while_others_are_made() -> None:
    class Changing(weakref.WeakSet[Partition]):
        times = 0

        def __iter__(self) -> Iterator[Partition]:
            self.times += 1
            if self.times < 3:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    partition = Partition(lambda args: args, INFO, audit_world.Options())
    assert runtime.members(Changing([partition])) == [partition]
