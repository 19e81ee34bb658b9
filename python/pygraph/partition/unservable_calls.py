"""Calls of a signature that its graph cannot serve. They run uncaptured.

A backward's graph may use the memory of arguments that calls give away (bindings/tensors/donation.h).
It is verified with that memory only, so it cannot serve a call that retains them: the program holds an
activation, or calls backward with ``retain_graph``.

If there are many such calls, the signature is recorded again, for a graph that does not use the memory
of its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pygraph import runtime

# A signature is recorded again after this many calls in a row that retain arguments, or once more than
# one call in three does.
_CALLS = 8


@dataclasses.dataclass
class DonationState:
    """Whether a signature's graph may use donated memory, and how often calls retain it.

    retained_score: a leaky bucket: 2 more for each call that retains a donated argument, 1 less for
    each replay. score_updated_at: the graph's replays at its last update.
    """

    is_allowed: bool = True
    retained_score: int = 0
    score_updated_at: int = 0

    def note_retained(self, replays: int) -> bool:
        """Counts a call that retains memory which the graph uses. Returns whether to record the
        signature again.

        replays: of the graph, so far."""
        leaked = replays - self.score_updated_at
        self.retained_score = max(0, self.retained_score - leaked) + 2
        self.score_updated_at = replays
        return self.retained_score >= 2 * _CALLS


def gives_away(args: list[Any], positions: Sequence[int]) -> bool:
    """Whether only the call holds the arguments at these positions."""
    if not positions:
        return True
    groups = runtime.engine().given_away(args)
    return {i for tensors in groups for i in tensors.positions}.issuperset(positions)
