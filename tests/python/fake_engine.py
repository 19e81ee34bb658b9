"""The one fake of the engine's CapturedGraph (_engine.pyi); test_engine_stub.py compares the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pygraph import _engine

    Base = _engine.CapturedGraph
else:
    Base = object

Function = Callable[[list[Any]], Sequence[Any]]


def add_one(args: list[Any]) -> list[Any]:
    return [args[0] + 1]


class FakeGraph(Base):
    """A captured graph that runs a function on the CPU, and counts what it is asked for.

    Every member of the engine's is here and can be set. What tests set and read besides:

    function: what a replay runs. error: what a replay raises instead.
    poisons, gave_away: of each replay. generator: of the last one.
    released, settled: how often ``release_workspace`` and ``defragment_workspace`` were called.
    limits: of the last call of ``hold_blocks``, or None.
    """

    name = ""
    failure = ""
    replays = 0
    nodes_touched = 0
    nodes = 3
    inputs = 1
    outputs = 1
    relocations = 4
    symbols = 2
    unexplained_words = 0
    output_bytes = 0
    workspace_bytes = 0
    block_bytes = 0
    foreign_memory: list[tuple[int, str]] = []  # noqa: RUF012
    nodes_with_known_accesses = 0
    lanes = 1
    donated_replays = 0
    calls_elsewhere = 0
    donated: list[int] = []  # noqa: RUF012
    random_arguments: list[int] = []  # noqa: RUF012
    audit_at: int | None = None

    def __init__(self, function: Function = add_one, **members: Any) -> None:
        self.function = function
        self.error: Exception | None = None
        self.poisons: list[int] = []
        self.gave_away: list[bool] = []
        self.generator: Any = None
        self.released = self.settled = 0
        self.limits: tuple[int, int] | None = None
        for name, value in members.items():
            assert hasattr(FakeGraph, name), name
            setattr(self, name, value)

    @property
    def is_audit_due(self) -> bool:
        return self.audit_at is not None and self.replays >= self.audit_at

    def matches(self, arguments: list[Any]) -> bool:
        return True

    def replay(
        self,
        arguments: list[Any],
        gives_away: bool,
        poison: int = -1,
        generator: torch.Generator | None = None,
    ) -> Sequence[Any]:
        if self.error is not None:
            raise self.error
        self.replays += 1
        self.poisons.append(poison)
        self.gave_away.append(gives_away)
        self.generator = generator
        return self.function(arguments)

    def gives_away(self, arguments: list[Any]) -> bool:
        return True

    def join_saved(self, outputs: list[Any]) -> None: ...

    def release_workspace(self) -> None:
        self.released += 1

    def defragment_workspace(self) -> None:
        self.settled += 1

    def hold_blocks(self, most: int, most_reserved: int) -> None:
        self.limits = (most, most_reserved)

    def link_map(self) -> str:
        return ""


class StandIns:
    """The memory that a recording was made with, which replays leave alone, or write. As the engine's,
    it is filled once, and again after it was found written."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # that poisoning it raises
        self.checks = 0
        self._is_filled = self._is_written = False

    def poison(self) -> None:
        if self.error is not None:
            raise self.error
        if not self._is_filled:
            self._is_filled, self._is_written = True, False

    def write(self) -> None:
        self._is_written = True

    def untouched(self) -> bool:
        self.checks += 1
        self._is_filled &= not self._is_written
        return not self._is_written


class Writing(FakeGraph):
    """A graph of which one replay, by its number, writes to the memory that it was recorded with."""

    def __init__(self, pair: StandIns, number: int = 1, **members: Any) -> None:
        super().__init__(self._write, **members)
        self._pair, self._number = pair, number

    def _write(self, args: list[Any]) -> list[Any]:
        if self.replays == self._number:
            self._pair.write()
        return add_one(args)
