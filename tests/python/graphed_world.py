"""Graphed callables without a GPU: tensors on the CPU, and a partition that replays by Python.

In place of a partition of the engine's is one that does what that does, in the same order of calls: it
runs the function on the call's own inputs, records it twice on clones, compares a replay on clones with
the call, and then replays. A replay is the function as well, rehearsed on the inputs: so it writes to
the memory that it is given, and leaves the host alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.callables import adapted_optimizers, optimizer_forms, trained, variant
from pygraph.callables.host import probes
from pygraph.callables.step_function import StepFunction
from pygraph.gpu.clones import clone_shared_storages
from pygraph.partition.signature import Entry, PartitionInfo

from .contexts import comparing, recorded


class Replaying:
    """A partition whose third call and all later ones are replays."""

    all: list[Replaying]

    def __init__(self, function: StepFunction, info: PartitionInfo, options: Any) -> None:
        self.function = function
        self.info = info
        self.options = options
        self.entries = {b"": Entry()}
        self.calls = self.replays = 0
        self.written: frozenset[int] = frozenset()
        self.all.append(self)

    def reset(self) -> None:
        self.calls = 0

    def callable(self, inputs: list[Any]) -> Sequence[Any]:
        self.calls += 1
        if self.calls == 1:
            return self.function(inputs)
        if self.calls > 2:
            self.replays += 1
            given = list(inputs)
            inputs.clear()
            return self.function.rehearse(given)
        every = range(len(inputs))
        before = clone_shared_storages(inputs, list(every))
        for index in range(2):
            with recorded(index):
                self.function.rehearse(clone_shared_storages(inputs, list(every)))
        return self.verify(inputs, before, self.function.rehearse(before))

    def replay(self, inputs: list[Any]) -> Sequence[Any] | None:
        return self.callable(inputs) if self.calls > 1 else None

    def verify(self, inputs: list[Any], before: list[Any], replayed: Sequence[Any]) -> Sequence[Any]:
        """Makes the call, and compares a replay on ``before`` with it."""
        kept = list(inputs)
        with comparing():
            outputs = self.function(inputs)
        self.written = frozenset(
            i for i, (a, b) in enumerate(zip(kept, before, strict=True)) if version(a) != version(b)
        )
        assert_equal([*outputs, *kept], [*replayed, *before])
        return outputs


def version(value: Any) -> int:
    """Numbers, and tensors of inference mode, have none."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return -1
    return value._version


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b.reshape(-1)[: a.numel()].reshape(a.shape)), "compared: differs"
        else:
            assert a == b, "compared: differs"


def partitions_of(install: Callable[[], type[Replaying]]) -> Iterator[type[Replaying]]:
    """For a fixture: only those that are made meanwhile are known meanwhile."""
    known = set(runtime.partitions)
    runtime.partitions.clear()
    yield install()
    runtime.partitions.clear()
    for partition in known:
        runtime.partitions.add(partition)


def _device_of(tensors: list[torch.Tensor]) -> torch.device | None:
    return tensors[0].device if tensors else None


def _allow_capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of optimizers that PyTorch leaves to GPUs, on the CPU."""
    monkeypatch.setattr(optimizer_forms, "can_be_captured_on", lambda device: True)
    for name in ("adam", "adamax", "nadam", "radam", "rmsprop", "rprop", "asgd", "adadelta"):
        module = sys.modules[f"torch.optim.{name}"]
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


def install(monkeypatch: pytest.MonkeyPatch) -> type[Replaying]:
    """Returns the class of the partitions, whose ``all`` has those that are made."""
    monkeypatch.setattr(Replaying, "all", [], raising=False)
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(variant, "Partition", Replaying)
    for module in (variant, adapted_optimizers, trained):
        monkeypatch.setattr(module, "device_of", _device_of)
    monkeypatch.setattr(probes, "is_on_host", lambda tensor: False)
    _allow_capturable(monkeypatch)
    return Replaying
