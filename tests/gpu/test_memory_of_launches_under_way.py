"""Blocks that are dropped, and graphs that end, while the GPU still works for them."""

from __future__ import annotations

import ctypes
import functools
import gc
import signal
import threading
import time

import pytest
import torch

import pygraph
from pygraph.gpu import allocator

from .held_blocks import (
    MIB,
    PART,
    WARM_UP,
    at_the_same_time,
    graphs,
    holding,
    is_held,
    make_input,
    other_step,
    step,
)
from .support import assert_same, watchdog

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("holds_memory")


_CYCLES = 60_000_000  # some 30 ms of an H200


def test_a_drop_while_a_host_callback_is_pending() -> None:
    graphed, x = holding()
    expected = step(x)
    torch.cuda.synchronize()
    may_end, has_begun = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        has_begun.set()
        may_end.wait(20)

    kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback)
    driver = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.current_stream()
    with watchdog(60):
        assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), kept, None) == 0
        results = [graphed(x) for _ in range(3)]
        assert has_begun.wait(20)
        allocator.drop_blocks(0)
        others = [torch.full((PART // 4,), float(i), device="cuda") for i in range(8)]
        results.append(graphed(x))
        may_end.set()
        torch.cuda.synchronize()
    for result in results:
        assert_same(result, expected)
    assert all((other == i).all() for i, other in enumerate(others))
    assert not is_held()


def test_a_drop_while_a_launch_waits_on_another_stream() -> None:
    """What is freed belongs to the stream of the launch until that is done with it."""
    before = torch.cuda.memory_allocated()
    expected: torch.Tensor | None = None
    home, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(home):
        graphed, x = holding()
        expected = step(x)
    torch.cuda.synchronize()
    for i in range(3):
        with torch.cuda.stream(home):
            torch.cuda._sleep(_CYCLES)
            result = graphed(x)
        if i == 0:
            at_the_same_time(lambda: allocator.drop_blocks(0))
        with torch.cuda.stream(side):
            others = [torch.full((PART // 4,), 7.0, device="cuda") for _ in range(8)]
            there = graphed(x)
            assert all((other == 7).all() for other in others)
        torch.cuda.synchronize()
        assert_same(result, expected)
        assert_same(there, expected)
    del others, result, there, graphed, x, expected
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < PART


def test_a_drop_while_a_launch_waits_then_the_memory_is_used_on_its_stream() -> None:
    graphed, x = holding()
    expected = step(x)
    torch.cuda._sleep(_CYCLES)
    results = [graphed(x) for _ in range(3)]
    allocator.drop_blocks(0)
    others = [torch.full((PART // 4,), 3.0, device="cuda") for _ in range(9)]
    results.append(graphed(x))
    for result in results:
        assert_same(result, expected)
    assert all((other == 3).all() for other in others)


def test_a_callable_that_ends_while_its_launch_waits() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)
    torch.cuda._sleep(_CYCLES)
    result = graphed(x)
    del graphed
    pygraph.reset()
    gc.collect()
    others = [torch.full((PART // 4,), 5.0, device="cuda") for _ in range(9)]
    assert_same(result, expected)
    assert all((other == 5).all() for other in others)
    del others, x
    assert torch.cuda.memory_allocated() - before < PART


def _replay_while_blocks_come_and_go() -> None:
    graphed, x = holding()
    expected, size = step(x), torch.cuda.memory_allocated()
    (graph,) = graphs()
    torch.cuda.synchronize()
    stop = threading.Event()

    def replay(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            try:
                for _ in range(60):
                    other = torch.full((PART // 4,), 2.0, device="cuda")
                    assert torch.equal(graphed(x), expected) and bool((other == 2).all())
            finally:
                if stream == torch.cuda.default_stream():
                    stop.set()

    def change() -> None:
        while not stop.is_set():
            graph.hold_blocks(1 << 40, 1 << 50)
            allocator.defragment_workspace(graph)
            allocator.drop_blocks(0)

    streams = [torch.cuda.default_stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    at_the_same_time(change, *(functools.partial(replay, stream) for stream in streams))
    allocator.drop_blocks(0)
    assert not is_held()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= size


def test_blocks_that_are_held_and_dropped_while_others_replay() -> None:
    """As selections of further graphs do while memory is short now and then."""
    before = torch.cuda.memory_allocated()
    _replay_while_blocks_come_and_go()
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < MIB


class _Interrupt(Exception):
    pass


def test_interrupts() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)
    (graph,) = graphs()

    def handler(*_: object) -> None:
        raise _Interrupt

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(60):
            end = time.monotonic() + 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0001 * (i % 17))
                for k in range(200):
                    graphed(x)
                    if k % 10 == 0:
                        allocator.drop_blocks(0)
                        graph.hold_blocks(1 << 40, 1 << 50)
                while time.monotonic() < end:
                    time.sleep(0.001)
            except _Interrupt:
                pass
            assert_same(graphed(x), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    del graphed, x, expected, graph
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_drop_on_another_device_while_its_launch_waits() -> None:
    graphed = pygraph.graph(other_step, select="always", audit=False)
    x = make_input("cuda:1")
    for _ in range(WARM_UP):
        graphed(x)
    expected = other_step(x)
    with torch.cuda.device(1):
        torch.cuda._sleep(_CYCLES)
    result = graphed(x)
    at_the_same_time(lambda: allocator.drop_blocks(1))
    others = [torch.full((PART // 4,), 3.0, device="cuda:1") for _ in range(9)]
    assert torch.cuda.current_device() == 0
    assert_same(result, expected)
    assert all((other == 3).all() for other in others)
    assert_same(graphed(x), expected)
