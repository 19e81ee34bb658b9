"""The proof that a graph may be patched on the device, with a made-up graph on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pygraph.gpu import allocator
from pygraph.partition import device_patching
from pygraph.partition.signature import Entry

from .fake_engine import FakeGraph


class _Generator:
    def __init__(self) -> None:
        self.offset = 8

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class _Graph(FakeGraph):
    """Doubles its first argument, adds a random number, and counts in its second."""

    def __init__(self, generator: _Generator) -> None:
        super().__init__(self._double)
        self._generator = generator
        self.addresses: list[int] = []
        self.wrong = 0.0  # what replays that are patched on the device are off by
        self.error_on_device: Exception | None = None  # of those
        self.chance: Sequence[float] = (0.0,) * 4  # of each replay's last result

    def _double(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.is_patched_on_device and self.error_on_device is not None:
            raise self.error_on_device
        self.addresses.append(args[0].data_ptr())
        args[1] += 1
        noise = self._generator.offset
        self._generator.offset += 4
        off = self.wrong if self.is_patched_on_device else 0.0
        chance = self.chance[(len(self.addresses) - 1) % 4]
        return [args[0] * 2 + noise + off, torch.full((3,), chance)]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> _Generator:
    generator = _Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(allocator, "make_room", lambda wanted: True)
    return generator


def _prove(graph: _Graph, written: frozenset[int] = frozenset({1})) -> str:
    args = [torch.arange(4.0), torch.zeros(2)]
    failure = device_patching.prove(graph, args, [0, 1], written)
    assert torch.equal(args[1], torch.zeros(2))  # nothing of the call's own is touched
    return failure


def test_equal_results_at_other_addresses_are_a_proof(generator: _Generator) -> None:
    graph = _Graph(generator)
    assert _prove(graph) == ""
    assert graph.on_device == [False, False, True, True]
    assert all(a != b for a, b in zip(graph.addresses, graph.addresses[1:], strict=False))
    assert generator.offset == 8  # the call itself draws the same numbers
    assert graph.dropped == 0


def test_other_results_are_none(generator: _Generator) -> None:
    graph = _Graph(generator)
    graph.wrong = 1e-6
    assert "other results" in _prove(graph)
    assert graph.on_device[-1] is False and graph.dropped == 1
    assert generator.offset == 8


def test_what_is_written_is_compared(generator: _Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _Graph(generator)
    replay = graph.replay

    def spoil(args: list[torch.Tensor], gives_away: bool, poison: int) -> list[torch.Tensor]:
        outputs = list(replay(args, gives_away, poison))
        args[1] += graph.on_device[-1]
        return outputs

    monkeypatch.setattr(graph, "replay", spoil)
    assert "other results" in _prove(graph)
    assert _prove(graph, written=frozenset()) == ""


def test_what_is_left_to_chance_says_nothing(generator: _Generator) -> None:
    graph = _Graph(generator)
    graph.chance = (0.0, 1.0, 2.0, 3.0)
    assert _prove(graph) == ""
    graph = _Graph(generator)
    graph.chance = (0.0, 0.0, 0.0, 3.0)  # the host's runs agree
    assert "other results" in _prove(graph)


def test_results_that_are_all_left_to_chance_are_no_proof() -> None:
    assert not device_patching._agree([1], [2], [3], [4])
    assert device_patching._agree([], [], [], [])


@pytest.mark.parametrize("error", [RuntimeError("refused"), torch.OutOfMemoryError("no")])
def test_a_device_that_refuses_leaves_all_as_it_was(generator: _Generator, error: Exception) -> None:
    graph = _Graph(generator)
    graph.error_on_device = error
    assert _prove(graph) != ""
    assert graph.on_device[-1] is False and graph.dropped == 1
    assert generator.offset == 8


def test_nothing_is_tried_without_room(generator: _Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(allocator, "make_room", lambda size: wanted.append(size) or False)
    graph = _Graph(generator)
    graph.output_bytes, graph.block_bytes = 1000, 50
    assert "memory" in _prove(graph)
    assert graph.on_device == []
    assert wanted == [2 * (16 + 8 + 1000) + 50]


def test_nodes_are_counted_between_looks(generator: _Generator) -> None:
    graph = _Graph(generator)
    entry = Entry(graph=graph)
    graph.replays, graph.nodes_touched = 10, 500
    assert device_patching.count(entry) == 50
    assert device_patching.count(entry) == 0
    graph.replays, graph.nodes_touched = 30, 540
    assert device_patching.count(entry) == 2


def test_only_graphs_with_many_nodes_are_considered(generator: _Generator) -> None:
    graph = _Graph(generator)
    entry = Entry(graph=graph)
    graph.nodes_on_device = device_patching.MANY_NODES
    assert device_patching.is_open(entry)
    graph.nodes_on_device -= 1
    assert not device_patching.is_open(entry)
    graph.nodes_on_device += 1
    entry.has_tried_device = True
    assert not device_patching.is_open(entry)
