"""Calls of a signature that its graph cannot serve. They run uncaptured.

    kept    A backward's graph may use the memory of arguments that calls give away
            (bindings/donation.h). It is verified in that form only, so it cannot serve a call that
            keeps them: somebody holds an activation, or calls backward with ``retain_graph``.
    moved   A graph with copied inputs (copied_inputs.py) has those that are not copied at one address,
            and writes to none that overlaps another.

Where such calls are no exception, the signature is recorded anew: for a graph that leaves its arguments
alone, or has them at their new address, or copies them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pygraph import runtime
from pygraph.entry import Entry, Form

# So many calls that keep arguments in a row are no exception; with replays in between, where these are
# less than twice as many, some more.
_CALLS = 8
# So often may what should keep its address move, before it is copied as well.
_MOVES = 2


def is_fit(form: Form, graph: Any, args: list[Any]) -> bool:
    """Whether the graph, of that form, can serve the call."""
    if not gives_away(args, graph.donated):
        return False
    return form is Form.RELOCATED or bool(graph.matches(args))


def gives_away(args: list[Any], positions: Sequence[int]) -> bool:
    """Whether nobody but the call holds the arguments at these positions."""
    if not positions:
        return True
    groups = runtime.engine().given_away(args)
    return {i for tensors in groups for i in tensors.positions}.issuperset(positions)


def renewed(entry: Entry, args: list[Any]) -> Entry | None:
    """Counts a call that is not fit. The entry to start over with, where it was one too many."""
    if not gives_away(args, entry.graph.donated):
        return Entry(takes_memory=False) if _is_kept_often(entry) else None
    if entry.form is not Form.COPIED:
        return None
    form = Form.COPIED if entry.moves < _MOVES else Form.ALL_COPIED
    return Entry(form=form, moves=entry.moves + 1, reason=entry.reason)


def _is_kept_often(entry: Entry) -> bool:
    """Counts one call that keeps what the entry's graph uses; whether they are no exception."""
    replays = entry.graph.replays
    entry.kept = max(0, entry.kept - (replays - entry.replays_until_kept)) + 2
    entry.replays_until_kept = replays
    return entry.kept >= 2 * _CALLS
