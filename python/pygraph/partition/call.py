"""One call of a partition function, with the information that a recording needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.options import Options
from pygraph.partition.signature import PartitionInfo, Pending
from pygraph.select.trial import Decision

Function = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class SideEffects:
    """The known side effects of a function.

    mutated: positions of inputs that it may write. Complete after a recording of the signature; before,
    those that the compiler names, and those that a watched call has changed.
    """

    mutated: frozenset[int] = frozenset()
    draws: bool = False  # whether it uses the device's default generator


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to be made and recorded.

    function: the function to record. uncaptured: makes the call without a graph. Both consume ``args``.
    may_donate: whether the graph may use the memory of arguments that the call gives away.
    pending: an earlier attempt that this call continues.
    kept: the decision of an earlier process, on disk.
    is_new_thread: whether its thread has not run the function, and others may try if a capture raises.
    """

    function: Function
    uncaptured: Function
    args: list[Any]
    info: PartitionInfo
    options: Options
    effects: SideEffects = SideEffects()
    may_donate: bool = True
    pending: Pending | None = None
    kept: Decision | None = None
    is_new_thread: bool = False
