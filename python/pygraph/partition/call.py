"""One call of a partition function, with all that is needed to record it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.options import Options
from pygraph.partition.signature import PartitionInfo, Pending

Function = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class SideEffects:
    """What a function does besides returning results, as far as it is known.

    mutated: positions of inputs that it may write: after a recording of their signature, all of them.
    Before, those that the compiler names and those that a watched call has changed.
    """

    mutated: frozenset[int] = frozenset()
    draws: bool = False  # whether it uses the device's default generator


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is to be made, and recorded.

    function: what is recorded. uncaptured: makes the call without a graph. Both consume ``args``.
    may_donate: whether the graph may use the memory of arguments that the call gives away.
    pending: an earlier attempt that this call is to go on with.
    """

    function: Function
    uncaptured: Function
    args: list[Any]
    info: PartitionInfo
    options: Options
    effects: SideEffects = SideEffects()
    may_donate: bool = True
    pending: Pending | None = None
