"""Giving memory back between phases, where PyTorch refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator

from .contexts import during
from .fake_engine import FakeGraph


def test_a_refusal_is_no_error_and_little_memory_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    allocator.give_back(after=1 << 20)
    assert calls == []
    allocator.give_back(after=1 << 30)
    assert calls == [1]


def test_a_workspace_that_finds_no_place_is_no_error() -> None:
    class Refusing(FakeGraph):
        def defragment_workspace(self) -> None:
            super().defragment_workspace()
            raise torch.OutOfMemoryError("no room")

    graph = Refusing()
    allocator.defragment_workspace(graph)
    assert graph.settled == 1


@pytest.mark.parametrize(
    ("wanted", "free", "share", "gives_back"),
    [
        (3 << 30, 4 << 30, 1.0, False),
        (5 << 30, 4 << 30, 1.0, True),
        (3 << 30, 4 << 30, 0.5, False),  # 8 of 16 GiB, of which 4 are taken
        (3 << 30, 4 << 30, 0.4, True),
        (1 << 20, 0, 1.0, False),  # little
    ],
)
def test_room_is_made_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, wanted: int, free: int, share: float, gives_back: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 16 << 30))
    monkeypatch.setattr(allocator, "reserved_bytes", lambda device=None: 4 << 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: share)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    assert allocator.make_room(wanted) == (not gives_back)
    assert bool(calls) == gives_back


def test_room_that_was_made_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[-1], 16 << 30))
    monkeypatch.setattr(allocator, "reserved_bytes", lambda device=None: 4 << 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(8 << 30))
    assert allocator.make_room(5 << 30)
    assert not allocator.make_room(12 << 30)


def test_reserved_bytes_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, dict[str, int]]] = {}
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional: 0)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: found, raising=False)
    assert allocator.reserved_bytes() == torch.cuda.memory_reserved() == 0
    found["reserved_bytes"] = {"all": {"current": 5, "peak": 7}, "small_pool": {"current": 1}}
    assert allocator.reserved_bytes() == torch.cuda.memory_reserved() == 5


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_stand_ins_are_not_limited_and_the_limit_comes_back(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    shares = [share]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: shares[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with pytest.raises(ValueError, match="refused"), during(allocator.lift_limit):
        assert shares[-1] == 1.0
        raise ValueError("refused")
    assert shares == ([0.4, 1.0, 0.4] if share < 1 else [1.0])


def test_the_processs_limit_survives_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.4]

    def set_share(share: float) -> None:
        shares.append(share)
        if share == 1.0:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: shares[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_share)
    with pytest.raises(KeyboardInterrupt), during(allocator.lift_limit):
        pass
    assert shares[-1] == 0.4


@pytest.mark.parametrize(
    ("free", "is_scarce"), [(15 << 26, True), (16 << 26, False), (1 << 40, False), (None, True)]
)
def test_memory_is_scarce_for_more_than_a_part_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, free: int | None, is_scarce: bool
) -> None:
    def free_bytes() -> float:
        if free is None:
            raise RuntimeError("the device cannot be asked")
        return free

    monkeypatch.setattr(allocator, "free_bytes", free_bytes)
    assert allocator.is_scarce(1 << 26) is is_scarce
    assert not allocator.is_scarce(allocator.MUCH)


_GIB = 1 << 30


def _device_of(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    reserved: float = 0,
    share: float = 1.0,
    backend: str = "native",
) -> None:
    """Device 3 has 50 GiB. The current one may have no context."""

    def told(value: object, device: int) -> object:
        assert device == 3
        return value

    monkeypatch.delenv("PYGRAPH_HOLD_MEMORY", raising=False)
    memory = (int(free), 50 * _GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: told(memory, device))
    fraction = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, fraction, lambda device: told(share, device))
    monkeypatch.setattr(allocator, "reserved_bytes", lambda device: told(int(reserved), device))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)


@pytest.mark.parametrize(
    ("free", "reserved", "share", "most", "most_reserved"),
    [
        (50, 0, 1.0, 1.0, 37.5),
        (14, 0, 1.0, 1.0, 1.5),  # others have the rest
        (40, 10, 1.0, 1.0, 37.5),
        (13.5, 36.5, 1.0, 1.0, 37.5),
        (40, 10, 0.5, 0.5, 18.75),
        (50, 17, 0.5, 0.5, 18.75),
    ],
)
def test_few_blocks_are_held_where_memory_is_plentiful(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    reserved: float,
    share: float,
    most: float,
    most_reserved: float,
) -> None:
    _device_of(monkeypatch, free * _GIB, reserved * _GIB, share)
    graph = FakeGraph(block_bytes=_GIB)
    allocator.hold_blocks(graph, 3)
    assert graph.limits == (int(most * _GIB), int(most_reserved * _GIB))


@pytest.mark.parametrize(
    ("block_bytes", "free", "reserved", "share", "backend"),
    [
        (1.0, 13.4, 0, 1.0, "native"),  # less than a quarter would be left
        (1.0, 33, 17.8, 0.5, "native"),
        (0, 50, 0, 1.0, "native"),
        (1.0, 50, 0, 1.0, "cudaMallocAsync"),
    ],
)
def test_no_blocks_are_held_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: float,
    free: float,
    reserved: float,
    share: float,
    backend: str,
) -> None:
    _device_of(monkeypatch, free * _GIB, reserved * _GIB, share, backend)
    graph = FakeGraph(block_bytes=int(block_bytes * _GIB))
    allocator.hold_blocks(graph, 3)
    assert graph.limits is None


def test_a_refusal_to_hold_blocks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("no driver")

    _device_of(monkeypatch, 50 * _GIB)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", refuse)
    graph = FakeGraph(block_bytes=1)
    allocator.hold_blocks(graph, 3)
    assert graph.limits is None


def test_blocks_are_not_held_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _device_of(monkeypatch, 50 * _GIB)
    monkeypatch.setenv("PYGRAPH_HOLD_MEMORY", "0")
    graph = FakeGraph(block_bytes=1)
    allocator.hold_blocks(graph, 3)
    assert graph.limits is None


def test_a_failure_to_drop_blocks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []

    def drop_blocks(device: int) -> None:
        dropped.append(device)
        raise RuntimeError("no driver")

    monkeypatch.setattr(runtime, "engine", lambda: SimpleNamespace(drop_blocks=drop_blocks))
    allocator.drop_blocks(3)
    assert dropped == [3]
