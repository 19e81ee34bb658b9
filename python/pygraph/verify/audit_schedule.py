"""When a graph is audited (docs/explanation/audits.md), and the results of its audits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_EARLY = (100, 1000)
_INTERVAL = 10_000
_SHARE = 1e-3  # of the time that a graph's calls take
# Calls until another try of an audit that was not possible: for want of memory, and for other reasons.
_LATER, _SOON = 1000, 10


@dataclasses.dataclass
class Audits:
    """The audits of one graph. Replays are counted as the graph counts them.

    In an audited call the graph makes one replay, on clones, so each call is one replay. Only the
    thread that holds the record lock may change this object.
    """

    interval: int | None = None  # calls between audits; None: the schedule above, 0: there are none
    first: int = 0  # calls in a row that are audited at the beginning, whatever the interval
    made: int = 0
    failed: int = 0
    skipped: int = 0
    extra: int = 0  # replays that were no calls: before the first one, and of thorough checks
    good_at: int = 0  # number of replays when the graph was last found right
    seconds: float = 0.0  # that all audits have taken
    last_seconds: float = 0.0
    latency: float = 0.0  # of one replay, in seconds
    suspects: Sequence[int] = ()  # results that differ; the next call is checked thoroughly
    visible: Sequence[int] = ()  # the written inputs among the results in which `suspects` count
    uncheckable: int = 0  # calls that could not be compared with the audited one
    since_good: int = 0  # replays from the last good audit to the one that failed

    def due_at(self, replays: int) -> int | None:
        """The number of replays that the graph will have made when the next audit is due. None:
        never."""
        if self.is_among_first(replays):
            return replays
        if self.interval == 0:
            return None
        return max(replays, self.extra + self._due_call(replays - self.extra) - 1)

    def is_among_first(self, replays: int) -> bool:
        """Whether the next call of a graph that has made ``replays`` replays is one of the first
        ``first`` ones."""
        return replays - self.extra < self.first

    def _due_call(self, calls: int) -> int:
        interval = self.interval or _INTERVAL
        due = (calls // interval + 1) * interval
        due = min([due, *(early for early in _EARLY if early > calls)])
        if self.interval is None and due > _EARLY[-1] and self.latency > 0:
            affordable = (self.seconds + self.last_seconds) / (_SHARE * self.latency)
            due = max(due, math.ceil(affordable))
        return due

    def retry_at(self, replays: int) -> int:
        """As ``due_at``, after an audit that found too little memory."""
        return replays + min(self.interval or _LATER, _LATER)

    def soon(self, replays: int) -> int:
        """As ``due_at``, after an audit that was not possible for another reason."""
        return replays + _SOON

    def replays_since_good(self, replays: int | None) -> int:
        """Replays since the graph was last found right.

        replays: of the graph; None if the graph was dropped, or does not exist yet.
        """
        if self.suspects or replays is None:
            return self.since_good
        return replays - self.good_at

    def note_seconds(self, seconds: float, goes_on: bool = False) -> None:
        """Adds the duration of an audit, or of its thorough check (``goes_on``)."""
        self.seconds += seconds
        self.last_seconds = seconds + (self.last_seconds if goes_on else 0.0)
