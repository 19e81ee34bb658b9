"""Calls of a signature that its graph cannot serve. They run uncaptured.

A backward's graph may use the memory of arguments that calls give away (bindings/tensors/donation.h).
It is verified with that memory only, so it cannot serve a call that retains them: the program holds an
activation, or calls backward with ``retain_graph``. Nor a call on a stream that the program may
destroy, or whose arguments have other storages: what a forward's graph saves may lie together in
blocks (bindings/tensors/saved_blocks.h).

If there are many such calls, the signature is recorded again: as such calls are, if they give their
arguments away in other storages, else for a graph that does not use the memory of its arguments.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pygraph import runtime, signal_exceptions
from pygraph.gpu import current

if TYPE_CHECKING:
    from pygraph import _engine

# A signature is recorded again after this many calls in a row that do not fit its graph, or once more
# than one call in three does not.
_CALLS = 8
# Recordings of a signature with donated memory, in a row and each of them in use for only so many
# replays: further ones would not fit either.
_MOST_RECORDINGS = 3
_FEW_REPLAYS = 1000


@dataclasses.dataclass
class DonationState:
    """Whether a signature's graph may use donated memory, and how often calls do not fit it.

    recordings: how many graphs in a row were in use for a short time because of such calls.
    misfit_score: a leaky bucket: 2 more for each call that does not fit, 1 less for each replay.
    score_updated_at: the graph's replays at its last update.
    """

    is_allowed: bool = True
    recordings: int = 0
    misfit_score: int = 0
    score_updated_at: int = 0

    def anew(self, are_given_away: bool, replays: int) -> DonationState:
        """That of the next recording.

        are_given_away: whether the last call that did not fit gave away the arguments whose memory the
        graph uses, in other storages. replays: of the graph."""
        recordings = 1 + (self.recordings if replays < _FEW_REPLAYS else 0)
        return DonationState(are_given_away and recordings < _MOST_RECORDINGS, recordings)

    def note_misfit(self, replays: int) -> bool:
        """Counts a call that does not fit the graph. Returns whether to record the signature again.

        replays: of the graph, so far."""
        leaked = replays - self.score_updated_at
        self.misfit_score = max(0, self.misfit_score - leaked) + 2
        self.score_updated_at = replays
        return self.misfit_score >= 2 * _CALLS


def fits(args: list[Any], graph: _engine.CapturedGraph) -> bool:
    """Whether the call gives away what the graph uses, in the storages that it had in the recording."""
    if not graph.donated:
        return True
    try:
        return graph.gives_away(args)
    except RuntimeError as error:  # of the driver, asked for the stream
        signal_exceptions.pass_on(error)
        return False


def are_given_away(args: list[Any], graph: _engine.CapturedGraph, device: int) -> bool:
    """Whether only the call holds the arguments whose memory the graph uses, in whatever storages, and
    whether its stream lasts."""
    if not current.stream_lasts(device):
        return False
    groups = runtime.engine().given_away(args)
    return {i for tensors in groups for i in tensors.positions}.issuperset(graph.donated)
