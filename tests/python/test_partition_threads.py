"""Threads that call one partition while it is recorded, tried, audited, dropped, renewed and reset."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition import audit_replay, observed_effects, pipeline, timed_calls
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, State
from pygraph.select import decision_cache
from pygraph.select.trial import Sample
from pygraph.verify.rehearsal import POISON_ONES

from . import audit_world
from .contexts import capturing, drawing
from .fake_engine import FakeGraph
from .stand_ins import INFO

_SHAPES = 4


class SharedEngine(audit_world.Engine):
    """One graph per shape; each of its own functions is atomic, as under Python's lock."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.lock = threading.RLock()
        self.random = random.Random(0)
        self.made: list[Any] = []  # all graphs there ever were

    def graphed_callable(self, uncaptured: Any, miss: Any, device: int) -> Any:
        def call(args: list[Any]) -> Sequence[Any]:
            with self.lock:
                size = args[0].numel()
                graph = next((graph for graph in self.graphs if graph.size == size), None)
                is_due = graph is None or graph.is_audit_due or self.random.random() < 0.1
            if graph is None or is_due:
                return miss(args)  # type: ignore[no-any-return]
            outputs = graph.replay(args, True)
            args.clear()
            return outputs

        return call

    def add_graph(self, callable: Any, graph: Any, most: int, calls: int) -> list[Any]:
        with self.lock:
            self.remove_graph(callable, graph)
            self.graphs.insert(0, graph)
            dropped, self.graphs = self.graphs[most:], self.graphs[:most]
            return dropped

    def remove_graph(self, callable: Any, graph: Any) -> None:
        with self.lock:
            super().remove_graph(callable, graph)

    def clear_decisions(self, callable: Any) -> None:
        with self.lock:
            self.graphs = []

    def signature(self, args: list[Any], device: int) -> bytes:
        return str(args[0].numel()).encode()

    def given_away(self, args: list[Any]) -> list[Any]:
        given = [0] if self.random.random() < 0.8 else []  # else somebody holds it
        return [type("Group", (), {"positions": given})()] if given else []


def _add_one(args: list[Any]) -> list[Any]:
    return [args[0] + 1]


