"""Graphed callables inside of differentiated programs, without a GPU.

A partition here does what the engine's does, for each layout of its inputs: the first call runs as it
is; the second one is recorded, twice, replayed on clones, and compared with the call; so are two more;
later ones are replays, which run no Python (frozen_world.py). What raises in a recording keeps the
layout uncaptured, and so does memory that is made in a recording and outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph import runtime, signal_exceptions
from pygraph.callables import backward_function, variant
from pygraph.gpu.clones import clone_shared_storages
from pygraph.partition.signature import Entry, PartitionInfo

from . import graphed_world
from .contexts import comparing, recorded
from .frozen_world import _Tape, with_other_numbers
from .graphed_world import Replaying, assert_equal, version

_COMPARED = 4  # the last call that is compared


class _Layout:
    """What is known of calls with inputs of one layout."""

    def __init__(self) -> None:
        self.calls = 0
        self.tape: _Tape | None = None
        self.outputs: list[Any] = []
        self.is_refused = False


class Partition(Replaying):
    """See the module."""

    def __init__(self, function: Any, info: PartitionInfo, options: Any) -> None:
        super().__init__(function, info, options)
        self.layouts: dict[Any, _Layout] = {}

    def reset(self) -> None:
        self.layouts.clear()

    def callable(self, inputs: list[Any]) -> Sequence[Any]:
        key = tuple(map(_layout_of, inputs))
        layout = self.layouts.setdefault(key, _Layout())
        layout.calls += 1
        self.calls += 1
        if layout.calls == 1 or layout.is_refused or runtime._pauses:
            return self.function(inputs)
        if layout.tape is None:
            try:
                self._record(layout, inputs)
            except Exception as error:
                signal_exceptions.pass_on(error)
                layout.is_refused = True
                refused = self.entries[key] = Entry()  # type: ignore[index]
                refused.refuse(runtime.first_line(error), 0)
                return self.function(inputs)
        given = list(inputs)
        inputs.clear()
        if layout.calls > _COMPARED:
            self.replays += 1
            return _replay(layout, given)
        before = _clones(given)
        replayed = _replay(layout, before)
        return self.verify(given, before, replayed)

    def _record(self, layout: _Layout, inputs: list[Any]) -> None:
        stand_ins = _clones(inputs)
        with recorded(0):
            held = self._held_after(lambda: self.function.rehearse(stand_ins))
        if held:
            raise RuntimeError(f"{held[0]} keeps memory that it allocates in a recording")
        stand_ins = with_other_numbers(_clones(inputs))
        tape = _Tape(stand_ins)
        with recorded(1), tape:
            outputs = self.function.rehearse(stand_ins)
        layout.outputs = [tape._refer(x) for x in outputs]
        layout.tape = tape

    def _held_after(self, run: Callable[[], Any]) -> list[str]:
        observer = runtime.engine().CallObserver(lambda name: None)
        try:
            run()
        finally:
            observer.end()
        return list(observer.makers_of_survivors([], torch.device("cpu")))

    def verify(self, inputs: list[Any], before: list[Any], replayed: Sequence[Any]) -> Sequence[Any]:
        kept = list(inputs)
        versions = [version(x) for x in kept]
        with comparing():
            outputs = self.function(inputs)
        pairs = enumerate(zip(kept, versions, strict=True))
        self.written |= {i for i, (a, old) in pairs if version(a) != old}
        assert_equal([*outputs, *kept], [*replayed, *before])
        return outputs


def _replay(layout: _Layout, inputs: list[Any]) -> list[Any]:
    """Its outputs are no views, as those of the engine."""
    assert layout.tape is not None
    found = layout.tape.replay(inputs, layout.outputs)
    known = {id(x): x.data for x in found if isinstance(x, torch.Tensor)}
    return [known.get(id(x), x) for x in found]


def _layout_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):  # a number that is followed
        return type(value)
    return value.shape, value.stride(), value.dtype


def _clones(inputs: list[Any]) -> list[Any]:
    return clone_shared_storages(inputs, list(range(len(inputs))))


def install(monkeypatch: pytest.MonkeyPatch) -> type[Replaying]:
    graphed_world.install(monkeypatch)
    monkeypatch.setattr(variant, "Partition", Partition)
    monkeypatch.setattr(backward_function, "Partition", Partition)
    return Replaying
