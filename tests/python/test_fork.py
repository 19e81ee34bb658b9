"""Processes that a program forks, such as a DataLoader's workers."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pygraph
from pygraph import runtime

from . import graphs_on_the_cpu
from .contexts import capturing, drawing, recording
from .graphs_on_the_cpu import CpuGraphs

_SECONDS = 60.0  # in which a child has to end


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuGraphs]:
    torch._dynamo.reset()
    yield graphs_on_the_cpu.install(monkeypatch)
    torch._dynamo.reset()


def _status_of_child(work: Callable[[], None]) -> int:
    """Of a forked process that does the work; -1 if it does not come to an end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def test_a_child_calls_programs_and_drops_graphs(graphs: CpuGraphs) -> None:
    weight = torch.eye(3)
    options = {"pygraph.patches": "none"}
    with torch.no_grad():
        program = torch.compile(lambda x: torch.mm(x, weight), backend="pygraph", options=options)
        x = torch.arange(6.0).reshape(2, 3)
        assert torch.equal(program(x), x)

        def work() -> None:
            assert torch.equal(program(x), x)
            pygraph.stats()
            with pygraph.uncaptured():
                assert torch.equal(program(x), x)
            pygraph.reset()
            assert torch.equal(program(x), x)

        assert len(graphs.infos) == 1
        assert _status_of_child(work) == 0
        assert torch.equal(program(x), x)


def test_a_child_does_not_wait_for_locks_of_other_threads() -> None:
    """Which are not in the child: a thread that records, one that draws, and one that captures."""
    held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with recording(), drawing(), capturing():
            held.set()
            ends.wait()

    def work() -> None:
        begin = time.monotonic()
        with pygraph.uncaptured():
            assert runtime.record_lock.locked()
        assert not runtime.record_lock.locked()
        with capturing(), drawing():
            pass
        assert time.monotonic() - begin < runtime._LONGEST_DRAWING

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert _status_of_child(work) == 0
    finally:
        ends.set()
        thread.join()
    assert not runtime.record_lock.locked()


def test_a_child_keeps_the_locks_of_its_own_thread() -> None:
    def work() -> None:
        assert runtime.record_lock.is_held_here()
        assert not runtime.record_lock.take([])

    with recording(), drawing():
        assert _status_of_child(work) == 0
        assert runtime.record_lock.is_held_here()


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def test_workers_of_a_data_loader_are_forked_from_a_program_with_graphs(graphs: CpuGraphs) -> None:
    options = {"pygraph.patches": "none"}
    weight = torch.ones(4, 4, requires_grad=True)
    program = torch.compile(lambda x: torch.mm(x, weight).sum(), backend="pygraph", options=options)
    losses = []
    for _ in range(2):
        loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            loss = program(batch)
            loss.backward()
            losses.append(loss.item())
    assert losses == 2 * [16.0, 80.0, 144.0, 208.0]
    assert {info.kind for info in graphs.infos} == {"forward", "backward"}
