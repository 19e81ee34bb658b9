"""The interface of a partition to the modules that handle its signatures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pygraph.partition.signature import Entry, PartitionInfo

if TYPE_CHECKING:
    from pygraph import _engine


class Host(Protocol):
    """A partition, as pipeline.py, selector.py and audit.py see it.

    callable: the engine's replacement of the function; it owns the graphs in use.
    entries: by signature. A reset empties the dictionary.
    """

    info: PartitionInfo
    callable: _engine.GraphedCallable
    entries: dict[bytes, Entry]

    @property
    def written(self) -> frozenset[int]:
        """Positions of inputs that the function may write, in any signature that was recorded."""

    @property
    def draws(self) -> bool:
        """Whether the function was seen to use the device's default generator."""

    @property
    def has_run_here(self) -> bool:
        """Whether this thread has run the function before."""

    def uncaptured(self, args: list[Any]) -> Sequence[Any]:
        """Runs the function itself. Consumes ``args``."""

    def install(self, graph: _engine.CapturedGraph, calls_per_recheck: int) -> None:
        """Lets the engine replay the graph; after so many calls it asks again (0: never)."""

    def record_anew(self, entry: Entry, may_donate: bool) -> None:
        """Drops a graph, so that later calls record the signature again. may_donate: whether its next
        graph may use the memory of arguments that calls give away. The record lock is held."""

    def note_trial(self, entry: Entry) -> None:
        """The entry's graph is on trial: drops the graphs of older trials where there are many."""

    def refuse(
        self,
        entry: Entry,
        reason: str,
        level: int = logging.WARNING,
        calls_until_retry: int | None = None,
    ) -> None:
        """Leaves the signature uncaptured: for good, or for many calls if memory was short.
        calls_until_retry: how many, where another reason may pass."""
