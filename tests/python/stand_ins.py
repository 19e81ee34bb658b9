"""Stand-ins for what a GPU would give."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, PartitionInfo
from pygraph.verify import verify
from pygraph.verify.rehearsal import Rehearsal

INFO = PartitionInfo(
    name="forward",
    kind="forward",
    device=0,
    argument_count=1,
    counts_numbers=True,
    static=frozenset({0}),
    mutated=frozenset({1}),
    saved=(),
    on_host=frozenset(),
)


def verify_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs be verified on CPU tensors, without a stream to wait for or to load."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(verify, "keep_busy", lambda seconds: None)
    monkeypatch.setattr(verify, "disturb", lambda seconds: None)
    monkeypatch.setattr(verify, "wait_for_loads", lambda: None)
    monkeypatch.setattr(Rehearsal, "_results", lambda self, outputs, args: list(outputs))


class FakeWatch:
    """A watch of one call. It fails before the call, or after it where nothing is known."""

    def __init__(self, fails_before: bool, mutated: frozenset[int] | None = None) -> None:
        self._fails_before = fails_before
        self._mutated = mutated

    def __call__(self, args: list[object], device: int, undo: object) -> FakeWatch:
        if self._fails_before:
            raise torch.OutOfMemoryError("no room for a fingerprint")
        return self

    def mutated(self) -> frozenset[int]:
        if self._mutated is None:
            raise torch.OutOfMemoryError("no room for a fingerprint")
        return self._mutated

    def draws(self) -> bool:
        return False


class FullGpu:
    """Fails for want of memory, while what it has got so far is a local variable of its frame."""

    def __init__(self) -> None:
        self.calls = 0
        self._piece: weakref.ref[torch.Tensor] | None = None

    def fail(self, *args: object, **kwargs: object) -> None:
        self.calls += 1
        piece = torch.ones(1)
        self._piece = weakref.ref(piece)
        raise torch.OutOfMemoryError("no room")

    @property
    def is_free(self) -> bool:
        """Whether what it had got has been freed."""
        return self._piece is not None and self._piece() is None


def call(partition: Partition, number: object) -> Entry:
    """One call of a partition that has one signature, and returns its arguments."""
    assert partition._miss([number]) == [number]
    (entry,) = partition.entries.values()
    return entry
