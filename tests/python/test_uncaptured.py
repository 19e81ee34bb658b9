"""The context in which no graph is used."""

from __future__ import annotations

import threading
import time

import pytest

import pygraph
from pygraph import runtime
from pygraph.undoing import Undo, settle

from .contexts import during, recording


class _Engine:
    def __init__(self) -> None:
        self.paused: list[bool] = []

    def pause(self, is_paused: bool) -> None:
        self.paused.append(is_paused)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> _Engine:
    engine = _Engine()
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    return engine


def test_contexts_may_be_nested(engine: _Engine) -> None:
    with pygraph.uncaptured():
        with pygraph.uncaptured():
            pass
        assert engine.paused == [True]
        assert runtime.record_lock.locked()
    assert engine.paused == [True, False]
    assert not runtime.record_lock.locked()


def test_threads_do_not_wait_for_each_other(engine: _Engine) -> None:
    both = threading.Barrier(2, timeout=20)
    met = []

    def work() -> None:
        with pygraph.uncaptured():
            met.append(both.wait())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == [0, 1]
    assert engine.paused == [True, False]


def test_an_error_ends_the_context(engine: _Engine) -> None:
    with pytest.raises(KeyError), pygraph.uncaptured():
        raise KeyError
    assert engine.paused == [True, False]
    assert not runtime.record_lock.locked()


def test_without_an_engine_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> None:
        raise ImportError("another PyTorch")

    monkeypatch.setattr(runtime, "engine", engine)
    with pygraph.uncaptured():
        pass
    assert not runtime.record_lock.locked()


def test_a_function_that_is_being_recorded_may_enter_it(engine: _Engine) -> None:
    with recording():
        with pygraph.uncaptured():
            assert engine.paused == [True]
        assert runtime.record_lock.locked()
    assert not runtime.record_lock.locked()


def test_a_lock_knows_its_thread() -> None:
    lock = runtime.RecordLock()
    seen: list[bool] = []

    def other() -> None:
        with during(lambda undo: seen.append(lock.take(undo))):
            seen.append(lock.is_held_here())

    undo: Undo = []
    assert lock.take(undo) and lock.is_held_here()
    inner: Undo = []
    assert not lock.take(inner)
    settle(inner)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False, False] and lock.is_held_here()
    settle(undo)
    assert not lock.is_held_here() and not lock.locked()


def test_a_function_that_is_being_recorded_may_enter_it_while_others_wait(engine: _Engine) -> None:
    entered = []

    def wait() -> None:
        with pygraph.uncaptured():
            entered.append(runtime.record_lock.locked())

    with recording():
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        assert entered == []
        with pygraph.uncaptured():
            pass
    thread.join(20)
    assert entered == [True] and not runtime.record_lock.locked()
