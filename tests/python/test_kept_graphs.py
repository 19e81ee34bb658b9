"""Which of the graphs that are kept of a callable a backward runs: streams that are made up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from pygraph import runtime
from pygraph.callables import kept_graph
from pygraph.callables.kept_graph import KeptGraph, Stream, Structure

from .contexts import recording

_RECORDINGS, _DEFAULT, _POOLED, _OWN = (
    Stream(8, False),
    Stream(0, True),
    Stream(16, True),
    Stream(24, False),
)
_locked: list[bool] = []  # in backwards: whether a thread could not begin to record


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _locked.append(runtime.record_lock.locked())
        return gradient * ctx.factor, None


def _structure(**graphs: Stream) -> Structure:
    """With graphs of the streams; that of stream n multiplies by n + 1."""
    structure = Structure([], 0, [0], [0], {}, {}, [], True)
    for stream in graphs.values():
        leaf = torch.zeros(3, requires_grad=True)
        edges = [get_gradient_edge(_Times.apply(leaf, stream.handle + 1))]
        structure.graphs[stream.handle] = KeptGraph(edges, [get_gradient_edge(leaf)], {}, stream)
    return structure


def _stream_of_backward(monkeypatch: pytest.MonkeyPatch, structure: Structure, current: Stream) -> int:
    """The handle of the one whose graph a backward on the current stream runs."""
    monkeypatch.setattr(kept_graph, "stream_of", lambda device: current)
    _locked.clear()
    (found,) = kept_graph.run(structure, {}, [torch.ones(3)], [True], torch.device("cpu"), {})
    assert found is not None
    return int(found[0]) - 1


def test_a_stream_runs_its_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = _structure(recordings=_RECORDINGS, default=_DEFAULT, own=_OWN)
    for stream in (_RECORDINGS, _DEFAULT, _OWN):
        assert _stream_of_backward(monkeypatch, structure, stream) == stream.handle
        assert _locked == [False]


@pytest.mark.parametrize("lasting", [_DEFAULT, _POOLED])
def test_a_stream_without_a_graph_does_not_run_that_of_recordings(
    monkeypatch: pytest.MonkeyPatch, lasting: Stream
) -> None:
    """It would become a part of what another thread records."""
    structure = _structure(recordings=_RECORDINGS, lasting=lasting, own=_OWN)
    with recording():
        assert _stream_of_backward(monkeypatch, structure, Stream(32, False)) == lasting.handle


def test_nobody_records_while_the_graph_of_recordings_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    structure = _structure(recordings=_RECORDINGS, own=_OWN)  # which may be gone
    found: list[int] = []

    def work() -> None:
        found.append(_stream_of_backward(monkeypatch, structure, _POOLED))

    thread = threading.Thread(target=work)
    with recording():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and _locked == []
    thread.join(60)
    assert found == [_RECORDINGS.handle] and _locked == [True]
    assert not runtime.record_lock.locked()


def test_a_recording_that_waits_for_a_backward_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "LONGEST_CAPTURE", 0.05)
    structure = _structure(recordings=_RECORDINGS)
    thread = threading.Thread(target=_stream_of_backward, args=(monkeypatch, structure, _POOLED))
    with recording():
        thread.start()
        thread.join(60)
        assert len(_locked) == 1
