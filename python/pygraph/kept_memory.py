"""Calls that keep what a graph uses the memory of: somebody holds an activation, or calls backward with
``retain_graph``.

A backward's graph may use the memory of arguments that calls give away (bindings/donation.h). It is
verified in that form only, so a call that keeps them runs uncaptured. Where such calls are no
exception, the signature is recorded anew, for a graph that leaves its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pygraph import runtime
from pygraph.entry import Entry

# So many calls that keep it in a row are no exception; with replays in between, where these are less
# than twice as many, some more.
_CALLS = 8


def gives_away(args: list[Any], positions: Sequence[int]) -> bool:
    """Whether nobody but the call holds the arguments at these positions."""
    if not positions:
        return True
    groups = runtime.engine().given_away(args)
    return {i for tensors in groups for i in tensors.positions}.issuperset(positions)


def is_kept_often(entry: Entry) -> bool:
    """Counts one call that keeps what the entry's graph uses; whether they are no exception."""
    replays = entry.graph.replays
    entry.kept = max(0, entry.kept - (replays - entry.replays_until_kept)) + 2
    entry.replays_until_kept = replays
    return entry.kept >= 2 * _CALLS
