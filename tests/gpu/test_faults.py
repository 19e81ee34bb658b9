"""Faults: the result is right, the reason is kept, the memory is released, the process goes on."""

from __future__ import annotations

import ctypes
import glob
import logging
import os
from collections.abc import Callable

import pytest
import torch
from torch.library import custom_op

import pygraph
from pygraph import runtime

from .support import at_most, captured, compiled, randn, refusals

_calls = 0


@custom_op("pygraph_test::callback", mutates_args=())
def callback(x: torch.Tensor) -> torch.Tensor:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert _cudart().cudaLaunchHostFunc(stream, _do_nothing, None) == 0
    return x + 1


@custom_op("pygraph_test::external_event", mutates_args=())
def external_event(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.Event(external=True).record()
    return x + 1


@custom_op("pygraph_test::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    y = x + 1
    for _ in range(_calls):
        y = y + 0
    return y


for _op in (callback, external_event, unsteady):
    _op.register_fake(lambda x: torch.empty_like(x))


def _cudart() -> ctypes.CDLL:
    folder = os.path.dirname(torch.__file__)
    found = glob.glob(os.path.join(folder, "..", "nvidia", "**", "libcudart.so*"), recursive=True)
    return ctypes.CDLL(found[0] if found else "libcudart.so")


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _do_nothing(_: int) -> None:
    pass


def _expect_refusal(op: Callable[..., torch.Tensor], reason: str) -> None:
    model = compiled(lambda x: torch.relu(op(x * 2)) + 1)
    with torch.no_grad():
        for _ in range(4):
            x = randn(256)
            torch.testing.assert_close(model(x), torch.relu(x * 2 + 1) + 1)
    assert captured() == []
    assert any(reason in text for text in refusals()), pygraph.stats()


def _expect_healthy_process() -> None:
    """Random numbers, memory pools and new graphs all work after the fault."""
    torch.rand(4, device="cuda")
    model = compiled(lambda x: torch.nn.functional.dropout(x, 0.5) + 1)
    with torch.no_grad():
        for _ in range(4):
            model(randn(64))
    assert len(captured()) == 1


def test_a_host_callback() -> None:
    _expect_refusal(callback, "host callback")
    _expect_healthy_process()


def test_an_unknown_kind_of_node() -> None:
    _expect_refusal(external_event, "unknown kind")
    _expect_healthy_process()


def test_recordings_that_differ() -> None:
    _expect_refusal(unsteady, "the two recordings differ")
    _expect_healthy_process()


def test_allocation_refused_in_the_middle_of_a_capture() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        big = torch.relu(x @ x.t())
        return (big @ x).sum()

    model = compiled(function, options={"pygraph.record_capacity_gib": 1})
    x = randn(16384, 16)
    reserved = None
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(x), function(x), atol=10, rtol=0.05)
            if reserved is None:
                torch.cuda.synchronize()
                reserved = torch.cuda.memory_reserved()
    assert "recording ran out of memory" in refusals()
    assert torch.cuda.memory_reserved() <= reserved + (64 << 20)
    _expect_healthy_process()


def test_memory_that_a_replay_cannot_have_goes_uncaptured() -> None:
    model = compiled(lambda x: torch.relu(x) * 2)
    x = randn(1 << 20)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.empty_cache()
        with at_most(torch.cuda.memory_reserved()), pytest.raises(torch.OutOfMemoryError):
            hold = [model(x) for _ in range(4096)]
            del hold
        torch.testing.assert_close(model(x), torch.relu(x) * 2)


def test_a_graph_without_room_rests_and_comes_back() -> None:
    model = compiled(lambda x: torch.relu(x) * 2)
    x = randn(1 << 20)
    held: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.empty_cache()
        with at_most(torch.cuda.memory_reserved()):
            for _ in range(20):
                with pytest.raises(torch.OutOfMemoryError):
                    while True:
                        held.append(model(x))
                if refusals():
                    break
        assert refusals() == ["its replays ran out of memory"]
        held.clear()
        (graph,) = pygraph.stats()
        for _ in range(1000):
            torch.testing.assert_close(model(x), torch.relu(x) * 2)
        assert pygraph.stats()[0].replays == graph.replays
        torch.testing.assert_close(model(x), torch.relu(x) * 2)
        assert [row.replays for row in captured()] == [graph.replays + 1]


def test_a_missing_driver_means_plain_inductor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> int:
        raise runtime.engine().DriverError("the CUDA driver supports CUDA 12.0; PyGraph needs 12.4")

    monkeypatch.setattr(runtime.engine(), "driver_version", no_driver)
    runtime.unavailable_reason.cache_clear()
    runtime.notice_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="pygraph"), torch.no_grad():
            model = compiled(lambda x: x * 2 + 1)
            for _ in range(3):
                x = randn(8)
                torch.testing.assert_close(model(x), x * 2 + 1)
        assert pygraph.stats() == []
        assert "needs 12.4" in caplog.text
    finally:
        runtime.unavailable_reason.cache_clear()


def test_a_refusal_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pygraph"):
        _expect_refusal(callback, "host callback")
    assert caplog.text.count("host callback") == 1
