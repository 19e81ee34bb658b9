"""Decides when a signature is worth a recording, so that programs with varying shapes do not record all
the time."""

from __future__ import annotations

import dataclasses

# The number of signatures that are recorded at their second call; further ones must first use as much
# time as a recording. Integer arguments mean that shapes vary, as the compiler was told or has seen.
_RECORDED_AT_ONCE = 2
_RECORDED_AT_ONCE_IF_DYNAMIC = 0
# Memory that is short now may be free later: after the first steps of a training loop, or when another
# program ends. Each try may make PyTorch's allocator empty its cache, so the pauses grow.
_RETRIES = 3
_CALLS_UNTIL_RETRY = 1000
_ASSUMED_SECONDS = 0.01  # a recording of a small function, before the first has shown what it takes
# Recordings of a signature that may fail in threads that have not run the function before. Afterwards
# only threads that have run it record.
MOST_IN_NEW_THREADS = 3
# The number of calls that cannot be recorded, for a reason in the call, after which the next call tries
# again at once. Then the pauses grow, because all calls of a program may be such.
_TRIED_AT_ONCE = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1 << 16  # calls


@dataclasses.dataclass
class Backoff:
    """Pauses between tries, in calls: each is ``factor`` times the one before, or ``longest``."""

    pause: int  # the next one
    factor: int
    longest: int = 1 << 62

    def next(self) -> int:
        pause, self.pause = self.pause, min(self.pause * self.factor, self.longest)
        return pause


@dataclasses.dataclass
class Retries:
    """Failed recordings of one signature whose cause may lie in the call or its thread."""

    in_new_threads: int = 0  # captures that raised in threads that had not run the function before
    of_single_calls: int = 0  # for a reason that lay in the call
    calls_to_skip: int = 0  # until it is tried again
    backoff: Backoff = dataclasses.field(
        default_factory=lambda: Backoff(_FIRST_PAUSE, 2, _LONGEST_PAUSE)
    )

    def is_to_skip(self, is_known: bool) -> bool:
        """Whether a call is not to be recorded. is_known: whether its thread has run the function."""
        if not is_known and self.in_new_threads >= MOST_IN_NEW_THREADS:
            return True
        if self.calls_to_skip > 0:
            self.calls_to_skip -= 1
            return True
        return False

    @property
    def has_more_threads(self) -> bool:
        """Whether one more capture that raises in a new thread is not the last one there."""
        return self.in_new_threads + 1 < MOST_IN_NEW_THREADS

    def note(self, is_transient: bool) -> None:
        """Notes a recording that failed because of the call, or because of its thread."""
        if not is_transient:
            self.in_new_threads += 1
            return
        self.of_single_calls += 1
        if self.of_single_calls > _TRIED_AT_ONCE:
            self.calls_to_skip = self.backoff.next()


class RecordingPolicy:
    """Of one partition. Not thread-safe beyond Python's lock."""

    def __init__(self, max_graphs: int) -> None:
        """max_graphs: how many graphs are kept at a time."""
        self._max_graphs = max_graphs
        self._recordings = 0
        self._seconds = 0.0
        self._dropped = 0
        self._retries_left = _RETRIES
        self._backoff = Backoff(_CALLS_UNTIL_RETRY, 4)

    def note_recording(self, seconds: float) -> None:
        """A signature was recorded, whatever came of it."""
        self._recordings += 1
        self._seconds += seconds

    def note_dropped(self, graphs: int) -> None:
        """So many graphs made room for others."""
        self._dropped += graphs

    def calls_until_retry(self) -> int:
        """After a recording that ran out of memory; 0: it is not tried again."""
        self._retries_left -= 1
        return self._backoff.next() if self._retries_left >= 0 else 0

    def seconds_to_wait(self, has_numbers: bool, is_selected: bool = False) -> float:
        """Host time that a signature's uncaptured calls must use before it is recorded
        (docs/reference/options.md).

        has_numbers: whether there are integers among the arguments.
        is_selected: whether an earlier process has selected a graph for the signature.
        """
        if is_selected and self._dropped == 0:
            return 0.0
        at_once = _RECORDED_AT_ONCE_IF_DYNAMIC if has_numbers else _RECORDED_AT_ONCE
        if self._recordings < at_once:
            return 0.0
        price = self._seconds / self._recordings if self._recordings > 0 else _ASSUMED_SECONDS
        # Whenever new graphs have replaced all kept ones, recordings have gained less.
        return price * (1 << min(self._dropped // self._max_graphs, 60))
