"""What a call writes is seen, though what it frees on its way is not kept for that."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.record import side_effects as watch_module
from pygraph.record.side_effects import Watch


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as the GPU's, and each but the first as given away."""
    engine = types.SimpleNamespace(
        memory_of=runtime.engine().memory_of,
        FreeObserver=runtime.engine().FreeObserver,
        given_away=lambda args: [types.SimpleNamespace(positions=[i]) for i in range(1, len(args))],
    )
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    generator = types.SimpleNamespace(get_offset=lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])


def _mutated(function: Callable[[list[Any]], Sequence[Any]]) -> frozenset[int]:
    args = [torch.arange(8.0) + i for i in range(4)]
    watch = Watch(args, 0, [])
    results = function(args)
    found = watch.mutated()
    assert not args
    for result in results:  # the memory is its allocator's again
        result.resize_(1000).fill_(1)
    return found


def test_what_is_freed_on_the_way_is_looked_at_before(given: None) -> None:
    def function(args: list[Any]) -> Sequence[Any]:
        kept, a, b, _ = args
        args.clear()
        kept += 1
        b.mul_(2)
        del b
        a[3] = 7
        result = a.view(2, 4)
        del a
        return [result]

    assert _mutated(function) == {0, 1, 2}


def test_a_write_through_another_name_is_seen(given: None) -> None:
    def function(args: list[Any]) -> Sequence[Any]:
        view = args[2][4:]
        args.clear()
        view.zero_()
        return []

    assert _mutated(function) == {2}


def test_what_is_only_read_was_not_written(given: None) -> None:
    def function(args: list[Any]) -> Sequence[Any]:
        total = sum(args)
        args.clear()
        return [total]

    assert _mutated(function) == frozenset()


def test_nothing_is_kept_alive(given: None) -> None:
    args = [torch.arange(8.0) + i for i in range(3)]
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in args]
    watch = Watch(args, 0, [])
    args.clear()
    assert [storage() is None for storage in gone] == [False, True, True]
    assert watch.mutated() == frozenset()


def test_memory_that_could_not_be_looked_at_counts_as_written(
    given: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = watch_module.fingerprint

    def no_room(memory: torch.Tensor) -> torch.Tensor:
        if memory.view(torch.float32)[0] == 2:
            raise torch.OutOfMemoryError
        return fingerprint(memory)

    def function(args: list[Any]) -> Sequence[Any]:
        monkeypatch.setattr(watch_module, "fingerprint", no_room)
        args.clear()
        return []

    assert _mutated(function) == {2}


def test_a_call_that_raises_leaves_memory_as_it_was(given: None) -> None:
    args = [torch.arange(8.0) + i for i in range(3)]
    watch = Watch(args, 0, [])
    looks = len(watch._after)
    del watch
    args[1].resize_(1000).zero_()
    assert looks == 0 and args[2].tolist() == [i + 2.0 for i in range(8)]


class TestFreeObserver:
    def test_a_tensor_is_looked_at_once(self) -> None:
        seen: list[tuple[int, list[int]]] = []
        tensors = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)]
        observer = runtime.engine().FreeObserver(tensors, lambda i, m: seen.append((i, m.tolist())))
        del tensors[0]
        assert seen == [(0, [1, 2])]
        observer.end()
        observer.end()
        tensors.clear()
        assert seen == [(0, [1, 2]), (1, [3])]

    def test_an_error_in_a_look_is_shown_and_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[str] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda event: shown.append(str(event.exc_value)))

        def fails(i: int, memory: torch.Tensor) -> None:
            raise ValueError("no look")

        tensors = [torch.ones(3)]
        observer = runtime.engine().FreeObserver(tensors, fails)
        with pytest.raises(KeyError, match="another"):
            try:
                raise KeyError("another")
            finally:
                tensors.clear()
        observer.end()
        assert shown == ["no look"]

    def test_one_storage_may_be_given_twice(self) -> None:
        seen: list[int] = []
        tensor = torch.ones(4)
        observer = runtime.engine().FreeObserver(
            [tensor, tensor[1:]], lambda i, m: seen.append(m.numel())
        )
        observer.end()
        assert seen == [16, 16]
        tensor.resize_(100).zero_()
        assert len(seen) == 2
