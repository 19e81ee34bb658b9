"""Calls of a signature that its graph cannot serve. They run uncaptured.

A backward's graph may use the memory of arguments that calls give away (bindings/donation.h). It is
verified in that form only, so it cannot serve a call that keeps them: somebody holds an activation, or
calls backward with ``retain_graph``.

Where such calls are no exception, the signature is recorded anew, for a graph that leaves its arguments
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pygraph import runtime
from pygraph.partition.signature import Entry

# So many calls that keep arguments in a row are no exception; with replays in between, where these are
# less than twice as many, some more.
_CALLS = 8


def gives_away(args: list[Any], positions: Sequence[int]) -> bool:
    """Whether nobody but the call holds the arguments at these positions."""
    if not positions:
        return True
    groups = runtime.engine().given_away(args)
    return {i for tensors in groups for i in tensors.positions}.issuperset(positions)


def renewed(entry: Entry) -> Entry | None:
    """Counts a call that keeps what the entry's graph uses. The entry to start over with, where it was
    one too many."""
    replays = entry.graph.replays
    entry.kept = max(0, entry.kept - (replays - entry.replays_until_kept)) + 2
    entry.replays_until_kept = replays
    return Entry(takes_memory=False) if entry.kept >= 2 * _CALLS else None
