"""Giving memory back between phases, where PyTorch refuses."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("block_bytes", "free", "reserved", "share", "backend", "most_reserved"),
    [
        (1 * _GIB, 13 * _GIB, 0, 1.0, "native", 37.5 * _GIB),  # of 50 GiB
        (1 * _GIB, 12 * _GIB, 0, 1.0, "native", None),
        (1 * _GIB + 1, 50 * _GIB, 0, 1.0, "native", None),
        (_GIB // 2, 50 * _GIB, 10 * _GIB, 0.5, "native", 18.75 * _GIB),
        (_GIB // 2, 50 * _GIB, 20 * _GIB, 0.5, "native", None),
        (1 * _GIB, 50 * _GIB, 0, 0.5, "native", None),
        (0, 50 * _GIB, 0, 1.0, "native", None),
        (1, 50 * _GIB, 0, 1.0, "cudaMallocAsync", None),
    ],
)
def test_few_regions_are_kept_where_memory_is_plentiful(
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    free: int,
    reserved: int,
    share: float,
    backend: str,
    most_reserved: float | None,
) -> None:
    monkeypatch.setenv("PYGRAPH_KEEP_MEMORY", "1")
    devices: list[object] = []

    def tell(device: object, value: Any) -> Any:
        devices.append(device)
        return value

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: tell(d, (free, 50 * _GIB)))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda d: tell(d, share))
    monkeypatch.setattr(allocator, "reserved_bytes", lambda d: tell(d, reserved))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    graph = FakeGraph(block_bytes=block_bytes)
    allocator.keep_regions(graph, 3)
    assert graph.most_reserved == most_reserved
    assert set(devices) <= {3}  # the current one may have no context


def test_all_graphs_of_a_device_together_keep_few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_KEEP_MEMORY", "1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * _GIB, 50 * _GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(allocator, "reserved_bytes", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")

    def keeps(graph: FakeGraph, device: int = 5) -> bool:
        graph.most_reserved = None
        allocator.keep_regions(graph, device)
        return graph.most_reserved is not None

    first, second, third = (FakeGraph(block_bytes=int(0.4 * _GIB)) for _ in range(3))
    assert keeps(first) and keeps(second) and not keeps(third)
    assert keeps(first)  # again
    assert keeps(third, device=6)
    del first
    gc.collect()
    assert keeps(third)


def test_a_refusal_to_keep_regions_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("no driver")

    monkeypatch.setenv("PYGRAPH_KEEP_MEMORY", "1")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", refuse)
    graph = FakeGraph(block_bytes=1)
    allocator.keep_regions(graph, 0)
    assert graph.most_reserved is None


@pytest.mark.parametrize("value", [None, "0", ""])
def test_regions_are_kept_only_if_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("PYGRAPH_KEEP_MEMORY", raising=False)
    else:
        monkeypatch.setenv("PYGRAPH_KEEP_MEMORY", value)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: pytest.fail("asked"))
    allocator.keep_regions(FakeGraph(block_bytes=1), 0)


def test_what_graphs_keep_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    engine = SimpleNamespace(free_kept_regions=lambda: calls.append("kept"))
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    allocator.give_back_all()
    assert calls == ["kept", "cache"]