@pytest.fixture
def partition(monkeypatch: pytest.MonkeyPatch) -> Iterator[Partition]:
    world = audit_world.World(monkeypatch, _add_one)
    engine = SharedEngine(runtime.engine())
    world.engine = engine
    monkeypatch.setattr(audit_replay, "free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(allocator, "give_back_all", lambda: None)
    monkeypatch.setattr(decision_cache, "load", lambda key: None)
    monkeypatch.setattr(decision_cache, "save", lambda key, decision: None)
    monkeypatch.setattr(decision_cache, "_machine", lambda device: "machine")
    chance = random.Random(1)

    def timed(run: Any, sleep: float) -> tuple[Any, Sample]:
        result = run()
        seconds = chance.uniform(1e-3, 2e-3)
        if sleep > 0:
            return result, Sample(seconds, device=seconds)
        return result, Sample(seconds, latency=seconds)

    def attempt(call: Call) -> Attempt:
        graph: Any = audit_world.Graph(_add_one)
        graph.size = call.args[0].numel()
        engine.made.append(graph)
        graph.donated = [0] if call.may_donate else []
        if chance.random() < 0.2:
            return Attempt(call.uncaptured(call.args), failure="verification ran out of memory")
        return Attempt(call.uncaptured(call.args), graph)

    monkeypatch.setattr(timed_calls, "timed", timed)
    monkeypatch.setattr(pipeline, "attempt", attempt)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    runtime.partitions.clear()
    yield Partition(_add_one, INFO, Options(audit=5, max_graphs=3))
    sys.setswitchinterval(interval)


def test_every_call_is_right_whatever_other_threads_do(partition: Partition) -> None:
    failures: list[BaseException] = []
    calls_left = threading.Semaphore(4 * 2500)
    done = threading.Event()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while calls_left.acquire(blocking=False):
                x = torch.full((1 + chance.randrange(_SHAPES),), float(chance.randrange(100)))
                expected = x + 1
                (result,) = partition.callable([x])
                assert torch.equal(result, expected)
        except BaseException as error:
            failures.append(error)

    def disturb() -> None:
        try:
            while not done.wait(0.05):
                pygraph.stats()
                pygraph.reset()
        except BaseException as error:
            failures.append(error)

    def watch() -> None:
        try:
            while not done.wait(0.001):
                assert all(row.name == "forward" for row in pygraph.stats())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    others = [threading.Thread(target=disturb), threading.Thread(target=watch)]
    for thread in threads + others:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert failures == []
    assert not runtime.record_lock.locked()
    engine: Any = runtime.engine()
    mine = [entry.graph for entry in partition.entries.values()]
    assert all(any(graph is other for other in mine) for graph in engine.graphs)
    assert sum(graph.replays for graph in engine.made) > 100  # the test has met what it is about
    assert sum(graph.poisons.count(POISON_ONES) for graph in engine.made) > 5


def test_a_signature_is_recorded_once(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's recording has just ended when this one takes the lock."""
    partition.callable([torch.zeros(1)])
    (entry,) = partition.entries.values()
    key = b"1"
    recorded: list[int] = []
    monkeypatch.setattr(pipeline, "attempt", lambda *args: recorded.append(1))
    entry.use(FakeGraph())
    assert partition._pipeline.record_call(key, entry, [torch.zeros(1)])[0].item() == 1
    assert recorded == []


def test_a_first_call_does_not_replace_what_another_thread_has_begun(
    monkeypatch: pytest.MonkeyPatch, partition: Partition
) -> None:
    other = Entry(State.REFUSED)

    def function(args: list[Any]) -> list[Any]:
        partition.entries[b"1"] = other
        return [args[0] + 1]

    monkeypatch.setattr(partition, "_function", function)
    monkeypatch.setattr(partition, "uncaptured", function)
    partition._first_call(b"1", [torch.zeros(1)])
    assert partition.entries[b"1"] is other


def test_a_graph_is_not_kept_after_a_reset(partition: Partition) -> None:
    graph: Any = audit_world.Graph(_add_one)
    graph.size = 1
    partition.entries[b"1"] = Entry(State.CAPTURED, graph=graph)
    partition.reset()
    partition.install(graph, 0)
    assert runtime.engine().graphs == []


class _QuietWatch:
    def __init__(self, args: list[Any], device: int, undo: Any) -> None: ...

    def mutated(self) -> frozenset[int]:
        return frozenset()

    def draws(self) -> bool:
        return False


def test_a_function_that_may_draw_waits_for_a_recording_that_draws(partition: Partition) -> None:
    """PyTorch would raise: "Offset increment outside graph capture"."""
    done = threading.Event()

    def call() -> None:
        partition.uncaptured([torch.zeros(1)])
        done.set()

    thread = threading.Thread(target=call)
    with capturing():
        thread.start()
        assert not done.wait(0.2)
    thread.join(5)
    assert done.is_set()


def test_a_function_with_generators_among_its_arguments_waits_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in capture mode during a recording, too, and other threads may have the same ones."""
    monkeypatch.undo()
    monkeypatch.setattr(observed_effects, "Watch", _QuietWatch)
    partition = Partition(lambda args: [], INFO, Options())
    generator = torch.Generator()
    for _ in range(2):
        partition._effects.watched_call([torch.zeros(1), generator], partition.uncaptured)
    assert not partition._effects.is_watching
    assert not partition._effects.known.draws
    done = threading.Event()

    def call() -> None:
        partition.uncaptured([torch.zeros(1), generator])
        done.set()

    thread = threading.Thread(target=call)
    with capturing():
        thread.start()
        assert not done.wait(0.2)
    thread.join(5)
    assert done.is_set()


def test_functions_that_draw_do_not_wait_for_each_other() -> None:
    """They may wait for each other themselves, as a backward does that another thread runs."""
    both = threading.Barrier(2)

    def draw() -> None:
        with drawing():
            both.wait(0.5)

    thread = threading.Thread(target=draw)
    thread.start()
    draw()
    thread.join()


def test_no_recording_begins_while_another_thread_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make that thread's next draw raise."""
    monkeypatch.setattr(runtime, "_LONGEST_DRAWING", 0.05)
    is_inside, may_leave = threading.Event(), threading.Event()

    def draw() -> None:
        with drawing():
            is_inside.set()
            may_leave.wait(5)

    thread = threading.Thread(target=draw)
    thread.start()
    is_inside.wait(5)
    with pytest.raises(runtime.OthersDraw), capturing():
        pass
    may_leave.set()
    thread.join()
    with capturing():
        pass


def test_a_recording_may_run_inside_a_function_that_draws_and_the_reverse() -> None:
    with drawing(), capturing(), drawing():
        pass


def test_what_is_part_of_a_capture_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backward in autograd's thread, which the capture waits for."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    done = threading.Event()

    def draw() -> None:
        with drawing():
            done.set()

    thread = threading.Thread(target=draw)
    with capturing():
        thread.start()
        assert done.wait(5)
    thread.join()


@pytest.mark.parametrize("leaves_at", [RuntimeError, KeyboardInterrupt])
def test_a_recording_that_raises_lets_others_draw(leaves_at: type[BaseException]) -> None:
    done = threading.Event()
    go_on = threading.Event()

    def draw() -> None:
        with drawing():
            pass
        go_on.wait(5)
        with drawing():
            done.set()

    thread = threading.Thread(target=draw)
    thread.start()
    with pytest.raises(leaves_at), capturing():
        raise leaves_at
    go_on.set()
    assert done.wait(1)
    thread.join()
